"""Measures a machine: rates of arithmetic, memory, links and disk, in under 20 seconds, kept in a small JSON file. What
changes between two starts (memory limits, free disk space) is looked up again each time.
"""

import dataclasses
import errno
import hashlib
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
from statistics import fmean, median
from typing import Any, BinaryIO

from barnraise.errors import StateError
from barnraise.planning.hardware import (
    Hardware,
    MatmulRates,
    Rates,
    UpdateRate,
    cpu_name,
    memory_bytes,
    retain_freed_memory,
)
from barnraise.spec import Fragment, ModelSpec

log = logging.getLogger("barnraise")

FORMAT = 3  # of the cache; raise it with every change of what is measured
KEEP_SECONDS = 30 * 86400
WIDTHS = (128, 256, 512, 768, 1024, 1600, 2048, 4096)
ROWS = 1024  # tokens in a measured product
WIDEST_SECONDS = 0.06  # where one product takes this long, wider ones are left out
SECONDS, AGAIN_SECONDS = 7.0, 3.0  # for all rates but the disk's; for one model's
PAYS = 1.3  # a narrower dtype must be this much faster in products to be worth its bits
CONTEXTS, HEADS = (
    (128, 256, 512, 1024, 2048),
    (32, 64, 128),
)  # attention is measured along both axes, which cross here
CONTEXT, HEAD = 1024, 64
VOCABULARIES = (2048, 50257)
RAM_ELEMENTS = 1 << 25  # fp32, three buffers of 128 MiB: far beyond caches
DISK_BYTES = 256 << 20
DISK_SECONDS = 2.0  # a slow disk is judged by what it does in this time, each way
REQUEST = 8 << 20


def probe(folder: Path, device: str | None = None, cache: Path | None = None) -> Hardware:
    """Measures this machine: `device` ("cpu" or "cuda"; what torch finds by default), its RAM, and the disk under
    `folder`, where a scratch file of 256 MiB comes and goes. `cache`: a JSON file to keep the result in, believed for
    30 days while device, threads, torch and folder are the same. Raises StateError when the folder cannot hold the
    scratch file."""
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StateError(f"{folder} cannot be made: {error.strerror}") from None
    name = torch.cuda.get_device_name() if device == "cuda" else cpu_name()
    key = [FORMAT, device, name, torch.get_num_threads(), torch.__version__, str(folder.resolve())]
    found = _recall(cache, key) if cache else None
    if found is None:
        found = measure_hardware(folder, device, name)
        if cache:
            _remember(cache, key, found)
    return dataclasses.replace(found, memory=memory_bytes(), disk=shutil.disk_usage(folder).free)


# ---- keeping -------------------------------------------------------------------------------------------------


def _recall(cache: Path, key: list[Any]) -> Hardware | None:
    if not cache.exists():
        return None
    try:
        kept = json.loads(cache.read_text())
        if kept["digest"] != hashlib.sha256(kept["hardware"].encode()).hexdigest():
            raise ValueError("its digest is wrong")
        if kept["key"] == key and 0 <= time.time() - kept["at"] < KEEP_SECONDS:
            return Hardware.from_json(kept["hardware"])
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        log.warning("%s is damaged (%s): measuring again", cache, error)
    return None


def _remember(cache: Path, key: list[Any], found: Hardware) -> None:
    text = found.to_json()
    kept = {
        "key": key,
        "at": time.time(),
        "hardware": text,
        "digest": hashlib.sha256(text.encode()).hexdigest(),
    }
    part = cache.with_name(f"{cache.name}.{os.getpid()}")
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(kept))
        part.replace(cache)
    except OSError as error:  # worth some seconds at the next start, not this one's failure
        log.warning("the machine's measurements cannot be kept in %s: %s", cache, error)


# ---- measuring -----------------------------------------------------------------------------------------------

Calls = dict[
    tuple[str, int], tuple[float, Callable[[], Any]]
]  # (what, its size) → (work of a call, the call)
Found = dict[tuple[str, int], float]  # (operation, size) → work a second


