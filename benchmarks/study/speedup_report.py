"""Write the speed-ups' document, their plot, and the fit that worker and site read."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from muon_report import make_muon_table
from speedup_plan import (
    ALONE_LENGTHS,
    GRID_LENGTHS,
    GRID_MACHINES,
    GRID_STEPS,
    RATES,
    SEEDS,
    Cell,
    SpeedupPlan,
    grid_case,
)
from steps_to_loss import interpolate_steps
from study_case import Case
from study_model import SIZE, STEP_TOKENS
from study_peers import MEAN_ANCHORS, MEAN_PART
from study_plan import Results
from study_report import DOCUMENTS, END

from barnraise.durable_io import write_atomically
from barnraise.planning.lines import HOME_LINE
from barnraise.planning.speedup import FIT, FIT_VERSION
from barnraise.spec import MUON

DOCUMENT = DOCUMENTS / "speedup.md"
RESULTS = DOCUMENT.with_suffix(".jsonl")
USUAL = (Case.optimizer, Case.beta2, Case.weight_decay)  # settings of one machine alone
BEGIN = "<!-- measured: `make study-speedup` writes from here -->"


@dataclass(frozen=True)
class Speedup:
    """How many times the steps of each machine one machine alone needs to the same loss."""

    mean: float
    least: float  # of the seeds
    most: float
    seeds: int

    def __str__(self) -> str:
        """Return it with its spread."""
        spread = f" ({self.least:.2f} to {self.most:.2f})" if self.seeds > 1 else ""
        return f"{self.mean:.2f}{spread}"


class AloneCurve:
    """The loss of one machine alone by its steps, with one seed; each length has its best rate."""

    def __init__(self, results: Results, seed: int) -> None:
        """Read what is measured."""
        losses: dict[int, float] = {}
        for case in results.cases():
            tuned = (case.optimizer, case.beta2, case.weight_decay)
            if case.kind == "alone" and case.seed == seed and tuned == USUAL:
                steps = case.tokens // (case.replicas * STEP_TOKENS)
                losses[steps] = min(results.loss(case), losses.get(steps, math.inf))
        self.points = sorted(losses.items())

    def steps_to(self, loss: float) -> float | None:
        """Return the steps to a loss; see `interpolate_steps`."""
        return interpolate_steps(self.points, loss)


def measure_speedup(results: Results, case: Case, steps: int) -> Speedup | None:
    """Return a training's speed-up over the seeds that are measured; None if none is."""
    ratios = []
    for seed in SEEDS:
        seeded = replace(case, seed=seed)
        if results.has(seeded):
            alone = AloneCurve(results, seed).steps_to(results.loss(seeded))
            if alone is not None:
                ratios.append(alone / steps)
    if not ratios:
        return None
    return Speedup(sum(ratios) / len(ratios), min(ratios), max(ratios), len(ratios))


def compute_figures(plan: SpeedupPlan, results: Results) -> dict[str, Any]:
    """Compute the last line: two speed-ups of four machines, and what is not measured."""
    wanted = [case for stage in plan.stages() for case in stage(results)]
    missing = [str(case) for case in dict.fromkeys(wanted) if not results.has(case)]
    figures: dict[str, Any] = {"cells": len(dict.fromkeys(wanted)) - len(missing)}
    for name, is_home in (("speedup_r4_home", True), ("speedup_r4_100", False)):
        cells = [
            cell
            for cell in plan.cells()
            if cell.machines == 4 and (cell.line == HOME_LINE) == is_home
        ]
        speedup = measure_speedup(results, cells[-1].case(), cells[-1].steps)
        figures[name] = round(speedup.mean, 2) if speedup else None
    return {**figures, "missing": missing}


def fit_points(plan: SpeedupPlan, results: Results) -> Iterator[dict[str, Any]]:
    """Yield the measured points of the fit, one for each number of rounds."""
    speedups: defaultdict[tuple[int, bool, float], list[float]] = defaultdict(list)
    for machines, case, steps in studied_cases(plan):
        speedup = measure_speedup(results, case, steps)
        if speedup:
            key = machines, case.form.startswith("dense"), round(steps / case.steps, 1)
            speedups[key].append(speedup.mean)
    for (machines, is_dense, rounds), means in sorted(speedups.items()):
        mean = round(sum(means) / len(means), 3)
        yield {"machines": machines, "dense": is_dense, "rounds": rounds, "speedup": mean}


def studied_cases(plan: SpeedupPlan) -> Iterator[tuple[int, Case, int]]:
    """Yield the machines, the case and the steps of all cells and of the grid."""
    for cell in plan.cells():
        yield cell.machines, cell.case(), cell.steps
    for form, lengths in GRID_LENGTHS.items():
        for length in lengths:
            yield GRID_MACHINES, grid_case(form, length), GRID_STEPS


