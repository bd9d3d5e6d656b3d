"""Messages between a worker and a coordinator: JSON over HTTPS, in signed requests.

Weights, updates and training text never travel in these messages: they are payloads between peers,
named here only by digest. What a run's owner publishes (`evaluation`) is short, and their choice.
A contract test bounds the size of each message that travels in a request or an answer.
"""

from typing import Annotated, Literal

from pydantic import Field

from barnraise.protocol.enums import JoinPurpose, RunStatus, SigningRight
from barnraise.protocol.messages import Peer, Signed
from barnraise.protocol.reports import HardwareView, Report
from barnraise.protocol.types import (
    Addresses,
    Author,
    Count,
    Digest,
    DocumentText,
    EnrolmentCode,
    Id,
    Incarnation,
    IpText,
    Message,
    PinnedPackage,
    PublicKey,
    Sentence,
    ShortText,
    Slug,
    UnixTime,
    Version,
    WheelName,
)
from barnraise.protocol.verdicts import SignedVerdict
from barnraise.spec import (
    MAX_PROMPT_TOKENS,
    MAX_PROMPTS,
    MAX_SHARD_TOKENS,
    MAX_VOCABULARY,
    token_bytes,
)

MAX_VERDICTS_PER_REPLY = 8
ArchitectureName = Literal["gpt2", "llama"]
PromptTokens = Annotated[
    list[Annotated[int, Field(ge=0, lt=MAX_VOCABULARY)]],
    Field(min_length=1, max_length=MAX_PROMPT_TOKENS),
]

# ---- documents that travel inside `Signed` ---------------------------------------------------


class Shard(Message):
    """One file of tokens: uint16, or uint32 for a vocabulary above 65,536; little-endian."""

    digest: Digest
    tokens: int = Field(ge=0, le=MAX_SHARD_TOKENS)


class ModelShape(Message):
    """The architecture of a Hugging Face model that a run begins with."""

    layers: int = Field(ge=1, le=256)
    width: int = Field(ge=16, le=65_536)
    heads: int = Field(ge=1, le=512)
    context: int = Field(ge=8, le=16_384)
    vocabulary: int = Field(ge=256, le=MAX_VOCABULARY)
    architecture: ArchitectureName = "gpt2"
    key_value_heads: int = Field(default=0, ge=0, le=512)
    head_size: int = Field(default=0, ge=0, le=1_024)
    hidden: int = Field(default=0, ge=0, le=1 << 20)
    rope_theta: float = Field(default=10_000.0, ge=1.0, le=1e9)
    norm_epsilon: float = Field(default=1e-5, ge=1e-12, le=1e-2)
    qk_norm: bool = False
    tied_head: bool = True


class TextCounts(Message):
    """What was read to prepare a text: numbers only, nothing of the text itself."""

    files: Count = 0  # that were read
    left_out: Count = 0  # files and folders that were not
    documents: Count = 0  # that were read, copies included
    duplicates: Count = 0  # documents that are copies of another one, and are not used
    skipped_rows: Count = 0  # rows without a usable text
    bytes: Count = 0  # of the documents in UTF-8
    characters: Count = 0  # of the documents


class TextManifest(Message):
    """The text of a run as token shards. The run's owner signs it."""

    run: Id
    vocabulary: int = Field(ge=1, le=MAX_VOCABULARY)
    tokenizer: Digest | None  # of the tokenizer's file; None for bytes
    train: list[Shard] = Field(min_length=1, max_length=1000)
    held_out: list[Shard] = Field(min_length=1, max_length=100)
    # The fragments that a warm-started run begins with. Empty: the seed determines the weights.
    start: list[Digest] = Field(default=[], max_length=300)
    # Of the Hugging Face model that the run begins with: the launch pins it.
    model: ModelShape | None = None
    counts: TextCounts | None = None  # for the run's page
    # The tokens of the run's prompts, in their order.
    prompts: list[PromptTokens] = Field(default=[], max_length=MAX_PROMPTS)

    @property
    def text_bytes(self) -> int:
        """Return the bytes of all shards, which every machine stores."""
        tokens = sum(shard.tokens for shard in (*self.train, *self.held_out))
        return tokens * token_bytes(self.vocabulary)


class Directive(Message):
    """A coordinator's answer to a report. It is signed, so that peers may relay revocations."""

    run: Id
    machine: Id
    status: RunStatus
    revoked: list[PublicKey] = Field(default=[], max_length=1000)
    prepare: bool = False  # the machine shall prepare the text and post its manifest
    report_every: float = Field(default=10.0, ge=0.2, le=3600)  # seconds
    token_budget: Count | None = None  # tokens, where it exceeds the spec's budget
    own_pause: bool = False  # the machine's owner paused it, and not the run
    pause_until: UnixTime | None = None  # when that pause ends by itself
    mirror_list_version: Count = 0  # of the coordinator's newest mirror list; 0: it has none
    # A machine that holds no mirror list yet recognises its first one by this digest.
    mirror_list_digest: Digest | None = None
    issued: UnixTime


class ServerTime(Message):
    """The server's clock, sent with every 401: a machine with a wrong clock signs with it."""

    mirror: PublicKey
    time: UnixTime


class AttestationStatement(Message):
    """A machine's statement that it applied another author's updates (kind "attestation").

    It covers every update of `author` up to the one whose header has the digest `head`.
    """

    run: Id
    author: Author
    head: Digest


class SignedHeader(Signed):
    """A signed update header of at most 300 fragments."""

    body: DocumentText = Field(max_length=61_000)


class SignedStatement(Signed):
    """A signed `AttestationStatement`."""

    body: DocumentText = Field(max_length=1_000)


