"""Find, convert and load the saved training state of a run.

A plan in memory saves its state in checkpoints; a plan on disk trains on a state store. Other
limits may move the state: from memory to disk, back, or to another layout on disk. The new state is
complete and committed before the old one is removed, so that a crash at any instant leaves one of
them.

checkpoint/       two slots (`checkpoint.py`), of a plan in memory
state/            records and their manifest (`swap/state_store.py`), of a plan on disk
state.new/ .old/  while a state moves
paused_round/     the memory of a plan without state on disk, in a pause (`paused_round.py`)
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from barnraise.errors import StateError
from barnraise.exchange.snapshots.snapshot_client import load_base_snapshot
from barnraise.ledger.anchor import Anchor, compute_sketch
from barnraise.ledger.ledger import Ledger
from barnraise.ledger.local_author import LocalAuthor
from barnraise.planning.plan import REMOTE, Plan
from barnraise.spec import ADAMW, ModelSpec, Recipe
from barnraise.swap.engine import WARMUP_STEPS, Engine
from barnraise.swap.executor import EngineProgress
from barnraise.swap.muon_moments import find_optimizer, refuse_other_optimizer, view_moments
from barnraise.swap.state_store import TRAINING_KINDS, FragmentSequence, StateStore, read_manifest
from barnraise.training.checkpoint import CheckpointSlots, StateHeader, remove_folder
from barnraise.training.join import JoinedRun
from barnraise.training.paused_round import PausedRound
from barnraise.training.training_engine import TrainingEngine

log = logging.getLogger("barnraise")

CREW_LABEL = "crew"  # the tensor of a saved state that holds the label of a crew's lead


class SavedState:
    """The saved state of one run. The caller holds the lock of the run's folder.

    Attributes:
        header: of the newest saved state; None: there is none.
        checkpoint: the slots of a plan in memory.
        state: the folder of a plan on disk.
        plan: the plan for which the state is opened.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        """Find the newest state in the run's folder, and complete a move that was cut off."""
        self.plan = plan
        self.state = folder / "state"
        self.checkpoint = CheckpointSlots(folder / "checkpoint")
        self._new_state = folder / "state.new"
        self._old_state = folder / "state.old"
        self._finish_move()
        in_checkpoint = self.checkpoint.header
        on_disk = read_state_header(self.state)
        self._is_on_disk = on_disk is not None and (
            in_checkpoint is None
            or on_disk.step > in_checkpoint.step
            or (plan.on_disk and on_disk.step == in_checkpoint.step)
        )
        self._between_rounds = on_disk if self._is_on_disk else in_checkpoint
        self.paused_round = PausedRound(folder, plan)
        self.header = self._newest_header()

    def _newest_header(self) -> StateHeader | None:
        """Return the header of the paused round, unless a round was saved after it."""
        paused, saved = self.paused_round.header, self._between_rounds
        if paused is not None and (saved is None or paused.step >= saved.step):
            return paused
        self.paused_round.remove()
        return saved

    def open_store(self, recipe: Recipe) -> StateStore:
        """Open the plan's state store, after moving the saved state into it.

        Returns:
            An empty store where there is no saved state, and for a plan in memory: `load_into` then
            fills the engine.

        Raises:
            StateError: The state is of another optimizer.
        """
        plan = self.plan
        if self.header is not None:
            refuse_other_optimizer(plan, self._saved_optimizer())
        if not plan.on_disk:
            store = StateStore(plan)
            if self.paused_round.header is not None:
                self.paused_round.fill(store)
            return store
        if self.header is not None:
            manifest = read_manifest(self.state) if self._is_on_disk else None
            if manifest is None or manifest["layout"] != StateStore.layout_of(plan):
                if plan.is_stage:  # the crew moves fragments: `load_into` reads what there is
                    return self._open_beside()
                log.info("moving this machine's state to where the plan wants it")
                self._move(self.header, recipe)
        remove_folder(self.checkpoint.folder)
        return StateStore(plan, self.state)

    def _open_beside(self) -> StateStore:
        """Open an empty store; the saved state stays until the next one is saved."""
        if self._is_on_disk:
            remove_folder(self._old_state)
            self.state.rename(self._old_state)
        return StateStore(self.plan, self.state)

    def _saved_optimizer(self) -> str:
        """Return the optimizer of the saved state; "" if its moments fit none."""
        if self._is_on_disk:
            manifest = read_manifest(self.state) or {"layout": {}}
            return manifest["layout"].get("optimizer", ADAMW)
        saved = self.checkpoint.load()
        assert saved is not None, "the header was read from a checkpoint"
        return find_optimizer(self.plan.fragments[1], saved[0].get("v.1"))

    def read_progress(self, store: StateStore) -> EngineProgress | None:
        """Return the progress of a state on disk or of a paused round; None for any other one."""
        if self.paused_round.header is not None:
            return read_engine_progress(self.paused_round.header)
        if store.header is None:
            return None
        return read_engine_progress(StateHeader.model_validate_json(store.header))

    def load_into(self, engine: TrainingEngine) -> None:
        """Load the saved state into an engine in memory.

        Raises:
            StateError: The state is of another model.
        """
        with ExitStack() as open_state:
            engine.load_state_dict(self._open(open_state))

    def save(self, engine: TrainingEngine, header: StateHeader, closing: bool) -> None:
        """Make the engine's state durable; it describes itself where its state lies on disk."""
        if self.plan.on_disk:
            engine.commit(closing)
            if self.plan.is_stage:
                remove_folder(self._old_state)
                remove_folder(self.checkpoint.folder)
                self._is_on_disk = True
            return
        self.checkpoint.save(engine.state_dict(), header)
        self.paused_round.remove()
        if self._is_on_disk:
            self._is_on_disk = False
            remove_folder(self.state)

    def save_paused(self, engine: TrainingEngine, store: StateStore, header: StateHeader) -> bool:
        """Make the state durable in the middle of a round, for a pause that frees its memory.

        Returns:
            Whether the disk has room for it.
        """
        if self.plan.on_disk:
            engine.commit(closing=True)
            return True
        if not self.paused_round.has_room():
            log.warning("the disk has no room for this model's state: a pause keeps its memory")
            return False
        self.paused_round.save(store, header)
        return True

    def find_continued(
        self, ledger: Ledger, recipe: Recipe, author: LocalAuthor
    ) -> StateHeader | None:
        """Return the header of the saved state if the ledger continues it; else remove the state.

        A folder that was put together from two backups may hold a state with updates that its
        ledger has lost. Then the ledger and the peers count: the state is discarded, and this
        machine goes on under a new incarnation.
        """
        header = self.header
        if header is not None and self.align_with_ledger(ledger, recipe):
            return self.header
        if header is not None:
            log.warning(
                "the state and the ledger of %s do not belong together: starting from the ledger",
                header.run,
            )
            own_head = header.heads.get(author.name)
            if own_head is not None:
                author.on_own_update(own_head)
        self.clear()  # what is damaged as well
        return None

    def align_with_ledger(self, ledger: Ledger, recipe: Recipe) -> bool:
        """Make the saved state fit the ledger, if that is possible.

        Where the ledger has begun again at a snapshot since, replace the saved anchor by the
        snapshot's. AdamW's moments, the outer momentum and the residual stay.

        Returns:
            Whether the ledger continues the saved state.
        """
        assert self.header is not None
        paused = self.paused_round.header
        if paused is not None and not _continues(ledger, paused):
            self.paused_round.remove()
            self.header = self._between_rounds
            if self.header is None:
                return False
        vector = {author: head.seq for author, head in self.header.heads.items()}
        if ledger.can_continue_from(vector, self.header.retracted):
            return True
        base = load_base_snapshot(ledger) if ledger.has_received(vector) else None
        if base is None:
            return False
        sketches = [compute_sketch(units) for units in base.fragments]
        anchor = Anchor([], base.heads)
        anchor.restore(base.heads, base.retracted, sketches)
        log.info(
            "taking the peers' anchor at %s tokens in the place of an older one",
            f"{anchor.tokens:,}",
        )
        anchor_fields = {
            "heads": anchor.heads,
            "retracted": anchor.retracted,
            "sketches": anchor.expected_sketches,
            "tokens": anchor.tokens,
        }
        header = self.header.model_copy(update=anchor_fields)
        self._replace_anchor(base.fragments, header, recipe)
        return True

    def clear(self) -> None:
        """Remove the saved state: the ledger does not continue it."""
        remove_folder(self.state)
        self.checkpoint.clear()
        self.paused_round.remove()
        self.header = None
        self._is_on_disk = False

    # ---- moving -------------------------------------------------------------------------------

    def _replace_anchor(
        self, anchor: Sequence[Tensor], header: StateHeader, recipe: Recipe
    ) -> None:
        """Write the saved state again, with another anchor."""
        if self.plan.on_disk:
            self._move(header, recipe, anchor)
        else:
            with ExitStack() as open_state:
                tensors = AnchorOverlay(self._open(open_state), anchor)
                self.checkpoint.save(dict(tensors), header)
            self._is_on_disk = False
            remove_folder(self.state)
        self.header = header

    def _open(self, open_state: ExitStack) -> Mapping[str, Tensor]:
        """Open the saved state's tensors, for as long as `open_state` is open."""
        if self._is_on_disk:
            is_beside = self._old_state.exists()
            state = DiskState(self.plan.model, self._old_state if is_beside else self.state)
            open_state.callback(state.close)
            return state
        saved = self.checkpoint.load()
        assert saved is not None, "the header was read from a checkpoint"
        return saved[0]

    def _move(
        self, header: StateHeader, recipe: Recipe, anchor: Sequence[Tensor] | None = None
    ) -> None:
        """Move the saved state to the plan's store on disk, with `anchor` where it is given."""
        remove_folder(self._new_state)

        def describe(progress: EngineProgress) -> str:
            fields = {"progress": progress_fields(progress)}
            return header.model_copy(update=fields).model_dump_json()

        with ExitStack() as open_state:
            store = StateStore(self.plan, self._new_state)
            engine = Engine(self.plan, recipe, store, Anchor([]), describe)
            open_state.callback(engine.close)
            tensors = self._open(open_state)
            if anchor is not None:
                tensors = AnchorOverlay(tensors, anchor)
            engine.load_state_dict(
                tensors, self.plan.local_fragments if self.plan.is_stage else None
            )
            label = int(tensors[CREW_LABEL]) if CREW_LABEL in tensors else 0
            engine.progress = replace(engine.progress, position=header.step, label=label)
            engine.commit(closing=True)
        if self.state.exists():
            self.state.rename(self._old_state)
        self._finish_move()
        self._is_on_disk = True

    def _finish_move(self) -> None:
        """Put the new state in place if it is complete, else the old one; also after a crash."""
        if read_state_header(self.state) is None:
            for source in (self._new_state, self._old_state):
                if read_state_header(source) is not None:
                    remove_folder(self.state)
                    source.rename(self.state)
                    break
        for leftover in (self._new_state, self._old_state):
            remove_folder(leftover)


