"""Every kind of state of every fragment, on its tier: what memory holds, and what one file on disk does.

A state on disk is records, one a (kind, fragment, tile), and a manifest. With `exact` crash safety each record has two
slots: writing goes to the one the manifest does not name, and a new manifest, fsynced and renamed into place once all
the bytes are durable, turns them over together. With `restart` only the anchor has two; the other kinds are written in
place, and a manifest says of each whether it is whole: before the first such write it is made to say that it is not.
Either way what a manifest names is whole, whatever instant a crash came at. Each record's checksum is in the manifest
and looked at whenever the record is read.
"""

import datetime
import json
import threading
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from barnraise.durable_io import write_atomically
from barnraise.errors import DamageError, StateError
from barnraise.planning.plan import KINDS, Plan
from barnraise.swap.arena import Arena, page_aligned
from barnraise.swap.lanes import DirectFile, checksum

FORMAT = 1
MANIFEST_FILE, STATE_FILE = "manifest.json", "state.bin"
TRAINING_KINDS, EXCHANGE_KINDS = ("weights", "moments"), ("momentum", "feedback")
Key = tuple[str, int, int]  # kind, fragment, tile


class StateStore:
    """The state of one machine in one run under one plan. `folder` is None for a state in memory alone.

    `mark`: what the manifest says the state belongs to, None for a fresh one. `void`: kinds it says are not whole.
    """

    def __init__(self, plan: Plan, folder: Path | None = None):
        """Takes all memory and disk that the state needs. Raises StateError naming what is missing."""
        assert plan.on_disk == (folder is not None)
        cuda = torch.device("cuda") if plan.device == "cuda" else None
        self.host, self.device = Arena(registered=cuda is not None), Arena(cuda)
        self.plan, self.folder = plan, folder
        self.header: str | None = None
        self.invalid_kinds: set[str] = set()
        self.written_today, self._day = 0, _today()
        self._held: dict[tuple[str, int], Tensor] = {}
        for kind, i in self._all():
            if (tier := self._tier(kind, i)) != "disk":
                arena = self.device if tier == "device" else self.host
                self._held[kind, i] = arena.allocate(plan.total(kind, i))
        self._newest: dict[Key, tuple[int, int]] = {}  # (slot, checksum) of what was written last
        self._kept: dict[Key, tuple[int, int]] = {}  # …of what the manifest names
        self._turn = threading.Lock()
        if folder is None:
            return
        self._place()
        self._disk = DirectFile(folder / STATE_FILE, self._end)
        try:
            self._read_manifest()
        except BaseException:
            self._disk.close()
            raise

    def _all(self) -> Iterator[tuple[str, int]]:
        return ((kind, i) for kind in KINDS for i in range(self.plan.last + 1))

    def _tier(self, kind: str, i: int) -> str:
        plan = self.plan
        return {"weights": plan.weights[i], "moments": plan.moments[i]}.get(kind, plan.exchange)

    def _place(self) -> None:
        """Where each record lies."""
        self._offsets: dict[Key, int] = {}
        self._sizes: dict[Key, int] = {}
        at = 0
        for kind, i in (
            *self._all(),
            *(("gradient", i) for i in self.plan.blocks if self.plan.spilled(i)),
        ):
            for t, size in enumerate(
                self.plan.records("anchor" if kind == "gradient" else kind, i)
            ):
                self._offsets[kind, i, t], self._sizes[kind, i, t] = at, size
                at += size * (2 if kind != "gradient" and self.plan.two_slots(kind) else 1)
        self._end = at

    # ---- memory ----------------------------------------------------------------------------------------------

    def memory_buffer(self, kind: str, i: int) -> Tensor | None:
        """uint8 [all records of the fragment], when memory holds them."""
        return self._held.get((kind, i))

    def load_tile(self, kind: str, i: int, t: int, spare: Tensor) -> Tensor:
        """uint8 [record]: where memory holds it, or read into `spare`."""
        if (held := self._held.get((kind, i))) is not None:
            return held[self.record_slice(kind, i, t)]
        into = spare[: self._sizes[kind, i, t]]
        self.read(kind, i, t, into)
        return into

    def store_tile(self, kind: str, i: int, t: int, data: Tensor) -> None:
        """A tile that was changed, where `tile` gave it: to disk, if that is its home or must follow."""
        if self.folder is not None and (self._tier(kind, i) == "disk" or self.plan.commits_steps):
            self.write(kind, i, t, data)

    def record_slice(self, kind: str, i: int, t: int) -> slice:
        """Where a tile's record lies among its fragment's."""
        begin = t * self.plan.record(kind, self.plan.tile)
        return slice(begin, begin + self.plan.record(kind, self._elements(i, t)))

    def memory_record(self, kind: str, i: int, t: int) -> Tensor:
        """uint8 [record] of a tile that memory holds."""
        return self._held[kind, i][self.record_slice(kind, i, t)]

    def _elements(self, i: int, t: int) -> int:
        begin, end = self.plan.bounds(i, t)
        return end - begin

    def was_written(self, kind: str, i: int, t: int) -> bool:
        """Whether the tile was ever written to disk."""
        return (kind, i, t) in self._newest

    # ---- disk ------------------------------------------------------------------------------------------------

    def read(self, kind: str, i: int, t: int, into: Tensor) -> None:
        """What was written last, into uint8 [record]; zeros before the first. Raises OSError, and DamageError for other
        bytes than those that were written."""
        if not self.was_written(kind, i, t):
            into.zero_()
            return
        slot, wanted = self._newest[kind, i, t]
        self._disk.read(self._offset(kind, i, t, slot), into)
        if checksum(into) != wanted:
            self.mark_invalid(kind)
            name = self.plan.fragments[i].name
            raise DamageError(
                f"{self._disk.path}: the {kind} of {name} are not what was written there. Training stopped; joining "
                f"again goes on from what is whole. Check this disk"
            )

    def write(self, kind: str, i: int, t: int, data: Tensor) -> None:
        """To the slot the manifest does not name; in place, where there is one. Raises OSError."""
        key = (kind, i, t)
        slot = 0
        if kind == "gradient":
            pass
        elif self.plan.two_slots(kind):
            slot = 1 - self._kept.get(key, (1, 0))[0]
        elif self.header is not None and kind not in self.invalid_kinds:
            self.mark_invalid(kind)
        if data.device.type != "cpu":
            data = page_aligned(data.numel()).copy_(data)
        total = checksum(data)
        self._disk.write(self._offset(kind, i, t, slot), data)
        with self._turn:
            self._newest[key] = (slot, total)
            if self._day != _today():
                self._day, self.written_today = _today(), 0
            self.written_today += data.numel()

    def clear(self, kind: str) -> None:
        """Zeros, everywhere."""
        for i in range(self.plan.last + 1):
            if (held := self._held.get((kind, i))) is not None:
                held.zero_()
            for t in range(self.plan.tile_count(i)):
                self._newest.pop((kind, i, t), None)

    def commit(self, mark: str, whole: bool = True) -> None:
        """What was written since the last commit, and `mark`, is now the state. `whole`: training state too, where it
        is written in place. Raises OSError; then the last manifest still holds."""
        self._disk.sync()
        self.header = mark
        self.invalid_kinds = set() if whole or self.plan.commits_steps else set(TRAINING_KINDS)
        self._kept = {key: at for key, at in self._newest.items() if key[0] != "gradient"}
        self._write_manifest()

    def mark_invalid(self, kind: str) -> None:
        """From here on the manifest says that this kind is not whole (with weights go moments, and the reverse)."""
        with self._turn:
            wider = (
                TRAINING_KINDS
                if kind in TRAINING_KINDS
                else EXCHANGE_KINDS
                if kind in EXCHANGE_KINDS
                else KINDS
            )
            if self.header is not None and not self.invalid_kinds.issuperset(wider):
                self.invalid_kinds |= set(wider)
                self._write_manifest()

    def _offset(self, kind: str, i: int, t: int, slot: int) -> int:
        return self._offsets[kind, i, t] + slot * self._sizes[kind, i, t]

    @property
    def layout(self) -> dict:
        return self.layout_of(self.plan)

    @staticmethod
    def layout_of(plan: Plan) -> dict:
        """What decides, besides the model, where records lie and what is in them. Which of them memory holds does not:
        a state outlives a change of limits."""
        return {
            "format": FORMAT, "tile": plan.tile, "crash_safety": plan.crash_safety, "dtype": plan.dtype,
            "moments_bits": plan.moments_bits,
        }  # fmt: skip

    def _write_manifest(self) -> None:
        kept: dict[str, list[list[list[int]]]] = {}
        for kind, i in self._all():
            tiles = [self._kept.get((kind, i, t)) for t in range(self.plan.tile_count(i))]
            kept.setdefault(kind, []).append([list(each) if each else [] for each in tiles])
        body = {
            "layout": self.layout, "mark": self.header, "void": sorted(self.invalid_kinds), "day": self._day,
            "written": self.written_today, "kept": kept,
        }  # fmt: skip
        text = json.dumps(body)
        whole = json.dumps({"digest": sha256(text.encode()).hexdigest(), "body": text})
        write_atomically(self.folder / MANIFEST_FILE, whole.encode())

    def _read_manifest(self) -> None:
        body = read_manifest(self.folder)
        if body is None:
            return
        if body["layout"] != self.layout:
            raise StateError(
                f"{self.folder} holds a state laid out in another way; give the limits it was begun with, or remove it"
            )
        self.header, self.invalid_kinds = body["mark"], set(body["void"])
        self._day, self.written_today = body["day"], body["written"]
        for kind, fragments in body["kept"].items():
            for i, tiles in enumerate(fragments):
                for t, at in enumerate(tiles):
                    if at:
                        self._kept[kind, i, t] = (at[0], at[1])
        self._newest = {
            key: at for key, at in self._kept.items() if key[0] not in self.invalid_kinds
        }
        for kind, i in self._held:  # what memory holds is read once, here
            if kind not in self.invalid_kinds:
                for t in range(self.plan.tile_count(i)):
                    if (kind, i, t) in self._newest:
                        into = self.memory_record(kind, i, t)
                        fresh = into if into.device.type == "cpu" else page_aligned(into.numel())
                        self.read(kind, i, t, fresh)
                        into.copy_(fresh)

    def write_memory_records(self, kinds: Sequence[str]) -> None:
        """What memory holds of these kinds and nothing else writes goes to disk, before a commit."""
        for (kind, i), held in self._held.items():
            for t in range(self.plan.tile_count(i) if kind in kinds else 0):
                self.write(kind, i, t, held[self.record_slice(kind, i, t)])

    def writes_left_today(self, daily: int | None) -> int | None:
        """Bytes that may still be written today; None without a budget."""
        if daily is None:
            return None
        return max(0, daily - (self.written_today if self._day == _today() else 0))

    def close(self) -> None:
        self.host.close()
        if self.folder is not None:
            self._disk.close()


