"""Who is in a crew, and which part of the model each machine holds. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from barnraise.errors import MessageError
from barnraise.mixing.payload_size import payload_size
from barnraise.planning.cost_model import fragment_flops
from barnraise.planning.plan import PipelineStage
from barnraise.spec import ModelSpec
from barnraise.training.crew.forming_messages import CrewSeat, Seating

LEAD = 0  # the lead's number in a roster


@dataclass(frozen=True)
class CrewRoster:
    """The machines of a crew and their parts of the model.

    A machine's number is its place in the roster. Activations pass from each span to the next one,
    and from the last to the lead, which holds both ends. Several machines may hold one span.

    Attributes:
        model: which they train.
        seating: who holds what.
    """

    model: ModelSpec
    seating: Seating

    @property
    def epoch(self) -> int:
        """Return the number of this deal of the blocks."""
        return self.seating.epoch

    @property
    def micro_batches(self) -> int:
        """Return the micro-batches of a step."""
        return self.seating.micro_batches

    @property
    def seats(self) -> Sequence[CrewSeat]:
        """Return the machines, the lead first."""
        return self.seating.seats

    @cached_property
    def stages(self) -> tuple[PipelineStage, ...]:
        """Return each machine's part of a step."""
        stages: list[PipelineStage] = []
        for seat in self.seats:
            blocks = range(seat.first_block, seat.first_block + seat.blocks)
            fragments = (*blocks,) if stages else (0, *blocks, self.model.layers + 1)
            stages.append(PipelineStage(fragments, self.sequences))
        return tuple(stages)

    def validate(self) -> None:
        """Check that the parts are those of one pipeline.

        Raises:
            MessageError: they are not; another machine may have stated them.
        """
        if len({seat.key for seat in self.seats}) < len(self.seats):
            raise MessageError("a machine has two places in the crew")
        lead, *others = (self.stages[span[0]].fragments for span in self.spans)
        order = [*lead[:-1], *(i for fragments in others for i in fragments), lead[-1]]
        if order != list(range(self.model.layers + 2)):
            raise MessageError("the crew's machines do not hold each block once, in order")

    @property
    def sequences(self) -> int:
        """Return the sequences of a micro-batch."""
        return self.seating.sequences

    @cached_property
    def spans(self) -> tuple[tuple[int, ...], ...]:
        """Return the numbers of the machines that hold each span, the lead's first."""
        numbers = range(len(self.seats))
        spans = groupby(numbers, key=lambda number: self.stages[number].fragments)
        return tuple(tuple(span) for _, span in spans)

    @cached_property
    def span_numbers(self) -> dict[int, int]:
        """Map each machine's number to its span's."""
        return {number: s for s, span in enumerate(self.spans) for number in span}

    def span_of(self, number: int) -> tuple[int, ...]:
        """Return the machines that hold the same span as one of them."""
        return self.spans[self.span_numbers[number]]

    @property
    def has_single_holders(self) -> bool:
        """Whether each span has one holder."""
        return len(self.spans) == len(self.seats)

    @cached_property
    def holders(self) -> dict[int, int]:
        """Map each fragment to the number of the first machine that holds it."""
        firsts = [span[0] for span in self.spans]
        return {i: number for number in firsts for i in self.stages[number].fragments}

    def flops_by_key(self, dealt: Mapping[int, int] | None = None) -> dict[str, int]:
        """Map the machines' keys to their FLOPs for one sequence, forward and backward.

        Args:
            dealt: micro-batches that each machine has computed, by which the holders of one span
                share it; without any they share it alike.
        """
        flops: dict[str, int] = {}
        for span in self.spans:
            whole = sum(fragment_flops(self.model, i) for i in self.stages[span[0]].fragments)
            counts = {number: (dealt or {}).get(number, 0) for number in span}
            if not any(counts.values()):
                counts = dict.fromkeys(span, 1)
            for number, count in counts.items():
                flops[self.seats[number].key] = whole * count // sum(counts.values())
        return flops

    def find_seat(self, key: str) -> int | None:
        """Return the number of the machine with this key; None if it is not in the crew."""
        return next((n for n, seat in enumerate(self.seats) if seat.key == key), None)

    def neighbours(self, number: int) -> set[int]:
        """Return the machines with which one needs a channel: the lead, and those of spans next."""
        if number == LEAD:
            return set(range(1, len(self.seats)))
        here, spans = self.span_numbers[number], self.spans
        return {LEAD, *spans[here - 1], *spans[(here + 1) % len(spans)]}

    def name_of(self, number: int) -> str:
        """Return the name of a machine, for messages to people."""
        return self.seats[number].name or self.seats[number].key[:8]

    def sender_of(self, key: int) -> int:
        """Return which machine computes an activation, or a gradient (`gradient_key`).

        Of several holders of a span it is the first one.
        """
        return self.holders[key - 1 if key > 0 else -key]

    def receiver_of(self, key: int) -> int:
        """Return which machine needs an activation, or a gradient; see `sender_of`."""
        return self.holders[key if key > 0 else -key - 1]

    def is_boundary(self, key: int, sender: int, receiver: int) -> bool:
        """Return whether one machine sends another one what is stored under a key in each step."""
        if not 0 < abs(key) <= self.model.layers + 1:
            return False
        spans = self.span_numbers
        ends = spans[self.sender_of(key)], spans[self.receiver_of(key)]
        return ends == (spans[sender], spans[receiver])

    @property
    def boundary_elements(self) -> int:
        """Return the elements of a micro-batch's activations between two blocks."""
        return self.sequences * self.model.context * self.model.width

    def boundary_bytes(self, sender: int) -> int:
        """Return the bytes of a micro-batch's activations or gradients, as a machine sends them."""
        return payload_size(self.boundary_elements, self.seating.boundary_bits)
