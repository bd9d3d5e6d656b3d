"""What a machine fetches from its peers by digest before its first step: text, and the weights a run begins with."""

import logging
from collections.abc import Callable, Mapping

from blake3 import blake3

from barnraise.errors import StateError
from barnraise.exchange.exchange import Exchange
from barnraise.exchange.ledger.blob_store import BlobStore
from barnraise.spec import RunSpec

log = logging.getLogger("barnraise")

FETCH_SECONDS = (
    600.0  # after which a fetch goes on where it stopped: each new beginning costs bytes twice
)
AT_ONCE = 64  # files: enough for every peer's line to be full


def fetch_all_blobs(
    exchange: Exchange,
    blobs: BlobStore,
    sizes: Mapping[str, int | None],
    what: str,
    given_up: Callable[[], bool],
) -> bool:
    """Every blob of `sizes` (digest → bytes, where they are known), many at once from all who have any, however long
    that takes. False when it was given up."""
    if missing := [each for each in sizes if not blobs.has(each)]:
        log.info("fetching %s from peers: %d of %d files", what, len(missing), len(sizes))
    for begin in range(0, len(missing), AT_ONCE):
        some = {each: sizes[each] for each in missing[begin : begin + AT_ONCE]}
        while not exchange.fetch_blobs(some, FETCH_SECONDS, given_up):
            if given_up():
                return False
            log.warning("nobody here has given all files of %s for ten minutes; still asking", what)
    return True


def fetch_start_weights(
    exchange: Exchange, blobs: BlobStore, spec: RunSpec, given_up: Callable[[], bool]
) -> bool:
    """The weights a run takes over, if it does. Raises StateError where they are not what the run's rules say: its
    owner's machine put its name to others."""
    start = spec.start
    if not start.run:
        return True
    fragments = spec.model.fragments()
    sizes = dict(zip(start.fragments, (4 * each.size for each in fragments), strict=True))
    if not fetch_all_blobs(exchange, blobs, sizes, "the weights this run begins with", given_up):
        return False
    hasher = blake3()
    for name, each in zip(start.fragments, fragments, strict=True):
        data = blobs.read(name)
        if len(data) != 4 * each.size:
            raise StateError(f"the {each.name} that this run is to begin with is of another model")
        hasher.update(data)
    if hasher.hexdigest() != start.digest:
        raise StateError(
            f"the weights this run is to begin with are {hasher.hexdigest()[:16]}…, and its rules say "
            f"{start.digest[:16]}…: tell its owner"
        )
    return True
