"""Frames of a crew's channels: what another machine may write, and what ends its channel."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.errors import MessageError
from barnraise.peering.limits.rate_limit import PIECE_BYTES
from barnraise.protocol.messages import MAX_FRAME_BYTES
from barnraise.training.crew.crew_frames import (
    CrewPiece,
    PayloadId,
    PieceInbox,
    PieceKind,
    pack_control,
    unpack,
)
from barnraise.training.crew.crew_messages import (
    MAX_FRAGMENTS,
    EndRoundTask,
    Norms,
    Order,
    Ping,
    StepDecision,
    StepTask,
)

FINITE = st.floats(allow_nan=False, allow_infinity=False)
IDS = st.builds(
    PayloadId,
    st.sampled_from(PieceKind),
    st.integers(0, 1 << 48),
    st.integers(0, 65_535),
    st.integers(-257, 257),
)


def pieces_of(of, data, size=100, epoch=1):
    """Return a payload's pieces of `size` bytes."""
    return [
        CrewPiece(epoch, of, len(data), offset, data[offset : offset + size])
        for offset in range(0, len(data), size)
    ]


@given(of=IDS, data=st.binary(min_size=1, max_size=300), epoch=st.integers(0, 1 << 60))
def test_piece_is_read_as_it_was_written(of, data, epoch):
    piece = CrewPiece(epoch, of, 1000, 700, data)
    found = unpack(piece.pack())
    assert isinstance(found, CrewPiece)
    assert (found.epoch, found.payload, found.total, found.offset) == (epoch, of, 1000, 700)
    assert bytes(found.data) == data


@given(loss=FINITE, norm=FINITE, rate=FINITE)
def test_numbers_of_messages_have_the_same_bits_when_read(loss, norm, rate):
    decision = StepDecision(epoch=1, number=2, verdict="apply", loss=loss, norm=norm)
    order = Order(epoch=1, number=2, task=StepTask(rate_scale=rate, position=3))
    norms = Norms(epoch=1, number=2, norms=[norm, None, loss])
    for message in (decision, order, norms):
        found = unpack(pack_control(message))
        assert found == message and repr(found) == repr(message)


def test_largest_messages_fit_a_frame():
    longest = [-math.pi * 1e-200] * MAX_FRAGMENTS
    norms = Norms(epoch=1 << 62, number=1 << 48, norms=longest)
    assert len(pack_control(norms)) < MAX_FRAME_BYTES
    payload = PayloadId(PieceKind.BOUNDARY, 1 << 48, 65_535, -257)
    piece = CrewPiece(1, payload, PIECE_BYTES, 0, bytes(PIECE_BYTES))
    assert len(piece.pack()) < MAX_FRAME_BYTES


@given(frame=st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_refused_with_a_sentence(frame):
    for each in (frame, b"\x00" + frame, b"\x01" + frame):
        try:
            unpack(each)
        except MessageError as error:
            assert str(error).isprintable() and len(str(error)) < 300


@pytest.mark.parametrize(
    "text",
    [
        b'{"type":"decision","epoch":1,"number":1,"verdict":"maybe"}',
        b'{"type":"decision","epoch":1,"number":1,"verdict":"apply","norm":NaN}',
        b'{"type":"norms","epoch":1,"number":1,"norms":[%s1]}' % (b"1," * MAX_FRAGMENTS),
        b'{"type":"order","epoch":1,"number":-1,"task":{"kind":"leave"}}',
        b'{"type":"order","epoch":1,"number":1,"task":{"kind":"unknown"}}',
        b'{"type":"reply","epoch":1,"number":1,"problem":"%s"}' % (b"x" * 1001),
    ],
)
def test_message_out_of_bounds_is_refused(text):
    with pytest.raises(MessageError, match="malformed"):
        unpack(b"\x00" + text)


def test_scheme_of_a_round_must_be_one():
    fields = dict(fragments=[], weight=1, carries_residual=False, has_momentum=True, flushes=True)
    with pytest.raises(ValueError, match="scheme"):
        EndRoundTask(scheme="dense3", **fields)
    assert isinstance(unpack(pack_control(Ping())), Ping)


# ---- the inbox -----------------------------------------------------------------------------------

BOUNDARY = PayloadId(PieceKind.BOUNDARY, 5, 0, 3)
NEXT_PART = PayloadId(PieceKind.BOUNDARY, 5, 1, 3)
LATER = PayloadId(PieceKind.BOUNDARY, 6, 0, 3)
DATA = bytes(range(250))


def require_size(of, total):
    if total != len(DATA):
        raise MessageError("a wrong size")


@pytest.fixture
def inbox():
    """Return the inbox of a machine at order 5 that expects payloads of one size."""
    inbox = PieceInbox(require_size)
    inbox.start_order(5)
    return inbox


@given(size=st.integers(1, 300))
def test_payload_arrives_in_pieces_of_any_size(size):
    inbox = PieceInbox(require_size)
    complete = [inbox.accept(piece) for piece in pieces_of(BOUNDARY, DATA, size)]
    assert complete == [False] * (len(complete) - 1) + [True]
    assert inbox.has(BOUNDARY) and inbox.pop(BOUNDARY) == DATA and not inbox.has(BOUNDARY)


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        (lambda first, _: [*first, *first], "twice"),
        (lambda first, _: [first[1]], "middle"),
        (lambda first, _: [first[0], first[2]], "does not follow"),
        (lambda first, _: [first[0], first[0]], "before the one before it"),
        (lambda first, other: [first[0], other[0]], "before the one before it"),
        (lambda first, other: [first[0], other[1]], "does not follow"),
        (lambda *_: pieces_of(BOUNDARY, DATA + b"x"), "wrong size"),
    ],
)
def test_piece_out_of_order_twice_or_of_wrong_size_is_refused(inbox, chosen, reason):
    with pytest.raises(MessageError, match=reason):
        for piece in chosen(pieces_of(BOUNDARY, DATA), pieces_of(NEXT_PART, DATA)):
            inbox.accept(piece)


def test_payload_of_a_cancelled_step_is_dropped(inbox):
    inbox.start_order(6)
    assert not any(inbox.accept(piece) for piece in pieces_of(BOUNDARY, DATA))
    assert not inbox.has(BOUNDARY)


def test_payload_cut_short_by_a_cancelled_step_is_followed_by_the_next(inbox):
    inbox.accept(pieces_of(BOUNDARY, DATA)[0])
    assert [inbox.accept(piece) for piece in pieces_of(LATER, DATA)][-1]
    inbox.start_order(6)
    assert inbox.has(LATER)


def test_sender_that_is_orders_ahead_stores_those_of_one_order_only(inbox):
    for number in range(6, 40):
        of = PayloadId(PieceKind.BOUNDARY, number, 0, 3)
        for piece in pieces_of(of, DATA):
            inbox.accept(piece)
    assert [n for n in range(6, 40) if inbox.has(PayloadId(PieceKind.BOUNDARY, n, 0, 3))] == [39]
