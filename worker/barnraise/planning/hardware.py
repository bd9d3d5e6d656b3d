"""A machine: what it can do, as `probe.py` measured it, and how much memory it has. The planner's one view of it; plain
data, without torch.
"""

import ctypes
import dataclasses
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Rates = tuple[tuple[int, float], ...]  # (a size, a rate at it), ascending in size


@dataclass(frozen=True)
class MatmulRates:
    """FLOP/s of matrix products in one dtype by width d: forward is [1024, d] x [d, 4d] with a bias, backward the mean
    of the two products of its gradient."""

    dtype: str
    forward: Rates
    backward: Rates


@dataclass(frozen=True)
class UpdateRate:
    """Parameters/s of AdamW over weights streamed in `dtype` and moments of so many bits."""

    where: str  # "host", with all threads, or "device"
    dtype: str
    bits: int
    rate: float


@dataclass(frozen=True)
class Hardware:
    """All rates measured; bytes/s, FLOP/s, parameters/s. The fields with defaults refine the ones above them: without
    them, those hold for all sizes and both passes."""

    device: str  # "cpu" or "cuda"
    name: str  # of the CPU or GPU
    cores: int  # threads torch computes with on the CPU
    memory: int  # bytes of RAM in all (cgroup limit respected)
    device_memory: int  # bytes of GPU memory; 0 without one
    disk: int  # bytes free where state will lie
    dtype: str  # what pays for matrix products here: "float32" or "bfloat16"
    matmul: Rates  # (width d, FLOP/s of [1024, d] x [d, 4d] in `dtype`), ascending in width
    attention: (
        float  # FLOP/s of causal scaled_dot_product_attention forward (counted as dense half)
    )
    elementwise: float  # bytes/s (read + written) of streaming elementwise work: gelu, layer norm, residual adds
    to_device: float  # B/s, host → device, pinned (on a CPU: memcpy within RAM)
    from_device: float
    stream: float  # B/s, STREAM-triad-like RAM rate with all threads
    adam: float  # parameters/s of fp32 AdamW in RAM, all threads (28 bytes a parameter)
    disk_read: float  # B/s past the page cache, multi-megabyte requests, each with its checksum
    disk_write: float
    products: tuple[MatmulRates, ...] = ()  # every dtype that was measured, float32 first
    attention_contexts: Rates = ()  # (context, FLOP/s) with heads 64 wide
    attention_heads: Rates = ()  # (head width, FLOP/s) at a context of 1,024
    attention_backward: float = 0.0  # FLOP/s of its gradient, 2.5 x the forward's FLOPs
    logits: Rates = ()  # (vocabulary V, FLOP/s of [256, 512] x [512, V]) in what is trained with here
    updates: tuple[UpdateRate, ...] = ()  # in every form; `adam` is the host's of fp32

    def in_dtype(self, dtype: str) -> MatmulRates:
        """The products' rates in `dtype`; the nearest known ones where it was not measured."""
        unknown = MatmulRates(dtype, self.matmul, self.matmul)
        return next((known for known in self.products if known.dtype == dtype), unknown)

    def update_rate(self, where: str, dtype: str, bits: int) -> float:
        """Parameters/s; plain fp32's in RAM where it was not measured."""
        form = where, dtype, bits
        return next((u.rate for u in self.updates if (u.where, u.dtype, u.bits) == form), self.adam)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Hardware":
        """What `to_json` gave. Raises ValueError for other fields."""
        raw = json.loads(text)
        try:
            raw["products"] = [MatmulRates(**_tuples(each)) for each in raw["products"]]
            raw["updates"] = [UpdateRate(**each) for each in raw["updates"]]
            return cls(**_tuples(raw))
        except (TypeError, LookupError, AttributeError) as error:
            raise ValueError(f"not a machine's measurements: {error}") from None


def _tuples(raw: Any) -> Any:
    if isinstance(raw, dict):
        return {name: _tuples(value) for name, value in raw.items()}
    return tuple(_tuples(value) for value in raw) if isinstance(raw, list) else raw


def memory_bytes() -> int:
    """RAM this process may hope for: the machine's, or its cgroup's limit where that is lower."""
    if sys.platform == "win32":
        status = (
            ctypes.c_ulonglong * 8
        )()  # MEMORYSTATUSEX: length and load in the first, then total physical
        ctypes.cast(status, ctypes.POINTER(ctypes.c_ulong))[0] = ctypes.sizeof(status)
        if not ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
            raise OSError("Windows does not say how much memory there is")
        return status[1]
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *cgroup_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])


def cgroup_limits(mine: Path, root: Path) -> list[int]:
    """The memory limits of this process's control group and of those around it, version 1 and 2; none outside Linux.
    Inside a container the paths may be of the host and not be there: then the root's own limit counts."""
    if not mine.exists():
        return []
    found = []
    for line in mine.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, file = (
            (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        )
        here = base / path.lstrip("/")
        limits = [group / file for group in [here, *here.parents] if group.is_relative_to(base)]
        found += [limit.read_text().strip() for limit in limits if limit.exists()]
    return [int(text) for text in found if text.isdigit()]  # else "max"


def retain_freed_memory() -> None:
    """Make the C library retain freed memory from now on.

    glibc returns blocks of over 32 MiB at once, and touching
    a page again can cost more than computing on it (1.4 ms a MiB in a virtual machine, measured). The probe and the
    engine both want this; other C libraries are left alone."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.malloc_trim(0)  # what lies about from before
        for option, value in (
            (-3, 1 << 30),
            (-1, (1 << 31) - 1),
            (-8, 1),
        ):  # M_MMAP_THRESHOLD, M_TRIM_…, M_ARENA_MAX
            libc.mallopt(option, value)


def cpu_name() -> str:
    if sys.platform == "darwin":
        asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return (
            subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
            or platform.machine()
        )
    info = Path("/proc/cpuinfo")
    named = (
        [line for line in info.read_text().splitlines() if "model name" in line]
        if info.exists()
        else []
    )
    return (
        named[0].partition(":")[2].strip() if named else platform.processor() or platform.machine()
    )
