"""Test what `make bench-exchange` does without a network: refusals, arithmetic, its last line."""

import json
import sys
import time
from dataclasses import replace

import pytest
from helpers.paths import ROOT
from helpers.python_code import run_python

sys.path.append(str(ROOT / "benchmarks" / "field"))
sys.path.append(str(ROOT / "benchmarks" / "shared"))

import field_cells
import torch
from bench_exchange import prepare_text
from field_bench import LINES, FieldBench
from field_cells import Cell, CellResult, evaluate_snapshots, read_result, with_rests
from field_extent import FULL
from field_findings import Findings, summarise
from field_job import FieldJob, StepRecorder
from field_model import SHAPE, FieldGPT, flatten, validate
from links import PACKET_BYTES, boundary_seconds, scale_line
from measurements.pipelines import PIPELINE_STEP_TOKENS, measure_pipelines
from measurements.time_to_loss import measure_loss
from measurements.utilisation import measure_utilisation

FOLDER = ROOT / "benchmarks" / "field"


def result(times: list[float], losses: list[tuple[float, int, float]]) -> CellResult:
    steps = [[(at, 100 * number) for number, at in enumerate(times)]] * 4
    return CellResult("done", steps, [0] * 4, [{}] * 4, losses=losses)


def test_cell_interpolates_when_a_loss_was_reached():
    cell = result([10, 11, 13], [(0.0, 0, 5.0), (10.0, 4, 3.0), (20.0, 8, 2.0)])
    assert cell.seconds_to_loss(2.5) == 15.0 and cell.steps_to_loss(4.0) == 2.0
    assert cell.seconds_to_loss(1.0) is None and cell.seconds_to_loss(6.0) == 0.0
    assert cell.step_seconds == [1, 2] and cell.mean_step_seconds == 1.5
    assert cell.rates == [pytest.approx(200 / 3)] * 4
    assert cell.tokens_per_second == pytest.approx(800 / 3)


class ArithmeticOfPipelines:
    """A runner whose pipelines take as long as their messages travel; it records the cells."""

    def __init__(self) -> None:
        self.cells: list[Cell] = []

    def run(self, cell: Cell) -> CellResult:
        seconds, tokens = 1.0, 4096
        if cell.system == "torch_pipeline":
            self.cells.append(cell)
            tokens, element_bytes = PIPELINE_STEP_TOKENS, cell.options["bits"] / 8
            seconds = boundary_seconds(tokens, SHAPE.width, element_bytes, cell.line)
        steps = [[(seconds * step, tokens * step) for step in range(cell.steps + 1)]] * 4
        return CellResult("done", steps, [0] * 4, [{}] * 4)


def test_slow_pipelines_make_few_steps_and_the_slowest_is_extrapolated():
    runner = ArithmeticOfPipelines()
    extent = replace(FULL, pipeline_models=("GPT 125M", "GPT 1.3B"))
    bench = FieldBench(runner, extent)
    bench.calibrate()
    measure_pipelines(bench)
    rows = bench.findings.pipeline
    assert len(rows) == 2 * len(FULL.pipeline_rates) * 2
    first = [row for row in rows if (row["model"], row["bits"]) == ("GPT 125M", 16)]
    assert [row["megabits"] for row in first] == sorted(FULL.pipeline_rates, reverse=True)
    kinds = [row["kind"] for row in first]
    assert kinds == sorted(kinds, reverse=True) and set(kinds) == {"measured", "extrapolated"}
    # Where only the line counts, what is extrapolated equals what would be measured.
    speeds = [row["tokens_per_second"] / row["megabits"] for row in first]
    assert speeds == pytest.approx([speeds[0]] * len(speeds), rel=0.01)
    assert {cell.steps for cell in runner.cells} == {1, 2, 3}
    cells = len(runner.cells)
    measured = [row["model"] for row in rows if row["kind"] == "measured"]
    assert cells == measured.count("GPT 125M") + 2 * measured.count("GPT 1.3B")


class RecordingRunner:
    """A runner that records the cells and measures nothing but steps of a second."""

    def __init__(self) -> None:
        self.cells: list[Cell] = []

    def run(self, cell: Cell) -> CellResult:
        self.cells.append(cell)
        return result([0.0, 1.0, 2.0], [])


def test_room_for_packets_is_beside_the_limit_of_the_scaled_line():
    runner = RecordingRunner()
    bench = FieldBench(runner, FULL)
    bench.calibrate()
    measure_utilisation(bench)
    for name, cell in zip(("50mbit", "home"), runner.cells[1:], strict=True):
        scaled = scale_line(LINES[name], bench.flops)
        assert cell.line is not None
        assert cell.options["uplink"] == pytest.approx(0.9 * scaled.up_bytes)
        assert cell.line.up_bytes == pytest.approx(scaled.up_bytes + PACKET_BYTES)
        assert cell.line.down_bytes == pytest.approx(scaled.down_bytes + PACKET_BYTES)


class LearningRunner(RecordingRunner):
    """A runner whose workers learn; one that trains alone learns nothing."""

    def run(self, cell: Cell) -> CellResult:
        self.cells.append(cell)
        losses = [] if cell.system == "alone" else [(0.0, 0, 5.0), (3.0, 3, 3.0), (6.0, 6, 2.0)]
        learnt = result([0.0, 1.0, 2.0, 3.5, 5.0], losses)
        learnt.figures = [{"sent_rate": 10.0 * (rank + 1)} for rank in range(4)]
        return learnt


