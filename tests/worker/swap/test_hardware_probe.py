"""The probe: what it finds has the right shape, is kept and believed only when it should be, and fails by name."""

import dataclasses
import errno
import itertools
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from barnraise.errors import StateError
from barnraise.planning import cost_model
from barnraise.planning.hardware import (
    Hardware,
    MatmulRates,
    UpdateRate,
    cgroup_limits,
    memory_bytes,
)
from barnraise.spec import ModelSpec
from barnraise.swap import hardware_probe as probing
from barnraise.swap.hardware_probe import probe


@pytest.fixture
def quick(monkeypatch):
    """The whole probe, of small things: what it does, not how long a machine takes."""
    monkeypatch.setattr(probing, "WIDTHS", (64, 128))
    monkeypatch.setattr(probing, "CONTEXTS", (128, 1024))
    monkeypatch.setattr(probing, "VOCABULARIES", (100, 300))
    monkeypatch.setattr(probing, "SECONDS", 0.5)
    monkeypatch.setattr(probing, "RAM_ELEMENTS", 1 << 18)
    monkeypatch.setattr(probing, "DISK_BYTES", 16 << 20)


SEEN = Hardware(
    device="cpu", name="a machine", cores=2, memory=0, device_memory=0, disk=0, dtype="float32",
    matmul=((128, 1e11), (1024, 2e11)), attention=1e11, elementwise=1e10, to_device=1e10, from_device=1e10,
    stream=2e10, adam=1e9, disk_read=1e9, disk_write=1e9, products=(MatmulRates("float32", ((1, 1.0),), ((1, 0.5),)),),
    updates=(UpdateRate("host", "float32", 8, 3e8),),
)  # fmt: skip


@pytest.fixture
def measured(monkeypatch):
    """How often the machine was measured; what is found stands fast, and at once."""
    times = []
    monkeypatch.setattr(probing, "_measure", lambda *_given: (times.append(1), SEEN)[1])
    return times


def test_a_probe_finds_every_rate_and_leaves_nothing_behind(quick, tmp_path):
    found = probe(tmp_path / "state", "cpu")
    assert found.device == "cpu" and found.device_memory == 0 and found.name
    assert found.cores == torch.get_num_threads()
    assert found.dtype in ("float32", "bfloat16")
    rates = [f.name for f in dataclasses.fields(found) if f.type is float]
    assert all(getattr(found, name) > 0 for name in rates), found
    assert [width for width, _ in found.matmul] == [64, 128] and all(
        rate > 0 for _, rate in found.matmul
    )
    assert found.products[0].dtype == "float32" and found.products[-1].forward == found.matmul
    assert [context for context, _ in found.attention_contexts] == [128, 1024]
    assert [words for words, _ in found.logits] == [100, 300]
    forms = {(each.where, each.dtype, each.bits) for each in found.updates if each.rate > 0}
    assert forms == {("host", dtype, bits) for dtype in ("float32", "bfloat16") for bits in (8, 32)}
    assert found.memory > 1 << 28 and found.disk > 0
    assert not list((tmp_path / "state").iterdir())


def test_second_probe_prices_one_models_sizes_by_the_same_arithmetic(quick, monkeypatch, tmp_path):
    monkeypatch.setattr(probing, "AGAIN_SECONDS", 0.1)
    model = ModelSpec(layers=2, width=64, heads=4, context=96, vocabulary=300)
    measure = probing.again(tmp_path, model)
    for _ in range(2):
        found = measure()
        assert [size for size, _ in found.matmul] == [64] and [
            words for words, _ in found.logits
        ] == [300]
        assert found.attention_contexts == ((96, found.attention),) and not found.attention_heads
        parts = (
            cost_model.block_forward_seconds,
            cost_model.block_backward_seconds,
            cost_model.head_seconds,
        )
        assert all(0 < part(found, model, 2) < 60 for part in parts)
    assert not list(tmp_path.iterdir())


def test_rate_is_the_usual_time_without_the_first_call(monkeypatch):
    """Ten seconds at first, then 1, 1 and 4: the clock is told so."""
    now, takes = [0.0], itertools.chain([10.0], itertools.cycle([1.0, 1.0, 4.0]))
    monkeypatch.setattr(probing.time, "perf_counter", lambda: now[0])
    calls = {("work", 0): (8.0, lambda: now.__setitem__(0, now[0] + next(takes)))}
    assert probing._race(calls, "cpu", 17.5) == {("work", 0): 8.0}
    takes = itertools.chain([10.0], itertools.cycle([1.0, 1.0, 4.0]))
    assert probing._race(calls, "cpu", 17.5, statistics.fmean) == {("work", 0): 4.0}


def test_it_survives_json():
    assert Hardware.from_json(SEEN.to_json()) == SEEN
    for damaged in ("", "[]", "{}", SEEN.to_json().replace('"adam"', '"eve"')):
        with pytest.raises(ValueError):
            Hardware.from_json(damaged)


def test_unmeasured_update_form_uses_the_plain_rate():
    assert SEEN.update_rate("host", "float32", 8) == 3e8
    assert (
        SEEN.update_rate("device", "float32", 8)
        == SEEN.update_rate("host", "bfloat16", 8)
        == SEEN.adam
    )


def test_its_fields_are_there_without_torch():
    code = "import sys, barnraise.planning.hardware, barnraise.planning.cost_model; assert 'torch' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": "worker"}
    )


