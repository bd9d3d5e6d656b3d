"""What the study found: its figures, tables and plots, with what is missing said."""

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from study_case import Case
from study_model import NAME, SIZE, STEP_TOKENS
from study_plan import KINDS, SPEEDS, Plan, Results

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (
    ROOT
    / "docs"
    / "benchmarks"
    / ("exchange_study.md" if NAME == "small" else f"exchange_study_{NAME}.md")
)
RESULTS = DOCUMENT.with_suffix(".jsonl")
BEGIN, END = "<!-- measured: `make study-exchange` writes from here -->", "<!-- to here -->"


def figures(plan: Plan, found: Results) -> dict[str, Any]:
    """Fractions of loss (0.01: 1 %), of the long trainings; mean over the seeds that both have. None: not measured.
    Ours is what a new run has, on what a gaming GPU's line affords; `full_line`: on one that it fills."""
    ours, parallel, diloco, alone = (plan.far(found, kind) for kind in KINDS)
    at_once, full = plan.at_once(found), plan.full(found)
    return {
        "gap_to_dp_r4": gap(found, ours, parallel),
        "gap_to_diloco": gap(found, ours, diloco),
        "bytes_ratio": ratio(found, diloco, ours),
        "async_cost": gap(found, ours, at_once),
        "unequal_cost": gap(found, replace(ours, speeds=SPEEDS), ours),
        "alone_gap": gap(found, alone, ours),
        "full_line": {
            "gap_to_dp_r4": gap(found, full, parallel),
            "gap_to_diloco": gap(found, full, diloco),
            "async_cost": gap(found, full, at_once),
        },
    }


def gap(found: Results, case: Case, other: Case) -> float | None:
    """How much more loss `case` has than `other`."""
    pairs = [(replace(case, seed=seed), replace(other, seed=seed)) for seed in range(4)]
    gaps = [found.loss(a) / found.loss(b) - 1 for a, b in pairs if found.has(a) and found.has(b)]
    gaps = [each for each in gaps if math.isfinite(each)]
    return round(sum(gaps) / len(gaps), 4) if gaps else None


def ratio(found: Results, more: Case, less: Case) -> float | None:
    """How many times the bytes a token."""
    most, least = bytes_a_token(found, more), bytes_a_token(found, less)
    return round(most / least, 2) if most and least else None


def bytes_a_token(found: Results, case: Case) -> float | None:
    """Of updates, sent once each, over the tokens they were trained on."""
    line = found.line(case)
    return line["bytes"] / line["tokens"] if line else None


def write(plan: Plan, found: Results) -> None:
    """The tables into the document, between its marks; the plots and all results beside it."""
    RESULTS.write_text(
        "".join(json.dumps(found.by_key[key]) + "\n" for key in sorted(found.by_key))
    )
    tuning, factors = plan.rates(found) + plan.around(found), plan.factors(found)
    frontier = [*plan.frontier(found), *plan.again(found)]
    planned = set(tuning + plan.flat(factors) + frontier)
    besides = [case for case in found.cases() if case not in planned]
    long, short = (
        [case for case in besides if (case.tokens > plan.short) is much] for much in (True, False)
    )
    tables = [
        ("The frontier", frontier),
        ("Tried besides", [frontier[0], *long]),
        ("Tuning", tuning),
        *factors.items(),
        ("tried besides, short", [plan.tuned(found, "ours"), *short]),
    ]
    parts = [table(found, *each) for each in tables]
    missing = [
        case
        for case in dict.fromkeys(frontier + tuning + plan.flat(factors))
        if not found.has(case)
    ]
    if missing:
        parts.append("### Not measured yet\n\n" + "\n".join(f"* {case}" for case in missing))
    text = (
        DOCUMENT.read_text()
        if DOCUMENT.exists()
        else f"# The exchange's study, {NAME}\n\n{BEGIN}{END}\n"
    )
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    said = json.dumps(figures(plan, found))
    tables_and_rest = "\n\n".join(part for part in parts if part)
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n`{said}`\n\n{tables_and_rest}\n\n{END}{after}")
    if factors and found.has(plan.tuned(found, "diloco")):
        draw_bytes(plan, found)
    if found.has(plan.far(found, "ours")):
        draw_curves(plan, found)


def table(found: Results, name: str, cases: list[Case]) -> str:
    """Of what is measured, against the first case; nothing while there is nothing to compare."""
    measured = [case for case in dict.fromkeys(cases) if found.has(case)]
    if len(measured) < 2:
        return ""
    base = measured[0]
    head = f"### {name}: {base.tokens / 1e6:.1f} M tokens, against {base}"
    return f"{head}\n\n| | bytes a token | loss | |\n|---|---|---|---|\n" + "\n".join(
        row(found, case, base) for case in measured
    )


