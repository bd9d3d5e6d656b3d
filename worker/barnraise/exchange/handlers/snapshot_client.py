"""Join a run that is under way: fetch the anchor at one version vector from several peers.

One peer is asked for a snapshot of its choice and the others for the same one. Their digests are
compared: when peers of two different volunteers agree, the snapshot is confirmed. The bytes then
arrive as blobs, from all peers that have them, and are checked by digest.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from pydantic import TypeAdapter, ValidationError

from barnraise.errors import MessageError
from barnraise.exchange.handlers.blob_fetcher import BlobFetcher, WantedBlob
from barnraise.exchange.handlers.context import HandlerContext
from barnraise.exchange.handlers.snapshot_server import (
    REQUEST_TIMEOUT,
    VerdictProofs,
    blob_digests,
)
from barnraise.exchange.ledger.anchor import Retracted, fragment_from_bytes
from barnraise.exchange.ledger.blob_store import BlobStore
from barnraise.exchange.ledger.ledger import Ledger
from barnraise.exchange.ledger.validation import UpdateRules
from barnraise.exchange.ledger.verdicts import VerdictSet, verify_proof
from barnraise.exchange.network.connection import Connection
from barnraise.exchange.network.transport import ChannelClosedError
from barnraise.protocol.messages import Signed, SnapshotManifest, SnapshotRequest, Update
from barnraise.protocol.signing import open_signed
from barnraise.protocol.verdicts import Verdict

log = logging.getLogger("barnraise.exchange")

NEXT_PEER_DELAY = 2.0  # seconds until a joiner asks another peer as well
FRESH_SECONDS = 2.0  # seconds for which all peers must be at the start to believe that the run is
WITNESS_TIMEOUT = 15.0  # seconds for other peers to answer with the same snapshot
INTRODUCTION_SECONDS = 1.0  # seconds in which a peer introduces a joiner to the others it knows
CONNECTION_SECONDS = 5.0  # seconds in which connections to those are established
MAX_HEADS_BYTES = 64 << 20  # the blobs of heads and of proofs are no larger
MIN_FETCH_SECONDS = 10.0  # seconds for the bytes of a snapshot at least
MIN_FETCH_RATE = 1 << 16  # bytes per second; each so many bytes extend that by a second
POLL_INTERVAL = 0.05  # seconds between two looks at the peers' answers
LIST_SECONDS = 5.0  # seconds for the mirror list that a snapshot's verdicts name to arrive
NO_PROOFS = VerdictProofs(verdicts=[], forks=[]).model_dump_json().encode()
_signed_headers = TypeAdapter(list[Signed])


@dataclass(frozen=True)
class Snapshot:
    """An anchor to start from.

    Attributes:
        fragments: int32 [size] for each fragment, in order.
        heads: Author → the last update in the anchor.
        confirmed: Whether peers of two different volunteers agree on it.
        retracted: What verdicts retracted from among those updates.
    """

    fragments: Sequence[torch.Tensor]
    heads: dict[str, Update]
    confirmed: bool
    retracted: Retracted = field(default_factory=dict)


@dataclass(frozen=True)
class FetchedSnapshot:
    """A snapshot whose bytes are all on disk, with its authors' last headers and its verdicts."""

    manifest: SnapshotManifest
    heads: list[tuple[Signed, Update]]
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


def read_heads(data: bytes, run: str, vector: dict[str, int]) -> list[tuple[Signed, Update]]:
    """Return the headers in a snapshot's blob of heads.

    Raises:
        MessageError: When they are not signed, or not exactly the last ones of `vector`.
    """
    try:
        signed = _signed_headers.validate_json(data)
    except ValidationError:
        raise MessageError("a snapshot's heads are not a list of signed headers") from None
    heads = [(header, open_signed(header, "update", Update, key=header.key)) for header in signed]
    if any(update.peer != header.key or update.run != run for header, update in heads):
        raise MessageError("a snapshot's heads are of another run, or not signed by their authors")
    if len(heads) != len(vector) or {update.author: update.seq for _, update in heads} != vector:
        raise MessageError("a snapshot's heads are not those of its version vector")
    return heads


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
    for proof in (*proofs.verdicts, *proofs.forks):
        verdicts |= verify_proof(proof, rules)
    verdicts = verdicts.bind({update.author: update.volunteer for _, update in heads})
    if verdicts.digest != manifest.verdicts or verdicts.clamp(manifest.vector) != manifest.vector:
        raise MessageError("a snapshot's verdicts are not those that its manifest names")
    return verdicts


