"""Exact-size buffers on one tier, allocated once, and the number of bytes allocated.

Host buffers are anonymous mappings: page-aligned (which O_DIRECT requires), exactly as large as
requested (torch's pinned pool rounds up to powers of two) and, under CUDA, registered so that
copies run alongside the kernels.
"""

import contextlib
import ctypes
import mmap
import os
from typing import Any

import torch
from torch import Tensor

from barnraise.errors import StateError

PAGE = 4096


def round_up_to_page(size: int) -> int:
    """Return `size` bytes rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


def page_aligned(size: int) -> Tensor:
    """Return a temporary zero buffer, uint8 [size], at the start of a page. No arena counts it."""
    return torch.frombuffer(mmap.mmap(-1, round_up_to_page(size)), dtype=torch.uint8)[:size]


def release_free_memory() -> None:
    """Return to the system the memory that the allocator holds but nobody uses.

    Without this, buffers used between steps would come on top of those that a step has freed. Only
    glibc holds so much (300 MB with GPT-2 124M), and only glibc offers the call.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


class Arena:
    """Allocate buffers on the host (`device` None or a CPU) or on a device.

    Attributes:
        device: the device, or None for the host.
        registered: whether host buffers are pinned for CUDA.
        allocated: bytes of all buffers.
    """

    def __init__(self, device: torch.device | None = None, registered: bool = False) -> None:
        """Create an empty arena; `registered` pins host buffers for CUDA."""
        self.device = device if device is not None and device.type != "cpu" else None
        self.registered = registered
        self.allocated = 0
        self._maps: list[tuple[mmap.mmap, int]] = []

    def allocate(self, size: int) -> Tensor:
        """Return a zero buffer, uint8, of `size` bytes rounded up to whole pages.

        Raises:
            StateError: memory does not suffice; the message names what is missing.
        """
        size = round_up_to_page(size)
        try:
            if self.device is not None:
                buffer = torch.zeros(size, dtype=torch.uint8, device=self.device)
            else:
                buffer = self._map(size)
        except (OSError, ValueError, MemoryError, RuntimeError) as error:
            where = f"the memory of {self.device}" if self.device else "memory"
            allocated = f"{self.allocated / 1e6:,.0f} MB are allocated already"
            raise StateError(
                f"{where} has no {size / 1e6:,.0f} MB left for the model ({allocated}): {error}"
            ) from None
        self.allocated += size
        return buffer

    def allocate_floats(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a zero buffer [count] of `dtype`; padding to whole pages follows it in memory."""
        return self.allocate(count * dtype.itemsize)[: count * dtype.itemsize].view(dtype)

    def _map(self, size: int) -> Tensor:
        mapping = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # A kernel without huge pages refuses: small ones are as correct, and a little slower.
            with contextlib.suppress(OSError):
                mapping.madvise(mmap.MADV_HUGEPAGE)
        buffer = torch.frombuffer(mapping, dtype=torch.uint8)
        if self.registered:
            status = _cuda_runtime().cudaHostRegister(buffer.data_ptr(), size, 0)
            if int(status) != 0:
                raise MemoryError(f"the system refuses to pin it (CUDA error {int(status)})")
        self._maps.append((mapping, buffer.data_ptr()))
        return buffer

    def close(self) -> None:
        """Unpin the buffers. The memory itself is freed with the last tensor that refers to it."""
        if self.registered:
            for _, address in self._maps:
                _cuda_runtime().cudaHostUnregister(address)
        self._maps.clear()


def _cuda_runtime() -> Any:
    """Return CUDA's runtime library, which torch loads but does not annotate."""
    return torch.cuda.cudart()
