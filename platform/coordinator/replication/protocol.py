"""Define the messages between mirrors, sent over HTTPS in signed requests."""

from typing import Annotated

from pydantic import Field

from barnraise.protocol.messages import Signed
from barnraise.protocol.types import Count, Digest, DocumentText, Message, PublicKey, UnixTime
from coordinator.eventlog.event import OriginId

PROTOCOL = 1
# A mirror supports the newest version and the one before: mirrors can be upgraded one by one.
PROTOCOLS = (PROTOCOL,)
MAX_LOGS = 500  # in one answer
PAGE_EVENTS = 500  # in one answer
PAGE_BYTES = 1 << 20  # of events' texts in one answer, approximately
MAX_PRIVATE_ITEMS = 200  # in one request


class LogHead(Message):
    """Describe the last accepted event of a log."""

    seq: Count
    digest: Digest


class LogHeads(Message):
    """Describe how far a mirror's logs are (signed, kind "heads").

    Attributes:
        to: Key of the mirror that requested it, so that nobody can replay it as new to another.
        mirrors: Version of its mirror list.
        proofs: Number of proofs of forks that it stores.
        state: Its state hash.
        heads: Log → its last accepted event.
    """

    protocols: list[int] = Field(max_length=4)
    mirror: PublicKey
    to: PublicKey
    time: UnixTime
    mirrors: Count
    proofs: Count
    state: Digest
    heads: Annotated[dict[OriginId, LogHead], Field(max_length=MAX_LOGS)]


class LogPart(Message):
    """Carry consecutive events of a log; `more` says whether further ones exist."""

    events: list[Signed] = Field(max_length=PAGE_EVENTS)
    more: bool = False


class ForkEvidence(Message):
    """Carry two events that one origin signed with one number."""

    first: Signed
    second: Signed


class ForkEvidenceList(Message):
    """Carry all proofs of forks that a mirror stores."""

    proofs: list[ForkEvidence] = Field(max_length=100)


class PrivateDataRequest(Message):
    """Request private data by digest, encrypted to an X25519 key made for this one request."""

    digests: list[Digest] = Field(min_length=1, max_length=MAX_PRIVATE_ITEMS)
    key: PublicKey


class EncryptedPrivateData(Message):
    """Carry `PrivateItems` as JSON, encrypted with ChaCha20-Poly1305.

    Attributes:
        key: X25519 key made for this answer; both keys determine the cipher's key.
        nonce: 12 bytes in hex.
        text: The ciphertext in hex.
    """

    key: PublicKey
    nonce: str = Field(pattern=r"^[0-9a-f]{24}$")
    text: str = Field(pattern=r"^([0-9a-f]{2})*$", max_length=6 << 20)


class PrivateItem(Message):
    """Carry one text with its salt and digest."""

    digest: Digest
    salt: str = Field(pattern=r"^[0-9a-f]{0,32}$")
    body: DocumentText = Field(max_length=100_000)


class PrivateItems(Message):
    """Carry what is encrypted in an answer."""

    items: list[PrivateItem] = Field(max_length=MAX_PRIVATE_ITEMS)


class ChangeNotice(Message):
    """Announce that the sender has recorded events."""


class UsedCodes(Message):
    """Announce one-time codes that were used, by their marks (see `one_time_codes`)."""

    marks: list[Digest] = Field(min_length=1, max_length=100)


class Acknowledgement(Message):
    """Confirm a message that needs no answer."""
