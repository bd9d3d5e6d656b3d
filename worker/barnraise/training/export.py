"""Export the anchor in the layout of the transformers library's GPT-2."""

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from barnraise.errors import StateError
from barnraise.models.gpt2 import NORM_EPSILON, views
from barnraise.spec import Fragment, ModelSpec
from barnraise.swap.precision import units_to_float

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 2 << 30  # of an exported file, about


def export_model(
    folder: Path,
    model: ModelSpec,
    tensors: Mapping[str, Tensor],
    tokenizer: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write config.json, the weights and the tokenizer. One fragment is in memory at a time.

    Args:
        folder: receives the files.
        model: the architecture.
        tensors: a state as `Engine.state_dict` names it; of it, `anchor.<i>` (int32 [n]).
        tokenizer: a tokenizer.json to copy, if there is one.
        shard_bytes: size of a safetensors file, about. A larger model is written in several, with
            an index.

    Raises:
        StateError: A fragment is missing or of another shape. Then nothing is written.
    """
    for fragment in model.fragments():
        _get_units(tensors, fragment)
    shards = _split_into_shards(model, shard_bytes)
    count = len(shards)
    names = [SINGLE_FILE]
    if count > 1:
        names = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]

    # Write the new files under temporary names, so that no half of a model has a final one.
    folder.mkdir(parents=True, exist_ok=True)
    for name, fragments in zip(names, shards, strict=True):
        _write_tensors(folder / f"{name}.new", fragments, tensors)
    for old in (*folder.glob("model*.safetensors"), *folder.glob(INDEX_FILE)):
        old.unlink()
    for name in names:
        (folder / f"{name}.new").replace(folder / name)

    if count > 1:
        weight_map = {
            target: name
            for name, fragments in zip(names, shards, strict=True)
            for fragment in fragments
            for target in _target_shapes(fragment)
        }
        index = {"metadata": {"total_size": 4 * model.parameters}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(_config(model), indent=2) + "\n")
    if tokenizer is not None:
        shutil.copyfile(tokenizer, folder / "tokenizer.json")


def _split_into_shards(model: ModelSpec, shard_bytes: int) -> list[list[Fragment]]:
    shards: list[list[Fragment]] = [[]]
    for fragment in model.fragments():
        size = sum(4 * earlier.size for earlier in shards[-1])
        if size and size + 4 * fragment.size > shard_bytes:
            shards.append([])
        shards[-1].append(fragment)
    return shards


def _get_units(tensors: Mapping[str, Tensor], fragment: Fragment) -> Tensor:
    units = tensors.get(f"anchor.{fragment.index}")
    if units is None or units.shape != (fragment.size,):
        raise StateError(f"the state has no {fragment.name} of this model to export")
    return units


def _target_shapes(fragment: Fragment) -> dict[str, list[int]]:
    """Return name in transformers → shape there, in the order of the fragment's slots."""
    shapes = {}
    for slot in fragment.slots:
        target, is_transposed = _target_name(fragment.name, slot.name)
        shapes[target] = list(reversed(slot.shape)) if is_transposed else list(slot.shape)
    return shapes


def _write_tensors(path: Path, fragments: list[Fragment], tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file of fp32 tensors, one fragment after the other.

    The format: eight bytes of the header's length, the header as JSON, then the values. The
    safetensors library cannot write it without having all tensors in memory.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for fragment in fragments:
        for name, shape in _target_shapes(fragment).items():
            size = 4 * math.prod(shape)
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
            offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for fragment in fragments:
            weights = views(fragment, units_to_float(_get_units(tensors, fragment)))
            for name, tensor in weights.items():
                _, is_transposed = _target_name(fragment.name, name)
                values = (tensor.t() if is_transposed else tensor).contiguous().numpy()
                file.write(values.astype("<f4", copy=False).data.cast("B"))
        file.flush()
        os.fsync(file.fileno())


# Fragment slots outside the blocks → their names in the transformers library.
_NAMES = {
    "token": "transformer.wte.weight",
    "position": "transformer.wpe.weight",
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
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


def _target_name(fragment: str, name: str) -> tuple[str, bool]:
    """Return a slot's name in transformers, and whether it is a Conv1D's transposed matrix."""
    if not fragment.startswith("block."):
        return _NAMES[name], False
    part, kind = name.split(".")
    target = f"transformer.h.{fragment.removeprefix('block.')}.{_PARTS[part]}.{kind}"
    return target, kind == "weight" and not part.startswith("norm")


def _config(model: ModelSpec) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": model.vocabulary,
        "n_positions": model.context,
        "n_ctx": model.context,
        "n_embd": model.width,
        "n_layer": model.layers,
        "n_head": model.heads,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": NORM_EPSILON,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }
