"""The names of the tensors of Llama's architecture in the transformers library. Pure."""

from collections.abc import Iterator

from barnraise.spec import Fragment, Slot
from barnraise.training.model_files.transformers_tensor import TransformersTensor

PREFIX = "model."
# Fragment slots outside the blocks → their names there.
_NAMES = {
    "token": f"{PREFIX}embed_tokens.weight",
    "norm.weight": f"{PREFIX}norm.weight",
    "head": "lm_head.weight",
}
# Slots of a block → the names of their parts there, in the order of the rows.
_PARTS = {
    "norm1.weight": ("input_layernorm",),
    "qkv.weight": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "query_norm.weight": ("self_attn.q_norm",),
    "key_norm.weight": ("self_attn.k_norm",),
    "out.weight": ("self_attn.o_proj",),
    "norm2.weight": ("post_attention_layernorm",),
    "gate_up.weight": ("mlp.gate_proj", "mlp.up_proj"),
    "down.weight": ("mlp.down_proj",),
}


def transformers_tensors(fragment: Fragment) -> list[TransformersTensor]:
    """List a fragment's tensors under their names in transformers, in the order of its slots."""
    return [tensor for slot in fragment.slots for tensor in _describe(fragment.name, slot)]


def _describe(fragment: str, slot: Slot) -> Iterator[TransformersTensor]:
    if not fragment.startswith("block."):
        yield TransformersTensor(_NAMES[slot.name], slot)
        return
    first = 0
    for part, rows in zip(_PARTS[slot.name], slot.parts or (slot.shape[0],), strict=True):
        name = f"{PREFIX}layers.{fragment.removeprefix('block.')}.{part}.weight"
        yield TransformersTensor(name, slot, first_row=first, rows=rows)
        first += rows
