"""Fetch from peers what a machine needs before its first round.

That is the peers' anchor, or else the weights of another run or model that the run begins with; and
the run's text.
"""

import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from blake3 import blake3

from barnraise.errors import PlanError, StateError
from barnraise.exchange.exchange import Exchange
from barnraise.exchange.snapshots.snapshot_client import Snapshot
from barnraise.formats import format_amount, format_bytes
from barnraise.ledger.blob_store import BlobStore
from barnraise.ledger.ledger import Ledger
from barnraise.planning.budgets import FREE_DISK
from barnraise.planning.limits import Limits
from barnraise.protocol.coordinator_messages import TextManifest
from barnraise.protocol.enums import Activity
from barnraise.spec import RunSpec, token_bytes
from barnraise.training.fetch_monitor import FetchMonitor
from barnraise.training.join import JoinedRun
from barnraise.training.metrics import TrainingMetrics

log = logging.getLogger("barnraise")

# A fetch that is not complete after this many seconds is started again. It resumes where it
# stopped, but every start costs bytes twice.
FETCH_SECONDS = 600.0
# What is fetched, for people.
TEXT = "the text"
INITIAL_WEIGHTS = "the initial weights"
BATCH_BLOBS = 64  # blobs requested at once, enough to keep every peer's uplink busy
SNAPSHOT_SECONDS = 40.0  # the peers have this long to agree on an anchor
SNAPSHOT_TRIES = 3  # tries while the reason why no anchor comes is unknown


@dataclass(frozen=True)
class Prefetch:
    """Fetches what a machine needs before its first round, and states meanwhile why it waits."""

    joined: JoinedRun
    ledger: Ledger  # this machine's; fetched blobs are stored in its blob store
    exchange: Exchange  # connects to the peers
    metrics: TrainingMetrics  # receives what this machine waits for
    leaving: threading.Event  # set once this machine is to leave, which ends every fetch
    # Reports the status while a fetch blocks, and returns whether to give up.
    should_stop: Callable[[], bool]
    # Returns why this machine has nothing to do in the run; "" while it has.
    describe_end: Callable[[], str]

    def fetch_snapshot(self, trust_one: bool) -> Snapshot | None:
        """Fetch the peers' anchor; None where the initial weights and the ledger suffice.

        Ask again while the peers are ahead: a machine that started from the initial weights would
        have to replay every update, and its peers may no longer store them. While the volunteers
        that it knows do not suffice to believe any anchor, wait for others.
        """
        knows_peers = self.joined.peers or self.ledger.peer_store.peers()
        coordinator = self.joined.coordinator
        tries = 0
        while True:
            self.exchange.set_listed_anchors(coordinator.confirmed_anchors(self.joined.run))
            snapshot = self.exchange.fetch_snapshot(
                SNAPSHOT_SECONDS if knows_peers else 0.0, self.should_stop, trust_one
            )
            has_all_updates = self.ledger.vector() and not self.ledger.pruned()
            is_waiting = self.exchange.waiting_reason is not None
            is_behind = is_waiting or self.exchange.needs_snapshot
            if snapshot or has_all_updates or self.leaving.is_set() or not is_behind:
                return snapshot
            if is_waiting:
                coordinator.request_anchors()
            tries += not is_waiting
            if tries >= SNAPSHOT_TRIES:
                return None
            if not is_waiting:
                log.warning("the peers are ahead, and their anchor has not come yet: asking again")

    def fetch_initial_weights(self) -> bool:
        """Fetch the weights of another run or model that the run begins with.

        Returns:
            Whether to go on with them; False when this machine is to leave.

        Raises:
            StateError: the run is over and no machine sends them, or they are not those that the
                run's spec names.
        """
        spec = self.joined.spec
        if spec.start.has_weights:
            byte_counts = [4 * fragment.size for fragment in spec.model.fragments()]
            sizes = dict(zip(spec.start.fragments, byte_counts, strict=True))
            if not self._fetch(sizes, INITIAL_WEIGHTS):
                return False
            check_start_weights(self.ledger.blobs, spec)
        return not self.leaving.is_set()

    def fetch_text(self) -> bool:
        """Fetch the run's text.

        Returns:
            Whether it is here; False when this machine is to leave.

        Raises:
            StateError: the run is over and no machine sends it.
        """
        sizes = manifest_blobs(self.joined.manifest)
        if not all(self.ledger.blobs.has(name) for name in sizes):
            self.metrics.activity = Activity.PREPARING
        return self._fetch(sizes, TEXT)

    def _fetch(self, sizes: Mapping[str, int | None], description: str) -> bool:
        """Fetch blobs, and state meanwhile why nothing comes.

        Where the run is over, the fetch ends once nobody sends what is fetched.

        Returns:
            Whether they are here; False when this machine is to leave.

        Raises:
            StateError: the run is over and no machine sends them.
        """
        monitor = FetchMonitor(description)

        def poll() -> bool:
            stats = self.exchange.stats
            self.metrics.reason = monitor.describe(
                time.monotonic(), stats.bytes_received, stats.peers
            )
            return self.should_stop() or (monitor.is_stalled and bool(self.describe_end()))

        is_here = fetch_all_blobs(self.exchange, self.ledger.blobs, sizes, description, poll)
        if is_here:
            self.metrics.reason = ""
        elif not self.leaving.is_set():
            raise StateError(
                f"{self.describe_end()}, and no machine that has {description} is online: there is "
                "nothing to train. `barnraise fetch` downloads the model of "
                f"'{self.joined.name}' while a machine shares it"
            )
        return is_here


