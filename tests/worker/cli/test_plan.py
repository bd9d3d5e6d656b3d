"""Test `barnraise plan` on a machine whose rates are given."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from example_hardware import cpu_machine
from helpers.worker.command_line import invoke

from barnraise.cli import plan
from barnraise.errors import PlanError, SpecError, StateError
from barnraise.planning.hardware import FP32_SHARE

HARDWARE = cpu_machine(name="a [small] machine", disk_read=2e9)
SMALL_MACHINE = ("--model", "gpt2-1.5b", "--memory", "4GB", "--disk", "90GB")
LARGE_MACHINE = (
    *("--model", "gpt3-6.7b", "--memory", "64GB", "--disk", "500GB"),
    *("--device-memory", "24GB"),
)


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """Return the state directory of a machine that needs no measuring."""
    monkeypatch.setattr(plan, "measure_machine", lambda *arguments, **options: HARDWARE)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def run_plan(home: Path, *options: str) -> str:
    """Return the output of `barnraise plan`; raise what the command raised."""
    return invoke("plan", "--home", str(home), *options)


def test_plan_shows_where_state_lies_and_how_long_a_step_takes(home):
    output = run_plan(home, *SMALL_MACHINE)
    assert "gpt2-1.5b on a [small] machine, 1.56 B parameters" in output
    assert "tokens/s" in output and "limited by" in output
    assert "disk read" in output and "compute" in output and "feedback" in output
    assert "a step; at most 32.2 GB a day" in output


def test_plan_as_json_stays_within_the_limits(home):
    fields = json.loads(run_plan(home, *SMALL_MACHINE, "--json"))
    assert fields["host_bytes"] <= 4e9 and fields["disk_bytes"] <= 90e9
    assert fields["step_seconds"] > 0 and fields["assumed"] == ""
    state_bytes = sum(sum(row.values()) for row in fields["state_bytes"].values())
    assert state_bytes >= 20 * 1_557_611_200


def test_plan_shows_which_exchange_suits_home_lines_and_clusters(home):
    small_model = ("--model", "gpt-nano")
    output = " ".join(run_plan(home, *small_model).split())
    assert "10 such machines on home lines, 15 Mb/s up, 112 down" in output
    assert "updates: Machines compute" in output and "data-parallel" in output
    fields = json.loads(
        run_plan(home, *small_model, "--json", "--machines", "4", "--line", "1e6/1e6/0")
    )
    assert fields["exchange"]["chosen"]["strategy"] != "updates"
    assert len(fields["exchange"]["predictions"]) > 10
    with pytest.raises(StateError, match="state a rate above zero"):
        run_plan(home, *small_model, "--line", "0/10")
    with pytest.raises(StateError, match="as in 15/112/23"):
        run_plan(home, *small_model, "--line", "fast")


def test_plan_for_an_absent_gpu_says_what_it_assumes(home):
    output = run_plan(home, *LARGE_MACHINE, "--device", "cuda")
    assert "an assumed GPU" in output and "60 TFLOP/s" in output and "are assumed" in output
    output = " ".join(run_plan(home, *LARGE_MACHINE).split())  # without line breaks
    assert "--device cuda assumes a GPU" in output


def test_assumed_gpu_has_no_measured_rate_of_the_host():
    host = replace(HARDWARE, logits=((2048, 1e10),))
    gpu = plan.assume_gpu(host, plan.PlanningOptions(), 24 * 10**9)
    assert not gpu.logits and [rates.dtype for rates in gpu.products] == ["float32"]
    assert gpu.products[0].forward == ((1024, FP32_SHARE * gpu.matmul[0][1]),)
    assert gpu.matmul == ((1024, 6e13),) and gpu.to_device == 2e10


def test_plan_that_is_impossible_is_one_sentence(home):
    with pytest.raises(SpecError, match="there is no preset 'gpt-5'; the presets are gpt-nano"):
        run_plan(home, "--model", "gpt-5")
    with pytest.raises(PlanError, match=r"does not fit: .* What would fit: "):
        run_plan(home, "--model", "gpt2-1.5b", "--memory", "4GB", "--disk", "10GB")
    with pytest.raises(StateError, match="'much' is not a size"):
        run_plan(home, "--model", "gpt2-1.5b", "--memory", "much")


def test_plan_with_muon_prices_its_updates_and_has_less_state(home):
    command = ("--model", "gpt2-124m", "--sequences", "2")
    adamw, muon = (
        json.loads(run_plan(home, *command, "--optimizer", name, "--json"))
        for name in ("adamw", "muon")
    )
    assert muon["optimizer"] == "muon" and muon["step_seconds"] > 1.1 * adamw["step_seconds"]
    states = [sum(fields["state_bytes"]["moments"].values()) for fields in (adamw, muon)]
    assert states[1] < 0.7 * states[0]
    assert "Muon, its momentum in 32 bits" in run_plan(home, *command, "--optimizer", "muon")
    with pytest.raises(PlanError, match="Muon's momentum is stored in 32 bits: leave out --mom"):
        run_plan(home, *command, "--optimizer", "muon", "--moments-8bit")


def test_plan_that_waits_for_the_next_day_names_what_lifts_the_limit(home):
    output = " ".join(run_plan(home, *SMALL_MACHINE).split())
    assert "it may write 32.2 GB a day" in output and "limited by disk writes a day" in output
    assert "--disk-writes-per-day unlimited (" in output and "--moments-8bit (" in output
    fields = json.loads(run_plan(home, *SMALL_MACHINE, "--json"))
    assert fields["advice"].startswith("Training pauses for a part of each day")
    unlimited = run_plan(home, *SMALL_MACHINE, "--disk-writes-per-day", "unlimited")
    assert "Training pauses" not in unlimited


def test_cards_that_are_not_here_are_priced_with_the_reasons(home):
    model = ("--model", "gpt2-1.5b", "--sequences", "64", "--memory", "64GB")
    two = (*model, "--devices", "2x24GB")
    output = " ".join(run_plan(home, *two).split())
    assert "on 2 × an assumed GPU of 24 GB" in output
    assert "slower, limited by" in output and "taken" in output and "GPUs are assumed" in output
    fields = json.loads(run_plan(home, *two, "--engine", "sharded", "--json"))
    assert fields["ranks"] == ["cuda", "cuda:1"] and not fields["devices"]
    fields = json.loads(run_plan(home, *model, "--devices", "2x24GB,12GB", "--json"))
    assert any("an assumed GPU of 12 GB" in each["cards"] for each in fields["cards"])
    assert len(fields["devices"]) == 2 and len(fields["card_bytes"]) == 2
    verdicts = [each["verdict"] for each in fields["cards"]]
    assert verdicts.count("taken") == 1 and all(verdicts)


@pytest.mark.parametrize("devices", ["0x24GB", "24 cards", "99x24GB", "9x1GB,9x1GB"])
def test_cards_that_no_machine_has_are_refused(home, devices):
    with pytest.raises((StateError, PlanError)):
        run_plan(home, "--model", "gpt-nano", "--devices", devices)


def test_plan_of_a_crew_deals_blocks_and_compares_with_each_alone(home):
    task = ("--model", "gpt2-355m", "--sequences", "2", "--gpu-tflops", "25", "--line", "1000")
    output = " ".join(run_plan(home, *task, "--crew", "5GB+2GB,6GB+2GB").split())
    assert "gpt2-355m, 355 M parameters, on a crew of" in output
    assert "ends, 1\u2013" in output and "2: 6 GB + 2 GB GPU" in output
    assert "micro-batches of" in output and "Form the crew:" in output
    assert "GPUs of 25 TFLOP/s" in output
    four = ("--crew", "3x5GB+2GB,6GB+2GB", "--boundary", "8", "--json")
    fields = json.loads(run_plan(home, *task, *four))
    stages = fields["stages"]
    assert sum(stage["blocks"] for stage in stages) == 24 and stages[0]["has_ends"]
    assert fields["boundary_bits"] == 8 and fields["pays"]
    assert len(fields["alone_tokens_per_second"]) == 4
    assert fields["tokens_per_second"] > sum(fields["alone_tokens_per_second"].values())


def test_plan_refuses_what_is_no_crew(home):
    nano = ("--model", "gpt-nano")
    with pytest.raises(PlanError, match="2 to 16 machines, and these are 17"):
        run_plan(home, *nano, "--crew", "17x8GB")
    with pytest.raises(PlanError, match="12 bits is impossible"):
        run_plan(home, *nano, "--crew", "8GB,8GB", "--boundary", "12")
    with pytest.raises(StateError, match="is no machine; write"):
        run_plan(home, *nano, "--crew", "axb,8GB")
    for count in ("0", "²", "9" * 20):
        with pytest.raises(StateError, match="is no machine; write"):
            run_plan(home, *nano, "--crew", f"{count}x8GB")
        with pytest.raises(StateError, match="is no machine; write"):
            plan.parse_card_sizes(f"1GB,{count}x8GB")
    with pytest.raises(PlanError, match="none of these machines can hold the embedding"):
        run_plan(home, "--model", "gpt3-175b", "--crew", "4GB,4GB", "--disk", "1GB")
