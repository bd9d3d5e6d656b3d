"""Compare the time to one loss with AdamW and with Muon, for the form of a run. Pure."""

import dataclasses
from dataclasses import dataclass

from barnraise.planning.hardware import Hardware
from barnraise.spec import ADAMW, MUON, RunSpec
from coordinator.runs.estimate import MachineEstimate, estimate

# Steps that Muon needs to the loss of AdamW's, and what that was measured on, by
# `make study-speedup`: 0.47 with one machine, 0.49 with four.
STEPS_RATIO = 0.49
BASIS = (
    "0.64 M parameters, one machine and four, 1,000 steps of AdamW, the best of twelve settings "
    "each; at 124 M others published 0.59"
)


@dataclass(frozen=True)
class OptimizerComparison:
    """The time of a run on alike machines with either optimizer, at the loss that it ends with.

    Attributes:
        machine: what kind of machine.
        seconds: optimizer → seconds of the run.
        step_ratio: how many times as long a step with Muon takes.
        chosen: the run's optimizer.
        steps_ratio: Muon's steps in AdamW's.
        basis: what this ratio was measured on.
    """

    machine: str
    seconds: dict[str, float]
    step_ratio: float
    chosen: str
    steps_ratio: float = STEPS_RATIO
    basis: str = BASIS


def compare_optimizers(
    spec: RunSpec, machine: tuple[str, Hardware], volunteers: int
) -> OptimizerComparison | None:
    """Estimate a run on a home line with both optimizers, at equal loss.

    The budget is that of the run's optimizer: the other one has as many more or fewer tokens as it
    needs steps.

    Returns:
        None if machines average weights, which only AdamW trains, or the machine cannot train the
        model with both.
    """
    if spec.recipe.mixes_weights:
        return None
    tokens = {spec.recipe.optimizer: float(spec.recipe.token_budget)}
    if spec.recipe.optimizer == ADAMW:
        tokens[MUON] = STEPS_RATIO * tokens[ADAMW]
    else:
        tokens[ADAMW] = tokens[MUON] / STEPS_RATIO
    estimates: dict[str, MachineEstimate] = {}
    for optimizer, budget in tokens.items():
        recipe = dataclasses.replace(
            spec.recipe, optimizer=optimizer, matrix_rate=None, token_budget=max(1, round(budget))
        )
        changed = dataclasses.replace(spec, recipe=recipe)
        (estimates[optimizer],) = estimate(changed, [machine], volunteers)
    if not all(each.run_times for each in estimates.values()):
        return None
    return OptimizerComparison(
        machine[0],
        {optimizer: each.run_times[0].seconds for optimizer, each in estimates.items()},
        estimates[MUON].step_seconds / estimates[ADAMW].step_seconds,
        spec.recipe.optimizer,
    )
