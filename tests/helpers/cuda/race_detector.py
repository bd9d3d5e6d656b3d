"""A detector of races between threads and streams on a fake card, by vector clocks.

The engine runs in one thread and in one order. Each thread of the worker and each stream has a
vector clock (Mattern 1988); waiting for an event joins clocks. Two accesses to the same bytes, one
of them a write, are a race unless the clocks put one before the other: another run could have had
them in the other order. So one run finds what many runs on a real card find rarely.
"""

import contextlib
import inspect
import re
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from helpers.cuda.fake_cuda import Card, NoDisk, place
from torch.utils._pytree import tree_leaves

from barnraise.swap import activations, executor, lanes, state_store

MAIN = "main"  # the thread that launches the kernels
COMPUTE = "compute stream"
DISK = "the disk"
Clock = dict[str, int]
# Where buffers for tiles between steps are allocated.
_SOURCE, _FIRST = inspect.getsourcelines(state_store.StateStore._allocate_tile_scratch)
SCRATCH_LINES = range(_FIRST, _FIRST + len(_SOURCE))


def join(clock: Clock, other: Clock) -> None:
    """Let a clock know all that another knows."""
    for actor, time in other.items():
        if clock.get(actor, 0) < time:
            clock[actor] = time


@dataclass
class Access:
    """One access to a range of bytes."""

    begin: int
    end: int
    actor: str
    time: int
    writes: bool
    label: str


@dataclass
class Block:
    """A block of memory, with the accesses that a later one may conflict with."""

    place: str
    on_card: bool
    stream: str  # on which it was allocated, and whose later kernels may reuse its memory
    born: int
    accesses: list[Access]


class Clocks:
    """The clocks of all threads and streams.

    Attributes:
        thread: the thread that works now.
        stream: the stream on which that thread launches kernels.
        label: names the operation that runs.
    """

    def __init__(self) -> None:
        self.of: dict[str, Clock] = {}
        self.thread, self.stream, self.label = MAIN, COMPUTE, ""
        self.streams = 0

    def clock(self, actor: str) -> Clock:
        """Return an actor's clock."""
        return self.of.setdefault(actor, {})

    def let_wait(self, actor: str, clock: Clock) -> None:
        """Let an actor wait for what happened at `clock`."""
        join(self.clock(actor), clock)

    def new_stream(self, device: Any = None) -> "ClockStream":
        """Return a stream of its own."""
        self.streams += 1
        return ClockStream(self, f"stream {self.streams}", device)

    @contextlib.contextmanager
    def use(self, stream: "ClockStream") -> Iterator[None]:
        """Launch kernels on a stream."""
        before, self.stream = self.stream, stream.name
        try:
            yield
        finally:
            self.stream = before

    def advance(self, on_card: bool) -> str:
        """Return the actor of the next access, with its clock advanced."""
        actor = self.thread
        if on_card:  # a kernel follows what its thread has done before it launches it
            actor = self.stream
            self.let_wait(actor, self.clock(self.thread))
        clock = self.clock(actor)
        clock[actor] = clock.get(actor, 0) + 1
        return actor


class ClockStream:
    """A stream with a clock."""

    def __init__(self, clocks: Clocks, name: str, device: torch.device | None = None) -> None:
        self.clocks, self.name = clocks, name
        self.device = torch.device("cuda", (device.index if device else None) or 0)

    def wait_event(self, event: "ClockEvent") -> None:
        """Let later kernels wait for an event."""
        self.clocks.let_wait(self.name, self.clocks.clock(self.clocks.thread))
        self.clocks.let_wait(self.name, event.clock)

    def synchronize(self) -> None:
        """Let the thread wait for all kernels."""
        self.clocks.let_wait(self.clocks.thread, self.clocks.clock(self.name))


class ClockEvent:
    """An event that remembers its stream's clock."""

    def __init__(self, clocks: Clocks, behind: bool) -> None:
        self.clocks, self.behind = clocks, behind
        self.clock: Clock = {}

    def record(self, stream: ClockStream) -> None:
        """Remember what the stream has done."""
        self.clock = dict(self.clocks.clock(stream.name))

    def query(self) -> bool:
        """Return whether the card has come so far, and let the thread know if it has."""
        if not self.behind:
            self.synchronize()
        return not self.behind

    def synchronize(self) -> None:
        """Let the thread wait for the event."""
        self.clocks.let_wait(self.clocks.thread, self.clock)


