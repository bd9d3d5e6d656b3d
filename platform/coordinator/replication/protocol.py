"""What mirrors say to each other, over HTTPS, each request signed as machines sign theirs."""

from typing import Annotated

from pydantic import Field

from barnraise.protocol.messages import Signed
from barnraise.protocol.mirror_list import Lists as Lists
from barnraise.protocol.types import Count, Digest, Key, Message, Time
from coordinator.eventlog.event import OriginId

PROTOCOL = 1  # mirrors state N and N-1, so that they can be brought up to date one by one
SPOKEN = (PROTOCOL,)
ORIGINS = 500  # that one answer names
PAGE, PAGE_BYTES = 500, 1 << 20  # events in one answer, and about how many bytes of their texts
SOME = 200  # particulars asked for at once


class Head(Message):
    seq: Count
    digest: Digest


class Heads(Message):
    """How far a mirror has come (signed, kind "heads"). `to`: who asked, so that nobody passes it on as fresh."""

    protocols: list[int] = Field(max_length=4)
    mirror: Key
    to: Key
    time: Time
    mirrors: Count  # the version of its list
    proofs: Count  # how many it keeps
    state: Digest  # of what follows from all it has accepted
    heads: Annotated[dict[OriginId, Head], Field(max_length=ORIGINS)]


class LogPart(Message):
    """Some of a log's events, in order. `more`: there are further ones."""

    events: list[Signed] = Field(max_length=PAGE)
    more: bool = False


class Pair(Message):
    """Two events that one origin signed with one number."""

    first: Signed
    second: Signed


class Proofs(Message):
    proofs: list[Pair] = Field(max_length=100)


class Wants(Message):
    """Personal data by digest, to be sealed to this X25519 key, drawn for this one request."""

    digests: list[Digest] = Field(min_length=1, max_length=SOME)
    key: Key


class Sealed(Message):
    """`text` (hex): ChaCha20-Poly1305 under what both X25519 keys share; inside is `Particular`s, as JSON."""

    key: Key
    nonce: str = Field(pattern=r"^[0-9a-f]{24}$")
    text: str = Field(pattern=r"^([0-9a-f]{2})*$", max_length=6 << 20)


class Particular(Message):
    digest: Digest
    salt: str = Field(max_length=32)
    body: str = Field(max_length=100_000)


class Particulars(Message):
    particulars: list[Particular] = Field(max_length=SOME)


class Nudge(Message):
    """I have something new."""


class Spent(Message):
    """What works once was used here: marks (see `spent`)."""

    marks: list[Digest] = Field(min_length=1, max_length=100)


class Heard(Message):
    """So be it."""
