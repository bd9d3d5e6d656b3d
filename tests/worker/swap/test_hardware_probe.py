"""Tests of the hardware probe: its measurements, its cache, its errors, and memory limits."""

import dataclasses
import errno
import itertools
import json
import os
import platform
import signal
import statistics
import sys

import pytest
import torch
from example_hardware import cpu_machine
from helpers.python_code import run_python

from barnraise.errors import StateError
from barnraise.planning.hardware import (
    Hardware,
    MatmulRates,
    UpdateRate,
    available_memory,
    memory_bytes,
)
from barnraise.swap import hardware_probe as probing
from barnraise.swap.hardware_probe import probe


@pytest.fixture
def quick(monkeypatch):
    """Let the probe measure small things, so that it takes a second."""
    monkeypatch.setattr(probing, "WIDTHS", (64, 128))
    monkeypatch.setattr(probing, "CONTEXTS", (128, 1024))
    monkeypatch.setattr(probing, "VOCABULARIES", (100, 300))
    monkeypatch.setattr(probing, "ALL_RATES_SECONDS", 0.5)
    monkeypatch.setattr(probing, "RAM_ELEMENTS", 1 << 18)
    monkeypatch.setattr(probing, "DISK_BYTES", 16 << 20)


MEASURED = cpu_machine(
    memory=0,
    disk=0,
    matmul=((128, 1e11), (1024, 2e11)),
    attention=1e11,
    adam=1e9,
    products=(MatmulRates("float32", ((1, 1.0),), ((1, 0.5),)),),
    updates=(UpdateRate("host", "float32", 8, 3e8),),
)


@pytest.fixture
def measurements(monkeypatch) -> list[Hardware]:
    """Replace measuring by a fixed result; return the list of measurements."""
    results: list[Hardware] = []

    def measure(*arguments) -> Hardware:
        results.append(MEASURED)
        return MEASURED

    monkeypatch.setattr(probing, "measure_hardware", measure)
    return results


@pytest.mark.integration
def test_probe_measures_every_rate_and_leaves_no_files(quick, tmp_path):
    hardware = probe(tmp_path / "state", "cpu")
    assert hardware.device == "cpu" and hardware.device_memory == 0 and hardware.name
    assert hardware.cores == torch.get_num_threads()
    assert hardware.dtype in ("float32", "bfloat16")
    assert hardware.disk_size >= hardware.disk and hardware.device_memory_free == 0
    rates = [f.name for f in dataclasses.fields(hardware) if f.type is float]
    for other in ("disk_write_sustained", "launches"):  # would take minutes; of GPUs only
        rates.remove(other)
    assert all(getattr(hardware, name) > 0 for name in rates), hardware
    assert [width for width, _ in hardware.matmul] == [64, 128]
    assert all(rate > 0 for _, rate in hardware.matmul)
    assert hardware.products[0].dtype == "float32"
    assert hardware.products[-1].forward == hardware.matmul
    assert [context for context, _ in hardware.attention_contexts] == [128, 1024]
    assert [vocabulary for vocabulary, _ in hardware.logits] == [100, 300]
    updates = [update for update in hardware.updates if update.rate > 0]
    forms = {(update.where, update.dtype, update.bits) for update in updates}
    assert forms == {("host", dtype, bits) for dtype in ("float32", "bfloat16") for bits in (8, 32)}
    assert hardware.memory > 1 << 28 and hardware.disk > 0
    assert not list((tmp_path / "state").iterdir())


def test_rate_is_the_usual_time_without_the_first_call(monkeypatch):
    """A fake clock lets the first call take ten seconds, and the others 1, 1 and 4 in turn."""
    now = 0.0
    durations = itertools.chain([10.0], itertools.cycle([1.0, 1.0, 4.0]))

    def work() -> None:
        nonlocal now
        now += next(durations)

    monkeypatch.setattr(probing.time, "perf_counter", lambda: now)
    calls = {("work", 0): (8.0, work)}
    assert probing.measure_rates(calls, "cpu", 17.5) == {("work", 0): 8.0}
    durations = itertools.chain([10.0], itertools.cycle([1.0, 1.0, 4.0]))
    assert probing.measure_rates(calls, "cpu", 17.5, statistics.fmean) == {("work", 0): 4.0}


