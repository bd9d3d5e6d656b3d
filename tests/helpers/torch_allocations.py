"""Count the bytes that a call allocates in torch, exactly, from the allocator's own record."""

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def allocation_changes(call: Callable[[], Any]) -> list[int]:
    """Return the bytes of each allocation (+) and release (−) on the CPU by `call`, in order.

    The result of `call` is released after the last of them. Only torch's CPU allocator counts; a
    library's own workspace does not.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        result = call()
    events = [
        event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    del result
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


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
