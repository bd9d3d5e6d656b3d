"""The numbers that decide a model's tensors, and how its tensors are described. Pure."""

import math
from dataclasses import dataclass, field
from typing import Literal

UNIT_BITS = 26  # the anchor's fixed point: one unit is 2**-26

# Fields that specs of GPT-2 lack. A spec's text holds only those that are not the default.
LATER_FIELDS = (
    "architecture",
    "key_value_heads",
    "head_size",
    "hidden",
    "rope_theta",
    "norm_epsilon",
    "qk_norm",
    "tied_head",
)
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
    architecture: str = field(
        default="gpt2", metadata=field_metadata("Architecture", "Of the preset, if left empty.")
    )
    key_value_heads: int = field(
        default=0, metadata=field_metadata("Key-value heads", "0 means as many as heads.")
    )
    head_size: int = field(
        default=0, metadata=field_metadata("Head size", "0 means the width divided by the heads.")
    )
    hidden: int = field(
        default=0, metadata=field_metadata("Feed-forward width", "0 means four times the width.")
    )
    rope_theta: float = field(
        default=10_000.0, metadata=field_metadata("Rotary base", "Of rotary positions.")
    )
    norm_epsilon: float = field(default=1e-5, metadata=field_metadata("Norm epsilon"))
    qk_norm: bool = field(default=False, metadata=field_metadata("Query and key norms"))
    tied_head: bool = field(
        default=True, metadata=field_metadata("Tied head", "The head is the table of tokens.")
    )

    @property
    def head_width(self) -> int:
        """Return the elements of one head's query, key and value."""
        return self.head_size or self.width // self.heads

    @property
    def hidden_width(self) -> int:
        """Return the elements of the feed-forward's hidden values of one token."""
        return self.hidden or 4 * self.width

    @property
    def query_width(self) -> int:
        """Return the elements of all heads' queries of one token."""
        return self.heads * self.head_width

    @property
    def grouped_heads(self) -> int:
        """Return the number of heads of keys and values."""
        return self.key_value_heads or self.heads

    @property
    def key_value_width(self) -> int:
        """Return the elements of all heads' keys of one token; its values have as many."""
        return self.grouped_heads * self.head_width

    @property
    def head_table(self) -> tuple[int, str]:
        """Return the fragment's index and the name of the table [V, d] that gives logits."""
        return (0, "token") if self.tied_head else (self.layers + 1, "head")

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
        deviation: the standard deviation of normal initial values, in units of 2**-26; 0 for
            initial values that are all alike.
        parts: of a matrix that holds several, one above another: the rows of each.
    """

    name: str
    shape: tuple[int, ...]
    kind: TensorKind
    deviation: int = 0
    parts: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def initial(self) -> Literal["normal", "ones", "zeros"]:
        """Return what its initial values are."""
        if self.deviation:
            return "normal"
        return "ones" if self.kind == "norm" else "zeros"


def norm_tensor(name: str, width: int) -> TensorShape:
    """Return the scale of a norm."""
    return TensorShape(name, (width,), "norm")


def bias_tensor(name: str, width: int) -> TensorShape:
    """Return the bias of a norm or a product."""
    return TensorShape(name, (width,), "bias")