def lane_type(clocks: Clocks) -> type[lanes.WorkerLane]:
    """Return lanes whose tasks run at once, but count as those of a thread of their own."""

    class ThreadedLane(lanes.WorkerLane):
        def __init__(self, name, device=None, inline=False, eager=False, **options) -> None:
            super().__init__(name, device, inline=True)
            self._is_caller, self._chooses = inline, eager
            self._actors: list[str] = []
            if device is not None and not inline:
                self.stream = clocks.new_stream(device)

        def submit(self, call, after=(), label="", urgency=0.0):
            before = clocks.thread, clocks.stream, clocks.label
            if not self._is_caller:
                # A lane that chooses among its tasks runs them in no certain order.
                actor = f"{self.name} {len(self._actors) if self._chooses else 0}"
                self._actors.append(actor)
                clocks.let_wait(actor, clocks.clock(clocks.thread))
                clocks.thread, clocks.stream = actor, COMPUTE
            clocks.label = str(label)
            try:
                return super().submit(call, after, label, urgency)
            finally:
                clocks.thread, clocks.stream, clocks.label = before

        def wait_until_idle(self) -> None:
            for actor in self._actors:
                clocks.let_wait(clocks.thread, clocks.clock(actor))
            if self.stream is not None:
                self.stream.synchronize()

    return ThreadedLane


def lane_event_type(clocks: Clocks) -> type[lanes.LaneEvent]:
    """Return lanes' events that remember the clock of the thread that completed them."""

    class ClockLaneEvent(lanes.LaneEvent):
        def complete(self, cuda_event=None, error=None) -> None:
            super().complete(cuda_event, error)
            self.clock = dict(clocks.clock(clocks.thread))

        def wait(self, stream=None) -> None:
            clocks.let_wait(clocks.thread, self.clock)
            super().wait(stream)

        @property
        def is_finished(self) -> bool:
            clocks.let_wait(clocks.thread, self.clock)
            return super().is_finished

    return ClockLaneEvent


def disk_type(detector: "RaceDetector") -> type[NoDisk]:
    """Return a disk whose places are memory that threads access."""

    class ClockDisk(NoDisk):
        def read(self, offset: int, target: torch.Tensor) -> None:
            actor = detector.clocks.advance(on_card=False)
            detector.access(DISK, (offset, offset + target.numel()), False, actor)
            detector.access_tensor(target, True, actor)

        def write(self, offset: int, data: torch.Tensor) -> None:
            actor = detector.clocks.advance(on_card=False)
            detector.access(DISK, (offset, offset + data.numel()), True, actor)
            detector.access_tensor(data, False, actor)

    return ClockDisk


