"""The messages with which a crew forms, with every field bounded. Pure.

A machine applies with its proof; the lead has it price its spans, and in the end assigns the seats.
"""

from typing import Annotated, Literal

from pydantic import Field

from barnraise import __version__
from barnraise.planning.crew import MAX_MEMBERS, SpanPrice
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
from barnraise.training.crew.crew_code import CrewCode

MAX_BLOCKS = 256
MAX_SHAPES = 8  # sizes of micro-batches that are priced

Blocks = Annotated[int, Field(ge=1, le=MAX_BLOCKS)]
Sequences = Annotated[int, Field(ge=1, le=1 << 16)]


class CrewApplication(Message):
    """A machine wants to join the crew."""

    type: Literal["application"] = "application"
    version: Version
    name: ShortText
    proof: Digest  # HMAC-SHA256, see `crew_code.py`

    def find_problem(self, key: str, code: CrewCode) -> str:
        """Return why the machine with this key may not join, for its owner; "" if it may."""
        if not code.check_proof(key, self.proof):
            return "the code is not that of this crew: copy the code that the lead prints now"
        if self.version != __version__:
            return (
                f"it has version {self.version} of barnraise, and the lead {__version__}: install "
                "the same version on all machines of the crew"
            )
        return ""


class CrewRefusal(Message):
    """The sender ends the forming with the receiver."""

    type: Literal["refusal"] = "refusal"
    reason: Sentence


class PriceQuery(Message):
    """Price spans of every length, for micro-batches of these sizes."""

    type: Literal["price query"] = "price query"
    sequences: Annotated[list[Sequences], Field(max_length=MAX_SHAPES)]
    step_sequences: Sequences


class ShapePrices(Message):
    """Prices of spans of one block, two blocks and so on, as far as they fit."""

    sequences: Sequences
    prices: Annotated[list[SpanPrice], Field(max_length=MAX_BLOCKS)]

    def find(self, blocks: int) -> SpanPrice | None:
        """Return the price of so many blocks; None if they do not fit."""
        return self.prices[blocks - 1] if blocks <= len(self.prices) else None


class PriceList(Message):
    """The answer to a query."""

    type: Literal["price list"] = "price list"
    can_lead: bool  # whether the machine has room for both ends and a block
    shapes: Annotated[list[ShapePrices], Field(max_length=MAX_SHAPES)]


class CrewSeat(Message):
    """One machine's place in the crew."""

    key: PublicKey  # which its channels prove
    name: ShortText  # by which messages to people name it
    addresses: Addresses = []
    can_lead: bool = True  # whether it has room for both ends and a block
    first_block: Blocks
    blocks: Blocks


class Seating(Message):
    """Who holds which part of the model: the lead first. Training begins.

    The others follow in the order of their blocks, the holders of one span after each other.
    """

    type: Literal["seating"] = "seating"
    epoch: Count  # grows whenever the parts are dealt again; what an earlier epoch sent is void
    sequences: Sequences  # of a micro-batch
    micro_batches: Sequences  # of a step
    boundary_bits: Literal[32, 16, 8]  # of activations and gradients; 32 are exact
    seats: Annotated[list[CrewSeat], Field(min_length=2, max_length=MAX_MEMBERS)]