def test_our_cells_state_time_bytes_and_the_models_error():
    runner = LearningRunner()
    bench = FieldBench(runner, replace(FULL, only_ours=True))
    bench.calibrate()
    measure_loss(bench)
    findings = bench.findings
    assert [cell.system for cell in runner.cells] == ["alone", "alone"] + ["ours_updates"] * 3
    assert findings.alone == {"seconds": None, "steps": None, "last_loss": None, "losses": []}
    assert [cell.seconds for cell in runner.cells[2:]] == [FULL.home_seconds] + [
        FULL.loss_seconds
    ] * 2
    for row, name in zip(findings.loss, FULL.loss_lines, strict=True):
        scaled = scale_line(LINES[name], bench.flops)
        assert row["line"] == name and row["seconds"] == 4.2
        assert row["sent_share"] == pytest.approx(40.0 / scaled.up_bytes, abs=1e-3)
        assert row["losses"] == [(0.0, 5.0), (6.0, 2.0)], "one in four seconds, and the last one"
    predicted = [row["predicted"] for row in findings.model_errors]
    assert [row["measured"] for row in findings.model_errors] == [1.333] * 3
    assert predicted == [pytest.approx(bench.step_seconds_alone, rel=0.1)] * 3


def test_equal_snapshots_are_evaluated_once_with_equal_losses(tmp_path, monkeypatch):
    prepare_text(tmp_path)
    model = FieldGPT()
    first = flatten(model)
    expected = validate(model, tmp_path)
    evaluations = []

    def count_and_validate(model: FieldGPT, folder) -> float:
        evaluations.append(folder)
        return validate(model, folder)

    monkeypatch.setattr(field_cells, "validate", count_and_validate)
    for step, weights in enumerate([first, first, first * 1.5, first]):
        torch.save([100.0 + step, weights], tmp_path / f"weights.{4 * step:06d}")
    losses = evaluate_snapshots(tmp_path, tmp_path, 99.0)
    assert [(seconds, steps) for seconds, steps, _ in losses] == [(1, 0), (2, 4), (3, 8), (4, 12)]
    assert [loss for _, _, loss in losses[::3]] == [expected] * 2 and losses[1][2] == expected
    assert losses[2][2] != expected and len(evaluations) == 3
    assert not list(tmp_path.glob("weights.*"))


def test_steps_without_their_waits_are_the_arithmetic(tmp_path):
    job = FieldJob("alone", str(tmp_path), str(tmp_path), 0, ("10.0.0.1",), 5, steps=3)
    (tmp_path / "go").touch()
    recorder = StepRecorder(job, 100)
    recorder.wait_for_go()
    for step in recorder.steps_left():
        time.sleep(0.05)
        if step == 1:
            recorder.add_waiting(0.02)
            recorder.add_waiting(0.03)
    cell = read_result(tmp_path, [job])
    assert cell.waits == [[0.0, 0.05, 0.0]]
    assert cell.computing_seconds[0] == pytest.approx(cell.step_seconds[1] - 0.05)
    assert cell.computing_seconds[1] == pytest.approx(cell.step_seconds[2])


def test_slow_machines_rest_in_proportion_to_their_speed():
    cell = with_rests(Cell("alone", None, 1.0), (1, 2, 4, 7))
    assert cell.rests == pytest.approx((6.0, 2.5, 0.75, 0.0))


def test_last_line_has_every_figure_when_nothing_was_measured():
    findings = Findings()
    assert summarise(findings)["pipeline"]["ratio_1p3b_20mbit_16bit"] is None
    row = {"line": "100mbit", "kind": "measured"}
    findings.loss = [
        row | {"system": "ours_updates", "seconds": 10.0},
        row | {"system": "torch_ddp", "seconds": 400.0},
        row | {"system": "hivemind_optimizer", "seconds": None},
    ]
    findings.pipeline = [
        {"model": "GPT 1.3B", "megabits": 20, "bits": 16, "ratio": 20.9, "closed_form": 22.0}
    ]
    findings.model_errors = [{"error": 0.1}, {"error": 0.15}]
    line = summarise(findings)
    assert line["ddp"]["ratio_100mbit"] == 40.0 and line["hivemind"]["ratio_100mbit"] is None
    assert line["pipeline"]["ratio_1p3b_20mbit_16bit"] == 20.9
    assert line["pipeline"]["closed_form_error"] == 0.05
    assert line["runtime_model_error"] == 0.15
    assert json.loads(json.dumps(line)) == line


def test_benchmark_without_root_ends_with_one_sentence():
    script = (
        f"import os, sys; sys.path[:0] = {[str(FOLDER), str(ROOT / 'worker')]!r}\n"
        "from contextlib import ExitStack\n"
        "from field_network import FieldNetwork, NamespaceError\n"
        "if os.geteuid() == 0: os.seteuid(65534)\n"
        "with ExitStack() as cleanup:\n"
        "    try: FieldNetwork(4, 0.01, cleanup).create()\n"
        "    except NamespaceError as error: print(error)\n"
    )
    done = run_python(script, check=True)
    assert done.stdout.strip().endswith("which needs Linux and root")