def test_rate_of_a_gpu_is_that_of_its_kernels_not_of_waiting_for_them(monkeypatch):
    """A fake clock lets a call take ten microseconds, and waiting for the GPU two hundred."""
    now = 0.0

    def spend(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(probing.time, "perf_counter", lambda: now)
    monkeypatch.setattr(probing, "synchronize", lambda device: spend(2e-4))
    calls = {("work", 0): (1.0, lambda: spend(1e-5))}
    assert probing.measure_rates(calls, "cuda", 0.1)["work", 0] == pytest.approx(1e5, rel=0.05)


def test_hardware_read_from_its_json_is_equal():
    assert Hardware.from_json(MEASURED.to_json()) == MEASURED
    for damaged in ("", "[]", "{}", MEASURED.to_json().replace('"adam"', '"eve"')):
        with pytest.raises(ValueError):
            Hardware.from_json(damaged)


def test_unmeasured_update_form_uses_the_plain_rate():
    assert MEASURED.update_rate("host", "float32", 8) == 3e8
    assert MEASURED.update_rate("device", "float32", 8) == MEASURED.adam
    assert MEASURED.update_rate("host", "bfloat16", 8) == MEASURED.adam


def test_measurement_is_cached(measurements, tmp_path):
    cache = tmp_path / "home" / "hardware.json"
    first = probe(tmp_path, cache=cache)
    second = probe(tmp_path, cache=cache)
    free_now = {"disk": first.disk, "memory_available": first.memory_available}
    assert dataclasses.replace(second, **free_now) == first
    assert len(measurements) == 1
    assert [path.name for path in cache.parent.iterdir()] == ["hardware.json"]


def test_memory_and_free_disk_space_are_never_cached(measurements, tmp_path, monkeypatch):
    cache = tmp_path / "hardware.json"
    probe(tmp_path, cache=cache)
    monkeypatch.setattr(probing, "memory_bytes", lambda: 12345)
    assert probe(tmp_path, cache=cache).memory == 12345
    assert len(measurements) == 1


def a_month_older(text: str) -> str:
    return json.dumps({**json.loads(text), "at": json.loads(text)["at"] - 31 * 86400})


KEY_FIELDS = ["format", "device", "name", "threads", "torch", "folder"]


def with_key(field: str, value: object):
    """Return a function that changes one field of a cache's key."""

    def change(text: str) -> str:
        cached = json.loads(text)
        cached["key"][KEY_FIELDS.index(field)] = value
        return json.dumps(cached)

    return change


@pytest.mark.parametrize(
    "spoil",
    [
        a_month_older,
        with_key("threads", 1000),
        with_key("torch", "1.0"),
        with_key("name", "another CPU"),
        with_key("format", 0),
        with_key("folder", "/elsewhere"),
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("matmul", "matmut"),
        lambda text: text.replace("1", "2"),
        lambda text: "",
        lambda text: "[]",
        lambda text: '{"key": null}',
    ],
)
def test_old_foreign_or_damaged_cache_is_replaced(measurements, tmp_path, spoil):
    cache = tmp_path / "hardware.json"
    probe(tmp_path, cache=cache)
    cache.write_text(spoil(cache.read_text()))
    probe(tmp_path, cache=cache)
    assert len(measurements) == 2
    probe(tmp_path, cache=cache)
    assert len(measurements) == 2, "the new measurement is cached"


@pytest.mark.usefixtures("measurements")
def test_cache_that_cannot_be_written_is_only_logged(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert probe(tmp_path, cache=tmp_path / "file" / "hardware.json").adam > 0
    assert "cannot be saved" in caplog.text


# ---- the disk --------------------------------------------------------------------------------


def test_folder_that_cannot_be_created_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="file/state cannot be created: Not a directory"):
        probe(tmp_path / "file" / "state")


@pytest.mark.parametrize(
    ("number", "message"),
    [(errno.EROFS, "Read-only"), (errno.EACCES, "Permission denied"), (errno.ENOSPC, "No space")],
)
def test_unwritable_folder_is_named_with_the_space_it_needs(tmp_path, monkeypatch, number, message):
    def refuse(*arguments, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(
        StateError, match=rf"{tmp_path} cannot be measured \({message}.*needs 268.4 MB free"
    ) as caught:
        probe(tmp_path)
    assert caught.value.__cause__ is None


@pytest.mark.skipif(sys.platform == "win32", reason="Windows limits no file sizes")
def test_disk_that_fills_up_is_named_and_left_clean(tmp_path):
    """A limit on the size of files stands for a full disk: the write that exceeds it fails."""
    import resource

    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20 << 20, old[1]))
    try:
        with pytest.raises(StateError, match=r"needs 268.4 MB free and the right to write"):
            probe(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.iterdir())


def test_disk_that_fails_to_sync_is_named_and_left_clean(tmp_path, monkeypatch):
    def fail(_number: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(probing, "DISK_BYTES", 16 << 20)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StateError, match="Input/output error"):
        probe(tmp_path)
    assert not list(tmp_path.iterdir())


def test_file_system_without_direct_access_is_measured(tmp_path, monkeypatch):
    system_open = os.open

    def open_without_direct(path, flags, *rest, **options):
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return system_open(path, flags, *rest, **options)

    monkeypatch.setattr(probing, "DISK_BYTES", 16 << 20)
    monkeypatch.setattr(os, "open", open_without_direct)
    written, read = probing.measure_disk(tmp_path)
    assert written > 0 and read > 0
    assert not list(tmp_path.iterdir())


# ---- memory ----------------------------------------------------------------------------------


def test_memory_is_at_most_what_the_machine_has():
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < available_memory() <= memory_bytes() <= installed and memory_bytes() > 1 << 28


FREED_BYTES = 64 << 20
IS_GLIBC = platform.libc_ver()[0] == "glibc"  # other C libraries ignore the request
MEMORY_AFTER_A_BLOCK = f"""
import sys
import psutil
from barnraise.planning.hardware import retain_freed_memory

retain_freed_memory()  # as the measurement of the hardware does
if sys.argv[1] == "return":
    retain_freed_memory(False)
process = psutil.Process()
before = process.memory_info().rss
block = b"x" * {FREED_BYTES}
del block
print(process.memory_info().rss - before)
"""


@pytest.mark.parametrize(("choice", "share"), [("retain", 1), ("return", 0)])
def test_freed_block_stays_or_goes_as_the_plan_wants(choice, share):
    done = run_python(MEMORY_AFTER_A_BLOCK, choice, check=True)
    least, most = (share, share) if IS_GLIBC else (0, 1)
    assert least - 0.1 <= int(done.stdout) / FREED_BYTES <= most + 0.1
