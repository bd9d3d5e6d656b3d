"""Decide which weights people confirm. Pure.

Weights are confirmed when at least two people report them and these are more than half of the
people who report weights of the same updates; they are disputed when at least two people report
other weights.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

PEOPLE_NEEDED = 2  # to confirm weights, and to dispute them


@dataclass(frozen=True)
class WeightsVote:
    """What people say of one digest: how many report it, and what follows."""

    people: int
    confirmed: bool
    disputed: bool


def count_votes(reported: Iterable[tuple[str, Hashable]]) -> dict[str, WeightsVote]:
    """Count the people who report each digest of the weights at one version vector.

    Each person has one vote, with however many machines. Whose machines report several digests has
    none, because they contradict each other.

    Args:
        reported: (digest, person) of each report.
    """
    digests_by_person: dict[Hashable, set[str]] = defaultdict(set)
    for digest, person in reported:
        digests_by_person[person].add(digest)
    people = {digest: 0 for digests in digests_by_person.values() for digest in digests}
    for digests in digests_by_person.values():
        if len(digests) == 1:
            people[next(iter(digests))] += 1
    voters = sum(people.values())
    return {
        digest: WeightsVote(
            count,
            confirmed=count >= PEOPLE_NEEDED and 2 * count > voters,
            disputed=any(
                other >= PEOPLE_NEEDED for name, other in people.items() if name != digest
            ),
        )
        for digest, count in people.items()
    }
