"""Write the study's figures, tables and plots; they name what is not measured."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from study_case import Case
from study_model import NAME, SIZE, STEP_TOKENS
from study_plan import KINDS, ROUND_LENGTH, SCHEMES, SPEEDS, Results, StudyPlan

DOCUMENTS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
DOCUMENT = DOCUMENTS / ("exchange_study.md" if NAME == "small" else f"exchange_study_{NAME}.md")
RESULTS = DOCUMENT.with_suffix(".jsonl")
BEGIN = "<!-- measured: `make study-exchange` writes from here -->"
END = "<!-- to here -->"
MAX_SEEDS = 4


def compute_figures(plan: StudyPlan, results: Results) -> dict[str, Any]:
    """Compute the study's figures from the long trainings.

    Ours is a new run on the line that a gaming GPU can count on; `full_line` is ours on a line that
    it fills.

    Returns:
        Differences as fractions of the loss (0.01: 1 %), means over the seeds that both have; None
        where something is not measured.
    """
    ours, parallel, diloco, alone = (plan.long_case(results, kind) for kind in KINDS)
    undelayed, full_line = plan.undelayed_case(results), plan.full_line_case(results)
    return {
        "gap_to_dp_r4": loss_gap(results, ours, parallel),
        "gap_to_diloco": loss_gap(results, ours, diloco),
        "bytes_ratio": bytes_ratio(results, diloco, ours),
        "async_cost": loss_gap(results, ours, undelayed),
        "unequal_cost": loss_gap(results, replace(ours, speeds=SPEEDS), ours),
        "alone_gap": loss_gap(results, alone, ours),
        "full_line": {
            "gap_to_dp_r4": loss_gap(results, full_line, parallel),
            "gap_to_diloco": loss_gap(results, full_line, diloco),
            "async_cost": loss_gap(results, full_line, undelayed),
        },
    }


def loss_gap(results: Results, case: Case, other: Case) -> float | None:
    """Return by which fraction the loss of `case` exceeds that of `other`, over all seeds."""
    gaps = []
    for seed in range(MAX_SEEDS):
        one, two = replace(case, seed=seed), replace(other, seed=seed)
        if results.has(one) and results.has(two):
            gap = results.loss(one) / results.loss(two) - 1
            if math.isfinite(gap):
                gaps.append(gap)
    return round(sum(gaps) / len(gaps), 4) if gaps else None


def bytes_ratio(results: Results, case: Case, other: Case) -> float | None:
    """Return how many times the bytes per token of `other` those of `case` are."""
    numerator, denominator = bytes_per_token(results, case), bytes_per_token(results, other)
    return round(numerator / denominator, 2) if numerator and denominator else None


def bytes_per_token(results: Results, case: Case) -> float | None:
    """Return the bytes of updates, each sent once, over the tokens trained."""
    result = results.get(case)
    return result["bytes"] / result["tokens"] if result else None


# ---- the document -----------------------------------------------------------------------------


def write_document(plan: StudyPlan, results: Results) -> None:
    """Write the tables between the document's markers, and plots and all results next to it."""
    lines = [json.dumps(results.by_key[key]) + "\n" for key in sorted(results.by_key)]
    RESULTS.write_text("".join(lines))
    figures = json.dumps(compute_figures(plan, results))
    sections = [f"`{figures}`", *make_tables(plan, results)]
    text = f"# The exchange study, {NAME}\n\n{BEGIN}{END}\n"
    if DOCUMENT.exists():
        text = DOCUMENT.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    measured = "\n\n".join(section for section in sections if section)
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{measured}\n\n{END}{after}")
    if plan.factors(results) and results.has(plan.tuned(results, "diloco")):
        draw_bytes(plan, results)
    if results.has(plan.long_case(results, "ours")):
        draw_curves(plan, results)


