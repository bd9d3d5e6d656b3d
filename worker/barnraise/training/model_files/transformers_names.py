"""The names, shapes and orientation of tensors in the transformers library. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from barnraise.spec import Fragment, Slot

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TransformersTensor:
    """A tensor of a fragment, or some rows of one, under its name in the transformers library.

    Attributes:
        name: the name there.
        slot: where the tensor lies in its fragment.
        first_row: of the slot's rows the first one that belongs to it.
        rows: how many of them.
        is_transposed: whether it is stored transposed there, as the matrix of a `Conv1D`.
    """

    name: str
    slot: Slot
    first_row: int
    rows: int
    is_transposed: bool = False

    @property
    def our_shape(self) -> list[int]:
        """Return the tensor's shape in a fragment."""
        return [self.rows, *self.slot.shape[1:]]

    @property
    def shape(self) -> list[int]:
        """Return the tensor's shape in the transformers library."""
        return self.our_shape[::-1] if self.is_transposed else self.our_shape

    @property
    def offset(self) -> int:
        """Return the element of the fragment at which it begins."""
        return self.slot.offset + self.first_row * (self.slot.size // self.slot.shape[0])

    def our_view(self, weights: "Mapping[str, Tensor]") -> "Tensor":
        """Return the tensor as a fragment has it, as a view of named weights."""
        return weights[self.slot.name][self.first_row : self.first_row + self.rows]

    def view(self, weights: "Mapping[str, Tensor]") -> "Tensor":
        """Return the tensor as the transformers library has it, as a view of named weights."""
        view = self.our_view(weights)
        return view.t() if self.is_transposed else view


@dataclass(frozen=True)
class TransformersNames:
    """How the transformers library names the tensors of an architecture.

    Attributes:
        prefix: of most tensors' names; some files lack it.
        blocks: what follows it in those of blocks, before a block's number.
        ends: slots outside the blocks → their whole names.
        parts: stems of a block's slots → the stems of their parts there, in the order of the rows.
        ignored: endings of the names of tensors that old files store, and that are no weights.
        has_transposed_matrices: whether the matrices of blocks are those of `Conv1D`.
    """

    prefix: str
    blocks: str
    ends: Mapping[str, str]
    parts: Mapping[str, tuple[str, ...]]
    ignored: tuple[str, ...]
    has_transposed_matrices: bool = False

    def tensors(self, fragment: Fragment) -> list[TransformersTensor]:
        """List a fragment's tensors under their names there, in the order of its slots."""
        return [tensor for slot in fragment.slots for tensor in self._describe(fragment.name, slot)]

    def _describe(self, fragment: str, slot: Slot) -> Iterator[TransformersTensor]:
        if not fragment.startswith("block."):
            yield TransformersTensor(self.ends[slot.name], slot, 0, slot.shape[0])
            return
        stem, kind = slot.name.split(".")
        stems = self.parts[stem]
        rows_of_parts = slot.parts if len(stems) > 1 else slot.shape[:1]
        is_transposed = self.has_transposed_matrices and slot.kind == "matrix"
        first = 0
        for part, rows in zip(stems, rows_of_parts, strict=True):
            number = fragment.removeprefix("block.")
            name = f"{self.prefix}{self.blocks}.{number}.{part}.{kind}"
            yield TransformersTensor(name, slot, first, rows, is_transposed)
            first += rows


GPT2_NAMES = TransformersNames(
    prefix="transformer.",
    blocks="h",
    ends={
        "token": "transformer.wte.weight",
        "position": "transformer.wpe.weight",
        "norm.weight": "transformer.ln_f.weight",
        "norm.bias": "transformer.ln_f.bias",
    },
    parts={
        "norm1": ("ln_1",),
        "qkv": ("attn.c_attn",),
        "out": ("attn.c_proj",),
        "norm2": ("ln_2",),
        "up": ("mlp.c_fc",),
        "down": ("mlp.c_proj",),
    },
    ignored=(".attn.bias", ".attn.masked_bias"),  # the causal mask
    has_transposed_matrices=True,
)
LLAMA_NAMES = TransformersNames(
    prefix="model.",
    blocks="layers",
    ends={
        "token": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "head": "lm_head.weight",
    },
    parts={
        "norm1": ("input_layernorm",),
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "query_norm": ("self_attn.q_norm",),
        "key_norm": ("self_attn.k_norm",),
        "out": ("self_attn.o_proj",),
        "norm2": ("post_attention_layernorm",),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
    },
    ignored=(".rotary_emb.inv_freq",),
)
