"""A member of a crew, from the code to its end: it joins, and obeys the lead with its span."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass

from barnraise.errors import CrewError
from barnraise.peering.transports.transport import Transport
from barnraise.planning.crew_pricing import StagePricer
from barnraise.planning.search import make_stage_plan
from barnraise.planning.write_advice import PlanRequest
from barnraise.training.card_memory import claim_card_memory
from barnraise.training.crew.crew_channels import CrewChannels
from barnraise.training.crew.crew_code import CrewCode
from barnraise.training.crew.crew_endpoint import CrewEndpoint
from barnraise.training.crew.crew_joining import CrewJoining
from barnraise.training.crew.crew_links import CrewLinks
from barnraise.training.crew.crew_member import CrewMember, NoLedger
from barnraise.training.crew.crew_state import CrewState
from barnraise.training.crew.forming_messages import Seating
from barnraise.training.crew.roster import LEAD
from barnraise.training.crew.stage_engine import StageEngine
from barnraise.training.join import JoinedRun

log = logging.getLogger("barnraise")

STATE_FOLDER = "crew"  # in the run's folder


@dataclass(frozen=True)
class CrewMembership:
    """One machine's part in a crew.

    Attributes:
        joined: this machine's part in the run.
        code: of the crew.
        name: by which the crew knows this machine.
        request: this machine, its owner's limits and what the crew trains.
    """

    joined: JoinedRun
    code: CrewCode
    name: str
    request: PlanRequest

    def run(self, transport: Transport, should_stop: Callable[[], bool]) -> None:
        """Join the crew, and train until the lead leaves or the owner stops.

        Raises:
            CrewError: the lead refuses this machine, or is gone.
            PlanError: the span does not fit this machine any longer.
            OSError: the transport cannot listen.
        """
        with ExitStack() as cleanup:
            cleanup.callback(self.joined.folder.close)
            cleanup.callback(self.joined.coordinator.close)
            endpoint = CrewEndpoint(self.joined, transport)
            endpoint.thread.open()
            cleanup.callback(endpoint.thread.close)
            pricer = StagePricer(self.request)
            layers = self.joined.spec.model.layers
            joining = CrewJoining(endpoint, self.code, self.name, pricer, layers)
            seating = joining.await_seat(should_stop)
            if seating is not None:
                self._train(seating, endpoint, cleanup, should_stop)

    def _train(
        self,
        seating: Seating,
        endpoint: CrewEndpoint,
        cleanup: ExitStack,
        should_stop: Callable[[], bool],
    ) -> None:
        joined, recipe = self.joined, self.joined.spec.recipe
        roster = seating.to_roster(joined.spec.model)
        number = roster.find_seat(endpoint.key)
        if not number:
            raise CrewError("the lead sent the seats of another crew")
        seat = roster.seats[number]
        blocks = seating.seats[number]
        log.info(
            "this machine trains blocks %d to %d of %d, in a crew of %d",
            blocks.first_block,
            blocks.first_block + blocks.blocks - 1,
            roster.model.layers,
            len(roster.seats),
        )
        plan = make_stage_plan(
            self.request.hardware,
            roster.model,
            seat.stage,
            self.request.limits,
            recipe.step_sequences,
            recipe.optimizer,
        )
        # What was saved for another lead belongs to another state of the run.
        folder = joined.folder.path / STATE_FOLDER / roster.seats[LEAD].key
        state = CrewState(folder, joined.run, joined.spec_digest)
        claim_card_memory(plan, recipe)
        store, progress = state.open_store(plan)
        engine = StageEngine(plan, recipe, store, NoLedger(), state.describe, progress)
        cleanup.callback(engine.close)
        links = CrewLinks(roster, number, endpoint.thread.loop)
        channels = CrewChannels(
            links,
            endpoint.door,
            seating,
            joined.folder.path,
            joined.run,
        )
        serving: Future[None] = asyncio.run_coroutine_threadsafe(
            channels.run(), endpoint.thread.loop
        )
        cleanup.callback(serving.cancel)
        CrewMember(engine, links, state).run(should_stop)
        if not should_stop():
            log.info("the crew has ended: its lead left")
