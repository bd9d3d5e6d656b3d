"""Describe a machine: its rates, as the hardware probe measured them, and its memory.

This is the planner's only view of the machine. Plain data, without torch.
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
from typing import Any, cast

Rates = tuple[tuple[int, float], ...]  # (a size, the rate at it), ascending in size

# A consumer SSD writes this part of its first gigabytes' rate when its cache is full: many fall to
# a third, some to a tenth, after some tens of gigabytes.
SUSTAINED_WRITES = 1 / 3

# Options of glibc's mallopt, from malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8


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
        matmul: by width d, of [1024, d] x [d, 4d] in `dtype`.
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
        logits: by vocabulary V, of [256, 512] x [512, V] in the dtype that training uses here.
        updates: AdamW in every form; `adam` is the host's in fp32.
        device_index: the GPU's number among this machine's GPUs.
        device_memory_free: bytes of GPU memory that nobody takes, CUDA's context of this process
            excluded; 0 if not measured.
        disk_size: bytes of the whole drive; 0 if not measured.
        disk_write_sustained: bytes/s that the disk writes for hours; 0 if not measured.
        processor: the CPU's name, also where a GPU computes; "" in older measurements.
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

    @property
    def device_name(self) -> str:
        """Return the device as torch names it: "cpu", "cuda" or "cuda:1"."""
        return f"{self.device}:{self.device_index}" if self.device_index else self.device

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
    """Return the RAM this process may use: the machine's, or its cgroup's lower limit."""
    if sys.platform == "win32":
        # MEMORYSTATUSEX: the first word holds its length and the load, the second the physical RAM.
        status = (ctypes.c_ulonglong * 8)()
        ctypes.cast(status, ctypes.POINTER(ctypes.c_ulong))[0] = ctypes.sizeof(status)
        if not ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
            raise OSError("Windows does not say how much memory there is")
        return status[1]
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *cgroup_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])


def cgroup_limits(membership: Path, root: Path) -> list[int]:
    """Return the memory limits of this process's control group and of those around it.

    Versions 1 and 2 are understood; outside Linux there are none. Inside a container the paths may
    be the host's and not exist: the root's own limit counts then.

    Args:
        membership: the file that lists the process's groups, one a line.
        root: where the control groups are mounted.
    """
    if not membership.exists():
        return []
    texts: list[str] = []
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        if controllers:  # version 1
            base, file = root / "memory", "memory.limit_in_bytes"
        else:
            base, file = root, "memory.max"
        group = base / path.lstrip("/")
        files = [each / file for each in [group, *group.parents] if each.is_relative_to(base)]
        texts += [each.read_text().strip() for each in files if each.exists()]
    return [int(text) for text in texts if text.isdigit()]  # the other text is "max"


def retain_freed_memory() -> None:
    """Make glibc retain freed memory from now on; other C libraries are left alone.

    glibc returns blocks of over 32 MiB at once, and touching their pages again can cost more than
    computing on them (1.4 ms a MiB in a virtual machine, measured). The probe and the engine need
    this.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    libc.malloc_trim(0)  # return what was freed before
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
    libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
    libc.mallopt(M_ARENA_MAX, 1)


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
