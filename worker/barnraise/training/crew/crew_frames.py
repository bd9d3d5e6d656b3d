"""The frames of a crew's channels, and the payloads that arrive in pieces. Pure.

A frame is one byte of its kind, and then a control message as JSON or a piece: a fixed header and
bytes. A machine sends the pieces of a payload one after the other and in order, and the bytes of
the whole must be as many as the roster implies. What breaks a rule ends the channel, with a
sentence; the step is then repeated.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from barnraise.errors import MessageError
from barnraise.peering.limits.rate_limit import PIECE_BYTES
from barnraise.training.crew.crew_messages import ControlMessage, parse_control

MAX_NUMBER = 1 << 48  # of an order
# Kind, epoch, number of the order, part, key, bytes in all, offset.
_PIECE_HEADER = struct.Struct(">BQQHhQQ")
CONTROL_KIND = 0


class PieceKind(IntEnum):
    """What the bytes of a piece belong to."""

    BOUNDARY = 1  # activations or gradients of a step
    ATTACHMENT = 2  # of an order or its reply
    STREAM = 3  # the anchor's outputs for a part of the held-out text


@dataclass(frozen=True)
class PayloadId:
    """What a payload is.

    Attributes:
        kind: of what it is a part.
        number: of the order that it belongs to.
        part: the micro-batch, the attachment or the part of the held-out text.
        key: of a boundary and a stream, under which the activations are stored; else 0.
    """

    kind: PieceKind
    number: int
    part: int
    key: int = 0


@dataclass(frozen=True)
class CrewPiece:
    """A piece of a payload.

    Attributes:
        epoch: of the sender's roster.
        payload: which payload it belongs to.
        total: bytes of the whole payload.
        offset: of this piece.
        data: this piece.
    """

    epoch: int
    payload: PayloadId
    total: int
    offset: int
    data: bytes | memoryview

    def pack(self) -> bytes:
        """Return the piece's frame."""
        of = self.payload
        fields = (of.kind, self.epoch, of.number, of.part, of.key, self.total, self.offset)
        return b"".join((_PIECE_HEADER.pack(*fields), self.data))


def pack_control(message: ControlMessage) -> bytes:
    """Return the frame of a control message."""
    return bytes([CONTROL_KIND]) + message.model_dump_json(exclude_none=True).encode()


def unpack(frame: bytes) -> ControlMessage | CrewPiece:
    """Return what another machine's frame is. A piece's data is a view of the frame.

    Raises:
        MessageError: the bytes are no frame of a crew.
    """
    if not frame:
        raise MessageError("a crew's frame is empty")
    if frame[0] == CONTROL_KIND:
        return parse_control(memoryview(frame)[1:])
    if len(frame) < _PIECE_HEADER.size:
        raise MessageError(f"a crew's frame of {len(frame)} bytes is too short")
    kind, epoch, number, part, key, total, offset = _PIECE_HEADER.unpack_from(frame)
    if kind not in set(PieceKind):
        raise MessageError(f"a crew's frame is of kind {kind}, which does not exist")
    data = memoryview(frame)[_PIECE_HEADER.size :]
    if number > MAX_NUMBER or len(data) > PIECE_BYTES or offset + len(data) > total:
        raise MessageError("a crew's frame states an impossible step or size")
    if not data:
        raise MessageError("a piece of a crew's payload is empty")
    return CrewPiece(epoch, PayloadId(PieceKind(kind), number, part, key), total, offset, data)


class PieceInbox:
    """The payloads that one other machine sends."""

    def __init__(self, check: Callable[[PayloadId, int], None]) -> None:
        """Expect nothing yet.

        `check` raises MessageError unless the machine may send a payload of so many bytes.
        """
        self._check = check
        self._number = 0
        self._incomplete: tuple[PayloadId, int, bytearray] | None = None
        self._complete: dict[PayloadId, bytearray] = {}
        self._seen: set[PayloadId] = set()  # of this machine's order and later ones

    def start_order(self, number: int) -> None:
        """Drop what belongs to earlier orders than this machine's."""
        self._number = number
        self._complete = {of: data for of, data in self._complete.items() if of.number >= number}
        self._seen = {of for of in self._seen if of.number >= number}

    def accept(self, piece: CrewPiece) -> bool:
        """Store a piece; return whether its payload is complete now.

        What belongs to an earlier order, whose step was cancelled, is dropped. The sender may be
        ahead by one order: the lead's channel to this machine may be the slower one. When it sends
        for a still later order, what it sent for the ones between them is void.

        Raises:
            MessageError: it contradicts the protocol; its channel should be closed.
        """
        of = piece.payload
        if of.number < self._number:
            return False
        if piece.offset == 0:
            self._begin(of, piece.total)
        if self._incomplete is None:
            raise MessageError("a crew's payload begins in its middle")
        expected, total, data = self._incomplete
        if of != expected or piece.total != total or piece.offset != len(data):
            raise MessageError("a piece of a crew's payload does not follow the piece before it")
        data += piece.data
        if len(data) < total:
            return False
        self._incomplete = None
        self._complete[of] = data
        return True

    def _begin(self, of: PayloadId, total: int) -> None:
        """Begin a payload; an incomplete one may stay so if its order is over."""
        if self._incomplete is not None and self._incomplete[0].number >= of.number:
            raise MessageError("a crew's payload begins before the one before it has ended")
        self._check(of, total)
        if of in self._seen:
            raise MessageError("a crew's payload was sent twice")
        ahead = {other.number for other in self._seen if other.number > self._number}
        if of.number > self._number and ahead - {of.number}:
            self._seen = {other for other in self._seen if other.number == self._number}
            self._complete = {
                other: data
                for other, data in self._complete.items()
                if other.number == self._number
            }
        self._seen.add(of)
        self._incomplete = of, total, bytearray()

    def has(self, of: PayloadId) -> bool:
        """Return whether a payload is complete."""
        return of in self._complete

    def pop(self, of: PayloadId) -> bytearray:
        """Remove and return a complete payload."""
        return self._complete.pop(of)
