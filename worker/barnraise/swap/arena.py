"""Exact-size buffers on one tier, allocated once, and how many bytes of them there are.

Host buffers are anonymous mappings: page-aligned (O_DIRECT wants it), exactly as large as asked (torch's pinned pool
rounds up to powers of two) and, under CUDA, registered so that copies run beside the kernels.
"""

import ctypes
import mmap
import os

import torch
from torch import Tensor

from barnraise.errors import StateError
from barnraise.models.gpt2 import Weights, views
from barnraise.spec import UNIT_BITS, Fragment

UNIT = 2.0**-UNIT_BITS
PAGE = 4096
SPILLED = 1 << 18  # elements of a bf16 gradient added at a time: a CPU makes an fp32 copy of them


def units_to_float(units: Tensor) -> Tensor:
    """int32 units → fp32 weights: nearest fp32 to the integer, then an exact scaling. The same bits everywhere."""
    return units.float().mul_(UNIT)


def round_up_to_page(size: int) -> int:
    """`size` bytes rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


def page_aligned(size: int) -> Tensor:
    """uint8 [size], zero, at the start of a page. For a moment: it is in nobody's books."""
    return torch.frombuffer(mmap.mmap(-1, round_up_to_page(size)), dtype=torch.uint8)[:size]


def release_free_memory() -> None:
    """To the system what the allocator holds and nobody uses: where a step's tensors lay, what is done between steps
    would lie beside. Only glibc keeps so much (300 MB of GPT-2 124M's) and can be asked."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


class Arena:
    """Buffers on the host (`device` None or a CPU) or on a device. `allocated`: bytes of all that were given out."""

    def __init__(self, device: torch.device | None = None, registered: bool = False):
        self.device = device if device is not None and device.type != "cpu" else None
        self.registered = registered
        self.allocated = 0
        self._maps: list[tuple[mmap.mmap, int]] = []

    def allocate(self, size: int) -> Tensor:
        """uint8 [size], zero. Raises StateError naming what is missing."""
        size = round_up_to_page(size)
        try:
            buffer = (
                torch.zeros(size, dtype=torch.uint8, device=self.device)
                if self.device
                else self._mapped(size)
            )
        except (OSError, ValueError, MemoryError, RuntimeError) as error:
            where = f"the memory of {self.device}" if self.device else "memory"
            held = f"{self.allocated / 1e6:,.0f} MB are held already"
            raise StateError(
                f"{where} has no {size / 1e6:,.0f} MB left for the model ({held}): {error}"
            ) from None
        self.allocated += size
        return buffer

    def allocate_floats(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """[count] of `dtype`, zero; padded to whole pages behind."""
        return self.allocate(count * dtype.itemsize)[: count * dtype.itemsize].view(dtype)

    def _mapped(self, size: int) -> Tensor:
        mapping = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                mapping.madvise(mmap.MADV_HUGEPAGE)
            except OSError:  # a kernel built without: small pages are as right, and a little slower
                self.small_pages = True
        buffer = torch.frombuffer(mapping, dtype=torch.uint8)
        if self.registered:
            status = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), size, 0)
            if int(status) != 0:
                raise MemoryError(f"the system refuses to pin it (CUDA error {int(status)})")
        self._maps.append((mapping, buffer.data_ptr()))
        return buffer

    def close(self) -> None:
        """Unpins; the memory itself goes with the last tensor that looks at it."""
        if self.registered:
            for _, address in self._maps:
                torch.cuda.cudart().cudaHostUnregister(address)
        self._maps.clear()


class Leaves:
    """One fragment's weights as autograd leaves over a flat buffer, fp32 or bf16."""

    def __init__(self, fragment: Fragment, flat: Tensor):
        self.fragment, self.flat = fragment, flat
        self.weights: Weights = {
            n: view.detach().requires_grad_() for n, view in views(fragment, flat).items()
        }
        self._sums: Weights = {}
        if flat.dtype != torch.float32:
            for name, leaf in self.weights.items():
                leaf.register_post_accumulate_grad_hook(
                    lambda leaf, name=name: self._spill(leaf, name)
                )

    def accumulate_into(self, gradient: Tensor | None) -> None:
        """From now on backward adds to this fp32 flat buffer; None: to nothing."""
        self._sums = views(self.fragment, gradient) if gradient is not None else {}
        for name, leaf in self.weights.items():
            leaf.grad = self._sums.get(name) if leaf.dtype == torch.float32 else None

    def add_matrix_gradient(self, name: str, left: Tensor, right: Tensor) -> None:
        """To the gradient of `name`, a matrix: leftᵀ · right, of [n, rows] and [n, columns]."""
        sums = self._sums[name]
        if right.dtype == torch.float32:
            sums.addmm_(left.t(), right)
            return
        rows = max(1, SPILLED // right.shape[1])
        for total, part in zip(sums.split(rows), left.split(rows, dim=1), strict=True):
            total.add_(part.t() @ right)

    def add_vector_gradient(self, name: str, made: Tensor) -> None:
        """…of `name`, a vector."""
        self._sums[name].add_(made)

    def _spill(self, leaf: Tensor, name: str) -> None:
        """A leaf's gradient has the leaf's type: sums over micro-batches want fp32."""
        sums, made = (flat.reshape(-1).split(SPILLED) for flat in (self._sums[name], leaf.grad))
        for total, part in zip(sums, made, strict=True):
            total.add_(part)
        leaf.grad = None
