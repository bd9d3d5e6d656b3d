"""What a machine can do, measured: rates of arithmetic, memory, links and disk. The planner's one view of a machine.

`Hardware` is plain data and imports without torch; `probe` measures it in under 20 seconds and keeps the result in a
small JSON file. What changes between two starts (memory limits, free disk space) is looked up anew each time.
"""

import ctypes
import dataclasses
import errno
import json
import logging
import math
import mmap
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

from barnraise.errors import StateError

log = logging.getLogger("barnraise")

FORMAT = 1  # of the cache; raise it with every change of what is measured
KEEP_SECONDS = 30 * 86400
WIDTHS = (128, 256, 512, 768, 1024, 1600, 2048, 4096)
ROWS = 1024  # tokens in a measured product
PAYS = 1.3  # a narrower dtype must be this much faster in products to be worth its bits
CONTEXTS, HEADS = (128, 256, 512, 1024, 2048), (32, 64, 128)  # attention is measured along both, crossing at…
CONTEXT, HEAD = 1024, 64
RAM_ELEMENTS = 1 << 25  # fp32, four buffers of 128 MiB: far beyond caches
DISK_BYTES = 256 << 20
DISK_SECONDS = 2.0  # a slow disk is judged by what it does in this time, each way
REQUEST = 8 << 20

Rates = tuple[tuple[int, float], ...]  # (a size, a rate at it), ascending in size


@dataclass(frozen=True)
class Products:
    """FLOP/s of matrix products in one dtype by width d: forward is [1024, d] x [d, 4d] with a bias, backward the mean
    of the two products of its gradient."""

    dtype: str
    forward: Rates
    backward: Rates


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
    attention: float  # FLOP/s of causal scaled_dot_product_attention forward (counted as dense half)
    elementwise: float  # bytes/s (read + written) of streaming elementwise work: gelu, layer norm, residual adds
    to_device: float  # B/s, host → device, pinned (on a CPU: memcpy within RAM)
    from_device: float
    stream: float  # B/s, STREAM-triad-like RAM rate with all threads
    adam: float  # parameters/s of fused fp32 AdamW in RAM, all threads (28 bytes a parameter)
    disk_read: float  # B/s past the page cache, multi-megabyte requests
    disk_write: float
    products: tuple[Products, ...] = ()  # every dtype that was measured, float32 first
    attention_contexts: Rates = ()  # (context, FLOP/s) with heads 64 wide
    attention_heads: Rates = ()  # (head width, FLOP/s) at a context of 1,024
    attention_backward: float = 0.0  # FLOP/s of its gradient, 2.5 x the forward's FLOPs

    def in_dtype(self, dtype: str) -> Products:
        """The products' rates in `dtype`; the nearest known ones where it was not measured."""
        found = [products for products in self.products if products.dtype == dtype]
        return found[0] if found else Products(dtype, self.matmul, self.matmul)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Hardware":
        """Raises ValueError for anything but what `to_json` gave."""
        return _revived(cls, json.loads(text))


def probe(folder: Path, device: str | None = None, cache: Path | None = None) -> Hardware:
    """Measures this machine: `device` ("cpu" or "cuda"; what torch finds by default), its RAM, and the disk under
    `folder`, where a scratch file of 256 MiB comes and goes. `cache`: a JSON file to keep the result in, believed for
    30 days while device, threads, torch and folder are the same. Raises StateError when the folder cannot hold the
    scratch file."""
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    _make(folder)
    name = torch.cuda.get_device_name() if device == "cuda" else _cpu_name()
    key = {
        "format": FORMAT, "device": device, "name": name, "threads": torch.get_num_threads(),
        "torch": torch.__version__, "folder": str(folder.resolve()),
    }  # fmt: skip
    found = _recall(cache, key) if cache else None
    if found is None:
        found = _measure(folder, device, name)
        if cache:
            _remember(cache, key, found)
    return dataclasses.replace(found, memory=memory_bytes(), disk=shutil.disk_usage(folder).free)


# ---- keeping -------------------------------------------------------------------------------------------------


def _recall(cache: Path, key: dict[str, Any]) -> Hardware | None:
    if not cache.exists():
        return None
    try:
        kept = json.loads(cache.read_text())
        if kept["key"] == key and 0 <= time.time() - kept["at"] < KEEP_SECONDS:
            return _revived(Hardware, kept["hardware"])
        log.info("%s is of another machine or an old day: measuring anew", cache)
    except (OSError, ValueError, TypeError, LookupError) as error:
        log.warning("%s is damaged (%s): measuring anew", cache, error)
    return None


def _remember(cache: Path, key: dict[str, Any], found: Hardware) -> None:
    kept = json.dumps({"key": key, "at": time.time(), "hardware": dataclasses.asdict(found)})
    part = cache.with_name(cache.name + ".part")
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(kept)
        part.replace(cache)
    except OSError as error:  # worth 15 seconds at the next start, not this one's failure
        log.warning("the machine's measurements cannot be kept in %s: %s", cache, error)


