"""One machine of a crew that is not its lead: it obeys the lead's orders, and needs no text."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from barnraise.errors import BarnraiseError, CrewError, LeadLostError
from barnraise.ledger import codec
from barnraise.ledger.anchor import compute_sketch, fragment_to_bytes
from barnraise.mixing.payloads import encode_weights
from barnraise.planning.quantization_scheme import QuantizationScheme
from barnraise.training.crew.crew_frames import PayloadId, PieceKind
from barnraise.training.crew.crew_links import ChannelWatch, CrewLinks
from barnraise.training.crew.crew_messages import (
    SAVED_PARTS,
    Attachment,
    CallTask,
    EndRoundTask,
    EvaluateTask,
    FragmentTask,
    LeaveTask,
    LoadTask,
    Order,
    ProgressTask,
    QueueTask,
    Reply,
    SaveTask,
    StepTask,
)
from barnraise.training.crew.crew_orders import (
    CONNECT_SECONDS,
    RETURN_SECONDS,
    Enclosure,
    pop_attachments,
    send_enclosures,
)
from barnraise.training.crew.crew_state import CrewState
from barnraise.training.crew.roster import LEAD
from barnraise.training.crew.routing import StepRoutes
from barnraise.training.crew.stage_engine import StageEngine, list_fragments, read_part
from barnraise.training.crew.step_protocol import (
    LEAD_SECONDS,
    STREAM_SECONDS,
    WAIT_SECONDS,
    MemberStep,
    decode_stream,
)
from barnraise.training.training_engine import Encoder

IDLE_SECONDS = 1.0  # between two looks at whether the lead is still there


class NoLedger:
    """The record of updates of a machine without a ledger: the lead has the crew's."""

    def record(self, header: object) -> None:
        """Record nothing."""


@dataclass(frozen=True)
class ForwardedUpdate:
    """Another author's update as the lead forwards it: the payloads of this machine's fragments.

    Attributes:
        parts: (payload, multiplier) by fragment.
        sizes: elements of each fragment.
        header: None; the lead records it.
    """

    parts: dict[int, tuple[bytes, int]]
    sizes: Sequence[int]
    header: None = None

    def decode(self, index: int) -> Tensor | None:
        """Return the units to add to a fragment, int32 [n]; None where it does not change."""
        if index not in self.parts:
            return None
        payload, multiplier = self.parts[index]
        units = codec.decode(payload, self.sizes[index])
        return units if multiplier > 0 else units.neg_()

    def read_encoded(self, index: int) -> tuple[bytes, int] | None:
        """Return a fragment's payload and its multiplier; None for no part."""
        return self.parts.get(index)


@dataclass(frozen=True)
class _Result:
    """What a machine replies to an order."""

    enclosures: Sequence[Enclosure] = ()
    sketch: str | None = None
    interrupted: bool = False
    refused: int | None = None
    saved: Sequence[int] = ()
    is_stale: bool = False


