"""The checkpoint's two slots under crashes and damage."""

import json
from pathlib import Path

import pytest
import torch
from helpers.python_code import run_python
from helpers.updates.headers import PART, build_update

from barnraise.spec import ModelSpec
from barnraise.training.checkpoint import HEADER_FILE, TENSORS_FILE, CheckpointSlots, StateHeader

TINY = ModelSpec(layers=2, width=32, heads=4, context=16, vocabulary=300)
RUN = "01890000-0000-7000-8000-000000000000"
HEAD = build_update("a" * 64, 3, run=RUN, incarnation="1" * 16, fragments=[PART])


def header(step: int) -> StateHeader:
    return StateHeader(
        run=RUN,
        spec="f" * 64,
        step=step,
        last_seq=3,
        tokens=30,
        heads={HEAD.author: HEAD},
        retracted={HEAD.author: {1: 5}},
        sketches=["0" * 16],
        progress={"optimizer_steps": 3, "prediction": (0.0, 1.5)},
    )


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((5000,), step, dtype=torch.int32), "y": torch.tensor(float(step))}


def stored_steps(folder: Path) -> list[int]:
    """Return the steps of the slots on disk, without verifying digests."""
    return sorted(
        json.loads(path.read_text())["step"] for path in folder.glob(f"[ab]/{HEADER_FILE}")
    )


def test_saved_state_is_loaded_unchanged(tmp_path):
    assert CheckpointSlots(tmp_path / "checkpoint").load() is None
    written = CheckpointSlots(tmp_path / "checkpoint").save(tensors(1), header(1))
    loaded, loaded_header = CheckpointSlots(tmp_path / "checkpoint").load()
    assert loaded_header == written
    assert written.model_copy(update={"save_number": 0, "digest": ""}) == header(1)
    assert loaded.keys() == tensors(1).keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors(1).items())


def test_two_newest_saves_are_stored_and_the_newest_is_loaded(tmp_path):
    checkpoint = CheckpointSlots(tmp_path)
    for step in range(1, 6):
        checkpoint.save(tensors(step), header(step))
        assert stored_steps(tmp_path) == [s for s in (step - 1, step) if s]
        assert checkpoint.load()[1].step == CheckpointSlots(tmp_path).load()[1].step == step


def two_saves(folder: Path) -> tuple[Path, Path]:
    """Save twice; return the older slot and the newer one."""
    checkpoint = CheckpointSlots(folder)
    checkpoint.save(tensors(1), header(1))
    checkpoint.save(tensors(2), header(2))
    return folder / "a", folder / "b"


@pytest.mark.parametrize("name", [TENSORS_FILE, HEADER_FILE])
@pytest.mark.parametrize("damage", ["bit", "cut", "empty", "gone"])
def test_damaged_slot_is_logged_and_the_other_one_used(name, damage, tmp_path, caplog):
    _, newer = two_saves(tmp_path)
    path = newer / name
    whole = path.read_bytes()
    for at in range(0, len(whole), max(1, len(whole) // 40)) if damage == "bit" else [0]:
        if damage == "bit":
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        elif damage == "cut":
            path.write_bytes(whole[: len(whole) * 2 // 3])
        elif damage == "empty":
            path.write_bytes(b"")
        else:
            path.unlink()
        caplog.clear()
        loaded, loaded_header = CheckpointSlots(tmp_path).load()
        assert loaded_header.step == 1 and torch.equal(loaded["x"], tensors(1)["x"])
        assert str(newer) in caplog.text and "damaged" in caplog.text


def test_save_never_replaces_the_only_whole_slot(tmp_path):
    _, newer = two_saves(tmp_path)
    (newer / TENSORS_FILE).write_bytes(b"rubbish")
    CheckpointSlots(tmp_path).save(tensors(3), header(3))
    assert stored_steps(tmp_path) == [1, 3]


def test_two_damaged_slots_load_nothing_and_are_both_logged(tmp_path, caplog):
    for slot in two_saves(tmp_path):
        (slot / HEADER_FILE).write_text("{}")
    assert CheckpointSlots(tmp_path).load() is None
    assert str(tmp_path / "a") in caplog.text and str(tmp_path / "b") in caplog.text


KILLED_SAVES = """
import os, random, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from barnraise.training.checkpoint import CheckpointSlots
from test_checkpoint import header, tensors
folder = Path(sys.argv[1])
checkpoint = CheckpointSlots(folder)
checkpoint.save(tensors(1), header(1))
checkpoint.save(tensors(2), header(2))
file_operations = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree")
for fatal in range(1, 100):
    saved_step = checkpoint.load()[1].step
    child = os.fork()
    if not child:
        operations_left = fatal
        def hook(event, arguments):
            global operations_left
            if event in file_operations:
                operations_left -= 1
                if not operations_left:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        checkpoint.save(tensors(saved_step + 1), header(saved_step + 1))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    checkpoint = CheckpointSlots(folder)
    loaded, loaded_header = checkpoint.load()
    step = loaded_header.step
    assert step in (saved_step, saved_step + 1), (step, saved_step)
    assert torch.equal(loaded["x"], tensors(step)["x"])
    if os.waitstatus_to_exitcode(status) == 0:
        assert step == saved_step + 1
        print("finished after", fatal)
        break
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    checkpoint.save(tensors(step + 1), header(step + 1))
for attempt in range(12):  # at random times, in the middle of larger writes
    step = checkpoint.load()[1].step
    child = os.fork()
    if not child:
        while True:
            step += 1
            checkpoint.save({"x": torch.full((2_000_000,), step)}, header(step))
    time.sleep(random.Random(attempt).uniform(0.005, 0.1))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    checkpoint = CheckpointSlots(folder)
    loaded, loaded_header = checkpoint.load()
    assert loaded_header.step >= step and bool((loaded["x"] == loaded_header.step).all())
"""


@pytest.mark.integration
def test_kill_9_during_a_save_never_loses_the_newest_whole_slot(tmp_path):
    """Kill a child at each file operation of a save in turn, then at random times."""
    process = run_python(KILLED_SAVES, tmp_path, folders=[Path(__file__).parent])
    assert process.returncode == 0, process.stderr
    assert int(process.stdout.split()[-1]) > 8, "a save does more file operations than this"
