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
# Of the memory that a plan uses, what the next one may use after memory ran out. Other programs
# have then mostly taken 2 to 6 % of it, and each further attempt may use as much less again.
RETRY_SHARE = 0.94
ATTEMPTS = 3  # of smaller plans after memory ran out, one after the other
# After so long without a shortage a plan may use more memory again; twice as long after each
# further shortage, so that a machine does not try for ever.
CALM_SECONDS = 3600.0
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
        shortage: when memory last ran short; None if it never did, or a larger plan was made since.
        shortages: how often it has.
        may_grow: whether memory has sufficed for so long since that a plan may use more again.
        facts: the last ones.
    """

    short_since: float | None = None
    is_short: bool = False
    last_change: float | None = None
    shortage: float | None = None
    shortages: int = 0
    may_grow: bool = False
    facts: MemoryFacts = field(default_factory=lambda: MemoryFacts(0, 0))

    def observe(self, facts: MemoryFacts, now: float) -> "PressureWatch":
        """Return the watch after facts that were measured at `now`, in monotonic seconds."""
        if not is_memory_short(facts):
            calm = CALM_SECONDS * 2 ** (self.shortages - 1)
            may_grow = self.shortage is not None and now - self.shortage >= calm
            return replace(self, short_since=None, is_short=False, may_grow=may_grow, facts=facts)
        since = now if self.short_since is None else self.short_since
        rested = self.last_change is None or now - self.last_change >= PAUSE_SECONDS
        lasts = now - since >= SHORT_SECONDS
        is_short = lasts and rested
        return replace(self, short_since=since, is_short=is_short, may_grow=False, facts=facts)

    def after_change(self, now: float) -> "PressureWatch":
        """Return the watch after a smaller plan was made, or found impossible."""
        return PressureWatch(
            last_change=now, shortage=now, shortages=self.shortages + 1, facts=self.facts
        )

    def after_growth(self, now: float, has_grown: bool) -> "PressureWatch":
        """Return the watch after a larger plan was made, or found impossible for now."""
        return replace(self, shortage=None if has_grown else now, may_grow=False)


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
