"""Describe a machine: its rates, as the hardware probe measured them, and its memory.

This is the planner's only view of the machine. Plain data, without torch.
"""

import ctypes
import dataclasses
import json
import math
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from barnraise.planning.control_group import ControlGroup, read_text
from barnraise.planning.memory_pressure import MemoryFacts, parse_pressure

MEMINFO = Path("/proc/meminfo")
SYSTEM_PRESSURE = Path("/proc/pressure/memory")

Rates = tuple[tuple[int, float], ...]  # (a size, the rate at it), ascending in size

# A consumer SSD writes this part of its first gigabytes' rate when its cache is full: many fall to
# a third, some to a tenth, after some tens of gigabytes.
SUSTAINED_WRITES = 1 / 3

# Of a GPU's bf16 speed, what its products in fp32 reach where they were not measured: consumer GPUs
# reach a half to a quarter, those of data centres a fifteenth.
FP32_SHARE = 1 / 4

# Options of glibc's mallopt, from malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
GLIBC_MMAP_THRESHOLD = 1 << 25  # the most to which glibc raises it by itself


@dataclass(frozen=True)
class MatmulRates:
    """FLOP/s of matrix products in one dtype, by width d.

    Attributes:
        dtype: "float32" or "bfloat16".
        forward: of [1024, d] x [d, 4d] with a bias.
        backward: the mean of the two products of its gradient.
    """

    dtype: str
    forward: Rates
    backward: Rates


@dataclass(frozen=True)
class UpdateRate:
    """Parameters/s of AdamW over weights streamed in one dtype and moments of so many bits.

    Attributes:
        where: "host", with all threads, or "device".
        dtype: the weights' dtype.
        bits: of each moment.
        rate: parameters a second.
    """

    where: str
    dtype: str
    bits: int
    rate: float


@dataclass(frozen=True)
class Hardware:
    """A machine's measured rates, in bytes/s, FLOP/s and parameters/s.

    The fields with defaults refine those above them: without them, those above hold for all sizes
    and for both passes.

    Attributes:
        device: "cpu" or "cuda".
        name: of the CPU or GPU.
        cores: threads that torch computes with on the CPU.
        memory: bytes of RAM in all; a cgroup's limit is respected.
        device_memory: bytes of GPU memory; 0 without a GPU.
        disk: bytes free where the state will lie.
        dtype: what pays for matrix products here: "float32" or "bfloat16".
        matmul: by width d, of [n, d] x [d, 4d] in `dtype`; n is 1,024, on a GPU 2²³ / d if more.
        attention: of causal scaled_dot_product_attention forward, counted as the dense half.
        elementwise: bytes/s read and written by streaming work: gelu, layer norm, residual sums.
        to_device: bytes/s from host to device, pinned; on a CPU memcpy within RAM.
        from_device: bytes/s back.
        stream: bytes/s of RAM as STREAM's triad measures it, with all threads.
        adam: parameters/s of fp32 AdamW in RAM with all threads, 28 bytes a parameter.
        disk_read: bytes/s past the page cache, in requests of megabytes, with their checksums.
        disk_write: the same for writing.
        products: the rates of every dtype that was measured, float32 first.
        attention_contexts: by context, with heads 64 wide.
        attention_heads: by head width, at a context of 1,024.
        attention_backward: FLOP/s of attention's gradient, 2.5 x the forward's FLOPs.
        logits: by vocabulary V, of [n, 512] x [512, V] in the dtype that training uses here; n is
            256, on a GPU 2²⁵ / V if more.
        updates: AdamW in every form; `adam` is the host's in fp32.
        device_index: the GPU's number among this machine's GPUs.
        device_memory_free: bytes of GPU memory that nobody takes, CUDA's context of this process
            excluded; 0 if not measured.
        disk_size: bytes of the whole drive; 0 if not measured.
        disk_write_sustained: bytes/s that the disk writes for hours; 0 if not measured.
        processor: the CPU's name, also where a GPU computes; "" in older measurements.
        memory_available: bytes of RAM that other programs leave; 0 if not measured.
        launches: kernels/s that a GPU's host starts; 0 without a GPU, or if not measured.
        others: this machine with each further GPU in the place of this one, if a worker may use
            several.
    """

    device: str
    name: str
    cores: int
    memory: int
    device_memory: int
    disk: int
    dtype: str
    matmul: Rates
    attention: float
    elementwise: float
    to_device: float
    from_device: float
    stream: float
    adam: float
    disk_read: float
    disk_write: float
    products: tuple[MatmulRates, ...] = ()
    attention_contexts: Rates = ()
    attention_heads: Rates = ()
    attention_backward: float = 0.0
    logits: Rates = ()
    updates: tuple[UpdateRate, ...] = ()
    device_index: int = 0
    device_memory_free: int = 0
    disk_size: int = 0
    disk_write_sustained: float = 0.0
    processor: str = ""
    memory_available: int = 0
    launches: float = 0.0
    others: tuple["Hardware", ...] = ()

    @property
    def device_name(self) -> str:
        """Return the device as torch names it: "cpu", "cuda" or "cuda:1"."""
        return f"{self.device}:{self.device_index}" if self.device_index else self.device

    @property
    def cards(self) -> tuple["Hardware", ...]:
        """Return this machine with each of its devices, as if it had that one alone."""
        return tuple(dataclasses.replace(each, others=()) for each in (self, *self.others))

    @property
    def compute_stream(self) -> float:
        """Return the bytes/s of the memory in which the blocks are computed."""
        return self.stream if self.device == "cpu" else self.elementwise

    @property
    def sustained_disk_write(self) -> float:
        """Return the bytes/s that the disk writes for hours; below `disk_write` if not measured."""
        return self.disk_write_sustained or SUSTAINED_WRITES * self.disk_write

    def in_dtype(self, dtype: str) -> MatmulRates:
        """Return the products' rates in `dtype`, or `matmul`'s if it was not measured."""
        unmeasured = MatmulRates(dtype, self.matmul, self.matmul)
        return next((rates for rates in self.products if rates.dtype == dtype), unmeasured)

    def update_rate(self, where: str, dtype: str, bits: int) -> float:
        """Return AdamW's parameters/s in one form; plain fp32's in RAM if it was not measured."""
        form = (where, dtype, bits)
        matching = (u.rate for u in self.updates if (u.where, u.dtype, u.bits) == form)
        return next(matching, self.adam)

    def to_json(self) -> str:
        """Return the measurements as JSON, for `from_json`."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Hardware":
        """Return the measurements that `to_json` wrote.

        Raises:
            ValueError: The text has other fields.
        """
        fields: dict[str, Any] = json.loads(text)
        try:
            fields["products"] = [MatmulRates(**_to_tuples(rates)) for rates in fields["products"]]
            fields["updates"] = [UpdateRate(**rates) for rates in fields["updates"]]
            return cls(**_to_tuples(fields))
        except (TypeError, LookupError, AttributeError) as error:
            raise ValueError(f"not a machine's measurements: {error}") from None


def _to_tuples(value: Any) -> Any:
    """Return JSON data with tuples instead of lists."""
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {name: _to_tuples(item) for name, item in items}
    if isinstance(value, list):
        return tuple(_to_tuples(item) for item in cast("list[Any]", value))
    return value


def memory_bytes() -> int:
    """Return the RAM this process may use: the machine's, or its control group's lower limit."""
    if sys.platform != "linux":
        return _memory_outside_linux()[0]
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *ControlGroup().memory_limits()])


def available_memory() -> int:
    """Return the bytes of RAM that this process can use now, besides what it uses already.

    What other programs use is not among them; what the system would free at once is.
    """
    if sys.platform != "linux":
        return _memory_outside_linux()[1]
    available = parse_meminfo(read_text(MEMINFO))
    return min(
        [memory_bytes() if available is None else available, *ControlGroup().memory_available()]
    )


def parse_meminfo(text: str) -> int | None:
    """Return the available bytes that Linux's /proc/meminfo states; None if it states none."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.M)
    return int(match[1]) * 1024 if match else None


