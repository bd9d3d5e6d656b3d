"""The weights of another run, for one that begins with them: out of this machine's own folder of that run where it
stands at them, else from that run's peers. Once in a run's life, on its owner's machine; the others fetch by digest."""

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from blake3 import blake3
from torch import Tensor

from barnraise.errors import BarnraiseError, StateError
from barnraise.exchange.ledger.anchor import fragment_to_bytes
from barnraise.exchange.ledger.blob_store import BlobStore
from barnraise.planning.hardware import Hardware
from barnraise.spec import RunSpec
from barnraise.state_dir import StateDir
from barnraise.training.checkpoint import Checkpoint
from barnraise.training.join import InitialWeights, join_run
from barnraise.training.model_transfer import ModelFetcher
from barnraise.training.resume import DiskState, read_state_header

log = logging.getLogger("barnraise")

TOKENIZER_SECONDS = 60.0  # that run's peers have to give its tokenizer's file


class WarmStartFetcher(ModelFetcher):
    """The tokenizer, too."""

    def drain(self) -> None:
        if tokenizer := self.joined.manifest.tokenizer:
            self.exchange.fetch_blobs({tokenizer: None}, TOKENIZER_SECONDS, self.poll_should_stop)
        super().drain()


def fetch_initial_weights(
    home: StateDir,
    leaving: threading.Event,
    measured: Callable[[], Hardware],
    spec: RunSpec,
    put: Callable[[bytes | memoryview], str],
) -> InitialWeights:
    """What `spec.start` names, kept by `put`. Raises StateError with a sentence that says why it cannot be had now."""
    start = spec.start
    if (found := _kept(home, spec, put)) is not None:
        return found
    log.info("fetching the weights this run begins with from the machines of run %s", start.run)
    try:
        place = join_run(home, start.run, leaving)
        if place is None:
            raise StateError("left before the weights came")
        worker = WarmStartFetcher(place, home.identity, leaving, measured(), home.limits)
        worker.run()
    except StateError:
        raise
    except BarnraiseError as error:
        raise StateError(str(error)) from None
    if leaving.is_set():
        raise StateError("left before the weights came")
    if worker.digest != start.digest:
        raise StateError(
            f"the machines of '{place.name}' hold {worker.digest[:16]}… by now, at {worker.tokens:,} tokens, and not "
            f"{start.digest[:16]}…, at {start.tokens:,}: make the run anew from a checkpoint that they still hold"
        )
    if (found := _kept(home, spec, put)) is None:
        raise StateError(
            f"the weights of '{place.name}' came, and not its tokenizer: nobody there had it"
        )
    return found


def _kept(
    home: StateDir, spec: RunSpec, put: Callable[[bytes | memoryview], str]
) -> InitialWeights | None:
    """From this machine's folder of that run; None where it does not stand there, or lacks the tokenizer."""
    start, path = spec.start, home.path / "runs" / spec.start.run
    if not path.exists():
        return None
    with contextlib.closing(
        home.open_run(start.run)
    ):  # what lies there changes under whoever reads beside a worker
        tokenizer = (
            BlobStore(path / "blobs", sweep=False).read_verified(start.tokenizer)
            if start.tokenizer
            else None
        )
        if start.tokenizer and tokenizer is None:
            return None
        with contextlib.ExitStack() as opened:
            state = _state(path, spec, opened)
            count = spec.model.layers + 2
            if state is None or any(f"anchor.{index}" not in state for index in range(count)):
                return None
            hasher = blake3()
            for index in range(count):
                hasher.update(fragment_to_bytes(state[f"anchor.{index}"]))
            if hasher.hexdigest() != start.digest:
                return None
            return InitialWeights(
                [put(fragment_to_bytes(state[f"anchor.{index}"])) for index in range(count)],
                tokenizer,
            )


def _state(path: Path, spec: RunSpec, opened: contextlib.ExitStack) -> Mapping[str, Tensor] | None:
    if read_state_header(path / "state") is not None:
        state = DiskState(spec.model, path / "state")
        opened.callback(state.close)
        return state
    saved = Checkpoint(path / "checkpoint").load()
    return saved[0] if saved else None
