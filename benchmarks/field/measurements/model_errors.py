"""Compare the runtime model with steps on lines that take about as long as the arithmetic."""

from dataclasses import replace
from statistics import fmean, median, stdev
from typing import Any

from field_bench import WORKERS, FieldBench, limit_uplink
from field_cells import Cell
from field_model import MODEL, STEP_TOKENS
from links import observe_line
from step_predictions import MIN_STEPS, compare_with_model

from barnraise.planning.lines import BITS_PER_BYTE, HOME_LINE, MEGABIT, Line
from barnraise.planning.runtime_model import StepTime

MAX_MODEL_ERROR = 0.2  # of the runtime model; what is farther off is measured again


def measure_runtime_model(bench: FieldBench) -> None:
    """Measure steps where a line takes about as long as the arithmetic, and compare them.

    There neither of the two hides an error of the model. As on volunteers' machines, the model
    gets what was measured: the rate at which the system's own bytes travel on this line, and
    the arithmetic of the steps without their waits. What it predicts is the waits.
    """
    steps = bench.extent.model_steps
    bench.measure_alone(steps)
    payload = MODEL.parameters * 32 / BITS_PER_BYTE
    sent = {  # bytes of a step, and messages one after the other
        "torch_ddp": (2 * (WORKERS - 1) / WORKERS * payload, 2 * (WORKERS - 1)),
        "decent_dp_adam": (payload, 1),
        "ours_mixing": (payload, 1),
    }
    for share in bench.extent.model_shares:
        megabits = payload / (share * bench.step_seconds_alone) * BITS_PER_BYTE / MEGABIT
        line = Line(f"{share:g} steps a model", megabits, megabits, HOME_LINE.delay_seconds)
        for system, (sent_bytes, messages) in sent.items():
            row = _measure_against_model(bench, system, line, sent_bytes, messages)
            if row is None:
                continue
            rows = [row]
            # Now and then a connection is slow for its first dozen steps on a line, and these
            # are all steps of a quick measurement.
            while rows[0]["error"] > MAX_MODEL_ERROR and len(rows) < bench.extent.repeats:
                again = _measure_against_model(bench, system, line, sent_bytes, messages)
                rows.append(again or rows[0])  # too few steps say that it is as slow again
            rows.sort(key=lambda row: row["error"])
            median_row = rows[len(rows) // 2]
            errors = [row["error"] for row in rows]
            bench.findings.model_errors.append(median_row | {"errors": errors})


def _measure_against_model(
    bench: FieldBench, system: str, line: Line, sent_bytes: float, messages: int
) -> dict[str, Any] | None:
    """Measure a system's steps on a line, and compare them; None if it makes too few."""
    steps = bench.extent.model_steps
    options = limit_uplink(line) if system == "ours_mixing" else {}
    idle = bench.run(Cell(system, line, 120.0, steps, options=options | {"sequences": 1}))
    result = bench.run(Cell(system, line, 120.0, steps, options=options))
    if len(idle.step_seconds) < MIN_STEPS or len(result.step_seconds) < MIN_STEPS:
        return None
    observed = observe_line(line, sent_bytes, messages, median(idle.step_seconds[1:]))
    seconds = result.computing_seconds
    measured_step = StepTime(fmean(seconds), stdev(seconds), STEP_TOKENS)
    return compare_with_model(
        system,
        replace(observed, name=line.name),
        fmean(result.step_seconds[1:]),
        bench.step_time if system == "torch_ddp" else measured_step,
    )
