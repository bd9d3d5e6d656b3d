"""Plan random faults of a site from a seed. Pure."""

import random
from dataclasses import dataclass
from enum import StrEnum

TARGETS = ("site", "celery", "beat", "postgres", "valkey")  # names of the site's processes
# Of one process in a minute. With the fifth failure its supervisor rightly gives up.
MAX_ENDS_A_MINUTE = 2
PAIR_SHARE = 0.4  # of the faults that hit two processes at once
LONGEST_PAUSE = 0.5  # seconds between the end of a fault and the next one
LONGEST_OTHER_SECONDS = 4.0  # of a fault that suspends nothing
# Of the uniform number that a duration is drawn with: most processes are suspended for seconds, as
# 40 suspensions for up to a minute would take most of the test's time otherwise.
SUSPENSION_SKEW = 2.0


class FaultKind(StrEnum):
    """What happens to a process."""

    KILL = "kill"
    """It is ended by SIGKILL."""
    STOP = "stop"
    """It is suspended by SIGSTOP, and continued later."""
    CUT = "cut"
    """No byte passes on its connections, and they continue later, as after lost packets."""
    RESET = "reset"
    """Its connections are closed, and new ones are refused."""
    FULL = "full"
    """The file system of its files has no space left."""
    SLOW = "slow"
    """It stands still most of the time, for tenths of a second, as if it waited for its disk."""


@dataclass(frozen=True)
class Hit:
    """A fault of one process."""

    kind: FaultKind
    target: str

    @property
    def may_end_it(self) -> bool:
        """Return whether the process may end by it: Postgres does, where it cannot write."""
        return self.kind is FaultKind.KILL or (
            self.kind is FaultKind.FULL and self.target == "postgres"
        )


@dataclass(frozen=True)
class Fault:
    """One or two processes are hit at once.

    Attributes:
        hits: What happens to which process.
        seconds: How long it lasts; a kill has no duration.
        pause: Seconds before it begins.
    """

    hits: tuple[Hit, ...]
    seconds: float
    pause: float

    def __str__(self) -> str:
        hits = " and ".join(f"{hit.kind} {hit.target}" for hit in self.hits)
        return f"{hits} for {self.seconds:.1f} s"


def plan_faults(
    seed: int, count: int, longest_seconds: float, kinds: tuple[FaultKind, ...] = tuple(FaultKind)
) -> list[Fault]:
    """Plan faults; durations are spread over their orders of magnitude.

    Args:
        seed: The same seed gives the same faults.
        count: How many.
        longest_seconds: For which a process is suspended; at least for a second.
        kinds: What can be done on this machine.
    """
    chance = random.Random(seed)
    faults: list[Fault] = []
    now = 0.0
    ends: list[tuple[float, str]] = []  # when a process may end, and which
    while len(faults) < count:
        hits = _choose_hits(chance, kinds)
        seconds = _choose_seconds(chance, {hit.kind for hit in hits}, longest_seconds)
        fault = Fault(hits, seconds, LONGEST_PAUSE * chance.random())
        start = now + fault.pause
        new_ends = [(start, hit.target) for hit in fault.hits if hit.may_end_it]
        recent = [target for at, target in ends if start - at < 60.0]
        if any(recent.count(target) >= MAX_ENDS_A_MINUTE for _, target in new_ends):
            continue
        ends += new_ends
        faults.append(fault)
        now = start + seconds
    return faults


def _choose_seconds(chance: random.Random, kinds: set[FaultKind], longest_seconds: float) -> float:
    part = chance.random()
    if kinds == {FaultKind.KILL}:
        return 0.0
    if FaultKind.STOP in kinds:
        return longest_seconds ** (part**SUSPENSION_SKEW)
    return min(longest_seconds, LONGEST_OTHER_SECONDS) ** part


def _choose_hits(chance: random.Random, kinds: tuple[FaultKind, ...]) -> tuple[Hit, ...]:
    targets = chance.sample(TARGETS, 2 if chance.random() < PAIR_SHARE else 1)
    return tuple(Hit(chance.choice(kinds), target) for target in targets)
