"""Exact-size buffers on one tier, allocated once, and the number of bytes allocated.

Host buffers are anonymous mappings: page-aligned (which O_DIRECT requires) and exactly as large as
requested (torch's pinned pool rounds up to powers of two). Under CUDA, those that a device copies
from or to are pinned, so that the copies run alongside the kernels. What the optimizer and the
exchange alone use is not pinned: no system lets all of its memory be pinned.
"""

import contextlib
import logging
import mmap

import torch
from torch import Tensor

from barnraise.errors import MemoryShortageError
from barnraise.formats import format_bytes
from barnraise.planning.plan import round_to_pages
from barnraise.swap.device import register_host_memory, unregister_host_memory

log = logging.getLogger("barnraise")


def page_aligned(size: int) -> Tensor:
    """Return a temporary zero buffer, uint8 [size], at the start of a page. No arena counts it."""
    return map_pages(round_to_pages(size))[:size]


def map_pages(size: int, huge: bool = False) -> Tensor:
    """Map `size` bytes of zero pages as a uint8 tensor, and unmap them with its last user.

    The size is of whole pages; `huge` ones are faster.

    Raises:
        OSError: memory does not suffice.
    """
    mapping = mmap.mmap(-1, size)
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without huge pages refuses: small ones are as correct, and a little slower.
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)


class Arena:
    """Allocate buffers on the host (`device` None or a CPU) or on a device.

    Attributes:
        device: the device, or None for the host.
        allocated: bytes of all buffers.
        pinned: bytes of the host buffers that are pinned.
        unpinned: bytes of those that a device copies from or to and the system refuses to pin.
    """

    def __init__(self, device: torch.device | None = None, pins: bool = False) -> None:
        """Create an empty arena; `pins`: host buffers may be pinned for CUDA."""
        self.device = device if device is not None and device.type != "cpu" else None
        self.allocated = 0
        self.pinned = 0
        self.unpinned = 0
        self._pins = pins
        self._refusal = 0  # the driver's error number, once the system has refused
        self._pinned_addresses: list[int] = []

    def allocate(self, size: int, crosses_link: bool = False) -> Tensor:
        """Return a zero buffer, uint8, of `size` bytes rounded up to whole pages.

        Args:
            size: bytes.
            crosses_link: whether a device copies from or to this host buffer, so that it is pinned
                where it can be.

        Raises:
            MemoryShortageError: memory does not suffice; the message names what is missing.
        """
        size = round_to_pages(size)
        try:
            if self.device is not None:
                buffer = torch.zeros(size, dtype=torch.uint8, device=self.device)
            else:
                buffer = map_pages(size, huge=True)
        except (OSError, ValueError, MemoryError, RuntimeError) as error:
            where = f"the memory of {self.device}" if self.device else "memory"
            allocated = f"{self.allocated / 1e6:,.0f} MB are allocated already"
            raise MemoryShortageError(
                f"{where} has no {size / 1e6:,.0f} MB left for the model ({allocated}): {error}",
                device=self.device is not None,
            ) from None
        self.allocated += size
        if crosses_link and self._pins:
            self._pin(buffer)
        return buffer

    def allocate_floats(self, count: int, crosses_link: bool = False) -> Tensor:
        """Return a zero buffer, fp32 [count]; padding to whole pages follows it in memory."""
        size = count * torch.float32.itemsize
        return self.allocate(size, crosses_link)[:size].view(torch.float32)

    def _pin(self, buffer: Tensor) -> None:
        """Pin a buffer, until the system refuses once; copies of other buffers block."""
        address = buffer.data_ptr()
        if not self._refusal:
            self._refusal = register_host_memory(address, buffer.numel())
        if self._refusal:
            self.unpinned += buffer.numel()
            return
        self._pinned_addresses.append(address)
        self.pinned += buffer.numel()

    def warn_if_unpinned(self) -> None:
        """Log once, when all buffers are allocated, what could not be pinned and what it costs."""
        if not self._refusal:
            return
        copied = self.pinned + self.unpinned
        log.warning(
            "the system refuses to pin %s of the %s of memory that the GPU copies from and to "
            "(CUDA error %d): those copies do not run alongside its computation, so that up to "
            "%.0f %% of the time of all copies is added to each step. WSL2 and Windows pin little; "
            "elsewhere `ulimit -l` may be the limit",
            format_bytes(self.unpinned),
            format_bytes(copied),
            self._refusal,
            100 * self.unpinned / copied,
        )

    def close(self) -> None:
        """Unpin the buffers. The memory itself is freed with the last tensor that refers to it."""
        for address in self._pinned_addresses:
            unregister_host_memory(address)
        self._pinned_addresses.clear()
        self.pinned = self.unpinned = 0
