"""The numbers that decide a model's tensors, and how its tensors are described. Pure."""

import math
from dataclasses import dataclass, field
from typing import Literal

UNIT_BITS = 26  # the anchor's fixed point: one unit is 2**-26

TensorKind = Literal["matrix", "norm", "bias", "embedding"]


def field_metadata(label: str, note: str = "") -> dict[str, str]:
    """Return what forms show of a field: its label, and a sentence of help."""
    return {"label": label, "help": note}


@dataclass(frozen=True)
class ModelDimensions:
    """The numbers that decide a model's tensors."""

    layers: int = field(metadata=field_metadata("Layers"))
    width: int = field(metadata=field_metadata("Width", "Must be divisible by the heads."))
    heads: int = field(metadata=field_metadata("Heads"))
    context: int = field(metadata=field_metadata("Context", "Tokens the model attends to."))
    vocabulary: int = field(
        metadata=field_metadata("Vocabulary", "Number of tokens in the tokenizer.")
    )

    @property
    def head_width(self) -> int:
        """Return the elements of one head's query, key and value."""
        return self.width // self.heads

    @property
    def query_width(self) -> int:
        """Return the elements of all heads' queries of one token."""
        return self.heads * self.head_width

    @property
    def key_value_width(self) -> int:
        """Return the elements of all heads' keys of one token; its values have as many."""
        return self.query_width

    @property
    def normal(self) -> int:
        """Return the deviation of most initial weights: 0.02, in units of 2**-26."""
        return deviation(1)

    @property
    def normal_of_residual(self) -> int:
        """Return the deviation of initial weights that feed the residual stream.

        As in GPT-2, they start smaller in deeper models.
        """
        return deviation(2 * self.layers)


def deviation(depth: int) -> int:
    """Return 0.02 / √depth in units of 2**-26, computed with integers only."""
    return math.isqrt((1 << 2 * UNIT_BITS) // (2500 * depth))


@dataclass(frozen=True)
class TensorShape:
    """One tensor of a fragment.

    Attributes:
        name: the tensor's name in its fragment.
        shape: its shape.
        kind: what it is to an optimizer. A "matrix" multiplies the stream inside a block; an
            "embedding" is a table of rows for tokens or positions.
        initial: its initial values: "ones", "zeros", or the standard deviation of normal ones, in
            units of 2**-26.
        parts: of a matrix that holds several, one above another: the rows of each.
    """

    name: str
    shape: tuple[int, ...]
    kind: TensorKind
    initial: int | Literal["ones", "zeros"]
    parts: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)


def norm_tensor(name: str, width: int) -> TensorShape:
    """Return the scale of a norm."""
    return TensorShape(name, (width,), "norm", "ones")


def bias_tensor(name: str, width: int) -> TensorShape:
    """Return the bias of a norm or a product."""
    return TensorShape(name, (width,), "bias", "zeros")
