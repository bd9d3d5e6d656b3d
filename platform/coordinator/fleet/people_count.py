"""Count a run's figures by people, so that nobody's keys or word decide alone. Pure.

A person has one value however many machines they enrol. People count whose updates others vouch
for (`vouching`), and the run's owner. Only where none of these reports do all people count.
"""

import statistics
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

P = TypeVar("P", bound=Hashable)

# The count may exceed the tokens that authors signed and others vouch for by a tenth: the newest
# updates have no witnesses yet.
SIGNED_MARGIN_PERCENT = 110
# What a person reports may exceed what others vouch for by this factor: a machine's present speed
# differs from the mean speed of its last updates, and the newest updates have no witnesses yet.
MAX_REPORTED_RATIO = 3.0


@dataclass(frozen=True)
class RunCount:
    """The tokens of a run's ledger, and how many people vouch for that number."""

    tokens: int
    people: int


def count_votes(votes: Iterable[tuple[Hashable, bool]]) -> tuple[int, int]:
    """Return how many people vote yes with a machine, and how many vote, by each (person, vote)."""
    people: dict[Hashable, bool] = {}
    for person, vote in votes:
        people[person] = people.get(person, False) or vote
    return sum(people.values()), len(people)


def counted_people(people: Collection[P], owner: P, vouched: Collection[P]) -> set[P]:
    """Select the owner and vouched people among these; everybody, if there are none of them."""
    return {person for person in people if person == owner or person in vouched} or set(people)


def count_tokens(
    ledgers: Mapping[P, Sequence[int]], owner: P, signed: Mapping[P, int]
) -> RunCount | None:
    """Return the median, over people, of the tokens in their machines' ledgers; None without any.

    Of an even number of people the owner decides between the two values in the middle, and without
    the owner the lower one counts. The result is at most a tenth above what authors signed and
    others vouch for, or what the owner's machines have if that is more: in a run whose owner trains
    with few others nobody may vouch for the owner's own updates.
    """
    values = {person: statistics.median_low(tokens) for person, tokens in ledgers.items() if tokens}
    counted = counted_people(values, owner, signed)
    if not counted:
        return None
    ascending = sorted(values[person] for person in counted)
    tokens = ascending[(len(ascending) - 1) // 2]
    upper = ascending[len(ascending) // 2]
    if owner in counted:
        tokens = min(max(values[owner], tokens), upper)
    if signed:
        limit = sum(signed.values()) * SIGNED_MARGIN_PERCENT // 100
        if owner in counted:
            limit = max(limit, values[owner])
        elif counted & signed.keys():
            limit = max(limit, ascending[0])
        tokens = min(tokens, limit)
    return RunCount(tokens, len(counted))


def sum_over_people(values: Mapping[P, float], owner: P, limits: Mapping[P, float]) -> float:
    """Sum a figure that people's machines report of themselves, bounded by what others saw.

    A vouched person counts at most up to their limit. Any other person counts at most as much as
    the highest of these. The owner of a run, while nobody vouches for the owner, and everybody in a
    run where nobody is vouched for and the owner is away, counts as reported.
    """
    bounded = {
        person: min(value, limits[person]) for person, value in values.items() if person in limits
    }
    if owner in values and owner not in bounded:
        bounded[owner] = values[owner]
    if not bounded:
        return sum(values.values())
    highest = max(bounded.values())
    others = (min(value, highest) for person, value in values.items() if person not in bounded)
    return sum(bounded.values()) + sum(others)
