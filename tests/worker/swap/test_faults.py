"""Tests of faults in mid-run.

Each is named in one sentence, the state on disk is intact, and training continues from it with the
bits of an undisturbed run.
"""

import contextlib
import errno
import math
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from helpers.effort import one_in
from helpers.paths import ROOT
from helpers.python_code import run_python
from helpers.worker.plans import (
    bitwise,
    engine_of,
    from_disk,
    resident,
    sample_text,
    state_digest,
    tiny_plan,
)

from barnraise.errors import DamageError, StateError
from barnraise.planning.plan import PAGE
from barnraise.planning.program import OperationKind
from barnraise.spec import OPTIMIZERS, ModelSpec
from barnraise.swap.direct_io import DirectFile
from barnraise.swap.state_store import STATE_FILE

MODEL = ModelSpec(layers=2, width=16, heads=1, context=8, vocabulary=256)
STEPS = 6


def plan_of(kind: str = "exact", **more):
    return tiny_plan(kind, MODEL, **{"tile": 2048, **more})


def train(engine, until: int = STEPS) -> None:
    """Train from the state's position on."""
    while (at := engine.progress_with_pending.position) < until:
        assert not engine.step([sample_text(seed=at, model=MODEL)], position=at + 1).abandoned
    engine.flush()
    engine.apply_queued()


def undisturbed_digest(until: int = STEPS) -> str:
    engine = engine_of(tiny_plan("resident", MODEL))
    train(engine, until)
    return state_digest(engine)


def assert_resumes(folder: Path, plan=None, at_least: int = 0) -> None:
    """Check that a reopened engine reaches the bits of an undisturbed run."""
    engine = engine_of(plan or plan_of(), folder)
    assert engine.store.invalid_kinds == set() and engine.progress.position >= at_least
    train(engine)
    assert state_digest(engine) == undisturbed_digest()
    engine.close()


@contextlib.contextmanager
def mount_disk(folder: Path, size: int):
    """Mount a disk of `size` bytes."""
    folder.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder],
        check=True,
        capture_output=True,
    )
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def may_mount(tmp_path):
    """Return whether disks can be mounted; elsewhere, modes and size limits cause the faults."""
    try:
        with mount_disk(tmp_path / "probe", 1 << 20):
            return True
    except (subprocess.CalledProcessError, FileNotFoundError):
        return False


# ---- folders -------------------------------------------------------------------------------------


def test_unwritable_folder_is_named(tmp_path, may_mount):
    folder = tmp_path / "there"
    if may_mount:  # the superuser ignores modes, not mounts
        with mount_disk(folder, 1 << 20):
            subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
            with pytest.raises(
                StateError, match=r"there cannot hold the model's state: Read-only file system"
            ):
                engine_of(plan_of(), folder)
    else:
        folder.mkdir(mode=0o500)
        with pytest.raises(
            StateError, match=r"there cannot hold the model's state: Permission denied"
        ):
            engine_of(plan_of(), folder)


