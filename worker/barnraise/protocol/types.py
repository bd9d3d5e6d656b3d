"""Bounded field types: every text has a pattern or a length, every number a range."""

import unicodedata
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from barnraise.protocol.public_keys import require_sound_key

# Ed25519, without points of small order and second spellings.
PublicKey = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$"), AfterValidator(require_sound_key)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", max_length=64)]  # BLAKE3
Signature = Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]  # Ed25519
Id = Annotated[str, Field(pattern=r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")]  # UUIDv7
# Of a machine's state folder.
Incarnation = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$", max_length=16)]

# The author of updates: key.incarnation.
Author = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\.[0-9a-f]{16}$")]

Sketch = Annotated[
    str, Field(pattern=r"^[0-9a-f]{16}$", max_length=16)
]  # a linear checksum of units

# host:port, or a relay's URL.
Address = Annotated[str, Field(pattern=r"^[0-9A-Za-z.:\[\]%/_-]{1,100}$", max_length=100)]
MAX_ADDRESSES = 16  # of one machine, in one message
UdpPort = Annotated[int, Field(ge=1, le=65_535)]
Addresses = Annotated[list[Address], Field(max_length=MAX_ADDRESSES)]
IpText = Annotated[str, Field(pattern=r"^[0-9A-Fa-f.:]{2,45}$")]  # an IP address

HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def replace_controls(text: str) -> str:
    """Replace each character that controls a terminal or hides what it is by a space."""
    if text.isprintable():
        return text
    return "".join(" " if unicodedata.category(c) in HIDDEN_CATEGORIES else c for c in text)


def replace_unprintable(text: str) -> str:
    """Return a text in one line, without characters that control a terminal or hide what it is.

    Peers' and sites' texts are printed and logged: a line break would begin a line of its own, and
    an escape sequence may rewrite the lines before it.
    """
    return text if text.isprintable() else replace_controls(text).strip()


# The JSON text of a document, exactly as it was signed. It is parsed and never shown.
DOCUMENT_PATTERN = r"^\{"
DocumentText = Annotated[str, Field(pattern=DOCUMENT_PATTERN)]

ShortText = Annotated[str, Field(max_length=100), AfterValidator(replace_unprintable)]
Sentence = Annotated[str, Field(max_length=1000), AfterValidator(replace_unprintable)]

# Text for people to read, without control characters and direction marks.
PlainText = Annotated[str, Field(pattern=r"^\P{C}*$")]

# Text that a model wrote, for people to read: lines without control characters and direction marks.
SAMPLE_PATTERN = r"^[^\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]*$"
SampleText = Annotated[str, Field(pattern=SAMPLE_PATTERN)]

# A run's name in addresses, which people copy into a shell.
Slug = Annotated[str, Field(pattern=r"^[\p{L}\p{M}\p{Nd}_-]{0,100}$")]
EnrolmentCode = Annotated[str, Field(pattern=r"^[0-9A-Z-]{1,20}$")]
# The name of the worker's wheel, which people copy into a shell.
WheelName = Annotated[str, Field(pattern=r"^barnraise-[0-9A-Za-z.+_-]{1,80}\.whl$")]
Version = Annotated[str, Field(pattern=r"^[0-9A-Za-z.+-]{1,40}$", max_length=40)]
# A line of a constraints file that pins a version, for some systems only. It names no address.
PinnedPackage = Annotated[
    str,
    Field(
        pattern=r"""^[0-9A-Za-z][0-9A-Za-z._-]*==[0-9A-Za-z.+!]+( ; [0-9A-Za-z_."'<>=!() ]+)?$""",
        max_length=200,
    ),
]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Rate = Annotated[float, Field(ge=0, lt=1e15, allow_inf_nan=False)]  # per second
MAX_UPLINK = 100e9 / 8  # bytes per second
Uplink = Annotated[float, Field(ge=0, le=MAX_UPLINK, allow_inf_nan=False)]  # bytes per second
Loss = Annotated[float, Field(ge=0, lt=1e6, allow_inf_nan=False)]  # nats a token
Seconds = Annotated[float, Field(ge=0, lt=1e9, allow_inf_nan=False)]
UnixMilliseconds = Annotated[int, Field(ge=0, lt=10**14)]  # since 1970, UTC
UnixTime = Annotated[float, Field(ge=0, lt=1e11, allow_inf_nan=False)]  # seconds since 1970, UTC

# Which updates are included: author → the number of its last update.
VersionVector = Annotated[dict[Author, Count], Field(max_length=2000)]


class Message(BaseModel):
    """Base of all messages: immutable, and tolerant of fields that a newer version may add."""

    model_config = ConfigDict(extra="ignore", frozen=True)