def _revived(cls: Any, raw: Any) -> Any:
    """A dataclass of numbers, names and Rates from its plain JSON. Raises ValueError for anything else."""
    if not isinstance(raw, dict) or set(raw) != {f.name for f in dataclasses.fields(cls)}:
        raise ValueError(f"these are not the fields of {cls.__name__}")
    values = {}
    for f in dataclasses.fields(cls):
        value = raw[f.name]
        if f.type is Rates:
            value = tuple((int(size), _positive(rate)) for size, rate in value)
        elif f.type == tuple[Products, ...]:
            value = tuple(_revived(Products, each) for each in value)
        elif f.type is float:
            value = _positive(value)
        elif type(value) is not f.type:
            raise ValueError(f"{f.name} is not of its type")
        values[f.name] = value
    return cls(**values)


def _positive(rate: Any) -> float:
    if not isinstance(rate, int | float) or not 0 <= rate < math.inf:
        raise ValueError(f"{rate!r} is not a rate")
    return float(rate)


# ---- measuring -----------------------------------------------------------------------------------------------


def _measure(folder: Path, device: str, name: str) -> Hardware:
    import torch

    written, read = _disk_rates(folder)  # first: what needs no arithmetic fails at once
    cuda = device == "cuda"
    with torch.no_grad():
        stream, copy, adam = _ram_rates()
        to_device, from_device = _link_rates() if cuda else (copy, copy)
        products = [_products(device, torch.float32)]
        if _narrow_pays(device):
            products.append(_products(device, torch.bfloat16))
        dtype = products[-1].dtype
        at = {(t, HEAD) for t in CONTEXTS} | {(CONTEXT, head) for head in HEADS}
        attention = {point: _attention(device, dtype if cuda else "float32", *point)[0] for point in at}
        backward = _attention(device, dtype if cuda else "float32", CONTEXT, HEAD)[1]
        elementwise = _elementwise(device)
    return Hardware(
        device=device,
        name=name,
        cores=torch.get_num_threads(),
        memory=0,
        device_memory=torch.cuda.get_device_properties(0).total_memory if cuda else 0,
        disk=0,
        dtype=dtype,
        matmul=products[-1].forward,
        attention=attention[CONTEXT, HEAD],
        elementwise=elementwise,
        to_device=to_device,
        from_device=from_device,
        stream=stream,
        adam=adam,
        disk_read=read,
        disk_write=written,
        products=tuple(products),
        attention_contexts=tuple((t, attention[t, HEAD]) for t in CONTEXTS),
        attention_heads=tuple((head, attention[CONTEXT, head]) for head in HEADS),
        attention_backward=backward,
    )


def _seconds(call: Callable[[], Any], device: str = "cpu", budget: float = 0.2) -> float:
    """The median duration of a call: at least 3 after a first one that does not count, more while `budget` lasts."""
    import torch

    def once() -> float:
        begun = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    first = once()
    found = [once() for _ in range(3)] if first < 4 * budget else [once()]
    while sum(found) < budget and len(found) < 100:
        found.append(once())
    return median(found)


def _products(device: str, dtype: Any, seconds: float = 2.5) -> Products:
    """Widths ascending, for about `seconds`: a slow machine gets a shorter table."""
    import torch
    from torch.nn.functional import linear

    forward, backward = [], []
    deadline = time.perf_counter() + seconds
    for d in WIDTHS:
        x, dy = (torch.randn(ROWS, width, device=device, dtype=dtype) for width in (d, 4 * d))
        w, bias = torch.randn(4 * d, d, device=device, dtype=dtype), torch.randn(4 * d, device=device, dtype=dtype)
        flops = 2 * ROWS * d * 4 * d
        if forward and time.perf_counter() + 5 * 3 * flops / forward[-1][1] > deadline:
            break
        forward.append((d, flops / _seconds(lambda x=x, w=w, b=bias: linear(x, w, b), device, 0.05)))
        backward.append((d, 2 * flops / _seconds(lambda x=x, w=w, dy=dy: (dy @ w, dy.t() @ x), device, 0.1)))
    return Products(str(dtype).removeprefix("torch."), tuple(forward), tuple(backward))


def _narrow_pays(device: str) -> bool:
    import torch
    from torch.nn.functional import linear

    def rate(dtype: Any) -> float:
        x, w = (torch.randn(ROWS, 512, device=device).to(dtype) for _ in range(2))
        return 1 / _seconds(lambda: linear(x, w), device, 0.05)

    return rate(torch.bfloat16) > PAYS * rate(torch.float32)


