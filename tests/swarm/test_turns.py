"""Train several runs in turns with real workers: rounds stay whole, and nothing is lost."""

import json
import sys
import time

import pytest
from helpers.site.live_site import Person, wait_until

CANCEL_OTHERS = """
from coordinator.runs.models import Run
for run in Run.objects.all():
    run.cancel()
"""
QUICK_TURNS = """
from barnraise.cli.main import main
from barnraise.training import run_turns

run_turns.CYCLE_SECONDS = 12.0
main()
"""


def test_turn_ends_with_a_whole_round_and_the_next_continues_there(swarm):
    run = swarm(token_budget=10_000_000)
    ada = run.start("ada")
    ended = []
    ada.worker.end_after_round(lambda: ended.append(time.monotonic()) or len(ended) > 2)
    ada.join()
    assert ada.leaving.is_set() and ada.status["activity"] == "left"
    tokens = ada.status["tokens"]
    step_tokens = ada.worker.spec.step_tokens
    assert tokens and tokens % (run.spec.recipe.round_steps * step_tokens) == 0, "whole rounds"
    back = run.start("ada")
    run.until(lambda: back.status.get("tokens", 0) > tokens)
    assert back.worker.saved_state.header is not None
    back.leave()
    assert back.status["step"] >= tokens // step_tokens


@pytest.mark.slow
def test_worker_trains_two_runs_in_turns_and_follows_the_next(site):
    # The next run is any open one of the site: tests before this one may have left some.
    site.manage("shell", "-v", "0", "-c", CANCEL_OTHERS)
    person = Person(site)
    settings = ("text.tokenizer=bytes", "recipe.round_steps=4")
    first = site.launch_run("First turn", 60_000, *settings)
    second = site.launch_run("Second turn", 24_000, *settings)
    third = site.launch_run("Third turn", 16_000, *settings)
    person.enrol("turner")
    command = ("-c", QUICK_TURNS, "join", first, second, "--share", "70,30", "--next")
    options = ("--threads", "1", "--eager", "--home", str(site.folder / "turner"))
    environment = {"OMP_NUM_THREADS": "1", "BARNRAISE_HARDWARE": str(site.hardware_file)}
    process = site.processes.start("turns", sys.executable, *command, *options, **environment)
    wait_until(lambda: site.status("turner").get("step", 0) > 0, "the first step")
    limits = site.barnraise("turner", "limits", "--month-up", "20GB")
    assert limits.wait(60) == 0, site.log("limits-turner")
    assert process.wait(900) == 0, site.log("turns")
    saved = json.loads((site.folder / "turner" / "limits.json").read_text())
    assert saved["month_up"] == 20 * 10**9, "the next turns go by the new limits"
    output = site.log("turns")
    for name in ("First turn", "Second turn", "Third turn"):
        assert f"Joining {name}" in output, output
    assert output.count("The run has ended.") == 3, output
    assert "no other run is open" in output
    for slug in (first, second, third):
        wait_until(lambda slug=slug: "finished" in person.http.get(f"/runs/{slug}/").text, slug)
