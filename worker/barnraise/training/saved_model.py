"""Open the model that this machine has saved last for a run, one fragment at a time."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from barnraise.errors import StateError
from barnraise.ledger.blob_store import BlobStore
from barnraise.protocol.coordinator_messages import TextManifest
from barnraise.protocol.evaluation import TaskScore
from barnraise.protocol.signing import open_signed
from barnraise.spec import RunSpec
from barnraise.state_dir import StateDir
from barnraise.training.checkpoint import CheckpointSlots, StateHeader
from barnraise.training.evaluation import read_score
from barnraise.training.join import find_saved_run
from barnraise.training.local_status import read_status
from barnraise.training.resume import DiskState, read_state_header


@dataclass(frozen=True)
class SavedModel:
    """A run's model as this machine saved it last."""

    run: str
    slug: str  # its name in addresses
    name: str
    spec: RunSpec
    header: StateHeader  # what the saved tensors belong to
    # The state as `Engine.state_dict` names it, read one tensor at a time.
    tensors: Mapping[str, Tensor]
    # Content of the run's tokenizer file; None for plain bytes.
    tokenizer: bytes | None
    # (tokens, nats a token) of the last validation on this machine, if known.
    validation: tuple[int, float] | None
    score: TaskScore | None = None  # the last one of the run's own tasks on this machine

    @property
    def machines(self) -> int:
        """Return how many machines' updates are in the model."""
        return len({head.peer for head in self.header.heads.values()})


@contextlib.contextmanager
def open_saved_model(state_dir: StateDir, run: str) -> Iterator[SavedModel]:
    """Open the model of a run, by its id or slug, for as long as the block lasts.

    Raises:
        StateError: This machine has no saved state of the run, or a worker uses it now.
    """
    view = find_saved_run(state_dir, run)
    if view is None or view.manifest is None:
        raise StateError(f"this machine has never worked on '{run}'")
    folder = state_dir.path / "runs" / view.id
    spec = RunSpec.from_json(view.spec)
    manifest = open_signed(view.manifest, "manifest", TextManifest)
    tokenizer = None
    if manifest.tokenizer:
        tokenizer = BlobStore(folder / "blobs", sweep=False).read_verified(manifest.tokenizer)
        if tokenizer is None:
            raise StateError(
                f"the tokenizer of '{run}' is not on this machine, or damaged: "
                f"`barnraise join {run}` fetches it"
            )
    with contextlib.ExitStack() as open_files:
        if read_state_header(folder / "state") is None:
            checkpoint = CheckpointSlots(folder / "checkpoint").load()
            if checkpoint is None:
                raise StateError(f"this machine has no checkpoint of '{run}' yet")
            tensors, header = checkpoint
        else:
            # A running worker would change the state on disk while it is read: lock the folder.
            open_files.enter_context(contextlib.closing(state_dir.open_run(view.id)))
            state = DiskState(spec.model, folder / "state")
            open_files.callback(state.close)
            tensors, header = state, state.header
        status = read_status(folder)
        yield SavedModel(
            run=view.id,
            slug=view.slug or view.id,
            name=view.name,
            spec=spec,
            header=header,
            tensors=tensors,
            tokenizer=tokenizer,
            validation=status.validation_last if status else None,
            score=read_score(folder),
        )
