"""Compute how much of a machine a plan may use, from its sizes and its owner's limits. Pure."""

from dataclasses import dataclass, replace

from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import UNLIMITED, Limits

# Part of the RAM left to the system and the program if no limit is set, however little of it other
# programs use.
MEMORY_RESERVE = 0.15
# Of the RAM that other programs leave, this part of all RAM stays free for them to grow, and at
# least so much, which the program itself takes.
FREE_RESERVE = 0.05
FREE_RESERVE_BYTES = 400_000_000
# What a process with CUDA's libraries takes of the RAM besides one without them, at most.
CUDA_PROCESS_BYTES = 1_500_000_000
FREE_DISK = 0.95  # part of the free disk that the state may take if no limit is set

# What a process takes of a GPU's memory besides the plan, as measured on an H200, where it is most:
CONTEXT_BYTES = 600_000_000  # CUDA's context; a GPU's free memory is measured with it in place
# The workspaces of cuBLAS for the two threads that compute, those of cuDNN, and the kernels, which
# are loaded when they are first used.
WORKSPACE_BYTES = 260_000_000
DEVICE_MARGIN = 0.03  # static buffers rounded up to 2 MiB, and gaps between tensors

# A consumer SSD is made for about 600 times its size over five years, a third of it a day.
DRIVE_WRITES_PER_DAY = 0.3


@dataclass(frozen=True)
class Budgets:
    """How much of each resource a plan may use.

    Attributes:
        memory: bytes of RAM.
        device_memory: bytes of the device's memory; None where there is no memory but RAM.
        device_overhead: bytes of the device's memory that are left to what no plan counts.
        disk: bytes of disk.
        disk_writes_per_day: bytes a day; None for no limit.
        other_devices: bytes of the memory of each further device.
    """

    memory: int
    device_memory: int | None
    device_overhead: int
    disk: int
    disk_writes_per_day: int | None
    other_devices: tuple[int | None, ...] = ()


def compute_budgets(hardware: Hardware, limits: Limits) -> Budgets:
    """Return what a plan may use of a machine within its owner's limits."""
    memory = _unlimited_memory(hardware) if limits.memory is None else limits.memory
    if hardware.memory_available:  # a limit does not make more memory free than there is
        memory = min(memory, hardware.memory_available - FREE_RESERVE_BYTES)
    device_memory, overhead = _device_budget(hardware, limits)
    return Budgets(
        memory=max(0, memory),
        device_memory=device_memory,
        device_overhead=overhead,
        disk=int(hardware.disk * FREE_DISK) if limits.disk is None else limits.disk,
        disk_writes_per_day=daily_write_limit(hardware.disk_size or hardware.disk, limits),
        other_devices=tuple(_device_budget(other, limits)[0] for other in hardware.others),
    )


def _unlimited_memory(hardware: Hardware) -> int:
    """Return the bytes of RAM that a plan may use where its owner sets no limit."""
    memory = int(hardware.memory * (1 - MEMORY_RESERVE))
    if hardware.memory_available:
        reserve = max(FREE_RESERVE_BYTES, int(FREE_RESERVE * hardware.memory))
        memory = min(memory, hardware.memory_available - reserve)
    return memory - (CUDA_PROCESS_BYTES if hardware.device != "cpu" else 0)


def _extend_available(hardware: Hardware, limits: Limits) -> int:
    """Return the available RAM of a machine with as much of it as the limit."""
    if not hardware.memory_available:
        return 0
    return max(hardware.memory_available, (limits.memory or 0) + FREE_RESERVE_BYTES)


def _device_budget(hardware: Hardware, limits: Limits) -> tuple[int | None, int]:
    """Return the bytes of the device's memory that a plan may use, and those left besides.

    On a GPU, the owner's limit includes what CUDA's libraries take, and no limit makes more of the
    memory free than there is. Without a GPU, the limit is of a window in RAM.
    """
    limit = limits.device_memory
    if hardware.device == "cpu":
        return limit, 0
    usable = free = _free_device_memory(hardware)
    allowed = free
    if limit is not None:
        usable = min(free, max(0, limit - CONTEXT_BYTES))
        allowed = min(limit, free + CONTEXT_BYTES)
    budget = max(0, int(usable * (1 - DEVICE_MARGIN)) - WORKSPACE_BYTES)
    return budget, allowed - budget


def device_allowance(used: int) -> int:
    """Return the bytes of a GPU's memory that torch may take for a plan which uses `used` of them.

    The rest is what `_device_budget` leaves besides a plan, without CUDA's context, which torch's
    allocator does not count.
    """
    return int((used + WORKSPACE_BYTES) / (1 - DEVICE_MARGIN)) + 1


def device_limit(used: int) -> int:
    """Return the limit of a GPU's memory within which a plan uses at most `used` bytes of it."""
    return CONTEXT_BYTES + device_allowance(used)


def _free_device_memory(hardware: Hardware) -> int:
    """Return the bytes of a GPU's memory that are free once CUDA's context is in place."""
    return hardware.device_memory_free or max(0, hardware.device_memory - CONTEXT_BYTES)


def daily_write_limit(disk_size: int, limits: Limits) -> int | None:
    """Return the bytes a day that may be written to a disk of this size; None for no limit."""
    if limits.disk_writes_per_day is None:
        return int(DRIVE_WRITES_PER_DAY * disk_size)
    return None if limits.disk_writes_per_day >= UNLIMITED else limits.disk_writes_per_day


def extend_to_limits(hardware: Hardware, limits: Limits) -> Hardware:
    """Raise a machine's sizes to the limits, so that a larger machine can be planned for."""
    extended = replace(
        hardware,
        memory=max(hardware.memory, limits.memory or 0),
        memory_available=_extend_available(hardware, limits),
        disk=max(hardware.disk, limits.disk or 0),
        disk_size=max(hardware.disk_size, limits.disk or 0) if hardware.disk_size else 0,
        others=tuple(extend_to_limits(other, limits) for other in hardware.others),
    )
    free = _free_device_memory(hardware)
    needed = (limits.device_memory or 0) - CONTEXT_BYTES
    if hardware.device == "cpu" or needed <= free:
        return extended
    # A card of that size would have as much less free as this one has.
    taken = hardware.device_memory - free
    return replace(extended, device_memory=needed + taken, device_memory_free=needed)
