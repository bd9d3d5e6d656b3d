"""The state of every fragment on its tier: in memory, or as records in one file on disk.

The kinds of state are weights, moments, anchor, momentum and feedback. A state on disk consists of
records, one for each (kind, fragment, tile), and a manifest. With `exact` crash safety each record
has two slots. A write goes to the slot that the manifest does not name; once all bytes are durable,
a new manifest, fsynced and renamed into place, switches all slots at once. With `restart` only the
anchor has two slots. The other kinds are written in place, and the manifest states for each whether
it is valid: before the first such write it is marked invalid. Either way, what a manifest names is
intact, at whatever instant a crash comes. The manifest holds each record's checksum, which is
verified on every read.
"""

import datetime
import json
import threading
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from barnraise.durable_io import write_atomically
from barnraise.errors import DamageError, StateError
from barnraise.planning.plan import STATE_KINDS, Plan
from barnraise.spec import ADAMW
from barnraise.swap.arena import Arena, page_aligned
from barnraise.swap.device import has_streams
from barnraise.swap.direct_io import DirectFile, checksum

FORMAT = 1
MANIFEST_FILE, STATE_FILE = "manifest.json", "state.bin"
TRAINING_KINDS, EXCHANGE_KINDS = ("weights", "moments"), ("momentum", "feedback")
Key = tuple[str, int, int]  # kind, fragment, tile
Slot = tuple[int, int]  # number of the slot, checksum of the record in it


