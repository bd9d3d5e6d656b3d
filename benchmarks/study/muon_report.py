"""Write the table that compares Muon with AdamW."""

from collections.abc import Sequence
from dataclasses import replace

from muon_plan import MACHINES, SEEDS, MuonPlan
from steps_to_loss import interpolate_steps
from study_case import Case
from study_model import SIZE, STEP_TOKENS
from study_plan import Results

from barnraise.spec import ADAMW, MUON, OPTIMIZERS

NAMES = ("1", "4", "8", "data parallelism of 4")


def make_muon_table(plan: MuonPlan, results: Results) -> str:
    """Return the losses of both optimizers, and Muon's gain; "" if nothing is measured."""
    rows = {optimizer: plan.rows(results, optimizer) for optimizer in OPTIMIZERS}
    measured = [
        (name, adamw, muon)
        for name, adamw, muon in zip(NAMES, rows[ADAMW], rows[MUON], strict=True)
        if results.has(adamw) and results.has(muon)
    ]
    if not measured:
        return ""
    counts = [
        sum(map(results.has, cases))
        for cases in (plan.tuning(MUON), plan.outer(results, MUON), plan.parallel(results, MUON))
    ]
    title = (
        f"Muon and AdamW, {plan.steps:,} steps of each machine on a full line, with the best of "
        f"{counts[0]} settings of one, {counts[1]} of four, {counts[2]} of data parallelism "
        "(by one seed):"
    )
    head = (
        "| machines | tokens a parameter | seeds | AdamW | Muon | change "
        "| to Muon's data parallelism |\n|---|---|---|---|---|---|---|\n"
    )
    lines = [_make_row(results, name, pair, rows[MUON][3]) for name, *pair in measured]
    settings = "; ".join(
        f"{name}: {_describe_settings(adamw)}, {_describe_settings(muon)}"
        for name, adamw, muon in measured
        if adamw.replicas == MACHINES[0]
    )
    ratios = [
        f"{ratio:.2f} ({name})"
        for name, ratio in (
            (NAMES[0], alone_ratio(plan, results)),
            (NAMES[1], four_ratio(plan, results)),
        )
        if ratio is not None
    ]
    steps = f" Muon takes {', '.join(ratios)} of AdamW's steps to its loss."
    table = head + "\n".join(lines)
    last = steps * bool(ratios) + _describe_longest(plan, results)
    return f"{title}\n\n{table}\n\nRates (AdamW, Muon): {settings}.{last}"


def _describe_longest(plan: MuonPlan, results: Results) -> str:
    """Return the losses of the longest trainings; "" if they are not measured."""
    four, parallel = plan.longest(results)
    if not (results.has(four) and results.has(parallel)):
        return ""
    loss, of_parallel = results.loss(four), results.loss(parallel)
    tokens = four.tokens / SIZE
    return (
        f"\n\nWith {tokens:.0f} tokens a parameter ({_count_steps(four):,} steps of each) "
        f"four with Muon end at {loss:.4f}, its data parallelism at {of_parallel:.4f} "
        f"({loss / of_parallel - 1:+.1%}; one seed, the same settings)."
    )


def _describe_settings(case: Case) -> str:
    """Return the settings that are tuned."""
    parts = [f"{case.rate:g}"]
    if case.optimizer == MUON:
        parts[0] += f"/{case.matrix_rate:g}"
    if case.beta2 != Case.beta2:
        parts.append(f"β₂={case.beta2:g}")
    if case.weight_decay != Case.weight_decay:
        parts.append(f"decay={case.weight_decay:g}")
    if case.kind == "ours":
        parts.append(f"η={case.outer_rate:g} μ={case.momentum:g} H={case.steps}")
    return " ".join(parts)


def _make_row(results: Results, name: str, cases: Sequence[Case], parallel: Case) -> str:
    """Return one row; the last case is Muon's, and `parallel` is its data parallelism."""
    adamw, muon = (_list_losses(results, case) for case in cases)
    common = [seed for seed in SEEDS if seed in adamw and seed in muon]
    adamw, muon = ({seed: losses[seed] for seed in common} for losses in (adamw, muon))
    case = cases[1]
    machines = 1 if case.kind == "alone" else case.replicas
    tokens = case.tokens / case.replicas * machines / SIZE
    columns = [
        name,
        f"{tokens:.1f}",
        f"{len(common)}",
        _describe_losses(adamw),
        _describe_losses(muon),
        _describe_changes(adamw, muon),
        _describe_changes(_list_losses(results, parallel), muon)
        if case.kind == "ours" and case.replicas == parallel.replicas
        else "–",
    ]
    return f"| {' | '.join(columns)} |"


def _list_losses(results: Results, case: Case) -> dict[int, float]:
    """Return the losses that are measured, by seed."""
    seeded = {seed: replace(case, seed=seed) for seed in SEEDS}
    return {seed: results.loss(each) for seed, each in seeded.items() if results.has(each)}


def _describe_losses(losses: dict[int, float]) -> str:
    """Return the mean over the seeds."""
    return f"{sum(losses.values()) / len(losses):.4f}"


def _describe_changes(before: dict[int, float], after: dict[int, float]) -> str:
    """Return the mean change over the seeds that both have, and half its range."""
    changes = [after[seed] / before[seed] - 1 for seed in before if seed in after]
    if not changes:
        return "–"
    spread = f" ±{(max(changes) - min(changes)) / 2:.1%}" if len(changes) > 1 else ""
    return f"{sum(changes) / len(changes):+.1%}{spread}"


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
