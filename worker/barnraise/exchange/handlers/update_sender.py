"""What a link sends of updates and blobs: frames read from files one at a time, as the channel drains."""

from collections.abc import Callable, Iterable

from barnraise.exchange.gossip.requests import AUTHOR_WINDOW
from barnraise.exchange.ledger.blob_store import BlobStore
from barnraise.exchange.ledger.ledger import Ledger
from barnraise.exchange.network.connection import PIECE_BYTES, Frames
from barnraise.exchange.network.framing import pack
from barnraise.protocol import messages


def asked(ledger: Ledger, ask: messages.UpdateRequest) -> Iterable[int]:
    """The numbers of what a peer asks for, as far as it may be here; of headers alone the last first, as it knows an
    earlier one by the later."""
    if ask.headers:
        return range(ask.last, max(ask.first, ask.last - AUTHOR_WINDOW + 1) - 1, -1)
    return range(
        ask.first, min(ask.last, ask.first + AUTHOR_WINDOW - 1, ledger.head(ask.author).seq) + 1
    )


def update_frames(
    ledger: Ledger,
    author: str,
    seq: int,
    whole: bool,
    ticket: Callable[[str], messages.Signed | None],
    lacks: Callable[[], bool],
) -> Frames:
    """An update's signed header with its author's ticket, then its payloads; no further once the peer has it. The
    header alone if not `whole`, and of an update that a verdict names. Nothing where its payloads are not here."""
    if (signed := ledger.header(author, seq)) is None or (whole and not lacks()):
        return
    update = messages.Update.model_validate_json(signed.body)
    whole = whole and not ledger.verdicts.is_retracted(author, seq)
    if whole and not all(ledger.blobs.has(part.digest) for part in update.fragments):
        return
    yield pack(messages.UpdatePush(header=signed, ticket=ticket(update.peer)))
    for part in update.payload_parts if whole else ():
        for frame in blob_frames([ledger.blobs], part.digest, 0):
            if not lacks():
                return
            yield frame


def blob_frames(shelves: list[BlobStore], digest: str, offset: int) -> Frames:
    """A blob from `offset` on, from whichever shelf has it; an empty one is one empty piece."""
    for blobs in shelves:
        if (total := blobs.size(digest)) is None:
            continue
        while offset < total or total == 0:
            try:
                data = blobs.read(digest, offset, PIECE_BYTES)
            except FileNotFoundError:  # a cut that was let go of meanwhile
                return
            yield pack(messages.BlobPart(digest=digest, offset=offset, total=total), data)
            offset += len(data)
            if not data:
                return
        return