def _attention(device: str, dtype: str, context: int, head: int) -> tuple[float, float]:
    """FLOP/s forward and backward, of tensors that lie as the model's do."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    heads, sequences = 512 // head, max(1, 2048 // context)
    shape = sequences, context, 3, heads, head
    qkv = torch.randn(shape, device=device, dtype=getattr(torch, dtype)).requires_grad_()
    dy = torch.randn(sequences, heads, context, head, device=device, dtype=qkv.dtype)

    def forward() -> Any:
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return scaled_dot_product_attention(query, key, value, is_causal=True)

    flops = 2 * sequences * heads * context * context * head
    there = _seconds(forward, device, 0.05)
    with torch.enable_grad():
        query, key, value = (part.detach().requires_grad_() for part in qkv.permute(2, 0, 3, 1, 4).unbind(0))
        y = scaled_dot_product_attention(query, key, value, is_causal=True)
    leaves = query, key, value
    back = _seconds(lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True), device, 0.1)
    return flops / there, 2.5 * flops / back


def _elementwise(device: str) -> float:
    """A block's own mix, 72 bytes an element of the stream: two layer norms, two residual adds, a gelu four wide."""
    import torch
    from torch.nn.functional import gelu, layer_norm

    x, ones = torch.randn(ROWS, 768, device=device), torch.ones(768, device=device)
    wide = torch.randn(ROWS, 4 * 768, device=device)

    def mix() -> None:
        layer_norm(layer_norm(x, (768,), ones, ones) + x, (768,), ones, ones) + x
        gelu(wide, approximate="tanh")

    return 72 * x.numel() / _seconds(mix, device)


def _ram_rates() -> tuple[float, float, float]:
    """Triad in bytes moved a second, memcpy in bytes copied, AdamW in parameters; none leaves room for a cache."""
    import torch

    a, b, c, d = (torch.zeros(RAM_ELEMENTS) for _ in range(4))
    size = a.numel() * a.element_size()
    triad = _seconds(lambda: torch.add(b, c, alpha=3.0, out=a))
    copy = _seconds(lambda: a.copy_(b))
    steps = torch.ones(())

    def adam() -> None:
        torch._fused_adamw_(
            [a], [b], [c], [d], [], [steps], lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    return 3 * size / triad, size / copy, a.numel() / _seconds(adam)


def _link_rates() -> tuple[float, float]:
    import torch

    host = torch.empty(RAM_ELEMENTS, pin_memory=True)
    device = torch.empty(RAM_ELEMENTS, device="cuda")
    size = host.numel() * host.element_size()
    to = _seconds(lambda: device.copy_(host, non_blocking=True), "cuda")
    back = _seconds(lambda: host.copy_(device, non_blocking=True), "cuda")
    return size / to, size / back


# ---- the disk ------------------------------------------------------------------------------------------------


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StateError(f"{folder} cannot be made: {error.strerror}") from None


def _disk_rates(folder: Path) -> tuple[float, float]:
    """Bytes/s written and read, one request of 8 MiB after another, past the page cache where the system lets us."""
    path = folder / f"probe-{os.getpid()}.scratch"
    try:
        block = mmap.mmap(-1, REQUEST)  # page-aligned, as O_DIRECT wants it
        block.write(os.urandom(REQUEST))  # zeros would flatter a disk that compresses
        with _uncached(path, create=True) as file:
            done, seconds = _stream(lambda: file.write(block), file, sync=True)
        with _uncached(path, create=False) as file:
            got, waited = _stream(lambda: file.readinto(block), file, sync=False)
        return done / seconds, got / waited
    except OSError as error:
        need = f"{DISK_BYTES >> 20} MiB free and the right to write"
        raise StateError(f"{folder} cannot be measured ({error.strerror}): it needs {need}") from None
    finally:
        path.unlink(missing_ok=True)


def _stream(request: Callable[[], int], file: BinaryIO, sync: bool) -> tuple[int, float]:
    done, begun = 0, time.perf_counter()
    while done < DISK_BYTES and time.perf_counter() - begun < DISK_SECONDS:
        moved = request()
        if not moved:
            break
        done += moved
    if sync:
        os.fsync(file.fileno())
    return done, time.perf_counter() - begun


@contextmanager
def _uncached(path: Path, create: bool) -> Iterator[BinaryIO]:
    """The file, unbuffered; past the page cache by O_DIRECT or F_NOCACHE where there is one and the file system takes
    it, else with its pages dropped first (its writes are fsynced by the caller)."""
    mode = "wb" if create else "rb"
    with _open(path, mode) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if sys.platform == "darwin":
            import fcntl

            fcntl.fcntl(file.fileno(), fcntl.F_NOCACHE, 1)
        yield file


def _open(path: Path, mode: str) -> BinaryIO:
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        try:
            return open(path, mode, buffering=0, opener=lambda name, flags: os.open(name, flags | direct, 0o600))
        except OSError as error:
            if error.errno != errno.EINVAL:  # which says: not on this file system
                raise
    return path.open(mode, buffering=0)


# ---- the machine ---------------------------------------------------------------------------------------------


def memory_bytes() -> int:
    """RAM this process may hope for: the machine's, or its cgroup's limit where that is lower."""
    if sys.platform == "win32":
        status = (ctypes.c_ulonglong * 8)()  # MEMORYSTATUSEX: length and load in the first, then total physical
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
        base, file = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        here = base / path.lstrip("/")
        for group in [here, *here.parents]:
            if group.is_relative_to(base) and (limit := group / file).exists():
                text = limit.read_text().strip()
                found += [int(text)] if text.isdigit() else []  # "max"
    return found


def _cpu_name() -> str:
    if sys.platform == "darwin":
        told = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False)
        return told.stdout.strip() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
