"""Every message that leaves this machine, to peers and to coordinators.

Readers tolerate unknown fields (a newer version may say more) and bound everything they know: each text has a pattern
or a length, each list a size. Weights, updates and training text never ride in a message: they are payloads between
peers, named here only by digest. What must be believed later is `Signed`.
"""

from typing import Annotated, Literal

from pydantic import Field

from barnraise.protocol.enums import Role, Status
from barnraise.protocol.reports import HardwareView, Report
from barnraise.protocol.types import (
    Address,
    Author,
    Count,
    Digest,
    Id,
    Incarnation,
    Key,
    Message,
    Rate,
    Short,
    Signature,
    Sketch,
    Time,
    Vector,
    Version,
)
from barnraise.protocol.verdicts import RULINGS, Ruling

PROTOCOL = 1  # peers and coordinators state N and N-1
MAX_FRAME = 1 << 20  # bytes of one frame between peers, all told
MAX_HEADER = 1 << 18  # …of which its JSON header
PART = MAX_FRAME - (1 << 12)  # payload bytes a Part carries at most
LENGTH = 4  # bytes of the big-endian header length that starts a frame


class Signed(Message):
    """`body` is the JSON text of another message, kept exactly as its author signed it."""

    key: Key
    body: str = Field(max_length=130_000)
    signature: Signature


# ---- what gets signed ------------------------------------------------------------------------------------------


class Ticket(Message):
    """Says "this key may work on this run until then", by a coordinator. `volunteer` tells people apart, unnamed."""

    run: Id
    peer: Key
    machine: Id
    volunteer: Digest
    roles: list[Role] = Field(max_length=4)
    issued: Time
    expires: Time
    mirror: Key


class FragmentUpdate(Message):
    """One fragment's part of an update: its payload by digest and size (0: nothing is said), and its units' sketch."""

    digest: Digest
    size: Count
    sketch: Sketch


class Update(Message):
    """The header an author signs. `previous` is the digest of the header before (of "" for seq 1); `total` counts the
    author's tokens up to and including this update; `fragments` are all of the model's, in index order."""

    run: Id
    peer: Key
    incarnation: Incarnation
    seq: int = Field(ge=1, lt=1 << 53)
    previous: Digest
    tokens: Count
    total: Count
    fragments: list[FragmentUpdate] = Field(max_length=300)

    @property
    def author(self) -> str:
        return f"{self.peer}.{self.incarnation}"

    @property
    def said(self) -> list[FragmentUpdate]:
        return [part for part in self.fragments if part.size]


class Shard(Message):
    digest: Digest
    tokens: Count


class Manifest(Message):
    """The text of a run as tokens: uint16 little-endian shards, and the tokenizer's file (none for bytes)."""

    run: Id
    vocabulary: int = Field(ge=1, le=65_536)
    tokenizer: Digest | None
    train: list[Shard] = Field(min_length=1, max_length=1000)
    held_out: list[Shard] = Field(min_length=1, max_length=100)
    start: list[Digest] = Field(
        default=[], max_length=300
    )  # fragments it begins with, where the seed does not say


class Peer(Message):
    key: Key
    addresses: list[Address] = Field(max_length=8)


class Directive(Message):
    """A coordinator's answer to a report. Signed, so that peers may pass revocations on."""

    run: Id
    machine: Id
    status: Status
    revoked: list[Key] = Field(default=[], max_length=1000)
    prepare: bool = False  # build the text and post its manifest
    report_every: float = Field(default=10.0, ge=0.2, le=3600)  # seconds
    token_budget: Count | None = None  # where it is more than the spec's: training goes on that far
    mirrors: Count = 0  # the version of the newest mirror list this one has…
    listed: Digest | None = (
        None  # …and its digest, by which a machine that has none knows its first
    )
    issued: Time


class ServerTime(Message):
    """Sent with every 401, so that a machine whose clock is wrong can sign with the server's."""

    mirror: Key
    time: Time


# ---- between peers ---------------------------------------------------------------------------------------------


class Hello(Message):
    """The first frame on a connection, from both sides; nothing else is heard before it."""

    type: Literal["hello"] = "hello"
    protocols: list[int] = Field(max_length=4)
    version: Version
    run: Id
    spec: Digest
    incarnation: Incarnation
    ticket: Signed
    addresses: list[Address] = Field(max_length=8)


class State(Message):
    """Where I am: sent every few seconds and whenever it changes; the ground of anti-entropy. Of updates up to `gone` I
    have the headers alone; those up to `spare` are here or on their way: push them no more, announce what is new."""

    type: Literal["state"] = "state"
    vector: Vector
    gone: Vector = {}
    spare: Vector = {}
    whole: bool = True  # else: what changed since the last
    links: Count = 0  # that I have
    stands: Digest | None = None  # of a version vector, as reports have it…
    anchor: Digest | None = None  # …and of my anchor there
    rate: Rate  # tokens/s this worker trains at
    complete: bool = False  # the run is over for me and I publish no more
    verdicts: Digest | None = None  # of all I know of; None: of none
    heads: Digest | None = (
        None  # of the headers behind the vector: other ones under equal vectors mean a fork
    )
    mirrors: Count | None = (
        None  # the version of the mirror list I hold, 0 for none; None: I know of no such thing
    )


class Push(Message):
    """An update's signed header. Its payloads follow as Parts. `ticket`: the author's, for peers that never met it."""

    type: Literal["push"] = "push"
    header: Signed
    ticket: Signed | None = None


class Ask(Message):
    """Push me this author's updates, first to last; or, from the last back, their signed headers alone."""

    type: Literal["ask"] = "ask"
    author: Author
    first: int = Field(ge=1, lt=1 << 53)
    last: int = Field(ge=1, lt=1 << 53)
    headers: bool = False


