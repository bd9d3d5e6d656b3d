"""Two slots on disk for a state in memory, and the finished model in Hugging Face's layout.

checkpoint/{a,b}/{tensors.safetensors, manifest.json}: a save writes into `new/`, makes it durable and renames it over
the *older* slot, so that at every instant one whole slot is on disk. `restore` reads the newest slot whose digest
holds; a torn or bit-flipped one is named in the log and passed over. One process uses the folder (the state folder's
lock sees to that).
"""

import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from blake3 import blake3
from pydantic import Field, FiniteFloat, ValidationError
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from barnraise.durable_io import sync_file, sync_folder
from barnraise.errors import StateError
from barnraise.protocol.messages import Update
from barnraise.protocol.types import Author, Count, Digest, Id, Message, Sketch

log = logging.getLogger(__name__)

SLOTS = ("a", "b")
TENSORS_FILE, HEADER_FILE = "tensors.safetensors", "manifest.json"


class StateHeader(Message):
    """What a checkpoint's tensors belong to. `save` fills in `order` and `digest`."""

    format: Literal[1] = 1
    run: Id
    spec: Digest
    step: Count  # the loop's steps, abandoned ones too: the position in the data
    last_seq: Count = 0  # of my last update in it, 0 before the first
    tokens: Count = 0  # of the ledger
    heads: dict[Author, Update] = {}  # each author's last update in the anchor
    retracted: dict[
        Author, dict[int, Count]
    ] = {}  # …and what verdicts took out from among them, with its tokens
    sketches: list[Sketch] = []  # of the anchor's fragments, as their updates add up
    progress: dict[str, int | FiniteFloat | tuple[FiniteFloat, ...]] = Field(
        default={}, max_length=100
    )  # the loop's own
    save_number: Count = 0  # grows by one a save: the newer slot has the larger
    digest: str = ""  # BLAKE3 of this manifest without its digest, and of the tensors' file


class Checkpoint:
    """The two slots in `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._whole: dict[str, StateHeader] | None = None  # slot → mark, digests checked once

    def save(self, tensors: dict[str, Tensor], mark: StateHeader) -> StateHeader:
        """Keeps host tensors (contiguous) and their mark; returns the mark as written. Never touches the newest whole
        slot."""
        whole = self._slots()
        newest = max(whole, key=lambda slot: whole[slot].save_number, default=None)
        target = "b" if newest == "a" else "a"
        new = self.folder / "new"
        _remove(new)
        new.mkdir(parents=True)
        save_file(tensors, new / TENSORS_FILE)
        mark = mark.model_copy(
            update={"save_number": whole[newest].save_number + 1 if newest else 1, "digest": ""}
        )
        mark = mark.model_copy(update={"digest": _digest(mark, new / TENSORS_FILE)})
        (new / HEADER_FILE).write_text(mark.model_dump_json())
        sync_file(new / TENSORS_FILE)
        sync_file(new / HEADER_FILE)
        sync_folder(new)
        whole.pop(target, None)
        _remove(self.folder / target)
        new.rename(self.folder / target)
        sync_folder(self.folder)
        whole[target] = mark
        return mark

    @property
    def header(self) -> StateHeader | None:
        """Of the newest whole slot."""
        return max(self._slots().values(), key=lambda mark: mark.save_number, default=None)

    def load(self) -> tuple["SavedTensors", StateHeader] | None:
        """The newest whole slot; None when there is none. Its tensors can be read until the next but one save."""
        whole = self._slots()
        if not whole:
            return None
        slot = max(whole, key=lambda slot: whole[slot].save_number)
        return SavedTensors(self.folder / slot / TENSORS_FILE), whole[slot]

    def clear(self) -> None:
        """Forgets both slots."""
        _remove(self.folder)
        self._whole = None

    def _slots(self) -> dict[str, StateHeader]:
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


class SavedTensors(Mapping[str, Tensor]):
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


def _read(slot: Path) -> StateHeader:
    """A slot's mark, its digest checked. Raises OSError or StateError."""
    try:
        mark = StateHeader.model_validate_json((slot / HEADER_FILE).read_bytes())
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"])) or "its text"
        raise StateError(f"{HEADER_FILE} is malformed at {where}") from None
    if _digest(mark, slot / TENSORS_FILE) != mark.digest:
        raise StateError("its contents are not what its digest says")
    return mark


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _digest(mark: StateHeader, tensors: Path) -> str:
    hasher = blake3(mark.model_copy(update={"digest": ""}).model_dump_json().encode())
    return hasher.update_mmap(tensors).hexdigest()
