"""Choose the strategy that "auto" stands for, when a run is launched. Pure, without torch."""

import dataclasses

from barnraise.errors import PlanError
from barnraise.planning.lines import Line, parse_line
from barnraise.planning.runtime_model import Choice, StepTime, Swarm, choose_strategy
from barnraise.spec import AUTO, DECENTRALIZED_ADAM, MUON, UPDATES, Recipe, RunSpec
from coordinator.runs.estimate import MAX_PLANNED_SEQUENCES, plan_for_run
from coordinator.runs.reference_machines import REFERENCE_MACHINES

# With updates, rounds end together by the clock and are published fragment by fragment; the codec
# leaves round length and compression to each machine and its line.
AUTO_UPDATES = {"strategy": "streams", "codec": AUTO}
SIGNED_ONLY = (
    "Anyone may join, so machines exchange signed updates, which can be taken out of the model "
    "again."
)
ADAM_ONLY = (
    "Decentralized Adam averages what AdamW has trained; machines that train with Muon exchange "
    "updates."
)
NO_FIGURES = "The expected machine cannot train this model, so nothing is known of its steps."


def choose_for_run(spec: RunSpec) -> Choice | None:
    """Choose by the runtime model what suits the machines and lines that a run's owner expects.

    Returns:
        None if the expected machine cannot train the model.
    """
    line = parse_line(spec.assumed.line)
    step_time = _step_time(spec)
    if step_time is None:
        return None
    return choose_strategy(Swarm(spec.assumed.machines, spec.model.parameters, line, step_time))


def resolve_strategy(spec: RunSpec, is_open: bool) -> RunSpec:
    """Replace the strategy "auto" by the one that it stands for, with the reason.

    Args:
        spec: of a run that is being launched.
        is_open: whether anyone may join. Averaging weights cannot be undone, so it is only chosen
            for machines whose owners the run's owner has let in.

    Returns:
        The spec; unchanged if its owner has chosen a strategy.
    """
    if spec.recipe.strategy != AUTO:
        return spec
    choice = choose_for_run(spec)
    chosen, reason = AUTO_UPDATES, NO_FIGURES
    if choice is not None:
        chosen, reason = _recipe_fields(choice), choice.reason
    if is_open and chosen["strategy"] == DECENTRALIZED_ADAM:
        chosen, reason = AUTO_UPDATES, SIGNED_ONLY
    if spec.recipe.optimizer == MUON and chosen["strategy"] == DECENTRALIZED_ADAM:
        chosen, reason = AUTO_UPDATES, ADAM_ONLY
    line = parse_line(spec.assumed.line)
    text = f"{describe_strategy(str(chosen['strategy']))} {reason} {_describe_swarm(spec, line)}"
    return dataclasses.replace(
        spec,
        recipe=dataclasses.replace(spec.recipe, **chosen),
        assumed=dataclasses.replace(spec.assumed, reason=text),
    )


def restore_auto(spec: RunSpec) -> RunSpec:
    """Return a launched run's spec as its owner wrote it, for a copy of the run."""
    if not spec.assumed.reason:
        return spec
    defaults = Recipe()
    recipe = dataclasses.replace(
        spec.recipe,
        strategy=AUTO,
        mixing_topology=defaults.mixing_topology,
        mixing_bits=defaults.mixing_bits,
        mixing_interval=defaults.mixing_interval,
        mixing_accumulation=defaults.mixing_accumulation,
    )
    return dataclasses.replace(
        spec, recipe=recipe, assumed=dataclasses.replace(spec.assumed, reason="")
    )


def describe_strategy(strategy: str) -> str:
    """Return a strategy's name as a short sentence."""
    return "Decentralized Adam." if strategy == DECENTRALIZED_ADAM else "Updates."


def _recipe_fields(choice: Choice) -> dict[str, str | int]:
    chosen = choice.chosen
    if chosen.strategy == UPDATES:
        return dict(AUTO_UPDATES)
    return {
        "strategy": DECENTRALIZED_ADAM,
        "mixing_topology": chosen.topology,
        "mixing_bits": chosen.bits,
        "mixing_interval": chosen.round_steps,
    }


def _step_time(spec: RunSpec) -> StepTime | None:
    """Return the time of a step on the expected machine; None if it cannot train the model."""
    hardware = dict(REFERENCE_MACHINES).get(spec.assumed.machine)
    if hardware is None:
        return None
    sequences = spec.recipe.step_sequences
    try:
        plan = plan_for_run(hardware, spec)
    except PlanError:
        return None
    seconds = plan.step_seconds * max(1.0, sequences / MAX_PLANNED_SEQUENCES)
    return StepTime(seconds, 0.0, sequences * spec.model.context)


def _describe_swarm(spec: RunSpec, line: Line) -> str:
    assumed = spec.assumed
    machines = "1 machine" if assumed.machines == 1 else f"{assumed.machines:,} machines"
    return f"Expected: {machines} ({assumed.machine}) on lines of {line}."
