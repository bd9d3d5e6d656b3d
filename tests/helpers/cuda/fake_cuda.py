"""A CUDA device that computes nothing: the real engine runs on it, and what it does is counted.

torch's FakeTensorMode gives tensors a shape, a type and a device, but no memory. Forward, backward,
autocast and the optimizer of `device="cuda"` then run on a torch without CUDA, with exact shapes,
lifetimes and devices, and a model of any size takes no memory. `Card` counts the bytes alive on the
card, the kernels launched, and what makes the host wait for the card. Only the times of a real card
are missing, and what happens within one of its kernels.
"""

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from helpers.paths import ROOT
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from barnraise.swap import arena, executor, lanes, state_store

GRANULE = 512  # the card's allocator hands out multiples of so many bytes
# Operations that launch no kernel: they only describe memory that exists.
VIEWS = {
    "_unsafe_view",
    "alias",
    "as_strided",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "expand",
    "new_empty",
    "permute",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "squeeze",
    "t",
    "transpose",
    "unbind",
    "unsqueeze",
    "view",
}
# Operations that the runtime executes without a kernel of torch's, and reports on by themselves.
UNCHECKED = ("copy_", "_to_copy", "zero_", "zeros", "zeros_like")
PRODUCTS = ("mm", "addmm", "addmm_", "bmm")


class FakeStream:
    """A stream on which everything happens at once."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = torch.device("cuda", (device.index if device else None) or 0)

    def wait_event(self, event: "FakeEvent") -> None:
        """Wait for nothing: all is done."""

    def synchronize(self) -> None:
        """Wait for nothing: all is done."""


class FakeEvent:
    """An event that a stream has passed; on a card that is behind, `query` denies it."""

    behind = False

    def __init__(self, **options: Any) -> None:
        self.options = options

    def record(self, stream: FakeStream | None = None) -> None:
        """Record nothing."""

    def query(self) -> bool:
        """Return whether the card has come so far."""
        return not self.behind

    def synchronize(self) -> None:
        """Wait for nothing: all is done."""


@dataclass
class FakeRuntime:
    """The CUDA runtime's calls that pin host memory.

    Attributes:
        refuses: pins nothing, as Windows and WSL2 do beyond half of the RAM.
        last_error: of a call that failed; the next kernel's launch reports and clears it.
    """

    refuses: bool = False
    last_error: int = 0
    pinned: dict[int, int] = field(default_factory=dict)
    largest: int = 0  # the most bytes that were ever pinned

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        """Pin memory, or refuse as Windows and WSL2 do beyond half of the RAM."""
        if self.refuses:
            self.last_error = 2
            return 2
        self.pinned[address] = size
        self.largest = max(self.largest, sum(self.pinned.values()))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        """Unpin memory."""
        self.pinned.pop(address)
        return 0


class InlineLane(lanes.WorkerLane):
    """A lane that works in the caller's thread: dispatch modes belong to one thread."""

    def __init__(self, name: str, device: torch.device | None = None, **options: Any) -> None:
        super().__init__(name, device, inline=True)


class NoDisk:
    """A disk that stores nothing."""

    def __init__(self, path, size: int) -> None:
        self.path, self.size = path, size

    def read(self, offset: int, target: torch.Tensor) -> None:
        """Read nothing."""

    def write(self, offset: int, data: torch.Tensor) -> None:
        """Write nothing."""

    def sync(self) -> None:
        """Wait for nothing."""

    def close(self) -> None:
        """Close nothing."""


@dataclass(frozen=True)
class Copy:
    """A copy between host and card."""

    to_card: bool
    size: int
    blocking: bool
    place: str