def load_base_snapshot(ledger: Ledger) -> Snapshot | None:
    """Return the snapshot at which a ledger begins; None when it begins at the run's start."""
    base = ledger.base_snapshot()
    if base is None:
        return None
    heads, digests = base
    last_updates = {update.author: update for _, update in heads}
    fragments = FragmentBlobs(ledger.blobs, digests)
    return Snapshot(fragments, last_updates, True, ledger.base_retracted())


def choose_majority(
    answers: Iterable[tuple[str, SnapshotManifest]],
) -> tuple[SnapshotManifest, int] | None:
    """Combine the answers to one request into the snapshot that most volunteers agree on.

    The heads are those that most volunteers name, and each fragment is the one that most of these
    volunteers name, so that a damaged fragment costs its owner only that one vote. Pure.

    Args:
        answers: (volunteer, manifest) of each peer, all with equally many fragments. The machines
            of one volunteer count once.

    Returns:
        The snapshot, and how many volunteers agree on each part of it at least.
    """
    answers = list(answers)
    if not answers:
        return None
    heads, agreeing = _most_votes((volunteer, manifest.heads) for volunteer, manifest in answers)
    answers = [(volunteer, manifest) for volunteer, manifest in answers if manifest.heads == heads]
    first = answers[0][1]
    fragments = []
    for index in range(len(first.fragments)):
        digest, volunteers = _most_votes(
            (volunteer, manifest.fragments[index]) for volunteer, manifest in answers
        )
        fragments.append(digest)
        agreeing = min(agreeing, volunteers)
    return first.model_copy(update={"fragments": fragments}), agreeing


def _most_votes(votes: Iterable[tuple[str, str]]) -> tuple[str, int]:
    """Return the digest that most volunteers name, and how many do."""
    voters: dict[str, set[str]] = {}
    for volunteer, digest in votes:
        voters.setdefault(digest, set()).add(volunteer)
    best = max(voters, key=lambda digest: len(voters[digest]))
    return best, len(voters[best])