class Attestation(Message):
    """An author's last signed header that a machine applied, and the machine's statement of that.

    The two signatures suffice to verify it: `signing.check_attestation`.
    """

    head: SignedHeader
    statement: SignedStatement


# ---- the coordinator's identity and enrolment ------------------------------------------------


class MirrorView(Message):
    """A coordinator's identity.

    `key` is the audience of signed requests and signs the coordinator's tickets and directives.
    """

    key: PublicKey
    name: ShortText
    protocols: list[int] = Field(max_length=4)
    time: UnixTime


class MachineDescription(Message):
    """A machine's hardware and system, for its owner to recognise it."""

    hostname: ShortText = ""
    system: ShortText = ""
    processor: ShortText = ""
    cores: int = Field(default=0, ge=0, le=100_000)
    memory_bytes: Count = 0
    accelerator: ShortText = ""


class EnrolmentRequest(Message):
    """A request to enrol a machine, signed by the enrolled key itself (kind "enrolment").

    The signature proves that the sender holds the key.
    """

    mirror: PublicKey
    key: PublicKey
    machine: MachineDescription
    issued: UnixTime


class EnrolmentReply(Message):
    """A pending enrolment: the code with which a person approves it on the site's page."""

    code: EnrolmentCode
    expires: UnixTime
    poll_every: float = Field(ge=0.2, le=60)  # seconds


class EnrolmentStatus(Message):
    """The state of an enrolment that a machine polls."""

    status: Literal["pending", "approved", "refused", "expired"]
    machine: Id | None = None
    person: ShortText = ""
    name: ShortText = ""  # which the site shows of the machine


class WorkerRelease(Message):
    """The worker that a coordinator offers at /download/ (kind "worker_release")."""

    version: Version
    file: WheelName
    size: Count  # bytes
    sha256: Digest  # of the file, as installers compare it
    # The tested versions of what the wheel brings; a site of the first release names none.
    constraints: Annotated[list[PinnedPackage], Field(max_length=500)] = []


# ---- runs ------------------------------------------------------------------------------------


class RunSummary(Message):
    """A run in a list."""

    id: Id
    slug: Slug = ""
    name: ShortText
    status: RunStatus
    launching: bool = False  # whether a draft is launched and waits for its text


class RunView(RunSummary):
    """A run as its workers receive it. Nothing in it is secret.

    `spec` is the exact text whose digest identifies the run's rules.
    """

    spec: DocumentText = Field(max_length=24_000)
    manifest: Signed | None = None


class InvitationToken(Message):
    """The secret part of an invitation's link, with which a machine accepts it for its owner."""

    token: ShortText


class RunPage(Message):
    """One page of the list of runs."""

    runs: list[RunSummary] = Field(max_length=100)
    next: Id | None = None


class JoinRequest(Message):
    """A request to take part in a run."""

    version: Version
    addresses: Addresses
    hardware: HardwareView | None = None  # as measured on the machine, if it was measured
    purpose: JoinPurpose = JoinPurpose.TRAIN


class ConfirmedAnchor(Message):
    """An anchor that a coordinator found confirmed.

    At least two people report this digest, and they are more than half of the people who report an
    anchor at this version vector; or the machine of the run's owner does, and no two others differ.
    """

    vector: Digest  # of the version vector
    digest: Digest  # BLAKE3 of the anchor's fragments
    people: int = Field(ge=1, le=1_000_000)


class JoinReply(Message):
    """Everything that a machine needs to take part in a run.

    `confirmed_anchors` are the newest ones of the run, the newest first. `source_ip` is the IP
    address from which the coordinator received the request. `signing` says whether the machine may
    prepare the run's text: only its owner's may, once the owner has confirmed it.
    """

    run: RunView
    ticket: Signed | None  # None while the run is a draft
    directive: Signed
    acknowledged: Count = 0  # the number of this machine's last report that the coordinator stored
    peers: list[Peer] = Field(max_length=64)
    confirmed_anchors: list[ConfirmedAnchor] = Field(default=[], max_length=8)
    source_ip: IpText | None = None
    signing: SigningRight = SigningRight.ALLOWED


# ---- reports ---------------------------------------------------------------------------------


class Reports(Message):
    """A batch of a machine's reports.

    `session` is drawn when the worker starts: two at a time mean that the key was copied.

    `verdicts_after` is the coordinator's number of the last verdict that the machine has applied:
    the reply brings later ones. `attestations` are for some other authors' updates that the machine
    has applied since its last batch; they earn those authors credit.
    """

    reports: list[Report] = Field(min_length=1, max_length=43)
    verdicts_after: Count = 0
    session: Incarnation | None = None
    attestations: list[Attestation] = Field(default=[], max_length=2)


class ReportReply(Message):
    """A coordinator's answer to a batch of reports.

    Every report numbered up to `acknowledged` is stored: the machine drops it from its spool.
    `verdicts` are the next ones after `verdicts_after`, and `verdicts_until` is the coordinator's
    number of the last of these. `source_ip` is the IP address from which the reports came.
    """

    acknowledged: Count
    directive: Signed
    ticket: Signed | None = None  # a new one when the old one is about to expire
    peers: list[Peer] = Field(default=[], max_length=64)
    verdicts: list[SignedVerdict] = Field(default=[], max_length=MAX_VERDICTS_PER_REPLY)
    verdicts_until: Count = 0
    source_ip: IpText | None = None


class Problem(Message):
    """The shape of every error. `fields` maps a field's dotted name to a sentence."""

    error: Sentence
    fields: Annotated[dict[ShortText, ShortText], Field(max_length=100)] = {}
    time: Signed | None = None  # a signed `ServerTime`, with a 401
