"""The names and shapes of GPT-2's tensors in the transformers library. Pure."""

from barnraise.spec import Fragment, Slot
from barnraise.training.model_files.transformers_tensor import TransformersTensor

PREFIX = "transformer."  # older files lack it

# Fragment slots outside the blocks → their names in the transformers library.
_NAMES = {
    "token": "wte.weight",
    "position": "wpe.weight",
    "norm.weight": "ln_f.weight",
    "norm.bias": "ln_f.bias",
}
# Parts of a block → their names there.
_PARTS = {
    "norm1": "ln_1",
    "qkv": "attn.c_attn",
    "out": "attn.c_proj",
    "norm2": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}


def transformers_tensors(fragment: Fragment) -> list[TransformersTensor]:
    """List a fragment's tensors under their names in transformers, in the order of its slots."""
    return [_describe(fragment.name, slot) for slot in fragment.slots]


def _describe(fragment: str, slot: Slot) -> TransformersTensor:
    if not fragment.startswith("block."):
        return TransformersTensor(PREFIX + _NAMES[slot.name], slot, is_transposed=False)
    part, kind = slot.name.split(".")
    name = f"{PREFIX}h.{fragment.removeprefix('block.')}.{_PARTS[part]}.{kind}"
    is_matrix = kind == "weight" and not part.startswith("norm")
    return TransformersTensor(name, slot, is_transposed=is_matrix)
