"""Warm start: obtain the weights of another run or model for a run that begins with them.

The weights come from this machine's own folder of that run, if it stands at them or has the
updates since, else from that run's peers. This happens once per run, on its owner's machine. All
other machines fetch the weights by digest (`prefetch`).
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from barnraise.errors import BarnraiseError, StateError
from barnraise.ledger.anchor import digest_fragments, fragment_to_bytes
from barnraise.ledger.anchor_diff import updates_between
from barnraise.ledger.blob_store import BlobStore
from barnraise.ledger.codec import decode
from barnraise.ledger.ledger import Ledger
from barnraise.planning.hardware import Hardware
from barnraise.protocol.enums import JoinPurpose
from barnraise.protocol.messages import Update
from barnraise.spec import RunSpec
from barnraise.state_dir import StateDir
from barnraise.training.checkpoint import StateHeader
from barnraise.training.join import InitialWeights, join_run
from barnraise.training.model_transfer import ModelFetcher
from barnraise.training.resume import open_tensors
from barnraise.training.start_model import load_start_model

log = logging.getLogger("barnraise")

TOKENIZER_SECONDS = 60.0  # the other run's peers have this long to send its tokenizer


class WarmStartFetcher(ModelFetcher):
    """A model fetcher that fetches the run's tokenizer as well."""

    def drain(self) -> None:
        """Fetch the tokenizer, then what a model fetcher waits for."""
        tokenizer = self.joined.manifest.tokenizer
        if tokenizer:
            self.exchange.fetch_blobs({tokenizer: None}, TOKENIZER_SECONDS, self.poll_should_stop)
        super().drain()


def fetch_initial_weights(
    home: StateDir,
    leaving: threading.Event,
    measure: Callable[[], Hardware],
    spec: RunSpec,
    store_blob: Callable[[bytes | memoryview], str],
    model_folder: Path | None = None,
) -> InitialWeights:
    """Fetch the weights that `spec.start` names, or convert a model's folder of this machine.

    Raises:
        UnsupportedModelError: A run would not train the Hugging Face model exactly.
        StateError: The weights cannot be had now; the text says why.
    """
    start = spec.start
    if start.model:
        return load_start_model(spec, store_blob, model_folder)
    local_weights = _load_local_weights(home, spec, store_blob)
    if local_weights is not None:
        return local_weights
    log.info("fetching the weights this run begins with from the machines of run %s", start.run)
    try:
        joined = join_run(home, start.run, leaving, purpose=JoinPurpose.FETCH)
        if joined is None:
            raise StateError("left before the weights came")
        worker = WarmStartFetcher(joined, leaving, measure(), home.limits)
        worker.run()
    except StateError:
        raise
    except BarnraiseError as error:
        raise StateError(str(error)) from None
    if leaving.is_set():
        raise StateError("left before the weights came")
    if worker.digest != start.digest:
        raise StateError(
            f"the machines of '{joined.name}' now hold {worker.digest[:16]}…, at "
            f"{worker.tokens:,} tokens, and not {start.digest[:16]}…, at {start.tokens:,}: create "
            "the run again from a checkpoint that they still hold, or prepare it on a machine that "
            "has trained since then"
        )
    fetched_weights = _load_local_weights(home, spec, store_blob)
    if fetched_weights is None:
        raise StateError(
            f"the weights of '{joined.name}' came, and not its tokenizer: nobody there had it"
        )
    return fetched_weights


def _load_local_weights(
    home: StateDir, spec: RunSpec, store_blob: Callable[[bytes | memoryview], str]
) -> InitialWeights | None:
    """Load the weights from this machine's folder of the other run.

    Returns:
        None when the folder leads to other weights, or lacks the tokenizer.
    """
    start = spec.start
    path = home.path / "runs" / start.run
    if not path.exists():
        return None
    # The lock on the folder keeps a worker from changing the files while they are read.
    with contextlib.closing(home.open_run(start.run)), contextlib.ExitStack() as open_state:
        tokenizer = None
        if start.tokenizer:
            tokenizer = BlobStore(path / "blobs", sweep=False).read_verified(start.tokenizer)
            if tokenizer is None:
                return None
        saved = open_tensors(path, spec.model, open_state)
        names = [f"anchor.{index}" for index in range(spec.model.layers + 2)]
        if saved is None or any(name not in saved[0] for name in names):
            return None
        state, header = saved
        if digest_fragments(state[name] for name in names) == start.digest:
            fragments = (state[name] for name in names)
        else:
            ledger = open_state.enter_context(contextlib.closing(Ledger(path, sweep=False)))
            changes = _find_changes(ledger, header, start.digest)
            if changes is None:
                return None
            rebuilt = partial(_rebuild_fragments, state, names, ledger, changes)
            if digest_fragments(rebuilt()) != start.digest:
                return None
            log.info("the weights at %s tokens are rebuilt from the updates since", start.tokens)
            fragments = rebuilt()
        return InitialWeights([store_blob(fragment_to_bytes(f)) for f in fragments], tokenizer)


def _find_changes(
    ledger: Ledger, header: StateHeader, anchor: str
) -> list[tuple[Update, int]] | None:
    """Return the updates that lead from a saved state back to an anchor that was announced.

    Returns:
        (update, factor); None when they, or what was in that anchor, are not here.
    """
    milestone = ledger.milestones.find(anchor)
    if milestone is None:
        return None
    vector = {author: head.seq for author, head in header.heads.items()}
    changes = updates_between(
        ledger, vector, header.retracted, milestone.vector, milestone.retracted
    )
    parts = [part for update, _ in changes or () for part in update.payload_parts]
    has_all = changes is not None and all(ledger.blobs.has(part.digest) for part in parts)
    return changes if has_all else None


def _rebuild_fragments(
    state: Mapping[str, Tensor],
    names: Sequence[str],
    ledger: Ledger,
    changes: Sequence[tuple[Update, int]],
) -> Iterator[Tensor]:
    """Yield the anchor's fragments after some updates, each times its factor: int32 [n] each."""
    for index, name in enumerate(names):
        units = state[name].clone()
        for update, factor in changes:
            part = update.fragments[index]
            if part.size:
                units.add_(decode(ledger.blobs.read(part.digest), units.numel()), alpha=factor)
        yield units
