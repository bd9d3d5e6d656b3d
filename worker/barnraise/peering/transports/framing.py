"""Encode and decode frames. Pure.

A frame is a 4-byte big-endian header length, the header (a message as JSON), then raw payload.
"""

from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from barnraise.errors import MessageError
from barnraise.protocol.fork_proof import Fork
from barnraise.protocol.messages import (
    HEADER_LENGTH_BYTES,
    MAX_FRAME_BYTES,
    MAX_HEADER_BYTES,
    BlobPart,
    LineTestPart,
    PeerMessage,
)
from barnraise.protocol.mirror_list import MirrorLists
from barnraise.protocol.opinions import SignedOpinions
from barnraise.protocol.trials import TrialUpdate
from barnraise.protocol.types import Message

ReceivedMessage = PeerMessage | Fork | SignedOpinions | TrialUpdate | MirrorLists
peer_message: TypeAdapter[ReceivedMessage] = TypeAdapter(
    Annotated[ReceivedMessage, Field(discriminator="type")]
)


def pack(message: Message, payload: bytes = b"") -> bytes:
    """Encode one of our own messages as a frame.

    It always fits: every list and payload is bounded where the message is built.
    """
    header = message.model_dump_json(exclude_none=True).encode()
    frame = len(header).to_bytes(HEADER_LENGTH_BYTES, "big") + header + payload
    assert len(header) <= MAX_HEADER_BYTES and len(frame) <= MAX_FRAME_BYTES, (
        f"{type(message).__name__} of {len(frame)} bytes"
    )
    return frame


def header_size(frame: bytes) -> int:
    """Return the bytes of a frame's header as it states them, at most those of the frame."""
    return min(len(frame), int.from_bytes(frame[:HEADER_LENGTH_BYTES], "big"))


def unpack(frame: bytes) -> tuple[ReceivedMessage, memoryview]:
    """Decode a frame that a peer sent.

    Returns:
        The message, and a view of its payload in `frame`.

    Raises:
        MessageError: When the frame is not one of the protocol.
    """
    if not HEADER_LENGTH_BYTES <= len(frame) <= MAX_FRAME_BYTES:
        raise MessageError(
            f"a frame of {len(frame)} bytes; {HEADER_LENGTH_BYTES} to {MAX_FRAME_BYTES} are allowed"
        )
    length = int.from_bytes(frame[:HEADER_LENGTH_BYTES], "big")
    if length > MAX_HEADER_BYTES or HEADER_LENGTH_BYTES + length > len(frame):
        raise MessageError(f"a frame of {len(frame)} bytes says its header has {length}")
    try:
        message = peer_message.validate_json(
            frame[HEADER_LENGTH_BYTES : HEADER_LENGTH_BYTES + length]
        )
    except ValidationError as error:  # pydantic's own text is a paragraph: use its first finding
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise MessageError(
            f"a frame's header is not a message of ours: {where}: {first['msg'][:200]}"
        ) from None
    except ValueError as error:
        raise MessageError(f"a frame's header is not a message of ours: {error}") from None
    payload = memoryview(frame)[HEADER_LENGTH_BYTES + length :]
    if payload and not isinstance(message, BlobPart | LineTestPart):
        raise MessageError(f"a {message.type} carries {len(payload)} bytes of payload")
    return message, payload
