"""What mirrors say to each other, over HTTPS, each request signed as machines sign theirs."""

from typing import Annotated

from pydantic import Field

from barnraise.protocol.messages import Signed
from barnraise.protocol.mirror_list import MirrorLists as MirrorLists
from barnraise.protocol.types import Count, Digest, Message, PublicKey, UnixTime
from coordinator.eventlog.event import OriginId

PROTOCOL = 1  # mirrors state N and N-1, so that they can be brought up to date one by one
PROTOCOLS = (PROTOCOL,)
MAX_LOGS = 500  # that one answer names
PAGE_EVENTS, PAGE_BYTES = (
    500,
    1 << 20,
)  # events in one answer, and about how many bytes of their texts
MAX_PRIVATE_ITEMS = 200  # particulars asked for at once


class LogHead(Message):
    seq: Count
    digest: Digest


class LogHeads(Message):
    """How far a mirror has come (signed, kind "heads"). `to`: who asked, so that nobody passes it on as fresh."""

    protocols: list[int] = Field(max_length=4)
    mirror: PublicKey
    to: PublicKey
    time: UnixTime
    mirrors: Count  # the version of its list
    proofs: Count  # how many it keeps
    state: Digest  # of what follows from all it has accepted
    heads: Annotated[dict[OriginId, LogHead], Field(max_length=MAX_LOGS)]


class LogPart(Message):
    """Some of a log's events, in order. `more`: there are further ones."""

    events: list[Signed] = Field(max_length=PAGE_EVENTS)
    more: bool = False


class ForkEvidence(Message):
    """Two events that one origin signed with one number."""

    first: Signed
    second: Signed


class ForkEvidenceList(Message):
    proofs: list[ForkEvidence] = Field(max_length=100)


class PrivateDataRequest(Message):
    """Personal data by digest, to be sealed to this X25519 key, drawn for this one request."""

    digests: list[Digest] = Field(min_length=1, max_length=MAX_PRIVATE_ITEMS)
    key: PublicKey


class EncryptedPrivateData(Message):
    """`text` (hex): ChaCha20-Poly1305 under what both X25519 keys share; inside is `Particular`s, as JSON."""

    key: PublicKey
    nonce: str = Field(pattern=r"^[0-9a-f]{24}$")
    text: str = Field(pattern=r"^([0-9a-f]{2})*$", max_length=6 << 20)


class PrivateItem(Message):
    digest: Digest
    salt: str = Field(max_length=32)
    body: str = Field(max_length=100_000)


class PrivateItems(Message):
    particulars: list[PrivateItem] = Field(max_length=MAX_PRIVATE_ITEMS)


class ChangeNotice(Message):
    """I have something new."""


class UsedCodes(Message):
    """What works once was used here: marks (see `spent`)."""

    marks: list[Digest] = Field(min_length=1, max_length=100)


class Acknowledgement(Message):
    """So be it."""
