"""The messages with which a crew forms: JSON, with every field bounded. Pure.

A machine applies with its proof; the lead has it price its spans, and in the end assigns the seats.
"""

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from barnraise.errors import MessageError
from barnraise.planning.crew import MAX_MEMBERS, SpanPrice
from barnraise.planning.plan import PipelineStage
from barnraise.protocol.types import (
    Addresses,
    Count,
    Digest,
    Message,
    PublicKey,
    Sentence,
    ShortText,
    Version,
)
from barnraise.spec import ModelSpec
from barnraise.training.crew.roster import CrewRoster, CrewSeat

MAX_BLOCKS = 256
MAX_SHAPES = 8  # sizes of micro-batches that are priced
MAX_FORMING_BYTES = 1 << 20

Blocks = Annotated[int, Field(ge=1, le=MAX_BLOCKS)]
Sequences = Annotated[int, Field(ge=1, le=1 << 16)]
PositiveSeconds = Annotated[FiniteFloat, Field(gt=0, lt=1e9)]
Megabits = Annotated[FiniteFloat, Field(gt=0, le=1e6)]


class CrewApplication(Message):
    """A machine wants to join the crew."""

    type: Literal["application"] = "application"
    version: Version
    name: ShortText
    proof: Digest  # HMAC-SHA256, see `crew_code.py`


class CrewRefusal(Message):
    """The sender ends the forming with the receiver."""

    type: Literal["refusal"] = "refusal"
    reason: Sentence


class PriceQuery(Message):
    """Price spans of every length, for micro-batches of these sizes."""

    type: Literal["price query"] = "price query"
    sequences: Annotated[list[Sequences], Field(max_length=MAX_SHAPES)]
    step_sequences: Sequences


class PriceView(Message):
    """A `SpanPrice` on its way."""

    step_seconds: PositiveSeconds
    groups: Blocks
    bottleneck: ShortText
    host_bytes: Count
    device_bytes: Count
    disk_bytes: Count


class ShapePrices(Message):
    """Prices of spans of one block, two blocks and so on, as far as they fit."""

    sequences: Sequences
    prices: Annotated[list[PriceView], Field(max_length=MAX_BLOCKS)]

    def find(self, blocks: int) -> SpanPrice | None:
        """Return the price of so many blocks; None if they do not fit."""
        if blocks > len(self.prices):
            return None
        return SpanPrice(**self.prices[blocks - 1].model_dump())


class PriceList(Message):
    """The answer to a query."""

    type: Literal["price list"] = "price list"
    can_lead: bool  # whether the machine has room for both ends and a block
    shapes: Annotated[list[ShapePrices], Field(max_length=MAX_SHAPES)]


class SeatView(Message):
    """One machine's place in the crew."""

    key: PublicKey
    name: ShortText
    addresses: Addresses
    can_lead: bool
    first_block: Blocks
    blocks: Blocks


class Seating(Message):
    """Who holds which part of the model: the lead first. Training begins."""

    type: Literal["seating"] = "seating"
    epoch: Count
    sequences: Sequences
    micro_batches: Sequences
    boundary_bits: Literal[32, 16, 8]
    seats: Annotated[list[SeatView], Field(min_length=2, max_length=MAX_MEMBERS)]

    def to_roster(self, model: ModelSpec) -> CrewRoster:
        """Return the roster that it states.

        Raises:
            MessageError: it is not that of one pipeline.
        """
        seats: list[CrewSeat] = []
        for number, seat in enumerate(self.seats):
            blocks = range(seat.first_block, seat.first_block + seat.blocks)
            ends = (0, model.layers + 1) if number == 0 else ()
            stage = PipelineStage(tuple(sorted((*blocks, *ends))), self.sequences)
            seats.append(CrewSeat(seat.key, seat.name, stage, self.boundary_bits))
        roster = CrewRoster(self.epoch, model, self.micro_batches, tuple(seats))
        roster.validate()
        return roster


FormingMessage = Annotated[
    CrewApplication | CrewRefusal | PriceQuery | PriceList | Seating, Field(discriminator="type")
]
_ADAPTER: TypeAdapter[FormingMessage] = TypeAdapter(FormingMessage)


def pack_forming(message: Message) -> bytes:
    """Return the frame of a message."""
    return message.model_dump_json().encode()


def parse_forming(frame: bytes) -> FormingMessage:
    """Return the message of a frame that another machine sent.

    Raises:
        MessageError: it is none.
    """
    if len(frame) > MAX_FORMING_BYTES:
        raise MessageError(f"a message of {len(frame):,} bytes is too long")
    try:
        return _ADAPTER.validate_json(frame)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"])) or "its text"
        raise MessageError(f"a message of a forming crew is malformed at {where}") from None
