"""Count the bytes that a call allocates in torch, exactly, from the allocator's own record."""

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

# The last operation that torch records before a product's own kernel.
BEFORE_KERNEL = "aten::resolve_conj"


def allocation_changes(call: Callable[[], Any]) -> list[int]:
    """Return the bytes of each allocation (+) and release (−) on the CPU by `call`, in order.

    The result of `call` is released after the last of them. Only torch's CPU allocator counts; a
    library's own workspace does not. Nor does the buffer in which the kernel of a product computes
    in fp32 on a CPU without bfloat16: neither a GPU nor a CPU that is planned for bfloat16 has it.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        result = call()
    events = sorted(record.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    del result
    changes: list[int] = []
    has_kernel_buffer = False  # the last change is the buffer of a product's kernel
    previous = ""
    for event in events:
        if event.name() == "[memory]":
            if has_kernel_buffer and changes[-1] == -event.nbytes():
                changes.pop()
                has_kernel_buffer = False
            else:
                changes.append(event.nbytes())
                has_kernel_buffer = previous == BEFORE_KERNEL
        else:
            has_kernel_buffer = False
        previous = event.name()
    return changes


def peak_allocated(call: Callable[[], Any]) -> int:
    """Return the largest number of bytes allocated at once, above those at the start."""
    now = peak = 0
    for change in allocation_changes(call):
        now += change
        peak = max(peak, now)
    return peak


def allocated_after(call: Callable[[], Any]) -> int:
    """Return the bytes above those at the start when `call` returns, its result included."""
    return sum(allocation_changes(call))
