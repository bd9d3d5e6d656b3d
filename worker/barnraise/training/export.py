"""The finished model in Hugging Face's layout of GPT-2."""

import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from barnraise.errors import StateError
from barnraise.models.gpt2 import NORM_EPSILON, views
from barnraise.spec import Fragment, ModelSpec
from barnraise.swap.precision import units_to_float

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = 2 << 30  # bytes of an exported file, about


def export_model(
    folder: Path,
    model: ModelSpec,
    tensors: Mapping[str, Tensor],
    tokenizer: Path | None = None,
    shard: int = SHARD,
) -> None:
    """Writes the anchor (`anchor.<i>` of Engine.state, int32) as Hugging Face's GPT-2: config.json, model.safetensors
    (in shards of some `shard` bytes, with an index, when it is larger) and, for a BPE, tokenizer.json. One fragment is
    in memory at a time. Raises StateError when one is missing or of another shape."""
    shapes = {each.index: _shapes(each) for each in model.fragments()}
    shards: list[list[Fragment]] = [[]]
    for fragment in model.fragments():
        held = sum(4 * each.size for each in shards[-1])
        if held and held + 4 * fragment.size > shard:
            shards.append([])
        shards[-1].append(fragment)
        _units(tensors, fragment)  # what cannot be written whole is not begun
    count = len(shards)
    names = (
        [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
        if count > 1
        else [SINGLE]
    )
    folder.mkdir(parents=True, exist_ok=True)
    for name, fragments in zip(names, shards, strict=True):
        parts = (
            (fragment, views(fragment, units_to_float(_units(tensors, fragment))))
            for fragment in fragments
        )
        layout = {
            target: shape
            for fragment in fragments
            for target, shape in shapes[fragment.index].items()
        }
        _write_tensors(folder / f"{name}.new", layout, parts)
    for old in (*folder.glob("model*.safetensors"), *folder.glob(INDEX)):
        old.unlink()
    for name in names:  # never half a model under these names
        (folder / f"{name}.new").replace(folder / name)
    if count > 1:
        placed = {}
        for name, fragments in zip(names, shards, strict=True):
            placed |= {target: name for fragment in fragments for target in shapes[fragment.index]}
        index = {"metadata": {"total_size": 4 * model.parameters}, "weight_map": placed}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(_config(model), indent=2) + "\n")
    if tokenizer is not None:
        shutil.copyfile(tokenizer, folder / "tokenizer.json")


def _units(tensors: Mapping[str, Tensor], fragment: Fragment) -> Tensor:
    units = tensors.get(f"anchor.{fragment.index}")
    if units is None or units.shape != (fragment.size,):
        raise StateError(f"the state has no {fragment.name} of this model to export")
    return units


def _shapes(fragment: Fragment) -> dict[str, list[int]]:
    """By their names there, in the order of the fragment's own."""
    found = {}
    for slot in fragment.slots:
        target, transposed = _hugging_face(fragment.name, slot.name)
        found[target] = list(reversed(slot.shape)) if transposed else list(slot.shape)
    return found


def _write_tensors(
    path: Path, layout: dict[str, list[int]], parts: Iterable[tuple[Fragment, dict[str, Tensor]]]
) -> None:
    """A safetensors file of fp32 tensors: eight bytes of the header's length, the header as JSON, then the values. By
    hand, because the library wants all of them in memory."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in layout.items():
        size = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for fragment, named in parts:
            for name, tensor in named.items():
                _, transposed = _hugging_face(fragment.name, name)
                values = (
                    (tensor.t() if transposed else tensor)
                    .contiguous()
                    .numpy()
                    .astype("<f4", copy=False)
                )
                file.write(memoryview(values).cast("B"))
        file.flush()
        os.fsync(file.fileno())


_NAMES = {
    "token": "transformer.wte.weight",
    "position": "transformer.wpe.weight",
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
}
_PARTS = {
    "norm1": "ln_1",
    "qkv": "attn.c_attn",
    "out": "attn.c_proj",
    "norm2": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}


def _hugging_face(fragment: str, name: str) -> tuple[str, bool]:
    """(its name there, whether it is a Conv1D's matrix, which lies transposed)."""
    if not fragment.startswith("block."):
        return _NAMES[name], False
    part, kind = name.split(".")
    target = f"transformer.h.{fragment.removeprefix('block.')}.{_PARTS[part]}.{kind}"
    return target, kind == "weight" and not part.startswith("norm")


def _config(model: ModelSpec) -> dict:
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
