"""Join a run that is under way: fetch the anchor at one version vector from several peers.

All peers are asked for the snapshot at the version vector that most votes reach, and that contains
what this machine has. Their digests are compared: when enough votes name the same ones, the
snapshot is confirmed (`agreement`). Volunteers vote whose work is in this machine's ledger. A first
join knows none: it takes an anchor that coordinators list as confirmed, and that a peer serves. The
bytes arrive as blobs, from all peers that have them, and are checked by digest. The headers at
which the snapshot stands are validated as updates are.

Without all this nothing is taken: the machine waits, and states why, unless its owner has decided
to trust the volunteers that are linked.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from pydantic import ValidationError

from barnraise.errors import MessageError
from barnraise.exchange.blobs.blob_fetcher import BlobFetcher, WantedBlob
from barnraise.exchange.gossip.agreement import Votes, count_each_alike, is_agreed
from barnraise.exchange.gossip.handler_context import HandlerContext
from barnraise.exchange.snapshots.snapshot_majority import AgreedSnapshot, choose_majority
from barnraise.exchange.snapshots.snapshot_server import (
    REQUEST_TIMEOUT,
    VerdictProofs,
    blob_digests,
)
from barnraise.ledger.anchor import (
    Retracted,
    digest_fragments,
    digest_vector,
    fragment_from_bytes,
)
from barnraise.ledger.blob_store import BlobStore
from barnraise.ledger.ledger import Ledger
from barnraise.ledger.snapshot_heads import read_heads, read_signed, validate_heads
from barnraise.ledger.validation import UpdateRules
from barnraise.ledger.verdict_set import VerdictSet, verify_proof
from barnraise.peering.links.connection import Connection
from barnraise.peering.links.received import MessageHandlers, Received
from barnraise.peering.transports.transport import ChannelClosedError
from barnraise.protocol.messages import Signed, SnapshotManifest, SnapshotRequest, Update
from barnraise.protocol.verdicts import Verdict

log = logging.getLogger("barnraise.exchange")

T = TypeVar("T")

FRESH_SECONDS = 2.0  # seconds for which all peers must be at the start to believe that the run is
MAX_REPLAYED_UPDATES = 256  # that a joiner applies one by one rather than wait for a confirmation
UNLISTED_REPLAYS = 16  # times as many where coordinators list no anchor
BLOB_SECONDS = 10.0  # seconds for a blob of tickets or of proofs
INTRODUCTION_SECONDS = 1.0  # seconds in which a peer introduces a joiner to the others it knows
CONNECTION_SECONDS = 5.0  # seconds in which connections to those are established
MAX_HEADS_BYTES = 64 << 20  # the blobs of heads and of proofs are no larger
MIN_FETCH_SECONDS = 10.0  # seconds for the bytes of a snapshot at least
MIN_FETCH_RATE = 1 << 16  # bytes per second; each so many bytes extend that by a second
POLL_INTERVAL = 0.05  # seconds between two looks at the peers' answers
LIST_SECONDS = 5.0  # seconds for the mirror list that a snapshot's verdicts name to arrive
NO_PROOFS = VerdictProofs(verdicts=[], forks=[]).model_dump_json().encode()
UNCONFIRMED = (
    "neither the site nor volunteers whose work this machine has seen confirm the weights that its "
    "peers have: waiting until they do"
)
DISAGREEMENT = "the connected volunteers do not agree on the weights: waiting until most of them do"
TRUST_HINT = (
    ". The machine of the run's owner, or two people's, confirm them at their next validation; "
    "barnraise join --trust-one takes them unconfirmed"
)
CONFIRMED_TIMEOUT = 10.0  # seconds for a peer to freeze an anchor that coordinators list
MAX_CONFIRMED = 8  # such anchors of one request


@dataclass(frozen=True)
class Snapshot:
    """An anchor to start from."""

    fragments: Sequence[torch.Tensor]  # int32 [size] for each fragment, in order
    heads: dict[str, Update]  # author → the last update in the anchor
    confirmed: bool  # whether votes, or coordinators, confirm it
    # What verdicts retracted from among those updates.
    retracted: Retracted = field(default_factory=dict)


@dataclass(frozen=True)
class FetchedSnapshot:
    """A snapshot whose bytes are all on disk, with its authors' last headers and its verdicts.

    `tickets` are those that the headers name; peers that receive the headers need them.
    """

    manifest: SnapshotManifest
    heads: list[tuple[Signed, Update]]
    tickets: list[Signed]
    verdicts: VerdictSet
    confirmed: bool


class FragmentBlobs(Sequence[torch.Tensor]):
    """Read fragments from blobs, one at a time: a model may be larger than memory."""

    def __init__(self, blobs: BlobStore, digests: Sequence[str]) -> None:
        """Read from `blobs` the fragments with these digests."""
        self._blobs = blobs
        self._digests = digests

    def __len__(self) -> int:
        return len(self._digests)

    def __getitem__(self, index: int) -> torch.Tensor:
        return fragment_from_bytes(self._blobs.read(self._digests[index]))


def read_verdicts(
    data: bytes,
    rules: UpdateRules,
    manifest: SnapshotManifest,
    heads: Iterable[tuple[Signed, Update]] = (),
) -> VerdictSet:
    """Return the verdicts in a snapshot's blob of proofs.

    Raises:
        MessageError: When they are not valid, or not those that the manifest names.
    """
    verdicts = VerdictSet()
    try:
        proofs = VerdictProofs.model_validate_json(data)
    except ValidationError:
        raise MessageError("a snapshot's verdicts are not a list of proofs") from None
    for proof in (*proofs.verdicts, *proofs.forks, *proofs.opinions):
        verdicts |= verify_proof(proof, rules)
    updates = [update for _, update in heads]
    verdicts = verdicts.bind(
        {update.author: update.volunteer for update in updates},
        {update.author for update in updates if update.newcomer},
    )
    has_effect = verdicts.effect_digest == manifest.verdicts
    if not has_effect or verdicts.clamp(manifest.vector) != manifest.vector:
        raise MessageError("a snapshot's verdicts are not those that its manifest names")
    return verdicts


def load_base_snapshot(ledger: Ledger) -> Snapshot | None:
    """Return the snapshot at which a ledger begins; None when it begins at the run's start."""
    base = ledger.base.snapshot()
    if base is None:
        return None
    heads, digests = base
    last_updates = {update.author: update for _, update in heads}
    fragments = FragmentBlobs(ledger.blobs, digests)
    return Snapshot(fragments, last_updates, True, ledger.base.retracted())


