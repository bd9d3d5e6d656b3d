"""Read updates and blobs from files as frames, one at a time, as a channel drains."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from barnraise.exchange.gossip.requests import AUTHOR_WINDOW
from barnraise.ledger.blob_store import BlobStore
from barnraise.ledger.ledger import Ledger
from barnraise.peering.links.connection import Frames
from barnraise.peering.transports.framing import pack
from barnraise.protocol import messages


def requested_seqs(ledger: Ledger, request: messages.UpdateRequest) -> range:
    """Return the sequence numbers to send for a request, as far as they may be here.

    Headers alone are sent last one first: a peer recognises an earlier one by the later, which
    names its digest. A request for what does not exist costs its sender a few bytes, so it must not
    cost this machine a look into the database for each number.
    """
    if request.headers:
        last = min(request.last, ledger.last_seq(request.author))
        first = max(request.first, last - AUTHOR_WINDOW + 1)
        return range(last, first - 1, -1)
    last = min(request.last, request.first + AUTHOR_WINDOW - 1, ledger.head(request.author).seq)
    return range(request.first, last + 1)


@dataclass(frozen=True)
class UpdateToSend:
    """An update and the peer that it is for.

    Attributes:
        author: Its author.
        seq: Its sequence number.
        whole: Whether the payloads are sent too.
        is_needed: Returns whether the peer still lacks the update.
        piece_bytes: Bytes of its payloads in one frame.
    """

    author: str
    seq: int
    whole: bool
    is_needed: Callable[[], bool]
    piece_bytes: int


def update_frames(ledger: Ledger, sending: UpdateToSend) -> Frames:
    """Yield an update's signed header with the ticket that it names, then its payloads.

    The frames end early once the peer has the update. An update that a verdict names is its header
    alone. Nothing is yielded when the payloads, or the ticket, are not here.
    """
    signed = ledger.header(sending.author, sending.seq)
    if signed is None or (sending.whole and not sending.is_needed()):
        return
    update = messages.Update.model_validate_json(signed.body)
    with_payloads = sending.whole and not ledger.verdicts.is_retracted(sending.author, sending.seq)
    if with_payloads and not all(ledger.blobs.has(part.digest) for part in update.fragments):
        return
    ticket = ledger.peer_store.ticket(update.ticket)
    if ticket is None:
        return
    push = messages.UpdatePush(header=signed, ticket=ticket, has_payloads=with_payloads)
    yield pack(push)
    if not with_payloads:
        return
    for part in update.payload_parts:
        for frame in blob_frames([ledger.blobs], part.digest, 0, sending.piece_bytes):
            if not sending.is_needed():
                return
            yield frame


def blob_frames(stores: Sequence[BlobStore], digest: str, offset: int, piece_bytes: int) -> Frames:
    """Yield a blob from `offset` on, from the first store that has it.

    An empty blob is one empty piece.
    """
    for blobs in stores:
        total = blobs.size(digest)
        if total is None:
            continue
        while offset < total or total == 0:
            try:
                data = blobs.read(digest, offset, piece_bytes)
            except FileNotFoundError:  # a snapshot's blob that was deleted meanwhile
                return
            yield pack(messages.BlobPart(digest=digest, offset=offset, total=total), data)
            offset += len(data)
            if not data:
                return
        return
