"""Messages between peers, and the signed documents that peers verify.

Readers tolerate unknown fields, which a newer version may add, and bound every field they know:
each text has a pattern or a maximum length, each list a maximum size. Weights, updates and training
text never travel in a message: they are payloads between peers, named here only by digest. A
document that must be verifiable later travels inside `Signed`.
"""

from typing import Literal

from pydantic import Field

from barnraise.protocol.enums import Role, Standing
from barnraise.protocol.types import (
    Address,
    Addresses,
    Author,
    Count,
    Digest,
    DocumentText,
    Id,
    Incarnation,
    Message,
    PublicKey,
    Rate,
    ShortText,
    Signature,
    Sketch,
    UdpPort,
    UnixMilliseconds,
    UnixTime,
    Uplink,
    Version,
    VersionVector,
)
from barnraise.protocol.verdicts import SignedVerdict, VerdictNames, VerdictSummary

MAX_FRAME_BYTES = 1 << 20  # of one frame between peers, header included
MAX_HEADER_BYTES = 1 << 18  # of a frame's JSON header
MAX_LINE_TEST_BYTES = 2_000_000  # each way, of one test of the line between two peers
MAX_CREW_MEMBERS = 15  # besides the lead, in an update
MAX_DIALLED_BACK = 2  # ports of one host at which a peer is dialled back
HEADER_LENGTH_BYTES = 4  # of the big-endian header length that starts a frame

COPIED_KEY = (
    "this key already trains on another machine; run `barnraise login` there or, with --home "
    "FOLDER, here: each machine needs a key of its own"
)


class Signed(Message):
    """A signed document: `body` is the JSON text of another message, exactly as it was signed."""

    key: PublicKey
    body: DocumentText = Field(max_length=130_000)
    signature: Signature


# ---- documents that travel inside `Signed` ---------------------------------------------------


class Ticket(Message):
    """A coordinator's permission for the key `peer` to take part in `run` until `expires`."""

    run: Id
    peer: PublicKey
    machine: Id
    volunteer: Digest  # distinguishes people without naming them
    roles: list[Role] = Field(max_length=4)
    standing: Standing = Standing.STRANGER
    # The most that updates under this ticket may state, by their times.
    max_tokens_per_second: int = Field(ge=1, lt=1 << 53)
    issued: UnixTime
    expires: UnixTime
    mirror: PublicKey


class FragmentUpdate(Message):
    """One fragment's part of an update: the payload's digest and size, and the units' sketch.

    The size 0 marks a part without payload.
    """

    digest: Digest
    size: Count  # bytes
    sketch: Sketch


class CrewShare(Message):
    """A member's part in the updates of its crew's lead: its share of the FLOPs, as tokens."""

    key: PublicKey
    tokens: Count  # up to and including the update that states them


class Update(Message):
    """The header of an update, signed by its author."""

    run: Id
    peer: PublicKey
    incarnation: Incarnation
    seq: int = Field(ge=1, lt=1 << 53)
    previous: Digest  # digest of the author's header before this one; of "" where `seq` is 1
    tokens: Count  # tokens the author trained on for this update
    total: Count  # the author's tokens up to and including this update
    # When the author's incarnation began to train, the same in all its updates.
    started_ms: UnixMilliseconds
    time_ms: UnixMilliseconds  # when the author signed this update, later than the one before
    ticket: Digest  # digest of the text of the ticket that permits this update
    # The volunteer that the author's ticket names, the same in all of its updates.
    volunteer: Digest = "0" * 64
    # Whether that ticket is a newcomer's (`Standing`), the same in all of the author's updates.
    newcomer: bool = False
    # What others computed of `total`, where the author leads a crew: ascending by their keys.
    crew: list[CrewShare] = Field(default=[], max_length=MAX_CREW_MEMBERS)
    # One part for every fragment of the model, in index order.
    fragments: list[FragmentUpdate] = Field(max_length=300)

    @property
    def author(self) -> str:
        """Return the author: the key and the incarnation of its state folder."""
        return f"{self.peer}.{self.incarnation}"

    @property
    def tokens_by_member(self) -> dict[str, int]:
        """Map the keys of the author's crew to their tokens; the author's own is not in it."""
        return {share.key: share.tokens for share in self.crew}

    @property
    def payload_parts(self) -> list[FragmentUpdate]:
        """Return the parts that have a payload."""
        return [part for part in self.fragments if part.size]


