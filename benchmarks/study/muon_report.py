"""Write the table that compares Muon with AdamW."""

from dataclasses import replace

from muon_plan import SEEDS, MuonPlan
from steps_to_loss import interpolate_steps
from study_case import Case
from study_model import SIZE, STEP_TOKENS
from study_plan import Results

from barnraise.spec import ADAMW, MUON, OPTIMIZERS

NAMES = ("one machine", "4 on a full line", "8 on a full line", "data parallelism of 4")


def make_muon_table(plan: MuonPlan, results: Results) -> str:
    """Return the losses of both optimizers, and Muon's gain; "" if nothing is measured."""
    rows = {optimizer: plan.rows(results, optimizer) for optimizer in OPTIMIZERS}
    lines = [
        _make_row(results, name, (adamw, muon), rows[MUON][3])
        for name, adamw, muon in zip(NAMES, rows[ADAMW], rows[MUON], strict=True)
        if results.has(adamw) and results.has(muon)
    ]
    if not lines:
        return ""
    title = (
        f"Muon and AdamW, {SIZE / 1e6:.2f} M parameters, {plan.steps:,} steps of each machine, "
        f"each the best of its {len(plan.tuning(MUON))} inner settings:"
    )
    head = (
        "| machines | tokens a parameter | AdamW | Muon | Muon's gap to its data parallelism |\n"
        "|---|---|---|---|---|\n"
    )
    ratios = [
        f"{ratio:.2f} for {name}"
        for name, ratio in (
            (NAMES[0], alone_ratio(plan, results)),
            (NAMES[1], four_ratio(plan, results)),
        )
        if ratio is not None
    ]
    last = f"\n\nMuon's steps to AdamW's loss, in AdamW's steps: {', '.join(ratios)}."
    return f"{title}\n\n{head}" + "\n".join(lines) + last * bool(ratios)


def _make_row(results: Results, name: str, cases: tuple[Case, Case], parallel: Case) -> str:
    """Return one row; the last case is Muon's, and `parallel` is its data parallelism."""
    losses = [_describe_losses(results, case) for case in cases]
    muon = cases[1]
    machines = 1 if muon.kind == "alone" else muon.replicas
    tokens = muon.tokens / muon.replicas * machines / SIZE
    gap = "–"
    if muon.kind == "ours" and results.has(parallel):
        gap = f"{results.loss(muon) / results.loss(parallel) - 1:+.1%}"
    return f"| {name} | {tokens:.1f} | {losses[0]} | {losses[1]} | {gap} |"


def _describe_losses(results: Results, case: Case) -> str:
    """Return the mean over the seeds that are measured, with their number."""
    seeded = [replace(case, seed=seed) for seed in SEEDS]
    losses = [results.loss(each) for each in seeded if results.has(each)]
    seeds = f" ({len(losses)} seeds)" if len(losses) > 1 else ""
    return f"{sum(losses) / len(losses):.4f}{seeds}"


def alone_ratio(plan: MuonPlan, results: Results) -> float | None:
    """Return the steps in which one machine with Muon reaches AdamW's loss, in AdamW's steps.

    Interpolated in the logarithm of the steps; None if that was not measured.
    """
    muon = [plan.best(results, MUON), *plan.longer_and_shorter(results, MUON)]
    return _steps_ratio(results, plan.best(results, ADAMW), muon)


def four_ratio(plan: MuonPlan, results: Results) -> float | None:
    """Return the same of four machines on a full line."""
    muon = [*plan.fewer_steps(results), plan.best_outer(results, MUON)]
    return _steps_ratio(results, plan.best_outer(results, ADAMW), muon)


def _steps_ratio(results: Results, adamw: Case, muon: list[Case]) -> float | None:
    if not all(map(results.has, (adamw, *muon))):
        return None
    points = sorted((_count_steps(case), results.loss(case)) for case in muon)
    steps = interpolate_steps(points, results.loss(adamw))
    return None if steps is None else steps / _count_steps(adamw)


def _count_steps(case: Case) -> int:
    """Return the steps of each machine."""
    return case.tokens // (case.replicas * STEP_TOKENS)