class Card(TorchDispatchMode):
    """The card's counters. A subclass may give it other streams, events and lanes.

    Attributes:
        allocated: bytes alive now, on all cards.
        peak: the most bytes alive since `reset`.
        peaks: the same of each card.
        peak_place: the operation and the place in the engine that reached the peak.
        launches: kernels by operation since `reset`.
        waits: places where the host read a number from the card since `reset`.
        copies: copies between host and card since `reset`.
        mixes: operations on tensors of both devices, other than copies.
        unaligned: bf16 products with a matrix whose rows are not aligned to 16 bytes.
        runtime: what pins host memory.
        event_type: the card's events. Those of a card that is `behind`, slower than the thread that
            launches, never report that they have passed.
    """

    def __init__(self, behind: bool = False, refuses_to_pin: bool = False) -> None:
        super().__init__()
        self.runtime = FakeRuntime(refuses_to_pin)
        self.event_type = type("Event", (FakeEvent,), {"behind": behind})
        self.allocated = 0
        self.mixes: list[str] = []
        self._alive: dict[int, tuple[int, int]] = {}  # storage → its card and bytes
        self._on_card: Counter[int] = Counter()
        self.reset()

    def reset(self) -> None:
        """Begin to count again; what is alive stays alive."""
        self.peak, self.peak_place = self.allocated, ""
        self.peaks = Counter(self._on_card)
        self.launches: Counter[str] = Counter()
        self.waits: list[str] = []
        self.copies: list[Copy] = []
        self.unaligned: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        result = func(*args, **kwargs)
        outputs = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self._count_operation(func, inputs, outputs, args, kwargs)
        for tensor in outputs:
            self._count_memory(tensor, str(func))
        return result

    def _count_operation(self, func, inputs, outputs, args, kwargs) -> None:
        name = func.overloadpacket.__name__
        devices = {x.device.type for x in inputs if x.dim() or x.device.type == "cuda"}
        touched = devices | {x.device.type for x in outputs}
        cards = {x.device for x in (*inputs, *outputs) if x.device.type == "cuda"}
        if len(cards) > 1:
            self.mixes.append(f"{func} between cards at {place()}")
        if name in ("copy_", "_to_copy") and len(touched) > 1:
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            source = inputs[1] if name == "copy_" else inputs[0]
            to_card = source.device.type == "cpu"
            self.copies.append(Copy(to_card, source.nbytes, not non_blocking, place()))
        elif len(devices) > 1:
            self.mixes.append(f"{func} at {place()}")
        if "cuda" in touched and name not in VIEWS:
            self.launches[name] += 1
            self._check_launch(name)
        if name in PRODUCTS:
            self._check_alignment(inputs)

    def _check_launch(self, name: str) -> None:
        """Raise what an earlier call left, as a kernel does; copies and fills with zeros do not."""
        if self.runtime.last_error and name not in UNCHECKED:
            self.runtime.last_error = 0
            raise RuntimeError("CUDA error: out of memory")

    def _check_alignment(self, matrices: list[torch.Tensor]) -> None:
        for matrix in matrices:
            if matrix.dtype == torch.bfloat16 and matrix.dim() == 2:
                longest = max(matrix.stride())
                if matrix.device.type == "cuda" and longest % 8:
                    self.unaligned.append(f"{tuple(matrix.shape)} at {place()}")

    def _count_memory(self, tensor: torch.Tensor, operation: str) -> None:
        if tensor.device.type != "cuda":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        size = -(-storage.nbytes() // GRANULE) * GRANULE
        index = tensor.device.index or 0
        self._alive[key] = index, size
        self.allocated += size
        self._on_card[index] += size
        self.peaks[index] = max(self.peaks[index], self._on_card[index])
        weakref.finalize(storage, self._count_release, key)
        if self.allocated > self.peak:
            self.peak = self.allocated
            self.peak_place = f"{operation} {tuple(tensor.shape)} {tensor.dtype} at {place()}"

    def _count_release(self, key: int) -> None:
        index, size = self._alive.pop(key, (0, 0))
        self.allocated -= size
        self._on_card[index] -= size

    def patches(self) -> Iterator[contextlib.AbstractContextManager]:
        """Yield what torch and the engine see of the card."""
        yield mock.patch.multiple(
            torch.cuda,
            Stream=FakeStream,
            Event=self.event_type,
            current_stream=FakeStream,
            stream=lambda stream: contextlib.nullcontext(),
        )
        yield mock.patch.object(executor, "WorkerLane", InlineLane)
        yield mock.patch.object(state_store, "DirectFile", NoDisk)

    def count_wait(self, tensor: torch.Tensor, call: str) -> None:
        """Count that the host reads a tensor's value."""
        if tensor.device.type == "cuda":
            self.waits.append(f"{call} at {place()}")


def place() -> str:
    """Return the innermost places within the engine, innermost first."""
    frame, places = sys._getframe(1), []
    while frame is not None and len(places) < 3:
        if frame.f_code.co_filename.startswith(str(ROOT / "worker")):
            places.append(f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(places)


def attention(query, key, value, attn_mask=None, is_causal=False, enable_gqa=False):
    """Choose among CUDA's kernels as torch does, which CPU builds of torch cannot.

    With a mask, which torch may pad, it is computed in single operations: none takes more memory.
    """
    if attn_mask is not None:
        scores = query @ key.transpose(-2, -1)
        return scores.masked_fill_(attn_mask.logical_not(), -1e9).softmax(-1) @ value
    if torch.is_autocast_enabled("cuda"):
        query, key, value = (x.to(torch.bfloat16) for x in (query, key, value))
    if query.dtype == torch.bfloat16:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, 0.0, is_causal)[0]
    has_backward = torch.is_grad_enabled() and query.requires_grad
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, None, has_backward, 0.0, is_causal)[0]