class ChannelProof(Message):
    """A machine's statement that it is at one end of a TLS connection."""

    certificate: Digest  # digest of the certificate that the listening machine showed
    peer: PublicKey  # key of the machine at the other end
    nonce: Digest  # that the other machine chose for this connection


# ---- messages between peers ------------------------------------------------------------------


class ChannelGreeting(Message):
    """The first frame of a TLS connection, from both sides; a `ChannelProof` follows."""

    key: PublicKey  # the sender's, not proven yet
    nonce: Digest  # 32 random bytes in hex, which the other machine's proof must contain


class Peer(Message):
    """A peer's key and the addresses at which it can be reached."""

    key: PublicKey
    addresses: Addresses


class Hello(Message):
    """The first frame on a connection, from both sides. Other frames before it are refused."""

    type: Literal["hello"] = "hello"
    protocols: list[int] = Field(max_length=4)
    version: Version
    run: Id
    spec: Digest
    incarnation: Incarnation
    ticket: Signed
    addresses: Addresses  # at which the sender says that it can be reached
    observed: Address | None = None  # the UDP address from which the sender sees the receiver
    session: Signed | None = None  # the sender's `WorkerSession` (kind "session")


class PeerState(Message):
    """What the sender has, sent every few seconds and on a change: the basis of anti-entropy."""

    type: Literal["peer_state"] = "peer_state"
    vector: VersionVector  # the sender's last update of each author
    pruned: VersionVector = {}  # the sender stores only the headers of updates up to these
    # The sender has, or is receiving, updates up to these: announce newer ones, but do not push
    # these.
    declined: VersionVector = {}
    full: bool = True  # False: the message holds only what changed since the last one
    # Digest of the version vector at which `anchor_digest` was computed.
    anchor_vector: Digest | None = None
    anchor_digest: Digest | None = None  # digest of the sender's anchor at that vector
    rate: Rate  # the sender's training speed in tokens/s
    # The sender has ended its part in the run and publishes no further update.
    complete: bool = False
    # Digest of the sender's verdicts, forks and opinions; None: it has none.
    verdicts_digest: Digest | None = None
    # Digest of the headers behind the vector. Different ones under equal vectors prove a fork.
    heads_digest: Digest | None = None
    # Version of the sender's mirror list, 0 without one; None: the sender's version of the program
    # has no mirror lists.
    mirror_list_version: Count | None = None
    # The uplink over which the sender passes on updates of others; 0: it passes none on; None: not
    # measured, or the sender's version of the program does not state it.
    uplink: Uplink | None = None


class UpdatePush(Message):
    """An update's signed header and the ticket that it names; then come its payloads' parts."""

    type: Literal["update_push"] = "update_push"
    header: Signed
    ticket: Signed
    # False when the header was asked for alone, or a verdict retracts the update.
    has_payloads: bool = True


class UpdateRequest(Message):
    """A request to push the author's updates `first` to `last`, in this order.

    With `headers`, the answer is the signed headers alone, from `last` down to `first`.
    """

    type: Literal["update_request"] = "update_request"
    author: Author
    first: int = Field(ge=1, lt=1 << 53)
    last: int = Field(ge=1, lt=1 << 53)
    headers: bool = False


class BlobRequest(Message):
    """A request for a blob (a payload, a shard, a snapshot's fragment) from a byte offset on."""

    type: Literal["blob_request"] = "blob_request"
    digest: Digest
    offset: Count = 0


class BlobPart(Message):
    """A piece of a blob. The frame's payload follows the header."""

    type: Literal["blob_part"] = "blob_part"
    digest: Digest
    offset: Count
    total: Count


class BlobMissing(Message):
    """The answer to a `BlobRequest` for a blob that the sender does not have."""

    type: Literal["blob_missing"] = "blob_missing"
    digest: Digest


class SnapshotRequest(Message):
    """A request to freeze the anchor at `vector` and to answer with its `SnapshotManifest`.

    Without a vector the receiver chooses its current one; with `confirmed`, digests of version
    vectors as coordinators list them, it chooses the first of these that it knows.
    """

    type: Literal["snapshot_request"] = "snapshot_request"
    vector: VersionVector | None = None
    confirmed: list[Digest] = Field(default=[], max_length=8)


class SnapshotManifest(Message):
    """A frozen anchor."""

    type: Literal["snapshot_manifest"] = "snapshot_manifest"
    vector: VersionVector
    # Digests of the fragments' blobs (int32, little-endian).
    fragments: list[Digest] = Field(max_length=300)
    # Digest of a blob, the JSON list of the signed headers of each author's last update.
    heads: Digest
    # Digest of a blob, the JSON list of the tickets that permit those authors.
    tickets: Digest | None = None
    verdicts: Digest | None = None  # digest of what the verdicts that were applied retract
    proofs: Digest | None = None  # digest of the blob that contains those verdicts


