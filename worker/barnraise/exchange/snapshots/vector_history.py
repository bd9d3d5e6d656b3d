"""Remember the version vectors at which coordinators may have confirmed the anchor. Pure.

A coordinator lists confirmed anchors by digests of version vectors. A machine announces its anchor
after each validation, at a multiple of a number of tokens (a milestone), so only the first vectors
after a milestone can be listed. A machine that knows one of them can serve the anchor there.
"""

from collections.abc import Iterable

MAX_MILESTONES = 8  # the newest ones, whose vectors are remembered
MAX_VECTORS = 8  # after each milestone, the first ones
MAX_ENTRIES = 50_000  # authors of all remembered vectors together


class VectorHistory:
    """The first version vectors after each of the last milestones, by digest."""

    def __init__(self) -> None:
        """Start without any."""
        self._milestones: dict[int, dict[str, dict[str, int]]] = {}

    def add(self, vector_digest: str, vector: dict[str, int], milestone: int) -> None:
        """Remember a vector, if it is among the first after its milestone.

        Args:
            vector_digest: The vector's digest.
            vector: Author → sequence number.
            milestone: Number of the milestone before it.
        """
        vectors = self._milestones.setdefault(milestone, {})
        if vector_digest not in vectors and len(vectors) < MAX_VECTORS:
            vectors[vector_digest] = dict(vector)
        while len(self._milestones) > MAX_MILESTONES or (
            len(self._milestones) > 1 and self._count_entries() > MAX_ENTRIES
        ):
            del self._milestones[min(self._milestones)]

    def find_first(self, digests: Iterable[str]) -> dict[str, int] | None:
        """Return the vector of the first of these digests that is known; None if none is."""
        for digest in digests:
            for vectors in self._milestones.values():
                if digest in vectors:
                    return vectors[digest]
        return None

    def _count_entries(self) -> int:
        return sum(len(v) for vectors in self._milestones.values() for v in vectors.values())