def _continues(ledger: Ledger, header: StateHeader) -> bool:
    """Return whether a ledger continues the anchor of a saved state."""
    vector = {author: head.seq for author, head in header.heads.items()}
    return ledger.can_continue_from(vector, header.retracted)


class AnchorOverlay(Mapping[str, Tensor]):
    """A state with another anchor, read one tensor at a time."""

    def __init__(self, state: Mapping[str, Tensor], anchor: Sequence[Tensor]) -> None:
        """Lay the fragments of `anchor` over `state`."""
        self._state = state
        self._anchor = anchor

    def __len__(self) -> int:
        return len(self._state)

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __getitem__(self, name: str) -> Tensor:
        kind, _, index = name.partition(".")
        if kind == CREW_LABEL:
            return -self._state[name].abs()  # the crew's other machines have the older anchor
        return self._anchor[int(index)] if kind == "anchor" else self._state[name]


class DiskState(Mapping[str, Tensor]):
    """A state on disk under the names of `Engine.state_dict`, read one tensor at a time."""

    def __init__(self, model: ModelSpec, folder: Path) -> None:
        """Open the state of a model in `folder`.

        Raises:
            StateError: There is no complete state.
        """
        manifest = read_manifest(folder)
        if manifest is None:
            raise StateError(f"{folder} holds no state")
        layout = manifest["layout"]
        self._fragments: list[int] = layout.get("fragments", list(range(model.layers + 2)))
        everywhere = tuple(
            "disk" if i in self._fragments else REMOTE for i in range(model.layers + 2)
        )
        plan = Plan(
            model=model,
            weights=everywhere,
            moments=everywhere,
            exchange="disk",
            clipping="exact",
            tile=layout["tile"],
            crash_safety=layout["crash_safety"],
            dtype=layout["dtype"],
            optimizer=layout.get("optimizer", ADAMW),
            moments_bits=layout["moments_bits"],
        )
        self._store = StateStore(plan, folder)
        self.header = StateHeader.model_validate_json(self._store.header or "")
        self._names = ["progress"]
        if read_engine_progress(self.header).label:
            self._names.append(CREW_LABEL)
        for i in self._fragments:
            self._names += [f"{kind}.{i}" for kind in ("m", "v", "anchor", "momentum", "feedback")]

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str) -> Tensor:
        kind, _, index = name.partition(".")
        if kind == "progress":
            return self._read_progress()
        if kind == CREW_LABEL:
            return torch.tensor([read_engine_progress(self.header).label])
        if kind in ("m", "v"):
            return self._read_moment(int(index), first=kind == "m")
        i = int(index)
        forecast = read_engine_progress(self.header).forecast
        if kind == "momentum" and forecast and forecast[i]:
            return torch.zeros(self._store.plan.fragments[i].size)
        dtype = torch.float32 if kind == "momentum" else torch.int32
        return FragmentSequence(self._store, kind, dtype)[i]

    def _read_progress(self) -> Tensor:
        """Return int64 [2]: AdamW's steps, and how many more warm up."""
        if self._store.invalid_kinds & set(TRAINING_KINDS):
            return torch.tensor([0, WARMUP_STEPS])  # the moments are lost: AdamW begins again
        progress = read_engine_progress(self.header)
        return torch.tensor([progress.optimizer_steps, progress.warmup_steps_left])

    def _read_moment(self, i: int, first: bool) -> Tensor:
        """Return fragment `i`'s first moment, fp32 [n], or its second of what AdamW trains."""
        plan = self._store.plan
        parts: list[Tensor] = []
        for t in range(plan.tile_count(i)):
            record = self._store.load_tile("moments", i, t)
            moments = view_moments(plan, i, t, record).to_float32()
            parts.append(moments[0 if first else 1].clone())
        return torch.cat(parts)

    def close(self) -> None:
        """Close the state's files."""
        self._store.close()


