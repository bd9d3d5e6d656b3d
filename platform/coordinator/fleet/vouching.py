"""Decide which of an author's updates others vouch for. Pure.

A witness of an author's signed header states that it has applied every update up to it. Updates
are vouched for when the run's owner or two people, none of them the author, are their witnesses.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

PEOPLE_NEEDED = 2  # witnesses, where none of them is the run's owner


@dataclass(frozen=True)
class WitnessedHead:
    """A signed header up to which one person's machines have applied an author's updates."""

    person: Hashable  # who the witness belongs to
    seq: int  # the update's number
    total: int  # the author's tokens up to and including it
    digest: str  # the header's digest
    previous: str  # the digest of the author's header before it, as the header states it


def vouched_head(
    heads: Iterable[WitnessedHead], author: Hashable, owner: Hashable
) -> WitnessedHead | None:
    """Return the last head of an author up to which others vouch for its updates.

    `author` is the person who owns it, and `owner` the run's owner.

    Returns:
        The head; None without enough witnesses, or if the author signed two histories.
    """
    newest: dict[Hashable, WitnessedHead] = {}
    for head in heads:
        if head.person != author and newest.get(head.person, head).seq <= head.seq:
            newest[head.person] = head
    descending = sorted(newest.values(), key=lambda head: (-head.seq, head.digest))
    if is_contradictory(descending):
        return None
    vouched = descending[PEOPLE_NEEDED - 1 : PEOPLE_NEEDED]
    if owner in newest:
        vouched.append(newest[owner])
    return max(vouched, key=lambda head: head.seq, default=None)


def is_contradictory(descending: Sequence[WitnessedHead]) -> bool:
    """Return whether the author signed two histories: these heads cannot be of one chain."""
    for later, earlier in pairwise(descending):
        if later.seq == earlier.seq and later.digest != earlier.digest:
            return True
        if later.total < earlier.total:
            return True
        if later.seq == earlier.seq + 1 and later.previous != earlier.digest:
            return True
    return False
