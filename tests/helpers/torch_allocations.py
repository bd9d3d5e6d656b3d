"""How many bytes a call has torch allocate, exactly: by the allocator's own record, not the process's size."""

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def allocation_changes(call: Callable[[], Any]) -> list[int]:
    """Bytes of each allocation (+) and release (−) on the CPU while `call` runs, in order. Its result dies after the
    last of them. Only torch's CPU allocator counts; a library's own workspace does not."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        result = call()
    events = [
        event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    del result
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def peak_allocated(call: Callable[[], Any]) -> int:
    """The most bytes that were there at once above those at the start."""
    now = peak = 0
    for change in allocation_changes(call):
        now += change
        peak = max(peak, now)
    return peak


def allocated_after(call: Callable[[], Any]) -> int:
    """What is there above the start when `call` returns, its result included."""
    return sum(allocation_changes(call))
