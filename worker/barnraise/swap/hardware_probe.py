"""Measure a machine in under 20 seconds: its rates of arithmetic, memory, links and disk.

The result is cached in a small JSON file. What changes between two starts (the memory limits, the
free memory of a GPU, the free disk space) is read again each time.
"""

import dataclasses
import hashlib
import io
import json
import logging
import mmap
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

from barnraise.durable_io import write_atomically
from barnraise.errors import StateError
from barnraise.formats import format_bytes
from barnraise.planning.control_group import ControlGroup
from barnraise.planning.hardware import (
    Hardware,
    MatmulRates,
    Rates,
    UpdateRate,
    available_memory,
    cpu_name,
    memory_bytes,
    printable_name,
    retain_freed_memory,
)
from barnraise.spec import Fragment
from barnraise.swap.adamw import AdamWStep, adamw_update
from barnraise.swap.arena import map_pages
from barnraise.swap.device import (
    choose_device,
    computes_bfloat16,
    device_label,
    free_memory,
    synchronize,
    total_memory,
    use_device,
)
from barnraise.swap.direct_io import checksum, open_direct
from barnraise.swap.forward_backward import VOCABULARY_MULTIPLE
from barnraise.swap.precision import BLOCK, Moments8, SplitWeights, update_8bit, update_split
from barnraise.swap.tile_threads import sharing_tiles

log = logging.getLogger("barnraise")

LAUNCHED_KERNELS = 256  # at a time, to measure how long starting one takes
FORMAT = 7  # of the cache; raise it with every change of what is measured
CACHE_SECONDS = 30 * 86400  # an older measurement is repeated

# The sizes of the measured operations.
WIDTHS = (128, 256, 512, 768, 1024, 1600, 2048, 4096)
ROWS = 1024  # tokens in a measured matrix product, and in the elementwise operations
LOGIT_ROWS = 256  # tokens in a measured product of the head
ATTENTION_TOKENS = 2048
# A GPU is done with so few tokens before its host has started the next kernel, which would be
# measured instead. There a product's result has so many elements, and more tokens take part.
GPU_PRODUCT_ELEMENTS = 1 << 25
GPU_ROWS = 1 << 14  # in the elementwise operations
GPU_ATTENTION_TOKENS = 1 << 15
# Attention is measured along two axes, which cross at CONTEXT and HEAD.
CONTEXTS = (128, 256, 512, 1024, 2048)
HEADS = (32, 64, 128)
CONTEXT = 1024
HEAD = 64
VOCABULARIES = (2048, 50257)
RAM_ELEMENTS = 1 << 25  # fp32, three buffers of 128 MiB: far larger than caches
DISK_BYTES = 256 << 20
REQUEST = 8 << 20  # bytes of one disk request

# The time that measuring may take.
ALL_RATES_SECONDS = 7.0  # all rates except the disk's
GPU_BATCH_SECONDS = 0.005  # calls to a GPU are timed together until they take this long
MAX_BATCH = 4096  # calls timed together
WIDEST_SECONDS = 0.06  # when one product takes this long, wider ones are not measured
DISK_SECONDS = 2.0  # a slow disk is measured for this time in each direction

# The width of the products that decide between dtypes.
TRIAL_WIDTH = {"cpu": 512, "cuda": 2048}
# A narrower dtype is used if its products are this many times as fast: it costs precision.
NARROW_DTYPE_SPEEDUP = 1.3

RateKey = tuple[str, int]  # the name of an operation and its size
Calls = dict[RateKey, tuple[float, Callable[[], Any]]]  # the work of one call, and the call
WorkRates = dict[RateKey, float]  # work per second


def probe(folder: Path, device: str | None = None, cache: Path | None = None) -> Hardware:
    """Measure the device, the RAM, and the disk under a folder.

    Args:
        folder: Where a scratch file of 256 MiB is written, read and removed; created if missing.
        device: "cpu", "cuda" or "cuda:1"; by default what `choose_device` chooses.
        cache: A JSON file for the result. It is valid for 30 days while the device, the number of
            threads, the quota of CPU time, the version of torch and the folder stay the same.

    Raises:
        StateError: The folder cannot hold the scratch file.
    """
    device = device or choose_device().name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StateError(f"{folder} cannot be created: {error.strerror}") from None
    hardware = _load_cached(cache, _cache_key(folder, device)) if cache else None
    kind, _, number = device.partition(":")
    if hardware is None:
        with use_device(device):
            hardware = measure_hardware(folder, kind, _device_name(device))
        if cache:
            save_measurement(cache, folder, device, hardware)
    disk = shutil.disk_usage(folder)
    sized = dataclasses.replace(
        hardware,
        memory=memory_bytes(),
        device_index=int(number or 0),
        device_memory=total_memory(device),
        disk=disk.free,
        disk_size=disk.total,
        processor=printable_name(cpu_name()),
    )
    return measure_free(sized)


