"""Fetch from peers, by digest, what a machine needs before its first step.

That is the run's text, and the weights of another run or model that the run begins with.
"""

import logging
from collections.abc import Callable, Mapping

from blake3 import blake3

from barnraise.errors import StateError
from barnraise.exchange.exchange import Exchange
from barnraise.ledger.blob_store import BlobStore
from barnraise.protocol.coordinator_messages import TextManifest
from barnraise.spec import RunSpec

log = logging.getLogger("barnraise")

# A fetch that is not complete after this many seconds is started again. It resumes where it
# stopped, but every start costs bytes twice.
FETCH_SECONDS = 600.0
# What is fetched, for people.
TEXT = "the text"
INITIAL_WEIGHTS = "the initial weights"
BATCH_BLOBS = 64  # blobs requested at once, enough to keep every peer's uplink busy


def fetch_all_blobs(
    exchange: Exchange,
    blobs: BlobStore,
    sizes: Mapping[str, int | None],
    description: str,
    should_stop: Callable[[], bool],
) -> bool:
    """Fetch every missing blob of `sizes` from all peers that have any, however long it takes.

    Args:
        exchange: fetches the blobs.
        blobs: the exchange's blob store.
        sizes: digest → bytes, where the size is known.
        description: what the blobs are, for the log.
        should_stop: polled while the call blocks; True gives up.

    Returns:
        Whether all blobs are here; False when `should_stop` gave up.
    """
    missing = [name for name in sizes if not blobs.has(name)]
    if missing:
        log.info("%d of %d files of %s still to fetch", len(missing), len(sizes), description)
    for start in range(0, len(missing), BATCH_BLOBS):
        batch = {name: sizes[name] for name in missing[start : start + BATCH_BLOBS]}
        while not exchange.fetch_blobs(batch, FETCH_SECONDS, should_stop):
            if should_stop():
                return False
            log.warning(
                "no peer has sent all files of %s for ten minutes; still asking", description
            )
    return True


def manifest_blobs(manifest: TextManifest) -> dict[str, int | None]:
    """Return digest → bytes of the text's shards and tokenizer. The tokenizer's size is unknown."""
    shards = (*manifest.train, *manifest.held_out)
    sizes: dict[str, int | None] = {shard.digest: 2 * shard.tokens for shard in shards}
    if manifest.tokenizer:
        sizes[manifest.tokenizer] = None
    return sizes


def fetch_text(
    exchange: Exchange, blobs: BlobStore, manifest: TextManifest, should_stop: Callable[[], bool]
) -> bool:
    """Fetch the run's text; return False when `should_stop` gave up."""
    return fetch_all_blobs(exchange, blobs, manifest_blobs(manifest), TEXT, should_stop)


def fetch_start_weights(
    exchange: Exchange, blobs: BlobStore, spec: RunSpec, should_stop: Callable[[], bool]
) -> bool:
    """Fetch the weights of another run or model that a run begins with; other runs need none.

    Returns:
        False when `should_stop` gave up.

    Raises:
        StateError: The weights are not those that the run's spec names: the machine that prepared
            the run signed others.
    """
    start = spec.start
    if not start.has_weights:
        return True
    fragments = spec.model.fragments()
    byte_counts = [4 * fragment.size for fragment in fragments]
    sizes = dict(zip(start.fragments, byte_counts, strict=True))
    if not fetch_all_blobs(exchange, blobs, sizes, "the weights this run begins with", should_stop):
        return False
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
    return True
