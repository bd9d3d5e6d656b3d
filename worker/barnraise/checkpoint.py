"""Two slots on disk for this machine's state, and the finished model in Hugging Face's layout.

checkpoint/{a,b}/{tensors.safetensors, manifest.json}: a save writes into `new/`, makes it durable and renames it over
the *older* slot, so that at every instant one whole slot is on disk. `restore` reads the newest slot whose digest
holds; a torn or bit-flipped one is named in the log and passed over. One process uses the folder (the state folder's
lock sees to that).
"""

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Literal

from blake3 import blake3
from pydantic import Field, FiniteFloat, ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor

from barnraise.errors import StateError
from barnraise.model import NORM_EPSILON, views
from barnraise.spec import ModelSpec
from barnraise.swap.arena import to_float
from barnraise.wire import Author, Count, Digest, Id, Message, Update

log = logging.getLogger(__name__)

SLOTS = ("a", "b")
TENSORS, MANIFEST = "tensors.safetensors", "manifest.json"


class Mark(Message):
    """What a checkpoint's tensors belong to. `save` fills in `order` and `digest`."""

    format: Literal[1] = 1
    run: Id
    spec: Digest
    step: Count  # the loop's steps, abandoned ones too: the position in the data
    seq: Count = 0  # of my last update in it, 0 before the first
    tokens: Count = 0  # of the ledger
    heads: dict[Author, Update] = {}  # each author's last update in the anchor
    notes: dict[str, int | FiniteFloat | str] = Field(default={}, max_length=100)  # the loop's own counters
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
        mark = mark.model_copy(update={"order": whole[newest].order + 1 if newest else 1, "digest": ""})
        mark = mark.model_copy(update={"digest": _digest(mark, new / TENSORS)})
        (new / MANIFEST).write_text(mark.model_dump_json())
        for path in (new / TENSORS, new / MANIFEST, new):
            _sync(path)
        whole.pop(target, None)
        _remove(self.folder / target)
        new.rename(self.folder / target)
        _sync(self.folder)
        whole[target] = mark
        return mark

    def restore(self) -> tuple[dict[str, Tensor], Mark] | None:
        """The newest whole slot; None when there is none."""
        whole = self._slots()
        if not whole:
            return None
        slot = max(whole, key=lambda slot: whole[slot].order)
        mapped = load_file(self.folder / slot / TENSORS)
        return {name: tensor.clone() for name, tensor in mapped.items()}, whole[slot]  # so that the file can go

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


def export(folder: Path, model: ModelSpec, tensors: dict[str, Tensor], tokenizer: Path | None = None) -> None:
    """Writes the anchor (`anchor.<i>` of Engine.state, int32) as Hugging Face's GPT-2: config.json, model.safetensors
    and, for a BPE, tokenizer.json. Raises StateError when an anchor's fragment is missing or of another shape."""
    named: dict[str, Tensor] = {}
    for fragment in model.fragments():
        units = tensors.get(f"anchor.{fragment.index}")
        if units is None or units.shape != (fragment.size,):
            raise StateError(f"the state has no {fragment.name} of this model to export")
        for name, tensor in views(fragment, to_float(units)).items():
            target, transposed = _hugging_face(fragment.name, name)
            named[target] = (tensor.t() if transposed else tensor).contiguous().clone()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(named, folder / "model.safetensors.new", metadata={"format": "pt"})
    (folder / "model.safetensors.new").replace(folder / "model.safetensors")  # never half a model under that name
    (folder / "config.json").write_text(json.dumps(_config(model), indent=2) + "\n")
    if tokenizer is not None:
        shutil.copyfile(tokenizer, folder / "tokenizer.json")


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


def _sync(path: Path) -> None:
    """Makes a file or a folder durable. Windows cannot open a folder, and orders renames by itself."""
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDWR if path.is_file() and os.name != "posix" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