def again(folder: Path, model: ModelSpec) -> Callable[[], Hardware]:
    """Measure the CPU at each call, in four seconds, at this model's sizes alone: what its plans take in fp32
    *now*, on a machine that others share. Rates are of mean times: a step meets the others' visits as well."""
    retain_freed_memory()
    calls = _products("cpu", "float32", (model.width,), (model.vocabulary,)) | _memory("cpu")
    calls |= _attention(
        "cpu", "float32", (model.context,), (), (model.context, model.width // model.heads)
    )
    calls |= {form: call for form, call in _updates("host").items() if form == ("host float32", 32)}

    def measure() -> Hardware:
        disk = measure_disk(folder)
        return _hardware(
            "cpu", cpu_name(), ["float32"], measure_rates(calls, "cpu", AGAIN_SECONDS, fmean), disk
        )

    return measure


def measure_hardware(folder: Path, device: str, name: str) -> Hardware:
    """Measure the device called `name`, RAM, and the disk under the folder.

    Returns:
        The measurements, with zero for the sizes of memory and disk.
    """
    disk = measure_disk(folder)  # first: what needs no arithmetic fails at once
    retain_freed_memory()
    cuda, dtypes = device == "cuda", ["float32", "bfloat16"]
    tried = {
        (f"{dtype} forward", 512): _products(device, dtype, (512,))[f"{dtype} forward", 512]
        for dtype in dtypes
    }
    plain, narrow = measure_rates(tried, device, 0.3).values()
    dtypes = dtypes if narrow > PAYS * plain else dtypes[:1]
    usual = dtypes[-1] if cuda else "float32"
    calls = _memory(device) | _updates("host") | (_updates("device") if cuda else {})
    calls |= _attention(device, usual, CONTEXTS, HEADS, (CONTEXT, HEAD))
    for dtype in dtypes:
        calls |= _products(device, dtype, WIDTHS, VOCABULARIES if dtype == usual else ())
    return _hardware(device, name, dtypes, measure_rates(calls, device, SECONDS), disk)


def _hardware(
    device: str, name: str, dtypes: list[str], rates: Found, disk: tuple[float, float]
) -> Hardware:
    """`disk`: written, read. How much of it and of memory there is, is looked up elsewhere."""
    import torch

    def table(what: str) -> Rates:
        return tuple(sorted((size, rate) for (found, size), rate in rates.items() if found == what))

    ((context, backward),) = table("attention backward")
    forms = [
        (*what.split(), bits, rate)
        for (what, bits), rate in rates.items()
        if what.startswith(("host ", "device "))
    ]
    products = tuple(
        MatmulRates(dtype, table(f"{dtype} forward"), table(f"{dtype} backward"))
        for dtype in dtypes
    )
    return Hardware(
        device=device, name=name, cores=torch.get_num_threads(), memory=0, disk=0,
        device_memory=torch.cuda.get_device_properties(0).total_memory if device == "cuda" else 0,
        dtype=dtypes[-1], matmul=products[-1].forward, products=products, logits=table("logits"),
        attention=rates["attention", context], attention_backward=backward,
        attention_contexts=table("attention"), attention_heads=table("attention by head"),
        elementwise=rates["elementwise", 0], stream=rates["stream", 0], adam=rates["host float32", 32],
        updates=tuple(UpdateRate(*form) for form in forms),
        to_device=rates["to device", 0], from_device=rates["from device", 0], disk_write=disk[0], disk_read=disk[1],
    )  # fmt: skip


def measure_rates(
    calls: Calls, device: str, seconds: float, usual: Callable[[list[float]], float] = median
) -> Found:
    """Measure the work per second of each call.

    The calls take turns for some rounds, so that another program slows each of them for a while and
    none throughout; the median ignores it. The best time is no measure, because the hundreds of
    calls of a step hardly ever reach it.

    Args:
        calls: The work of one call, and the call, by its name and size.
        device: "cpu" or "cuda".
        seconds: The time for all calls together.
        usual: Chooses one of a call's times, in seconds.
    """
    import torch

    def duration(call: Callable[[], Any], times: int = 1) -> float:
        begun = time.perf_counter()
        for _ in range(times):
            call()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begun) / times

    taken: dict[tuple[str, int], list[float]] = {what: [] for what in calls}
    with torch.no_grad():
        for _, call in calls.values():
            duration(call)  # what is loaded, compiled or touched the first time is no part of it
        deadline, rounds = time.perf_counter() + seconds, 0
        while rounds < 2 or time.perf_counter() < deadline:
            for what, (_, call) in calls.items():
                took = duration(call)
                times = (
                    1 + int(0.002 / took) if device == "cuda" else 1
                )  # to start a kernel takes longer than many run
                more = 5 if took < 0.02 else 0
                taken[what] += [took, *(duration(call, times) for _ in range(more))]
            rounds += 1
    return {what: work / usual(taken[what]) for what, (work, _) in calls.items()}


