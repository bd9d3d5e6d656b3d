"""Checkpoints of a state in memory: two slots on disk, and one is always whole.

checkpoint/{a,b}/{tensors.safetensors, manifest.json}: a save writes into `new/`, makes it durable
and renames it over the *older* slot, so that at every instant one whole slot is on disk.
`CheckpointSlots.load` reads the newest slot whose digest is right; the log names a torn or damaged
one, which is not used. Only one process uses the folder: the lock of the state folder ensures that.
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
    """What the tensors of a saved state belong to.

    `CheckpointSlots.save` sets the last two fields.
    """

    format: Literal[1] = 1  # of the files
    run: Id  # the run's id
    spec: Digest  # digest of the run's spec
    step: Count  # the loop's steps, abandoned ones included: the position in the data
    last_seq: Count = 0  # number of this machine's last update in the anchor, 0 before the first
    tokens: Count = 0  # of all updates in the anchor
    heads: dict[Author, Update] = {}  # each author's last update in the anchor
    retracted: dict[Author, dict[int, Count]] = {}  # author → retracted updates, with their tokens
    sketches: list[Sketch] = []  # of the anchor's fragments, as the updates add up
    # Of the engine, besides its position.
    progress: dict[str, int | FiniteFloat | tuple[FiniteFloat, ...]] = Field(
        default={}, max_length=100
    )
    save_number: Count = 0  # grows by one with every save; the newer slot has the larger number
    digest: str = ""  # BLAKE3 of this header without its digest, and of the tensors' file


class CheckpointSlots:
    """The two slots in `folder`."""

    def __init__(self, folder: Path) -> None:
        """Use the slots in `folder`, which need not exist yet."""
        self.folder = folder
        # slot → header of each whole slot; None: the digests were not verified yet.
        self._headers: dict[str, StateHeader] | None = None

    def save(self, tensors: dict[str, Tensor], header: StateHeader) -> StateHeader:
        """Save tensors and their header over the older slot. The newest whole slot stays.

        Args:
            tensors: contiguous, on the host.
            header: what they belong to.

        Returns:
            The header as it was written.
        """
        headers = self._whole_slots()
        newest = self._newest_slot()
        target = "b" if newest == "a" else "a"
        save_number = headers[newest].save_number + 1 if newest else 1

        # Write the new slot.
        new = self.folder / "new"
        remove_folder(new)
        new.mkdir(parents=True)
        save_file(tensors, new / TENSORS_FILE)
        header = header.model_copy(update={"save_number": save_number, "digest": ""})
        header = header.model_copy(update={"digest": _digest(header, new / TENSORS_FILE)})
        (new / HEADER_FILE).write_text(header.model_dump_json())

        # Make it durable.
        sync_file(new / TENSORS_FILE)
        sync_file(new / HEADER_FILE)
        sync_folder(new)

        # Let it take the place of the older slot.
        headers.pop(target, None)
        remove_folder(self.folder / target)
        new.rename(self.folder / target)
        sync_folder(self.folder)
        headers[target] = header
        return header

    @property
    def header(self) -> StateHeader | None:
        """Return the header of the newest whole slot."""
        newest = self._newest_slot()
        return self._whole_slots()[newest] if newest else None

    def load(self, step: int | None = None) -> tuple["SavedTensors", StateHeader] | None:
        """Return the newest whole slot, or that of a step; None when there is none.

        Its tensors can be read until the next save but one.
        """
        newest = self._newest_slot(step)
        if newest is None:
            return None
        return SavedTensors(self.folder / newest / TENSORS_FILE), self._whole_slots()[newest]

    def remove_after(self, step: int) -> None:
        """Remove the slots of later steps, so that the next save leaves that of this step."""
        headers = self._whole_slots()
        for slot in [slot for slot, header in headers.items() if header.step > step]:
            del headers[slot]
            remove_folder(self.folder / slot)

    def clear(self) -> None:
        """Remove both slots."""
        remove_folder(self.folder)
        self._headers = None

    def _newest_slot(self, step: int | None = None) -> str | None:
        headers = self._whole_slots()
        slots = [slot for slot, header in headers.items() if step in (None, header.step)]
        return max(slots, key=lambda slot: headers[slot].save_number, default=None)

    def _whole_slots(self) -> dict[str, StateHeader]:
        """Return the headers of the whole slots. Their digests are verified once."""
        if self._headers is None:
            self._headers = {}
            for slot in SLOTS:
                folder = self.folder / slot
                if not folder.exists():
                    continue
                try:
                    self._headers[slot] = _read_header(folder)
                except (OSError, StateError) as error:
                    log.warning("checkpoint slot %s is damaged and not used: %s", folder, error)
        return self._headers


class SavedTensors(Mapping[str, Tensor]):
    """The tensors of a safetensors file, read one at a time. The file is open only meanwhile."""

    def __init__(self, path: Path) -> None:
        """Read the tensors' names."""
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
            return file.get_tensor(name).clone()  # a copy, so that the file can be removed


def _read_header(slot: Path) -> StateHeader:
    """Read a slot's header and verify its digest.

    Raises:
        OSError: A file cannot be read.
        StateError: The slot is damaged.
    """
    try:
        header = StateHeader.model_validate_json((slot / HEADER_FILE).read_bytes())
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"])) or "its text"
        raise StateError(f"{HEADER_FILE} is malformed at {where}") from None
    if _digest(header, slot / TENSORS_FILE) != header.digest:
        raise StateError("its contents are not what its digest says")
    return header


def _digest(header: StateHeader, tensors: Path) -> str:
    hasher = blake3(header.model_copy(update={"digest": ""}).model_dump_json().encode())
    return hasher.update_mmap(tensors).hexdigest()


def remove_folder(folder: Path) -> None:
    """Remove a folder with everything in it, if it exists."""
    if folder.exists():
        shutil.rmtree(folder)
