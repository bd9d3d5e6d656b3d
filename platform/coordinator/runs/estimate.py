"""Estimate what a run takes, on one machine and on many alike ones. Pure, without torch.

One machine is planned by the planner that the machine itself would use. How long all of them take
follows from how often, and how much compressed, machines would exchange updates over their lines.
The default line is the global median of homes, `HOME_LINE`; two faster ones are estimated too.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from barnraise.errors import PlanError
from barnraise.planning.hardware import Hardware
from barnraise.planning.lines import LINES, Line
from barnraise.planning.plan import Plan
from barnraise.planning.round_schedule import RoundSchedule, choose_schedule
from barnraise.planning.runtime_model import (
    Choice,
    StepTime,
    Swarm,
    choose_strategy,
    predict_updates,
)
from barnraise.planning.search import make_plan
from barnraise.planning.speedup import SpeedupEstimate, estimate_speedup
from barnraise.planning.uplink_budget import alike_uplink
from barnraise.spec import ModelSpec, RunSpec

MAX_VOLUNTEERS = 10_000
MAX_PLANNED_SEQUENCES = 64  # a longer step is not planned: it takes proportionally longer


@dataclass(frozen=True)
class RunTimeEstimate:
    """How long many alike machines on alike lines take for a run."""

    line: Line  # of each machine
    schedule: RoundSchedule
    seconds: float  # for the whole run
    traffic: float  # bytes per second over each line, each way
    slowdown: float  # how many times longer it takes than on lines of unlimited bandwidth
    choice: Choice  # the strategy that suits these machines and lines best, with the numbers
    gain: SpeedupEstimate  # over one machine, at the same loss


@dataclass(frozen=True)
class MachineEstimate:
    """What one machine does for a run."""

    name: str
    refusal: str = ""  # why it cannot train the model; nothing else is set then
    plan: Plan | None = None
    step_seconds: float = 0.0  # for one step
    tokens_per_second: float = 0.0
    # Estimates for a run of machines like this one, for each of `LINES`.
    run_times: tuple[RunTimeEstimate, ...] = ()


def estimate(
    spec: RunSpec, machines: list[tuple[str, Hardware]], volunteers: int
) -> list[MachineEstimate]:
    """Estimate a run for each kind of machine, as if so many volunteers had one of that kind."""
    volunteers = max(1, min(volunteers, MAX_VOLUNTEERS))
    return [_estimate_machine(name, hardware, spec, volunteers) for name, hardware in machines]


def _estimate_machine(
    name: str, hardware: Hardware, spec: RunSpec, volunteers: int
) -> MachineEstimate:
    sequences = spec.recipe.step_sequences
    try:
        plan = cached_plan(hardware, spec.model, min(sequences, MAX_PLANNED_SEQUENCES))
    except PlanError as error:
        return MachineEstimate(name, refusal=str(error))
    step_seconds = plan.step_seconds * max(1.0, sequences / MAX_PLANNED_SEQUENCES)
    return MachineEstimate(
        name,
        plan=plan,
        step_seconds=step_seconds,
        tokens_per_second=sequences * spec.model.context / step_seconds,
        run_times=tuple(estimate_run_time(spec, step_seconds, line, volunteers) for line in LINES),
    )


@lru_cache(maxsize=1024)
def cached_plan(hardware: Hardware, model: ModelSpec, sequences: int) -> Plan:
    """Plan a step of so many sequences; the same question is planned once."""
    return make_plan(hardware, model, step_sequences=sequences, advise=False)


def estimate_run_time(
    spec: RunSpec, step_seconds: float, line: Line, volunteers: int
) -> RunTimeEstimate:
    """Estimate the time of a run of alike machines.

    The machines choose rounds and compression for their lines. If the strongest compression is
    still too much, rounds wait for the line, whose slower way limits.
    """
    run_steps = spec.recipe.token_budget / volunteers / spec.step_tokens
    update_rate = alike_uplink(line, volunteers).update_rate
    schedule = choose_schedule(spec, update_rate, step_seconds, run_steps)
    step = StepTime(step_seconds, 0.0, spec.step_tokens)
    swarm = Swarm(volunteers, spec.model.parameters, line, step)
    prediction = predict_updates(swarm, schedule)
    return RunTimeEstimate(
        line,
        schedule,
        spec.recipe.token_budget / prediction.tokens_per_second,
        prediction.bytes_per_token * spec.step_tokens / prediction.step_seconds,
        1 / prediction.utilisation,
        choose_strategy(swarm),
        estimate_speedup(spec, spec.step_tokens / step_seconds, line, volunteers),
    )


def download_seconds(spec: RunSpec, line: Line) -> float:
    """Return the time to download the shared weights, 4 bytes a parameter, over a line."""
    return math.ceil(4 * spec.model.parameters / line.down_bytes)