def compose_header(
    joined: JoinedRun, anchor: Anchor, author: str, progress: EngineProgress
) -> StateHeader:
    """Return the header of a state: what its tensors belong to."""
    return StateHeader(
        run=joined.run,
        spec=joined.spec_digest,
        step=progress.position,
        last_seq=anchor.vector.get(author, 0),
        tokens=anchor.tokens,
        heads=anchor.heads,
        retracted=anchor.retracted,
        sketches=anchor.expected_sketches or [],
        progress=progress_fields(progress),
    )


def progress_fields(progress: EngineProgress) -> dict[str, Any]:
    """Return a header's `progress`: all fields but the position, which is the header's step.

    Only a crew's lead has a label; earlier versions do not know the field.
    """
    left_out = {"position"} if progress.label else {"position", "label"}
    return {name: value for name, value in asdict(progress).items() if name not in left_out}


def read_engine_progress(header: StateHeader) -> EngineProgress:
    """Return the progress that a header states."""
    fields: dict[str, Any] = dict(header.progress)
    return EngineProgress(position=header.step, **fields)


def read_state_header(folder: Path) -> StateHeader | None:
    """Return the header of a state on disk.

    Returns:
        None where there is no state, or none that can be used; the log says why.
    """
    try:
        manifest = read_manifest(folder)
        if manifest is None:
            return None
        if "anchor" in manifest["invalid"]:
            raise StateError("the anchor in it is damaged")
        return StateHeader.model_validate_json(manifest["header"])
    except (StateError, ValidationError) as error:
        log.warning("the state in %s is not used: %s", folder, error)
        return None


def open_tensors(
    folder: Path, model: ModelSpec, open_state: ExitStack
) -> tuple[Mapping[str, Tensor], StateHeader] | None:
    """Open what a run's folder has saved between rounds, for as long as `open_state` is open."""
    if read_state_header(folder / "state") is None:
        return CheckpointSlots(folder / "checkpoint").load()
    state = DiskState(model, folder / "state")
    open_state.callback(state.close)
    return state, state.header