def _memory_outside_linux() -> tuple[int, int]:
    """Return the bytes of RAM, and those available."""
    import psutil  # on Linux the engine runs with the standard library and torch alone

    memory = psutil.virtual_memory()
    return memory.total, memory.available


def memory_facts() -> MemoryFacts:
    """Measure how short memory is now."""
    # Other systems, and kernels without PSI, have no such file.
    pressure = read_text(ControlGroup().pressure_file() or SYSTEM_PRESSURE)
    return MemoryFacts(memory_bytes(), available_memory(), parse_pressure(pressure))


def usable_cpus() -> int:
    """Return how many threads can compute at once.

    They are the CPUs that this process may run on, and not more than its control group's quota of
    CPU time, rounded up.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota = ControlGroup().cpu_quota()
    return cpus if quota is None else max(1, min(cpus, math.ceil(quota)))


def retain_freed_memory(retain: bool = True) -> None:
    """Make glibc retain freed memory from now on; other C libraries are left alone.

    glibc returns blocks of over 32 MiB at once, and touching their pages again can cost more than
    computing on them (1.4 ms a MiB in a virtual machine, measured). The probe needs this, and so
    does training with the state in RAM, whose plan has room for what is retained. Without `retain`
    glibc returns large blocks again, as it does by itself.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    return_freed_memory()
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 30 if retain else GLIBC_MMAP_THRESHOLD)
    libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1 if retain else 2 * GLIBC_MMAP_THRESHOLD)
    libc.mallopt(M_ARENA_MAX, 1)


def return_freed_memory() -> None:
    """Return to the system what glibc retains of freed memory; other C libraries are left alone.

    Without this, buffers used between steps would come on top of those that a step has freed: 300
    MB with GPT-2 124M. The next step touches the pages again, which costs time.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)


def cpu_name() -> str:
    """Return the CPU's name, or the architecture if the system does not state one."""
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if "model name" in line:
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def printable_name(name: str) -> str:
    """Return a name without control characters, cut to what a message may carry."""
    return "".join(c for c in name if c.isprintable())[:80]