class SnapshotClient:
    """Request snapshots from peers and fetch them. Runs on the exchange's event loop.

    Attributes:
        waiting_reason: Why no snapshot is taken although one is needed; None if nothing is amiss.
        listed: Digest of a version vector → digest of the anchor there, as coordinators list them,
            the newest first.
    """

    def __init__(
        self,
        context: HandlerContext,
        rules: UpdateRules,
        fetcher: BlobFetcher,
    ) -> None:
        self.waiting_reason: str | None = None
        self.listed: Mapping[str, str] = {}
        self._refuted: set[str] = set()  # volunteers that served others than the listed weights
        self._rules = rules
        self._run_on_disk = context.run_on_disk
        self._ledger = context.ledger
        self._gossip = context.gossip
        self._connections = context.connections
        self._fetcher = fetcher
        # Peer → the vector we requested from it, and its answer
        self._requests: dict[
            str, tuple[dict[str, int] | None, asyncio.Future[SnapshotManifest]]
        ] = {}

    def set_rules(self, rules: UpdateRules) -> None:
        """Replace the rules, which change with the mirror list."""
        self._rules = rules

    def set_listed(self, anchors: Mapping[str, str]) -> None:
        """Replace the anchors that coordinators list as confirmed. Safe from any thread."""
        self.listed = dict(anchors)

    # ---- requests

    def message_handlers(self) -> MessageHandlers:
        """Return what receives each type of message."""
        return {SnapshotManifest: self.on_manifest}

    async def request(
        self,
        key: str,
        vector: dict[str, int] | None,
        timeout: float,
        confirmed: Sequence[str] = (),
    ) -> SnapshotManifest | None:
        """Request a peer's snapshot at `vector`, or at one of its choice.

        Args:
            key: The peer.
            vector: Author → sequence number.
            timeout: Seconds.
            confirmed: Digests of version vectors: the peer chooses the first one that it knows.

        Returns:
            None when the peer does not answer within `timeout` seconds.
        """
        if key not in self._connections or timeout <= 0:
            return None
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[SnapshotManifest] = loop.create_future()
        self._requests[key] = vector, answer
        self._connections[key].send_message(
            SnapshotRequest(vector=vector, confirmed=list(confirmed))
        )
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except (TimeoutError, ChannelClosedError):
            return None
        finally:
            if self._requests.get(key) == (vector, answer):
                del self._requests[key]

    def on_manifest(self, received: Received[SnapshotManifest]) -> None:
        """Receive a peer's answer; ignore one to an earlier request."""
        manifest = received.message
        vector, answer = self._requests.get(received.key, (None, None))
        if answer is not None and not answer.done() and vector in (None, manifest.vector):
            answer.set_result(manifest)

    def on_disconnected(self, key: str) -> None:
        """End the request to a peer whose connection ended."""
        _, answer = self._requests.get(key, (None, None))
        if answer is not None and not answer.done():
            answer.set_exception(ChannelClosedError("it left"))

    # ---- snapshots

    async def join(self, timeout: float, trust_all: bool = False) -> Snapshot | None:
        """Fetch a snapshot and begin the ledger there; return None when there is none to fetch.

        Args:
            timeout: Seconds for peers to answer; bytes that arrive extend it.
            trust_all: Whether each linked volunteer has a vote, and a single one suffices. It never
                does if this machine has updates.
        """
        fetched = await self.fetch(timeout, trust_all and not self._ledger.vector())
        if fetched is None:
            return None
        manifest = fetched.manifest
        if not self._ledger.can_rebase(manifest.vector, fetched.verdicts):
            return None
        self._ledger.rebase(fetched.heads, manifest.fragments, fetched.verdicts)
        for ticket in fetched.tickets:
            self._ledger.tickets.store(ticket)
        return Snapshot(
            FragmentBlobs(self._ledger.blobs, manifest.fragments),
            {update.author: update for _, update in fetched.heads},
            fetched.confirmed,
            fetched.verdicts.retracted_within(manifest.vector),
        )

    async def fetch(self, timeout: float, trust_all: bool = False) -> FetchedSnapshot | None:
        """Fetch a snapshot from all peers that have it; see `join`.

        Returns:
            None when the peers are at the run's start, when nobody whose word counts confirms a
            snapshot within `timeout` seconds, or when what peers sent is not one.
        """
        end = asyncio.get_running_loop().time() + timeout
        votes = None if trust_all else await self.weigh_votes()
        target = await self._choose_target(end, votes)
        if target is None:
            return None
        async with SnapshotWitnesses(self, target) as witnesses:
            agreed = await witnesses.agree(end, votes)
            is_new = not self._gossip.vector
            if is_new and witnesses.is_unanswered and self._can_replay(target.vector):
                log.info("receiving every update: no connected machine sends its weights")
                self.waiting_reason = None
                return None
            fetched = await self._fetch_agreed(agreed, witnesses, end)
            if fetched is not None and not fetched.confirmed:
                is_listed = await self._run_on_disk(self._is_listed, fetched)
                if not (is_listed or trust_all):
                    log.warning("a peer has other weights than the site confirms")
                fetched = replace(fetched, confirmed=is_listed) if is_listed or trust_all else None
            if fetched is None and target.is_listed:
                self._refuted |= witnesses.volunteers_with(agreed) if agreed else target.named_by
        if fetched is not None:
            self.waiting_reason = None
            if not fetched.confirmed:
                log.warning("the weights are unconfirmed: this machine's owner trusts its peers")
        return fetched

    async def _fetch_agreed(
        self, agreed: AgreedSnapshot | None, witnesses: "SnapshotWitnesses", end: float
    ) -> FetchedSnapshot | None:
        """Fetch a snapshot's bytes and check what they prove; return None when they do not."""
        if agreed is None:
            self._state_waiting(DISAGREEMENT)
            return None
        seconds = max(MIN_FETCH_SECONDS, end - asyncio.get_running_loop().time())
        if not await self._fetch_bytes(agreed.manifest, witnesses.holders, seconds):
            log.warning("the snapshot did not come whole")
            return None
        return await self._read_fetched(agreed, witnesses)

    async def weigh_votes(self) -> Votes:
        """Weigh the votes of volunteers by their work in this machine's ledger.

        Volunteers that this machine doubts do not vote: their updates may say nothing.
        """
        work, voters = await self._run_on_disk(self._ledger.work_of_volunteers)
        stated = self._ledger.verdicts.statements.get(self._gossip.membership.key)
        return Votes.from_work(work, voters - stated.doubted.keys() if stated else voters)

    def is_overtaken(self, votes: Votes) -> bool:
        """Return whether most votes have updates that no peer has, or too few vote to decide."""
        now = asyncio.get_running_loop().time()
        return not self._can_decide(votes) or self._gossip.is_overtaken(now, votes)

    def _can_decide(self, votes: Votes) -> bool:
        vectors = self._gossip.volunteer_vectors()
        return self.this_volunteer in vectors or votes.can_decide(vectors)

    def _is_listed(self, fetched: FetchedSnapshot) -> bool:
        """Return whether a snapshot is an anchor that coordinators list as confirmed.

        The digest of its version vector leaves no choice of updates, and that of its fragments none
        of weights.
        """
        manifest = fetched.manifest
        retracted = fetched.verdicts.retracted_within(manifest.vector)
        listed = self.listed.get(digest_vector(manifest.vector, retracted))
        fragments = FragmentBlobs(self._ledger.blobs, manifest.fragments)
        return listed is not None and digest_fragments(fragments) == listed

    def _state_waiting(self, reason: str) -> None:
        """Record why no snapshot is taken; log it the first time."""
        if not self._ledger.vector() and reason == UNCONFIRMED:
            reason += TRUST_HINT
        if self.waiting_reason != reason:
            log.warning("%s", reason)
        self.waiting_reason = reason

    async def _fetch_bytes(
        self, manifest: SnapshotManifest, holders: dict[str, set[str]], timeout: float
    ) -> bool:
        """Fetch a snapshot's blobs; arriving bytes extend the timeout, as models may be large."""
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        sizes = self._rules.sizes
        wanted = {
            digest: WantedBlob(digest, 4 * size, 4 * size)
            for digest, size in zip(manifest.fragments, sizes, strict=True)
        }
        wanted[manifest.heads] = WantedBlob(manifest.heads, None, MAX_HEADS_BYTES)
        if not await self._fetcher.fetch([*wanted.values()], timeout, MIN_FETCH_RATE, holders):
            return False
        log.info(
            "fetched %.1f MB of a snapshot in %.1f s",
            sum(4 * size for size in sizes) / 1e6,
            loop.time() - started_at,
        )
        return True

    async def _wait_for_mirror_list(self, data: bytes) -> None:
        """Wait a moment for the mirror list that a snapshot's verdicts name: peers send it, too."""
        try:
            proofs = VerdictProofs.model_validate_json(data)
            verdicts = [Verdict.model_validate_json(ruling.body) for ruling in proofs.verdicts]
        except ValidationError:
            return  # `read_verdicts` refuses them
        version = max((verdict.mirror_list_version for verdict in verdicts), default=0)
        loop = asyncio.get_running_loop()
        end = loop.time() + LIST_SECONDS
        while self._rules.mirrors.list_version < version and loop.time() < end:
            await asyncio.sleep(POLL_INTERVAL)

    async def _read_fetched(
        self, agreed: "AgreedSnapshot", witnesses: "SnapshotWitnesses"
    ) -> FetchedSnapshot | None:
        """Check a snapshot's heads, tickets and verdicts; return None when they are not valid."""
        manifest = agreed.manifest
        try:
            heads = read_heads(
                self._ledger.blobs.read(manifest.heads), self._rules.run, manifest.vector
            )

            def read_tickets(data: bytes) -> list[Signed]:
                return validate_heads(heads, read_signed(data), self._ledger, self._rules)

            def read_proofs(data: bytes) -> VerdictSet:
                return read_verdicts(data, self._rules, manifest, heads)

            tickets = await self._read_first_valid(agreed.tickets, witnesses, read_tickets)
            if manifest.verdicts is None:
                verdicts = read_proofs(NO_PROOFS)
            else:
                verdicts = await self._read_first_valid(agreed.proofs, witnesses, read_proofs)
        except MessageError as error:
            log.warning("a snapshot is refused: %s", error)
            return None
        return FetchedSnapshot(manifest, heads, tickets, verdicts, agreed.confirmed)

    async def _read_first_valid(
        self,
        digests: Sequence[str],
        witnesses: "SnapshotWitnesses",
        read: Callable[[bytes], T],
    ) -> T:
        """Fetch the blobs that peers name, one after the other, until `read` finds one valid.

        Such a list is not the same on every machine, so that no majority decides: it proves itself.

        Raises:
            MessageError: When none is valid: what is wrong with the last one.
        """
        problem = MessageError("no peer sent the list of its tickets or verdicts")
        for digest in digests:
            wanted = [WantedBlob(digest, None, MAX_HEADS_BYTES)]
            holders = witnesses.holders
            if not await self._fetcher.fetch(wanted, BLOB_SECONDS, MIN_FETCH_RATE, holders):
                continue
            data = self._ledger.blobs.read(digest)
            await self._wait_for_mirror_list(data)
            try:
                return await self._run_on_disk(read, data)
            except MessageError as error:
                problem = error
        raise problem

    async def fetch_fragment(
        self, index: int, vector: dict[str, int], timeout: float
    ) -> torch.Tensor | None:
        """Fetch one fragment of the peers' anchors at `vector` and with our verdicts.

        Returns:
            int32 [size]: the fragment that most volunteers name; None when no peer sends it within
            `timeout` seconds.
        """
        volunteers = {
            key: connection.ticket.volunteer for key, connection in self._connections.items()
        }
        manifests = await asyncio.gather(
            *(self.request(key, vector, timeout / 2) for key in volunteers)
        )
        verdicts_digest = self._ledger.verdicts.effect_digest
        fitting = [
            (volunteer, manifest)
            for volunteer, manifest in zip(volunteers.values(), manifests, strict=True)
            if manifest is not None
            and manifest.vector == vector
            and manifest.verdicts == verdicts_digest
            and len(manifest.fragments) == self.fragment_count
        ]
        votes = await self.weigh_votes()
        chosen = choose_majority(fitting, self.this_volunteer, votes)
        if chosen is None:
            return None
        manifest, supporters = chosen
        linked = {*volunteers.values()}
        if len(linked) > 1 and not is_agreed(
            supporters[1 + index], linked, self.this_volunteer, votes
        ):
            return None
        digest = manifest.fragments[index]
        size = 4 * self._rules.sizes[index]
        blobs = self._ledger.blobs
        wanted = [WantedBlob(digest, size, size)]
        if not await self._fetcher.fetch(wanted, timeout, MIN_FETCH_RATE):
            return None
        units = fragment_from_bytes(blobs.read(digest))
        blobs.delete(digest)
        return units

    # ---- the peers' answers

    async def _choose_target(self, end: float, votes: Votes | None) -> "SnapshotTarget | None":
        """Wait until enough votes have something, or a peer has what coordinators list.

        Returns:
            None when most peers are at the run's start, when a joiner can receive every update from
            its author's first on, or at loop time `end`.
        """
        loop = asyncio.get_running_loop()
        first_state_at: float | None = None
        fresh_since: float | None = None
        while (now := loop.time()) < end:
            await asyncio.sleep(POLL_INTERVAL)
            if not any(link.has_state for link in self._gossip.links.values()):
                continue
            first_state_at = first_state_at or now
            vectors = self._gossip.volunteer_vectors()
            ahead = [vector for vector in vectors.values() if vector]
            fresh = len(vectors) - len(ahead)
            has_authority = self.this_volunteer in vectors or self.listed
            is_fresh = not ahead or (not has_authority and fresh > len(ahead))
            fresh_since = (fresh_since or now) if is_fresh else None
            if fresh_since is not None and now > fresh_since + FRESH_SECONDS:
                return None
            wait = CONNECTION_SECONDS if self.unconnected_peers else INTRODUCTION_SECONDS
            if is_fresh or now < first_state_at + wait:
                continue
            if votes is None or self._can_decide(votes):
                if agreed := self._gossip.agreed_vector(votes):
                    return SnapshotTarget(_join_vectors(agreed, self._gossip.vector))
                self._state_waiting(DISAGREEMENT)
                continue
            if not self._gossip.vector and self._can_replay(self._gossip.agreed_vector()):
                log.info("receiving every update: nobody confirms weights yet")
                self.waiting_reason = None
                return None
            self._state_waiting(UNCONFIRMED)
            target = await self._find_listed(end - now)
            if target is not None and self._is_ahead(target.vector):
                return target
        return None

    def _is_ahead(self, vector: Mapping[str, int]) -> bool:
        """Return whether a version vector has what this machine lacks and cannot receive.

        What this machine has past it is applied on top.
        """
        ours = self._gossip.vector
        unavailable = self._gossip.unavailable_authors(asyncio.get_running_loop().time())
        return any(vector.get(author, 0) > ours.get(author, 0) for author in unavailable or vector)

    def _can_replay(self, vector: dict[str, int]) -> bool:
        """Return whether a joiner may receive every update up to a version vector."""
        most = MAX_REPLAYED_UPDATES * (1 if self.listed else UNLISTED_REPLAYS)
        return self._gossip.can_replay(vector, most)

    async def _find_listed(self, timeout: float) -> "SnapshotTarget | None":
        """Return where peers say that they have an anchor that coordinators list.

        What the peers serve is compared with the list later (`_is_listed`).
        """
        if not self.listed:
            return None
        digests = [*self.listed][:MAX_CONFIRMED]
        seconds = min(timeout, CONFIRMED_TIMEOUT)
        asked = self.connections_to_ask(for_listed=True)
        manifests = await asyncio.gather(
            *(self.request(connection.key, None, seconds, digests) for connection in asked)
        )
        answers = [
            (c.ticket.volunteer, m.vector) for c, m in zip(asked, manifests, strict=True) if m
        ]
        if not answers:
            return None
        vector = answers[0][1]
        return SnapshotTarget(vector, frozenset(name for name, other in answers if other == vector))

    def connections_to_ask(self, for_listed: bool) -> list[Connection]:
        """Return the connected peers; for a listed anchor those that have served no false one."""
        connections = list(self._connections.values())
        others = [c for c in connections if c.ticket.volunteer not in self._refuted]
        if not others:
            self._refuted.clear()  # one of them may have been slow, or repaired what was damaged
        return (others if for_listed else []) or connections

    @property
    def needs_snapshot(self) -> bool:
        """Whether peers are ahead with more than this machine would receive one by one."""
        agreed = self._gossip.agreed_vector()
        vector = self._gossip.vector
        is_behind = any(seq > vector.get(author, 0) for author, seq in agreed.items())
        return is_behind and not self._can_replay(agreed)

    @property
    def this_volunteer(self) -> str:
        """Digest of this machine's own volunteer."""
        return self._gossip.volunteer

    @property
    def linked_volunteers(self) -> Collection[str]:
        """The linked volunteers that have something to compare."""
        return self._gossip.volunteer_vectors().keys()

    @property
    def fragment_count(self) -> int:
        """How many fragments the model has."""
        return len(self._rules.sizes)

    @property
    def unconnected_peers(self) -> set[str]:
        """Keys of the known peers that this machine is not connected to."""
        return self._gossip.membership.passive.keys() - self._connections.keys()


