"""The engine of a crew's lead: its own stage, and orders to the other machines for theirs.

It is a `TrainingEngine`, so that the rest of a worker trains with a crew as with one machine, and
with the same bits where boundaries have 32 bits. The lead's tokens, ledger and key stay with it.
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from barnraise.errors import CrewError, MessageError, StateError
from barnraise.formats import format_amount
from barnraise.ledger import codec
from barnraise.ledger.anchor import fragment_to_bytes
from barnraise.mixing.payloads import Payload, encode_weights
from barnraise.swap.engine import (
    UPDATES_PER_STEP,
    WARMUP_STEPS,
    EncodedFragment,
    StepStats,
)
from barnraise.swap.executor import EngineProgress
from barnraise.swap.sampler import SamplingSettings, TokenRange
from barnraise.training.crew.crew_frames import PayloadId, PieceKind
from barnraise.training.crew.crew_links import ChannelWatch
from barnraise.training.crew.crew_messages import (
    SAVED_PARTS,
    CallTask,
    EndRoundTask,
    EvaluateTask,
    FragmentTask,
    LeaveTask,
    LoadTask,
    MethodName,
    PartName,
    ProgressTask,
    QueueTask,
    SaveTask,
    StepTask,
)
from barnraise.training.crew.crew_orders import RETURN_SECONDS, CrewOrders, Enclosure, SentOrder
from barnraise.training.crew.roster import LEAD
from barnraise.training.crew.span_holders import SpanHolders
from barnraise.training.crew.stage_engine import StageEngine, list_fragments, read_part
from barnraise.training.crew.step_protocol import STREAM_SECONDS, LeadStep, decode_stream
from barnraise.training.resume import CREW_LABEL
from barnraise.training.training_engine import EncodedUpdate, Encoder

log = logging.getLogger("barnraise")

AGAIN_SECONDS = 0.2  # between two attempts at a step


class CrewEngine:
    """Train the whole model on all machines of a crew. All methods are called from one thread.

    Attributes:
        holders: who computes what.
    """

    def __init__(
        self,
        engine: StageEngine,
        orders: CrewOrders,
        is_fresh: bool,
        rebuild: Callable[[int], Tensor | None] = lambda index: None,
    ) -> None:
        """Lead a crew whose channels are open.

        Args:
            engine: of the lead's own stage.
            orders: reach the others.
            is_fresh: whether the anchor was stored and no state loaded: all replicas begin at it.
                Otherwise the others load what they saved together with the lead's state.
            rebuild: returns a fragment of the anchor, int32 [n], that no machine has saved, from
                the ledger or from peers; None if neither has it.

        Raises:
            CrewError: one of the others has not saved its part, and it cannot be rebuilt.
        """
        self._rebuild = rebuild
        self._engine, self._orders = engine, orders
        self._links = orders.links
        self._roster = orders.links.roster
        self._local = set(engine.plan.local_fragments)
        self.holders = SpanHolders(orders)
        self._prediction: tuple[float, ...] | None = None  # that was sent last
        self.last_problem = ""  # why the last step had to be repeated
        self._step_seconds: list[dict[int, float]] = []  # of this round's steps
        self._is_closed = False
        if is_fresh:
            self._load_others(0)
            engine.reset_round()
        elif engine.progress.label:
            self._load_others(engine.progress.label)

    # ---- local steps ---------------------------------------------------------------------------

    @property
    def progress(self) -> EngineProgress:
        """Return how far the state has come."""
        return self._engine.progress

    @progress.setter
    def progress(self, progress: EngineProgress) -> None:
        warmup = progress.warmup_steps_left
        if warmup == self._engine.progress.warmup_steps_left:
            warmup = None  # a machine that has lost its moments has its own
        task = ProgressTask(position=progress.position, warmup_steps_left=warmup)
        self._orders.request(task)
        self._engine.progress = progress

    @property
    def round_tokens(self) -> int:
        """Return the tokens trained on since the last `end_round`."""
        return self._engine.round_tokens

    def step(
        self,
        batches: list[Tensor],
        rate_scale: float = 1.0,
        position: int = 0,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> StepStats:
        """Make one step; what a broken channel cancels is made again.

        Raises:
            CrewError: a machine has been gone for RETURN_SECONDS.
            RoundLostError: a machine has restarted.
        """
        assert len(batches) == self._roster.micro_batches, "the roster fixes a step's size"
        started = time.perf_counter()
        failed_at = None
        while True:
            # The side looks at the channels first: one that breaks from now on cancels the step.
            routes = self.holders.draw_routes(position)
            side = LeadStep(self._links, self._orders.next_order(), should_stop, routes)
            task = StepTask(rate_scale=rate_scale, position=position, routes=routes.as_lists())
            self._orders.send_step(side.order, task, routes.members)
            stats = self._engine.step_with(side, self._roster, batches, rate_scale, position)
            if stats.abandoned:
                self._prediction = None  # all machines have begun the round again
                self.holders.reset_idle(routes)
            if not stats.interrupted:
                self.holders.record_step(side)
                self._step_seconds.append(side.seconds)
                return replace(stats, seconds=time.perf_counter() - started)
            side.cancel()
            if side.broken is not None and side.has_refused:
                self._links.record_fault(side.broken)
            if side.has_diverged:
                self._engine.abandon_step(position)
                self._prediction = None
                self.holders.reset_idle(routes)
                return replace(stats, interrupted=False, abandoned=True)
            self._orders.check_members()
            if should_stop():
                return stats
            self.last_problem = side.problem
            if side.broken is not None:
                self.holders.skip(side.broken)
            problem = f"the crew cannot go on: {side.problem}"
            failed_at = self._wait_for_channels(failed_at, problem, should_stop)

    def pop_stage_seconds(self) -> list[dict[int, float]]:
        """Return the seconds of the machines' own work in each step since the last call."""
        seconds, self._step_seconds = self._step_seconds, []
        return seconds

    def _wait_for_channels(
        self, failed_at: float | None, problem: str, should_stop: Callable[[], bool]
    ) -> float:
        """Wait until a holder of each span has a channel; return since when attempts have failed.

        Raises:
            CrewError: with the problem, after RETURN_SECONDS.
        """
        now = time.monotonic()
        failed_at = failed_at or now
        left = failed_at + RETURN_SECONDS - now
        if left < 0:
            raise CrewError(problem)
        time.sleep(AGAIN_SECONDS)
        self._links.wait(self.holders.are_connected, left, should_stop)
        return failed_at

    def flush(self) -> None:
        """Apply the pending update now."""
        self._call("flush")

    def _call(self, method: MethodName) -> None:
        """Have all machines call a method of their engines."""
        self._orders.request(CallTask(method=method))
        getattr(self._engine, method)()

    # ---- exchange ------------------------------------------------------------------------------

    def queue_updates(
        self, *updates: EncodedUpdate, prediction: tuple[float, ...] | None = None
    ) -> None:
        """Queue other authors' updates, and set the prediction for updates in flight.

        Each machine gets its fragments' payloads as they came, of as many updates at a time as it
        adds together.
        """
        if not updates and prediction in (None, self._prediction):
            return
        values = None if prediction is None else [*prediction]
        for first in range(0, max(1, len(updates)), UPDATES_PER_STEP):
            some = updates[first : first + UPDATES_PER_STEP]
            enclosures = {number: self._enclose(some, number) for number in self._orders.others}
            task = QueueTask(updates=len(some), prediction=values if first == 0 else None)
            self._orders.request(task, None, enclosures)
        self._prediction = prediction or self._prediction
        self._engine.queue_updates(*updates, prediction=prediction)

    def _enclose(self, updates: Sequence[EncodedUpdate], number: int) -> list[Enclosure]:
        """Return the parts of updates that change a machine's fragments."""
        enclosures: list[Enclosure] = []
        for which, update in enumerate(updates):
            for i in self._roster.stages[number].fragments:
                found = update.read_encoded(i)
                if found is not None:
                    payload, multiplier = found
                    enclosures.append(Enclosure(i, payload, which, multiplier))
        return enclosures

    def apply_queued(self) -> None:
        """Apply all queued updates and the prediction now."""
        self._call("apply_queued")

    def end_round(
        self,
        encode: Encoder,
        weight: float,
        fragments: Collection[int] | None = None,
        carries_residual: bool = False,
        has_momentum: bool = True,
    ) -> Iterator[EncodedFragment]:
        """End the round of some fragments; see `Engine.end_round`.

        The others encode their parts while the lead encodes its own.
        """
        due = sorted(range(len(self._roster.holders)) if fragments is None else fragments)
        task = EndRoundTask(
            fragments=due,
            scheme=str(encode.scheme),
            weight=weight,
            carries_residual=carries_residual,
            has_momentum=has_momentum,
            flushes=fragments is None,
        )
        self.holders.merge_replicas(due, flushes=fragments is None)
        sent = self._orders.start(task, self.holders.firsts)
        local = self._engine.end_round(encode, weight, fragments, carries_residual, has_momentum)
        remote: dict[int, bytes] | None = None
        for i in due:
            if i in self._local:
                yield next(local)
                continue
            remote = self._collect_parts(sent, task) if remote is None else remote
            yield self._decode_part(i, remote)
        next(local, None)  # its last statements
        if remote is None:
            self._collect_parts(sent, task)

    def _collect_parts(self, sent: SentOrder, task: EndRoundTask) -> dict[int, bytes]:
        """Return the encoded parts of the others' fragments, once all their holders have them."""
        parts: dict[int, bytes] = {}
        answers = self._orders.collect(sent)
        while successors := set(self.holders.firsts) - answers.keys():
            answers |= self._orders.request(task, successors)
        for number, answer in answers.items():
            held = self._roster.stages[number].fragments
            for attachment, payload in zip(answer.reply.attachments, answer.payloads, strict=True):
                if attachment.fragment in held:
                    parts[attachment.fragment] = bytes(payload)
        self.holders.forward_parts(task, parts)
        return parts

    def _decode_part(self, i: int, parts: dict[int, bytes]) -> EncodedFragment:
        """Return another machine's part of the update.

        Raises:
            CrewError: the machine did not send it, or it is no part of an update.
        """
        fragment, holder = self._engine.fragments[i], self._orders.first_holder(i)
        payload = parts.pop(i, b"")
        try:
            return EncodedFragment(i, payload, codec.decode(payload, fragment.size))
        except MessageError as error:
            self._links.record_fault(holder)
            raise CrewError(
                f"{self._roster.name_of(holder)} sent an update of {fragment.name} that is of no "
                f"use: {error}"
            ) from None

    def reset_round(self) -> None:
        """Set the replica to the anchor; drop what the round has learnt, and the prediction."""
        self._prediction = None
        self._call("reset_round")

    def reset_feedback(self) -> None:
        """Set the error feedback to zero, and drop the round."""
        self._prediction = None
        self._call("reset_feedback")

    def reset_momentum(self) -> None:
        """Set the outer momentum to zero."""
        self._prediction = None
        self._call("reset_momentum")

    def replace_fragment(self, index: int, units: Tensor) -> None:
        """Replace a fragment of the anchor by int32 [n] units, and drop the round."""
        for number in self._roster.span_of(self._roster.holders[index]):
            self._store(number, index, fragment_to_bytes(units), "anchor")
        self.reset_round()

    # ---- validation ----------------------------------------------------------------------------

    def evaluate(
        self, batches: Iterable[Tensor], should_stop: Callable[[], bool] = lambda: False
    ) -> float:
        """Return the mean loss of the anchor, in nats a token; NaN if it was stopped.

        The outputs pass through all machines as in a step, always in 32 bits.

        Raises:
            CrewError: a machine has been gone for RETURN_SECONDS.
        """
        engine = self._engine
        failed_at = None
        engine.apply_queued()
        sequences = 1 if engine.plan.device != "cpu" else engine.plan.sequences
        parts = [part for batch in batches for part in batch.split(sequences)]
        while not should_stop():
            streams = engine.embed_parts(parts)
            if not engine.pass_blocks(streams, should_stop):
                break
            outputs = self._pass_others(streams, should_stop)
            if outputs is not None:
                return engine.measure_loss(parts, outputs)
            self._orders.check_members()
            problem = "the crew cannot validate: its channels break"
            failed_at = self._wait_for_channels(failed_at, problem, should_stop)
        return math.nan

    def _pass_others(
        self, streams: list[Tensor], should_stop: Callable[[], bool]
    ) -> list[Tensor] | None:
        """Return the last block's outputs for the lead's; None if the others did not complete."""
        links, roster = self._links, self._roster
        first, last = self._engine.plan.blocks.stop, self._engine.plan.last_fragment
        route = [LEAD, *self.holders.firsts]
        receiver, sender = route[1], route[-1]
        watch = ChannelWatch(links, [sender])
        task = EvaluateTask(route=route, parts=[stream.shape[0] for stream in streams])
        sent = self._orders.start(task, route[1:])
        for part, stream in enumerate(streams):
            of = PayloadId(PieceKind.STREAM, sent.order, part, first)
            payload = encode_weights(stream.reshape(-1), 32)
            links.send_payload(receiver, of, payload)
        answers = self._orders.collect(sent, should_stop)
        if len(answers) < len(route[1:]):
            return None
        for reply in (answer.reply for answer in answers.values()):
            if reply.refused is not None and reply.refused < len(roster.seats):
                links.record_fault(reply.refused)
        if any(answer.reply.interrupted for answer in answers.values()):
            return None
        outputs: list[Tensor] = []
        for part, stream in enumerate(streams):
            of = PayloadId(PieceKind.STREAM, sent.order, part, last)
            payload = self._await_stream(watch, sender, of, should_stop)
            if payload is None or len(payload) != 4 * stream.numel():
                return None
            output = decode_stream(payload)
            if output is None:
                links.record_fault(sender)
                return None
            outputs.append(output.view(stream.shape))
        return outputs

    def _await_stream(
        self, watch: ChannelWatch, sender: int, of: PayloadId, should_stop: Callable[[], bool]
    ) -> bytearray | None:
        """Wait for outputs that the last machine sends over its channel; None if that ends."""
        links = self._links

        def has_failed() -> bool:
            return should_stop() or watch.find_ended() is not None

        links.wait(lambda: links.has_payload(sender, of), STREAM_SECONDS, has_failed)
        return links.pop_payload(sender, of)

    def generate(
        self, prompts: Sequence[Sequence[int]], settings: SamplingSettings, vocabulary: TokenRange
    ) -> Iterator[tuple[int, int]]:
        """Refuse to generate text: no machine of a crew has the whole model.

        Raises:
            StateError: always.
        """
        raise StateError("a crew writes no samples: no machine of it has the whole model")

    # ---- saving and loading --------------------------------------------------------------------

    def commit(self, closing: bool = False) -> None:
        """Make what lies on disk the state to recover, on all machines under one label."""
        self._save_others(closing)
        self._engine.commit(closing)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the lead's part of the state; the others save theirs on their own disks."""
        self._save_others(closing=False)
        label = torch.tensor([self._engine.progress.label])
        return self._engine.state_dict() | {CREW_LABEL: label}

    def _save_others(self, closing: bool) -> None:
        """Have the others save their parts under the next label."""
        # A label is never used again, also if this machine is killed before it has saved its part.
        label = max(abs(self._engine.progress.label) + 1, int(1000 * time.time()))
        self._orders.request(SaveTask(label=label, closing=closing))
        self._engine.set_label(label)

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the lead's part, and have the others load what they saved together with it.

        Raises:
            StateError: the tensors are no state of a crew's lead, or do not fit its plan.
            CrewError: another machine has not saved its part, and it cannot be rebuilt.
        """
        if CREW_LABEL not in tensors:
            raise StateError("the saved state is not that of a crew's lead")
        label = int(tensors[CREW_LABEL])
        own = list_fragments(tensors)
        self._engine.load_state_dict(tensors, [i for i in own if i in self._local])
        self._load_others(label, tensors)
        self._engine.set_label(label)

    def _load_others(self, label: int, own: Mapping[str, Tensor] | None = None) -> None:
        """Have the others load what they saved under a label; 0: begin with the anchor alone.

        A fragment that its machine has not saved comes from the machine that has, for instance
        because it held the fragment before the blocks were dealt again.

        Args:
            label: of the state; negative if the lead's anchor has more updates by now.
            own: what the lead has saved under it; None if that is what it holds now.
        """
        self._links.accept_restarts()
        answers = self._orders.request(LoadTask(label=abs(label)))
        if label == 0:
            return
        stale = {n for n, answer in answers.items() if label < 0 or answer.reply.is_stale}
        saved = {number: set(answer.reply.saved) for number, answer in answers.items()}
        saved[LEAD] = self._local if own is None else set(list_fragments(own))
        changed: set[int] = set()
        lost: dict[int, list[int]] = {}
        stages = self._roster.stages
        for i, holder in sorted((i, n) for n in saved for i in stages[n].fragments):
            if i in saved[holder] and holder not in stale:
                continue
            changed.add(holder)
            if i in saved[holder]:
                self._store_rebuilt(i, holder, forgets=False)
                continue
            source = next((n for n, fragments in sorted(saved.items()) if i in fragments), None)
            if source is None:
                self._store_rebuilt(i, holder, forgets=True)
                lost.setdefault(holder, []).append(i)
                continue
            for part in SAVED_PARTS:
                self._store(holder, i, self._fetch_saved(source, i, part, own), part)
            if label < 0 or source in stale:
                self._store_rebuilt(i, holder, forgets=False)
        for number in sorted(changed):
            self._begin_round(number, lost.get(number, []), saved[number])

    def _fetch_saved(
        self, source: int, i: int, part: PartName, own: Mapping[str, Tensor] | None
    ) -> Payload:
        """Return a part of a fragment's state that a machine has saved."""
        if source == LEAD:
            assert own is not None, "what the lead holds needs no other source"
            return read_part(own, i, part)
        task = FragmentTask(fragment=i, part=part, saved=True)
        answer = self._orders.request(task, [source]).get(source)
        if answer is None or len(answer.payloads) != 1:
            raise CrewError(f"{self._roster.name_of(source)} sent no part of its saved state")
        return answer.payloads[0]

    def _store(
        self, holder: int, i: int, payload: Payload, part: PartName, forgets: bool = False
    ) -> None:
        """Store a part of a fragment's state at the machine that holds it."""
        if holder == LEAD:
            self._engine.write_part(i, part, bytes(payload))
            if forgets:
                self._engine.forget_fragment(i)
            return
        task = FragmentTask(fragment=i, part=part, forgets=forgets)
        self._orders.request(task, [holder], {holder: [Enclosure(i, payload)]})

    def _store_rebuilt(self, i: int, holder: int, forgets: bool) -> None:
        """Store a fragment's anchor from the ledger or peers; with `forgets` the rest is zero.

        Raises:
            CrewError: neither the ledger nor a peer has it.
        """
        units = self._rebuild(i)
        if units is None:
            raise CrewError(
                f"no machine of the crew has saved {self._engine.fragments[i].name}, and neither "
                "the ledger nor a peer has it now: start again when other machines of the run are "
                "online"
            )
        self._store(holder, i, fragment_to_bytes(units), "anchor", forgets)

    def _begin_round(self, number: int, lost: Sequence[int], saved: Collection[int]) -> None:
        """Begin a round at a machine some of whose fragments were stored; some may be lost."""
        own, fragments = self._engine.progress, self._roster.stages[number].fragments
        steps = warmup = None
        if lost:
            name = self._roster.name_of(number)
            log.warning(
                "%s begins without Adam's moments of %s", name, format_amount(len(lost), "fragment")
            )
            steps, warmup = 0, WARMUP_STEPS
        elif not any(i in saved for i in fragments):
            steps, warmup = own.optimizer_steps, own.warmup_steps_left
        if number == LEAD:
            if lost:
                self._engine.progress = replace(own, optimizer_steps=0, warmup_steps_left=warmup)
            self._engine.reset_round()
            return
        task = ProgressTask(position=own.position, optimizer_steps=steps, warmup_steps_left=warmup)
        self._orders.request(task, [number])
        self._orders.request(CallTask(method="reset_round"), [number])

    def close(self) -> None:
        """End the crew: the others leave, and the lead frees its memory."""
        if not self._is_closed:
            with contextlib.suppress(CrewError):  # without channels they notice it by themselves
                self._orders.announce(LeaveTask())
            self.suspend()

    def suspend(self) -> None:
        """Free the lead's memory; the others wait for its next channels, and for a state to load.

        For a lead that begins again, for instance after a RoundLostError.
        """
        self._is_closed = True
        with contextlib.suppress(CrewError):
            self._links.close("the lead begins again")
        self._engine.close()
