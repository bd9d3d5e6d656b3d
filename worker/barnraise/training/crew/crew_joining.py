"""A member's side of forming a crew: dial the lead, prove the code, price spans, await a seat."""

import asyncio
import logging
import math
import time
from collections.abc import Callable

from barnraise import __version__
from barnraise.errors import CrewError, LeadLostError, MessageError
from barnraise.peering.transports.transport import Channel, ChannelClosedError
from barnraise.planning.crew import Pricer, SpanPrice, SpanRequest
from barnraise.protocol.messages import Peer
from barnraise.training.crew.crew_code import CrewCode
from barnraise.training.crew.crew_endpoint import CrewEndpoint
from barnraise.training.crew.crew_frames import pack_control, unpack
from barnraise.training.crew.forming_messages import (
    CrewApplication,
    CrewRefusal,
    PriceList,
    PriceQuery,
    Seating,
    ShapePrices,
)

log = logging.getLogger("barnraise")

REDIAL_SECONDS = 3.0  # between two attempts to reach the lead


class CrewJoining:
    """Join the crew of a code."""

    def __init__(
        self, endpoint: CrewEndpoint, code: CrewCode, name: str, price: Pricer, layers: int
    ) -> None:
        """Apply under a name; `price` prices spans of a model of so many layers on this machine."""
        self._endpoint, self._code, self._name = endpoint, code, name
        self._price, self._layers = price, layers

    def await_seat(
        self, should_stop: Callable[[], bool], patience: float = math.inf
    ) -> Seating | None:
        """Dial the lead until it assigns a seat.

        Args:
            should_stop: ends the wait.
            patience: seconds for which the lead may be out of reach.

        Returns:
            All seats of the crew; None if the wait was stopped.

        Raises:
            CrewError: the lead refuses this machine; the message says why.
            LeadLostError: it is out of reach.
        """
        return self._endpoint.thread.run(self._await_seat(patience), None, should_stop)

    async def _await_seat(self, patience: float) -> Seating:
        ends_at = time.monotonic() + patience
        lead = Peer(key=self._code.lead, addresses=list(self._code.addresses))
        logged = ""
        while True:
            try:
                channel = await self._endpoint.door.dial(lead)
                try:
                    return await self._apply(channel)
                finally:  # also where its owner stops or pauses this machine
                    channel.close("this machine no longer asks for a seat")
            except (ChannelClosedError, TimeoutError) as error:
                reason = str(error) or "it did not answer in time"
            except MessageError as error:
                raise CrewError(f"the lead {lead.key[:8]} is of no use here: {error}") from None
            if reason != logged:
                log.info("the crew's lead does not answer yet: %s", reason)
                logged = reason
            if time.monotonic() > ends_at:
                raise LeadLostError(f"{lead.key[:8]} does not lead the crew: {reason}")
            await asyncio.sleep(REDIAL_SECONDS)

    async def _apply(self, channel: Channel) -> Seating:
        """Apply, and do what the lead asks, until it assigns a seat.

        Raises:
            CrewError: it refuses.
            ChannelClosedError: the channel has ended.
            MessageError: it sent what is no message.
        """
        proof = self._code.prove(self._endpoint.key)
        application = CrewApplication(version=__version__, name=self._name, proof=proof)
        await channel.send(pack_control(application))
        while True:
            match message := unpack(await channel.receive()):
                case Seating():
                    return message
                case CrewRefusal():
                    raise CrewError(f"the crew's lead refuses this machine: {message.reason}")
                case PriceQuery():
                    log.info("the lead has found this machine: planning what it can hold")
                    prices = await asyncio.to_thread(self._answer, message)
                    await channel.send(pack_control(prices))
                    log.info("waiting for the crew to be complete")
                case _:
                    raise MessageError(f"it sent a {type(message).__name__} out of turn")

    def _answer(self, query: PriceQuery) -> PriceList:
        """Price spans of every length that fits, in a thread of its own: it takes seconds."""
        shapes: list[ShapePrices] = []
        can_lead = False
        for sequences in query.sequences:
            prices: list[SpanPrice] = []
            micro_batches = max(1, query.step_sequences // sequences)
            for blocks in range(1, self._layers):
                span = SpanRequest(blocks, False, sequences, micro_batches)
                price = self._price(span)
                if price is None:
                    break
                prices.append(price)
            can_lead |= self._price(SpanRequest(1, True, sequences, micro_batches)) is not None
            shapes.append(ShapePrices(sequences=sequences, prices=prices))
        return PriceList(can_lead=can_lead, shapes=shapes)
