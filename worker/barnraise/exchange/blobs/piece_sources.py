"""Find out who sent false bytes of a blob whose pieces came from several peers. Pure.

Anybody may send a piece of a blob that is on its way. If the whole is not what its digest says and
one peer sent all of it, that peer lied. If several did, any of them may be honest: nobody is
blamed, the blob is *contested*, and it begins again from one peer alone, the one that it is
requested from.
"""

from dataclasses import dataclass, field

EARLIER = "earlier"  # stands for the senders of what was on the disk when this process started


@dataclass
class _Pieces:
    """The pieces of one blob."""

    sources: set[str] = field(default_factory=set[str])  # who sent bytes that are here
    is_contested: bool = False  # whether bytes of several peers were false together
    # The peer whose pieces count while it is contested; None: nobody's.
    only_source: str | None = None
    attempt: int = 0  # how often it began again


class PieceSources:
    """The peers that sent the pieces of incomplete blobs."""

    def __init__(self) -> None:
        self._blobs: dict[str, _Pieces] = {}

    def accepts(self, digest: str, source: str) -> bool:
        """Return whether pieces of this blob from this peer count."""
        pieces = self._blobs.get(digest)
        return pieces is None or not pieces.is_contested or pieces.only_source == source

    def attempt(self, digest: str) -> int:
        """Return how often this blob began again: pieces from before then do not count."""
        pieces = self._blobs.get(digest)
        return pieces.attempt if pieces else 0

    def add(self, digest: str, source: str, present: int) -> None:
        """Record that a peer sends bytes that continue those which are here."""
        pieces = self._blobs.setdefault(digest, _Pieces())
        if present and not pieces.sources:
            pieces.sources.add(EARLIER)
        pieces.sources.add(source)

    def on_corrupt(self, digest: str, source: str) -> bool:
        """Record that a complete blob is false, after a piece from `source`.

        Returns:
            Whether this peer alone sent it; otherwise the blob is contested from now on.
        """
        pieces = self._blobs.setdefault(digest, _Pieces())
        is_guilty = pieces.sources <= {source}
        pieces.sources = set()
        pieces.only_source = None
        pieces.attempt += 1
        pieces.is_contested = pieces.is_contested or not is_guilty
        return is_guilty

    def request_from(self, digest: str, source: str) -> bool:
        """Record that a blob is requested from a peer.

        Returns:
            Whether it is contested, and what is here of it came from another peer: it begins again.
        """
        pieces = self._blobs.get(digest)
        if pieces is None or not pieces.is_contested or pieces.only_source == source:
            return False
        pieces.only_source = source
        pieces.sources = set()
        pieces.attempt += 1
        return True

    def forget(self, digest: str) -> None:
        """Forget a blob that is complete or no longer wanted."""
        self._blobs.pop(digest, None)