def write_document(plan: SpeedupPlan, results: Results) -> None:
    """Write the results, the fit, the tables between the document's markers, and the plot."""
    wanted = {case.key for stage in plan.stages() for case in stage(results)}
    used = sorted(key for key in results.by_key if key in wanted)
    RESULTS.write_text("".join(json.dumps(results.by_key[key]) + "\n" for key in used))
    cells = [measure_speedup(results, cell.case(), cell.steps) for cell in plan.cells()]
    seeds = min((cell.seeds for cell in cells if cell), default=1)
    basis = (
        f"a model of {SIZE / 1e6:.2f} M parameters, AdamW, {seeds} seed{'s' if seeds > 1 else ''}"
    )
    fit = {"version": FIT_VERSION, "basis": basis, "points": list(fit_points(plan, results))}
    write_atomically(FIT, (json.dumps(fit, indent=1) + "\n").encode())
    figures = json.dumps(compute_figures(plan, results) | {"missing": "see below"})
    sections = [f"`{figures}`", make_cell_table(plan, results), make_grid_table(results)]
    sections += [make_alone_table(results), make_muon_table(plan.muon, results)]
    sections.append(make_option_table(plan, results))
    sections.append(list_missing(plan, results))
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    measured = "\n\n".join(section for section in sections if section)
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{measured}\n\n{END}{after}")
    draw_rounds(plan, results)


def make_cell_table(plan: SpeedupPlan, results: Results) -> str:
    """Return the speed-ups on lines."""
    head = (
        "| machines, line, steps of each | rounds, updates | loss | times as fast as one |\n"
        "|---|---|---|---|\n"
    )
    rows = [make_cell_row(results, cell) for cell in plan.cells() if results.has(cell.case())]
    return head + "\n".join(rows)


def make_cell_row(results: Results, cell: Cell) -> str:
    """Return a measured cell's row."""
    case, schedule = cell.case(), cell.schedule
    speedup = measure_speedup(results, case, cell.steps)
    loss = results.loss(case)
    rounds = f"{cell.steps / schedule.steps:.0f}, {schedule.scheme}"
    name = f"{cell.machines}, {cell.line}, {cell.steps:,}"
    longest = f"over {max(ALONE_LENGTHS) / cell.steps:.0f}"  # one machine alone had no such loss
    return f"| {name} | {rounds} | {loss:.4f} | {speedup or longest} |"


def make_grid_table(results: Results) -> str:
    """Return the speed-ups by rounds and scheme."""
    rows = []
    for form, lengths in GRID_LENGTHS.items():
        for length in lengths:
            case = grid_case(form, length)
            if results.has(case):
                speedup = measure_speedup(results, case, GRID_STEPS)
                rounds = GRID_STEPS / length
                loss = results.loss(case)
                rows.append(f"| {form} | {rounds:.0f} | {loss:.4f} | {speedup or '–'} |")
    title = f"{GRID_MACHINES} machines, a full line, {GRID_STEPS:,} steps each:"
    head = "| updates | rounds | loss | times as fast as one |\n|---|---|---|---|\n"
    return f"{title}\n\n{head}" + "\n".join(rows) if rows else ""


def make_alone_table(results: Results) -> str:
    """Return the losses of one machine alone, with seed 0."""
    points = AloneCurve(results, 0).points
    losses = ", ".join(f"{steps:,} steps {loss:.4f}" for steps, loss in points)
    return (
        f"One machine alone, the better of the rates {RATES}: {losses}. A loss above the first "
        "counts as the first: the speed-up is then that at most."
    )


def make_option_table(plan: SpeedupPlan, results: Results) -> str:
    """Return what the mean of the last anchors and a higher outer rate change; "" if unmeasured."""
    changes: defaultdict[str, list[float]] = defaultdict(list)
    for case in results.cases():
        mean_loss = results.by_key[case.key].get("mean_loss")
        if mean_loss is not None:
            optimizer = "Muon" if case.optimizer == MUON else "AdamW"
            name = f"mean, {case.replicas} machines, {optimizer}"
            changes[name].append(mean_loss / results.loss(case) - 1)
    for case in filter(results.has, plan.higher_outer_rate()):
        usual = replace(case, outer_rate=Case.outer_rate)
        if results.has(usual):
            name = f"outer rate {case.outer_rate}, {case.replicas} machines"
            changes[name].append(results.loss(case) / results.loss(usual) - 1)
    if not changes:
        return ""
    rows = [
        f"| {name} | {len(each)} | {min(each):+.2%} to {max(each):+.2%} |"
        for name, each in sorted(changes.items())
    ]
    title = (
        f"What the mean of the last {MEAN_ANCHORS} anchors, over {MEAN_PART:.0%} of the tokens, "
        "and other outer rates change of the loss:"
    )
    head = "| option | trainings | change |\n|---|---|---|\n"
    return f"{title}\n\n{head}" + "\n".join(rows)


def list_missing(plan: SpeedupPlan, results: Results) -> str:
    """Return what is not measured yet; "" if nothing."""
    missing = compute_figures(plan, results)["missing"]
    return f"Not measured yet: {len(missing)} of the plan's trainings." if missing else ""


def draw_rounds(plan: SpeedupPlan, results: Results) -> None:
    """Draw the speed-up of four machines by their rounds."""
    figure, axes = plt.subplots(figsize=(7, 4))
    curves: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for point in fit_points(plan, results):
        values = "all values" if point["dense"] else "one value in 64"
        name = f"{point['machines']} machines, {values}"
        curves[name].append((point["rounds"], point["speedup"]))
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), "o-", markersize=4, label=name)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set(xscale="log", xlabel="rounds of each machine in the whole run")
    axes.set(ylabel="times as fast as one machine, to the same loss")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(DOCUMENT.with_name("speedup_rounds.png"), dpi=110)
    plt.close(figure)
