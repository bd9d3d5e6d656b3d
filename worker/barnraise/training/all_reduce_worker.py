"""The training loop of runs whose machines average the gradients of every step: all-reduce.

Synchronous data parallelism: every machine computes the gradient of its own batch at the same
weights, all take AdamW's step along the mean of all gradients, and so their weights and moments
stay equal. The machines of a group find each other over the mesh (`mixing/
all_reduce_groups.py`), and a new group shares the weights and moments of the member that is
furthest ahead. Step numbers and the learning rate are the group's too.
"""

import logging
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor

from barnraise.exchange.mixing.all_reduce_groups import AllReduceGroups, JoinedGroup
from barnraise.mixing.mesh_links import MeshLinks
from barnraise.planning.limits import Limits
from barnraise.planning.mixing_memory import all_reduce_bytes
from barnraise.planning.round_schedule import RoundSchedule
from barnraise.swap.engine import Engine
from barnraise.swap.lr_schedule import learning_rate_scale
from barnraise.training.step_worker import StepWorker

log = logging.getLogger("barnraise")

RETRY_SECONDS = 1.0  # between two attempts to share the group's state


class AllReduceWorker(StepWorker):
    """One machine in a run of the strategy `all-reduce`."""

    groups: AllReduceGroups  # `prepare_steps` sets it
    _group_tokens = 0  # of the run, as the group counts them for the learning rate
    # The engine, and how often its replica had become the anchor, when its state was the group's.
    _shared: tuple[Engine, int] | None = None

    def reserved_bytes(self) -> int:
        """Return the bytes of RAM for the gradients and states that travel."""
        return all_reduce_bytes(self.spec.model)

    def step_limits(self, limits: Limits) -> Limits:
        """Clip as all machines do, by the norm of the whole mean gradient."""
        return replace(super().step_limits(limits), clipping="exact")

    # ---- training -----------------------------------------------------------------------------

    def open_mesh(self) -> MeshLinks:
        """Open links to the other machines, for messages about groups only."""
        return self.exchange.open_mesh(0, 0)

    def prepare_steps(self, cleanup: ExitStack) -> None:
        """Wait for a link to another machine, if any is known."""
        log.info(
            "this run averages gradients in every step (all-reduce): its machines must reach each "
            "other directly by TCP, in one LAN or cluster. Behind NATs they cannot, and train "
            "alone; what they send is not encrypted"
        )
        self.groups = AllReduceGroups(self.mesh, self.poll_should_stop)
        cleanup.callback(self.groups.close)
        self.wait_for_link()

    def train_together(self, round_schedule: RoundSchedule) -> None:
        """Take the round's steps, or those until a pause or the run's end interrupts it."""
        recipe = self.spec.recipe
        while not self.is_round_over(round_schedule):
            # Be in a group whose members all have this machine's weights and moments.
            if not self.ensure_group():
                return

            # Sample the step's batch. Data and step number determine each other.
            step = self.metrics.step
            micro_batches = self.sample_micro_batches(step)

            # Compute the gradient, average it, and take AdamW's step along the mean.
            scale = learning_rate_scale(recipe, self._group_tokens)
            stats = self.engine.step(
                micro_batches, scale, step + 1, self.is_leaving, self.groups.average_gradients
            )
            if stats.interrupted and self.is_leaving():
                return
            if stats.interrupted:
                continue  # the group is lost: take the step again with those that are left

            tokens = self.anchor.tokens + self.engine.round_tokens
            self.metrics.record_step(stats, tokens, scale * recipe.learning_rate)
            self._record_group_step()
            self.run_between_steps()
            if not self.wait_while_paused():
                return

    def ensure_group(self) -> bool:
        """Join a group if this machine is in none, and continue with the group's state.

        Returns:
            False if this machine is to do something else than train.
        """
        while self.groups.group is None or not self._has_group_state():
            self.groups.leave()
            if not self._has_group_state():
                self.groups.disown_state()
            resets = self.engine.replica_resets
            joined = self.groups.join(
                self.engine.progress_with_pending.optimizer_steps,
                self.metrics.step_seconds or 0.0,
                self._poll_should_not_wait,
            )
            if joined is None:
                return False
            if resets != self.engine.replica_resets:
                continue  # a repair of the anchor came between: the state is not what was stated
            self.metrics.warning = self.groups.problem
            if self._share_state(joined):
                self._shared = self.engine, self.engine.replica_resets
                self.groups.confirm_state()
            elif self.leaving.wait(RETRY_SECONDS):
                return False
        return True

    def _has_group_state(self) -> bool:
        """Return whether weights and moments are still those of the last group."""
        return self._shared == (self.engine, self.engine.replica_resets)

    def _poll_should_not_wait(self) -> bool:
        """Exchange updates, and return whether to do something else than wait for a group."""
        self.run_between_steps()
        has_ended = self.is_leaving() or self.run_ended or self.budget_reached
        return has_ended or self.is_paused or self.exchange.needs_resync

    def _share_state(self, joined: JoinedGroup) -> bool:
        """Receive weights, moments and counters of the group's source, or send them.

        Returns:
            False if that failed. This machine's replica is the anchor then.
        """
        own_tokens = self.anchor.tokens + self.engine.round_tokens
        if joined.size == 1:
            self._group_tokens = own_tokens
        if not joined.shares_state:
            return True
        progress = self.engine.progress_with_pending
        counters = torch.tensor(
            [progress.optimizer_steps, progress.warmup_steps_left, own_tokens], dtype=torch.int64
        )
        is_complete = self.groups.broadcast(counters, joined.source)
        for fragment in self.plan.fragments:
            if not is_complete:
                break
            state = self.engine.read_training_state(fragment.index)
            is_complete = self.groups.broadcast(state, joined.source) and _is_sound(state)
            if is_complete:
                self.engine.write_training_state(fragment.index, state)
        if not is_complete:
            # Some fragments may be another machine's and some this one's.
            log.warning("the group's weights have not come whole: beginning again from the anchor")
            self.engine.reset_round()
            return False
        taken, warmup_left, self._group_tokens = (int(value) for value in counters)
        self.engine.count_optimizer_steps(taken, warmup_left)
        log.info("has the weights and moments of %s at step %d", joined.source[:8], taken)
        return True

    def _record_group_step(self) -> None:
        """Count a step of all members; leave the group with them if one wants another group."""
        group = self.groups.group
        assert group is not None
        step_tokens = self.spec.recipe.step_sequences * self.spec.model.context
        self._group_tokens += group.size * step_tokens
        if not self.groups.record_step():
            self.groups.leave()

    # ---- waiting ------------------------------------------------------------------------------

    def wait_while_paused(self) -> bool:
        """Leave the group while this machine is paused; see `Worker.wait_while_paused`."""
        if self.is_paused:
            self.groups.leave(is_pausing=True)
        return super().wait_while_paused()

    def wait_while_suspended(self) -> None:
        """Leave the group once the budget is spent; see `Worker.wait_while_suspended`."""
        if self.budget_reached:
            self.groups.leave(is_pausing=True)
        super().wait_while_suspended()

    def resync_if_behind(self) -> None:
        """Leave the group while the anchor is replaced; see `Worker.resync_if_behind`."""
        if self.exchange.needs_resync and self.groups.group is not None:
            self.groups.leave(is_pausing=True)
        super().resync_if_behind()


def _is_sound(state: Tensor) -> bool:
    """Return whether weights and moments, fp32 [3, n], are possible ones."""
    return bool(torch.isfinite(state).all() and (state[2] >= 0).all())
