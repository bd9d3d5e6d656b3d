"""Collect neighbours' weights of the current step, and decide whom to wait for. Pure.

The machines that mix are a *roster*: the sorted keys of those with an open channel, this one
included. A machine's place in the roster is its number in the topology. Every step begins with a
beacon to all others: the step's number and the roster's digest. So a machine that another expects
at the same step, but that has another roster or is elsewhere, is not waited for. A neighbour that
is not heard of within the patience is suspected: nobody waits for it until it has caught up.
"""

import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b

from barnraise.errors import MessageError
from barnraise.peering.limits.rate_limit import PIECE_BYTES

MAX_LEAD_STEPS = 512  # by which a neighbour's weights may be ahead; more are not stored
MAX_STORED = 2  # weights of one neighbour: it waits for ours before it sends the third
# Weights beyond those for this step and the next that are stored or on their way, of all neighbours
# together: any number of machines may send theirs, and each is as large as the model.
MAX_SPARE = 4
MAX_STEP = 1 << 48
ROSTER_BYTES = 16
_FRAME_HEADER = struct.Struct(f">BQ{ROSTER_BYTES}sQQ")  # kind, step, roster, bytes in all, offset


class FrameKind(Enum):
    """What a frame is."""

    BEACON = 0  # a machine begins a step; no bytes
    WEIGHTS = 1  # a piece of its weights at the begin of that step
    STATE_REQUEST = 2  # a machine that joins wants a neighbour's weights in 32 bits
    STATE = 3  # a piece of those
    HELLO = 4  # the first frame of a channel, by which the other side learns of it; no bytes


@dataclass(frozen=True)
class MixingFrame:
    """One frame between machines that mix.

    Attributes:
        kind: what it is.
        step: the sender's step.
        roster: digest of the sender's roster.
        total: bytes of the whole payload.
        offset: of this piece.
        data: this piece.
    """

    kind: FrameKind
    step: int
    roster: bytes
    total: int = 0
    offset: int = 0
    data: bytes | memoryview = b""

    def pack(self) -> bytes:
        """Return the frame's bytes."""
        fields = (self.kind.value, self.step, self.roster, self.total, self.offset)
        header = _FRAME_HEADER.pack(*fields)
        return b"".join((header, self.data))

    @classmethod
    def unpack(cls, frame: bytes) -> "MixingFrame":
        """Return the frame of bytes from a neighbour. Its data is a view of them.

        Raises:
            MessageError: The bytes are no frame.
        """
        if len(frame) < _FRAME_HEADER.size:
            raise MessageError(f"a mixing frame of {len(frame)} bytes is too short")
        kind, step, roster, total, offset = _FRAME_HEADER.unpack_from(frame)
        data = memoryview(frame)[_FRAME_HEADER.size :]
        if kind not in {each.value for each in FrameKind}:
            raise MessageError(f"a mixing frame is of kind {kind}, which does not exist")
        if step > MAX_STEP or len(data) > PIECE_BYTES or offset + len(data) > total:
            raise MessageError("a mixing frame states an impossible step or size")
        return cls(FrameKind(kind), step, roster, total, offset, data)


def roster_digest(keys: Iterable[str]) -> bytes:
    """Return the digest of a roster."""
    return blake2b("\n".join(sorted(keys)).encode(), digest_size=ROSTER_BYTES).digest()


class Arrival(Enum):
    """What is known of a neighbour's weights of one step."""

    ARRIVED = "arrived"
    AWAITED = "awaited"
    ABSENT = "absent"  # gone, suspected, elsewhere or of another roster: do not wait


@dataclass(frozen=True)
class GroupArrivals:
    """What the neighbours of one mixing have sent by the end of the wait.

    Attributes:
        payloads: weights that have arrived, encoded, by the sender's key.
        late: keys of neighbours that were still awaited.
        has_gone_on: whether a neighbour that sent nothing has begun a later step.
    """

    payloads: dict[str, bytearray]
    late: tuple[str, ...]
    has_gone_on: bool


@dataclass
class _Neighbour:
    """What one neighbour has sent."""

    step: int = -1  # of its last beacon
    roster: bytes = b""
    suspected: bool = False
    incomplete: tuple[int, bytearray] | None = None  # step and the first bytes of its weights
    # By step: the roster that they were sent to, and their bytes.
    weights: dict[int, tuple[bytes, bytearray]] = field(default_factory=dict)


