"""Find what most volunteers have, and decide whether enough of them agree. Pure.

A peer's statement about itself or others is not evidence, and a person may have many keys. What
counts is what more than half of the linked *volunteers* state, and at least two of them. A
machine's own volunteer does not lie to it: another machine of the same volunteer suffices.
"""

from collections.abc import Collection, Mapping

MIN_VOLUNTEERS = 2  # volunteers that must agree, unless one of them is this machine's own


def majority_vector(vectors: Collection[Mapping[str, int]]) -> dict[str, int]:
    """Return the largest version vector that more than half of the vectors reach.

    Each author counts alone. Fewer than half of the volunteers can neither raise a number above
    what an honest one has nor lower it below what every honest one has.

    Args:
        vectors: Author → sequence number, one vector for each volunteer.
    """
    needed = len(vectors) // 2 + 1
    seqs: dict[str, list[int]] = {}
    for vector in vectors:
        for author, seq in vector.items():
            seqs.setdefault(author, []).append(seq)
    return {
        author: sorted(of_author, reverse=True)[needed - 1]
        for author, of_author in sorted(seqs.items())
        if len(of_author) >= needed
    }


def agreed_vector(vectors: Mapping[str, Mapping[str, int]], own: str) -> dict[str, int]:
    """Return the version vector at which to request a snapshot.

    Args:
        vectors: Volunteer → what that volunteer's machines have.
        own: This machine's own volunteer.
    """
    if own in vectors:
        return dict(vectors[own])
    return majority_vector(vectors.values())


def is_agreed(agreeing: Collection[str], voters: Collection[str], own: str) -> bool:
    """Return whether enough volunteers agree.

    Args:
        agreeing: The volunteers that agree.
        voters: All linked volunteers that have something to compare.
        own: This machine's own volunteer.
    """
    is_majority = len(agreeing) >= MIN_VOLUNTEERS and 2 * len(agreeing) > len(voters)
    return own in agreeing or is_majority