class Want(Message):
    """Send me the blob of this digest (a payload, a shard, a snapshot's fragment) from this byte on."""

    type: Literal["want"] = "want"
    digest: Digest
    offset: Count = 0


class Part(Message):
    """A piece of a blob; the frame's payload follows the header."""

    type: Literal["part"] = "part"
    digest: Digest
    offset: Count
    total: Count


class Missing(Message):
    """I do not have this blob."""

    type: Literal["missing"] = "missing"
    digest: Digest


class CutWant(Message):
    """Freeze the anchor at this cut (yours, when none is named) and tell me its fragments' digests."""

    type: Literal["cut_want"] = "cut_want"
    vector: Vector | None = None


class Cut(Message):
    """A frozen anchor: fragments by digest (int32, little-endian), and `heads`, a blob: the JSON list of the signed
    headers of each author's last update in it. `verdicts`: the digest of those it heeds; `proofs`: the blob of them."""

    type: Literal["cut"] = "cut"
    vector: Vector
    fragments: list[Digest] = Field(max_length=300)
    heads: Digest
    verdicts: Digest | None = None
    proofs: Digest | None = None


class Peers(Message):
    type: Literal["peers"] = "peers"
    peers: list[Peer] = Field(max_length=64)


class Directives(Message):
    """A coordinator's signed directive, passed on so that a revocation reaches those who cannot reach it."""

    type: Literal["directives"] = "directives"
    directive: Signed


class Bye(Message):
    type: Literal["bye"] = "bye"
    reason: Short


PeerMessage = (
    Hello
    | State
    | Push
    | Ask
    | Want
    | Part
    | Missing
    | CutWant
    | Cut
    | Peers
    | Directives
    | Ruling
    | Bye
)


# ---- between a worker and a coordinator (JSON over HTTPS, signed requests) -------------------------------------


class MirrorView(Message):
    """Who a coordinator is. `key` is its audience in requests and its signature on tickets and directives."""

    key: Key
    name: Short
    protocols: list[int] = Field(max_length=4)
    time: Time


class Machine(Message):
    """What a machine says of itself."""

    hostname: Short = ""
    system: Short = ""
    processor: Short = ""
    cores: int = Field(default=0, ge=0, le=100_000)
    memory_bytes: Count = 0
    accelerator: Short = ""


class EnrolmentRequest(Message):
    """Signed by the key it enrols (kind "enrolment"), so that nobody enrols a key they do not hold."""

    mirror: Key
    key: Key
    machine: Machine
    issued: Time


class Enrolment(Message):
    code: Short  # shown to the person, typed or followed in the browser
    url: str = Field(max_length=500)
    expires: Time
    poll_every: float = Field(ge=0.2, le=60)


class EnrolmentStatus(Message):
    status: Literal["pending", "approved", "refused", "expired"]
    machine: Id | None = None
    person: Short = ""


class RunLine(Message):
    """A run in a list."""

    id: Id
    slug: Short = ""
    name: Short
    status: Status


class RunView(RunLine):
    """A run as its workers see it. `spec` is exact text; its digest names the rules. None of it secret."""

    spec: str = Field(max_length=24_000)
    manifest: Signed | None = None


class RunPage(Message):
    runs: list[RunLine] = Field(max_length=100)
    next: Id | None = None


class JoinRequest(Message):
    version: Version
    addresses: list[Address] = Field(max_length=8)
    hardware: HardwareView | None = None  # what this machine can do, where it was measured


class JoinReply(Message):
    run: RunView
    ticket: Signed | None  # none while the run is a draft
    directive: Signed
    mark: Count = 0  # the last report of this machine in this run that the coordinator holds
    peers: list[Peer] = Field(max_length=64)


class Witness(Message):
    """What a machine signs of another's (kind "witness"): that it has applied all updates of `author` up to the one
    whose header has this digest."""

    run: Id
    author: Author
    head: Digest


class SignedHeader(Signed):
    body: str = Field(max_length=61_000)  # of an update of 300 fragments


class SignedWord(Signed):
    body: str = Field(max_length=1_000)


class Testimony(Message):
    """An author's last signed header that a machine has applied, and that machine's signed word for it. Who has both
    can check it alone: `identity.check_testimony`."""

    head: SignedHeader
    witness: SignedWord


class Reports(Message):
    """`heeds`: the verdicts this machine takes out, by the digest of their text: no need to send them again.
    `witnessed`: some others' updates that it has applied since it last spoke of them, for their credit."""

    reports: list[Report] = Field(min_length=1, max_length=50)
    heeds: list[Digest] = Field(default=[], max_length=RULINGS)
    witnessed: list[Testimony] = Field(default=[], max_length=2)


class ReportReply(Message):
    """`mark`: every report up to this seq is safe at the coordinator; drop it from the spool. `rulings`: some of the
    verdicts that the machine does not say it heeds; the others come with later answers."""

    mark: Count
    directive: Signed
    ticket: Signed | None = None  # a fresh one, when the old one nears its end
    peers: list[Peer] = Field(default=[], max_length=64)
    rulings: list[Ruling] = Field(default=[], max_length=2)


class Problem(Message):
    """The one shape of an error. `fields` maps a field's dotted name to a sentence; `time` comes with 401s."""

    error: str = Field(max_length=1000)
    fields: Annotated[dict[Short, Short], Field(max_length=100)] = {}
    time: Signed | None = None


API_MESSAGES: tuple[type[Message], ...] = (
    MirrorView, Signed, EnrolmentRequest, Enrolment, EnrolmentStatus, RunView, RunPage, JoinRequest, JoinReply, Reports,
    ReportReply, Manifest, Problem,
)  # fmt: skip
