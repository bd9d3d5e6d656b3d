"""The part of a crew's state that one of its machines saves on its own disk."""

from pathlib import Path

from barnraise.errors import StateError
from barnraise.training.checkpoint import CheckpointSlots, StateHeader
from barnraise.training.crew.stage_engine import StageEngine


class CrewState:
    """Two slots of a state in memory, or the engine's own store on disk, by the lead's label."""

    def __init__(self, folder: Path, run: str, spec_digest: str) -> None:
        """Save in a folder that only this run's part uses."""
        self._slots = CheckpointSlots(folder / "checkpoint")
        self._run, self._spec = run, spec_digest

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
