"""What a run would take: on one machine, by the planner that the machine itself would ask, and of everybody's time, by
how often and how thinly machines would say what they learnt. Pure, and without torch."""

import math
from dataclasses import dataclass
from functools import lru_cache

from barnraise.errors import PlanError
from barnraise.exchange.pacing.round_schedule import SHARE, Rhythm, agreed
from barnraise.planning.hardware import Hardware
from barnraise.planning.plan import Plan
from barnraise.planning.search import make_plan
from barnraise.spec import ModelSpec, Recipe, RunSpec

LINES = (20, 100)  # Mb/s, both ways
MOST_VOLUNTEERS = 10_000
SEQUENCES = 64  # of a step that is planned for; one of more is reckoned to take as much longer
BIT = 1e6 / 8  # bytes a second of one Mb/s


@dataclass(frozen=True)
class Pace:
    """Many alike machines on alike lines. `seconds` the whole run takes; `traffic`, bytes a second, is what passes over
    each line, each way; `waits`: how many times longer it takes than it would if lines carried everything."""

    line: int  # Mb/s
    rhythm: Rhythm
    seconds: float
    traffic: float
    waits: float


@dataclass(frozen=True)
class Need:
    """One machine. `refusal` says why it cannot, and then there is nothing else."""

    name: str
    refusal: str = ""
    plan: Plan | None = None
    step_seconds: float = 0.0
    rate: float = 0.0  # tokens a second
    paces: tuple[Pace, ...] = ()  # of a run of machines like this, by LINES


def estimate(spec: RunSpec, machines: list[tuple[str, Hardware]], volunteers: int) -> list[Need]:
    """For each (name, hardware), and for a run of so many volunteers who have such machines."""
    return [
        _need(name, hardware, spec, max(1, min(volunteers, MOST_VOLUNTEERS)))
        for name, hardware in machines
    ]


def _need(name: str, hardware: Hardware, spec: RunSpec, volunteers: int) -> Need:
    sequences = spec.recipe.step_sequences
    try:
        plan = planned(hardware, spec.model, min(sequences, SEQUENCES))
    except PlanError as error:
        return Need(name, refusal=str(error))
    step = plan.seconds * max(1.0, sequences / SEQUENCES)
    rate = sequences * spec.model.context / step
    return Need(
        name, "", plan, step, rate, tuple(pace(spec, step, line, volunteers) for line in LINES)
    )


@lru_cache(maxsize=1024)
def planned(hardware: Hardware, model: ModelSpec, sequences: int) -> Plan:
    return make_plan(hardware, model, step_sequences=sequences, advise=False)


def pace(spec: RunSpec, step_seconds: float, line: int, volunteers: int) -> Pace:
    """An update of each passes to all others, and on the way through one another's lines: over each line go, each way
    and in every round, the updates of all but one. Rounds and forms are those the machines would choose for that; if
    even the thinnest is too much, rounds wait for the line."""
    recipe, parameters = spec.recipe, spec.model.parameters
    carried, others = line * BIT, volunteers - 1
    rhythm = _rhythm(recipe, spec, carried, step_seconds, max(1, others))
    round_seconds = rhythm.steps * step_seconds
    volume = others * rhythm.form.size(parameters)
    waits = max(1.0, volume / (SHARE * carried) / round_seconds)
    tokens = rhythm.steps * recipe.step_sequences * spec.model.context
    seconds = recipe.token_budget / (volunteers * tokens / (waits * round_seconds))
    return Pace(line, rhythm, seconds, volume / (waits * round_seconds), waits)


def _rhythm(recipe: Recipe, spec: RunSpec, line: float, step_seconds: float, pushes: int) -> Rhythm:
    most = max(1, spec.max_tokens_per_update // (recipe.step_sequences * spec.model.context))
    return agreed(recipe, spec.model.parameters, line, step_seconds, pushes, most)


def download_seconds(spec: RunSpec, line: int) -> float:
    """Of the shared weights, for who joins once others have trained: four bytes a parameter."""
    return math.ceil(4 * spec.model.parameters / (line * BIT))
