"""Warm start: obtain the weights of another run or model for a run that begins with them.

The weights come from this machine's own folder of that run, if it stands at them, else from that
run's peers. This happens once per run, on its owner's machine. All other machines fetch the weights
by digest (`prefetch`).
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from blake3 import blake3
from torch import Tensor

from barnraise.errors import BarnraiseError, StateError
from barnraise.ledger.anchor import fragment_to_bytes
from barnraise.ledger.blob_store import BlobStore
from barnraise.planning.hardware import Hardware
from barnraise.protocol.enums import JoinPurpose
from barnraise.spec import RunSpec
from barnraise.state_dir import StateDir
from barnraise.training.checkpoint import CheckpointSlots
from barnraise.training.join import InitialWeights, join_run
from barnraise.training.model_transfer import ModelFetcher
from barnraise.training.resume import DiskState, read_state_header
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
    """Fetch the weights that `spec.start` names.

    Args:
        home: this machine's state directory.
        leaving: interrupts the fetch.
        measure: returns this machine's hardware; called only where it is needed.
        spec: of the run that begins with the weights.
        store_blob: stores a fragment and returns its digest.
        model_folder: of a Hugging Face model, if it is on this machine.

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
            "the run again from a checkpoint that they still hold"
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
        None when the folder stands at other weights, or lacks the tokenizer.
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
        state = _open_state(path, spec, open_state)
        names = [f"anchor.{index}" for index in range(spec.model.layers + 2)]
        if state is None or any(name not in state for name in names):
            return None
        hasher = blake3()
        for name in names:
            hasher.update(fragment_to_bytes(state[name]))
        if hasher.hexdigest() != start.digest:
            return None
        return InitialWeights(
            [store_blob(fragment_to_bytes(state[name])) for name in names], tokenizer
        )


def _open_state(
    path: Path, spec: RunSpec, open_state: contextlib.ExitStack
) -> Mapping[str, Tensor] | None:
    """Open the saved state in a run's folder, for as long as `open_state` is open."""
    if read_state_header(path / "state") is not None:
        state = DiskState(spec.model, path / "state")
        open_state.callback(state.close)
        return state
    saved = CheckpointSlots(path / "checkpoint").load()
    return saved[0] if saved else None
