"""Whose turn it is to do what one mirror shall do for all, such as sending a letter. Pure.

Of the mirrors that are alive each duty has one, by rendezvous hashing: all that see the same ones alive agree without
asking. Whoever takes it says so in its log, with an epoch one higher than any before; who finds a higher epoch than its
own has lost the duty, and does nothing more about it. Mirrors that cannot see each other may both do it: what they do
bears one name, so that twice is no worse than once.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from blake3 import blake3

DEAD = 60.0  # seconds unheard after which a mirror counts as dead
TURN = 60.0  # seconds after which one that does not do its duty (it may not know of it) makes room for the next
ALONE = 300.0  # seconds that a mirror waits which hears no other: it may be the one that is cut off


class Turn(Enum):
    DONE = "somebody did it"
    MINE = "ours since before"
    TAKE = "ours from now on"
    LATER = "somebody else's, as long as nothing changes"


@dataclass(frozen=True)
class Taken:
    """What the log says of a duty. `epoch` 0: nobody has taken it."""

    epoch: int = 0
    by: str = ""
    done: bool = False


def ranked(duty: str, mirrors: Collection[str]) -> list[str]:
    """Keys, the one whose duty it is first. Without one of them the order of the others is the same."""
    return sorted(mirrors, key=lambda key: blake3(f"{duty}\0{key}".encode()).digest())


def turn(duty: str, taken: Taken, me: str, unheard: Mapping[str, float], age: float) -> Turn:
    """`unheard`: of each other mirror of the list, seconds since it was last heard of; `age`: seconds since this mirror
    knows of the duty."""
    if taken.done:
        return Turn.DONE
    if taken.by == me:
        return Turn.MINE
    live = {key for key, ago in unheard.items() if ago < DEAD}
    if taken.by in live:
        return Turn.LATER
    died = min((ago - DEAD for key, ago in unheard.items() if key not in live), default=math.inf)
    waited = min(age, died)  # since when the mirrors that are alive are these
    before = ranked(duty, {me, *live}).index(me) * TURN
    return Turn.TAKE if waited >= before + (ALONE if unheard and not live else 0.0) else Turn.LATER