def fetch_all_blobs(
    exchange: Exchange,
    blobs: BlobStore,
    sizes: Mapping[str, int | None],
    description: str,
    should_stop: Callable[[], bool],
) -> bool:
    """Fetch every missing blob, by its bytes where known, from all peers, however long it takes.

    Returns:
        Whether all blobs are here; False when `should_stop` gave up.
    """
    missing = [name for name in sizes if not blobs.has(name)]
    if missing:
        files = format_amount(len(sizes), "file")
        log.info("%d of %s of %s still to fetch", len(missing), files, description)
    for start in range(0, len(missing), BATCH_BLOBS):
        batch = {name: sizes[name] for name in missing[start : start + BATCH_BLOBS]}
        while not exchange.fetch_blobs(batch, FETCH_SECONDS, should_stop):
            if should_stop():
                return False
            log.warning(
                "no peer has sent all files of %s for ten minutes; still asking", description
            )
    if missing:
        log.info("all of %s is here", description)
    return True


def reserve_text(limits: Limits, manifest: TextManifest, blobs: BlobStore) -> Limits:
    """Return what of the limits is left for the state, once the run's text has its place.

    Raises:
        PlanError: the text is larger than the limit on disk, or than the free space less a reserve.
    """
    sizes = manifest_blobs(manifest)
    missing = sum(size or 0 for name, size in sizes.items() if not blobs.has(name))
    free = int(FREE_DISK * shutil.disk_usage(blobs.folder).free)
    shown = f"the text of this run takes {format_bytes(manifest.text_bytes)} of disk"
    if missing > free:
        raise PlanError(f"{shown}, and {format_bytes(free)} may be used here: free some space")
    if limits.disk is None:
        return limits
    if manifest.text_bytes > limits.disk:
        raise PlanError(f"{shown}, and this machine may use {format_bytes(limits.disk)}")
    return replace(limits, disk=limits.disk - manifest.text_bytes)


def manifest_blobs(manifest: TextManifest) -> dict[str, int | None]:
    """Return digest → bytes of the text's shards and tokenizer. The tokenizer's size is unknown."""
    shards, size = (*manifest.train, *manifest.held_out), token_bytes(manifest.vocabulary)
    sizes: dict[str, int | None] = {shard.digest: size * shard.tokens for shard in shards}
    if manifest.tokenizer:
        sizes[manifest.tokenizer] = None
    return sizes


def check_start_weights(blobs: BlobStore, spec: RunSpec) -> None:
    """Check the weights of another run or model that a run begins with.

    Raises:
        StateError: they are not those that the run's spec names: the machine that prepared the run
            signed others.
    """
    start, fragments = spec.start, spec.model.fragments()
    hasher = blake3()
    for name, fragment in zip(start.fragments, fragments, strict=True):
        data = blobs.read(name)
        if len(data) != 4 * fragment.size:
            raise StateError(
                f"the {fragment.name} that this run is to begin with is of another model"
            )
        hasher.update(data)
    # Of a model from elsewhere only its fragments have digests; each was compared with its own.
    if start.run and hasher.hexdigest() != start.digest:
        raise StateError(
            f"the weights this run is to begin with are {hasher.hexdigest()[:16]}…, and its rules "
            f"say {start.digest[:16]}…: tell its owner"
        )
