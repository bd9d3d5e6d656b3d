"""A member of a crew, from the code to its end: it joins, and obeys the lead with its span."""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass

from barnraise.errors import CrewError, LeadLostError
from barnraise.peering.transports.transport import Transport
from barnraise.planning.crew_pricing import StagePricer
from barnraise.planning.search import make_stage_plan
from barnraise.planning.write_advice import PlanRequest
from barnraise.protocol.polling import PERSON_POLL_SECONDS
from barnraise.training.card_memory import claim_card_memory
from barnraise.training.crew.crew_channels import CrewChannels
from barnraise.training.crew.crew_code import CrewCode, CrewRecord
from barnraise.training.crew.crew_endpoint import CrewEndpoint
from barnraise.training.crew.crew_joining import CrewJoining
from barnraise.training.crew.crew_links import CrewLinks
from barnraise.training.crew.crew_member import CrewMember, NoLedger
from barnraise.training.crew.crew_orders import RETURN_SECONDS
from barnraise.training.crew.crew_state import CrewState
from barnraise.training.crew.forming_messages import CrewSeat, Seating
from barnraise.training.crew.roster import LEAD, CrewRoster
from barnraise.training.crew.stage_engine import StageEngine
from barnraise.training.join import JoinedRun

log = logging.getLogger("barnraise")

HEIR_SECONDS = 120.0  # in which the machine that takes a lost lead's place has begun to lead
STATE_FOLDER = "crew"  # in the run's folder


@dataclass(frozen=True)
class CrewMembership:
    """One machine's part in a crew.

    Attributes:
        joined: this machine's part in the run.
        code: of the crew.
        name: by which the crew knows this machine.
        request: this machine, its owner's limits and what the crew trains.
        is_paused: returns whether its owner wants it to pause.
    """

    joined: JoinedRun
    code: CrewCode
    name: str
    request: PlanRequest
    is_paused: Callable[[], bool] = lambda: False

    def run(self, transport: Transport, should_stop: Callable[[], bool]) -> bool:
        """Join the crew, and train until the lead leaves or the owner stops.

        When the lead is lost, the first machine of the roster that can hold the ends leads the
        crew under its own key, and the others join it there with the same code.

        Returns:
            Whether this machine is to lead the crew now; its `CrewRecord` is stored.

        Raises:
            CrewError: the lead refuses this machine, or is gone and nobody can take its place.
            PlanError: the span does not fit this machine any longer.
            OSError: the transport cannot listen.
        """
        with ExitStack() as cleanup:
            cleanup.callback(self.joined.folder.close)
            cleanup.callback(self.joined.coordinator.close)
            endpoint = CrewEndpoint(self.joined, transport, self.request.limits)
            endpoint.thread.open()
            cleanup.callback(endpoint.thread.close)
            pricer = StagePricer(self.request)
            layers, code = self.joined.spec.model.layers, self.code
            seating: Seating | None = None
            patience, heirs = math.inf, list[CrewSeat]()
            while True:
                self._wait_while_paused(math.inf, should_stop)
                joining = CrewJoining(endpoint, code, self.name, pricer, layers)
                try:
                    seating = joining.await_seat(
                        lambda: should_stop() or self.is_paused(), patience
                    )
                    if seating is None:
                        if should_stop() or not endpoint.thread.is_alive():
                            return False
                        continue  # its owner has paused this machine
                    patience, heirs = math.inf, [s for s in seating.seats[1:] if s.can_lead]
                    with ExitStack() as open_state:
                        if self._train(seating, code, endpoint, open_state, should_stop):
                            log.info("the crew has ended: its lead left")
                            return False
                except LeadLostError as error:
                    if not heirs:
                        raise CrewError(
                            f"{error}; no other machine of the crew can take its place: start the "
                            f"crew again with `barnraise join {code.run} --crew` on a machine that "
                            "can hold the embedding and the head"
                        ) from None
                    heir, patience = heirs.pop(0), HEIR_SECONDS
                    # A log that stored the error would hold the channels of its traceback, and with
                    # them the port on which the heir listens again.
                    log.warning("%s: %s is to lead the crew", str(error), heir.name)
                    if heir.key == endpoint.key:
                        assert seating is not None, "a lead that was never reached is not lost"
                        self._store_record(seating, heir)
                        return True
                    code = CrewCode.create(code.run, heir.key, heir.addresses, code.secret)

    def _store_record(self, seating: Seating, own: CrewSeat) -> None:
        """Store how the others find this machine as their lead, and whom it waits for."""
        others = [seat.key for seat in seating.seats[1:] if seat.key != own.key]
        port = own.addresses[0].rpartition(":")[2] if own.addresses else ""
        record = CrewRecord(
            secret=self.code.secret.hex(),
            port=int(port) if port.isdecimal() else 0,
            members=others,
        )
        record.save(self.joined.folder.path)

    def _wait_while_paused(self, seconds: float, should_stop: Callable[[], bool]) -> None:
        """Wait until this machine's owner resumes it, but not longer than that."""
        ends_at = time.monotonic() + seconds
        while self.is_paused() and not should_stop() and time.monotonic() < ends_at:
            time.sleep(PERSON_POLL_SECONDS)

    def _train(
        self,
        seating: Seating,
        code: CrewCode,
        endpoint: CrewEndpoint,
        cleanup: ExitStack,
        should_stop: Callable[[], bool],
    ) -> bool:
        """Train with one deal of the blocks; return whether the lead has left."""
        joined, recipe = self.joined, self.joined.spec.recipe
        roster = CrewRoster(joined.spec.model, seating)
        roster.validate()
        number = roster.find_seat(endpoint.key)
        if not number:
            raise CrewError("the lead sent the seats of another crew")
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
            roster.stages[number],
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
            code,
            joined.folder.path,
        )
        cleanup.callback(state.close)
        member = CrewMember(engine, links, state)
        while not should_stop() and not self.is_paused():
            serving: Future[None] = asyncio.run_coroutine_threadsafe(
                channels.run(), endpoint.thread.loop
            )
            try:
                has_left = member.run(lambda: should_stop() or self.is_paused())
            finally:
                if self.is_paused():
                    links.close("a member paused by its owner")
                serving.cancel()
            if has_left or links.is_recalled:
                return has_left
            log.info("paused: the crew waits %.0f s, then trains without it", RETURN_SECONDS)
            self._wait_while_paused(RETURN_SECONDS, should_stop)
        return False