def measure_free(hardware: Hardware) -> Hardware:
    """Return a machine's measurement with the memory that is free now."""
    return dataclasses.replace(
        hardware,
        memory_available=available_memory(),
        device_memory_free=free_memory(hardware.device_name),
        others=tuple(map(measure_free, hardware.others)),
    )


# ---- the cache -------------------------------------------------------------------------------


def _device_name(device: str) -> str:
    return device_label(device) or cpu_name()


def _cache_key(folder: Path, device: str) -> list[Any]:
    """Return what must not have changed since a measurement, for it to be used again."""
    name, place = _device_name(device), str(folder.resolve())
    threads, quota = torch.get_num_threads(), ControlGroup().cpu_quota()
    return [FORMAT, device, name, threads, quota, torch.__version__, place]


def _load_cached(cache: Path, key: list[Any]) -> Hardware | None:
    """Return the cached measurement if it is intact, recent and has this key."""
    if not cache.exists():
        return None
    try:
        cached = json.loads(cache.read_text())
        if cached["digest"] != hashlib.sha256(cached["hardware"].encode()).hexdigest():
            raise ValueError("its digest is wrong")
        if cached["key"] == key and 0 <= time.time() - cached["at"] < CACHE_SECONDS:
            return Hardware.from_json(cached["hardware"])
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        log.warning("%s is damaged (%s): measuring again", cache, error)
    return None


def save_measurement(cache: Path, folder: Path, device: str, hardware: Hardware) -> None:
    """Write a measurement to the cache. Log an error: it costs only time at the next start."""
    text = hardware.to_json()
    cached = {
        "key": _cache_key(folder, device),
        "at": time.time(),
        "hardware": text,
        "digest": hashlib.sha256(text.encode()).hexdigest(),
    }
    try:
        write_atomically(cache, json.dumps(cached).encode())
    except OSError as error:
        log.warning("the machine's measurements cannot be saved in %s: %s", cache, error)


# ---- arithmetic and memory -------------------------------------------------------------------


def measure_hardware(folder: Path, device: str, name: str) -> Hardware:
    """Measure the device called `name`, RAM, and the disk under the folder.

    Returns:
        The measurements, with zero for the sizes of memory and disk.
    """
    disk_rates = measure_disk(folder)  # first, because a folder that cannot be used fails at once
    retain_freed_memory()
    dtypes = ["float32"]
    if computes_bfloat16(device):
        plain_rate, narrow_rate = _measure_trial(device)
        if narrow_rate > NARROW_DTYPE_SPEEDUP * plain_rate:
            dtypes.append("bfloat16")
    training_dtype = dtypes[-1] if device == "cuda" else "float32"

    calls = memory_calls(device) | update_calls("host")
    if device == "cuda":
        calls |= update_calls("device") | _launch_calls(device)
    calls |= attention_calls(device, training_dtype, CONTEXTS, HEADS, (CONTEXT, HEAD))
    for dtype in dtypes:
        vocabularies = VOCABULARIES if dtype == training_dtype else ()
        calls |= product_calls(device, dtype, WIDTHS, vocabularies)
    with sharing_tiles(device == "cuda"):  # as the optimizer's lane does
        rates = measure_rates(calls, device, ALL_RATES_SECONDS)
    return build_hardware((device, name), dtypes, rates, disk_rates)


def _measure_trial(device: str) -> tuple[float, float]:
    """Measure the FLOP/s of one product in fp32 and in bf16."""
    width = TRIAL_WIDTH[device]
    trial: Calls = {}
    for dtype in ("float32", "bfloat16"):
        key = (f"{dtype} forward", width)
        trial[key] = product_calls(device, dtype, (width,))[key]
    plain_rate, narrow_rate = measure_rates(trial, device, 0.3).values()
    return plain_rate, narrow_rate