class FragmentSequence(Sequence):
    """One int32 or fp32 kind of all fragments: `shelf[i]` is a fragment's tensor by reference, or a copy from disk;
    `shelf[i] = tensor` keeps it."""

    def __init__(self, store: StateStore, kind: str, dtype: torch.dtype = torch.int32):
        self._store, self._kind, self._dtype = store, kind, dtype

    def __len__(self) -> int:
        return self._store.plan.last + 1

    def __getitem__(self, i: int) -> Tensor:
        i = range(len(self))[i]
        store, size = self._store, self._store.plan.fragments[i].size
        if (held := store.memory_buffer(self._kind, i)) is not None:
            return held.view(self._dtype)[:size]
        whole = page_aligned(sum(store.plan.records(self._kind, i)))
        for t in range(store.plan.tile_count(i)):
            store.read(self._kind, i, t, whole[store.record_slice(self._kind, i, t)])
        return whole.view(self._dtype)[:size]

    def __setitem__(self, i: int, tensor: Tensor) -> None:
        i = range(len(self))[i]
        store, kind = self._store, self._kind
        whole = store.memory_buffer(kind, i)
        if whole is None:
            whole = page_aligned(sum(store.plan.records(kind, i)))
        flat = whole.view(self._dtype)[: tensor.numel()]
        if flat.data_ptr() != tensor.data_ptr():
            flat.copy_(tensor)
        for t in range(store.plan.tile_count(i)):
            store.store_tile(kind, i, t, whole[store.record_slice(kind, i, t)])


def read_manifest(folder: Path) -> dict | None:
    """A state's manifest; None where there is none. Raises StateError when it is damaged."""
    try:
        text = (folder / MANIFEST_FILE).read_text()
    except FileNotFoundError:
        return None
    try:
        outer = json.loads(text)
        if sha256(outer["body"].encode()).hexdigest() != outer["digest"]:
            raise ValueError("its digest is another")
        return json.loads(outer["body"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(
            f"{folder / MANIFEST_FILE} is damaged ({error}): remove {folder} and join again"
        ) from None


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()
