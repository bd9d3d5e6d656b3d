"""Count the training tokens of a set of updates, so that nobody counts the same time twice. Pure.

Each update states no more tokens than its ticket allows for the time since its author's previous
update (`validation`). A key may have several incarnations, each with a chain of its own, and could
state the same time in all of them. So the tokens of one key are counted once for each moment: an
incarnation's tokens are spread evenly over the time from its start to its last update, and what
falls into the time of an incarnation that started earlier does not count. An honest machine's
incarnations follow each other, and all their tokens count. The count depends only on the set of
updates, not on the order in which they arrived.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TokenClaim:
    """What one author, which is one incarnation of a key, states.

    Attributes:
        started_ms: When it began to train, in milliseconds since 1970.
        time_ms: When it signed its last update.
        tokens: The tokens of its updates that count.
    """

    started_ms: int
    time_ms: int
    tokens: int


def count_tokens(claims: Mapping[str, TokenClaim]) -> int:
    """Return the tokens that count of all authors.

    Args:
        claims: Author (key.incarnation) → what it states.
    """
    by_key: dict[str, list[tuple[str, TokenClaim]]] = {}
    for author, claim in claims.items():
        by_key.setdefault(author.partition(".")[0], []).append((author, claim))
    return sum(_count_key(authors) for authors in by_key.values())


def _count_key(authors: Iterable[tuple[str, TokenClaim]]) -> int:
    """Return the tokens that count of one key's authors."""
    counted = 0
    covered_until_ms = 0
    for _, claim in sorted(authors, key=lambda item: (item[1].started_ms, item[0])):
        duration_ms = claim.time_ms - claim.started_ms
        new_ms = max(0, claim.time_ms - max(claim.started_ms, covered_until_ms))
        if new_ms:
            counted += claim.tokens * new_ms // duration_ms
        covered_until_ms = max(covered_until_ms, claim.time_ms)
    return counted
