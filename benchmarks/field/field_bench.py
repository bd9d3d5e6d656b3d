"""What the measurements of `make bench-exchange` share: this machine's speed and the cells."""

import json
import os
import sys
from statistics import fmean
from typing import Any, Protocol

from field_cells import Cell, CellResult
from field_extent import Extent
from field_findings import Findings
from field_model import MODEL, STEP_TOKENS
from links import leave_room_for_packets, scale_line

from barnraise.planning.lines import HOME_LINE, Line
from barnraise.planning.runtime_model import StepTime

WORKERS = 4
EXTERNAL = ("decent_dp_adam", "hivemind_optimizer", "torchft_diloco")
LINES = {
    "home": HOME_LINE,
    "50mbit": Line("50 Mb/s", 50, 50, 0.023),
    "100mbit": Line("100 Mb/s", 100, 100, 0.023),
    "1000mbit": Line("1,000 Mb/s", 1000, 1000, 0.023),
}
UPLINK_SHARE = 0.9  # of the line, as scaled: our workers' own limit
SNAPSHOT_STEPS = 8  # between two snapshots of the weights, for losses over time


class CellRunner(Protocol):
    """Runs cells one after the other: a `FieldRunner`."""

    def run(self, cell: Cell) -> CellResult:
        """Measure a cell."""
        ...


class FieldBench:
    """Run the cells of all measurements.

    Attributes:
        extent: how much is measured.
        findings: of all measurements.
    """

    def __init__(self, runner: CellRunner, extent: Extent) -> None:
        """Measure nothing yet."""
        self.extent = extent
        self.findings = Findings()
        self._runner = runner
        self._alone: CellResult | None = None

    def run(self, cell: Cell) -> CellResult:
        """Measure a cell; print why a system fails."""
        result = self._runner.run(cell)
        if result.outcome.startswith(("fails", "does not start")):
            print(f"{cell.system}: {result.outcome}", file=sys.stderr, flush=True)
        return result

    def our_cell(self, line: Line, steps: int = 0, seconds: float | None = None) -> Cell:
        """Return the cell of our worker on a line."""
        scaled = scale_line(line, self.flops)
        return Cell(
            "ours_updates",
            leave_room_for_packets(scaled),
            seconds or self.extent.loss_seconds,
            steps=steps,
            snapshot_steps=0 if steps else SNAPSHOT_STEPS,
            options=limit_uplink(scaled),
        )

    # ---- this machine's speed -----------------------------------------------------------------

    def calibrate(self) -> None:
        """Measure what each worker computes alone, while all four do."""
        self.measure_alone(self.extent.calibration_steps)
        self.findings.machine = {
            "tokens_per_second_alone": round(STEP_TOKENS / self.step_seconds_alone, 1),
            "step_seconds_alone": round(self.step_seconds_alone, 4),
            "flops_alone": round(self.flops / 1e9, 2),
            "parameters": MODEL.parameters,
            "step_tokens": STEP_TOKENS,
            "load": [round(value, 1) for value in os.getloadavg()],
        }
        report("alone", self.findings.machine)

    def measure_alone(self, steps: int) -> None:
        """Measure the steps without exchange that `step_time` and `flops` are derived from."""
        self._alone = self.run(Cell("alone", None, 300.0, steps=steps))

    @property
    def step_seconds_alone(self) -> float:
        """Return the mean seconds of a step without exchange, over all workers."""
        assert self._alone is not None
        return STEP_TOKENS / fmean(self._alone.rates)

    @property
    def step_time(self) -> StepTime:
        """Return the time of a step without exchange, as the runtime model wants it."""
        assert self._alone is not None
        return StepTime(self.step_seconds_alone, self._alone.step_deviation, STEP_TOKENS)

    @property
    def flops(self) -> float:
        """Return the FLOP/s of one worker: six for each parameter and token."""
        return 6 * MODEL.parameters * STEP_TOKENS / self.step_seconds_alone


def limit_uplink(line: Line) -> dict[str, float]:
    """Return the options with which our workers leave a part of the line to acknowledgements."""
    return {"uplink": UPLINK_SHARE * line.up_bytes}


def report(what: str, row: dict[str, Any]) -> None:
    """Print one measurement."""
    print(f"{what}: {json.dumps(row)}", flush=True)
