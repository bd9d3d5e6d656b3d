"""Serve snapshots of our anchor: its fragments at a version vector, with verdicts applied.

The training loop copies the anchor between two steps. When the requested vector lies behind the
copy, the updates after it are subtracted again, and those that verdicts name: integer subtraction
is exact, so every honest peer builds the same bytes for the same vector and verdicts.
"""

import asyncio
import json
import logging
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from pydantic import Field

from barnraise.exchange.gossip.handler_context import RunInThread
from barnraise.ledger.anchor import Anchor, Retracted, fragment_to_bytes
from barnraise.ledger.anchor_diff import updates_between
from barnraise.ledger.blob_store import BlobStore
from barnraise.ledger.codec import decode
from barnraise.ledger.ledger import Ledger
from barnraise.peering.limits.service_budget import ServiceBudget
from barnraise.peering.limits.service_limits import Service
from barnraise.peering.links.connection import Connection
from barnraise.peering.links.received import MessageHandlers, Received
from barnraise.protocol.fork_proof import Fork
from barnraise.protocol.messages import Signed, SnapshotManifest, SnapshotRequest, Update
from barnraise.protocol.opinions import SignedOpinions
from barnraise.protocol.types import Message
from barnraise.protocol.verdicts import SignedVerdict

log = logging.getLogger("barnraise.exchange")

REQUEST_TIMEOUT = 30.0  # seconds for which a request waits for the training loop
REUSE_SECONDS = 30.0  # age up to which a snapshot answers requests without a vector
KEEP_SECONDS = 600.0  # for which a snapshot's bytes stay on disk while no peer uses them
SNAPSHOT_EXPIRY_SECONDS = 60.0  # between two looks for such snapshots
MAX_SNAPSHOTS = 4  # snapshots whose bytes are on disk at once
MAX_PENDING_REQUESTS = 64


class VerdictProofs(Message):
    """The content of the blob `SnapshotManifest.proofs`."""

    verdicts: list[SignedVerdict] = Field(max_length=200_000)
    forks: list[Fork] = Field(max_length=100_000)
    opinions: list[SignedOpinions] = Field(default=[], max_length=100_000)


@dataclass(frozen=True)
class AnchorCopy:
    """A copy of the anchor, made between two steps: int32 [size] for each fragment."""

    vector: dict[str, int]
    retracted: Retracted
    fragments: Sequence[torch.Tensor]


@dataclass(frozen=True)
class PendingRequest:
    """A peer's request for a snapshot at `vector` (None: at any) until loop time `expires_at`.

    `volunteer` is the digest of the peer's volunteer.
    """

    peer: str
    vector: dict[str, int] | None
    expires_at: float
    volunteer: str = ""


@dataclass
class RecentSnapshot:
    """A snapshot whose bytes are on disk."""

    manifest: SnapshotManifest  # what it consists of
    built_at: float  # event loop time at which it was built
    # Event loop time at which a peer last received its manifest or some of its bytes.
    used_at: float


def choose_kept(recent: Sequence[RecentSnapshot], now: float, limit: int) -> list[RecentSnapshot]:
    """Choose at most `limit` snapshots, given oldest first, whose bytes stay on disk. Pure.

    The time since the last use counts: a joiner with a slow line downloads a large one for hours.
    """
    used = [snapshot for snapshot in recent if now < snapshot.used_at + KEEP_SECONDS]
    return used[max(0, len(used) - limit) :]


