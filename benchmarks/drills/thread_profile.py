"""Profile the exchange's threads in CPU time, call by call.

A profiler makes calls dearer, most of all short ones, so its seconds say where time goes and not
how much it is: `CpuMeter` measures that without one.
"""

import cProfile
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

TOP_FUNCTIONS = 12  # of each thread, in a table


class ThreadProfile:
    """Profile all threads that start after it, if their names begin with one of some prefixes."""

    def __init__(self, prefixes: tuple[str, ...]) -> None:
        self._prefixes = prefixes
        self._profiles: dict[str, cProfile.Profile] = {}
        threading.setprofile(self._start)

    def _start(self, frame: FrameType, event: str, argument: Any) -> None:
        """Replace this function, as a thread's first event calls it, by a profiler or by none."""
        sys.setprofile(None)
        name = threading.current_thread().name
        if name.startswith(self._prefixes):
            profile = self._profiles[name] = cProfile.Profile(time.thread_time)
            profile.enable()

    def write(self, path: Path) -> None:
        """Write the functions of each thread so far, as JSON.

        For each: the CPU seconds in it, those with what it calls, and the number of calls.
        """
        threads = {}
        for name, profile in list(self._profiles.items()):
            threads[name.rstrip("_0123456789")] = {
                _describe(entry.code): [entry.inlinetime, entry.totaltime, entry.callcount]
                for entry in profile.getstats()
            }
        partial_file = path.with_suffix(".part")
        partial_file.write_text(json.dumps(threads))
        partial_file.replace(path)


def _describe(code: CodeType | str) -> str:
    """Return a short name of a function: its file and its name."""
    if isinstance(code, str):
        return code.strip("<>").partition(" object at ")[0]
    path = Path(code.co_filename)
    return f"{path.parent.name}/{path.name}:{code.co_qualname}"


def format_profiles(paths: Iterable[Path]) -> str:
    """Return a table of the functions in which the threads of all machines spend most time.

    Args:
        paths: Files that `ThreadProfile.write` has written.
    """
    inline: dict[str, Counter[str]] = {}
    inclusive: dict[str, Counter[str]] = {}
    calls: dict[str, Counter[str]] = {}
    for path in paths:
        for thread, functions in json.loads(path.read_text()).items():
            for function, (own_seconds, seconds, count) in functions.items():
                inline.setdefault(thread, Counter())[function] += own_seconds
                inclusive.setdefault(thread, Counter())[function] += seconds
                calls.setdefault(thread, Counter())[function] += count
    lines = []
    for thread, own_seconds in sorted(inline.items()):
        total = sum(own_seconds.values())
        lines.append(f"    {thread}: {total:.2f} s with the profiler; share, with callees, calls")
        for function, value in own_seconds.most_common(TOP_FUNCTIONS):
            shares = 100 * value / total, 100 * inclusive[thread][function] / total
            lines.append(
                f"    {shares[0]:5.1f} % {shares[1]:5.1f} % {calls[thread][function]:7}  {function}"
            )
    return "\n".join(lines)