class StateStore:
    """The state of one machine in one run under one plan.

    Attributes:
        host: the arena of host memory.
        device: the arena of the device's memory.
        plan: what lies where.
        folder: where the state on disk lies; None for a state in memory.
        header: what the last commit named as the state's owner and progress; None for a fresh
            state.
        invalid_kinds: kinds of state that the manifest marks as invalid.
        written_today: bytes written on this UTC day.
    """

    def __init__(self, plan: Plan, folder: Path | None = None) -> None:
        """Allocate all memory and disk space that the state needs.

        Raises:
            StateError: names what is missing.
        """
        assert plan.on_disk == (folder is not None)
        device = torch.device(plan.device)
        self.host, self.device = Arena(pins=has_streams(device)), Arena(device)
        self.plan, self.folder = plan, folder
        self.header: str | None = None
        self.invalid_kinds: set[str] = set()
        self.written_today, self._day = 0, _utc_date()
        self._memory: dict[tuple[str, int], Tensor] = {}
        # Buffers for tiles on disk between steps, by kind, and whether a device's update uses them.
        self._tile_scratch: dict[tuple[str, bool], Tensor] = {}
        self._newest: dict[Key, Slot] = {}  # what was written last
        self._committed: dict[Key, Slot] = {}  # what the manifest names
        self._lock = threading.Lock()
        self._disk: DirectFile | None = None
        try:
            self._allocate_memory()
            if folder is not None:
                self._allocate_tile_scratch()
                self._lay_out_records()
                self._disk = DirectFile(folder / STATE_FILE, self._file_size)
                self._load_manifest(folder)
        except BaseException:
            self.close()
            raise

    def _allocate_memory(self) -> None:
        """Allocate the records that memory holds.

        A device copies from the weights, and the moments of what it updates for the host.
        """
        for kind, i in self._kinds_and_fragments():
            size = self.plan.total_bytes(kind, i)
            match self._tier_of(kind, i):
                case "device":
                    self._memory[kind, i] = self.device.allocate(size)
                case "host":
                    moves = kind == "moments" and self.plan.updates_on_device(i)
                    crosses_link = kind == "weights" or moves
                    self._memory[kind, i] = self.host.allocate(size, crosses_link)

    def _allocate_tile_scratch(self) -> None:
        """Allocate a buffer for one tile of each kind, and those of a device's updates.

        A device updates fragments while the optimizer's lane updates others.
        """
        plan = self.plan
        size = plan.record_bytes("anchor", plan.largest_tile)  # as large as fp32 weights
        for kind in STATE_KINDS:
            record_bytes = plan.largest_record_bytes("moments") if kind == "moments" else size
            self._tile_scratch[kind, False] = self.host.allocate(record_bytes)
        for kind in ("anchor", "momentum") if plan.any_on_device else ():
            self._tile_scratch[kind, True] = self.host.allocate(size)

    @property
    def _disk_file(self) -> DirectFile:
        assert self._disk is not None, "this state lies in memory, or is closed"
        return self._disk

    def _kinds_and_fragments(self) -> Iterator[tuple[str, int]]:
        return ((kind, i) for kind in STATE_KINDS for i in self.plan.local_fragments)

    def _tier_of(self, kind: str, i: int) -> str:
        plan = self.plan
        if plan.ranks and kind in TRAINING_KINDS:
            return "ranks"  # which have them in memory of their own
        return {"weights": plan.weights[i], "moments": plan.moments[i]}.get(kind, plan.exchange)

    def _lay_out_records(self) -> None:
        """Decide where each record lies in the file."""
        self._offsets: dict[Key, int] = {}
        self._sizes: dict[Key, int] = {}
        spilled = [("gradient", i) for i in self.plan.blocks if self.plan.spills_gradient(i)]
        offset = 0
        for kind, i in (*self._kinds_and_fragments(), *spilled):
            for t, size in enumerate(self.plan.tile_record_bytes(kind, i)):
                self._offsets[kind, i, t], self._sizes[kind, i, t] = offset, size
                offset += size * self._slot_count(kind)
        self._file_size = offset

    def _slot_count(self, kind: str) -> int:
        return 2 if kind != "gradient" and self.plan.has_two_slots(kind) else 1

    # ---- memory --------------------------------------------------------------------------------

    def memory_buffer(self, kind: str, i: int) -> Tensor | None:
        """Return all records of a fragment, uint8, if memory holds them."""
        return self._memory.get((kind, i))

    def memory_record(self, kind: str, i: int, t: int) -> Tensor:
        """Return the record, uint8, of a tile that memory holds."""
        return self._memory[kind, i][self.record_slice(kind, i, t)]

    def load_tile(
        self, kind: str, i: int, t: int, reads: bool = True, for_device: bool = False
    ) -> Tensor:
        """Return a tile's record, uint8: by reference if in memory, else read into a buffer.

        The next tile of this kind overwrites the buffer. Without `reads`, its content stays what it
        was. `for_device`: a device updates the tile, maybe while the optimizer's lane works.
        """
        if (kind, i) in self._memory:
            return self.memory_record(kind, i, t)
        target = self._tile_scratch[kind, for_device][: self._sizes[kind, i, t]]
        if reads:
            self.read(kind, i, t, target)
        return target

    def store_tile(self, kind: str, i: int, t: int, record: Tensor) -> None:
        """Write a changed record of `load_tile` to disk, if disk is its tier or follows memory."""
        if self.folder is not None and (
            self._tier_of(kind, i) == "disk" or self.plan.commits_steps
        ):
            self.write(kind, i, t, record)

    def record_slice(self, kind: str, i: int, t: int) -> slice:
        """Return where a tile's record lies among its fragment's records."""
        sizes = self.plan.tile_record_bytes(kind, i)
        begin = sum(sizes[:t])
        return slice(begin, begin + sizes[t])

    # ---- disk ----------------------------------------------------------------------------------

    def was_written(self, kind: str, i: int, t: int) -> bool:
        """Return whether the tile was ever written to disk."""
        return (kind, i, t) in self._newest

    def read(self, kind: str, i: int, t: int, target: Tensor) -> None:
        """Read the record that was written last into uint8 [record]; zeros before the first write.

        Raises:
            OSError: the disk failed.
            DamageError: the disk returned other bytes than were written.
        """
        if not self.was_written(kind, i, t):
            target.zero_()
            return
        slot, expected = self._newest[kind, i, t]
        self._disk_file.read(self._offset_of(kind, i, t, slot), target)
        if checksum(target) != expected:
            self.mark_invalid(kind)
            name = self.plan.fragments[i].name
            raise DamageError(
                f"{self._disk_file.path}: the {kind} of {name} are not what was written there. "
                "Training stopped; joining again goes on from what is intact. Check this disk"
            )

    def write(self, kind: str, i: int, t: int, record: Tensor) -> None:
        """Write a record to the slot that the manifest does not name, or to its only slot.

        Raises:
            OSError: the disk failed.
        """
        key = (kind, i, t)
        slot = 0
        if self._slot_count(kind) == 2:
            slot = 1 - self._committed.get(key, (1, 0))[0]
        elif kind != "gradient" and self.header is not None and kind not in self.invalid_kinds:
            self.mark_invalid(kind)
        if record.device.type != "cpu":
            record = page_aligned(record.numel()).copy_(record)
        digest = checksum(record)
        self._disk_file.write(self._offset_of(kind, i, t, slot), record)
        with self._lock:
            self._newest[key] = (slot, digest)
            if self._day != _utc_date():
                self._day, self.written_today = _utc_date(), 0
            self.written_today += record.numel()

    def read_fragment(self, kind: str, i: int, target: Tensor) -> None:
        """Read all records of a fragment into uint8 [their bytes]; see `read`."""
        for t in range(self.plan.tile_count(i)):
            self.read(kind, i, t, target[self.record_slice(kind, i, t)])

    def write_fragment(self, kind: str, i: int, source: Tensor) -> None:
        """Write all records of a fragment from uint8 [their bytes]; see `write`."""
        for t in range(self.plan.tile_count(i)):
            self.write(kind, i, t, source[self.record_slice(kind, i, t)])

    def write_memory_records(self, kinds: Sequence[str]) -> None:
        """Write what memory holds of these kinds to disk, before a commit."""
        for (kind, i), buffer in self._memory.items():
            if kind in kinds:
                self.write_fragment(kind, i, buffer)

    def clear(self, kind: str) -> None:
        """Set a kind of state to zero on every tier."""
        for i in self.plan.local_fragments:
            buffer = self._memory.get((kind, i))
            if buffer is not None:
                buffer.zero_()
            for t in range(self.plan.tile_count(i)):
                self._newest.pop((kind, i, t), None)

    def commit(self, header: str, training_valid: bool = True) -> None:
        """Make everything written since the last commit, with `header`, the state to recover.

        `training_valid`: whether weights and moments that are written in place are complete.

        Raises:
            OSError: the disk failed. The last manifest is still valid then.
        """
        self._disk_file.sync()
        self.header = header
        valid = training_valid or self.plan.commits_steps
        self.invalid_kinds = set() if valid else set(TRAINING_KINDS)
        self._committed = {key: slot for key, slot in self._newest.items() if key[0] != "gradient"}
        self._write_manifest()

    def mark_invalid(self, kind: str) -> None:
        """Mark this kind as invalid in the manifest, with the kinds that are useless without it."""
        with self._lock:
            group: Sequence[str] = STATE_KINDS
            if kind in TRAINING_KINDS:
                group = TRAINING_KINDS
            elif kind in EXCHANGE_KINDS:
                group = EXCHANGE_KINDS
            if self.header is not None and not self.invalid_kinds.issuperset(group):
                self.invalid_kinds |= set(group)
                self._write_manifest()

    def record_extents(self) -> dict[Key, tuple[int, int]]:
        """Return (offset, bytes) of each record in the file, including both slots."""
        return {
            key: (offset, self._sizes[key] * self._slot_count(key[0]))
            for key, offset in self._offsets.items()
        }

    def newest_offset(self, kind: str, i: int, t: int) -> int:
        """Return the offset in the file of the record that was written last."""
        return self._offset_of(kind, i, t, self._newest[kind, i, t][0])

    def _offset_of(self, kind: str, i: int, t: int, slot: int) -> int:
        return self._offsets[kind, i, t] + slot * self._sizes[kind, i, t]

    def may_write_step(self) -> bool:
        """Return whether the plan's limit of writes leaves enough of this UTC day for a step."""
        daily = self.plan.daily_write_limit
        written = self.written_today if self._day == _utc_date() else 0
        return daily is None or self.plan.written_per_step <= max(0, daily - written)

    def close(self) -> None:
        """Free the memory and close the file; nothing of the state can be read after it."""
        self._memory.clear()
        self._tile_scratch.clear()
        self.host.close()
        if self._disk is not None:
            self._disk.close()
            self._disk = None

    # ---- manifest ------------------------------------------------------------------------------

    @staticmethod
    def layout_of(plan: Plan) -> dict[str, Any]:
        """Return what decides, besides the model, where records lie and what is in them.

        Which records memory holds is not part of it: a state survives a change of limits.
        """
        layout = {
            "format": FORMAT,
            "tile": plan.tile,
            "crash_safety": plan.crash_safety,
            "dtype": plan.dtype,
            "moments_bits": plan.moments_bits,
        }
        if plan.optimizer != ADAMW:  # which earlier versions do not name
            layout["optimizer"] = plan.optimizer
        if plan.is_stage:
            layout["fragments"] = list(plan.local_fragments)
        return layout

    def _write_manifest(self) -> None:
        assert self.folder is not None
        slots: dict[str, list[list[list[int]]]] = {}
        for kind in STATE_KINDS:
            for i in range(self.plan.last_fragment + 1):
                tiles = [self._committed.get((kind, i, t)) for t in range(self.plan.tile_count(i))]
                slots.setdefault(kind, []).append([list(slot) if slot else [] for slot in tiles])
        body = {
            "layout": self.layout_of(self.plan),
            "header": self.header,
            "invalid": sorted(self.invalid_kinds),
            "day": self._day,
            "written": self.written_today,
            "slots": slots,
        }
        text = json.dumps(body)
        envelope = json.dumps({"digest": sha256(text.encode()).hexdigest(), "body": text})
        write_atomically(self.folder / MANIFEST_FILE, envelope.encode())

    def _load_manifest(self, folder: Path) -> None:
        """Adopt the state that the manifest in the folder names, if there is one."""
        body = read_manifest(folder)
        if body is None:
            return
        if body["layout"] != self.layout_of(self.plan):
            raise StateError(
                f"{folder} holds a state with another layout; give the limits it was created with, "
                "or remove it"
            )
        self.header, self.invalid_kinds = body["header"], set(body["invalid"])
        self._day, self.written_today = body["day"], body["written"]
        for kind, fragments in body["slots"].items():
            for i, tiles in enumerate(fragments):
                for t, slot in enumerate(tiles):
                    if slot:
                        self._committed[kind, i, t] = (slot[0], slot[1])
        self._newest = {
            key: slot for key, slot in self._committed.items() if key[0] not in self.invalid_kinds
        }
        self._load_memory_records()

    def _load_memory_records(self) -> None:
        """Read from disk what memory holds."""
        for kind, i in self._memory:
            for t in range(self.plan.tile_count(i)):
                if not self.was_written(kind, i, t):
                    continue
                target = self.memory_record(kind, i, t)
                if target.device.type == "cpu":
                    self.read(kind, i, t, target)
                else:
                    record = page_aligned(target.numel())
                    self.read(kind, i, t, record)
                    target.copy_(record)


