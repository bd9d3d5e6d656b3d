"""THE LOOP: one machine trains one run and trades updates with the others. The only file that knows both sides.

`Worker.train` is the story; the rest puts the parts together before it and takes them apart after it. What happens
until there is a run to train (finding it, preparing its text, its launch) is `enter.py`.
"""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from barnraise.coordinator_client.reporter import Reporter, ReportSpool
from barnraise.errors import PlanError, StateError
from barnraise.exchange.compression import codec
from barnraise.exchange.compression.scheme import QuantizationScheme
from barnraise.exchange.exchange import Exchange, ExchangeConfig
from barnraise.exchange.handlers.snapshot_client import Snapshot
from barnraise.exchange.ledger.anchor import Anchor, load_initial_fragment
from barnraise.exchange.ledger.ledger import Ledger
from barnraise.exchange.network.iroh_transport import IrohTransport
from barnraise.exchange.network.transport import Transport
from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import Limits
from barnraise.planning.render import plan_view
from barnraise.planning.search import make_plan
from barnraise.protocol.enums import Activity, RunStatus
from barnraise.protocol.signing import Identity
from barnraise.swap import executor
from barnraise.swap.engine import WARMUP_STEPS, EncodedFragment, Engine
from barnraise.swap.lr_schedule import learning_rate_scale
from barnraise.swap.state_store import FragmentSequence
from barnraise.text.batches import TokenDataset
from barnraise.training.checkpoint import StateHeader
from barnraise.training.join import JoinedRun
from barnraise.training.metrics import TrainingMetrics
from barnraise.training.prefetch import fetch_all_blobs, fetch_start_weights
from barnraise.training.resume import SavedState, progress_fields
from barnraise.training.status import StatusPublisher

log = logging.getLogger("barnraise")

HELD_OUT = 32  # sequences a validation loss is taken over
SNAPSHOT_SECONDS, SNAPSHOT_TRIES = 20.0, 6
SETTLING = 120.0  # seconds a finished worker waits for the others to have every update
PARTING = 5.0  # …and a leaving one for somebody to take its last


