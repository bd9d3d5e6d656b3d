"""Measure how long each system takes to the same validation loss on each line."""

from dataclasses import replace
from statistics import fmean
from typing import Any

from field_bench import LINES, SNAPSHOT_STEPS, FieldBench, report
from field_cells import Cell, CellResult
from links import scale_line
from step_predictions import MIN_STEPS, compare_our_steps, compare_with_model

CURVE_STEPS = 4  # between two snapshots of curves, which end a few steps after the target
CURVE_SECONDS = 4.0  # between two losses of a curve in the findings, at least


def measure_loss(bench: FieldBench) -> None:
    """Measure how long each system takes to the same validation loss on each line."""
    _measure_alone(bench)
    if bench.extent.only_ours:
        for name in bench.extent.loss_lines:
            _measure_asynchronous(bench, "ours_updates", name)
        return
    rounds = {"round_steps": bench.extent.round_steps}
    curve_steps = bench.extent.curve_steps
    # DiLoCo learns less from each step, so its curve is longer.
    steps_needed = {
        "torch_ddp": _measure_curve(bench, "torch_ddp", curve_steps, {}),
        "decent_dp_adam": _measure_curve(bench, "decent_dp_adam", curve_steps, {}),
        "torchft_diloco": _measure_curve(bench, "torchft_diloco", curve_steps * 9 // 5, rounds),
    }
    hivemind = _measure_curve(bench, "hivemind_optimizer", 0, {})
    for name in bench.extent.loss_lines:
        _measure_asynchronous(bench, "ours_updates", name)
        for system, (steps, cell) in steps_needed.items():
            _measure_synchronous(bench, system, name, steps, cell)
        _measure_hivemind(bench, name, steps_needed["torch_ddp"][0], hivemind[1])


def _measure_alone(bench: FieldBench) -> None:
    """Train each machine alone, which needs no line at all."""
    seconds = bench.extent.alone_seconds
    result = bench.run(Cell("alone", None, seconds, 0, SNAPSHOT_STEPS))
    bench.findings.alone = {
        "seconds": result.seconds_to_loss(bench.extent.target_loss),
        "steps": result.steps_to_loss(bench.extent.target_loss),
        "last_loss": round(result.losses[-1][2], 3) if result.losses else None,
    }
    report("one machine alone", bench.findings.alone)
    bench.findings.alone["losses"] = _thin_out(result.losses)


def _measure_curve(
    bench: FieldBench, system: str, steps: int, options: dict[str, Any]
) -> tuple[float | None, CellResult]:
    """Train without a limit on the line; steps to a loss do not depend on it.

    Args:
        bench: runs the cells.
        system: the adapter.
        steps: to make at most; 0: as many as fit into the time of hivemind.
        options: of the adapter.
    """
    extent = bench.extent
    seconds = extent.loss_seconds * 4 if steps else extent.hivemind_seconds
    snapshot_steps = CURVE_STEPS if steps else 0
    result = bench.run(Cell(system, None, seconds, steps, snapshot_steps, options))
    needed = result.steps_to_loss(extent.target_loss)
    last = result.losses[-1][2] if result.losses else None
    report("curve", {"system": system, "steps": needed, "last": last, "is": result.outcome})
    return needed, result


def _measure_hivemind(
    bench: FieldBench, line_name: str, steps: float | None, unlimited: CellResult
) -> None:
    """Time hivemind's epochs on a line and multiply them.

    An epoch averages one step of every worker, so it learns what a step of synchronous training
    does, or less, because its updates are delayed. It is counted with as many epochs as DDP
    needs steps, which favours it.

    Args:
        bench: runs the cells.
        line_name: of the line.
        steps: that DDP needs to the target.
        unlimited: what it did without a limit on the line.
    """
    line = scale_line(LINES[line_name], bench.flops)
    epochs, seconds = _count_epochs(unlimited)
    epoch_bytes = max(unlimited.bytes_sent) / max(1, epochs)
    epoch_seconds = max(seconds / max(1, epochs), epoch_bytes / line.up_bytes)
    kind = "computed"
    if epoch_seconds * (MIN_STEPS + 1) < bench.extent.hivemind_seconds:
        cell = Cell("hivemind_optimizer", line, bench.extent.hivemind_seconds)
        epochs, seconds = _count_epochs(bench.run(cell))
        epoch_seconds, kind = seconds / max(1, epochs), "extrapolated"
    row = {
        "system": "hivemind_optimizer",
        "line": line_name,
        "step_seconds": round(epoch_seconds, 3),
        "seconds": steps and round(steps * epoch_seconds, 1),
        "kind": kind,
        "bytes_a_step": round(epoch_bytes),
        "epochs": epochs,
    }
    bench.findings.loss.append(row)
    report("loss", row)


def _measure_synchronous(
    bench: FieldBench, system: str, line_name: str, steps: float | None, curve: CellResult
) -> None:
    """Time a few steps on a line and multiply them."""
    line = scale_line(LINES[line_name], bench.flops)
    per_round = bench.extent.round_steps if system == "torchft_diloco" else 1
    made = max(1, len(curve.step_seconds))
    step_bytes = max(curve.bytes_sent) / made
    computed = step_bytes / line.up_bytes + bench.step_seconds_alone
    wanted = max(MIN_STEPS + 1, per_round * 2)
    kind = "extrapolated"
    if computed * wanted > bench.extent.slow_seconds * 1.5:
        seconds, kind = computed, "computed"
    else:
        options = {"round_steps": per_round} if per_round > 1 else {}
        cell = Cell(system, line, bench.extent.slow_seconds * 3, wanted, 0, options)
        result = bench.run(cell)
        durations = result.step_seconds
        seconds = fmean(durations[-per_round * (len(durations) // per_round) :] or [computed])
        named = replace(line, name=line_name)
        compared = compare_with_model(system, named, seconds, bench.step_time)
        if compared is not None:
            bench.findings.model_errors.append(compared)
    row = {
        "system": system,
        "line": line_name,
        "step_seconds": round(seconds, 3),
        "seconds": steps and round(steps * seconds, 1),
        "kind": kind,
        "bytes_a_step": round(step_bytes),
        "utilisation": round(bench.step_seconds_alone / seconds, 4),
    }
    bench.findings.loss.append(row)
    report("loss", row)


def _measure_asynchronous(bench: FieldBench, system: str, line_name: str) -> None:
    """Train on a line until the target, or as long as the benchmark allows."""
    extent = bench.extent
    limit = extent.home_seconds if line_name == "home" else extent.loss_seconds
    result = bench.run(bench.our_cell(LINES[line_name], seconds=limit))
    compare_our_steps(bench, line_name, result)
    scaled = scale_line(LINES[line_name], bench.flops)
    sent_rate = max(figures.get("sent_rate", 0.0) for figures in result.figures)
    seconds = result.seconds_to_loss(bench.extent.target_loss)
    kind = "measured"
    if seconds is None and len(result.losses) > 1:
        seconds, kind = _extrapolate(result, bench.extent.target_loss), "extrapolated"
    row = {
        "system": system,
        "line": line_name,
        "seconds": seconds and round(seconds, 1),
        "kind": kind,
        "step_seconds": round(result.mean_step_seconds, 3),
        "last_loss": round(result.losses[-1][2], 3) if result.losses else None,
        "bytes": max(result.bytes_sent),
        # Of the line as scaled: what the system sends; that and what its transport adds.
        "sent_share": round(sent_rate / scaled.up_bytes, 3),
        "packet_share": round(max(result.bytes_sent) / limit / scaled.up_bytes, 3),
        "outcome": result.outcome,
        "epochs": result.figures[0].get("epochs"),
    }
    report("loss", row)
    bench.findings.loss.append(row | {"losses": _thin_out(result.losses)})


def _thin_out(losses: list[tuple[float, int, float]]) -> list[tuple[float, float]]:
    """Return (seconds, loss) of a curve, at most one in CURVE_SECONDS, and the last one."""
    curve: list[tuple[float, float]] = []
    for n, (seconds, _, loss) in enumerate(losses):
        if not curve or n == len(losses) - 1 or seconds >= curve[-1][0] + CURVE_SECONDS:
            curve.append((round(seconds, 1), round(loss, 3)))
    return curve


def _count_epochs(result: CellResult) -> tuple[int, float]:
    """Return how many epochs the first worker of hivemind has ended, and in how many seconds."""
    epochs = int(result.figures[0].get("epochs", 0)) if result.figures else 0
    steps = result.steps[0]
    return epochs, steps[-1][0] - steps[0][0]


def _extrapolate(result: CellResult, target: float) -> float | None:
    """Return when the last half of a curve would reach the target; None if it does not fall."""
    early, late = result.losses[len(result.losses) // 2], result.losses[-1]
    slope = (early[2] - late[2]) / max(late[0] - early[0], 1e-9)
    return late[0] + (late[2] - target) / slope if slope > 0 else None