class FragmentSequence(Sequence[Tensor]):
    """One int32 or fp32 kind of state as a sequence of fragments.

    `sequence[i]` is a fragment's tensor: by reference where memory holds it, else a copy from disk.
    `sequence[i] = tensor` stores it.
    """

    def __init__(self, store: StateStore, kind: str, dtype: torch.dtype = torch.int32) -> None:
        """View `kind` of the state in `store`, whose elements have four bytes each, as `dtype`."""
        self._store, self._kind, self._dtype = store, kind, dtype

    def __len__(self) -> int:
        return self._store.plan.last_fragment + 1

    def __getitem__(self, i: int) -> Tensor:
        i = range(len(self))[i]
        store, size = self._store, self._store.plan.fragments[i].size
        buffer = store.memory_buffer(self._kind, i)
        if buffer is None:
            buffer = page_aligned(store.plan.total_bytes(self._kind, i))
            store.read_fragment(self._kind, i, buffer)
        return buffer.view(self._dtype)[:size]

    def __setitem__(self, i: int, tensor: Tensor) -> None:
        i = range(len(self))[i]
        store, kind = self._store, self._kind
        buffer = store.memory_buffer(kind, i)
        if buffer is None:
            buffer = page_aligned(store.plan.total_bytes(kind, i))
        flat = buffer.view(self._dtype)[: tensor.numel()]
        if flat.data_ptr() != tensor.data_ptr():
            flat.copy_(tensor)
        for t in range(store.plan.tile_count(i)):
            store.store_tile(kind, i, t, buffer[store.record_slice(kind, i, t)])


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the body of a state's manifest; None where there is no manifest.

    Raises:
        StateError: it is damaged; the message says what to remove.
    """
    try:
        text = (folder / MANIFEST_FILE).read_text()
    except FileNotFoundError:
        return None
    try:
        envelope = json.loads(text)
        if sha256(envelope["body"].encode()).hexdigest() != envelope["digest"]:
            raise ValueError("its digest does not match")
        return json.loads(envelope["body"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(
            f"{folder / MANIFEST_FILE} is damaged ({error}): remove {folder} and join again"
        ) from None


def _utc_date() -> str:
    """Return the UTC date in ISO 8601."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()
