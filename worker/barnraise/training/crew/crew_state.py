"""The part of a crew's state that one of its machines saves on its own disk."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from barnraise.errors import StateError
from barnraise.planning.plan import Plan
from barnraise.spec import ModelSpec
from barnraise.swap.executor import EngineProgress
from barnraise.swap.state_store import StateStore, read_manifest
from barnraise.training.checkpoint import CheckpointSlots, StateHeader, remove_folder
from barnraise.training.crew.stage_engine import StageEngine, list_fragments
from barnraise.training.resume import (
    DiskState,
    progress_fields,
    read_engine_progress,
    read_state_header,
)


class CrewState:
    """Two slots of a state in memory, or the engine's own store on disk, by the lead's label.

    Attributes:
        saved: what was loaded last from a slot, or from the disk of the span before.
        is_stale: whether the anchor that was loaded last is newer than its label: a disk has one
            state alone, which changes with arrivals and with the next save.
    """

    def __init__(self, folder: Path, run: str, spec_digest: str) -> None:
        """Save in a folder that only this run's part uses."""
        self._folder = folder / "state"  # of a plan on disk
        self._former = folder / "former"  # the same of the span before, until the next save
        self._slots = CheckpointSlots(folder / "checkpoint")
        self._open_state = ExitStack()
        self.saved: Mapping[str, Tensor] = {}
        self.is_stale = False
        self._run, self._spec = run, spec_digest

    def open_store(self, plan: Plan) -> tuple[StateStore, EngineProgress | None]:
        """Open the store of a part, and the progress of what it holds on disk.

        What was saved of another part, or under another plan, waits for `load`.
        """
        header = read_state_header(self._folder)
        if header is not None:
            manifest = read_manifest(self._folder)
            if plan.on_disk and manifest and manifest["layout"] == StateStore.layout_of(plan):
                return StateStore(plan, self._folder), read_engine_progress(header)
            remove_folder(self._former)
            self._folder.rename(self._former)
        remove_folder(self._folder)
        return StateStore(plan, self._folder if plan.on_disk else None), None

    def describe(self, progress: EngineProgress) -> str:
        """Return the header with which a state on disk is committed."""
        fields = progress_fields(progress)
        header = StateHeader(
            run=self._run, spec=self._spec, step=progress.position, progress=fields
        )
        return header.model_dump_json()

    def save(self, engine: StageEngine, label: int, closing: bool) -> None:
        """Make the engine's state durable under a label; the one before it stays, if in memory."""
        engine.set_label(label)
        if engine.plan.on_disk:
            engine.commit(closing)
        else:
            header = StateHeader(run=self._run, spec=self._spec, step=label)
            self._slots.save(engine.state_dict(), header)
        self.close()
        remove_folder(self._former)

    def load(self, engine: StageEngine, label: int) -> list[int]:
        """Load the state of a label, and begin a round at its anchor; 0: nothing is learnt yet.

        Returns:
            The fragments that this machine has saved under it. It has loaded those that it holds.
        """
        self.close()
        self.is_stale = False
        if label == 0:
            self._slots.clear()  # its labels are those of a state that the lead has lost
            engine.forget_training()
            return []
        if engine.plan.on_disk and abs(engine.progress.label) >= label:
            self.is_stale = engine.progress.label != label
            engine.reset_round()
            return list(engine.plan.local_fragments)
        self.saved = self._find(engine.plan.model, label)
        found = list_fragments(self.saved)
        try:
            own = [i for i in engine.plan.local_fragments if i in found]
            if own:
                engine.load_state_dict(self.saved, own)
        except StateError:  # of another optimizer or model
            return []
        return found

    def _find(self, model: ModelSpec, label: int) -> Mapping[str, Tensor]:
        """Return what was saved under a label, in a slot or by the span before; or nothing."""
        self._slots.remove_after(label)  # which the lead has not saved
        in_slot = self._slots.load(label)
        if in_slot is not None:
            return in_slot[0] if in_slot[1].run == self._run else {}
        header = read_state_header(self._former)
        newest = 0 if header is None else read_engine_progress(header).label
        if abs(newest) < label:
            return {}
        self.is_stale = newest != label
        former = DiskState(model, self._former)
        self._open_state.callback(former.close)
        return former

    def close(self) -> None:
        """Close the state that was loaded last."""
        self.saved = {}
        self._open_state.close()