class RaceDetector(Card):
    """A fake card that finds races.

    Attributes:
        races: descriptions of races, with how often each was found.
        checked: the number of accesses that were compared with earlier ones.
    """

    def __init__(self, behind: bool = False) -> None:
        super().__init__(behind)
        self.clocks = Clocks()
        self.races: Counter[str] = Counter()
        self.checked = 0
        self._behind = behind
        self._blocks: dict[object, Block] = {}

    # ---- what the engine sees ------------------------------------------------------------------

    def patches(self) -> Iterator[contextlib.AbstractContextManager]:
        """Yield what torch and the engine see of the card."""
        clocks = self.clocks
        self._blocks[DISK] = Block(DISK, False, "", 0, [])
        event = lane_event_type(clocks)
        yield mock.patch.multiple(
            torch.cuda,
            Stream=clocks.new_stream,
            Event=lambda **options: ClockEvent(clocks, self._behind),
            current_stream=lambda device=None: ClockStream(clocks, clocks.stream, device),
            stream=clocks.use,
        )
        yield mock.patch.object(executor, "WorkerLane", lane_type(clocks))
        yield mock.patch.object(lanes, "LaneEvent", event)
        yield mock.patch.object(activations, "LaneEvent", event)
        yield mock.patch.object(state_store, "DirectFile", disk_type(self))

    def count_wait(self, tensor: torch.Tensor, call: str) -> None:
        """Let the thread wait for the kernels whose result it reads."""
        super().count_wait(tensor, call)
        on_card = tensor.device.type == "cuda"
        actor = self.clocks.advance(on_card)
        self.access_tensor(tensor, False, actor)
        if on_card:
            self.clocks.let_wait(self.clocks.thread, self.clocks.clock(actor))

    # ---- accesses ------------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return result
        outputs = _tensors(result)
        for tensor in outputs:
            self._register(tensor)
        written, read = _arguments(func, args, kwargs)
        describes = any(r.alias_info is not None for r in func._schema.returns) and not written
        name = func.overloadpacket.__name__
        if describes or name.startswith(("empty", "new_empty", "detach")):
            return result
        storages = {t.untyped_storage()._cdata for t in written}
        written += [t for t in outputs if t.untyped_storage()._cdata not in storages]
        devices = {t.device.type for t in (*written, *read) if t.numel()}
        actor = self.clocks.advance("cuda" in devices)
        for tensor in read:
            self.access_tensor(tensor, False, actor)
        for tensor in written:
            self.access_tensor(tensor, True, actor)
        if name in ("copy_", "_to_copy") and len(devices) > 1:
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            if not non_blocking:
                self.clocks.let_wait(self.clocks.thread, self.clocks.clock(actor))
        return result

    def _register(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._blocks:
            return
        stream = self.clocks.stream
        where = f'{tuple(tensor.shape)} {tensor.dtype} of "{self.clocks.label}" at {place()}'
        born = self.clocks.clock(stream).get(stream, 0)
        self._blocks[key] = Block(where, tensor.device.type == "cuda", stream, born, [])
        weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        """Check that nothing on another stream still uses memory that is freed.

        Later kernels of the stream on which it was allocated may get the memory at once.
        """
        block = self._blocks.pop(key, None)
        if block is None or not block.on_card:
            return
        stream, thread = (self.clocks.clock(a) for a in (block.stream, self.clocks.thread))
        for access in block.accesses:
            is_over = max(stream.get(access.actor, 0), thread.get(access.actor, 0)) >= access.time
            if access.actor != block.stream and not is_over:
                self.races[f"{block.place} is freed while {access.label} uses it"] += 1

    def access_tensor(self, tensor: torch.Tensor, writes: bool, actor: str) -> None:
        """Check an access to a tensor's elements."""
        if not tensor.numel():
            return
        size, begin = tensor.element_size(), tensor.storage_offset()
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        end = begin + 1 + sum((count - 1) * stride for count, stride in steps)
        self._register(tensor)
        self.access(tensor.untyped_storage()._cdata, (begin * size, end * size), writes, actor)

    def access(self, key: object, span: tuple[int, int], writes: bool, actor: str) -> None:
        """Check an access to a range of bytes against earlier ones, and remember it."""
        self.checked += 1
        block, clock = self._blocks[key], self.clocks.clock(actor)
        if block.on_card and actor != block.stream and clock.get(block.stream, 0) < block.born:
            self.races[f"{self.clocks.label} uses {block.place} before its memory is free"] += 1
        remaining = []
        for access in block.accesses:
            if access.begin < span[1] and span[0] < access.end:
                is_before = access.actor == actor or clock.get(access.actor, 0) >= access.time
                if (writes or access.writes) and not (
                    is_before or _is_exempt(block, access, actor)
                ):
                    self.races[f"{access.label} and {self.clocks.label} on {block.place}"] += 1
                covered = span[0] <= access.begin and access.end <= span[1]
                same_kind = writes or (not access.writes and access.actor == actor)
                if is_before and covered and same_kind:
                    continue
            remaining.append(access)
        time = clock.get(actor, 0)
        remaining.append(Access(*span, actor, time, writes, f"{self.clocks.label} ({actor})"))
        block.accesses = remaining


def _is_exempt(block: Block, access: Access, actor: str) -> bool:
    """Return whether two accesses cannot meet although no event orders them.

    Scratch buffers belong to a thread, and here all lanes share one. Tasks of the optimizer's lane
    have no certain order, but run one at a time.
    """
    if not block.on_card and "tile_threads.py" in block.place:
        return True
    lines = (int(line) for line in re.findall(r"state_store\.py:(\d+)", block.place))
    is_scratch = "buffers.py" in block.place or any(line in SCRATCH_LINES for line in lines)
    return is_scratch and access.actor.startswith("optimizer") and actor.startswith("optimizer")


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _arguments(func: Any, args: tuple, kwargs: dict) -> tuple[list, list]:
    """Return the tensors that an operation writes, and those that it reads, by its schema."""
    written, read = [], []
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        info = argument.alias_info
        (written if info is not None and info.is_write else read).extend(_tensors(value))
    return written, read
