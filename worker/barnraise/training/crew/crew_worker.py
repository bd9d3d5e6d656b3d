"""The lead of a crew: a worker whose model lies on several machines.

`form_crew` waits for the machines; `CrewWorker` then trains as any worker does, with a `CrewEngine`
in place of the engine. Ledger, tickets and updates are this machine's own.
"""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from barnraise.errors import CrewError, RoundLostError
from barnraise.exchange.snapshots.snapshot_client import Snapshot
from barnraise.formats import format_amount
from barnraise.ledger.anchor import Anchor, FragmentStorage
from barnraise.peering.transports.transport import Transport
from barnraise.planning.crew import CrewTask
from barnraise.planning.crew_balance import CrewBalancer
from barnraise.planning.crew_pricing import describe_machine
from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import Limits
from barnraise.planning.plan import Plan
from barnraise.planning.render import build_plan_view
from barnraise.planning.round_schedule import RoundSchedule
from barnraise.planning.search import make_stage_plan
from barnraise.planning.write_advice import PlanRequest
from barnraise.swap.executor import EngineProgress
from barnraise.swap.state_store import FragmentSequence, StateStore
from barnraise.training.checkpoint import StateHeader
from barnraise.training.crew.crew_channels import CrewChannels
from barnraise.training.crew.crew_code import CrewCode, CrewRecord
from barnraise.training.crew.crew_endpoint import CrewDoor, CrewEndpoint
from barnraise.training.crew.crew_engine import CrewEngine
from barnraise.training.crew.crew_fragments import CrewFragments
from barnraise.training.crew.crew_gathering import LAN_LINE, CrewGathering
from barnraise.training.crew.crew_links import CrewLinks
from barnraise.training.crew.crew_orders import CONNECT_SECONDS, RETURN_SECONDS, CrewOrders
from barnraise.training.crew.crew_status import describe_seats
from barnraise.training.crew.formed_crew import FormedCrew
from barnraise.training.crew.roster import LEAD, CrewRoster
from barnraise.training.crew.stage_engine import StageEngine
from barnraise.training.join import JoinedRun
from barnraise.training.local_status import LocalStatus
from barnraise.training.train import Worker
from barnraise.training.training_engine import TrainingEngine

log = logging.getLogger("barnraise")

MAX_PROBLEMS = 6  # from one saved round to the next, after which the crew ends


@dataclass(frozen=True)
class CrewOptions:
    """What a crew's owner chooses.

    Attributes:
        members: how many machines to wait for besides the lead; None: those that come.
        boundary_bits: 32, 16 or 8; None to choose by the lines.
        port: at which its members dial it; 0: any.
    """

    members: int | None = None
    boundary_bits: int | None = None
    port: int = 0


def form_crew(
    joined: JoinedRun,
    request: PlanRequest,
    options: CrewOptions,
    transport: Transport,
    should_stop: Callable[[], bool],
    on_code: Callable[[str], object],
) -> FormedCrew | None:
    """Wait for machines that have the crew's code.

    A lead that restarts has the same code, and waits no longer once its last crew is complete.

    Args:
        joined: the lead's part in the run.
        request: the lead's machine and what it trains.
        options: what its owner chooses.
        transport: for the forming alone.
        should_stop: ends the wait.
        on_code: is called with the code once machines can join, and with another one when the
            lead has further addresses, as when its router forwards a port.

    Returns:
        The crew; None if the wait was stopped.

    Raises:
        PlanError: the machines cannot train the model together.
        OSError: the transport cannot listen.
    """
    record = CrewRecord.load(joined.folder.path)
    secret = bytes.fromhex(record.secret)

    def create_code() -> CrewCode:
        return CrewCode.create(joined.run, endpoint.key, endpoint.door.addresses(), secret)

    def publish_further_code() -> None:
        log.info("this machine has further addresses, which the next code includes")
        on_code(str(create_code()))

    endpoint = CrewEndpoint(joined, transport, request.limits, publish_further_code)
    endpoint.thread.open()
    try:
        code = create_code()
        lead = describe_machine("the lead", LAN_LINE, request)
        task = CrewTask(request.model, request.step_sequences, options.boundary_bits)
        on_code(str(code))
        expected = record.members if options.members is None else ()
        gathering = CrewGathering(endpoint.door, code, lead, task, expected)
        crew = gathering.gather(options.members, should_stop)
        if crew is not None:
            members = [seat.key for seat in crew.seating.seats[1:]]
            changes = {"port": options.port, "members": members}
            record.model_copy(update=changes).save(joined.folder.path)
        return crew
    finally:
        endpoint.thread.close()


