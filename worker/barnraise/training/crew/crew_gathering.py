"""The lead's side of forming a crew: admit machines that have the code, and deal the blocks.

A machine that dials is greeted (run, spec, ticket), proves that it has the code, and prices spans
of every length with its own planner. The crew is complete once the wanted number has come, or once
the machines here can hold the model and nobody has come for a while.
"""

import asyncio
import contextlib
import ipaddress
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from barnraise.errors import MessageError, PlanError
from barnraise.peering.transports.transport import Channel, ChannelClosedError
from barnraise.planning.crew import (
    MAX_MEMBERS,
    CrewMachine,
    CrewPlan,
    CrewTask,
    SpanPrice,
    SpanRequest,
    micro_batch_sizes,
    plan_crew,
)
from barnraise.planning.lines import HOME_LINE, Line
from barnraise.training.crew.crew_code import CrewCode
from barnraise.training.crew.crew_endpoint import CrewDoor, send_farewell
from barnraise.training.crew.crew_frames import pack_control, unpack
from barnraise.training.crew.crew_links import LEFT_OUT
from barnraise.training.crew.crew_messages import Recall
from barnraise.training.crew.formed_crew import FormedCrew
from barnraise.training.crew.forming_messages import (
    MAX_SHAPES,
    CrewApplication,
    CrewRefusal,
    CrewSeat,
    PriceList,
    PriceQuery,
    Seating,
    ShapePrices,
)

log = logging.getLogger("barnraise")

LAN_LINE = Line("LAN", 1000, 1000, 0.001)  # assumed between machines of one network
APPLICATION_SECONDS = 20.0  # for which a machine may take to apply
PRICING_SECONDS = 300.0  # in which it plans its spans
QUIET_SECONDS = 20.0  # without a newcomer, after which a crew that fits begins
POLL_SECONDS = 0.2


@dataclass
class _Candidate:
    """A machine that has the code, and prices its spans or has priced them."""

    key: str
    name: str
    addresses: list[str]
    channel: Channel
    has_priced: bool = False
    can_lead: bool = False
    shapes: dict[int, ShapePrices] = field(default_factory=dict)  # by sequences of a micro-batch

    def describe(self) -> CrewMachine:
        """Return the machine for the planner.

        A crew stores this for as long as it trains. A reference to the channel would hold the port
        of the endpoint that formed the crew, on which the lead listens again.
        """
        shapes = self.shapes

        def price(span: SpanRequest) -> SpanPrice | None:
            shape = shapes.get(span.sequences)
            return shape.find(span.blocks) if shape and not span.has_ends else None

        return CrewMachine(self.name, guess_line(self.channel.remote_address), price)


def guess_line(address: str) -> Line:
    """Return the line to a machine seen at host:port: a LAN's for private hosts, else a home's."""
    host = address.rpartition(":")[0].strip("[]")
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_private:
            return LAN_LINE
    return HOME_LINE


def is_complete(others: int, wanted: int | None, fits: bool, quiet_seconds: float) -> bool:
    """Return whether a crew begins. Pure.

    Args:
        others: machines besides the lead that have priced their spans.
        wanted: how many of them the lead's owner waits for; None to begin with those that come.
        fits: whether the machines can hold the model together.
        quiet_seconds: since the last one came.
    """
    if wanted is not None:
        return others >= wanted
    return fits and quiet_seconds >= QUIET_SECONDS