class StepInbox:
    """The neighbours' beacons and weights."""

    def __init__(self, payload_bytes: int) -> None:
        """Expect nothing yet; everyone's weights have one size and encoding."""
        self._payload_bytes = payload_bytes
        self._neighbours: dict[str, _Neighbour] = {}
        self._step = 0
        self._group_at: Callable[[int], Collection[str]] = lambda _: ()

    def add_neighbour(self, key: str) -> None:
        """Add a neighbour whose channel has opened."""
        self._neighbours[key] = _Neighbour()

    def remove_neighbour(self, key: str) -> None:
        """Remove a neighbour whose channel has closed."""
        self._neighbours.pop(key, None)

    @property
    def neighbours(self) -> list[str]:
        """Return the keys of all neighbours with an open channel."""
        return sorted(self._neighbours)

    def start_step(self, step: int, group_at: Callable[[int], Collection[str]]) -> None:
        """Drop what belongs to earlier steps.

        Args:
            step: the step that begins.
            group_at: returns the keys that this machine mixes with in a step, by its roster.
        """
        self._step = step
        self._group_at = group_at
        for neighbour in self._neighbours.values():
            neighbour.weights = {at: sent for at, sent in neighbour.weights.items() if at >= step}

    def accept(self, key: str, frame: MixingFrame) -> bool:
        """Store a beacon or a piece of weights.

        Returns:
            Whether it may be what somebody waits for: a piece of weights is not, but the last one.

        Raises:
            MessageError: The frame contradicts the protocol; its channel should be closed.
        """
        neighbour = self._neighbours.get(key)
        if neighbour is None:
            return False
        if frame.kind is FrameKind.BEACON:
            neighbour.step, neighbour.roster = frame.step, frame.roster
            neighbour.suspected = neighbour.suspected and frame.step < self._step
        elif frame.kind is FrameKind.WEIGHTS:
            return self._accept_piece(neighbour, frame)
        return True

    def _accept_piece(self, neighbour: _Neighbour, frame: MixingFrame) -> bool:
        """Store a piece of weights; return whether it was the last one."""
        if frame.total != self._payload_bytes:
            raise MessageError(
                f"weights of {frame.total:,} bytes, where this run's have {self._payload_bytes:,}"
            )
        if not self._step <= frame.step <= self._step + MAX_LEAD_STEPS:
            neighbour.incomplete = None  # of a machine that is far ahead or behind
            return False
        if frame.offset == 0:
            neighbour.incomplete = (frame.step, bytearray())
            self._drop_surplus()
        if neighbour.incomplete is None:
            return False  # the rest of weights whose begin was not stored
        step, data = neighbour.incomplete
        if frame.step != step or frame.offset != len(data):
            raise MessageError("a piece of weights does not follow the piece before it")
        data += frame.data
        if len(data) < frame.total:
            return False
        neighbour.weights[step] = (frame.roster, data)
        for latest in sorted(neighbour.weights)[MAX_STORED:]:
            del neighbour.weights[latest]
        neighbour.incomplete = None
        return True

    def _drop_surplus(self) -> None:
        """Drop weights beyond `MAX_SPARE`: first those that will not be mixed, then the latest."""
        spare: list[tuple[bool, int, str, bool]] = []
        groups: dict[int, Collection[str]] = {}
        for key, neighbour in self._neighbours.items():
            steps = [(step, False) for step in neighbour.weights]
            if neighbour.incomplete is not None:
                steps.append((neighbour.incomplete[0], True))
            for step, is_incomplete in steps:
                is_partner = key in groups.setdefault(step, self._group_at(step))
                if not (is_partner and step <= self._step + 1):
                    spare.append((not is_partner, step, key, is_incomplete))
        for _, step, key, is_incomplete in sorted(spare)[MAX_SPARE:]:
            if is_incomplete:
                self._neighbours[key].incomplete = None
            else:
                del self._neighbours[key].weights[step]

    def look_up(self, key: str, step: int, roster: bytes) -> Arrival:
        """Return what is known of a neighbour's weights of this machine's step and roster."""
        neighbour = self._neighbours.get(key)
        if neighbour is None:
            return Arrival.ABSENT
        is_elsewhere = neighbour.step > step or (
            neighbour.step == step and neighbour.roster != roster
        )
        if step in neighbour.weights:
            return Arrival.ARRIVED if neighbour.weights[step][0] == roster else Arrival.ABSENT
        return Arrival.ABSENT if is_elsewhere or neighbour.suspected else Arrival.AWAITED

    def has_all(self, keys: Sequence[str], step: int, roster: bytes) -> bool:
        """Return whether no weights of these neighbours are awaited; see `look_up`."""
        return all(self.look_up(key, step, roster) is not Arrival.AWAITED for key in keys)

    def pop_arrivals(self, keys: Sequence[str], step: int, roster: bytes) -> GroupArrivals:
        """Remove and return what these neighbours have sent; suspect those that are late."""
        found = {key: self.look_up(key, step, roster) for key in keys}
        arrived = [key for key in keys if found[key] is Arrival.ARRIVED]
        late = tuple(key for key in keys if found[key] is Arrival.AWAITED)
        absent = [key for key in keys if found[key] is Arrival.ABSENT]
        payloads = {key: self._neighbours[key].weights.pop(step)[1] for key in arrived}
        for key in late:
            self.suspect(key)
        return GroupArrivals(payloads, late, any(self._is_ahead(key, step) for key in absent))

    def suspect(self, key: str) -> None:
        """Do not wait for a neighbour until it has caught up."""
        if key in self._neighbours:
            self._neighbours[key].suspected = True

    def _is_ahead(self, key: str, step: int) -> bool:
        return key in self._neighbours and self._neighbours[key].step > step

    def leader(self) -> str | None:
        """Return the key of the neighbour that has begun the highest step; None if none has."""
        begun = {key: each.step for key, each in self._neighbours.items() if each.step >= 0}
        return max(begun, key=lambda key: begun[key]) if begun else None

    def find_step(self, key: str) -> int:
        """Return the step that a neighbour has begun; -1 if it has begun none, or is gone."""
        neighbour = self._neighbours.get(key)
        return -1 if neighbour is None else neighbour.step

    def newest_step(self) -> int:
        """Return the highest step that a neighbour has begun; -1 if none has."""
        return max((neighbour.step for neighbour in self._neighbours.values()), default=-1)
