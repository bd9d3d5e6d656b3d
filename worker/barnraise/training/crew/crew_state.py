"""The part of a crew's state that one of its machines saves on its own disk."""

from pathlib import Path

from barnraise.errors import StateError
from barnraise.planning.plan import Plan
from barnraise.swap.executor import EngineProgress
from barnraise.swap.state_store import StateStore, read_manifest
from barnraise.training.checkpoint import CheckpointSlots, StateHeader, remove_folder
from barnraise.training.crew.stage_engine import StageEngine
from barnraise.training.resume import progress_fields, read_engine_progress, read_state_header


class CrewState:
    """Two slots of a state in memory, or the engine's own store on disk, by the lead's label."""

    def __init__(self, folder: Path, run: str, spec_digest: str) -> None:
        """Save in a folder that only this run's part uses."""
        self._folder = folder / "state"  # of a plan on disk
        self._slots = CheckpointSlots(folder / "checkpoint")
        self._run, self._spec = run, spec_digest

    def open_store(self, plan: Plan) -> tuple[StateStore, EngineProgress | None]:
        """Open the store of a part, and the progress of what it holds on disk.

        What was saved of another part, or under another plan, is removed: no crew can use it.
        """
        if not plan.on_disk:
            remove_folder(self._folder)
            return StateStore(plan), None
        header = read_state_header(self._folder)
        if header is not None:
            manifest = read_manifest(self._folder)
            if manifest and manifest["layout"] == StateStore.layout_of(plan):
                return StateStore(plan, self._folder), read_engine_progress(header)
        remove_folder(self._folder)
        return StateStore(plan, self._folder), None

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
            return
        header = StateHeader(run=self._run, spec=self._spec, step=label)
        self._slots.save(engine.state_dict(), header)

    def load(self, engine: StageEngine, label: int) -> bool:
        """Load the state of a label, and begin a round at its anchor; 0: nothing is learnt yet.

        Returns:
            Whether this machine has saved it; else nothing has changed.
        """
        if label == 0:
            self._slots.clear()  # its labels are those of a state that the lead has lost
            engine.forget_training()
            return True
        if engine.plan.on_disk:
            if engine.progress.label != label:
                return False
            engine.reset_round()
            return True
        saved = self._slots.load_step(label)
        if saved is None or saved[1].run != self._run:
            return False
        try:
            engine.load_state_dict(saved[0])
        except StateError:  # of other fragments than this machine has now
            return False
        engine.set_label(label)
        return True