def test_full_disk_is_reported_with_the_need_before_training(tmp_path, may_mount):
    plan = plan_of()
    need = f"{plan.file_bytes() / 1e9:,.1f} GB"
    if may_mount:
        full = pytest.raises(
            StateError, match=rf"small is full: the model's state needs {need} there"
        )
        with mount_disk(tmp_path / "small", plan.file_bytes() // 2) as folder, full:
            engine_of(plan, folder)
    else:
        with (
            limit_file_size(plan.file_bytes() // 2),
            pytest.raises(StateError, match=rf"needs {need} there"),
        ):
            engine_of(plan, tmp_path / "small")


@contextlib.contextmanager
def limit_file_size(size: int):
    """Let writes past `size` bytes of a file fail."""
    import resource
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_disk_filling_up_mid_run_keeps_the_last_commit(tmp_path, may_mount):
    """Space for records is reserved at the start; only the manifest needs new space."""
    folder = tmp_path / "disk"
    plan = plan_of()
    with (
        mount_disk(folder, plan.file_bytes() + (1 << 18)) if may_mount else contextlib.nullcontext()
    ):
        engine = engine_of(plan, folder)
        train(engine, 2)
        if may_mount:
            with contextlib.suppress(OSError), (folder / "others").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(PAGE))
            with pytest.raises(StateError, match="No space left on device"):
                train(engine, 4)
            with contextlib.suppress(StateError):
                engine.close()
            (folder / "others").unlink()
            assert_resumes(folder, at_least=2)
        else:
            engine.close()


# ---- disks ---------------------------------------------------------------------------------------


def make_disk_fail(monkeypatch, method: str, at: int) -> None:
    """Let the disk's `at`-th request of this kind, and all after it, fail."""
    original, count = getattr(DirectFile, method), 0

    def fail(self, view, offset):
        nonlocal count
        count += 1
        if count >= at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(self, view, offset)

    monkeypatch.setattr(DirectFile, method, fail)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("at", one_in(2, [1, 2, 7, 20]))
@pytest.mark.parametrize("method", ["read_request", "write_request"])
def test_disk_error_mid_run_names_the_operation(method, at, staged, tmp_path, monkeypatch):
    plan = plan_of(staged=staged)
    engine = engine_of(plan, tmp_path)
    train(engine, 2)
    reached = engine.progress.position
    make_disk_fail(monkeypatch, method, at)
    with pytest.raises(StateError, match=r"^the .* failed: Input/output error \(.*state.bin\)$"):
        train(engine, STEPS)
    with pytest.raises(StateError, match="Input/output error"):
        engine.step([sample_text(model=MODEL)])
    engine.close()
    monkeypatch.undo()
    assert_resumes(tmp_path, plan, at_least=reached)


@pytest.mark.parametrize("at", [1, 5])
def test_disk_error_between_steps_keeps_the_last_commit(at, tmp_path, monkeypatch):
    engine = engine_of(plan_of(), tmp_path)
    train(engine, 3)
    make_disk_fail(monkeypatch, "write_request", at)
    with pytest.raises((StateError, OSError), match="Input/output error"):
        list(engine.end_round(lambda values: (b"", values // 2), 1.0))
    engine.close()
    monkeypatch.undo()
    assert_resumes(tmp_path, at_least=3)


@pytest.mark.parametrize("kind", ["weights", "moments"])
def test_bytes_changed_under_a_running_engine_are_found_before_use(kind, tmp_path):
    engine = engine_of(plan_of(), tmp_path)
    train(engine, 2)
    at = engine.store.newest_offset(kind, 1, 0) + 40
    with (tmp_path / STATE_FILE).open("r+b", buffering=0) as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
        os.fsync(file.fileno())
    with pytest.raises(
        DamageError, match=rf"the {kind} of block.0 are not what was written.*joining again goes on"
    ):
        train(engine, STEPS)
    engine.close()
    again = engine_of(plan_of(), tmp_path)
    assert again.store.invalid_kinds == set() and again.progress.warmup_steps_left > 0
    anchor = engine_of(tiny_plan("resident", MODEL))
    for recovered, initial in zip(
        bitwise.read_state(again), bitwise.read_state(anchor), strict=True
    ):
        assert torch.equal(recovered, initial), "the replica is the anchor, the moments are zero"
    train(again, again.progress.position + 3)
    again.close()


# ---- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("clipping", ["exact", "layer", "none"])
@pytest.mark.parametrize("kind", ["resident", "staged", "exact", "restart", "staged disk"])
@pytest.mark.parametrize("layer", one_in(3, [1, 0, 3]))
def test_non_finite_loss_drops_the_round_and_training_continues(kind, clipping, layer, tmp_path):
    plan = (
        plan_of(kind, clipping=clipping)
        if kind not in ("resident", "staged")
        else tiny_plan(kind, MODEL, clipping=clipping)
    )
    engine = engine_of(plan, tmp_path)
    for step in range(2):
        engine.step([sample_text(seed=step, model=MODEL)], position=step + 1)
    poison(engine, layer)
    stats = engine.step([sample_text(model=MODEL)], position=3)
    assert stats.abandoned
    assert stats.tokens == 0
    assert engine.round_tokens == 0
    assert engine.progress_with_pending.position == 3
    replica, moments = (
        bitwise.read_state(engine)[::3],
        bitwise.read_state(engine)[1::3] + bitwise.read_state(engine)[2::3],
    )
    anchor = bitwise.read_state(engine_of(tiny_plan("resident", MODEL)))[::3]
    assert all(torch.equal(a, b) for a, b in zip(replica, anchor, strict=True))
    assert all(torch.isfinite(m).all() for m in moments)
    for step in range(3):
        again = engine.step([sample_text(seed=step, model=MODEL)], position=4 + step)
        assert not again.abandoned
        assert 0 < again.loss < 7
        assert engine.round_tokens == again.tokens * (step + 1)
    assert all(torch.isfinite(t).all() for t in bitwise.read_state(engine))
    engine.close()


def poison(engine, i: int) -> None:
    """Set a weight of fragment i to NaN, wherever it lies."""
    engine.flush()
    engine.apply_queued()
    store = engine.store
    buffer = store.memory_buffer("weights", i)
    if buffer is not None:
        buffer.view(torch.float32)[5] = torch.nan
    else:
        raw = store.load_tile("weights", i, 0)
        raw.view(torch.float32)[5] = torch.nan
        store.write("weights", i, 0, raw)
    engine.executor.invalidate_cached_weights()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("clipping", ["layer", "none"])
def test_non_finite_gradient_drops_the_round_with_finite_moments(clipping, optimizer, tmp_path):
    """Layer-wise clipping finds it after some fragments were updated already."""
    engine = engine_of(plan_of(clipping=clipping, optimizer=optimizer), tmp_path)
    engine.step([sample_text(model=MODEL)], position=1)
    handlers = engine.executor.handlers
    original = handlers[OperationKind.NORM]

    def overflowing(op):
        call = original(op)

        def norm() -> None:
            if op.blocks == (1,):
                engine.buffers.gradient(1, op.gradients[0])[3] = torch.inf
            call()

        return norm

    handlers[OperationKind.NORM] = overflowing
    stats = engine.step([sample_text(model=MODEL)], position=2)
    assert stats.abandoned and math.isfinite(stats.loss) and not math.isfinite(stats.norm)
    handlers[OperationKind.NORM] = original
    assert all(torch.isfinite(t).all() for t in bitwise.read_state(engine))
    assert not engine.step([sample_text(model=MODEL)], position=3).abandoned
    engine.close()


# ---- memory --------------------------------------------------------------------------------------


ALLOCATING_CHILD = """
import resource, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from barnraise.errors import BarnraiseError
from helpers.worker.plans import engine_of, from_disk, resident, sample_text
from test_faults import WIDE, wide_plan
engine = engine_of(wide_plan(), Path(sys.argv[1]))
engine.step([sample_text(8, 0, WIDE)], position=1)
engine.step([sample_text(8, 1, WIDE)], position=2)
(line,) = [line for line in open("/proc/self/status") if line.startswith("VmData")]
allocated = int(line.split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (allocated, resource.RLIM_INFINITY))
try:
    for step in range(2, 60):
        engine.step([sample_text(64, step, WIDE).repeat(1 + step, 1)], position=step + 1)
    print("never short of memory")
except BarnraiseError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
engine.close()
"""
WIDE = ModelSpec(layers=2, width=128, heads=2, context=64, vocabulary=512)


def wide_plan():
    return from_disk(resident(WIDE), tile=1 << 15)


def test_out_of_memory_mid_run_is_one_sentence_and_state_survives(tmp_path):
    folders = [Path(__file__).parent, ROOT / "benchmarks" / "shared"]
    child = run_python(ALLOCATING_CHILD, tmp_path, folders=folders)
    output = child.stdout.strip()
    assert child.returncode == 0 and output.count("\n") == 0, child.stdout + child.stderr
    assert re.fullmatch(
        r"the \w+ of \w+(\.\d)? failed: "
        r"there is not as much memory left as it needs .*; another .*",
        output,
    ), output
    engine = engine_of(wide_plan(), tmp_path)
    assert engine.store.invalid_kinds == set() and engine.progress.position >= 1
    assert not engine.step([sample_text(8, 5, WIDE)], position=9).abandoned
    engine.close()