class CrewMember:
    """Obey the lead's orders with this machine's stage."""

    def __init__(self, engine: StageEngine, links: CrewLinks, state: CrewState) -> None:
        """Train `engine`'s fragments, whose state is saved in `state`."""
        self._engine, self._links, self._state = engine, links, state
        self._roster = links.roster
        self._sizes = [fragment.size for fragment in engine.fragments]
        self._fragments = engine.plan.local_fragments
        assert self._fragments == self._roster.stages[links.number].fragments
        self._last = 0  # the newest order that was executed
        self._answer: tuple[Reply, Sequence[Enclosure]] | None = None  # to that order
        self._answered = 0  # the number of the channel over which it was sent
        self._should_stop: Callable[[], bool] = lambda: False

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Serve until the lead leaves or deals the blocks again, or this machine's owner stops it.

        Returns:
            Whether the lead has left.

        Raises:
            LeadLostError: the lead is gone for LEAD_SECONDS.
            BarnraiseError: this machine's state failed; the lead gets the reason.
        """
        links = self._links
        self._should_stop = lambda: should_stop() or links.is_recalled
        last_seen = time.monotonic()
        while not self._should_stop():
            order = self._next_order()
            now = time.monotonic()
            patience = LEAD_SECONDS if links.opened(LEAD) else CONNECT_SECONDS
            if LEAD in links.connected():
                last_seen = now
            elif now - last_seen > patience:
                raise LeadLostError(
                    f"the crew's lead {self._roster.name_of(LEAD)} has been gone for "
                    f"{patience:.0f} s: {links.reason(LEAD)}"
                )
            if order is not None and not self._handle(order):
                return True
        return False

    def _next_order(self) -> Order | None:
        """Wait a little for the lead's next order; decisions on past steps are dropped."""
        found: list[Order] = []

        def is_here() -> bool:
            while not found and (message := self._links.pop_message(LEAD)) is not None:
                if isinstance(message, Order):
                    found.append(message)
            return bool(found)

        self._links.wait(is_here, IDLE_SECONDS, self._should_stop)
        return found[0] if found else None

    def _handle(self, order: Order) -> bool:
        """Execute an order that is new, and reply; return False once the lead leaves."""
        if order.number < self._last:
            return True
        if order.number == self._last:
            if self._answer is not None and self._answered != self._links.opened(LEAD):
                self._send_answer(*self._answer)
            return True
        previous = self._last
        self._last = order.number
        self._answer = None
        try:
            if isinstance(order.task, StepTask):
                self._make_step(order.number, order.task)
                return True
            self._links.start_order(order.number)
            payloads = self._await_attachments(order)
            if payloads is None:  # the lead sends the order again
                self._last = previous
                return True
            result = self._execute(order, payloads)
        except BarnraiseError as error:
            self._reply(order, _Result(), str(error)[:1000])
            raise
        self._reply(order, result)
        return not isinstance(order.task, LeaveTask)

    def _reply(self, order: Order, result: _Result, problem: str = "") -> None:
        reply = Reply(
            epoch=self._roster.epoch,
            number=order.number,
            problem=problem,
            interrupted=result.interrupted,
            refused=result.refused,
            saved=list(result.saved),
            is_stale=result.is_stale,
            sketch=result.sketch,
            attachments=[each.attachment() for each in result.enclosures],
        )
        self._answer = reply, result.enclosures
        self._send_answer(reply, result.enclosures)

    def _send_answer(self, reply: Reply, enclosures: Sequence[Enclosure]) -> None:
        self._answered = self._links.opened(LEAD)
        self._links.send(LEAD, reply)
        send_enclosures(self._links, LEAD, reply.number, enclosures)

    # ---- steps ---------------------------------------------------------------------------------

    def _make_step(self, number: int, task: StepTask) -> None:
        """Make a step together with the others; the lead's decision is all that answers it."""
        links = self._links
        routes = StepRoutes(self._roster, task.routes)
        if not routes.is_valid() or links.number not in routes.members:
            raise CrewError("the lead sent routes that its roster does not imply")
        neighbours = routes.neighbours(links.number)
        links.wait(lambda: neighbours <= links.connected(), RETURN_SECONDS, self._is_overtaken)
        side = MemberStep(links, number, self._should_stop, routes)
        batches = self._engine.empty_batches(self._roster, len(side.micro_batches))
        stats = self._engine.step_with(side, self._roster, batches, task.rate_scale, task.position)
        if stats.interrupted:
            side.await_decision()
        if side.has_diverged and not stats.abandoned:
            self._engine.abandon_step(task.position)

    def _has_ended(self) -> bool:
        """Return whether nobody waits for this machine's part: the lead or this owner stopped."""
        return self._should_stop() or LEAD not in self._links.connected()

    def _is_overtaken(self) -> bool:
        """Return whether the lead has decided on a step, or has sent another order."""
        return self._has_ended() or self._links.has_message(LEAD)

    # ---- other orders --------------------------------------------------------------------------

    def _await_attachments(self, order: Order) -> list[bytearray] | None:
        """Wait for what an order has announced; None if the lead's channel breaks meanwhile."""
        links, watch = self._links, ChannelWatch(self._links, [LEAD])
        payloads: list[list[bytearray]] = []

        def has_come() -> bool:
            found = pop_attachments(links, LEAD, order.number, order.attachments)
            if found is not None:
                payloads.append(found)
            return found is not None

        def has_broken() -> bool:
            return self._should_stop() or watch.find_ended() is not None

        links.wait(has_come, WAIT_SECONDS, has_broken)
        return payloads[0] if payloads else None

    def _execute(self, order: Order, payloads: list[bytearray]) -> _Result:
        """Execute an order that is not a step."""
        task, engine = order.task, self._engine
        match task:
            case QueueTask():
                self._queue_updates(task, order.attachments, payloads)
            case CallTask():
                getattr(engine, task.method)()
            case EndRoundTask():
                return self._end_round(task, payloads)
            case FragmentTask():
                return self._exchange_fragment(task, payloads)
            case EvaluateTask():
                return self._evaluate(order.number, task)
            case SaveTask():
                self._state.save(engine, task.label, task.closing)
            case LoadTask():
                saved = self._state.load(engine, task.label)
                return _Result(saved=saved, is_stale=self._state.is_stale)
            case ProgressTask():
                self._set_progress(task)
            case _:
                pass  # the lead leaves
        return _Result()

    def _queue_updates(
        self, task: QueueTask, attachments: Sequence[Attachment], payloads: list[bytearray]
    ) -> None:
        parts: list[dict[int, tuple[bytes, int]]] = [{} for _ in range(min(task.updates, 4096))]
        for attachment, payload in zip(attachments, payloads, strict=True):
            if attachment.update >= len(parts) or attachment.fragment not in self._fragments:
                raise CrewError("the lead forwarded an update of other fragments than this part's")
            found = bytes(payload), attachment.multiplier
            parts[attachment.update][attachment.fragment] = found
        updates = [ForwardedUpdate(each, self._sizes) for each in parts]
        prediction = None if task.prediction is None else tuple(task.prediction)
        if prediction is not None and len(prediction) != len(self._sizes):
            raise CrewError("the lead sent a prediction of another model")
        self._engine.queue_updates(*updates, prediction=prediction)

    def _end_round(self, task: EndRoundTask, payloads: Sequence[bytearray]) -> _Result:
        try:
            encode = Encoder(QuantizationScheme.parse(task.scheme))
        except ValueError as error:
            raise CrewError(f"the lead wants an update in {task.scheme}: {error}") from None
        given = iter(payloads)

        def repeat(values: Tensor) -> tuple[bytes, Tensor]:
            payload = bytes(next(given))
            return payload, codec.decode(payload, values.numel())

        due = set(task.fragments) & set(self._fragments)
        if payloads and len(payloads) != len(due):
            raise CrewError("the lead sent another update than that of this part's fragments")
        parts = self._engine.end_round(
            repeat if payloads else encode,
            task.weight,
            None if task.flushes else set(task.fragments),
            task.carries_residual,
            task.has_momentum,
        )
        enclosures = [Enclosure(part.fragment, part.payload) for part in parts]
        return _Result([] if payloads else enclosures)

    def _set_progress(self, task: ProgressTask) -> None:
        progress = replace(self._engine.progress, position=task.position)
        for name in ("optimizer_steps", "warmup_steps_left"):
            if (value := getattr(task, name)) is not None:
                progress = replace(progress, **{name: value})
        self._engine.progress = progress

    def _exchange_fragment(self, task: FragmentTask, payloads: Sequence[bytearray]) -> _Result:
        """Store a part of a fragment's state, or return it."""
        i, engine, saved = task.fragment, self._engine, self._state.saved
        is_here = i in (list_fragments(saved) if task.saved else self._fragments)
        if not is_here or (task.saved and task.part not in SAVED_PARTS):
            raise CrewError("the lead asked for another fragment than one of this part's")
        if task.saved:
            return _Result([Enclosure(i, read_part(saved, i, task.part))])
        if payloads:
            engine.write_part(i, task.part, payloads[0])
            if task.forgets:
                engine.forget_fragment(i)
            return _Result()
        if task.part == "replica":
            replica = engine.read_replica_fragment(i, task.flushes)
            return _Result([Enclosure(i, encode_weights(replica, 32))])
        engine.apply_queued()
        units = engine.anchors[i]
        if task.sketch_only:
            return _Result(sketch=compute_sketch(units))
        return _Result([Enclosure(i, bytes(fragment_to_bytes(units)))])

    # ---- validation ----------------------------------------------------------------------------

    def _evaluate(self, number: int, task: EvaluateTask) -> _Result:
        """Pass the anchor's outputs through this machine's blocks, and on to the next machine."""
        links, roster, blocks = self._links, self._roster, self._engine.plan.blocks
        routes = StepRoutes(roster, [task.route] * roster.micro_batches)
        if not routes.is_valid() or links.number not in task.route:
            raise CrewError("the lead sent a route that its roster does not imply")
        watch = ChannelWatch(links, routes.neighbours(links.number))

        def has_failed() -> bool:
            has_moved_on = links.has_message(LEAD)  # the lead does not wait for this any longer
            return self._should_stop() or has_moved_on or watch.find_ended() is not None

        streams: list[Tensor] = []
        sender, receiver = routes.sender_of(blocks.start, 0), routes.receiver_of(blocks.stop, 0)
        for part, sequences in enumerate(task.parts):
            of = PayloadId(PieceKind.STREAM, number, part, blocks.start)
            links.wait(lambda of=of: links.has_payload(sender, of), STREAM_SECONDS, has_failed)
            payload = links.pop_payload(sender, of)
            shape = torch.Size([sequences, roster.model.context, roster.model.width])
            if payload is None or len(payload) != 4 * shape.numel():
                return _Result(interrupted=True)
            stream = decode_stream(payload)
            if stream is None:
                return _Result(interrupted=True, refused=sender)
            streams.append(stream.view(shape))
        if not self._engine.pass_blocks(streams, has_failed):
            return _Result(interrupted=True)
        for part, stream in enumerate(streams):
            of = PayloadId(PieceKind.STREAM, number, part, blocks.stop)
            payload = encode_weights(stream.reshape(-1), 32)
            links.send_payload(receiver, of, payload)
        return _Result()