class CrewWorker(Worker):
    """The worker of a crew's lead."""

    engine: CrewEngine

    def __init__(
        self,
        crew: FormedCrew,
        joined: JoinedRun,
        leaving: threading.Event,
        machine: tuple[Hardware, Limits],
        on_status: Callable[[LocalStatus], None],
        transport: Transport,
    ) -> None:
        """Plan the lead's stage; see `Worker`.

        Args:
            crew: its machines, and who holds what.
            joined: this machine's part in the run.
            leaving: ends the worker after the current step.
            machine: what this machine can do, and what its owner allows.
            on_status: receives the status.
            transport: carries the frames; it is not started yet.
        """
        self.crew = crew
        self.roster = CrewRoster(joined.spec.model, crew.seating)
        self._problem: CrewError | None = None  # after which all begin again
        self._problems = 0  # since the last saved round
        self._has_saved = False  # and has trained nothing since
        self._faults = Counter[str]()  # of members, by key
        self._dropped = set[int]()  # members without which the crew goes on
        self._balancer = CrewBalancer()
        self._has_fresh_anchor = True
        super().__init__(joined, leaving, *machine, on_status, transport)
        exchange = self.exchange
        self._door = CrewDoor(
            exchange.thread, transport, exchange.server.peers.handshake, exchange.addresses
        )
        self.exchange.author.set_crew(self.roster.flops_by_key())
        self.metrics.digests_anchor = False

    # ---- planning ------------------------------------------------------------------------------

    def plan_training(self, hardware: Hardware, limits: Limits) -> Plan:
        """Plan the lead's stage.

        Raises:
            PlanError: it does not fit this machine any longer.
        """
        self._planned_on = hardware, limits
        recipe = self.spec.recipe
        stage = self.roster.stages[LEAD]
        return make_stage_plan(
            hardware, self.spec.model, stage, limits, recipe.step_sequences, recipe.optimizer
        )

    @property
    def needs_other_plan(self) -> bool:
        """Return False: the members rely on this machine's part."""
        return False

    def free_memory(self) -> None:
        """Keep the memory in a pause: the members wait, and would lose their lead."""

    # ---- life cycle ----------------------------------------------------------------------------

    def initialise_state(
        self, header: StateHeader | None, snapshot: Snapshot | None = None
    ) -> None:
        """Wait for the crew, then go on as any worker; see `Worker.initialise_state`."""
        self._has_fresh_anchor = header is None
        self._await_members()
        super().initialise_state(header, snapshot)

    def _drop_engine(self) -> None:
        """Free the memory; the members wait for the state that is opened next."""
        self.engine.suspend()
        super()._drop_engine()

    def reopen_state(self) -> None:
        """Open channels and the state that was saved last; see `Worker.reopen_state`."""
        self._open_channels()
        super().reopen_state()

    def _open_channels(self) -> None:
        """Open the channels to the members, who wait as long as they reach their lead."""
        thread = self.exchange.thread
        uplink = self.exchange.server.peers.uplink
        links = CrewLinks(self.roster, LEAD, thread.loop, uplink, self._faults, self._dropped)
        self._channels = CrewChannels(
            links,
            self._door,
            self.crew.seating,
            self.crew.code,
            self.joined.folder.path,
        )
        serving: Future[None] = asyncio.run_coroutine_threadsafe(self._channels.run(), thread.loop)
        self._open_state.callback(serving.cancel)
        self.orders = CrewOrders(links)

    def _await_members(self) -> None:
        """Wait until every member has its channel.

        Raises:
            CrewError: one does not come.
        """
        links, others = self.orders.links, set(self.orders.others)
        links.wait(lambda: others <= links.connected(), CONNECT_SECONDS, self.is_leaving)
        missing = sorted(others - links.connected())
        if missing and not self.is_leaving():
            first = missing[0]
            raise CrewError(
                f"{self.roster.name_of(first)} of the crew does not connect: {links.reason(first)}"
            )
        log.info("the crew is connected: %d machines", len(self.roster.seats))

    def open_anchor_fragments(self, store: StateStore) -> FragmentStorage:
        """Return the anchor's fragments, those on other machines among them."""
        return CrewFragments(FragmentSequence(store, "anchor"), self.orders)

    def open_engine(
        self, store: StateStore, anchor: Anchor, progress: EngineProgress | None
    ) -> TrainingEngine:
        """Build the engine that trains with the whole crew."""
        stage = StageEngine(
            self.plan, self.spec.recipe, store, anchor, self._describe_state, progress
        )
        return CrewEngine(
            stage,
            self.orders,
            self._has_fresh_anchor,
            lambda i: self.exchange.rebuild_fragment(anchor, i, self.poll_should_stop),
        )

    def train(self) -> None:
        """Train as any worker does; begin again at the last saved round after a problem.

        Raises:
            CrewError: the crew ends after too many of them.
            PlanError: the machines that are left cannot hold the model.
        """
        while True:
            try:
                if (problem := self._problem) is not None:
                    self._problem = None
                    log.warning("%s: the crew begins again at its last saved round", problem)
                    self._begin_again(deals=not isinstance(problem, RoundLostError))
                super().train()
                return
            except CrewError as error:
                self._problem = error
                self._problems += 1
                if self._problems > MAX_PROBLEMS or self.is_leaving():
                    raise

    def prepare(self) -> None:
        """Build the engine and fetch the text; what goes wrong with a member is left to `train`.

        Channels are open before weights and text are fetched, which may take hours: members that do
        not reach their lead look for another one.
        """
        self._open_channels()
        try:
            super().prepare()
        except CrewError as error:
            self._problem = error
            if not hasattr(self, "text") and self.prefetch.fetch_text():
                self.open_text()

    def _begin_again(self, deals: bool, moved: FormedCrew | None = None) -> None:
        """Open the last saved state with all machines.

        Args:
            deals: whether to deal the blocks again, to the machines that are connected and those
                that have come.
            moved: the crew with a block moved; None leaves the seats as they are.
        """
        links = self.orders.links
        present = {self.roster.seats[number].key for number in links.connected()}
        present |= self._channels.list_applicants()
        if hasattr(self, "engine"):
            self._drop_engine()
        else:  # it could not be opened
            self._open_state.close()
            if hasattr(self, "store"):
                self.store.close()
        if deals:
            self._deal_again(present)
        elif moved is not None:
            self._seat(moved)
        self.reopen_state()

    def _deal_again(self, present: set[str]) -> None:
        """Deal the blocks again.

        Raises:
            CrewError: the wait for the machines was stopped.
            PlanError: they cannot hold the model.
        """
        plan = self.crew.plan
        gathering = CrewGathering(
            self._door,
            self.crew.code,
            plan.machines[LEAD],
            plan.task,
            present,
            self.orders.links.is_left_out,
        )
        crew = gathering.gather(None, self.poll_should_stop, RETURN_SECONDS)
        if crew is None:
            raise CrewError("this machine left while the crew's blocks were dealt again")
        self._seat(crew)

    def _seat(self, crew: FormedCrew) -> None:
        """Plan this machine's part of another deal."""
        self.crew, self._dropped = crew, set()
        self.roster = CrewRoster(self.spec.model, crew.seating)
        self.plan = self.plan_training(*self._planned_on)
        self.metrics.plan = build_plan_view(self.plan, self._planned_on[0])
        self.exchange.author.set_crew(self.roster.flops_by_key())

    def wait_for_round(self) -> bool:
        """Change who holds what where that pays, between two rounds; see `Worker`."""
        if self._has_saved:
            self._change_deal()
        return super().wait_for_round()

    def _change_deal(self) -> None:
        """Give machines that have come a part, or move a block where the speeds have changed."""
        steps = self.engine.pop_stage_seconds()
        if applicants := self._channels.list_applicants():
            log.info(
                "dealing the blocks again, with %s", format_amount(len(applicants), "more machine")
            )
            self._begin_again(deals=True)
            return
        move = self._balancer.choose(self.crew.find_move(steps), len(steps))
        if move is not None:
            log.info(
                "a block moves from %s to %s: a step takes %.2f s, and %.2f s once the crew is "
                "balanced",
                self.roster.name_of(move.giver),
                self.roster.name_of(move.receiver),
                move.present_seconds,
                move.target_seconds,
            )
            self._begin_again(deals=False, moved=self.crew.move_block(move))

    def train_locally(self, round_schedule: RoundSchedule) -> bool:
        """Take the round's local steps; see `Worker.train_locally`."""
        self._has_saved = False
        return super().train_locally(round_schedule)

    def save_checkpoint(self, closing: bool = False) -> None:
        """Save the crew's state; see `Worker.save_checkpoint`."""
        super().save_checkpoint(closing)
        self._has_saved, self._problems = True, 0

    def drain(self) -> None:
        """Hand over the last updates, then let the members leave while channels are open."""
        super().drain()
        self.engine.close()

    # ---- between two steps ---------------------------------------------------------------------

    def exchange_updates(self) -> None:
        """Apply what peers have sent. A crew serves no snapshots: they would cross its lines."""
        links = self.orders.links
        self.metrics.crew = describe_seats(self.roster, {LEAD, *links.connected()})
        self.exchange.author.set_crew(self.roster.flops_by_key(self.engine.holders.dealt))
        self.apply_arrivals()
        self.anchor.set_vouched(self.ledger.verdicts.vouched)


def describe_request(joined: JoinedRun, hardware: Hardware, limits: Limits) -> PlanRequest:
    """Return what a machine is asked to plan for a run's crew."""
    return joined.request_plan(replace(hardware, others=()), limits)
