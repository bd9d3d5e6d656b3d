"""The training loop: one machine trains one run and exchanges updates with its peers.

`Worker.train` is the core of the program. `Worker.run` puts it into its life cycle: prepare, train,
drain. `join.py` does what comes before it: finding the run, preparing its text, waiting for its
launch. `resume.py` finds the saved state, and `anchor_evaluator.py` evaluates the run's model.
"""

import logging
import math
import sqlite3
import threading
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import replace

from safetensors import SafetensorError
from torch import Tensor

from barnraise.coordinator_client.machine_monitor import MachineMonitor, OwnersLogHandler
from barnraise.coordinator_client.reporter import Reporter, ReportSpool
from barnraise.errors import StateError
from barnraise.exchange.snapshots.snapshot_client import Snapshot, load_base_snapshot
from barnraise.ledger.anchor import Anchor, FragmentStorage, load_initial_fragments
from barnraise.ledger.blob_store import BlobStore
from barnraise.ledger.ledger import Ledger
from barnraise.peering.transports.transport import Transport
from barnraise.planning.crew import advise_crew
from barnraise.planning.hardware import Hardware, return_freed_memory
from barnraise.planning.limits import Limits
from barnraise.planning.plan import Plan
from barnraise.planning.render import build_plan_view, find_cards
from barnraise.planning.round_schedule import RoundSchedule
from barnraise.planning.write_advice import describe_write_limit
from barnraise.protocol.enums import Activity, JoinPurpose, PauseReason, RunStatus
from barnraise.protocol.polling import (
    LOOP_POLL_SECONDS,
    NETWORK_POLL_SECONDS,
    PERSON_POLL_SECONDS,
)
from barnraise.swap.device import require_determinism
from barnraise.swap.engine import WARMUP_STEPS, Engine, StepStats
from barnraise.swap.executor import EngineProgress
from barnraise.swap.lr_schedule import learning_rate_scale
from barnraise.swap.state_store import FragmentSequence, StateStore
from barnraise.text.batches import TokenDataset
from barnraise.training.anchor_evaluator import AnchorEvaluator
from barnraise.training.card_memory import claim_card_memory
from barnraise.training.checkpoint import StateHeader
from barnraise.training.cpu_share import CpuShare
from barnraise.training.join import JoinedRun
from barnraise.training.limits.decision import TRAIN, TrainingDecision
from barnraise.training.limits.rule_watch import RuleWatch, local_now
from barnraise.training.local_control import LocalControl
from barnraise.training.local_status import LocalStatus
from barnraise.training.memory_return import return_memory
from barnraise.training.memory_watch import MemoryWatch
from barnraise.training.metrics import TrainingMetrics
from barnraise.training.pauses import choose_pause, frees_memory
from barnraise.training.plan_change import find_other_plan
from barnraise.training.prefetch import Prefetch, reserve_text
from barnraise.training.replay_monitor import ReplayMonitor
from barnraise.training.resume import SavedState, compose_header
from barnraise.training.run_exchange import create_exchange
from barnraise.training.running_mark import RunningMark
from barnraise.training.status import StatusPublisher, describe_limits
from barnraise.training.training_engine import Encoder, TrainingEngine

log = logging.getLogger("barnraise")

FREED_POLL_SECONDS = 0.5  # in a pause that costs the machine nothing; loading a model takes longer
FINISH_SECONDS = 120.0  # a finished worker waits this long for its peers to have every update
# A leaving worker has left after this time, if the disk allows it: Docker and systemd end a program
# that they have told to stop after ten seconds and more.
LEAVE_SECONDS = 8.0
HAND_OVER_SECONDS = 3.0  # of these, to send its last update to a peer, at most
LAST_REPORT_SECONDS = 2.0  # of these, for its last report
SYNCHRONIZED_SECONDS = 1.0  # peers must have had the same updates for this long
ALONE_SECONDS = 5.0  # a worker without peers waits this long for one to connect
# Between two returns of the holes that activations leave in glibc's heap, which grows without end
# otherwise. The next step touches the pages again: 1.4 ms a MiB, half a per cent with 2 GB.
RETURN_SECONDS = 600.0

QUOTA_PAUSE = TrainingDecision(PauseReason.DISK_WRITES, "today's disk writes are used up")
OWNER_PAUSE = TrainingDecision(PauseReason.OWNER, "the run's owner must decide")