def row(found: Results, case: Case, base: Case) -> str:
    loss, sent = found.loss(case), bytes_a_token(found, case)
    if math.isinf(loss):
        return f"| {describe(case, base)} | {sent:,.1f} | diverged | |"
    return f"| {describe(case, base)} | {sent:,.1f} | {loss:.4f} | {100 * (loss / found.loss(base) - 1):+.2f} % |"


def describe(case: Case, base: Case) -> str:
    """What is not as in `base`; all of it for the base itself."""
    if case == base:
        return "**as it is**"
    names = [
        field.name for field in fields(Case) if field.name != "tokens" or case.kind == "diloco"
    ]
    if case.kind != base.kind:
        names = ["kind", "seed", "rate"]
        if case.kind == "diloco":
            names += [
                "steps",
                "outer_rate",
                "momentum",
                *(["tokens"] if case.tokens != base.tokens else []),
            ]
        return ", ".join(f"{name} {getattr(case, name)}" for name in names)
    names = [name for name in names if name != "trust" or case.guess != "none"]
    return ", ".join(
        f"{n} {getattr(case, n)}" for n in names if getattr(case, n) != getattr(base, n)
    )


def draw_bytes(plan: Plan, found: Results) -> None:
    """Loss over tuned DiLoCo's against bytes a token: round lengths and forms, short; what the frontier has, long."""
    figure, axes = plt.subplots(figsize=(7, 4.2))
    factors, short = plan.factors(found), plan.tuned(found, "diloco")
    full = plan.full(found)
    long = [plan.far(found, "ours"), full, replace(full, form="dense4")]
    rounds = sorted(factors["H"], key=lambda case: case.steps)
    groups = [
        ("round lengths, dense2", "o-", "left", 4, rounds, short, lambda case: f"H {case.steps}"),
        (
            "forms, H 10",
            "s",
            "left",
            6,
            factors["bits and density"][1:],
            short,
            lambda case: case.form,
        ),
        (
            "H 10, a guess, and how full the line is",
            "^",
            "right",
            -3,
            long,
            plan.far(found, "diloco"),
            late,
        ),
    ]
    for label, style, side, above, cases, base, name in groups:
        cases = [
            case
            for case in cases
            if found.has(case) and found.has(base) and math.isfinite(found.loss(case))
        ]
        points = [(bytes_a_token(found, c), 100 * gap(found, c, base)) for c in cases]
        axes.plot(
            *zip(*points, strict=True), style, label=f"{label}, {base.tokens / 1e6:.0f} M tokens"
        )
        offset = (5 if side == "left" else -6, above)
        for case, point in zip(cases, points, strict=True):
            axes.annotate(
                name(case), point, textcoords="offset points", xytext=offset, ha=side, fontsize=7
            )
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.axvline(4 * SIZE / (short.steps * STEP_TOKENS), color="grey", linewidth=0.8, linestyle=":")
    axes.set(
        xscale="log",
        xlabel="bytes of updates a token",
        ylabel="% more loss than synchronous fp32 DiLoCo",
    )
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(DOCUMENT.with_name(f"{DOCUMENT.stem}_bytes.png"), dpi=110)
    plt.close(figure)


def late(case: Case) -> str:
    return ("" if case.form == Case.form else f"{case.form}, ") + (
        "full" if case.delay == Case.delay else "with room"
    )


def draw_curves(plan: Plan, found: Results) -> None:
    """Loss over tokens of the long trainings."""
    figure, axes = plt.subplots(figsize=(7, 4.2))
    ours, parallel, diloco, alone = (plan.far(found, kind) for kind in KINDS)
    drawn = {
        "one alone": alone, "ours, a full line": plan.full(found), "ours, a line with room": ours,
        "ours, nothing is late": plan.at_once(found), "DiLoCo, fp32, in step": diloco, "data parallel": parallel,
    }  # fmt: skip
    for label, case in drawn.items():
        if (line := found.line(case)) and line["loss"]:
            # One alone trains as many steps as each replica: drawn at the tokens of all.
            points = [*line["curve"], [case.tokens, line["loss"]]]
            axes.plot(
                [x / 1e6 for x, _ in points],
                [y for _, y in points],
                "o-",
                markersize=3,
                label=label,
            )
    axes.set(xlabel="million tokens of all replicas", ylabel="validation loss, nats a byte")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(DOCUMENT.with_name(f"{DOCUMENT.stem}_curves.png"), dpi=110)
    plt.close(figure)
