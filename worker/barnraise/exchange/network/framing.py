"""Encode and decode frames. Pure.

A frame is a 4-byte big-endian header length, the header (a message as JSON), then raw payload.
"""

from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from barnraise.errors import MessageError
from barnraise.exchange.ledger.verdicts import Fork
from barnraise.protocol.messages import LENGTH, MAX_FRAME, MAX_HEADER, PeerMessage
from barnraise.protocol.mirror_list import Lists
from barnraise.protocol.types import Message

peer_message: TypeAdapter = TypeAdapter(
    Annotated[PeerMessage | Fork | Lists, Field(discriminator="type")]
)


def pack(message: Message, payload: bytes = b"") -> bytes:
    """Encode one of our own messages as a frame.

    It always fits: every list and payload is bounded where the message is built.
    """
    header = message.model_dump_json(exclude_none=True).encode()
    frame = len(header).to_bytes(LENGTH, "big") + header + payload
    assert len(header) <= MAX_HEADER and len(frame) <= MAX_FRAME, (
        f"{type(message).__name__} of {len(frame)} bytes"
    )
    return frame


def unpack(frame: bytes) -> tuple[Message, memoryview]:
    """Decode a frame that a peer sent.

    Returns:
        The message, and a view of its payload in `frame`.

    Raises:
        MessageError: When the frame is not one of the protocol.
    """
    if not LENGTH <= len(frame) <= MAX_FRAME:
        raise MessageError(f"a frame of {len(frame)} bytes; {LENGTH} to {MAX_FRAME} are allowed")
    length = int.from_bytes(frame[:LENGTH], "big")
    if length > MAX_HEADER or LENGTH + length > len(frame):
        raise MessageError(f"a frame of {len(frame)} bytes says its header has {length}")
    try:
        message = peer_message.validate_json(frame[LENGTH : LENGTH + length])
    except ValidationError as error:  # pydantic's own text is a paragraph: use its first finding
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise MessageError(
            f"a frame's header is not a message of ours: {where}: {first['msg'][:200]}"
        ) from None
    except ValueError as error:
        raise MessageError(f"a frame's header is not a message of ours: {error}") from None
    payload = memoryview(frame)[LENGTH + length :]
    if payload and message.type != "part":
        raise MessageError(f"a {message.type} carries {len(payload)} bytes of payload")
    return message, payload
