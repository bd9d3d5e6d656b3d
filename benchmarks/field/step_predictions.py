"""Compare measured steps with those that the runtime model predicts."""

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import Any

from field_bench import LINES, WORKERS, FieldBench, report
from field_cells import CellResult
from field_model import MODEL
from links import scale_line

from barnraise.planning.lines import Line
from barnraise.planning.mixing_topology import EXPONENTIAL
from barnraise.planning.runtime_model import (
    Prediction,
    StepTime,
    Swarm,
    predict_data_parallel,
    predict_decentralized_adam,
    predict_updates,
)

MIN_STEPS = 3  # that a slow system must make before its steps are multiplied


def compare_our_steps(bench: FieldBench, line_name: str, result: CellResult) -> None:
    """Compare the steps of our worker on a scaled line, if it made enough."""
    if len(result.step_seconds) < MIN_STEPS:
        return
    line = replace(scale_line(LINES[line_name], bench.flops), name=line_name)
    measured = fmean(result.step_seconds[1:])
    row = compare_with_model("ours_updates", line, measured, bench.step_time)
    if row is not None:
        bench.findings.model_errors.append(row)


def compare_with_model(
    system: str, line: Line, measured: float, step: StepTime
) -> dict[str, Any] | None:
    """Return how far the runtime model's step is from the measured one; None: no model."""
    swarm = Swarm(WORKERS, MODEL.parameters, line, step)
    predictions: dict[str, Callable[[], Prediction]] = {
        "torch_ddp": lambda: predict_data_parallel(swarm),
        "decent_dp_adam": lambda: predict_decentralized_adam(swarm, EXPONENTIAL, 32),
        "ours_mixing": lambda: predict_decentralized_adam(swarm, EXPONENTIAL, 32),
        "ours_updates": lambda: predict_updates(swarm),
    }
    if system not in predictions:
        return None
    predicted = predictions[system]().step_seconds
    row = {
        "system": system,
        "line": line.name,
        "computing": round(step.mean_seconds, 3),
        "deviation": round(step.deviation_seconds, 3),
        "megabits": round(line.up_megabits, 2),
        "predicted": round(predicted, 3),
        "measured": round(measured, 3),
        "error": round(abs(predicted / measured - 1), 3),
    }
    report("runtime model", row)
    return row