def test_what_was_measured_is_kept(measured, tmp_path):
    cache = tmp_path / "home" / "hardware.json"
    first = probe(tmp_path, cache=cache)
    assert dataclasses.replace(probe(tmp_path, cache=cache), disk=first.disk) == first
    assert len(measured) == 1
    assert [path.name for path in cache.parent.iterdir()] == ["hardware.json"]


def test_free_disk_space_is_never_an_old_figure(measured, tmp_path, monkeypatch):
    cache = tmp_path / "hardware.json"
    probe(tmp_path, cache=cache)
    monkeypatch.setattr(probing, "memory_bytes", lambda: 12345)
    assert probe(tmp_path, cache=cache).memory == 12345
    assert len(measured) == 1


def aged(text: str) -> str:
    return json.dumps({**json.loads(text), "at": json.loads(text)["at"] - 31 * 86400})


def of_another(place: int, value: object):
    """Format, device, name, threads, torch, folder."""

    def spoil(text: str) -> str:
        kept = json.loads(text)
        kept["key"][place] = value
        return json.dumps(kept)

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        aged,
        of_another(3, 1000),
        of_another(4, "1.0"),
        of_another(2, "another CPU"),
        of_another(0, 0),
        of_another(5, "/elsewhere"),
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("matmul", "matmut"),
        lambda text: text.replace("1", "2"),
        lambda text: "",
        lambda text: "[]",
        lambda text: '{"key": null}',
    ],
)
def test_a_cache_that_is_old_foreign_or_damaged_is_measured_anew(measured, tmp_path, spoil):
    cache = tmp_path / "hardware.json"
    probe(tmp_path, cache=cache)
    cache.write_text(spoil(cache.read_text()))
    probe(tmp_path, cache=cache)
    assert len(measured) == 2
    probe(tmp_path, cache=cache)
    assert len(measured) == 2, "the new one is kept"


def test_a_cache_that_cannot_be_written_costs_only_time(measured, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert probe(tmp_path, cache=tmp_path / "file" / "hardware.json").adam > 0
    assert "cannot be kept" in caplog.text


# ---- the disk ------------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="file/state cannot be made: Not a directory"):
        probe(tmp_path / "file" / "state")


@pytest.mark.parametrize(
    ("number", "word"),
    [(errno.EROFS, "Read-only"), (errno.EACCES, "Permission denied"), (errno.ENOSPC, "No space")],
)
def test_a_read_only_folder_is_named_with_what_it_needs(tmp_path, monkeypatch, number, word):
    def refuse(*_given, **_named):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(
        StateError, match=rf"{tmp_path} cannot be measured \({word}.*needs 256 MiB free"
    ) as caught:
        probe(tmp_path)
    assert caught.value.__cause__ is None


@pytest.mark.skipif(sys.platform == "win32", reason="Windows limits no file sizes")
def test_a_disk_that_is_full_in_mid_write_is_named_and_left_clean(tmp_path):
    """The system's own limit on a file's size stands for a disk's end: the write that crosses it fails."""
    old, handler = (
        resource.getrlimit(resource.RLIMIT_FSIZE),
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (20 << 20, old[1]))
    try:
        with pytest.raises(StateError, match="needs 256 MiB free and the right to write"):
            probe(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fails_to_sync_is_named_and_left_clean(tmp_path, monkeypatch):
    def fail(_number: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(probing, "DISK_BYTES", 16 << 20)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StateError, match="Input/output error"):
        probe(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_direct_access_is_measured_plainly(tmp_path, monkeypatch):
    through = os.open

    def without(path, flags, *rest, **named):
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return through(path, flags, *rest, **named)

    monkeypatch.setattr(probing, "DISK_BYTES", 16 << 20)
    monkeypatch.setattr(os, "open", without)
    written, read = probing._disk_rates(tmp_path)
    assert written > 0 and read > 0
    assert not list(tmp_path.iterdir())


# ---- memory --------------------------------------------------------------------------------------------------


def laid_out(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_memory_is_at_most_what_the_machine_has():
    assert 1 << 28 < memory_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_control_groups_limit_counts_wherever_it_stands(tmp_path):
    mine, root = tmp_path / "cgroup", tmp_path / "fs"
    mine.write_text("0::/user/worker\n")
    laid_out(
        root,
        {
            "memory.max": "max\n",
            "user/memory.max": "4294967296\n",
            "user/worker/memory.max": "max\n",
        },
    )
    assert cgroup_limits(mine, root) == [4294967296]


def test_the_older_control_groups_count_too(tmp_path):
    mine, root = tmp_path / "cgroup", tmp_path / "fs"
    mine.write_text("11:cpu,cpuacct:/box\n7:memory:/box\n0::/box\n")
    laid_out(
        root,
        {
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/box/memory.limit_in_bytes": "1073741824\n",
        },
    )
    assert min(cgroup_limits(mine, root)) == 1073741824


def test_in_a_container_whose_groups_are_of_its_host_the_root_counts(tmp_path):
    mine, root = tmp_path / "cgroup", tmp_path / "fs"
    mine.write_text("0::/../../docker/4f5e\n")
    laid_out(root, {"memory.max": "2147483648\n"})
    assert cgroup_limits(mine, root) == [2147483648]


def test_where_there_are_no_control_groups_nothing_limits(tmp_path):
    assert cgroup_limits(tmp_path / "none", tmp_path) == []
