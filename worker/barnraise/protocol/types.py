"""The kinds of things messages are made of, each bounded: every text has a pattern or a length, every number a range.

Readers tolerate unknown fields (a newer version may say more) and bound everything they know.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PublicKey = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # an Ed25519 public key
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # BLAKE3
Signature = Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]
Id = Annotated[str, Field(pattern=r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")]  # UUIDv7
Incarnation = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Author = Annotated[
    str, Field(pattern=r"^[0-9a-f]{64}\.[0-9a-f]{16}$")
]  # key.incarnation: one life of a state folder
Sketch = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Address = Annotated[
    str, Field(pattern=r"^[0-9A-Za-z.:\[\]%/_-]{1,200}$")
]  # host:port or a relay's URL
ShortText = Annotated[str, Field(max_length=100)]
PlainText = Annotated[
    str, Field(pattern=r"^\P{C}*$")
]  # for people to read: nothing that hides or turns text around
Version = Annotated[str, Field(pattern=r"^[0-9A-Za-z.+-]{1,40}$")]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Rate = Annotated[float, Field(ge=0, lt=1e15, allow_inf_nan=False)]
Loss = Annotated[float, Field(ge=0, lt=1e6, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, lt=1e9, allow_inf_nan=False)]
UnixTime = Annotated[float, Field(ge=0, lt=1e11, allow_inf_nan=False)]  # seconds since 1970, UTC
VersionVector = Annotated[
    dict[Author, Count], Field(max_length=2000)
]  # which updates are in: author → last seq


class Message(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)
