"""The benchmark for a GPU runs on a bare machine, part by part, and loses no row."""

import json
import os
import subprocess
import sys

import pytest
from helpers.drill_modules import import_drill_module
from helpers.paths import ROOT
from helpers.wait_for import wait_until

PROGRAM = ROOT / "benchmarks" / "swap" / "gpu_first.py"
gpu_first = import_drill_module("gpu_first")
TINY = gpu_first.Session("cpu", tiny=True)
# Fails the import of every package but torch and numpy, in a program's children too.
ONLY_TORCH = """
import sys
BLOCKED = {"pydantic", "typer", "rich", "httpx", "safetensors", "blake3", "cryptography", "psutil"}
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked")
sys.meta_path.insert(0, Blocker())
"""
# The parts that need more than torch and numpy, and what each says on a bare machine.
NEEDING_PACKAGES = {
    "swarm": "the workers need the package pydantic, which is not installed",
    "torchao": "No module named 'torchao'",
}


def run_program(folder, *arguments: str) -> list[dict]:
    """Run the benchmark as on a bare machine, and return the lines of its parts."""
    (folder / "sitecustomize.py").write_text(ONLY_TORCH)
    environment = {**os.environ, "OUT": str(folder), "PYTHONPATH": str(folder)}
    command = [sys.executable, str(PROGRAM), "--device", "cpu", "--tiny", *arguments]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = (folder / "gpu_first.jsonl").read_text()
    assert printed.stdout == lines, printed.stderr
    return [json.loads(line) for line in lines.splitlines()]


def test_engine_and_planner_need_no_package_but_torch(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(ONLY_TORCH)
    paths = os.pathsep.join([str(tmp_path), str(ROOT / "worker")])
    command = [sys.executable, "-c", "import barnraise.planning.search, barnraise.swap.engine"]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, check=True)


def test_memory_and_speed_are_of_plans_as_the_planner_made_them():
    (memory,) = gpu_first.measure_memory(TINY)
    assert memory["planned"] > 0 and {"steps", "apply", "evaluate", "state"} <= set(memory)
    (speed,) = gpu_first.measure_speed(TINY)
    assert speed["tokens_per_second"] > 0 and speed["predicted"] > 0
    assert speed["plan"]["sequences"] * speed["plan"]["micro_batches"] == 4


def test_one_card_used_twice_has_the_bits_of_its_deal_done_in_turns():
    chosen, *rows = gpu_first.compare_one_card_twice(TINY)
    assert chosen["devices"] == ("cpu", "cpu") and len(rows) == 3
    for row in rows:
        assert row["same_bits"] and row["again"] and row["loss_gap"] < 1e-5, row


@pytest.mark.slow  # worker/swap's tests train on two cards, and on ranks
def test_two_cards_and_ranks_are_measured_against_one_and_plain_fsdp():
    rows = {row["way"]: row for row in gpu_first.measure_two_cards(TINY)}
    assert list(rows) == [
        *("one card", "two cards", "ranks"),
        *("plain FSDP2", "plain FSDP2 with offload"),
    ]
    assert all(row.get("tokens_per_second", 0) > 0 for row in rows.values()), rows
    assert rows["two cards"]["devices"] == 2
    for way in ("two cards", "ranks"):
        assert rows[way]["losses"] == pytest.approx(rows["one card"]["losses"], rel=1e-5)


def test_part_without_its_packages_says_which_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydantic", None)  # its import fails
    assert list(gpu_first.run_swarm(TINY)) == [{"failure": NEEDING_PACKAGES["swarm"]}]


@pytest.fixture
def part(monkeypatch, tmp_path):
    """Return a function that lets parts be a program that prints a row, and then does more."""
    program = tmp_path / "part.py"
    monkeypatch.setattr(gpu_first, "__file__", str(program))

    def write(then: str) -> None:
        program.write_text(f"print('ROW {{\"a\": 1}}', flush=True)\nprint('why')\n{then}\n")

    return write


def test_part_that_fails_leaves_its_rows_and_its_last_lines(part):
    part("raise SystemExit(3)")
    result = gpu_first.start_part("smoke", TINY, 300.0)
    assert result["rows"] == [{"a": 1}] and result["failure"] == "ended with status 3"
    assert result["output"] == ["why"]


def test_part_that_does_not_end_is_killed_and_leaves_its_rows(part, monkeypatch, tmp_path):
    marker = tmp_path / "printed"
    part(f"import pathlib, time; pathlib.Path({str(marker)!r}).touch(); time.sleep(600)")

    class ImpatientProcess(subprocess.Popen):
        def wait(self, timeout=None):
            if timeout is None:
                return super().wait()
            wait_until(marker.exists)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(gpu_first.subprocess, "Popen", ImpatientProcess)
    result = gpu_first.start_part("smoke", TINY, 80.0)
    assert result["rows"] == [{"a": 1}] and result["failure"] == "not finished after 80 s"


@pytest.mark.slow
def test_first_call_runs_end_to_end_on_a_bare_machine(tmp_path):
    results = run_program(tmp_path)
    assert [result["part"] for result in results] == list(gpu_first.CALLS["first"])
    for result in results:
        assert "failure" not in result, result
        failures = [row["failure"] for row in result["rows"] if "failure" in row]
        if result["part"] in NEEDING_PACKAGES:
            assert len(failures) == 1 and NEEDING_PACKAGES[result["part"]] in failures[0]
        else:
            assert result["rows"] and not failures, result
    exact = next(result["rows"] for result in results if result["part"] == "exact")
    assert len(exact) == 16 and all(row["same_bits"] for row in exact)
