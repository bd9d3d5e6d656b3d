"""The training loop that strategies share whose machines agree in every step.

`StepWorker.train` takes the place of `Worker.train`; the life cycle, the ledger, reports, pauses,
evaluation and checkpoints are the worker's. The run's published model, its *anchor*, follows the
replicas: once a round each machine moves it by its share of the way to its own replica
(`swap/anchor_tracking.py`), by signed updates like those of other runs. So tokens are counted,
weights are downloaded and machines join as everywhere.

Unlike updates, agreement waits for others: one that is late or gone costs a step, never the run.
"""

import logging
from abc import abstractmethod
from contextlib import ExitStack
from dataclasses import replace

from barnraise.errors import PlanError
from barnraise.mixing.mesh_links import MeshLinks
from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import Limits
from barnraise.planning.mixing_memory import reserve_memory
from barnraise.planning.plan import Plan
from barnraise.planning.round_schedule import RoundSchedule
from barnraise.training.train import Worker

log = logging.getLogger("barnraise")

CONNECT_SECONDS = 20.0  # a machine that knows peers waits this long for a link to one of them


class StepWorker(Worker):
    """One machine in a run whose machines agree in every step."""

    mesh: MeshLinks  # `train` sets it

    # ---- planning -----------------------------------------------------------------------------

    @abstractmethod
    def reserved_bytes(self) -> int:
        """Return the bytes of RAM that agreeing takes besides the plan."""

    def reserved_device_bytes(self) -> int:
        """Return the bytes of GPU memory that agreeing takes besides the plan."""
        return 0

    def step_limits(self, limits: Limits) -> Limits:
        """Return what the plan may use: the whole state must be in memory."""
        return replace(limits, disk=0)

    def plan_training(self, hardware: Hardware, limits: Limits) -> Plan:
        """Plan the training with room for what is sent and received in every step.

        Raises:
            PlanError: The model does not fit this machine's memory.
        """
        smaller = reserve_memory(
            hardware, limits, self.reserved_bytes(), self.reserved_device_bytes()
        )
        try:
            return super().plan_training(smaller.hardware, self.step_limits(smaller.limits))
        except PlanError as error:
            raise PlanError(
                f"{error}. The machines of this run agree in every step "
                f"({self.spec.recipe.strategy}): the whole state must be in memory, with room for "
                "what they send and receive"
            ) from None

    @property
    def needs_smaller_plan(self) -> bool:
        """Return False: the whole state is needed in memory, so no plan is smaller."""
        return False

    # ---- training -----------------------------------------------------------------------------

    def train(self) -> None:
        """Train with the other machines until the budget is spent or this machine leaves."""
        with ExitStack() as cleanup:
            # Connect to the other machines, and begin where they are.
            self.mesh = self.open_mesh()
            cleanup.callback(self.mesh.stop)
            self.prepare_steps(cleanup)

            while self.wait_for_round():  # blocks while paused; resyncs if left behind
                # Plan the round, after which this machine publishes.
                round_schedule = self.exchange.plan_round(
                    self.metrics.tokens_per_second, streaming=False
                )

                # Take steps, agreeing with the others in each.
                self.train_together(round_schedule)

                if self.engine.round_tokens:
                    # Move the anchor towards this machine's replica.
                    self.publish_round(round_schedule)

                    # Save the state. A machine that leaves saves it at the end, once.
                    if not self.is_leaving():
                        self.save_checkpoint()

                # Apply the peers' updates to the anchor, evaluate and report.
                self.run_between_steps()
            self.metrics.warning = ""

    @abstractmethod
    def open_mesh(self) -> MeshLinks:
        """Open links to the other machines."""

    @abstractmethod
    def prepare_steps(self, cleanup: ExitStack) -> None:
        """Begin where the other machines are.

        Args:
            cleanup: receives what is to be closed before the links are.
        """

    @abstractmethod
    def train_together(self, round_schedule: RoundSchedule) -> None:
        """Take the round's steps, or those until a pause or the run's end interrupts it."""

    def is_round_over(self, round_schedule: RoundSchedule) -> bool:
        """Return whether this machine publishes now."""
        step_tokens = self.spec.recipe.step_sequences * self.spec.model.context
        return round_schedule.is_over(self.engine.round_tokens // step_tokens, self._run_time())

    def apply_arrivals(self) -> None:
        """Apply the updates received since the last call to the anchor.

        The replica does not change: what others have learnt comes with the agreement in steps.
        """
        self.engine.queue_updates(*self.exchange.poll_updates())

    def count_elements(self) -> int:
        """Return the number of elements of all fragments, padding included."""
        return sum(fragment.size for fragment in self.plan.fragments)

    def wait_for_link(self) -> bool:
        """Wait until a peer is linked, if any is known; report meanwhile.

        Returns:
            Whether one is. Alone, training begins at once.
        """
        if not (self.joined.peers or self.ledger.peer_store.peers()):
            return False
        tries = round(CONNECT_SECONDS / 0.1)
        for _ in range(tries):
            if self.mesh.wait_for(lambda inbox: bool(inbox.neighbours), 0.1):
                return True
            if self.poll_should_stop():
                return False
        log.info("no other machine answers yet: training begins alone, and others join it")
        return False
