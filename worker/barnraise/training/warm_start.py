"""Warm start: obtain the weights of another run or model for a run that begins with them.

Those of a run come from this machine's own folder of it, if it stands at them or has the updates
since, else from that run's peers; those of a Hugging Face model from the hub, or from a folder of
this machine. This happens once per run, on its owner's machine. All other machines fetch the
weights by digest (`prefetch`).
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from barnraise.errors import BarnraiseError, StateError, UnsupportedModelError
from barnraise.ledger.anchor import digest_fragments, fragment_to_bytes
from barnraise.ledger.anchor_diff import updates_between
from barnraise.ledger.blob_store import BlobStore
from barnraise.ledger.codec import decode
from barnraise.ledger.ledger import Ledger
from barnraise.planning.hardware import Hardware
from barnraise.protocol.enums import JoinPurpose
from barnraise.protocol.messages import Update
from barnraise.spec import MODEL_FOLDER, RunSpec, adopt_model, problems
from barnraise.state_dir import StateDir
from barnraise.training.checkpoint import StateHeader
from barnraise.training.join import InitialWeights, join_run
from barnraise.training.model_files.hugging_face_import import (
    download_model,
    import_hugging_face,
)
from barnraise.training.model_transfer import ModelFetcher
from barnraise.training.resume import open_tensors

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


def load_start_model(
    spec: RunSpec, store_blob: Callable[[bytes | memoryview], str], folder: Path | None
) -> InitialWeights:
    """Convert the model that `spec.start` names, or that is in a folder of the owner's machine.

    Raises:
        UnsupportedModelError: A run cannot train this model exactly, or its folder is unknown.
        StateError: It cannot be downloaded now; the text says why.
    """
    name = spec.start.model
    if folder is None and name == MODEL_FOLDER:
        raise UnsupportedModelError(
            "the model that this run begins with is in a folder of its owner's machine: "
            "run `barnraise prepare RUN --model FOLDER` there"
        )
    if folder is None:
        log.info("downloading the model %s that this run begins with", name)
        folder = download_model(name)
    elif name != MODEL_FOLDER:
        raise UnsupportedModelError(f"this run begins with {name}, not with a model in a folder")
    log.info("converting the model in %s", folder)
    try:
        imported = import_hugging_face(folder, store_blob)
        _check_model(spec, imported)
    except UnsupportedModelError:
        raise
    except StateError as error:
        raise UnsupportedModelError(str(error)) from None
    return imported


def _check_model(spec: RunSpec, imported: InitialWeights) -> None:
    """Check that the run can train the model with its tokenizer.

    Raises:
        UnsupportedModelError: names what to change.
    """
    if (imported.tokenizer is None) != (spec.text.tokenizer == "bytes"):
        kind = "bytes" if imported.tokenizer is None else "byte-pair encoding"
        raise UnsupportedModelError(
            f"the tokenizer of the model is {kind}: choose this tokenizer in the run's form"
        )
    assert imported.model is not None, "it was imported with its architecture"
    found = problems(adopt_model(spec, imported.model))
    if found:
        name, sentence = next(iter(found.items()))
        raise UnsupportedModelError(f"a run cannot train this model: {name}: {sentence}")


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