def _fake_values(card: Card) -> Iterator[contextlib.AbstractContextManager]:
    """Yield patches with which fake tensors have values: all are one."""

    def reader(call: str, value: Callable[[torch.Tensor], Any]):
        def read(tensor):
            card.count_wait(tensor, call)
            return value(tensor)

        return read

    ones = {
        "tolist": lambda tensor: [1.0] * tensor.numel() if tensor.dim() else 1.0,
        "item": lambda tensor: 1.0,
        "__float__": lambda tensor: 1.0,
        "__int__": lambda tensor: 1,
        "__bool__": lambda tensor: True,
    }
    for name, value in ones.items():
        yield mock.patch.object(FakeTensor, name, reader(name, value))
    # Each storage has an address of its own.
    yield mock.patch.object(FakeTensor, "data_ptr", lambda tensor: tensor.untyped_storage()._cdata)


def _fake_uploads(card: Card) -> Iterator[contextlib.AbstractContextManager]:
    """Yield patches that count tensors made of Python's numbers on the card: these wait for it."""
    originals = {"tensor": torch.tensor, "as_tensor": torch.as_tensor}

    def uploader(name: str):
        def upload(data, *args, device=None, **kwargs):
            if device is None or torch.device(device).type == "cpu":
                return originals[name](data, *args, **kwargs)
            card.waits.append(f"{name} at {place()}")
            return originals[name](data, *args, **kwargs).to(device)

        return upload

    for name in originals:
        yield mock.patch.object(torch, name, uploader(name))


@contextlib.contextmanager
def fake_cuda(card: Card) -> Iterator[Card]:
    """Give this thread a fake card."""
    patches = [
        mock.patch.multiple(
            torch.cuda,
            is_available=lambda: True,
            is_bf16_supported=lambda including_emulation=True: True,
            current_device=lambda: 0,
            set_device=lambda device: None,
            empty_cache=lambda: None,
            cudart=lambda: card.runtime,
        ),
        mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        mock.patch.object(F, "scaled_dot_product_attention", attention),
        mock.patch.object(
            arena, "map_pages", lambda size, huge=False: torch.zeros(size, dtype=torch.uint8)
        ),
        mock.patch.object(state_store, "checksum", lambda data: 0),
        *card.patches(),
        *_fake_values(card),
        *_fake_uploads(card),
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        for patch in patches:
            stack.enter_context(patch)
        # Autograd has no thread for a device that this torch was built without.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(FakeTensorMode())
        stack.enter_context(card)
        yield card


def in_fresh_thread(call: Callable[[], Any]) -> Any:
    """Return what `call` returns in a thread of its own, which has no scratch buffers yet."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()