class PeerList(Message):
    """Peers that the sender knows."""

    type: Literal["peer_list"] = "peer_list"
    peers: list[Peer] = Field(max_length=64)


class DialNow(Message):
    """A peer's statement, signed, that it dials `target` now, and that `target` dial it as well."""

    run: Id
    peer: PublicKey  # the key that signs
    target: PublicKey
    addresses: Addresses  # at which the target reaches the peer
    issued: UnixTime
    is_answer: bool = False  # it answers such a statement of the target, and is not answered


class DialNowRelay(Message):
    """A signed `DialNow` (kind "dial_now"), which a peer that is linked to both passes on."""

    type: Literal["dial_now"] = "dial_now"
    statement: Signed


class DialBackRequest(Message):
    """A request that somebody dial the sender, to learn whether strangers reach it.

    It is dialled at the address from which the receiver sees it, and nowhere else.
    """

    type: Literal["dial_back_request"] = "dial_back_request"
    # UDP ports there at which the sender may be reached.
    ports: list[UdpPort] = Field(min_length=1, max_length=MAX_DIALLED_BACK)
    # Keys of peers that the sender has dialled: its router may let these in, and no others.
    met: list[PublicKey] = Field(default=[], max_length=64)


class DialBackErrand(Message):
    """A dial-back request, passed on to a peer that its sender has not dialled."""

    type: Literal["dial_back_errand"] = "dial_back_errand"
    number: Count  # chosen by the sender, repeated in the result
    peer: PublicKey  # the key that is to answer
    # At which it is dialled: ports of one host.
    addresses: list[Address] = Field(min_length=1, max_length=MAX_DIALLED_BACK)


class DialBackResult(Message):
    """What became of a dial-back request, or of an errand."""

    type: Literal["dial_back_result"] = "dial_back_result"
    number: Count = 0  # of the errand; 0 answers a request
    outcome: Literal["reached", "not_reached", "refused"]  # "refused" if nobody dialled
    by_another: bool = False  # whether another peer dialled than the one that was asked


class WorkerSession(Message):
    """A worker's statement, signed, that it runs at a time with its key."""

    run: Id
    peer: PublicKey
    session: Incarnation  # drawn when the worker starts: two that run at a time share a copied key
    started: UnixTime
    issued: UnixTime  # when it signed this statement


class CopiedKeyNotice(Message):
    """A statement of another worker with the receiver's own key, as its proof.

    `statement` is a signed `WorkerSession`.
    """

    type: Literal["copied_key"] = "copied_key"
    statement: Signed


class LineTestRequest(Message):
    """A request for bytes without meaning, to measure the line between two peers."""

    type: Literal["line_test_request"] = "line_test_request"
    size: int = Field(ge=1, le=MAX_LINE_TEST_BYTES)


class LineTestPart(Message):
    """A piece of such bytes, in the frame's payload; they go both ways."""

    type: Literal["line_test_part"] = "line_test_part"
    is_last: bool = False


class LineTestReceipt(Message):
    """What arrived of the bytes that the requester sent."""

    type: Literal["line_test_receipt"] = "line_test_receipt"
    # Bytes after the first piece; 0 refuses the test.
    size: int = Field(ge=0, le=2 * MAX_LINE_TEST_BYTES)
    # Between the first piece and the last.
    seconds: float = Field(ge=0, le=3600, allow_inf_nan=False)


class DirectiveRelay(Message):
    """A coordinator's signed directive, relayed to peers that cannot reach a coordinator.

    It carries revocations to them.
    """

    type: Literal["directive_relay"] = "directive_relay"
    directive: Signed


class Goodbye(Message):
    """The last frame before the sender closes a connection, with the reason."""

    type: Literal["goodbye"] = "goodbye"
    reason: ShortText


PeerMessage = (
    Hello
    | PeerState
    | UpdatePush
    | UpdateRequest
    | BlobRequest
    | BlobPart
    | BlobMissing
    | SnapshotRequest
    | SnapshotManifest
    | PeerList
    | DirectiveRelay
    | DialNowRelay
    | DialBackRequest
    | DialBackErrand
    | DialBackResult
    | CopiedKeyNotice
    | LineTestRequest
    | LineTestPart
    | LineTestReceipt
    | SignedVerdict
    | VerdictSummary
    | VerdictNames
    | Goodbye
)
