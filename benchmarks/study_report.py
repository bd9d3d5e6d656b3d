"""What the study found: six figures, tables and plots, with what is missing said."""

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from study_case import Case
from study_model import SIZE, STEP_TOKENS
from study_plan import SPEEDS, Plan, Results

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "benchmarks" / "exchange_study.md"
BEGIN, END = "<!-- measured: `make study-exchange` writes from here -->", "<!-- to here -->"


def figures(plan: Plan, found: Results) -> dict[str, float | None]:
    """Fractions of loss (0.01: 1 %), of the long trainings; mean over the seeds that both have. None: not measured.
    Ours is what a new run has, rounds said in turns on a line that is full for most of the round; `windows`: said at
    once on that line, or on one with room."""
    windows, diloco, parallel = (plan.best_far(found, kind) for kind in ("ours", "diloco", "parallel"))
    ours, alone, early = plan.said(found), plan.best_far(found, "alone"), plan.afforded(found)
    sent, theirs = bytes_a_token(found, ours), bytes_a_token(found, diloco)
    return {
        "gap_to_dp_r4": gap(found, ours, parallel),
        "gap_to_diloco": gap(found, ours, diloco),
        "bytes_ratio": round(theirs / sent, 2) if sent and theirs else None,
        "async_cost": gap(found, ours, replace(windows, delay=0.0)),
        "unequal_cost": gap(found, replace(ours, speeds=SPEEDS), ours),
        "alone_gap": gap(found, alone, ours),
        "gap_to_diloco_in_step": gap(found, plan.in_step(found), diloco),
        "gap_to_diloco_in_time": gap(found, ours, plan.in_time(found)),
        "windows_gap_to_dp": gap(found, windows, parallel),
        "windows_gap_to_diloco": gap(found, windows, diloco),
        "windows_async_cost": gap(found, windows, replace(windows, delay=0.0)),
        "windows_unequal_cost": gap(found, replace(windows, speeds=SPEEDS), windows),
        "windows_gap_to_dp_with_room": gap(found, early, parallel),
        "windows_gap_to_dp_with_room_momentum_0.7": gap(found, replace(early, momentum=0.7), parallel),
    }


def gap(found: Results, case: Case, other: Case) -> float | None:
    """How much more loss `case` has than `other`."""
    pairs = [(replace(case, seed=seed), replace(other, seed=seed)) for seed in range(4)]
    gaps = [found.loss(a) / found.loss(b) - 1 for a, b in pairs if found.has(a) and found.has(b)]
    gaps = [each for each in gaps if math.isfinite(each)]
    return round(sum(gaps) / len(gaps), 4) if gaps else None


def bytes_a_token(found: Results, case: Case) -> float | None:
    """Of updates, sent once each, over the tokens they were trained on."""
    line = found.line(case)
    return line["bytes"] / line["tokens"] if line else None


def write(plan: Plan, found: Results) -> None:
    """The tables into the document, between its marks; the plots beside it."""
    tuning, factors = plan.rates(found) + plan.wider(found) + plan.outer(found), plan.factors(found)
    frontier = [*plan.far(found), *plan.again(found)]
    tables = [("The frontier", frontier), ("Tuning what it is held against", tuning), *factors.items()]
    parts = [table(found, *each) for each in tables]
    missing = [case for case in dict.fromkeys(tuning + plan.flat(factors) + frontier) if not found.has(case)]
    if missing:
        parts.append("### Not measured yet\n\n" + "\n".join(f"* {case}" for case in missing))
    text = DOCUMENT.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    said = json.dumps(figures(plan, found))
    tables_and_rest = "\n\n".join(part for part in parts if part)
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n`{said}`\n\n{tables_and_rest}\n\n{END}{after}")
    if found.has(plan.tuned(found, "diloco")):
        draw_bytes(plan, found)
    if found.has(plan.chosen(found)):
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
    names = [field.name for field in fields(Case) if field.name != "tokens" or case.kind == "diloco"]
    if case.kind != base.kind:
        names = ["kind", "seed", "rate"]
        if case.kind == "diloco":
            names += ["steps", "outer_rate", "momentum", *(["tokens"] if case.tokens != base.tokens else [])]
        return ", ".join(f"{name} {getattr(case, name)}" for name in names)
    return ", ".join(f"{n} {getattr(case, n)}" for n in names if getattr(case, n) != getattr(base, n))


