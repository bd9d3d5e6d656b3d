"""The anchor of a crew: its lead's own fragments, and those that lie on the other machines."""

from collections.abc import Sequence

from torch import Tensor

from barnraise.errors import CrewError
from barnraise.ledger.anchor import compute_sketch, fragment_from_bytes, fragment_to_bytes
from barnraise.swap.state_store import FragmentSequence
from barnraise.training.crew.crew_messages import FragmentTask
from barnraise.training.crew.crew_orders import CrewOrders, Enclosure
from barnraise.training.crew.roster import LEAD


class CrewFragments(Sequence[Tensor]):
    """The anchor's fragments, int32 [n] each; one of another machine is a copy over the network."""

    def __init__(self, local: FragmentSequence, orders: CrewOrders) -> None:
        """Join the lead's fragments, `local`, with those of the crew's other machines."""
        self._local, self._orders = local, orders
        self._roster = orders.links.roster
        self._sizes = [fragment.size for fragment in self._roster.model.fragments()]

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, index: int) -> Tensor:
        index = range(len(self))[index]
        holder = self._roster.holders[index]
        if holder == LEAD:
            return self._local[index]
        payloads = self._orders.request_holder(index, FragmentTask(fragment=index)).payloads
        if len(payloads) != 1 or len(payloads[0]) != 4 * self._sizes[index]:
            raise CrewError(
                f"{self._roster.name_of(holder)} sent another fragment than it was asked for"
            )
        return fragment_from_bytes(bytes(payloads[0]))

    def __setitem__(self, index: int, units: Tensor) -> None:
        index = range(len(self))[index]
        holder = self._roster.holders[index]
        if holder == LEAD:
            self._local[index] = units
            return
        enclosure = Enclosure(index, fragment_to_bytes(units))
        span = self._roster.span_of(holder)
        self._orders.request(
            FragmentTask(fragment=index), span, {number: [enclosure] for number in span}
        )

    def compute_sketch(self, index: int) -> str:
        """Return a fragment's sketch, which the machine that holds it computes."""
        holder = self._roster.holders[index]
        if holder == LEAD:
            return compute_sketch(self._local[index])
        task = FragmentTask(fragment=index, sketch_only=True)
        sketch = self._orders.request_holder(index, task).reply.sketch
        if sketch is None:
            raise CrewError(f"{self._roster.name_of(holder)} sent no sketch of its fragment")
        return sketch
