"""Which authors exist: those of whom this machine has seen a valid header with its ticket. Pure.

A State may name any author and any number. Names that this machine does not know are claims: a
bounded number of them is stored for each link, and a few at a time are probed: the link is asked
for the signed header that it claims to have. An honest peer sends it, and the author is known from
then on. Claims that nobody proves are dropped and counted.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from barnraise.protocol.table_sizes import FEW, MANY, store_newest

MAX_CLAIMS_WHILE_JOINING = 5000  # the same, for a machine that knows nobody yet
MAX_PROBES = 8  # headers requested from one link at once
PROBE_SECONDS = 10.0  # for a link to prove a claim
REFUSED_SECONDS = 300.0  # for which an unproved claim of a link is ignored
MAX_AUTHORS_PER_KEY = 32  # such authors of one key


@dataclass(frozen=True)
class AuthorClaim:
    """What a link claims to have of an author."""

    seq: int  # sequence number of the last update
    pruned: int = 0  # sequence number up to which it has no payloads


@dataclass
class LinkClaims:
    """The unknown authors that one link names."""

    # Author → claim.
    waiting: dict[str, AuthorClaim] = field(default_factory=dict[str, AuthorClaim])
    # Author → when the probe of its claim fails, in seconds.
    probes: dict[str, float] = field(default_factory=dict[str, float])
    # Author → until when further claims are ignored, in seconds.
    refused: dict[str, float] = field(default_factory=dict[str, float])


class AuthorRegister:
    """The authors that exist for one machine, and the claims of links about others.

    Attributes:
        ignored: How many claims were dropped because nobody proved them or there were too many.
    """

    def __init__(self) -> None:
        self.ignored = 0
        self._seen: dict[str, dict[str, None]] = {}  # key → its authors with a valid header
        self._claims: dict[str, LinkClaims] = {}  # by link

    # ---- authors

    def add(self, author: str) -> None:
        """Record that a valid header of this author, with its ticket, was seen."""
        key = author.partition(".")[0]
        of_key = self._seen.get(key, {})
        store_newest(of_key, author, None, MAX_AUTHORS_PER_KEY)
        store_newest(self._seen, key, of_key, MANY)

    def is_seen(self, author: str) -> bool:
        """Return whether a valid header of this author was seen."""
        return author in self._seen.get(author.partition(".")[0], ())

    # ---- claims

    def record_claim(self, key: str, author: str, claim: AuthorClaim, most: int) -> None:
        """Record what a link claims of an unknown author, unless it claims of the most."""
        claims = self._claims.setdefault(key, LinkClaims())
        if author in claims.refused:
            return
        if author in claims.waiting or len(claims.waiting) < most:
            claims.waiting[author] = claim
        else:
            self.ignored += 1

    def pop_claims(self, author: str) -> Iterator[tuple[str, AuthorClaim]]:
        """Yield and remove each link's claim about an author that is known from now on."""
        for key, claims in self._claims.items():
            claims.probes.pop(author, None)
            claims.refused.pop(author, None)
            claim = claims.waiting.pop(author, None)
            if claim is not None:
                yield key, claim

    def on_full_state(self, key: str, vector: Mapping[str, int]) -> None:
        """Forget the claims of a link that its full State no longer contains."""
        claims = self._claims.get(key)
        if claims is not None:
            kept = {author: c for author, c in claims.waiting.items() if author in vector}
            claims.waiting = kept
            claims.probes = {author: at for author, at in claims.probes.items() if author in kept}

    def claims_of(self, key: str) -> Mapping[str, AuthorClaim]:
        """Return what a link claims of unknown authors."""
        claims = self._claims.get(key)
        return claims.waiting if claims else {}

    def on_disconnected(self, key: str) -> None:
        """Forget the claims of a link that is gone."""
        self._claims.pop(key, None)

    # ---- probes

    def is_probed(self, key: str, author: str) -> bool:
        """Return whether a link was asked to prove a claim about an author."""
        claims = self._claims.get(key)
        return claims is not None and author in claims.probes

    def choose_probes(self, now: float) -> list[tuple[str, str, int]]:
        """Choose the claims to probe now, and drop those that were not proved in time.

        Returns:
            (link, author, sequence number) of each header to request.
        """
        probes: list[tuple[str, str, int]] = []
        for key, claims in self._claims.items():
            self._drop_failed(claims, now)
            for author, claim in claims.waiting.items():
                if len(claims.probes) >= MAX_PROBES:
                    break
                if author not in claims.probes:
                    claims.probes[author] = now + PROBE_SECONDS
                    probes.append((key, author, claim.seq))
        return probes

    def next_wakeup(self) -> float | None:
        """Return when the next probe fails, in seconds; None if there is none."""
        times = [min(c.probes.values()) for c in self._claims.values() if c.probes]
        return min(times, default=None)

    def _drop_failed(self, claims: LinkClaims, now: float) -> None:
        for author, deadline in list(claims.probes.items()):
            if now >= deadline:
                del claims.probes[author]
                claims.waiting.pop(author, None)
                claims.refused[author] = now + REFUSED_SECONDS
                self.ignored += 1
        for author, until in list(claims.refused.items()):
            if now >= until or len(claims.refused) > FEW:
                del claims.refused[author]