class SnapshotServer:
    """Collect requests for the training loop and answer them. Thread-safe.

    Attributes:
        blobs: The bytes of recent snapshots.
    """

    def __init__(
        self,
        ledger: Ledger,
        connections: Mapping[str, Connection],
        run_in_thread: RunInThread,
    ) -> None:
        self._ledger = ledger
        self._connections = connections
        self._run_in_thread = run_in_thread
        self.blobs = BlobStore(ledger.blobs.folder.parent / "snapshots", fresh=True)
        self._requests: list[PendingRequest] = []
        self._vectors = VectorHistory()
        self._recent: list[RecentSnapshot] = []  # the oldest first
        self._stored: set[str] = set()  # digests of all that is on disk, also of failed builds
        self._copy: weakref.ref[AnchorCopy] | None = None  # the last one, while it is in use
        self._builds = ServiceBudget(Service.SNAPSHOTS)
        self._lock = threading.Lock()

    @property
    def pending_requests(self) -> list[PendingRequest]:
        """The requests that wait for the training loop."""
        return list(self._requests)

    def remember_vector(self, vector_digest: str, vector: dict[str, int], milestone: int) -> None:
        """Remember the anchor's version vector after a milestone; see `VectorHistory`."""
        with self._lock:
            self._vectors.add(vector_digest, vector, milestone)

    def message_handlers(self) -> MessageHandlers:
        """Return what receives each type of message."""
        return {SnapshotRequest: self.on_request}

    def on_request(self, received: Received[SnapshotRequest]) -> None:
        """Receive a peer's request; answer at once if a recent snapshot fits."""
        request, now = received.message, received.at
        vector = request.vector
        if request.confirmed:
            with self._lock:
                vector = self._vectors.find_first(request.confirmed)
            if vector is None:
                return  # the peer cannot use any other snapshot
        volunteer = received.connection.ticket.volunteer
        pending = PendingRequest(received.key, vector, now + REQUEST_TIMEOUT, volunteer)
        manifest = self.add_request(pending, now)
        if manifest is not None:
            received.connection.send_message(manifest)

    def add_request(self, request: PendingRequest, now: float) -> SnapshotManifest | None:
        """Return a recent snapshot that fits; else let the request wait for `copy_anchor`."""
        verdicts_digest = self._ledger.verdicts.effect_digest
        with self._lock:
            # A peer's newest request replaces its earlier one.
            self._requests = [other for other in self._requests if other.peer != request.peer]
            for snapshot in reversed(self._recent):
                manifest = snapshot.manifest
                fits = manifest.vector == request.vector or (
                    request.vector is None and now < snapshot.built_at + REUSE_SECONDS
                )
                if fits and manifest.verdicts == verdicts_digest:
                    snapshot.used_at = now
                    return manifest
            if len(self._requests) < MAX_PENDING_REQUESTS:
                self._requests.append(request)
            return None

    def copy_anchor(
        self, anchor: Anchor, now: float
    ) -> tuple[AnchorCopy, list[PendingRequest]] | None:
        """Copy the anchor, between two training steps, if a request waits for it.

        Only one copy exists at a time: peers that keep asking cannot fill the memory. Requests of a
        volunteer for whom too many were made lately are dropped.

        Returns:
            The copy and the requests that it answers; None, at no cost, if there are none.
        """
        if not self._requests or (self._copy is not None and self._copy() is not None):
            return None
        vector = anchor.vector
        with self._lock:
            waiting = [request for request in self._requests if request.expires_at > now]
            answerable = [
                request
                for request in waiting
                if request.vector is None or _is_within(request.vector, vector)
            ]
            self._requests = [request for request in waiting if request not in answerable]
            answerable = [
                request
                for request in answerable
                if self._builds.try_consume({"volunteer": request.volunteer or request.peer}, now)
            ]
        if not answerable:
            return None
        retracted = {author: dict(updates) for author, updates in anchor.retracted.items()}
        copy = AnchorCopy(vector, retracted, anchor.copy_fragments(self.blobs.folder))
        self._copy = weakref.ref(copy)
        return copy, answerable

    async def answer(self, copy: AnchorCopy, requests: list[PendingRequest]) -> None:
        """Send the requesting peers their snapshots, from a copy of the anchor."""
        for request in requests:
            now = asyncio.get_running_loop().time()
            manifest = await self._run_in_thread(self.build_snapshot, copy, request.vector, now)
            connection = self._connections.get(request.peer)
            if manifest is not None and connection is not None:
                self.record_use(manifest.heads, asyncio.get_running_loop().time())
                connection.send_message(manifest)

    def build_snapshot(
        self, copy: AnchorCopy, vector: dict[str, int] | None, now: float
    ) -> SnapshotManifest | None:
        """Build the snapshot at `vector` (None: the copy's) and store its bytes.

        Returns:
            None when this machine lacks updates that must be subtracted, or when verdicts exclude
            the vector.
        """
        verdicts = self._ledger.verdicts
        if vector is None:
            vector = verdicts.clamp(copy.vector)
        with self._lock:
            for snapshot in self._recent:
                manifest = snapshot.manifest
                if manifest.vector == vector and manifest.verdicts == verdicts.effect_digest:
                    snapshot.used_at = now
                    return manifest
        heads = [self._ledger.header(author, seq) for author, seq in sorted(vector.items())]
        signed_heads = [head for head in heads if head is not None]
        changes = updates_between(
            self._ledger, copy.vector, copy.retracted, vector, verdicts.retracted_within(vector)
        )
        if (
            len(signed_heads) < len(heads)
            or changes is None
            or verdicts.clamp(vector) != vector
            or not self._has_payloads(changes)
        ):
            log.info("a peer requested a snapshot that this machine cannot build")
            return None
        try:
            manifest = self._store_snapshot(copy, vector, signed_heads, changes)
            if manifest is not None:
                self._add_recent(manifest, now)
        finally:  # also where the disk is full
            self._delete_unused()
        return manifest

    def _store_snapshot(
        self,
        copy: AnchorCopy,
        vector: dict[str, int],
        signed_heads: list[Signed],
        changes: list[tuple[Update, int]],
    ) -> SnapshotManifest | None:
        """Store the bytes of a snapshot, which `changes` lead to from the copy.

        Returns:
            None when a payload is damaged.
        """
        digests = []
        for index in range(len(copy.fragments)):
            units = self._fragment_at(copy, index, changes)
            if units is None:
                return None
            digests.append(self._store(fragment_to_bytes(units)))
        verdicts = self._ledger.verdicts
        tickets = self._tickets_of(signed_heads)
        proofs = VerdictProofs(
            verdicts=list(verdicts.rulings.values()),
            forks=[fork for _, fork in verdicts.forks.values()],
            opinions=list(verdicts.opinions.values()),
        ).model_dump_json()
        return SnapshotManifest(
            vector=vector,
            fragments=digests,
            heads=self._store(_to_json(signed_heads)),
            tickets=self._store(_to_json(tickets)),
            verdicts=verdicts.effect_digest,
            proofs=self._store(proofs.encode()) if verdicts.effect_digest else None,
        )

    def _store(self, data: bytes | memoryview) -> str:
        digest = self.blobs.store(data)
        self._stored.add(digest)
        return digest

    def _tickets_of(self, heads: list[Signed]) -> list[Signed]:
        """Return the tickets that headers name, each once, as far as they are here."""
        names = {Update.model_validate_json(head.body).ticket for head in heads}
        found = [self._ledger.tickets.get(name) for name in sorted(names)]
        return [ticket for ticket in found if ticket is not None]

    def _fragment_at(
        self, copy: AnchorCopy, index: int, changes: list[tuple[Update, int]]
    ) -> torch.Tensor | None:
        """Return a fragment of the copy after `changes`: updates, each times its factor.

        Returns:
            None when a payload is damaged: it is being repaired, and the peer asks again.
        """
        fragment = copy.fragments[index]
        if not changes:
            return fragment
        units = fragment.clone()
        for update, factor in changes:
            part = update.fragments[index]
            if not part.size:
                continue
            payload = self._ledger.blobs.read_verified(part.digest)
            if payload is None:
                return None
            units.add_(decode(payload, units.numel()), alpha=factor)
        return units

    def _has_payloads(self, changes: list[tuple[Update, int]]) -> bool:
        blobs = self._ledger.blobs
        return all(blobs.has(part.digest) for update, _ in changes for part in update.fragments)

    # ---- what stays on disk

    def record_use(self, digest: str, now: float) -> None:
        """Record that a peer receives some bytes of a blob."""
        with self._lock:
            for snapshot in self._recent:
                if digest in blob_digests(snapshot.manifest):
                    snapshot.used_at = now

    async def delete_expired_often(self) -> None:
        """Delete the bytes of snapshots that no peer uses, now and then, until cancelled."""
        while True:
            await asyncio.sleep(SNAPSHOT_EXPIRY_SECONDS)
            now = asyncio.get_running_loop().time()
            # In the thread of the builds: none of them may find its bytes deleted.
            await self._run_in_thread(self.delete_expired, now)

    def delete_expired(self, now: float) -> None:
        """Delete the bytes of snapshots that no peer uses any longer; no build may be underway."""
        with self._lock:
            self._recent = choose_kept(self._recent, now, MAX_SNAPSHOTS)
        self._delete_unused()

    def _add_recent(self, manifest: SnapshotManifest, now: float) -> None:
        """Remember a snapshot, in place of the oldest one if there are too many."""
        with self._lock:
            kept = choose_kept(self._recent, now, MAX_SNAPSHOTS - 1)
            self._recent = [*kept, RecentSnapshot(manifest, now, now)]

    def _delete_unused(self) -> None:
        """Delete the bytes that belong to no recent snapshot."""
        with self._lock:
            used = {digest for each in self._recent for digest in blob_digests(each.manifest)}
        for digest in self._stored - used:
            try:
                self.blobs.delete(digest)
            except OSError as error:  # where a file that is being read cannot be deleted
                log.warning("bytes of an old snapshot stay for now: %s", error)
            else:
                self._stored.discard(digest)