class SnapshotClient:
    """Request snapshots from peers and fetch them. Runs on the exchange's event loop."""

    def __init__(self, context: HandlerContext, rules: UpdateRules, fetcher: BlobFetcher) -> None:
        """Start without requests.

        Args:
            context: What the server's handlers share.
            rules: What verdicts are checked against, and the fragments' sizes.
            fetcher: Fetches the bytes.
        """
        self._rules = rules
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

    # ---- requests

    async def request(
        self, key: str, vector: dict[str, int] | None, timeout: float
    ) -> SnapshotManifest | None:
        """Request a peer's snapshot at `vector`, or at one of its choice.

        Returns:
            None when the peer does not answer within `timeout` seconds.
        """
        if key not in self._connections or timeout <= 0:
            return None
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[SnapshotManifest] = loop.create_future()
        self._requests[key] = vector, answer
        self._connections[key].send_message(SnapshotRequest(vector=vector))
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except (TimeoutError, ChannelClosedError):
            return None
        finally:
            if self._requests.get(key) == (vector, answer):
                del self._requests[key]

    def on_manifest(self, key: str, manifest: SnapshotManifest) -> None:
        """Receive a peer's answer; ignore one to an earlier request."""
        vector, answer = self._requests.get(key, (None, None))
        if answer is not None and not answer.done() and vector in (None, manifest.vector):
            answer.set_result(manifest)

    def on_disconnected(self, key: str) -> None:
        """End the request to a peer whose connection ended."""
        _, answer = self._requests.get(key, (None, None))
        if answer is not None and not answer.done():
            answer.set_exception(ChannelClosedError("it left"))

    # ---- snapshots

    async def join(self, timeout: float) -> Snapshot | None:
        """Fetch a snapshot and begin the ledger there; return None when there is none to fetch."""
        fetched = await self.fetch(timeout)
        if fetched is None:
            return None
        manifest = fetched.manifest
        if not self._ledger.can_rebase(manifest.vector, fetched.verdicts):
            return None
        self._ledger.rebase(fetched.heads, manifest.fragments, fetched.verdicts)
        return Snapshot(
            FragmentBlobs(self._ledger.blobs, manifest.fragments),
            {update.author: update for _, update in fetched.heads},
            fetched.confirmed,
            fetched.verdicts.retracted_within(manifest.vector),
        )

    async def fetch(self, timeout: float) -> FetchedSnapshot | None:
        """Fetch a snapshot from all peers that have it.

        Returns:
            None when the peers are at the run's start, when no peer answers within `timeout`
            seconds, or when what they sent is no snapshot.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        first = await self._first_answer(end)
        if first is None:
            return None
        async with SnapshotWitnesses(self, *first) as witnesses:
            manifest, volunteers = await witnesses.agree(end)
            if witnesses.disagree:
                log.warning(
                    "peers disagree about the anchor at one version vector; %d agree on what is "
                    "taken",
                    volunteers,
                )
            seconds = max(MIN_FETCH_SECONDS, end - loop.time())
            if not await self._fetch_bytes(manifest, witnesses.holders, seconds):
                log.warning("the snapshot did not come whole")
                return None
        await self._wait_for_mirror_list(manifest)
        fetched = self._read_fetched(manifest, confirmed=volunteers >= 2)
        if fetched is not None and not fetched.confirmed:
            log.warning("the snapshot is unconfirmed: peers of only one volunteer vouch for it")
        return fetched

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
        for digest in (manifest.heads, manifest.proofs):
            if digest:
                wanted[digest] = WantedBlob(digest, None, MAX_HEADS_BYTES)
        if not await self._fetcher.fetch([*wanted.values()], timeout, MIN_FETCH_RATE, holders):
            return False
        log.info(
            "fetched %.1f MB of a snapshot in %.1f s",
            sum(4 * size for size in sizes) / 1e6,
            loop.time() - started_at,
        )
        return True

    async def _wait_for_mirror_list(self, manifest: SnapshotManifest) -> None:
        """Wait a moment for the mirror list that a snapshot's verdicts name: peers send it, too."""
        if not manifest.proofs:
            return
        try:
            proofs = VerdictProofs.model_validate_json(self._ledger.blobs.read(manifest.proofs))
            verdicts = [Verdict.model_validate_json(ruling.body) for ruling in proofs.verdicts]
        except ValidationError:
            return  # `read_verdicts` refuses them
        version = max((verdict.mirror_list_version for verdict in verdicts), default=0)
        loop = asyncio.get_running_loop()
        end = loop.time() + LIST_SECONDS
        while self._rules.list_version < version and loop.time() < end:
            await asyncio.sleep(POLL_INTERVAL)

    def _read_fetched(self, manifest: SnapshotManifest, confirmed: bool) -> FetchedSnapshot | None:
        """Check a snapshot's heads and verdicts; return None when they are not valid."""
        blobs = self._ledger.blobs
        try:
            heads = read_heads(blobs.read(manifest.heads), self._rules.run, manifest.vector)
            proofs = blobs.read(manifest.proofs) if manifest.proofs else NO_PROOFS
            verdicts = read_verdicts(proofs, self._rules, manifest, heads)
        except MessageError as error:
            log.warning("a snapshot is refused: %s", error)
            return None
        return FetchedSnapshot(manifest, heads, verdicts, confirmed)

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
        verdicts_digest = self._ledger.verdicts.digest
        fitting = [
            (volunteer, manifest)
            for volunteer, manifest in zip(volunteers.values(), manifests, strict=True)
            if manifest is not None
            and manifest.vector == vector
            and manifest.verdicts == verdicts_digest
            and len(manifest.fragments) == self.fragment_count
        ]
        chosen = choose_majority(fitting)
        if chosen is None:
            return None
        digest = chosen[0].fragments[index]
        size = 4 * self._rules.sizes[index]
        blobs = self._ledger.blobs
        wanted = [WantedBlob(digest, size, size)]
        if not await self._fetcher.fetch(wanted, timeout, MIN_FETCH_RATE):
            return None
        units = fragment_from_bytes(blobs.read(digest))
        blobs.delete(digest)
        return units

    # ---- the peers' answers

    async def _first_answer(self, end: float) -> tuple[Connection, SnapshotManifest] | None:
        """Return the first snapshot that a peer sends until loop time `end`.

        The peers that have most are asked first. Another one is asked every few seconds, as a peer
        may be in the middle of a long step.

        Returns:
            The peer's connection and its snapshot; None when all peers are at the run's start, or
            when the time is up.
        """
        loop = asyncio.get_running_loop()
        requests: dict[str, asyncio.Task[SnapshotManifest | None]] = {}
        next_request_at = 0.0
        fresh_since: float | None = None
        try:
            while (now := loop.time()) < end:
                answer = self._finished_answer(requests)
                if answer is not None:
                    return answer
                links = [link for link in self._gossip.links.values() if link.has_state]
                ahead = sorted(
                    (link for link in links if link.vector),
                    key=lambda link: -sum(link.vector.values()),
                )
                unasked = [link.key for link in ahead if link.key not in requests]
                if unasked and now >= next_request_at:
                    request = self.request(unasked[0], None, min(REQUEST_TIMEOUT, end - now))
                    requests[unasked[0]] = loop.create_task(request)
                    next_request_at = now + NEXT_PEER_DELAY
                if links and not ahead:
                    fresh_since = fresh_since or now
                    if now > fresh_since + FRESH_SECONDS:
                        return None
                else:
                    fresh_since = None
                await asyncio.sleep(POLL_INTERVAL)
            return None
        finally:
            for task in requests.values():
                task.cancel()

    def _finished_answer(
        self, requests: dict[str, asyncio.Task[SnapshotManifest | None]]
    ) -> tuple[Connection, SnapshotManifest] | None:
        """Return a snapshot among finished requests; remove failed ones, to be asked again."""
        for key, task in list(requests.items()):
            if not task.done():
                continue
            manifest = task.result()
            connection = self._connections.get(key)
            if (
                manifest is not None
                and manifest.vector
                and len(manifest.fragments) == self.fragment_count
                and connection is not None
            ):
                return connection, manifest
            del requests[key]
        return None

    @property
    def fragment_count(self) -> int:
        """How many fragments the model has."""
        return len(self._rules.sizes)

    @property
    def connections(self) -> list[Connection]:
        """The connected peers."""
        return list(self._connections.values())

    @property
    def unconnected_peers(self) -> set[str]:
        """Keys of the known peers that this machine is not connected to."""
        return self._gossip.membership.passive.keys() - self._connections.keys()


