"""Two slots on disk for a state in memory, and the finished model in Hugging Face's layout.

checkpoint/{a,b}/{tensors.safetensors, manifest.json}: a save writes into `new/`, makes it durable and renames it over
the *older* slot, so that at every instant one whole slot is on disk. `restore` reads the newest slot whose digest
holds; a torn or bit-flipped one is named in the log and passed over. One process uses the folder (the state folder's
lock sees to that).
"""

import json
import logging
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from blake3 import blake3
from pydantic import Field, FiniteFloat, ValidationError
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from barnraise.durable_io import sync_file, sync_folder
from barnraise.errors import StateError
from barnraise.models.gpt2 import NORM_EPSILON, views
from barnraise.protocol.messages import Update
from barnraise.protocol.types import Author, Count, Digest, Id, Message, Sketch
from barnraise.spec import Fragment, ModelSpec
from barnraise.swap.arena import units_to_float

log = logging.getLogger(__name__)

SLOTS = ("a", "b")
TENSORS, MANIFEST = "tensors.safetensors", "manifest.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = 2 << 30  # bytes of an exported file, about


class Mark(Message):
    """What a checkpoint's tensors belong to. `save` fills in `order` and `digest`."""

    format: Literal[1] = 1
    run: Id
    spec: Digest
    step: Count  # the loop's steps, abandoned ones too: the position in the data
    seq: Count = 0  # of my last update in it, 0 before the first
    tokens: Count = 0  # of the ledger
    heads: dict[Author, Update] = {}  # each author's last update in the anchor
    holes: dict[
        Author, dict[int, Count]
    ] = {}  # …and what verdicts took out from among them, with its tokens
    sketches: list[Sketch] = []  # of the anchor's fragments, as their updates add up
    notes: dict[str, int | FiniteFloat | tuple[FiniteFloat, ...]] = Field(
        default={}, max_length=100
    )  # the loop's own
    order: Count = 0  # grows by one a save: the newer slot has the larger
    digest: str = ""  # BLAKE3 of this manifest without its digest, and of the tensors' file


class Checkpoint:
    """The two slots in `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._whole: dict[str, Mark] | None = None  # slot → mark, digests checked once

    def save(self, tensors: dict[str, Tensor], mark: Mark) -> Mark:
        """Keeps host tensors (contiguous) and their mark; returns the mark as written. Never touches the newest whole
        slot."""
        whole = self._slots()
        newest = max(whole, key=lambda slot: whole[slot].order, default=None)
        target = "b" if newest == "a" else "a"
        new = self.folder / "new"
        _remove(new)
        new.mkdir(parents=True)
        save_file(tensors, new / TENSORS)
        mark = mark.model_copy(
            update={"order": whole[newest].order + 1 if newest else 1, "digest": ""}
        )
        mark = mark.model_copy(update={"digest": _digest(mark, new / TENSORS)})
        (new / MANIFEST).write_text(mark.model_dump_json())
        sync_file(new / TENSORS)
        sync_file(new / MANIFEST)
        sync_folder(new)
        whole.pop(target, None)
        _remove(self.folder / target)
        new.rename(self.folder / target)
        sync_folder(self.folder)
        whole[target] = mark
        return mark

    @property
    def mark(self) -> Mark | None:
        """Of the newest whole slot."""
        return max(self._slots().values(), key=lambda mark: mark.order, default=None)

    def restore(self) -> tuple["Saved", Mark] | None:
        """The newest whole slot; None when there is none. Its tensors can be read until the next but one save."""
        whole = self._slots()
        if not whole:
            return None
        slot = max(whole, key=lambda slot: whole[slot].order)
        return Saved(self.folder / slot / TENSORS), whole[slot]

    def clear(self) -> None:
        """Forgets both slots."""
        _remove(self.folder)
        self._whole = None

    def _slots(self) -> dict[str, Mark]:
        if self._whole is None:
            self._whole = {}
            for slot in SLOTS:
                folder = self.folder / slot
                if not folder.exists():
                    continue
                try:
                    self._whole[slot] = _read(folder)
                except (OSError, StateError) as error:
                    log.warning("checkpoint slot %s is damaged and not used: %s", folder, error)
        return self._whole


class Saved(Mapping[str, Tensor]):
    """The tensors of a safetensors file, read one at a time; the file is open only meanwhile."""

    def __init__(self, path: Path):
        self.path = path
        with safe_open(path, "pt") as file:
            self._names = list(file.keys())

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        with safe_open(self.path, "pt") as file:
            return file.get_tensor(name).clone()  # a copy, so that the file can go


def _read(slot: Path) -> Mark:
    """A slot's mark, its digest checked. Raises OSError or StateError."""
    try:
        mark = Mark.model_validate_json((slot / MANIFEST).read_bytes())
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"])) or "its text"
        raise StateError(f"{MANIFEST} is malformed at {where}") from None
    if _digest(mark, slot / TENSORS) != mark.digest:
        raise StateError("its contents are not what its digest says")
    return mark


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def export(
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


def _digest(mark: Mark, tensors: Path) -> str:
    hasher = blake3(mark.model_copy(update={"digest": ""}).model_dump_json().encode())
    return hasher.update_mmap(tensors).hexdigest()