def blob_digests(manifest: SnapshotManifest) -> list[str]:
    """Return the digests of all blobs of a snapshot."""
    lists = (manifest.heads, manifest.tickets, manifest.proofs)
    return [digest for digest in (*manifest.fragments, *lists) if digest]


def _to_json(documents: list[Signed]) -> bytes:
    """Return the text of signed documents, the same on every machine."""
    fields = [document.model_dump() for document in documents]
    return json.dumps(fields, separators=(",", ":")).encode()


def _is_within(inner: dict[str, int], outer: dict[str, int]) -> bool:
    """Return whether a version vector is reached by another."""
    return all(seq <= outer.get(author, 0) for author, seq in inner.items())


MAX_MILESTONES = 8  # the newest ones, whose vectors are remembered
MAX_VECTORS = 8  # after each milestone, the first ones
MAX_ENTRIES = 50_000  # authors of all remembered vectors together


class VectorHistory:
    """The version vectors at which coordinators may have confirmed the anchor, by digest.

    A coordinator lists confirmed anchors by digests of version vectors. A machine announces its
    anchor after each validation, at a multiple of a number of tokens (a milestone), so only the
    first vectors after a milestone can be listed. A machine that knows one of them can serve the
    anchor there.
    """

    def __init__(self) -> None:
        self._milestones: dict[int, dict[str, dict[str, int]]] = {}

    def add(self, vector_digest: str, vector: dict[str, int], milestone: int) -> None:
        """Remember a vector, if it is among the first after its milestone."""
        vectors = self._milestones.setdefault(milestone, {})
        if vector_digest not in vectors and len(vectors) < MAX_VECTORS:
            vectors[vector_digest] = dict(vector)
        while len(self._milestones) > MAX_MILESTONES or (
            len(self._milestones) > 1 and self._count_entries() > MAX_ENTRIES
        ):
            del self._milestones[min(self._milestones)]

    def find_first(self, digests: Iterable[str]) -> dict[str, int] | None:
        """Return the vector of the first of these digests that is known; None if none is."""
        for digest in digests:
            for vectors in self._milestones.values():
                if digest in vectors:
                    return vectors[digest]
        return None

    def _count_entries(self) -> int:
        return sum(len(v) for vectors in self._milestones.values() for v in vectors.values())