class Worker:
    """One machine in one run, from its state folder to its final checkpoint. `leaving` ends it early at the next step,
    with everything saved; `watch` is handed the status now and then."""

    def __init__(
        self,
        place: JoinedRun,
        identity: Identity,
        leaving: threading.Event,
        hardware: Hardware,
        limits: Limits | None = None,
        watch: Callable[[dict[str, Any]], None] = lambda status: None,
        transport: Transport | None = None,
    ):
        """Raises PlanError, before anything is allocated or fetched, when the model does not fit."""
        self.joined, self.spec, self.leaving = place, place.spec, leaving
        self.key, folder = identity.key, place.folder
        self.limits = limits or Limits()
        self.plan = make_plan(
            hardware, self.spec.model, self.limits, self.spec.recipe.step_sequences
        )
        if (
            daily := self.limits.disk_writes_per_day
        ) is not None and daily < self.plan.written_per_step:
            need = self.plan.written_per_step / 1e9
            raise PlanError(
                f"one step writes {need:,.1f} GB to disk, more than a day's {daily / 1e9:,.1f} GB"
            )
        self.saved_state = SavedState(folder.path, self.plan)
        self.ledger = Ledger(folder.path)
        self.blobs = self.ledger.blobs
        spool = ReportSpool(folder.path / "spool.sqlite")
        spool.skip_to(place.acknowledged)
        self.reporter = Reporter(
            place.coordinator, place.run, place.machine, place.directive, spool
        )
        exchange_config = ExchangeConfig(
            spec=self.spec,
            run=place.run,
            identity=identity,
            incarnation=folder.label.incarnation,
            ticket=place.ticket,
            mirrors=frozenset(self.spec.roots),
            clock=place.coordinator.now,
            reincarnate=folder.renew_incarnation,
        )
        self.exchange = Exchange(
            exchange_config, self.ledger, transport or IrohTransport(identity.secret)
        )
        if self.limits.uplink:
            self.exchange.set_uplink_limit(self.limits.uplink)
        self.anchor = Anchor([], self.ledger.last_updates())  # until `join` has the weights
        self.milestone, self._worn = -1, False
        self.metrics = TrainingMetrics(self.key)
        self.metrics.plan = plan_view(self.plan, hardware)
        self.status_publisher = StatusPublisher(
            place, self.plan, self.metrics, self.reporter, self.exchange, self.ledger, watch
        )
        log.info("the plan: %s", self.metrics.plan.sentence)
        self._opened = ExitStack()  # the state, once it is

    def run(self) -> None:
        """Everything: join, train, settle, leave. Raises BarnraiseError with what a person should know."""
        with ExitStack() as leave:  # each of these, whatever became of the others
            leave.callback(self.joined.folder.close)
            leave.callback(self.ledger.close)
            leave.callback(self.joined.coordinator.close)
            leave.callback(self.reporter.stop)
            leave.callback(self._opened.close)  # after the last word about the anchor
            try:
                self.exchange.open()
                leave.callback(self.report_status, at_once=True)
                leave.callback(self.exchange.stop)
                self.report_status(at_once=True)
                self.reporter.start()
                self.prepare()
                if not self.leaving.is_set():
                    self.train()
                    self.drain()
            except (OSError, sqlite3.Error, SafetensorError) as error:
                # Whatever the disk refused was not yet told to anybody: the folder is as after a kill.
                log.debug("the traceback, for the curious", exc_info=True)
                raise StateError(
                    f"stopped: {error}. What {self.joined.folder.path} holds is whole; join again"
                ) from None

    # ---- the story -------------------------------------------------------------------------------------------

    def train(self) -> None:
        recipe, context = self.spec.recipe, self.spec.model.context
        exchange, progress, clock = self.exchange, self.metrics, self.joined.coordinator.now
        partly = False  # said, with more of it learnt
        while self.wait_for_round():
            engine = self.engine  # another one, where the others' anchor took the place of ours
            rhythm, due = (
                exchange.plan_round(progress.tokens_per_second, streaming=not self.plan.on_disk),
                None,
            )
            while not rhythm.is_over(
                engine.round_tokens // (recipe.step_sequences * context), clock()
            ):
                batch = self.text.sample_batch(
                    self.spec.seed, self.key, progress.step, recipe.step_sequences, context
                )
                rate_scale = learning_rate_scale(recipe, self.anchor.tokens + engine.round_tokens)
                batches = list(batch.split(self.plan.sequences))
                progress.record_step(
                    engine.step(batches, rate_scale, progress.step + 1), self.anchor.tokens
                )
                self.exchange_updates()
                if not self.wait_while_paused():
                    break
            else:
                due = rhythm.fragments_due(clock())
            if engine.round_tokens:
                self.publish_round(rhythm.scheme, due)
                partly = due is not None
            self.exchange_updates()
        if partly:
            self.publish_round(rhythm.scheme)

    def publish_round(self, form: QuantizationScheme, due: Collection[int] | None = None) -> None:
        """What was learnt of the fragments that are `due`, or of all of them; the state is saved once a round."""
        exchange, engine, encode = self.exchange, self.engine, partial(codec.encode, scheme=form)
        tokens, weight = (
            engine.round_tokens,
            exchange.compute_weight(self.metrics.tokens_per_second),
        )
        parts = _in_order(engine.end_round(encode, weight, due), len(self.plan.fragments))
        self.anchor.record(exchange.publish(parts, tokens))
        if due is None or self.plan.last_fragment in due:
            self.save_checkpoint()

    def exchange_updates(self) -> None:
        """Takes what has arrived, hands out what is asked for, tells the coordinator's thread. Waits for nobody."""
        self.apply_arrivals()
        self.repair_anchor()
        self.exchange.serve_snapshots(self.anchor)
        self.evaluate_if_due()
        self.report_status()

    def apply_arrivals(self) -> None:
        """What has come in since the last time, and a guess of what is under way; of what comes out, the momentum that
        followed it goes as well."""
        arrivals = self.exchange.poll_updates()
        self.engine.queue_updates(
            *arrivals, prediction=self.exchange.predict_in_flight(self.metrics.tokens_per_second)
        )
        if any(arrival.retracts for arrival in arrivals):
            self.engine.reset_momentum()

    def repair_anchor(self) -> None:
        """One fragment of the anchor against its ledger, now and then. A damaged one is put right before anything else
        is trained: the round is dropped, as nobody knows what of it the damage was."""
        while (
            damaged := self.exchange.find_damaged_fragment(self.anchor)
        ) is not None and not self.poll_should_stop():
            units = self.exchange.rebuild_fragment(self.anchor, damaged, self.poll_should_stop)
            if units is not None:
                self.engine.replace_fragment(damaged, units)
            else:
                self.apply_arrivals()
                self.leaving.wait(1.0)

    # ---- what the loop asks itself ---------------------------------------------------------------------------

    @property
    def run_ended(self) -> bool:
        """The run has ended, or this machine's part in it has."""
        status = self.reporter.directive.status
        return (
            status in (RunStatus.FINISHED, RunStatus.CANCELLED) or self.reporter.refused is not None
        )

    @property
    def budget_reached(self) -> bool:
        return self.anchor.tokens >= self.status_publisher.token_budget

    def wait_for_round(self) -> bool:
        """Whether another round begins; waits out a pause first."""
        self.resync_if_behind()
        return not self.budget_reached and self.wait_while_paused()

    def wait_while_paused(self) -> bool:
        """Waits while the run is paused, trading all the while. False when the round should end here and now."""
        waits = (RunStatus.PAUSED, RunStatus.RECRUITING)
        while (worn := self.disk_quota_exhausted()) or (
            self.reporter.directive.status in waits and not self.reporter.refused
        ):
            self.metrics.set_idle(Activity.PAUSED)
            if self.leaving.wait(0.1) or self.run_ended:
                break
            if not worn:
                self.engine.apply_queued()
            self.exchange_updates()
        self.metrics.activity = Activity.TRAINING
        return not (self.leaving.is_set() or self.run_ended)

    def disk_quota_exhausted(self) -> bool:
        """Whether today's allowance of disk writes is used up; tomorrow, by UTC, it is whole again."""
        allowance = self.store.writes_left_today(self.limits.disk_writes_per_day)
        worn = allowance is not None and allowance < self.plan.written_per_step
        if worn and not self._worn:
            daily = (self.limits.disk_writes_per_day or 0) / 1e9
            log.info(
                "today's %.1f GB are written to disk: training goes on tomorrow (UTC), trading goes on",
                daily,
            )
        self._worn = worn
        return worn

    def evaluate_if_due(self, last: bool = False) -> None:
        """The anchor's loss on the held-out text, whenever the ledger passes another `evaluate_every` tokens."""
        milestone = self.anchor.tokens // self.spec.recipe.evaluate_every
        if milestone > self.milestone or last:
            self.milestone = milestone
            self.metrics.record_validation(self.anchor.tokens, self.engine.evaluate(self.held_out))
            self.metrics.record_checkpoint(
                self.anchor, 4 * sum(each.size for each in self.plan.fragments)
            )

    def state_header(self, progress: executor.EngineProgress) -> StateHeader:
        """What the state belongs to when it stands at `progress`."""
        return StateHeader(
            run=self.joined.run,
            spec=self.joined.spec_digest,
            step=progress.position,
            last_seq=self.anchor.vector.get(self.exchange.author, 0),
            tokens=self.anchor.tokens,
            heads=self.anchor.heads,
            retracted=self.anchor.retracted,
            sketches=self.anchor.expected_sketches or [],
            progress=progress_fields(progress),
        )

    def describe(self, progress: executor.EngineProgress) -> str:
        return self.state_header(progress).model_dump_json()

    def save_checkpoint(self, closing: bool = False) -> None:
        """Once a round, right after the harvest: the replica is the anchor then, or nearly (`turns.py`)."""
        self.engine.flush()
        self.engine.apply_queued()  # what is in the anchor and what the mark says are one
        self.saved_state.save(self.engine, self.state_header(self.engine.progress), closing)
        self.exchange.on_state_saved(self.anchor.vector)

    # ---- before and after ------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """The anchor from what this machine kept, the peers, or the run's seed; the text from whoever has it."""
        mark, cut = self.load_saved_state(), None
        self.exchange.add_peers(list(self.joined.peers))
        if (
            mark is None
            and (cut := self.fetch_snapshot()) is None
            and not (
                fetch_start_weights(self.exchange, self.blobs, self.spec, self.poll_should_stop)
                and not self.leaving.is_set()
            )
        ):
            return
        self.initialise_state(mark, cut)
        self.fetch_text()
        if self.leaving.is_set():
            self.save_checkpoint(closing=True)
        else:
            self.evaluate_if_due()  # where this machine starts, before anything of others is added

    def initialise_state(self, mark: StateHeader | None, cut: Snapshot | None = None) -> None:
        """The anchor where the state stands, or the others'; the exchange from there on; the engine."""
        self.store = self.saved_state.open_store(self.spec.recipe)
        self.anchor = Anchor(
            FragmentSequence(self.store, "anchor"), in_memory=self.plan.exchange != "disk"
        )
        if mark:
            self.anchor.restore(mark.heads, mark.retracted, mark.sketches)
        if cut:
            self.anchor.load(cut.fragments, cut.heads, cut.retracted)
            trust = (
                "two volunteers agree on it"
                if cut.confirmed
                else "unconfirmed: no second volunteer could be asked"
            )
            log.info(
                "took the anchor at %s tokens from the peers (%s)", f"{self.anchor.tokens:,}", trust
            )
        elif mark is None:
            self.anchor.load(
                (
                    load_initial_fragment(self.spec, each.index, self.blobs)
                    for each in self.plan.fragments
                ),
                {},
            )
        self.exchange.start(self.anchor.vector, self.anchor.retracted)
        standing = self.saved_state.read_progress(self.store)
        self.engine = Engine(
            self.plan, self.spec.recipe, self.store, self.anchor, self.describe, standing
        )
        self._opened.callback(self.engine.close)
        if mark is None:
            if cut:
                self.engine.progress = replace(self.engine.progress, warmup_steps_left=WARMUP_STEPS)
            self.save_checkpoint()
            return
        self.metrics.step = mark.step
        if standing is None:
            self.saved_state.load_into(self.engine)
            self.engine.progress = replace(self.engine.progress, position=mark.step)
        if self.exchange.last_published_seq > mark.last_seq:
            self.engine.reset_feedback()  # what it owed may have been said in the update that is newer
            self.engine.reset_round()  # and what the round had learnt is in it

    def resync_if_behind(self) -> None:
        """Where the others keep no more of what this machine lacks, their anchor takes the place of its own; its
        moments, momentum and feedback stay, and so do its updates that they have not got yet."""
        if not self.exchange.needs_resync:
            return
        self.save_checkpoint(closing=True)
        self._opened.close()
        del self.engine, self.store
        self.anchor = Anchor([], self.ledger.last_updates())
        self.exchange.resync()
        self.saved_state = SavedState(self.joined.folder.path, self.plan)
        self.initialise_state(self.load_saved_state())

    def load_saved_state(self) -> StateHeader | None:
        """What was kept here belongs to, if the ledger goes on from it. A folder put together from two backups may hold
        a state with updates that its ledger has lost; then the ledger and the peers count, and what was ours is under a
        new name."""
        mark = self.saved_state.header
        fits = mark is not None and self.saved_state.align_with_ledger(
            self.ledger, self.spec.recipe
        )
        if mark is not None and not fits:
            log.warning(
                "the state and the ledger of %s do not belong together: starting from the ledger",
                mark.run,
            )
            if mine := mark.heads.get(self.exchange.author):
                self.exchange.on_own_update(mine)
        if not fits:
            self.saved_state.clear()
        return self.saved_state.header

    def fetch_snapshot(self) -> Snapshot | None:
        """The others' anchor. Asked for again while they are ahead: who began at the seed's weights then would have to
        replay everything, from peers that may not have it."""
        known = self.joined.peers or self.ledger.peer_store.peers()
        for _ in range(SNAPSHOT_TRIES):
            cut = self.exchange.fetch_snapshot(
                SNAPSHOT_SECONDS if known else 0.0, self.poll_should_stop
            )
            whole = self.ledger.vector() and not self.ledger.pruned()
            if cut or whole or self.leaving.is_set() or not self.exchange.stats.updates_behind:
                return cut
            log.warning("the others are ahead, and their anchor has not come yet: asking again")
        return None

    def fetch_text(self) -> None:
        manifest = self.joined.manifest
        sizes = {shard.digest: 2 * shard.tokens for shard in (*manifest.train, *manifest.held_out)}
        wanted = [*sizes, manifest.tokenizer] if manifest.tokenizer else [*sizes]
        if not all(self.blobs.has(each) for each in wanted):
            self.metrics.activity = Activity.PREPARING
        if not fetch_all_blobs(
            self.exchange,
            self.blobs,
            {e: sizes.get(e) for e in wanted},
            "the text",
            self.poll_should_stop,
        ):
            return
        self.text = TokenDataset(manifest, self.blobs.path)
        self.held_out = self.text.validation_batches(HELD_OUT, self.spec.model.context)

    def poll_should_stop(self) -> bool:
        """Asked now and then while something is fetched: tells, hears of new peers, and says whether to give up."""
        self.report_status()
        return self.leaving.is_set()

    def drain(self) -> None:
        """After the last round: until the others have what is ours and, when the run is finished, we what is theirs."""
        self.exchange.announce_completion()
        if self.leaving.is_set() or not (
            self.budget_reached or self.reporter.directive.status is RunStatus.FINISHED
        ):
            self._trade_until(self.exchange.all_published_delivered, PARTING)
            self.metrics.set_idle(Activity.LEFT)
        else:
            self.metrics.activity = Activity.FINISHING
            self._unsettled = time.monotonic()
            self._trade_until(lambda: self.leaving.is_set() or self.is_synchronized(), SETTLING)
            self.evaluate_if_due(last=True)
            self.metrics.set_idle(Activity.FINISHED)
        self.save_checkpoint(closing=True)

    def is_synchronized(self) -> bool:
        """Everybody connected has had the same updates for a second; for five, where nobody is connected."""
        now, stats = time.monotonic(), self.exchange.stats
        taken_in = stats.updates_sent + stats.updates_received == sum(self.anchor.vector.values())
        if not (self.exchange.is_synchronized() and taken_in):
            self._unsettled = now
        return now - self._unsettled > (1.0 if stats.peers else 5.0)

    def _trade_until(self, done: Callable[[], bool], seconds: float) -> None:
        limit = time.monotonic() + seconds
        while not done() and time.monotonic() < limit:
            self.resync_if_behind()
            self.exchange_updates()
            self.engine.apply_queued()
            time.sleep(0.05)
        self.exchange_updates()
        self.engine.apply_queued()

    def report_status(self, at_once: bool = False) -> None:
        self.status_publisher.publish(self.anchor, at_once)


def _in_order(
    parts: Iterator[EncodedFragment], count: int
) -> Iterator[tuple[bytes, Tensor] | None]:
    """Yield (payload, units) of all fragments in order, and None for those that have no part."""
    expected = 0
    for part in parts:
        yield from repeat(None, part.fragment - expected)
        expected = part.fragment + 1
        yield part.payload, part.units
        del part  # free it before the next fragment's part is allocated
    yield from repeat(None, count - expected)