class CrewGathering:
    """Admit machines until the crew is complete."""

    def __init__(
        self,
        door: CrewDoor,
        code: CrewCode,
        lead: CrewMachine,
        task: CrewTask,
        expected: Collection[str] = (),
        is_left_out: Callable[[str], bool] = lambda key: False,
    ) -> None:
        """Admit machines that have the code.

        Args:
            door: where they come.
            code: of the crew.
            lead: this machine.
            task: what they train.
            expected: keys of machines that were in this crew before; nobody else is waited for.
            is_left_out: returns whether the machine with a key is refused for what it has sent.
        """
        self._door, self._code = door, code
        self._lead, self._task = lead, task
        self._expected = {key for key in expected if not is_left_out(key)}
        self._is_left_out = is_left_out
        self._sizes = micro_batch_sizes(task.step_sequences)[:MAX_SHAPES]
        self._candidates: dict[str, _Candidate] = {}  # by key
        self._answered: set[Channel] = set()  # over which `gather` sends a seat, or a refusal
        self._changed_at = time.monotonic()
        self._lock = threading.RLock()  # of the candidates

    def gather(
        self, wanted: int | None, should_stop: Callable[[], bool], patience: float = math.inf
    ) -> FormedCrew | None:
        """Wait until the crew is complete, and send all machines their seats.

        Args:
            wanted: how many machines to wait for, besides this one; None: those that come.
            should_stop: ends the wait.
            patience: seconds after which those that have come must be enough.

        Returns:
            The crew; None if the wait was stopped.

        Raises:
            PlanError: the machines that were waited for cannot hold the model together.
        """
        accepting = asyncio.run_coroutine_threadsafe(self._accept(), self._door.thread.loop)
        try:
            plan, candidates = self._wait(wanted, should_stop, accepting, patience)
            if plan is None:
                self._finish(accepting, candidates, None)
                return None
            seating = self._seat(plan, candidates)
            self._finish(accepting, candidates, seating)
            return FormedCrew(self._code, plan, seating)
        except PlanError as error:
            reason = f"the crew ends: {error}"[:1000]
            self._finish(accepting, self._list_priced(), None, reason)
            raise
        finally:
            accepting.cancel()

    def _wait(
        self,
        wanted: int | None,
        should_stop: Callable[[], bool],
        accepting: "Future[None]",
        patience: float,
    ) -> tuple[CrewPlan | None, list[_Candidate]]:
        """Wait; plan the crew again whenever a machine comes or goes."""
        planned: list[str] = []
        plan: CrewPlan | None = None
        ends_at = time.monotonic() + patience
        while not should_stop():
            with self._lock:
                candidates = self._list_priced()
                is_pricing = len(candidates) < len(self._candidates)
                quiet = 0.0 if is_pricing else time.monotonic() - self._changed_at
            keys = [candidate.key for candidate in candidates]
            if keys != planned:
                plan, planned = self._plan(candidates), keys
            has_all = bool(self._expected) and self._expected <= set(keys) and plan is not None
            is_late = time.monotonic() > ends_at and not is_pricing
            if has_all or is_late or is_complete(len(keys), wanted, plan is not None, quiet):
                # It fails with the planner's sentence if those that were waited for are too weak.
                return plan or self._plan_or_raise(candidates), candidates
            if accepting.done():
                accepting.result()  # it raises what ended it
            time.sleep(POLL_SECONDS)
        return None, self._list_priced()

    def _list_priced(self) -> list[_Candidate]:
        """Return the machines that have priced their spans."""
        with self._lock:
            return [each for each in self._candidates.values() if each.has_priced]

    def _plan_or_raise(self, candidates: Sequence[_Candidate]) -> CrewPlan:
        machines = [self._lead, *(candidate.describe() for candidate in candidates)]
        return plan_crew(machines, self._task)

    def _plan(self, candidates: Sequence[_Candidate]) -> CrewPlan | None:
        """Plan the crew of those who are here, and log what it would reach."""
        if not candidates:
            return None
        try:
            plan = self._plan_or_raise(candidates)
        except PlanError as error:
            # A log that stored the error would hold the channels of its traceback.
            log.info("%d machines are not enough yet: %s", len(candidates) + 1, str(error))
            return None
        log.info("%d machines: %s", len(candidates) + 1, plan.reason)
        return plan

    def _seat(self, plan: CrewPlan, candidates: Sequence[_Candidate]) -> Seating:
        deal = plan.deal
        seats: list[CrewSeat] = []
        for stage in deal.stages:
            own = stage.machine == 0
            candidate = None if own else candidates[stage.machine - 1]
            seats.append(
                CrewSeat(
                    key=candidate.key if candidate else self._door.key,
                    name=candidate.name if candidate else self._lead.name,
                    addresses=candidate.addresses if candidate else self._door.addresses(),
                    can_lead=candidate.can_lead if candidate else True,
                    first_block=stage.first_block,
                    blocks=stage.blocks,
                )
            )
        return Seating.model_validate(
            {
                "epoch": int(1000 * time.time()),  # beyond that of any deal before
                "sequences": deal.sequences,
                "micro_batches": deal.micro_batches,
                "boundary_bits": deal.boundary_bits,
                "seats": seats,
            }
        )

    def _finish(
        self,
        accepting: "Future[None]",
        candidates: Sequence[_Candidate],
        seating: Seating | None,
        reason: str = "the lead has ended the forming of the crew",
    ) -> None:
        """Admit nobody from now on; send each machine its seat, or why it has none."""
        self._answered = {each.channel for each in candidates}
        accepting.cancel()
        seated = {seat.key for seat in seating.seats} if seating else set[str]()
        if seating:
            reason = "the crew is faster without this machine: join the run alone, or another crew"
        work = [
            send_farewell(
                each.channel,
                seating if each.key in seated and seating else CrewRefusal(reason=reason),
            )
            for each in candidates
        ]

        async def send_all() -> None:
            await asyncio.gather(*work, return_exceptions=True)

        self._door.thread.run(send_all(), None)

    # ---- the event loop's side ------------------------------------------------------------------

    async def _accept(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                channel = await self._door.accept()
                meeting = tasks.create_task(self._meet(channel))
                meeting.add_done_callback(partial(self._end_meeting, channel))

    def _end_meeting(self, channel: Channel, meeting: asyncio.Task[None]) -> None:
        """Close the channel to a machine that has come too late: it would wait for an answer."""
        if channel not in self._answered:
            channel.close("the crew has begun without this machine")

    async def _meet(self, channel: Channel) -> None:
        """Admit one machine, and watch it until its channel ends or the crew is complete."""
        try:
            addresses = await self._door.admit(channel)
            async with asyncio.timeout(APPLICATION_SECONDS):
                first = unpack(await channel.receive())
            if not isinstance(first, CrewApplication):  # it trains still, with the deal before
                await send_farewell(channel, Recall())
                return
            candidate = self._admit(channel, first, addresses)
            await self._query_prices(candidate)
            await channel.receive()  # until the crew is complete: `gather` cancels this
            raise MessageError("it sent a message out of turn")
        except (MessageError, ChannelClosedError, TimeoutError) as error:
            reason = str(error) or "it did not answer in time"
            log.info("not in the crew: %s, because %s", channel.peer[:8], reason)
            await send_farewell(channel, CrewRefusal(reason=reason[:1000]))
            self._remove(channel)

    def _admit(
        self, channel: Channel, application: CrewApplication, addresses: list[str]
    ) -> _Candidate:
        """Check a machine's application.

        Raises:
            MessageError: it may not join, with a sentence for its owner.
        """
        if problem := application.find_problem(channel.peer, self._code):
            raise MessageError(problem)
        if self._is_left_out(channel.peer):
            raise MessageError(f"it is left out: {LEFT_OUT}")
        with self._lock:
            if len(self._candidates.keys() - {channel.peer}) + 2 > MAX_MEMBERS:
                raise MessageError(
                    f"the crew has {MAX_MEMBERS} machines, which is the most: join the run alone, "
                    "or start another crew"
                )
            older = self._candidates.pop(channel.peer, None)
            candidate = _Candidate(channel.peer, application.name, addresses, channel)
            self._candidates[channel.peer] = candidate
        if older is not None:
            older.channel.close("replaced by a newer channel")
        return candidate

    async def _query_prices(self, candidate: _Candidate) -> None:
        query = PriceQuery(sequences=self._sizes, step_sequences=self._task.step_sequences)
        await candidate.channel.send(pack_control(query))
        async with asyncio.timeout(PRICING_SECONDS):
            answer = unpack(await candidate.channel.receive())
        if not isinstance(answer, PriceList):
            raise MessageError("it did not send its prices")
        candidate.can_lead = answer.can_lead
        candidate.shapes = {shape.sequences: shape for shape in answer.shapes}
        with self._lock:
            candidate.has_priced = True
            self._changed_at = time.monotonic()
        most = max((len(shape.prices) for shape in answer.shapes), default=0)
        log.info("%s joined the crew: it has room for %d blocks", candidate.name, most)

    def _remove(self, channel: Channel) -> None:
        """Forget a machine whose channel has ended, unless it has a newer one."""
        with self._lock:
            known = self._candidates.get(channel.peer)
            if known is not None and known.channel is channel:
                del self._candidates[channel.peer]
                self._changed_at = time.monotonic()
        channel.close("it has left the forming crew")