def draw_bytes(plan: Plan, found: Results) -> None:
    """Loss over DiLoCo's against bytes a token: forms and round lengths, short and long."""
    figure, axes = plt.subplots(figsize=(7, 4.2))
    factors = plan.factors(found)
    base = plan.tuned(found, "diloco")
    groups = {
        "forms, H 20": factors["form"],
        "round lengths, dense4": sorted(factors["H"], key=lambda case: case.steps),
    }
    for label, cases in groups.items():
        cases = [case for case in cases if found.has(case) and found.has(base) and math.isfinite(found.loss(case))]
        points = [(bytes_a_token(found, c), 100 * (found.loss(c) / found.loss(base) - 1), c) for c in cases]
        style = "o-" if label.startswith("round") else "s"
        axes.plot(
            [p[0] for p in points], [p[1] for p in points], style, label=f"{label}, {base.tokens / 1e6:.0f} M tokens"
        )
        for x, y, case in points:
            name = f"H {case.steps}" if label.startswith("round") else case.form
            axes.annotate(name, (x, y), textcoords="offset points", xytext=(5, 4), fontsize=7)
    diloco, long = plan.best_far(found, "diloco"), [plan.best_far(found, "ours"), *plan.far(found)]
    long = [c for c in dict.fromkeys(long) if c.kind == "ours" and not c.speeds and c.delay and found.has(c)]
    if found.has(diloco):
        points = [(bytes_a_token(found, c), 100 * (found.loss(c) / found.loss(diloco) - 1), c) for c in long]
        axes.plot([p[0] for p in points], [p[1] for p in points], "^", label=f"{diloco.tokens / 1e6:.0f} M tokens")
        for x, y, case in points:
            axes.annotate(case.form, (x, y), textcoords="offset points", xytext=(5, -9), fontsize=7)
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.axvline(4 * SIZE / (20 * STEP_TOKENS), color="grey", linewidth=0.8, linestyle=":")
    axes.set(xscale="log", xlabel="bytes of updates a token", ylabel="% more loss than synchronous fp32 DiLoCo")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(DOCUMENT.with_name("exchange_study_bytes.png"), dpi=110)
    plt.close(figure)


def draw_curves(plan: Plan, found: Results) -> None:
    """Loss over tokens of the long trainings."""
    figure, axes = plt.subplots(figsize=(7, 4.2))
    kinds = {"parallel": "data parallel", "diloco": "DiLoCo, fp32, in step", "ours": "windows", "alone": "one alone"}
    drawn = [(label, plan.best_far(found, kind)) for kind, label in kinds.items()]
    windows = plan.best_far(found, "ours")
    drawn += [("windows, speeds 1:2:4:7", replace(windows, speeds=SPEEDS))]
    drawn += [("windows, no delay", replace(windows, delay=0.0)), ("in turns, as a new run", plan.said(found))]
    for label, case in drawn:
        if (line := found.line(case)) and line["loss"]:
            # One alone trains as many steps as each replica: drawn at the tokens of all.
            points = [*line["curve"], [case.tokens, line["loss"]]]
            axes.plot([x / 1e6 for x, _ in points], [y for _, y in points], "o-", markersize=3, label=label)
    axes.set(xlabel="million tokens of all replicas", ylabel="validation loss, nats a byte")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(DOCUMENT.with_name("exchange_study_curves.png"), dpi=110)
    plt.close(figure)