def make_tables(plan: StudyPlan, results: Results) -> list[str]:
    """Return the tables in Markdown, and the list of what is not measured.

    Trainings that tune a system, and those outside the plan, are in the file of results alone.
    """
    tuning = plan.rate_cases(results) + plan.outer_cases(results)
    factors = plan.factors(results)
    long_cases = [*plan.frontier(results), *plan.second_seed(results)]
    planned = list(dict.fromkeys(long_cases + tuning + plan.flatten(factors)))
    sections = [
        make_table(results, "Long trainings", long_cases),
        make_factor_table(results, factors),
    ]
    missing = [case for case in planned if not results.has(case)]
    if missing:
        names = "\n".join(f"* {case}" for case in missing)
        sections.append(f"### Not measured yet\n\n{names}")
    return sections


def make_table(results: Results, title: str, cases: list[Case]) -> str:
    """Return a table that compares measured cases with the first; "" if there is only one."""
    measured = [case for case in dict.fromkeys(cases) if results.has(case)]
    if len(measured) < 2:
        return ""
    reference = measured[0]
    heading = f"### {title}: {reference.tokens / 1e6:.1f} M tokens; reference: {reference}"
    head = "| training | bytes per token | loss | difference |\n|---|---|---|---|\n"
    rows = "\n".join(make_row(results, case, reference) for case in measured)
    return f"{heading}\n\n{head}{rows}"


def make_factor_table(results: Results, factors: dict[str, list[Case]]) -> str:
    """Return a row of losses for each factor, against its reference; "" if none is measured."""
    rows = []
    for name, cases in factors.items():
        measured = [case for case in dict.fromkeys(cases) if results.has(case)]
        if len(measured) < 2:
            continue
        reference, *others = measured
        label = name if reference == Case() else f"{name}; reference: {reference}"
        losses = "; ".join(describe_loss(results, case, reference) for case in others)
        rows.append(f"| {label} | {losses} |")
    if not rows:
        return ""
    head = "| factor | losses of its trainings |\n|---|---|\n"
    return "### One factor at a time\n\n" + head + "\n".join(rows)


def describe_loss(results: Results, case: Case, reference: Case) -> str:
    """Return a case's name with its loss and the difference from the reference's."""
    loss = results.loss(case)
    difference = 100 * (loss / results.loss(reference) - 1)
    figures = "diverged" if math.isinf(loss) else f"{loss:.4f}, {difference:+.1f} %"
    return f"{describe_case(case, reference)} ({figures})"


def make_row(results: Results, case: Case, reference: Case) -> str:
    """Return a measured case's row."""
    loss, sent = results.loss(case), bytes_per_token(results, case)
    name = describe_case(case, reference)
    if math.isinf(loss):
        return f"| {name} | {sent:,.1f} | diverged | |"
    difference = 100 * (loss / results.loss(reference) - 1)
    return f"| {name} | {sent:,.1f} | {loss:.4f} | {difference:+.2f} % |"


def describe_case(case: Case, reference: Case) -> str:
    """Return the settings in which a case differs from the reference."""
    if case == reference:
        return "**reference**"
    if case.kind != reference.kind:
        names = ["kind", "seed", "rate"]
        if case.kind == "diloco":
            names += ["steps", "outer_rate", "momentum"]
            if case.tokens != reference.tokens:
                names.append("tokens")
        return ", ".join(f"{name} {getattr(case, name)}" for name in names)
    ignored: set[str] = set()
    if case.guess == "none":
        ignored.add("trust")
    changed = [
        field.name
        for field in fields(Case)
        if field.name not in ignored and getattr(case, field.name) != getattr(reference, field.name)
    ]
    return ", ".join(f"{name} {getattr(case, name)}" for name in changed)


# ---- the plots --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """Cases that one line of the plot of bytes joins."""

    label: str
    style: str
    cases: list[Case]
    reference: Case
    name: Callable[[Case], str]
    label_side: str = "left"
    label_offset: tuple[int, int] = (5, 4)  # points


