"""One tensor as the transformers library stores it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from barnraise.spec import Slot

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TransformersTensor:
    """A tensor of a fragment, or some rows of one, under its name in the transformers library.

    Attributes:
        name: the name there.
        slot: where the tensor lies in its fragment.
        is_transposed: whether it is stored transposed there, as the matrix of a `Conv1D`.
        first_row: of the slot's rows the first one that belongs to it.
        rows: how many of them; 0 for all.
    """

    name: str
    slot: Slot
    is_transposed: bool = False
    first_row: int = 0
    rows: int = 0

    @property
    def shape(self) -> list[int]:
        """Return the tensor's shape in the transformers library."""
        shape = [self.rows or self.slot.shape[0], *self.slot.shape[1:]]
        return shape[::-1] if self.is_transposed else shape

    @property
    def offset(self) -> int:
        """Return the element of the fragment at which it begins."""
        return self.slot.offset + self.first_row * (self.slot.size // self.slot.shape[0])

    def view(self, weights: "Mapping[str, Tensor]") -> "Tensor":
        """Return the tensor as the transformers library has it, as a view of named weights."""
        rows = self.rows or self.slot.shape[0]
        part = weights[self.slot.name][self.first_row : self.first_row + rows]
        return part.t() if self.is_transposed else part
