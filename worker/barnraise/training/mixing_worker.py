"""The training loop of runs whose machines average their weights in every step.

Each machine's step is (Wang et al., arXiv 2410.11998)

    x_i ← Σ_j W_ij x_j − α · Adam_i(g_i)

with the gradient at the un-mixed x_i and moments of its own. The messages of a step travel while
its gradient is computed. Averaging waits for the step's neighbours: one that is late or gone costs
a step of mixing.
"""

import logging
from contextlib import ExitStack
from dataclasses import replace

import torch

from barnraise.mixing.mesh_links import MeshLinks
from barnraise.mixing.neighbour_mixing import MixingSettings, NeighbourMixing
from barnraise.mixing.payloads import check_weights, decode_weights, payload_size
from barnraise.planning.limits import Limits
from barnraise.planning.mixing_memory import mean_gradient_bytes, mixing_bytes
from barnraise.planning.mixing_topology import find_topology
from barnraise.planning.round_schedule import RoundSchedule
from barnraise.spec import RunSpec
from barnraise.swap.lr_schedule import learning_rate_scale
from barnraise.training.step_worker import StepWorker

log = logging.getLogger("barnraise")

BEACON_SECONDS = 2.0  # a linked machine waits this long to learn at which step the others are
STATE_SECONDS = 600.0  # a neighbour's weights must arrive in this time, longer on slow lines
# Steps by which a machine may be behind before it takes a neighbour's weights: after a pause its
# own are so old that averaging would set the others back.
MAX_STEPS_BEHIND = 20


class MixingWorker(StepWorker):
    """One machine in a run of the strategy `decentralized-adam`."""

    mixing: NeighbourMixing  # `prepare_steps` sets it

    def reserved_bytes(self) -> int:
        """Return the bytes of RAM for the weights that are sent and received in every step."""
        return mixing_bytes(self.spec.model, self.spec.recipe)

    def reserved_device_bytes(self) -> int:
        """Return the bytes of GPU memory for gradients that moments have not absorbed."""
        return mean_gradient_bytes(self.spec.model, self.spec.recipe)

    def step_limits(self, limits: Limits) -> Limits:
        """Know the whole gradient before moments absorb it, where they absorb several steps'."""
        limits = super().step_limits(limits)
        if self.spec.recipe.mixing_accumulation == 1:
            return limits
        return replace(limits, clipping="exact")

    # ---- training -----------------------------------------------------------------------------

    def open_mesh(self) -> MeshLinks:
        """Open links to the other machines, for their weights."""
        elements = self.count_elements()
        bits = self.spec.recipe.mixing_bits
        return self.exchange.open_mesh(payload_size(elements, bits), payload_size(elements, 32))

    def prepare_steps(self, cleanup: ExitStack) -> None:
        """Take the weights of the machine that is furthest ahead, if any is linked."""
        self.mixing = NeighbourMixing(
            self.mesh, mixing_settings(self.spec), should_stop=self.poll_should_stop
        )
        if self.wait_for_link():
            self.mesh.wait_for(
                lambda inbox: inbox.leader() is not None, BEACON_SECONDS, self.poll_should_stop
            )
        self.adopt_weights()

    def train_together(self, round_schedule: RoundSchedule) -> None:
        """Take the round's steps, or those until a pause or the run's end interrupts it."""
        recipe = self.spec.recipe
        while not self.is_round_over(round_schedule):
            # A machine that stood still for long continues with the others' weights.
            if self.mixing.steps_behind > MAX_STEPS_BEHIND:
                self.adopt_weights()

            # Send the un-mixed weights; they travel while the gradient is computed.
            self.mixing.start_step(self.engine.read_replica())
            if self.mixing.has_diverged:  # it would infect its neighbours, and never recover
                log.error(
                    "this machine's weights have diverged: it begins at the run's model again"
                )
                self.engine.reset_round()

            # Sample the step's batch. Data and step number determine each other.
            step = self.metrics.step
            micro_batches = self.sample_micro_batches(step)

            # Compute the gradient at these weights, and take Adam's step along it.
            tokens = self.anchor.tokens + self.engine.round_tokens
            scale = learning_rate_scale(recipe, tokens)
            stats = self.engine.step(micro_batches, scale, step + 1, self.is_leaving)
            if stats.interrupted:
                return

            # Add what the neighbours' weights change: x_i ← x_i + Σ_j W_ij x_j − x_i. A step that
            # was abandoned has set the replica to the anchor, so x_i is not in it any longer.
            if stats.abandoned:
                self.mixing.cancel_mixing()
            change = self.mixing.compute_change()
            if change is not None:
                self.engine.add_to_replica(change)
            self.metrics.warning = self.mixing.problem

            tokens = self.anchor.tokens + self.engine.round_tokens
            self.metrics.record_step(stats, tokens, scale * recipe.learning_rate)
            self.run_between_steps()
            if not self.wait_while_paused():
                return

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


def mixing_settings(spec: RunSpec) -> MixingSettings:
    """Return how a recipe's machines average their weights."""
    recipe = spec.recipe
    topology = find_topology(recipe.mixing_topology)
    return MixingSettings(topology, recipe.mixing_bits, recipe.mixing_interval)
