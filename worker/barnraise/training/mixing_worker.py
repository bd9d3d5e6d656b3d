"""The training loop of runs whose machines average their weights in every step.

Each machine's step is (Wang et al., arXiv 2410.11998)

    x_i ← Σ_j W_ij x_j − α · Adam_i(g_i)

with the gradient at the un-mixed x_i and moments of its own. The messages of a step travel while
its gradient is computed. Averaging waits for the step's neighbours: one that is late or gone costs
a step of mixing, never the run.

All else is the `Worker`'s: its loop of rounds and steps, the life cycle, the ledger, reports,
pauses, evaluation and checkpoints. The run's published model, its *anchor*, follows the replicas:
once a round each machine moves it by its share of the way to its own replica
(`swap/anchor_tracking.py`), by signed updates like those of other runs. So tokens are counted,
weights are downloaded and machines join as everywhere.
"""

import logging
from dataclasses import replace

import torch

from barnraise.errors import PlanError
from barnraise.mixing.mesh_links import MeshLinks
from barnraise.mixing.neighbour_mixing import MixingSettings, NeighbourMixing
from barnraise.mixing.payload_size import payload_size
from barnraise.mixing.payloads import check_weights, decode_weights
from barnraise.planning.card_choice import SHARDED, SWAP
from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import Limits
from barnraise.planning.mixing_memory import mean_gradient_bytes, mixing_bytes, reserve_memory
from barnraise.planning.mixing_topology import TOPOLOGIES
from barnraise.planning.plan import Plan
from barnraise.planning.rank_rules import NO_AVERAGES
from barnraise.spec import RunSpec
from barnraise.swap.engine import Engine, StepStats
from barnraise.training.train import Worker

log = logging.getLogger("barnraise")

CONNECT_SECONDS = 20.0  # a machine that knows peers waits this long for a link to one of them
BEACON_SECONDS = 2.0  # a linked machine waits this long to learn at which step the others are
STATE_SECONDS = 600.0  # a neighbour's weights must arrive in this time, longer on slow lines
# Steps by which a machine may be behind before it takes a neighbour's weights: after a pause its
# own are so old that averaging would set the others back.
MAX_STEPS_BEHIND = 20


class MixingWorker(Worker):
    """One machine in a run of the strategy `decentralized-adam`."""

    engine: Engine  # whose replica the machines average
    mesh: MeshLinks  # `join_mesh` sets both
    mixing: NeighbourMixing

    # ---- planning -----------------------------------------------------------------------------

    def plan_training(self, hardware: Hardware, limits: Limits) -> Plan:
        """Plan the training with room for the weights that are sent and received in every step.

        The whole state must be in memory. Where moments absorb several steps' gradients, the whole
        gradient must be known before they do.

        Raises:
            PlanError: The model does not fit this machine's memory.
        """
        model, recipe = self.spec.model, self.spec.recipe
        hardware, limits = reserve_memory(
            hardware, limits, mixing_bytes(model, recipe), mean_gradient_bytes(model, recipe)
        )
        if limits.engine == SHARDED:
            raise PlanError(NO_AVERAGES)
        step_limits = replace(limits, disk=0, engine=SWAP)
        if recipe.mixing_accumulation > 1:
            step_limits = replace(step_limits, clipping="exact")
        try:
            return super().plan_training(hardware, step_limits)
        except PlanError as error:
            raise PlanError(
                f"{error}. The machines of this run agree in every step "
                f"({recipe.strategy}): the whole state must be in memory, with room for "
                "what they send and receive"
            ) from None

    @property
    def needs_other_plan(self) -> bool:
        """Return False: the whole state is needed in memory, so no plan is smaller."""
        return False

    # ---- training -----------------------------------------------------------------------------

    def train(self) -> None:
        """Train with the other machines until the budget is spent or this machine leaves."""
        self.mesh = self.open_mesh()
        try:
            self.join_mesh()  # begin where the other machines are
            super().train()
            self.metrics.warning = ""
        finally:
            self.mesh.stop()

    def join_mesh(self) -> None:
        """Wait for a link to another machine, if any is known, and begin where it is."""
        self.mixing = NeighbourMixing(
            self.mesh, mixing_settings(self.spec), should_stop=self.poll_should_stop
        )
        if self.wait_for_link():
            self.mesh.wait_for(
                lambda inbox: inbox.leader() is not None, BEACON_SECONDS, self.poll_should_stop
            )
        self.adopt_weights()

    def free_memory(self) -> None:
        """Save and free the state as other workers do; neighbours train on without this one."""
        super().free_memory()
        if self.is_freed:
            self.mesh.stop()
            self.mesh.offer_state(0, b"")
            del self.mixing

    def reopen_state(self) -> None:
        """Open the state that was saved last; after a pause, go where the other machines are."""
        super().reopen_state()
        if self.is_freed:
            self.mesh = self.open_mesh()
            self.join_mesh()

    def open_mesh(self) -> MeshLinks:
        """Open links to the other machines, for their weights."""
        elements = self.count_elements()
        bits = self.spec.recipe.mixing_bits
        return self.exchange.open_mesh(payload_size(elements, bits), payload_size(elements, 32))

    def prepare_step(self) -> None:
        """Send the un-mixed weights; they travel while the gradient is computed at them."""
        # A machine that stood still for long continues with the others' weights.
        if self.mixing.steps_behind > MAX_STEPS_BEHIND:
            self.adopt_weights()
        self.mixing.start_step(self.engine.read_replica())
        if self.mixing.has_diverged:  # it would infect its neighbours, and never recover
            log.error("this machine's weights have diverged: it begins at the run's model again")
            self.engine.reset_round()

    def should_end_step(self) -> bool:
        """Return whether to end the step: only to leave, since the neighbours take it as well."""
        return self.is_leaving()

    def finish_step(self, stats: StepStats) -> None:
        """Add what the neighbours' weights change: x_i ← x_i + Σ_j W_ij x_j − x_i."""
        if stats.abandoned:  # the replica is the anchor then, and x_i not in it any longer
            self.mixing.cancel_mixing()
        change = self.mixing.compute_change()
        if change is not None:
            self.engine.add_to_replica(change)
        self.metrics.warning = self.mixing.problem

    def adopt_weights(self) -> None:
        """Take the weights and the step of the neighbour that is furthest ahead, if there is one.

        The moments stay this machine's own.
        """
        leader = self.mesh.leader()
        if leader is None:
            return
        state = self.mesh.fetch_state(leader, STATE_SECONDS, self.poll_should_stop)
        if state is None and self.is_leaving():
            return
        if state is None:
            log.warning(
                "%s has not sent its weights: training goes on with this machine's", leader[:8]
            )
            return
        step, data = state
        try:
            weights = decode_weights(data, self.count_elements(), 32)
            check_weights(weights, self.engine.read_replica())
        except ValueError as error:
            log.warning("ignored the weights of %s: %s", leader[:8], error)
            return
        with torch.no_grad():
            self.engine.replace_replica(weights)
        self.mixing.cancel_mixing()
        self.mixing.step = max(self.mixing.step, step)
        log.info("took the weights of %s at its step %d", leader[:8], step)

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


def mixing_settings(spec: RunSpec) -> MixingSettings:
    """Return how a recipe's machines average their weights."""
    recipe = spec.recipe
    topology = TOPOLOGIES[recipe.mixing_topology]
    return MixingSettings(topology, recipe.mixing_bits, recipe.mixing_interval)
