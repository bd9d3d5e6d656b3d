"""Decide from facts whether other programs need memory that a plan uses, and how much less to use.

Pure. Linux states its pressure in "pressure stall information" (PSI): the share of time in which
some or all tasks waited for memory (Weiner 2018, Documentation/accounting/psi.rst).
"""

from dataclasses import dataclass, field, replace

# Of the last ten seconds, the percentage in which all tasks waited for memory, from which a machine
# is short of it: its owner feels it, and systemd-oomd kills at 60 % over 30 seconds.
PRESSURE_PERCENT = 10.0
LOW_SHARE = 0.04  # of all RAM: with less available, the kernel is about to kill programs
LOW_BYTES = 1_000_000_000  # where a machine has much RAM, less of it suffices
# A shortage that lasts is acted on; a moment's, as when a large program starts, is not.
SHORT_SECONDS = 10.0
PAUSE_SECONDS = 60.0  # from a smaller plan to the next: the averages must follow first

SMALLER = 0.85  # of the memory that was short, what the next plan may use at most
SMALLEST = 0.25  # and at least: a plan that uses very little is slow for hours


@dataclass(frozen=True)
class MemoryFacts:
    """What is known of a machine's memory at one moment.

    Attributes:
        total: bytes that this process could use at most.
        available: bytes that can be used without other programs being slowed down.
        stalled: percentage of the last ten seconds in which all tasks waited for memory; None where
            the system does not state it.
    """

    total: int
    available: int
    stalled: float | None = None


def is_memory_short(facts: MemoryFacts) -> bool:
    """Return whether little memory is available now, or programs wait for it."""
    stalls = facts.stalled is not None and facts.stalled >= PRESSURE_PERCENT
    return stalls or facts.available < low_mark(facts.total)


def low_mark(total: int) -> int:
    """Return the bytes below which too little memory is available."""
    return int(min(LOW_BYTES, LOW_SHARE * total))


def smaller_budget(planned: int, facts: MemoryFacts) -> int:
    """Return the bytes that a smaller plan may use than the one that uses `planned` bytes now."""
    missing = max(0, 2 * low_mark(facts.total) - facts.available)
    return max(int(SMALLEST * planned), min(int(SMALLER * planned), planned - missing))


@dataclass(frozen=True)
class PressureWatch:
    """Remember for how long memory has been short, and when a smaller plan was made.

    Attributes:
        short_since: when the current shortage began; None while there is none.
        is_short: whether it has lasted long enough to act on.
        last_change: when the last smaller plan was made.
        facts: the last ones.
    """

    short_since: float | None = None
    is_short: bool = False
    last_change: float | None = None
    facts: MemoryFacts = field(default_factory=lambda: MemoryFacts(0, 0))

    def observe(self, facts: MemoryFacts, now: float) -> "PressureWatch":
        """Return the watch after facts that were measured at `now`, in monotonic seconds."""
        if not is_memory_short(facts):
            return replace(self, short_since=None, is_short=False, facts=facts)
        since = now if self.short_since is None else self.short_since
        rested = self.last_change is None or now - self.last_change >= PAUSE_SECONDS
        lasts = now - since >= SHORT_SECONDS
        return replace(self, short_since=since, is_short=lasts and rested, facts=facts)

    def after_change(self, now: float) -> "PressureWatch":
        """Return the watch after a smaller plan was made, or found impossible."""
        return PressureWatch(last_change=now, facts=self.facts)


def parse_pressure(text: str) -> float | None:
    """Return the percentage of the last ten seconds in which all tasks waited, from a PSI file."""
    for line in text.splitlines():
        kind, _, averages = line.partition(" ")
        values = dict(part.split("=", 1) for part in averages.split() if "=" in part)
        if kind == "full" and "avg10" in values:
            try:
                return float(values["avg10"])
            except ValueError:
                return None
    return None