class SnapshotWitnesses:
    """Ask all connected peers for a snapshot that one peer sent, for as long as this is open.

    Their answers are compared, and the bytes are fetched from all that have them.

    Attributes:
        holders: Digest → keys of the peers that have the blob; it grows.
    """

    def __init__(
        self, client: SnapshotClient, connection: Connection, manifest: SnapshotManifest
    ) -> None:
        """Begin with the snapshot that one peer sent."""
        self._client = client
        self._first = manifest
        self._answers: dict[str, tuple[str, SnapshotManifest]] = {}  # peer → (volunteer, its own)
        self.holders: dict[str, set[str]] = {}
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._started_at = asyncio.get_running_loop().time()
        self._add_answer(connection, manifest)

    async def __aenter__(self) -> "SnapshotWitnesses":
        self._task = asyncio.get_running_loop().create_task(self._request_from_all())
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in (self._task, *self._requests.values()):
            task.cancel()

    @property
    def disagree(self) -> bool:
        """Whether any two answers differ."""
        return len({(own.heads, *own.fragments) for _, own in self._answers.values()}) > 1

    async def agree(self, end: float) -> tuple[SnapshotManifest, int]:
        """Wait until two volunteers agree, or nobody is left to ask.

        Args:
            end: Event loop time until which the snapshot must be fetched.

        Returns:
            The snapshot to fetch, and how many volunteers agree on it.
        """
        loop = asyncio.get_running_loop()
        # The larger part of the time is for fetching.
        last = self._started_at + min(WITNESS_TIMEOUT, (end - self._started_at) / 3)
        while True:
            chosen = choose_majority(self._answers.values()) or (self._first, 1)
            now = loop.time()
            if now >= last or chosen[1] >= 2:
                return chosen
            wait = INTRODUCTION_SECONDS
            if self._client.unconnected_peers - self._requests.keys():
                wait = CONNECTION_SECONDS
            all_answered = all(task.done() for task in self._requests.values())
            if all_answered and now > self._started_at + wait:
                return chosen
            await asyncio.sleep(POLL_INTERVAL)

    async def _request_from_all(self) -> None:
        while True:
            for connection in self._client.connections:
                if connection.key not in self._answers and connection.key not in self._requests:
                    task = asyncio.get_running_loop().create_task(self._request(connection))
                    self._requests[connection.key] = task
            await asyncio.sleep(POLL_INTERVAL)

    async def _request(self, connection: Connection) -> None:
        first = self._first
        manifest = await self._client.request(connection.key, first.vector, REQUEST_TIMEOUT)
        if (
            manifest is not None
            and manifest.vector == first.vector
            and manifest.verdicts == first.verdicts
        ):
            self._add_answer(connection, manifest)

    def _add_answer(self, connection: Connection, manifest: SnapshotManifest) -> None:
        count = len(manifest.fragments)
        if count != self._client.fragment_count:
            log.warning(
                "a peer's snapshot has %d fragments, not %d", count, self._client.fragment_count
            )
            return
        self._answers[connection.key] = connection.ticket.volunteer, manifest
        for digest in blob_digests(manifest):
            self.holders.setdefault(digest, set()).add(connection.key)
