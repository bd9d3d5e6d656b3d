"""Find what most volunteers have, and decide whether enough of them agree. Pure.

A peer's statement about itself or others is not evidence, and accounts cost nothing. So a vote
costs work: what counts is what volunteers state whose updates this machine's own ledger has held
for a while. A vote weighs as much as its volunteer's tokens, at most the median's. More than half
of the weight of all linked volunteers must agree, and at least two of them. A machine's own
volunteer does not lie to it: another machine of the same volunteer suffices.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

MIN_VOLUNTEERS = 2  # volunteers that must agree, unless one of them is this machine's own


@dataclass(frozen=True)
class Votes:
    """The weight of each volunteer's word, by its work."""

    weights: Mapping[str, int]  # volunteer → weight; others have none
    voters: Collection[str]  # those of them that have worked for long enough to vote

    @classmethod
    def from_work(cls, work: Mapping[str, int], voters: Collection[str]) -> "Votes":
        """Weigh each volunteer by its tokens, at most those of the median.

        Half of all tokens are of volunteers with at most the median's. So the number of volunteers
        who have trained little does not lower it.

        Args:
            work: Volunteer → tokens of its updates.
            voters: The volunteers that may vote.
        """
        most, passed = 0, 0
        for tokens in sorted(work.values()):
            if 2 * passed >= sum(work.values()):
                break
            most, passed = tokens, passed + tokens
        return cls({name: min(tokens, most) for name, tokens in work.items()}, voters)

    def count(self, volunteers: Collection[str]) -> int:
        """Return the weight of the votes of these volunteers."""
        return self.weigh([name for name in volunteers if name in self.voters])

    def weigh(self, volunteers: Collection[str]) -> int:
        """Return the weight of these volunteers, whether they may vote or not."""
        return sum(self.weights.get(name, 0) for name in volunteers)

    def can_decide(self, linked: Collection[str]) -> bool:
        """Return whether enough of the linked volunteers vote."""
        return sum(self.count([name]) > 0 for name in linked) >= MIN_VOLUNTEERS


def count_each_alike(volunteers: Collection[str]) -> Votes:
    """Return one vote for each volunteer. Only a machine's owner may decide that it counts."""
    return Votes(dict.fromkeys(volunteers, 1), volunteers)


def majority_vector(vectors: Mapping[str, Mapping[str, int]], votes: Votes) -> dict[str, int]:
    """Return the largest version vector that more than half of the votes reach.

    Each author counts alone. Fewer than half of the votes can neither raise a number above what an
    honest volunteer has nor lower it below what every honest one has.

    Args:
        vectors: Volunteer → author → sequence number.
        votes: Of the volunteers.
    """
    total = votes.weigh(vectors)
    claims: dict[str, list[tuple[int, int]]] = {}
    for volunteer, vector in vectors.items():
        for author, seq in vector.items():
            claims.setdefault(author, []).append((seq, votes.count([volunteer])))
    agreed: dict[str, int] = {}
    for author, of_author in sorted(claims.items()):
        reaching = 0
        for seq, weight in sorted(of_author, reverse=True):
            reaching += weight
            if 2 * reaching > total:
                agreed[author] = seq
                break
    return agreed


def is_agreed(agreeing: Collection[str], linked: Collection[str], own: str, votes: Votes) -> bool:
    """Return whether enough volunteers agree, of all linked ones with something to compare."""
    is_majority = 2 * votes.count(agreeing) > votes.weigh(linked)
    return own in agreeing or (is_majority and votes.can_decide(agreeing))