def _products(
    device: str, dtype: str, widths: Sequence[int], vocabularies: Sequence[int] = ()
) -> Calls:
    """A block's, of a slow machine the narrower ones alone; and the head's, a slice of rows with all words."""
    import torch
    from torch.nn.functional import linear

    calls: Calls = {}
    like = {"device": device, "dtype": getattr(torch, dtype)}
    for d in widths:
        x, dy = torch.randn(ROWS, d, **like), torch.randn(ROWS, 4 * d, **like)
        w, bias = torch.randn(4 * d, d, **like), torch.randn(4 * d, **like)
        flops = 2 * ROWS * d * 4 * d
        calls[f"{dtype} forward", d] = flops, partial(linear, x, w, bias)
        calls[f"{dtype} backward", d] = 2 * flops, lambda x=x, w=w, dy=dy: (dy @ w, dy.t() @ x)
        linear(x, w, bias).sum().item()
        begun = (
            time.perf_counter()
        )  # a first product takes longer, and which widths are measured should not hang on it
        linear(x, w, bias).sum().item()
        if time.perf_counter() - begun > WIDEST_SECONDS:
            break
    for words in vocabularies:
        x, w = torch.randn(256, 512, **like), torch.randn(words, 512, **like)
        calls["logits", words] = 2 * x.numel() * words, partial(linear, x, w)
    return calls


