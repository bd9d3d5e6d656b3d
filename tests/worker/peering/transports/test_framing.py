"""Frames: what was packed is unpacked, and everything else is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barnraise.errors import MessageError
from barnraise.peering.transports.framing import pack, unpack
from barnraise.protocol import messages
from barnraise.protocol.messages import MAX_FRAME_BYTES


@given(st.binary(max_size=300))
def test_unpack_of_garbage_raises_message_error(data):
    with pytest.raises(MessageError):
        unpack(data)


def test_unpack_returns_the_packed_message_and_payload():
    part = messages.BlobPart(digest="a" * 64, offset=7, total=30)
    message, payload = unpack(pack(part, b"payload"))
    assert message == part and bytes(payload) == b"payload"


@pytest.mark.parametrize(
    "frame",
    [
        (1 << 30).to_bytes(4, "big") + b"{}",
        (10).to_bytes(4, "big") + b"{}",
        (2).to_bytes(4, "big") + b"{}",
        (16).to_bytes(4, "big") + b'{"type":"spell"}',
        b"\0" * (MAX_FRAME_BYTES + 1),
        pack(messages.Goodbye(reason="x")) + b"an unexpected payload",
    ],
)
def test_unpack_of_an_inconsistent_frame_raises_message_error(frame):
    with pytest.raises(MessageError):
        unpack(frame)