class Worker:
    """One machine in one run, from its state folder to its final checkpoint."""

    join_purpose = JoinPurpose.TRAIN
    ends_with_run = True  # else it has something to do after the run's end
    has_room_to_pause = True  # on its disk, for the state of a pause that frees the memory
    # `initialise_state` sets these two, and `prepare` the text.
    store: StateStore
    engine: TrainingEngine
    text: TokenDataset

    def __init__(
        self,
        joined: JoinedRun,
        leaving: threading.Event,
        hardware: Hardware,
        limits: Limits | None = None,
        on_status: Callable[[LocalStatus], None] = lambda status: None,
        transport: Transport | None = None,
    ) -> None:
        """Plan the training and open the run's files. Nothing large is allocated or fetched yet.

        Args:
            joined: this machine's part in the run. The worker closes its folder and its client.
            leaving: ends the worker after the current step, with everything saved.
            hardware: what this machine can do, as measured.
            limits: what its owner allows the worker to use.
            on_status: receives the status whenever it is written to the status file.
            transport: carries the frames between peers; by default iroh.

        Raises:
            PlanError: The model, or the run's text, does not fit this machine.
        """
        self.joined = joined
        self.spec = joined.spec
        self.leaving = leaving
        self.key = joined.coordinator.identity.key
        self.limits = limits or Limits()
        state_limits = self.limits
        if self.join_purpose is JoinPurpose.TRAIN:
            blobs = BlobStore(joined.folder.path / "blobs", sweep=False)
            state_limits = reserve_text(self.limits, joined.manifest, blobs)
        self.plan = self.plan_training(hardware, state_limits)
        self._plan_request = joined.request_plan(hardware, state_limits)
        if advice := describe_write_limit(self._plan_request, self.plan):
            log.warning("%s", advice)
            if not (self.plan.is_stage or self.spec.recipe.mixes_weights):
                log.warning("%s", advise_crew(joined.run))
        if self.plan.deterministic:
            require_determinism()
        self.saved_state = SavedState(joined.folder.path, self.plan)
        self.local_control = LocalControl(joined.folder.path)
        self.ledger = Ledger(joined.folder.path)
        self.blobs = self.ledger.blobs
        spool = ReportSpool(joined.folder.path / "spool.sqlite")
        spool.skip_to(joined.acknowledged)
        self.monitor = MachineMonitor(
            describe_limits(self.limits),
            find_cards(self.plan, hardware)[0].device_index if self.plan.device != "cpu" else None,
        )
        self._log_handler = OwnersLogHandler(self.monitor)
        self.reporter = Reporter(
            joined.coordinator, joined.run, joined.machine, joined.directive, spool, self.monitor
        )
        self.exchange = create_exchange(joined, self.limits, self.ledger, transport)
        self.anchor = Anchor([], self.ledger.last_updates())  # empty until `initialise_state`
        self.metrics = TrainingMetrics(self.key)
        self.metrics.plan = build_plan_view(self.plan, hardware)
        self.status_publisher = StatusPublisher(
            joined, self.plan, self.metrics, self.reporter, self.exchange, self.ledger
        )
        self._evaluator = AnchorEvaluator(
            joined, self.metrics, self.exchange, self.ledger, self.is_leaving
        )
        self.prefetch = Prefetch(
            joined,
            self.ledger,
            self.exchange,
            self.metrics,
            leaving,
            self.poll_should_stop,
            lambda: self.status_publisher.describe_end() if self.ends_with_run else "",
        )
        self._on_status = on_status
        self._open_state = ExitStack()  # closes the engine, once there is one
        self._memory_watch: MemoryWatch | None = None
        self._rules: RuleWatch | None = None
        self._cpu_share = CpuShare(lambda: self.owners_limits.cpu)
        self.is_freed = False  # a pause has closed the engine
        self._is_turn_over: Callable[[], bool] = lambda: False
        self._looked_for_pause_at = 0.0  # monotonic; in the middle of a step
        self._returned_memory_at = time.monotonic()
        self._running_mark = RunningMark(joined.folder.path)
        self._leaving_since: float | None = None  # monotonic; when the loop noticed it
        log.info("the plan: %s", self.metrics.plan.sentence)
        if gain := joined.describe_gain(self.plan.step_tokens / self.plan.step_seconds):
            log.info("%s", gain)

    def plan_training(self, hardware: Hardware, limits: Limits) -> Plan:
        """Plan this run's training on a machine.

        Raises:
            PlanError: The model does not fit the machine.
        """
        choice = self.joined.request_plan(hardware, limits).choose_cards(advise=True)
        for other in choice.refused:
            log.info("not chosen: %s", other)
        return choice.plan

    def end_after_round(self, is_over: Callable[[], bool]) -> None:
        """Leave after the round in which `is_over` becomes true: another run has its turn then."""
        self._is_turn_over = is_over

    def watch_memory(self, watch: MemoryWatch) -> None:
        """Make a smaller plan between two rounds when other programs need the memory."""
        self._memory_watch = watch

    def watch_rules(self, rules: RuleWatch) -> None:
        """Train only when the rules of the machine's owner allow it."""
        self._rules = rules
        rules.count_traffic(lambda: self.exchange.stats.bytes_sent)

    @property
    def owners_limits(self) -> Limits:
        """Return the limits of the machine's owner as they are now."""
        return self._rules.limits if self._rules is not None else self.limits

    # ---- life cycle ---------------------------------------------------------------------------

    def run(self) -> None:
        """Prepare, train and drain; then close everything, whatever happened.

        Raises:
            BarnraiseError: Its text says what is wrong and what to do next.
        """
        with ExitStack() as cleanup:  # runs in reverse order; one failure does not stop the others
            log.addHandler(self._log_handler)
            cleanup.callback(log.removeHandler, self._log_handler)
            cleanup.callback(self.joined.folder.close)
            cleanup.callback(self._running_mark.remove)
            cleanup.callback(self.ledger.close)
            cleanup.callback(self.joined.coordinator.close)
            cleanup.callback(self._stop_reporter)
            cleanup.callback(self._open_state.close)  # the last report, before it, reads the anchor
            try:
                self._running_mark.write(self.plan.host_bytes)
                self.exchange.open()
                cleanup.callback(self.report_status, at_once=True)
                cleanup.callback(self.exchange.stop)
                self.report_status(at_once=True)
                self.reporter.start()
                self.prepare()
                if not self.leaving.is_set():
                    self.train()
                    self.drain()
            except (OSError, sqlite3.Error, SafetensorError) as error:
                # What failed to reach the disk was not published: the folder is as after a kill.
                log.debug("traceback of the failure", exc_info=True)
                raise StateError(
                    f"stopped: {error}. What {self.joined.folder.path} holds is whole; join again"
                ) from None

    def is_leaving(self) -> bool:
        """Return whether this machine is to leave; remember since when."""
        if self.leaving.is_set() and self._leaving_since is None:
            self._leaving_since = time.monotonic()
        return self.leaving.is_set()

    def _leave_seconds_left(self) -> float:
        """Return how much of the time that leaving may take is left."""
        if not self.is_leaving() or self._leaving_since is None:
            return LEAVE_SECONDS
        return max(0.0, self._leaving_since + LEAVE_SECONDS - time.monotonic())

    def _stop_reporter(self) -> None:
        """Stop the reporter; a leaving machine gives the coordinator less time to answer."""
        if self.is_leaving():
            self.reporter.stop(min(LAST_REPORT_SECONDS, self._leave_seconds_left()))
        else:
            self.reporter.stop()

    # ---- training -----------------------------------------------------------------------------

    def train(self) -> None:
        """Train round by round until the budget is spent, the run ends or this machine leaves."""
        has_unpublished = False  # fragments that were not due have learnt since their last update
        while self.wait_for_round():  # blocks while paused; resyncs if left behind
            # Plan the round: its length, and how its update is compressed.
            streaming = not (self.plan.on_disk or self.spec.recipe.mixes_weights)
            round_schedule = self.exchange.plan_round(self.metrics.tokens_per_second, streaming)

            # Take local steps on this machine's replica. An interrupted round ends for every
            # fragment (None); a complete one only for the fragments that are due.
            is_complete = self.train_locally(round_schedule)
            if self.is_freed:
                return  # it leaves during a pause, whose state has the unfinished round
            now = self.joined.coordinator.now()
            fragments_due = round_schedule.fragments_due(now) if is_complete else None

            if self.engine.round_tokens:
                # Publish what the round changed.
                self.publish_round(round_schedule, fragments_due)
                has_unpublished = fragments_due is not None

                # Save the state once per round, when the round's last fragment is published. A
                # machine that leaves saves it at the end, once.
                is_over = fragments_due is None or self.plan.last_fragment in fragments_due
                if is_over and not self.is_leaving():
                    self.save_checkpoint()

            # Apply the peers' updates, serve their requests, evaluate and report.
            self.run_between_steps()

            # Make room for other programs, or use the memory that they have left again.
            if self.needs_other_plan:
                if has_unpublished:
                    self.publish_round(round_schedule)
                    has_unpublished = False
                self.change_plan()

        # Publish what the fragments that were not due have learnt.
        if has_unpublished and not self.is_freed:
            self.publish_round(round_schedule)
            if not self.is_leaving():
                self.save_checkpoint()

    def train_locally(self, round_schedule: RoundSchedule) -> bool:
        """Take the round's local steps. The exchange goes on between them.

        Returns:
            Whether the round is complete; False when a pause or the run's end interrupted it.
        """
        recipe = self.spec.recipe
        while not self.is_round_over(round_schedule):
            self.prepare_step()

            # Sample the step's batch. Data and step number determine each other.
            step = self.metrics.step
            micro_batches = self.sample_micro_batches(step)

            # The learning rate follows the ledger's tokens, this round's included.
            tokens = self.anchor.tokens + self.engine.round_tokens
            scale = learning_rate_scale(recipe, tokens)
            self._cpu_share.start_step()
            stats = self.engine.step(micro_batches, scale, step + 1, self.should_end_step)
            if stats.interrupted:
                # A step that a pause has ended is taken again.
                if not self.is_leaving() and self.wait_while_paused():
                    continue
                return False
            stats = replace(stats, seconds=stats.seconds - self._cpu_share.slept_in_step)
            self._cpu_share.rest(self.is_leaving)
            self.finish_step(stats)
            tokens = self.anchor.tokens + self.engine.round_tokens
            self.metrics.record_step(stats, tokens, scale * recipe.learning_rate)

            self.run_between_steps()
            if not self.wait_while_paused():
                return False
        return True

    def prepare_step(self) -> None:
        """Do what comes before a step where machines agree in each; here, nothing."""

    def finish_step(self, stats: StepStats) -> None:
        """Do what follows a complete step where machines agree in each; here, nothing."""

    def should_end_step(self) -> bool:
        """Return whether to end the step; rest as the share of the CPU requires.

        Where the whole gradient's norm clips it, a step that is ended has changed nothing, and can
        be taken again after a pause. Else a pause waits for the end of the step.
        """
        if self.plan.clipping == "exact" and self._is_pause_due():
            return True
        self._cpu_share.rest(self.is_leaving)
        return self.is_leaving()

    def _is_pause_due(self) -> bool:
        """Return whether to pause, at most every `PERSON_POLL_SECONDS`: a step has many parts."""
        now = time.monotonic()
        if now - self._looked_for_pause_at < PERSON_POLL_SECONDS:
            return False
        self._looked_for_pause_at = now
        return self.find_pause() is not None

    def is_round_over(self, round_schedule: RoundSchedule) -> bool:
        """Return whether this machine publishes now."""
        steps = self.engine.round_tokens // self.spec.step_tokens
        now = self.joined.coordinator.now()
        return self.exchange.is_round_over(round_schedule, steps, now)

    def sample_micro_batches(self, step: int) -> list[Tensor]:
        """Return the token ids of a step, int64 [sequences, context + 1] for each micro-batch."""
        recipe, context = self.spec.recipe, self.spec.model.context
        batch = self.text.sample_batch(
            self.spec.seed, self.key, step, recipe.step_sequences, context
        )
        return list(batch.split(self.plan.sequences))

    def publish_round(
        self, round_schedule: RoundSchedule, fragments_due: Collection[int] | None = None
    ) -> None:
        """Publish what the replica has learnt since the last update, or withdraw it.

        Args:
            round_schedule: how the update is compressed, and where the next round begins.
            fragments_due: indices of the fragments whose round ends; None: of all fragments.
        """
        exchange, engine = self.exchange, self.engine
        if exchange.author.suspension:
            engine.reset_round()  # nothing that this machine publishes would count
            return
        exchange.author.log_probation()
        tokens = engine.round_tokens
        parts = engine.end_round(
            Encoder(round_schedule.scheme),
            exchange.compute_weight(self.metrics.tokens_per_second),
            fragments_due,
            round_schedule.carries_residual,
            round_schedule.has_momentum(exchange.rounds_published),
        )
        with exchange.new_update(tokens) as update:
            for part in parts:
                update.add(part.fragment, part.payload, part.units)
                del part  # free it before the next fragment's part is computed
        if update.withdrawal is None:
            self.anchor.record(update.header)
            return
        # Take a round out of the anchor that would not count: of a newcomer, or just suspended.
        # Peers compare what a newcomer has learnt; optimizers and error feedback go on.
        engine.queue_updates(exchange.withdraw(update.withdrawal))
        engine.apply_queued()
        exchange.on_withdrawn(update.withdrawal)

    def save_checkpoint(self, closing: bool = False) -> None:
        """Make the state durable, right after a round: the replica is (nearly) the anchor then.

        Args:
            closing: the worker leaves, so the parts that only memory holds are saved as well.
        """
        self.engine.flush()
        self.engine.apply_queued()  # the anchor and the header then describe the same updates
        header = self.state_header(self.engine.progress)
        self.saved_state.save(self.engine, header, closing)
        self.exchange.on_state_saved(self.anchor.vector)
        now = time.monotonic()
        if now - self._returned_memory_at >= RETURN_SECONDS:
            self._returned_memory_at = now
            return_freed_memory()

    # ---- between two steps --------------------------------------------------------------------

    def run_between_steps(self) -> None:
        """Exchange updates, evaluate and report, as far as each is due. Waits for nobody."""
        self.exchange_updates()
        self.evaluate_if_due()
        self.report_status()

    def exchange_updates(self) -> None:
        """Apply what peers have sent, check the anchor, and serve snapshots to joining peers."""
        self.apply_arrivals()
        self.anchor.set_vouched(self.ledger.verdicts.vouched)
        self.repair_anchor()
        self.exchange.serve_snapshots(self.anchor)

    def apply_arrivals(self) -> None:
        """Apply the updates received since the last call, and predict those that are in flight.

        If a verdict retracted an update, reset the outer momentum, which followed it.
        """
        arrivals = self.exchange.poll_updates()
        prediction = self.exchange.predict_in_flight(self.metrics.tokens_per_second)
        self.engine.queue_updates(*arrivals, prediction=prediction)
        if any(arrival.retracts for arrival in arrivals):
            self.engine.reset_momentum()

    def repair_anchor(self) -> None:
        """Compare one fragment of the anchor with the ledger, now and then, and repair it.

        Training waits for the repair. The round is dropped: the damage may be in what it learnt.
        """
        while True:
            damaged = self.exchange.find_damaged_fragment(self.anchor)
            if damaged is None or self.poll_should_stop():
                return
            units = self.exchange.rebuild_fragment(self.anchor, damaged, self.poll_should_stop)
            if units is not None:
                self.engine.replace_fragment(damaged, units)
            else:
                self.apply_arrivals()
                self.leaving.wait(NETWORK_POLL_SECONDS)

    def evaluate_if_due(self, at_once: bool = False) -> None:
        """Evaluate the anchor every `evaluate_every` tokens of the ledger, and at the run's end."""
        self._evaluator.evaluate_if_due(self.engine, self.anchor, at_once)

    def report_status(self, at_once: bool = False) -> None:
        """Publish the status to the coordinator, the status file and the peers, when it is due."""
        if self._memory_watch is not None:
            self._memory_watch.poll()
            self._running_mark.set_shortage(self._memory_watch.pressure.short_since is not None)
            self.metrics.memory_shortages = self._memory_watch.pressure.shortages
        status = self.status_publisher.publish(self.anchor, at_once)
        if status is not None:
            self.monitor.set_limits(describe_limits(self.owners_limits))
            self._on_status(status)

    def poll_should_stop(self) -> bool:
        """Report the status, and return whether to give up: the callback of blocking fetches.

        A machine that the site refuses leaves: its peers send it nothing, however long it waits.
        """
        self.report_status()
        if self.reporter.refused is not None:
            self.leaving.set()
        return self.leaving.is_set()

    # ---- waiting ------------------------------------------------------------------------------

    def wait_for_round(self) -> bool:
        """Resync if left behind, wait while paused, and return whether to train another round."""
        self.resync_if_behind()
        self.wait_while_suspended()
        if self._is_turn_over():
            self.leaving.set()
        return not self.status_publisher.has_spent_budget(self.anchor) and self.wait_while_paused()

    def wait_while_suspended(self) -> None:
        """Wait while the run, or this machine in it, is suspended.

        The run is while its budget is spent by tokens that came faster than machines can train. The
        run's owner excludes the one who stated them, and training goes on; or ends the run. If
        neither happens, the run finishes once the time has passed in which they could have been
        trained.
        """
        logged = ""
        while reason := self.status_publisher.describe_suspension(self.anchor):
            if reason != logged:
                logged = reason
                log.error("%s", reason)
            is_alone = reason == self.exchange.author.suspension
            activity = Activity.PAUSED if is_alone else Activity.SUSPENDED
            self.metrics.set_idle(activity, OWNER_PAUSE)
            if self.leaving.wait(LOOP_POLL_SECONDS) or self.status_publisher.run_ended:
                break
            self.engine.apply_queued()
            self.run_between_steps()
        self.metrics.set_training()

    def wait_while_paused(self) -> bool:
        """Wait while there is a reason to pause. The exchange goes on.

        A long pause closes the engine, so that the model's memory is free, and opens it again.

        Returns:
            Whether to go on training; False when the round should end here.
        """
        started = time.monotonic()
        is_offline = False
        pause = self.find_pause()
        if pause is QUOTA_PAUSE:
            log.info(
                "today's %.1f GB are written to disk: training goes on tomorrow (UTC), "
                "the exchange of updates goes on",
                (self.plan.daily_write_limit or 0) / 1e9,
            )
        while pause is not None:
            self.metrics.set_idle(Activity.PAUSED, pause)
            if pause.is_offline != is_offline:
                is_offline = pause.is_offline
                self.exchange.set_offline(is_offline)
            poll_seconds = FREED_POLL_SECONDS if self.is_freed else LOOP_POLL_SECONDS
            if self.leaving.wait(poll_seconds) or self.status_publisher.run_ended:
                break
            if self._frees_memory(pause, time.monotonic() - started):
                self.free_memory()
            self._serve_while_paused(pause)
            pause = self.find_pause()
        if is_offline and not self.leaving.is_set():
            self.exchange.set_offline(False)
        if self.is_freed and not self.leaving.is_set():
            self.reopen_state()
            self.is_freed = self.metrics.is_resting = False
        self.metrics.set_training()
        return not (self.leaving.is_set() or self.status_publisher.run_ended)

    def _serve_while_paused(self, pause: TrainingDecision) -> None:
        """Exchange updates and report, as far as that is possible in this pause."""
        if self.is_freed:
            self.exchange.poll_updates()  # they are in the ledger, which gives them again
            self.report_status()
            return
        if pause is not QUOTA_PAUSE:
            self.engine.apply_queued()  # writes to disk, where the state lies there
        self.run_between_steps()

    def find_pause(self) -> TrainingDecision | None:
        """Return why this machine is to take no step now; None if it may take one."""
        if not (self.is_freed or self.store.may_write_step()):
            return QUOTA_PAUSE
        if self.status_publisher.refusal is not None:
            return None
        decision = self._rules.decision if self._rules is not None else TRAIN
        now = local_now()
        local = self.local_control.find_pause(now.timestamp())
        return choose_pause(local, decision, self.reporter.directive, now)

    def _frees_memory(self, pause: TrainingDecision, paused_seconds: float) -> bool:
        """Return whether to give the memory back now; what would be saved may not be written."""
        if self.is_freed or not self.has_room_to_pause or pause is QUOTA_PAUSE:
            return False
        return frees_memory(pause, paused_seconds, time.time())

    def free_memory(self) -> None:
        """Save the state as it is, in the middle of the round, and free its memory."""
        self.engine.flush()
        self.engine.apply_queued()
        header = self.state_header(self.engine.progress)
        self.has_room_to_pause = self.saved_state.save_paused(self.engine, self.store, header)
        if self.has_room_to_pause:
            self._drop_engine()
            self.is_freed = self.metrics.is_resting = True
            return_memory()

    def resync_if_behind(self) -> None:
        """Replace the anchor by the peers' where they no longer store updates that this one lacks.

        AdamW's moments, the outer momentum and the residual stay, and so do this machine's updates
        that the peers do not have yet. Where a verdict cuts off what came with the peers' anchor,
        return to the one before, with a new optimizer.
        """
        if not self.exchange.needs_resync:
            return
        self.exchange.retain_anchor(self.anchor)
        self._close_state()
        self.exchange.resync()
        self.reopen_state()

    def _close_state(self) -> None:
        """Save the state and free its memory; `reopen_state` opens it again."""
        self.save_checkpoint(closing=True)
        self._drop_engine()

    def _drop_engine(self) -> None:
        self._open_state.close()
        del self.engine, self.store
        self.anchor = Anchor([], self.ledger.last_updates())

    def reopen_state(self) -> None:
        """Open the state that was saved last, under the plan of now."""
        self.exchange.suspend_updates()
        self.saved_state = SavedState(self.joined.folder.path, self.plan)
        header = self.load_saved_state()
        self.initialise_state(header, None if header else load_base_snapshot(self.ledger))

    # ---- memory -------------------------------------------------------------------------------

    @property
    def needs_other_plan(self) -> bool:
        """Return whether other programs need memory, or have long left more than the plan uses."""
        watch = self._memory_watch
        is_due = watch is not None and (watch.pressure.is_short or watch.pressure.may_grow)
        return is_due and not self.is_leaving()

    def change_plan(self) -> None:
        """Move the state to a plan for the memory of now, if there is one, and train on with it."""
        assert self._memory_watch is not None
        plan = find_other_plan(self._plan_request, self.plan, self._memory_watch)
        if plan is None:
            return
        self._close_state()
        return_freed_memory()
        self.plan = plan
        self.metrics.plan = build_plan_view(plan, self._plan_request.hardware)
        self._running_mark.write(plan.host_bytes)
        self.reopen_state()

    # ---- preparation --------------------------------------------------------------------------

    def prepare(self) -> None:
        """Build the engine and fetch the text.

        The anchor comes from this machine's saved state, from the peers, or from the weights that
        the run begins with.
        """
        header = self.load_saved_state()
        snapshot = None
        self.exchange.add_peers(list(self.joined.peers))
        if header is None:
            snapshot = self.prefetch.fetch_snapshot(self.joined.trust_one)
        peers_vector = self.exchange.agreed_vector
        is_new = header is None and snapshot is None
        if is_new and not self.prefetch.fetch_initial_weights():
            return
        self.initialise_state(header, snapshot)
        if self.prefetch.fetch_text():
            self.open_text()
        if is_new and not self.leaving.is_set():
            self._replay_updates(peers_vector)
        if self.leaving.is_set():
            self.save_checkpoint(closing=True)
            return
        self.evaluate_if_due()  # the loss of the anchor from which this machine starts

    def open_text(self) -> None:
        """Open the fetched text for training, evaluation and samples."""
        self.text = TokenDataset(self.joined.manifest, self.blobs.path)
        self._evaluator.open_text(self.text, self.plan)

    def initialise_state(
        self, header: StateHeader | None, snapshot: Snapshot | None = None
    ) -> None:
        """Open the state, load the anchor, start the exchange from it and build the engine.

        Args:
            header: of the saved state; None: there is none.
            snapshot: the peers' anchor, which takes the place of the initial weights.
        """
        claim_card_memory(self.plan, self.spec.recipe)
        self.store = self.saved_state.open_store(self.spec.recipe)
        fragments = self.open_anchor_fragments(self.store)
        self.anchor = Anchor(fragments, in_memory=self.plan.exchange != "disk")
        if header is not None:
            self.anchor.restore(header.heads, header.retracted, header.sketches)
        if snapshot is not None:
            self.anchor.load(snapshot.fragments, snapshot.heads, snapshot.retracted)
            _log_snapshot(self.anchor.tokens, snapshot.confirmed)
        elif header is None:
            self.anchor.load(load_initial_fragments(self.spec, self.blobs), {})
        self.exchange.start(self.anchor.vector, self.anchor.retracted)
        progress = self.saved_state.read_progress(self.store)
        self.engine = self.open_engine(self.store, self.anchor, progress)
        self._open_state.callback(self.engine.close)
        if header is None:
            if snapshot is not None:
                self.engine.progress = replace(self.engine.progress, warmup_steps_left=WARMUP_STEPS)
            self.save_checkpoint()
            return
        self.metrics.step = header.step
        if progress is None:
            self.saved_state.load_into(self.engine)
            self.engine.progress = replace(self.engine.progress, position=header.step)
        if self.exchange.author.last_seq > header.last_seq:
            # The ledger has a newer update of this machine than the saved state: that update may
            # already contain the residual, and it contains what the round had learnt.
            self.engine.reset_feedback()

    def open_anchor_fragments(self, store: StateStore) -> FragmentStorage:
        """Return the fragments of the anchor, int32 [n] each."""
        return FragmentSequence(store, "anchor")

    def open_engine(
        self, store: StateStore, anchor: Anchor, progress: EngineProgress | None
    ) -> TrainingEngine:
        """Build what trains under the plan; `progress` is that of the state in the store."""
        if self.plan.ranks:
            from barnraise.swap.sharded.cluster import open_sharded_engine  # takes 0.6 s

            return open_sharded_engine(self.plan, self.spec.recipe, store, anchor, progress)
        return Engine(self.plan, self.spec.recipe, store, anchor, self._describe_state, progress)

    def load_saved_state(self) -> StateHeader | None:
        """Return the header of the saved state, if the ledger continues it."""
        return self.saved_state.find_continued(self.ledger, self.spec.recipe, self.exchange.author)

    def _replay_updates(self, target: dict[str, int]) -> None:
        """Receive the updates up to a version vector before the first round."""
        monitor = ReplayMonitor(target, time.monotonic())

        def is_done() -> bool:
            has_caught_up = monitor.observe(self.ledger.vector(), time.monotonic())
            return has_caught_up or self.leaving.is_set() or self.status_publisher.run_ended

        self.exchange_until(is_done, math.inf)

    def state_header(self, progress: EngineProgress) -> StateHeader:
        """Return the header of the state at `progress`: what its tensors belong to."""
        return compose_header(self.joined, self.anchor, self.exchange.author.name, progress)

    def _describe_state(self, progress: EngineProgress) -> str:
        return self.state_header(progress).model_dump_json()

    # ---- draining -----------------------------------------------------------------------------

    def drain(self) -> None:
        """Hand over the last updates and save the final state.

        A leaving worker saves first, because it may be killed at any moment, and then waits briefly
        for one peer to have its updates. When the run is finished, it waits longer, until it and
        its peers have the same updates.
        """
        self.exchange.announce_completion()
        run_finished = (
            self.status_publisher.has_spent_budget(self.anchor)
            or self.reporter.directive.status is RunStatus.FINISHED
        )
        if self.leaving.is_set() or not run_finished:
            self.finish(Activity.LEFT)
            self._wait_for_delivery()
        else:
            self.metrics.activity = Activity.FINISHING
            self._wait_until_synchronized()
            self.evaluate_if_due(at_once=True)
            self.finish(Activity.FINISHED)

    def finish(self, activity: Activity) -> None:
        """Save the final state. `activity` is what the last report states."""
        self.metrics.set_idle(activity)
        if not self.is_freed:
            self.save_checkpoint(closing=True)

    def _wait_for_delivery(self) -> None:
        """Wait briefly for a peer to have this machine's last update. The state stays as saved."""
        seconds = min(HAND_OVER_SECONDS, self._leave_seconds_left() - LAST_REPORT_SECONDS)
        deadline = time.monotonic() + seconds
        while not self.exchange.all_published_delivered() and time.monotonic() < deadline:
            self.report_status()
            time.sleep(LOOP_POLL_SECONDS)

    def is_synchronized(self) -> bool:
        """Return whether every connected peer and this machine have applied the same updates."""
        stats = self.exchange.stats
        in_ledger = stats.updates_sent + stats.updates_received
        has_applied_all = in_ledger == sum(self.anchor.vector.values())
        return self.exchange.is_synchronized() and has_applied_all

    def exchange_until(self, is_done: Callable[[], bool], seconds: float) -> None:
        """Exchange updates without training until `is_done`, for at most `seconds`."""
        deadline = time.monotonic() + seconds
        while not is_done() and time.monotonic() < deadline:
            self.resync_if_behind()
            self.run_between_steps()
            self.engine.apply_queued()
            time.sleep(LOOP_POLL_SECONDS)
        self.run_between_steps()
        self.engine.apply_queued()

    def _wait_until_synchronized(self) -> None:
        """Wait until everybody has had the same updates for a moment, or this machine leaves."""
        last_difference = time.monotonic()

        def is_done() -> bool:
            nonlocal last_difference
            now = time.monotonic()
            if not self.is_synchronized():
                last_difference = now
            patience = SYNCHRONIZED_SECONDS if self.exchange.stats.peers else ALONE_SECONDS
            return self.leaving.is_set() or now - last_difference > patience

        self.exchange_until(is_done, FINISH_SECONDS)


def _log_snapshot(tokens: int, confirmed: bool) -> None:
    trust = "confirmed" if confirmed else "unconfirmed: this machine's owner trusts its peers"
    log.info("took the anchor at %s tokens from the peers (%s)", f"{tokens:,}", trust)
