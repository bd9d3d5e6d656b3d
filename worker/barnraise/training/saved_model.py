"""Open the model that this machine has saved last for a run, one fragment at a time."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import psutil
from torch import Tensor

from barnraise.errors import StateError
from barnraise.ledger.blob_store import BlobStore
from barnraise.protocol.coordinator_messages import TextManifest
from barnraise.protocol.evaluation import TaskScore
from barnraise.protocol.signing import open_signed
from barnraise.spec import RunSpec
from barnraise.state_dir import StateDir
from barnraise.swap.precision import units_to_float
from barnraise.swap.sampler import Sampler
from barnraise.training.checkpoint import StateHeader
from barnraise.training.evaluation import read_score
from barnraise.training.join import find_saved_run
from barnraise.training.local_status import read_status
from barnraise.training.resume import open_tensors, read_state_header

RESIDENT_SHARE = 0.5  # of the memory that is free, for layers that stay loaded between two tokens


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

    def create_sampler(self, resident_bytes: int | None) -> Sampler:
        """Return what writes and scores text with the model.

        Layers of so many bytes stay loaded between two tokens; None: half of the free memory.
        """
        if resident_bytes is None:
            resident_bytes = int(RESIDENT_SHARE * psutil.virtual_memory().available)
        return Sampler(
            self.spec.model,
            lambda index: units_to_float(self.tensors[f"anchor.{index}"]),
            resident_bytes,
        )


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
        if read_state_header(folder / "state") is not None:
            # A running worker would change the state on disk while it is read: lock the folder.
            open_files.enter_context(contextlib.closing(state_dir.open_run(view.id)))
        saved = open_tensors(folder, spec.model, open_files)
        if saved is None:
            raise StateError(f"this machine has no checkpoint of '{run}' yet")
        tensors, header = saved
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
