"""What a link sends of updates and blobs: frames read from files one at a time, as the channel drains."""

from collections.abc import Callable

from barnraise import wire
from barnraise.exchange.blobs import Blobs
from barnraise.exchange.frames import pack
from barnraise.exchange.ledger import Ledger
from barnraise.exchange.link import PIECE, Frames


def update_frames(
    ledger: Ledger, author: str, seq: int, ticket: Callable[[str], wire.Signed | None], lacks: Callable[[], bool]
) -> Frames:
    """An update's signed header with its author's ticket, then its payloads; no further once the peer has it."""
    signed = ledger.header(author, seq)
    update = next((update for _, update in ledger.headers(author, seq, seq)), None)
    if signed is None or update is None or not lacks():
        return
    if not all(ledger.blobs.has(part.digest) for part in update.fragments):
        return  # let go of since it was asked for
    yield pack(wire.Push(header=signed, ticket=ticket(update.peer)))
    for part in update.fragments:
        for frame in blob_frames([ledger.blobs], part.digest, 0):
            if not lacks():
                return
            yield frame


def blob_frames(shelves: list[Blobs], digest: str, offset: int) -> Frames:
    """A blob from `offset` on, from whichever shelf has it; an empty one is one empty piece."""
    for blobs in shelves:
        if (total := blobs.size(digest)) is None:
            continue
        while offset < total or total == 0:
            try:
                data = blobs.read(digest, offset, PIECE)
            except FileNotFoundError:  # a cut that was let go of meanwhile
                return
            yield pack(wire.Part(digest=digest, offset=offset, total=total), data)
            offset += len(data)
            if not data:
                return
        return