def build_hardware(
    device: tuple[str, str], dtypes: list[str], rates: WorkRates, disk_rates: tuple[float, float]
) -> Hardware:
    """Arrange measured rates as a `Hardware`, with zero for the sizes of memory and disk.

    The device is its kind ("cpu" or "cuda") and its name. The dtypes are those of the measured
    products, float32 first. The disk's rates are bytes per second written and read.
    """

    def rates_by_size(operation: str) -> Rates:
        sizes = ((size, rate) for (name, size), rate in rates.items() if name == operation)
        return tuple(sorted(sizes))

    kind, name = device
    write_rate, read_rate = disk_rates
    ((crossing_context, backward_rate),) = rates_by_size("attention backward")
    updates: list[UpdateRate] = []
    for (operation, bits), rate in rates.items():
        where, _, dtype = operation.partition(" ")
        if where in ("host", "device"):
            updates.append(UpdateRate(where, dtype, bits, rate))
    products = tuple(
        MatmulRates(dtype, rates_by_size(f"{dtype} forward"), rates_by_size(f"{dtype} backward"))
        for dtype in dtypes
    )
    return Hardware(
        device=kind,
        name=name,
        cores=torch.get_num_threads(),
        memory=0,
        disk=0,
        device_memory=0,
        dtype=dtypes[-1],
        matmul=products[-1].forward,
        products=products,
        logits=rates_by_size("logits"),
        attention=rates["attention", crossing_context],
        attention_backward=backward_rate,
        attention_contexts=rates_by_size("attention"),
        attention_heads=rates_by_size("attention by head"),
        elementwise=rates["elementwise", 0],
        stream=rates["stream", 0],
        adam=rates["host float32", 32],
        updates=tuple(updates),
        to_device=rates["to device", 0],
        from_device=rates["from device", 0],
        launches=rates.get(("launches", 0), 0.0),
        disk_write=write_rate,
        disk_read=read_rate,
    )


def measure_rates(
    calls: Calls, device: str, seconds: float, average: Callable[[list[float]], float] = median
) -> WorkRates:
    """Measure the work per second of each call.

    The calls take turns for some rounds, so that another program slows each of them for a while and
    none throughout; the median ignores it. The best time is not a measure, because the hundreds of
    calls of a step hardly ever reach it.

    All calls together may take so many seconds. `average` chooses one of a call's times.
    """

    def time_call(call: Callable[[], Any], times: int = 1) -> float:
        start = time.perf_counter()
        for _ in range(times):
            call()
        synchronize(device)
        return (time.perf_counter() - start) / times

    samples: dict[RateKey, list[float]] = {key: [] for key in calls}
    with torch.no_grad():
        # The first call loads, compiles and touches what later ones find ready: it does not count.
        for _, call in calls.values():
            time_call(call)
        batches = dict.fromkeys(calls, 1)
        if device == "cuda":
            # To start a kernel and to wait for it take longer than many kernels run.
            batches = {key: _count_batch(call, time_call) for key, (_, call) in calls.items()}
        deadline = time.perf_counter() + seconds
        rounds = 0
        while rounds < 2 or time.perf_counter() < deadline:
            for key, (_, call) in calls.items():
                call_seconds = time_call(call, batches[key])
                repetitions = 5 if call_seconds < 0.02 else 0
                samples[key].append(call_seconds)
                samples[key] += [time_call(call, batches[key]) for _ in range(repetitions)]
            rounds += 1
    return {key: work / average(samples[key]) for key, (work, _) in calls.items()}


def _count_batch(call: Callable[[], Any], time_call: Callable[..., float]) -> int:
    """Return how many calls take GPU_BATCH_SECONDS together, a power of two."""
    times = 1
    while times < MAX_BATCH and times * time_call(call, times) < GPU_BATCH_SECONDS:
        times *= 2
    return times