def draw_bytes(plan: StudyPlan, results: Results) -> None:
    """Draw the loss over tuned DiLoCo's against bytes per token."""
    figure, axes = plt.subplots(figsize=(7, 4.2))
    factors, short_diloco = plan.factors(results), plan.tuned(results, "diloco")
    full_line = plan.full_line_case(results)
    series = [
        Series(
            "round lengths, dense2",
            "o-",
            sorted(factors[ROUND_LENGTH], key=lambda case: case.steps),
            short_diloco,
            lambda case: f"H {case.steps}",
        ),
        Series(
            "schemes, H 10",
            "s",
            factors[SCHEMES][1:],
            short_diloco,
            lambda case: case.form,
            label_offset=(5, 6),
        ),
        Series(
            "H 10, predictions, line full or with room",
            "^",
            [plan.long_case(results, "ours"), full_line, replace(full_line, form="dense4")],
            plan.long_case(results, "diloco"),
            describe_line,
            label_side="right",
            label_offset=(-6, -3),
        ),
    ]
    for one_series in series:
        draw_series(axes, results, one_series)
    axes.axhline(0, color="grey", linewidth=0.8)
    diloco_bytes = 4 * SIZE / (short_diloco.steps * STEP_TOKENS)
    axes.axvline(diloco_bytes, color="grey", linewidth=0.8, linestyle=":")
    axes.set(
        xscale="log",
        xlabel="bytes of updates per token",
        ylabel="% more loss than synchronous fp32 DiLoCo",
    )
    save_figure(figure, axes, "bytes")


def draw_series(axes: Axes, results: Results, series: Series) -> None:
    """Draw the measured cases of a series, with their names."""
    points: list[tuple[float, float]] = []
    names: list[str] = []
    for case in series.cases:
        sent, gap = bytes_per_token(results, case), loss_gap(results, case, series.reference)
        if sent is not None and gap is not None:
            points.append((sent, 100 * gap))
            names.append(series.name(case))
    label = f"{series.label}, {series.reference.tokens / 1e6:.0f} M tokens"
    axes.plot([x for x, _ in points], [y for _, y in points], series.style, label=label)
    for name, point in zip(names, points, strict=True):
        axes.annotate(
            name,
            point,
            textcoords="offset points",
            xytext=series.label_offset,
            ha=series.label_side,
            fontsize=7,
        )


def describe_line(case: Case) -> str:
    """Return how full the line is, and the scheme if it is not the default."""
    line = "full" if case.delay == Case.delay else "with room"
    return line if case.form == Case.form else f"{case.form}, {line}"


def draw_curves(plan: StudyPlan, results: Results) -> None:
    """Draw the loss over tokens of the long trainings."""
    figure, axes = plt.subplots(figsize=(7, 4.2))
    ours, parallel, diloco, alone = (plan.long_case(results, kind) for kind in KINDS)
    cases = {
        "one alone": alone,
        "ours, full line": plan.full_line_case(results),
        "ours, line with room": ours,
        "ours, without delay": plan.undelayed_case(results),
        "DiLoCo, fp32, synchronous": diloco,
        "data parallel": parallel,
    }
    for label, case in cases.items():
        result = results.get(case)
        if result and result["loss"]:
            # One alone takes as many steps as each replica: it is drawn at the tokens of all.
            points = [*result["curve"], [case.tokens, result["loss"]]]
            tokens, losses = [x / 1e6 for x, _ in points], [y for _, y in points]
            axes.plot(tokens, losses, "o-", markersize=3, label=label)
    axes.set(xlabel="million tokens of all replicas", ylabel="validation loss, nats per byte")
    save_figure(figure, axes, "curves")


def save_figure(figure: Figure, axes: Axes, name: str) -> None:
    """Save a figure next to the document."""
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(DOCUMENT.with_name(f"{DOCUMENT.stem}_{name}.png"), dpi=110)
    plt.close(figure)
