"""The lead of a crew: a worker whose model lies on several machines.

`form_crew` waits for the machines; `CrewWorker` then trains as any worker does, with a `CrewEngine`
in place of the engine. Ledger, tickets and updates are this machine's own.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from barnraise.errors import CrewError, RoundLostError
from barnraise.exchange.snapshots.snapshot_client import Snapshot
from barnraise.ledger.anchor import Anchor, FragmentStorage
from barnraise.peering.transports.transport import Transport
from barnraise.planning.crew import CrewTask
from barnraise.planning.crew_pricing import describe_machine
from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import Limits
from barnraise.planning.lines import Line
from barnraise.planning.plan import Plan
from barnraise.planning.search import make_stage_plan
from barnraise.planning.write_advice import PlanRequest
from barnraise.swap.executor import EngineProgress
from barnraise.swap.state_store import FragmentSequence, StateStore
from barnraise.training.checkpoint import StateHeader
from barnraise.training.crew.crew_channels import CrewChannels
from barnraise.training.crew.crew_code import CrewCode
from barnraise.training.crew.crew_endpoint import PROTOCOL, CrewDoor, CrewEndpoint
from barnraise.training.crew.crew_engine import CrewEngine
from barnraise.training.crew.crew_fragments import CrewFragments
from barnraise.training.crew.crew_gathering import LAN_LINE, CrewGathering
from barnraise.training.crew.crew_links import CrewLinks
from barnraise.training.crew.crew_orders import CrewOrders
from barnraise.training.crew.crew_status import describe_seats
from barnraise.training.crew.forming_messages import Seating
from barnraise.training.crew.roster import LEAD
from barnraise.training.crew.stage_engine import StageEngine
from barnraise.training.join import JoinedRun
from barnraise.training.local_status import LocalStatus
from barnraise.training.train import Worker
from barnraise.training.training_engine import TrainingEngine

log = logging.getLogger("barnraise")

CONNECT_SECONDS = 300.0  # in which all members have planned, allocated and connected


@dataclass(frozen=True)
class CrewOptions:
    """What a crew's owner chooses.

    Attributes:
        members: how many machines to wait for besides the lead; None: those that come.
        boundary_bits: 32, 16 or 8; None to choose by the lines.
        line: of the lead; None for that of its network.
    """

    members: int | None = None
    boundary_bits: int | None = None
    line: Line | None = None


def form_crew(
    joined: JoinedRun,
    request: PlanRequest,
    options: CrewOptions,
    transport: Transport,
    should_stop: Callable[[], bool],
    on_code: Callable[[str], None],
) -> Seating | None:
    """Wait for machines that have the crew's code.

    Args:
        joined: the lead's part in the run.
        request: the lead's machine and what it trains.
        options: what its owner chooses.
        transport: for the forming alone.
        should_stop: ends the wait.
        on_code: is called with the code once machines can join.

    Returns:
        The seats; None if the wait was stopped.

    Raises:
        PlanError: the machines cannot train the model together.
        OSError: the transport cannot listen.
    """
    endpoint = CrewEndpoint(joined, transport)
    endpoint.thread.open()
    try:
        code = CrewCode.create(joined.run, endpoint.key, tuple(endpoint.addresses))
        lead = describe_machine("the lead", options.line or LAN_LINE, request)
        task = CrewTask(request.model, request.step_sequences, options.boundary_bits)
        on_code(str(code))
        return CrewGathering(endpoint, code, lead, task).gather(options.members, should_stop)
    finally:
        endpoint.thread.close()


class CrewWorker(Worker):
    """The worker of a crew's lead."""

    engine: CrewEngine

    def __init__(
        self,
        seating: Seating,
        joined: JoinedRun,
        leaving: threading.Event,
        machine: tuple[Hardware, Limits],
        on_status: Callable[[LocalStatus], None],
        transport: Transport,
    ) -> None:
        """Plan the lead's stage; see `Worker`.

        Args:
            seating: who holds what.
            joined: this machine's part in the run.
            leaving: ends the worker after the current step.
            machine: what this machine can do, and what its owner allows.
            on_status: receives the status.
            transport: carries the frames; it is not started yet.
        """
        self.seating = seating
        self.roster = seating.to_roster(joined.spec.model)
        self._crew_source = transport.add_protocol(PROTOCOL)
        self._has_fresh_anchor = True
        super().__init__(joined, leaving, *machine, on_status, transport)
        self.exchange.author.set_crew(self.roster.flops_by_key())
        self.metrics.digests_anchor = False

    # ---- planning ------------------------------------------------------------------------------

    def plan_training(self, hardware: Hardware, limits: Limits) -> Plan:
        """Plan the lead's stage.

        Raises:
            PlanError: it does not fit this machine any longer.
        """
        recipe = self.spec.recipe
        stage = self.roster.seats[LEAD].stage
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
        """Connect the crew, then go on as any worker; see `Worker.initialise_state`."""
        self._has_fresh_anchor = header is None
        self._connect()
        super().initialise_state(header, snapshot)

    def _connect(self) -> None:
        """Wait until every member has its channel.

        Raises:
            CrewError: one does not come.
        """
        thread, peers = self.exchange.thread, self.exchange.server.peers
        links = CrewLinks(self.roster, LEAD, thread.loop, peers.uplink)
        channels = CrewChannels(
            links,
            CrewDoor(self._crew_source, peers.handshake),
            self.seating,
            self.joined.folder.path,
            self.joined.run,
        )
        serving: Future[None] = asyncio.run_coroutine_threadsafe(channels.run(), thread.loop)
        self._open_state.callback(serving.cancel)
        self.orders = CrewOrders(links)
        others = set(self.orders.others)
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
        """Train as any worker does; begin again at the last saved round if a member restarts."""
        while True:
            try:
                super().train()
                return
            except RoundLostError as error:
                log.warning("%s", error)
                self._drop_engine()
                self.reopen_state()

    def _drop_engine(self) -> None:
        self.engine.suspend()  # the members wait for the state that is opened next
        super()._drop_engine()

    def drain(self) -> None:
        """Hand over the last updates, then let the members leave while channels are open."""
        super().drain()
        self.engine.close()

    # ---- between two steps ---------------------------------------------------------------------

    def exchange_updates(self) -> None:
        """Apply what peers have sent. A crew serves no snapshots: they would cross its lines."""
        self.metrics.crew = describe_seats(self.roster, self.orders.links.connected())
        self.exchange.author.set_crew(self.roster.flops_by_key(self.engine.holders.dealt))
        self.apply_arrivals()
        self.anchor.set_vouched(self.ledger.verdicts.vouched)


def describe_request(joined: JoinedRun, hardware: Hardware, limits: Limits) -> PlanRequest:
    """Return what a machine is asked to plan for a run's crew."""
    return joined.request_plan(replace(hardware, others=()), limits)