@dataclass(frozen=True)
class SnapshotTarget:
    """The snapshot to request."""

    vector: dict[str, int]  # where it is
    named_by: frozenset[str] = frozenset()  # volunteers that say that coordinators list it

    @property
    def is_listed(self) -> bool:
        """Whether coordinators may list it as confirmed."""
        return bool(self.named_by)


def _join_vectors(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """Return the smallest version vector that reaches both."""
    return {a: max(one.get(a, 0), other.get(a, 0)) for a in sorted(one.keys() | other.keys())}


class SnapshotWitnesses:
    """Ask all connected peers for the snapshot at one version vector, for as long as this is open.

    Their answers are compared, and the bytes are fetched from all that have them.

    Attributes:
        holders: Digest → keys of the peers that have the blob; it grows.
    """

    def __init__(self, client: SnapshotClient, target: SnapshotTarget) -> None:
        self._client = client
        self._target = target
        self._answers: dict[str, tuple[str, SnapshotManifest]] = {}  # peer → (volunteer, its own)
        self.holders: dict[str, set[str]] = {}
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._has_logged_difference = False

    async def __aenter__(self) -> "SnapshotWitnesses":
        self._task = asyncio.get_running_loop().create_task(self._request_from_all())
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in (self._task, *self._requests.values()):
            task.cancel()

    async def agree(self, end: float, votes: Votes | None) -> AgreedSnapshot | None:
        """Wait until enough volunteers agree, or nobody is left to ask.

        Args:
            end: Event loop time until which they must agree.
            votes: Of the volunteers; None: each linked one has a vote, and a single one suffices.

        Returns:
            What they agree on, or what most serve of a listed snapshot; None if they do not agree.
        """
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        while True:
            await asyncio.sleep(POLL_INTERVAL)
            answering = {volunteer for volunteer, _ in self._answers.values()}
            linked = {*self._client.linked_volunteers, *answering}
            now = loop.time()
            is_late = now > started_at + CONNECTION_SECONDS
            all_answered = bool(self._requests) and all(
                task.done() for task in self._requests.values()
            )
            if self._target.is_listed and self._answers:
                if is_late or all_answered or len(linked) == 1:
                    return self._collect(self._choose_whole(), False)
            elif agreed := self._choose_by_votes(votes, linked):
                return agreed
            if now >= end or (all_answered and is_late):
                return None

    def _choose_whole(self) -> SnapshotManifest:
        """Return the answer that most volunteers give. One of them may be what is listed."""
        volunteers: dict[str, set[str]] = {}
        manifests: dict[str, SnapshotManifest] = {}
        for volunteer, manifest in self._answers.values():
            name = str((manifest.heads, manifest.verdicts, manifest.fragments))
            manifests[name] = manifest
            volunteers.setdefault(name, set()).add(volunteer)
        return manifests[max(volunteers, key=lambda name: len(volunteers[name]))]

    def _choose_by_votes(self, votes: Votes | None, linked: set[str]) -> AgreedSnapshot | None:
        """Return what enough votes agree on; None if there is nothing."""
        own = self._client.this_volunteer
        counted = votes or count_each_alike(linked)
        chosen = choose_majority(self._answers.values(), own, counted)
        if chosen is None:
            return None
        manifest, supporters = chosen
        self._log_difference(manifest)
        has_agreed = all(is_agreed(names, linked, own, counted) for names in supporters)
        if not has_agreed and not (votes is None and len(linked) == 1):
            return None
        is_own = all(own in names for names in supporters)
        return self._collect(manifest, has_agreed and (votes is not None or is_own))

    @property
    def is_unanswered(self) -> bool:
        """Whether nobody has answered: the lead of a crew, for one, sends no snapshots."""
        return not self._answers

    def volunteers_with(self, agreed: AgreedSnapshot) -> set[str]:
        """Return the volunteers that serve these fragments."""
        fragments = agreed.manifest.fragments
        return {name for name, own in self._answers.values() if own.fragments == fragments}

    def _log_difference(self, chosen: SnapshotManifest) -> None:
        """Log once that peers have different anchors at one version vector."""
        names = {(own.heads, *own.fragments) for _, own in self._answers.values()}
        if len(names) > 1 and not self._has_logged_difference:
            self._has_logged_difference = True
            log.warning(
                "peers disagree about the anchor at one version vector (%d ways); most have %s",
                len(names),
                chosen.fragments[0][:8],
            )

    def _collect(self, manifest: SnapshotManifest, confirmed: bool) -> AgreedSnapshot:
        """Return the snapshot with the lists that prove it, of those who have its heads."""
        same = [
            own
            for _, own in self._answers.values()
            if (own.heads, own.verdicts) == (manifest.heads, manifest.verdicts)
        ]
        tickets = Counter(own.tickets for own in same if own.tickets)
        proofs = Counter(own.proofs for own in same if own.proofs)
        return AgreedSnapshot(
            manifest,
            [digest for digest, _ in tickets.most_common()],
            [digest for digest, _ in proofs.most_common()],
            confirmed,
        )

    async def _request_from_all(self) -> None:
        while True:
            for connection in self._client.connections_to_ask(self._target.is_listed):
                if connection.key not in self._requests:
                    task = asyncio.get_running_loop().create_task(self._request(connection))
                    self._requests[connection.key] = task
            await asyncio.sleep(POLL_INTERVAL)

    async def _request(self, connection: Connection) -> None:
        vector = self._target.vector
        manifest = await self._client.request(connection.key, vector, REQUEST_TIMEOUT)
        if manifest is None or manifest.vector != vector:
            return
        count = len(manifest.fragments)
        if count != self._client.fragment_count:
            log.warning(
                "a peer's snapshot has %d fragments, not %d", count, self._client.fragment_count
            )
            return
        self._answers[connection.key] = connection.ticket.volunteer, manifest
        for digest in blob_digests(manifest):
            self.holders.setdefault(digest, set()).add(connection.key)