def _attention(
    device: str,
    dtype: str,
    contexts: Sequence[int],
    heads: Sequence[int],
    crossing: tuple[int, int],
) -> Calls:
    """Over tensors that lie as the model's do: along both, each with the other as it is at the `crossing`, where the
    gradient is measured too."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    attend, calls = partial(scaled_dot_product_attention, is_causal=True), {}
    points = [("attention", t, crossing[1], t) for t in contexts]
    points += [("attention by head", h, h, crossing[0]) for h in heads]
    for what, size, head, context in points:
        shape = max(1, 2048 // context), context, 3, 512 // head, head
        qkv = torch.randn(shape, device=device, dtype=getattr(torch, dtype)).permute(2, 0, 3, 1, 4)
        flops = 2 * shape[0] * context * context * 512
        calls[what, size] = flops, partial(attend, *qkv.unbind(0))
        if (what, size) == ("attention", crossing[0]):
            leaves = [part.requires_grad_() for part in qkv.detach().unbind(0)]
            y = attend(*leaves)
            gradient = partial(
                torch.autograd.grad, y, leaves, torch.randn_like(y), retain_graph=True
            )
            calls["attention backward", size] = 2.5 * flops, gradient
    return calls


def _memory(device: str) -> Calls:
    """What memory binds: a triad in RAM, beyond every cache; copies; and a block's elementwise mix, 72 bytes an
    element of the stream: two layer norms, two residual adds, a gelu four wide."""
    import torch
    from torch.nn.functional import gelu, layer_norm

    def mapped() -> Any:  # in pages as the engine's own: large ones where the system has them
        pages = mmap.mmap(-1, 4 * RAM_ELEMENTS)
        if Path("/sys/kernel/mm/transparent_hugepage").exists():
            pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=torch.float32).fill_(
            1e-3
        )  # untouched ones are all one page of zeros

    a, b, c = (mapped() for _ in range(3))
    host, there = a, b
    if device == "cuda":
        host, there = a.pin_memory(), a.to(device)
    x, wide, ones = (
        torch.randn(*shape, device=device) for shape in ((ROWS, 768), (ROWS, 4 * 768), (768,))
    )

    def mix() -> None:
        layer_norm(layer_norm(x, (768,), ones, ones) + x, (768,), ones, ones) + x
        gelu(wide, approximate="tanh")

    return {
        ("stream", 0): (12 * RAM_ELEMENTS, lambda: torch.add(b, c, alpha=3.0, out=a)),
        ("to device", 0): (4 * RAM_ELEMENTS, lambda: there.copy_(host, non_blocking=True)),
        ("from device", 0): (4 * RAM_ELEMENTS, lambda: host.copy_(there, non_blocking=True)),
        ("elementwise", 0): (72 * x.numel(), mix),
    }


def _updates(where: str) -> Calls:
    """AdamW in every form that weights and moments are kept in, as the engine makes it."""
    import torch

    from barnraise.swap.adamw import AdamWStep, adamw_update
    from barnraise.swap.precision import BLOCK, Moments8, SplitWeights, update_8bit, update_split

    n = RAM_ELEMENTS // 2
    like = {"device": "cuda" if where == "device" else "cpu"}
    fragment = Fragment(0, "probe", (), n)
    step = AdamWStep(fragment, number=100, learning_rate=1e-4, weight_decay=0.0)
    weights, gradient, m, v = (torch.full((n,), 1e-3, **like) for _ in range(4))
    high, low = weights.bfloat16(), torch.zeros(n, dtype=torch.int16, **like)
    coded = (torch.ones(n, dtype=torch.uint8, **like) for _ in range(2))
    eight = Moments8(*coded, *(torch.full((-(-n // BLOCK),), 1e-3, **like) for _ in range(2)))
    return {
        (f"{where} float32", 32): (
            n,
            partial(adamw_update, step, 0, weights, gradient, m, v),
        ),
        (f"{where} float32", 8): (
            n,
            partial(update_8bit, step, 0, weights, gradient, eight),
        ),
        (f"{where} bfloat16", 32): (
            n,
            partial(update_split, step, 0, SplitWeights(high, low), gradient, m, v),
        ),
        (f"{where} bfloat16", 8): (
            n,
            partial(update_8bit, step, 0, high, gradient, eight, low=low),
        ),
    }


# ---- the disk ------------------------------------------------------------------------------------------------


def measure_disk(folder: Path) -> tuple[float, float]:
    """Measure the bytes per second that the disk under the folder writes and reads.

    Requests of 8 MiB follow each other, with checksums as in the state store. They bypass the page
    cache where the system allows it.
    """
    import torch

    from barnraise.swap.direct_io import checksum

    path = folder / f"probe-{os.getpid()}.scratch"
    block = mmap.mmap(-1, REQUEST)  # page-aligned, as O_DIRECT wants it
    block.write(os.urandom(REQUEST))  # zeros would flatter a disk that compresses
    data, threads = torch.frombuffer(block, dtype=torch.uint8), torch.get_num_threads()

    def write() -> int:
        checksum(data)
        return file.write(block)

    def read() -> int:
        got = file.readinto(block)
        checksum(data)
        return got

    torch.set_num_threads(1)  # as a disk's lane has
    try:
        try:
            with _uncached(path, "wb") as file:
                written = _rate(write, lambda: os.fsync(file.fileno()))
            with _uncached(path, "rb") as file:
                return written, _rate(read, lambda: None)
        finally:
            torch.set_num_threads(threads)
            path.unlink(missing_ok=True)
    except OSError as error:
        need = f"{DISK_BYTES >> 20} MiB free and the right to write"
        raise StateError(
            f"{folder} cannot be measured ({error.strerror}): it needs {need}"
        ) from None


def _rate(request: Callable[[], int], finish: Callable[[], Any]) -> float:
    done, begun = 0, time.perf_counter()
    while done < DISK_BYTES and time.perf_counter() - begun < DISK_SECONDS and (moved := request()):
        done += moved
    finish()
    return done / (time.perf_counter() - begun)


@contextmanager
def _uncached(path: Path, mode: str) -> Iterator[BinaryIO]:
    """The file, unbuffered; past the page cache by O_DIRECT or F_NOCACHE where there is one and the file system takes
    it, else with its pages dropped first (its writes are fsynced by the caller)."""
    with _open(path, mode) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if sys.platform == "darwin":
            import fcntl

            fcntl.fcntl(file.fileno(), fcntl.F_NOCACHE, 1)
        yield file


def _open(path: Path, mode: str) -> BinaryIO:
    direct = getattr(os, "O_DIRECT", 0)
    try:
        return open(
            path, mode, buffering=0, opener=lambda name, flags: os.open(name, flags | direct, 0o600)
        )
    except OSError as error:
        if not direct or error.errno != errno.EINVAL:  # which says: not on this file system
            raise
    return path.open(mode, buffering=0)
