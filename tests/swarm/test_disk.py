"""Train, get killed and serve from disk, where the memory is too small for the model."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from itertools import chain, count

import pytest
from helpers.effort import one_in
from helpers.paths import ROOT, TESTS, WORKER

from barnraise.errors import PlanError
from barnraise.planning.limits import Limits
from barnraise.planning.memory_pressure import MemoryFacts
from barnraise.spec import ModelSpec
from barnraise.training.memory_watch import MemoryWatch
from barnraise.training.resume import read_state_header

DEEP = ModelSpec(layers=6, width=64, heads=2, context=32, vocabulary=256)
# The model takes 11 million bytes in memory.
TIGHT = Limits(memory=6_500_000, crash_safety="exact")


def test_worker_training_from_disk_ends_bit_identical_to_the_others(swarm):
    run = swarm(DEEP, token_budget=24_000, round_steps=5)
    roomy = run.start("ada", knows=["ben"])
    tight = run.start("ben", knows=["ada"], limits=TIGHT)
    run.join_in_agreement(roomy, tight, seconds=120)
    assert tight.worker.plan.on_disk and not roomy.worker.plan.on_disk
    assert tight.status["updates_sent"] > 0 and tight.status["updates_received"] > 0
    plan = tight.status["plan"]
    assert plan["crash_safety"] == "exact" and "disk" in plan["sentence"]


@pytest.mark.slow  # test_swarm.py has late joiners, and others here train from disk
def test_late_worker_on_disk_serves_its_anchor_to_the_next_joiner(swarm):
    run = swarm(DEEP, token_budget=10_000_000, round_steps=3)
    run.set_person("ada")  # nobody else would take so young an anchor from one machine
    first = run.start("ada")
    run.until(lambda: first.status.get("updates_sent", 0) > 1)
    late = run.start("ben", knows=["ada"], limits=TIGHT)
    run.until(lambda: late.status.get("updates_sent", 0) > 0)
    assert late.status["validation_first"][0] > 0, "it started from the other's anchor"
    first.leave()
    last = run.start("cleo", with_text=False, knows=["ben"])
    run.until(lambda: last.status.get("updates_sent", 0) > 0)
    assert last.status["validation_first"][0] > 0
    for volunteer in (last, late):
        volunteer.leave()


def test_worker_over_its_disk_quota_pauses_and_keeps_exchanging(swarm, caplog):
    run = swarm(DEEP, token_budget=10_000_000, round_steps=3)
    tight = run.start("ben", limits=replace(TIGHT, disk_writes_per_day=60_000_000))
    run.until(lambda: tight.status.get("activity") == "paused")
    assert tight.status["step"] > 0 and "written to disk: training goes on tomorrow" in caplog.text
    other = run.start("ada", knows=["ben"])
    # Its ledger stores them, and its anchor applies them tomorrow.
    run.until(lambda: tight.worker.exchange.stats.updates_received > 1)
    assert tight.worker.store.written_today < 60_000_000
    for volunteer in (other, tight):
        volunteer.leave()


def test_plan_that_does_not_fit_is_refused_before_files_are_created(swarm):
    run = swarm(DEEP)
    with pytest.raises(PlanError, match="does not fit: it needs at least"):
        run.start("ada", limits=Limits(memory=100_000))
    assert not (run.folder / "ada" / "runs" / run.manifest.run / "ledger.sqlite").exists()


TRAIN_ALONE = """
import json, sys
from pathlib import Path
import torch
from conftest import Swarm
from test_disk import DEEP
from barnraise.planning.limits import Limits
from barnraise.planning.memory_pressure import MemoryFacts
from barnraise.spec import Recipe
from barnraise.protocol.coordinator_messages import TextManifest
folder, text, manifest, limits, recipe = sys.argv[1:]
text = (Path(text), TextManifest.model_validate_json(manifest))
run = Swarm(Path(folder), text, Recipe(**json.loads(recipe)), DEEP)
run.start("ada", limits=Limits(**json.loads(limits))).thread.join()
"""


@pytest.mark.parametrize("safety", one_in(2, ["exact", "restart"]))
def test_kill_9_costs_at_most_a_step_or_a_round(swarm, tmp_path, safety):
    run = swarm(DEEP, token_budget=10_000_000, round_steps=6)
    limits = {"memory": TIGHT.memory, "crash_safety": safety}
    roots = [*map(str, (TESTS / "swarm", WORKER, TESTS, ROOT / "benchmarks" / "shared"))]
    program = f"import sys; sys.path[:0] = {json.dumps(roots)}\n{TRAIN_ALONE}"
    recipe = json.dumps(asdict(run.spec.recipe))
    arguments = [
        str(tmp_path),
        str(run.text),
        run.manifest.model_dump_json(),
        json.dumps(limits),
        recipe,
    ]
    child = subprocess.Popen([sys.executable, "-c", program, *arguments])
    folder = tmp_path / "ada" / "runs" / run.manifest.run

    def read_status() -> dict:
        path = folder / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    deadline = time.monotonic() + 90
    while read_status().get("updates_sent", 0) < 2:
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    child.wait()
    before, saved = read_status(), read_state_header(folder / "state")
    assert saved is not None
    if safety == "exact":
        assert saved.step >= before["step"] - 1, "a crash costs the unfinished step"
    back = run.start("ada", limits=Limits(**limits))
    run.until(lambda: back.status.get("updates_sent", 0) > before["updates_sent"] + 1)
    progress = back.worker.engine.progress
    if safety == "exact":
        assert progress.warmup_steps_left == 0
    else:
        assert progress.optimizer_steps > 0
    assert back.status["step"] > saved.step and back.worker.plan.crash_safety == safety
    back.leave()


def test_worker_gives_memory_back_between_rounds_when_others_need_it(swarm, caplog):
    run = swarm(DEEP, token_budget=10_000_000, round_steps=3)
    ada = run.start("ada", knows=["ben"])
    run.until(lambda: ada.status.get("updates_sent", 0) > 1)
    planned = ada.worker.plan.host_bytes
    # A small machine on which little memory is available until the worker has moved to disk.
    seconds = chain(range(0, 600, 5), count(600, 0.001))  # an hour later it would grow again

    def measure() -> MemoryFacts:
        return MemoryFacts(10**8, 3_900_000 if not ada.worker.plan.on_disk else 10**8)

    ada.worker.watch_memory(MemoryWatch(None, measure, lambda: next(seconds)))
    run.until(lambda: ada.worker.plan.on_disk)
    sent = ada.status["updates_sent"]
    ben = run.start("ben", knows=["ada"])
    run.until(lambda: ada.status["updates_sent"] > sent and ben.status.get("updates_sent", 0) > 0)
    assert ada.worker.plan.host_bytes < 0.85 * planned
    assert "training goes on with a plan that uses" in caplog.text
    assert "from disk" in ada.status["plan"]["sentence"]
    folder = ada.worker.joined.folder.path
    assert (folder / "running.json").exists() and not (folder / "checkpoint").exists()
    for volunteer in (ada, ben):
        volunteer.leave()
    assert not (folder / "running.json").exists()
    run.start("ada", limits=TIGHT).leave()  # the state is whole