def product_calls(
    device: str, dtype: str, widths: Sequence[int], vocabularies: Sequence[int] = ()
) -> Calls:
    """Return the products of a block by width, and of the head by vocabulary.

    On a slow machine the wide products are left out. The head multiplies a slice of the rows with
    the whole vocabulary, whose bf16 rows a GPU pads as the engine does.
    """

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=getattr(torch, dtype))

    on_gpu = device == "cuda"

    def count_rows(columns: int, rows: int) -> int:
        """Return the rows of a result with so many columns; `rows` on a CPU."""
        return max(rows, GPU_PRODUCT_ELEMENTS // columns) if on_gpu else rows

    # All widths read the same numbers: several times as many would not fit a small card.
    largest = max(count_rows(4 * width, ROWS) * width for width in widths)
    inputs, gradients = random(largest), random(4 * largest)
    calls: Calls = {}
    for width in widths:
        rows = count_rows(4 * width, ROWS)
        x = inputs[: rows * width].view(rows, width)
        gradient = gradients[: 4 * rows * width].view(rows, 4 * width)
        weights, bias = random(4 * width, width), random(4 * width)

        def differentiate(
            x: Tensor = x, weights: Tensor = weights, gradient: Tensor = gradient
        ) -> tuple[Tensor, Tensor]:
            return gradient @ weights, gradient.t() @ x

        flops = 2 * rows * width * 4 * width
        calls[f"{dtype} forward", width] = flops, partial(linear, x, weights, bias)
        calls[f"{dtype} backward", width] = 2 * flops, differentiate
        # A first product takes longer; the choice of widths should not depend on that.
        linear(x, weights, bias).sum().item()
        start = time.perf_counter()
        linear(x, weights, bias).sum().item()
        if time.perf_counter() - start > WIDEST_SECONDS:
            break
    for vocabulary in vocabularies:
        x = random(count_rows(vocabulary, LOGIT_ROWS), 512)
        multiple = VOCABULARY_MULTIPLE if on_gpu and dtype != "float32" else 1
        weights = random(-(-vocabulary // multiple) * multiple, 512)
        calls["logits", vocabulary] = 2 * x.numel() * vocabulary, partial(linear, x, weights)
    return calls


def attention_calls(
    device: str,
    dtype: str,
    contexts: Sequence[int],
    heads: Sequence[int],
    crossing: tuple[int, int],
) -> Calls:
    """Return attention by context and by head width, over tensors laid out like the model's.

    Contexts are measured with the head width of the crossing, and head widths with its context.
    Where both cross, the gradient is measured too.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True)

    tokens = GPU_ATTENTION_TOKENS if device == "cuda" else ATTENTION_TOKENS
    crossing_context, crossing_head = crossing
    points = [("attention", context, crossing_head, context) for context in contexts]
    points += [("attention by head", head, head, crossing_context) for head in heads]
    longest = max(max(1, tokens // context) * context for _, _, _, context in points)
    values = torch.randn(longest * 3 * 512, device=device, dtype=getattr(torch, dtype))
    calls: Calls = {}
    for operation, size, head, context in points:
        batch = max(1, tokens // context)
        shape = batch, context, 3, 512 // head, head
        elements = batch * context * 3 * (512 // head) * head
        qkv = values[:elements].view(shape).permute(2, 0, 3, 1, 4)
        flops = 2 * batch * context * context * 512
        calls[operation, size] = flops, partial(attend, *qkv.unbind(0))
        if (operation, size) == ("attention", crossing_context):
            leaves = [part.requires_grad_() for part in qkv.detach().unbind(0)]
            output = attend(*leaves)
            output_gradient = torch.randn_like(output)
            calls["attention backward", size] = (
                2.5 * flops,
                partial(torch.autograd.grad, output, leaves, output_gradient, retain_graph=True),
            )
    return calls


def memory_calls(device: str) -> Calls:
    """Return the operations that the speed of memory limits.

    They are a triad in RAM, larger than every cache; copies to and from the device; and a block's
    elementwise operations, which move 72 bytes per element of the residual stream: two layer norms,
    two residual additions, and a GELU of four times the width.
    """
    # Write to every page: untouched ones are all the same page of zeros.
    pages = [map_pages(4 * RAM_ELEMENTS, huge=True) for _ in range(3)]
    a, b, c = (page.view(torch.float32).fill_(1e-3) for page in pages)
    if device == "cuda":
        host_buffer, device_buffer = a.pin_memory(), a.to(device)
    else:
        host_buffer, device_buffer = a, b
    rows = GPU_ROWS if device == "cuda" else ROWS
    x = torch.randn(rows, 768, device=device)
    wide = torch.randn(rows, 4 * 768, device=device)
    ones = torch.randn(768, device=device)

    def run_elementwise() -> None:
        after_attention = layer_norm(x, (768,), ones, ones) + x
        torch.add(layer_norm(after_attention, (768,), ones, ones), x)
        gelu(wide, approximate="tanh")

    copied_bytes = 4 * RAM_ELEMENTS
    return {
        ("stream", 0): (12 * RAM_ELEMENTS, lambda: torch.add(b, c, alpha=3.0, out=a)),
        ("to device", 0): (
            copied_bytes,
            lambda: device_buffer.copy_(host_buffer, non_blocking=True),
        ),
        ("from device", 0): (
            copied_bytes,
            lambda: host_buffer.copy_(device_buffer, non_blocking=True),
        ),
        ("elementwise", 0): (72 * x.numel(), run_elementwise),
    }


def _launch_calls(device: str) -> Calls:
    """Return kernels so small that starting them takes longer than running them."""
    x = torch.zeros(64, device=device)

    def launch() -> None:
        for _ in range(LAUNCHED_KERNELS):
            x.mul(2.0)  # a new tensor each time, as most operations of a step make one

    return {("launches", 0): (LAUNCHED_KERNELS, launch)}


def update_calls(where: str) -> Calls:
    """Return AdamW on the "host" or "device", in every form of weights and moments."""
    elements = RAM_ELEMENTS // 2
    blocks = -(-elements // BLOCK)
    device = "cuda" if where == "device" else "cpu"

    def small_values(count: int) -> Tensor:
        return torch.full((count,), 1e-3, device=device)

    fragment = Fragment(0, "probe", (), elements)
    step = AdamWStep(fragment, number=100, learning_rate=1e-4, weight_decay=0.0)
    weights, gradient, m, v = (small_values(elements) for _ in range(4))
    high = weights.bfloat16()
    low = torch.zeros(elements, dtype=torch.int16, device=device)
    moments = Moments8(
        m=torch.ones(elements, dtype=torch.uint8, device=device),
        v=torch.ones(elements, dtype=torch.uint8, device=device),
        m_scale=small_values(blocks),
        v_scale=small_values(blocks),
    )
    split = SplitWeights(high, low)
    updates = {
        (f"{where} float32", 32): partial(adamw_update, step, 0, weights, gradient, m, v),
        (f"{where} float32", 8): partial(update_8bit, step, 0, weights, gradient, moments),
        (f"{where} bfloat16", 32): partial(update_split, step, 0, split, gradient, m, v),
        (f"{where} bfloat16", 8): partial(update_8bit, step, 0, high, gradient, moments, low=low),
    }
    return {key: (elements, update) for key, update in updates.items()}


# ---- the disk --------------------------------------------------------------------------------


def measure_disk(folder: Path) -> tuple[float, float]:
    """Measure the bytes per second that the disk under the folder writes and reads.

    Requests of 8 MiB follow each other, with checksums as in the state store. They bypass the page
    cache where the system allows it.

    Raises:
        StateError: The folder cannot hold the scratch file.
    """
    path = folder / f"probe-{os.getpid()}.scratch"
    block = mmap.mmap(-1, REQUEST)  # page-aligned, as O_DIRECT requires
    block.write(os.urandom(REQUEST))  # a disk that compresses would be too fast with zeros
    data = torch.frombuffer(block, dtype=torch.uint8)

    def write(file: io.FileIO) -> int:
        checksum(data)
        return file.write(block)

    def read(file: io.FileIO) -> int:
        count = file.readinto(block)
        checksum(data)
        return count or 0

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # like the disk's lane
    try:
        try:
            with _open_uncached(path, "wb") as file:
                write_rate = _transfer_rate(
                    partial(write, file), finish=partial(os.fsync, file.fileno())
                )
            with _open_uncached(path, "rb") as file:
                read_rate = _transfer_rate(partial(read, file), finish=lambda: None)
        finally:
            torch.set_num_threads(threads)
            path.unlink(missing_ok=True)
    except OSError as error:
        need = f"{format_bytes(DISK_BYTES)} free and the right to write"
        raise StateError(
            f"{folder} cannot be measured ({error.strerror}): it needs {need}"
        ) from None
    return write_rate, read_rate


def _transfer_rate(request: Callable[[], int], finish: Callable[[], None]) -> float:
    """Repeat a request until the file or the time ends, and return the bytes per second."""
    transferred = 0
    start = time.perf_counter()
    while transferred < DISK_BYTES and time.perf_counter() - start < DISK_SECONDS:
        count = request()
        if not count:
            break
        transferred += count
    finish()
    return transferred / (time.perf_counter() - start)


@contextmanager
def _open_uncached(path: Path, mode: str) -> Iterator[io.FileIO]:
    """Open a file unbuffered, past the page cache if possible.

    O_DIRECT or F_NOCACHE bypass the cache where the system and the file system support them.
    Otherwise the file's pages are dropped from the cache first, for which its writer must have
    called fsync.
    """
    with io.FileIO(path, mode, opener=lambda name, flags: open_direct(name, flags)[0]) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if sys.platform == "darwin":
            import fcntl

            fcntl.fcntl(file.fileno(), fcntl.F_NOCACHE, 1)
        yield file
