"""How much sooner a run ends with more machines, at the same loss. Pure, but for reading the fit.

`make study-speedup` measured it on a small model, and writes `speedup_fit.json`. What decides is
how often a machine is heard in the whole run. The site imports this module: no torch.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from barnraise.planning.lines import HOME_LINE, LINES, Line
from barnraise.planning.round_schedule import choose_schedule
from barnraise.planning.uplink_budget import alike_uplink
from barnraise.spec import RunSpec

FIT = Path(__file__).with_name("speedup_fit.json")
FIT_VERSION = 1
PAYS_FROM = 1.05  # below it, machines together end no sooner than one, within chance
UPLINKS = (30, 60, 100, 250, 500, 1_000)  # Mb/s that are tried where joining does not pay
TOKENS_PER_PARAMETER = (20, 40, 80, 160)
CARRIER_LINE = LINES[-1]


@dataclass(frozen=True)
class Fit:
    """Measured speed-ups.

    Attributes:
        basis: what was trained, in a phrase.
        curves: (whether updates hold all values, machines) → rounds in the run and the speed-up at
            the same loss, in ascending order of rounds.
    """

    basis: str
    curves: dict[tuple[bool, int], tuple[tuple[float, float], ...]]

    def speedup(self, machines: int, rounds: float, is_dense: bool) -> float | None:
        """Return the speed-up of so many machines with so many rounds; None if not measured.

        Between measured points it is interpolated, linearly in the logarithms of rounds and of
        machines. More rounds than were measured count as the most that were.
        """
        if machines == 1:
            return 1.0
        measured = {1: 1.0}
        for (dense, count), points in self.curves.items():
            if dense == is_dense and rounds >= points[0][0]:
                measured[count] = _interpolate(points, min(rounds, points[-1][0]))
        if machines > max(measured):
            return None
        below = max(count for count in measured if count <= machines)
        above = min(count for count in measured if count >= machines)
        return _interpolate(((below, measured[below]), (above, measured[above])), machines)


def _interpolate(points: Iterable[tuple[float, float]], x: float) -> float:
    """Interpolate in the logarithm of `x`, which lies among the points."""
    before_x, before_y = 0.0, 0.0
    for point_x, point_y in points:
        if x <= point_x:
            if x == point_x or not before_x:
                return point_y
            part = math.log(x / before_x) / math.log(point_x / before_x)
            return before_y + part * (point_y - before_y)
        before_x, before_y = point_x, point_y
    return before_y


@cache
def read_fit(path: Path = FIT) -> Fit | None:
    """Read the committed fit; None if it is missing, or of another version of the program."""
    try:
        raw = json.loads(path.read_text())
        if raw["version"] != FIT_VERSION:
            return None
        curves = defaultdict[tuple[bool, int], list[tuple[float, float]]](list)
        for point in raw["points"]:
            key = bool(point["dense"]), int(point["machines"])
            curves[key].append((float(point["rounds"]), float(point["speedup"])))
        sorted_curves = {key: tuple(sorted(points)) for key, points in curves.items()}
        return Fit(str(raw["basis"]), sorted_curves)
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True)
class SpeedupEstimate:
    """What several alike machines on alike lines gain in a run.

    Attributes:
        rounds: how often each is heard in the whole run.
        speedup: how many times sooner they end than one does, at the same loss; None where that was
            not measured.
        basis: what the speed-up was measured on; "" where it was not.
        sentence: all of this for people; "" where there is nothing to state.
    """

    rounds: float = 0.0
    speedup: float | None = None
    basis: str = ""
    sentence: str = ""


def estimate_speedup(
    spec: RunSpec, tokens_per_second: float, line: Line, machines: int, fit: Fit | None = None
) -> SpeedupEstimate:
    """Estimate what alike machines on alike lines gain in a run, and where they would gain more.

    `tokens_per_second` is of each machine, 0 if it is not known; `fit` is the measured speed-ups.
    """
    if machines < 2 or tokens_per_second <= 0 or spec.recipe.token_budget <= 0:
        return SpeedupEstimate()
    rounds, is_dense = _count_rounds(spec, tokens_per_second, line, machines)
    if rounds < 1:
        return SpeedupEstimate()
    fit = fit or read_fit()
    speedup = fit.speedup(machines, rounds, is_dense) if fit else None
    name = "home lines" if line == HOME_LINE else f"lines of {line}"
    heard = f"{rounds:,.0f} times" if rounds >= 1.5 else "once"
    if fit is None or speedup is None:
        sentence = (
            f"With {machines} machines on {name} each is heard {heard} in the whole run: how much "
            "sooner it ends than with one, at the same loss, was not measured for that."
        )
        return SpeedupEstimate(rounds, sentence=sentence)
    if speedup >= PAYS_FROM:
        sentence = (
            f"With {machines} machines on {name} this run ends {speedup:.1f} × sooner than with "
            "one, at the same loss."
        )
    else:
        remedies = _describe_remedies(spec, tokens_per_second, line, machines, fit)
        sentence = (
            f"With {machines} machines on {name} each would be heard {heard} in the whole run: it "
            f"would not end sooner than with one.{remedies}"
        )
    return SpeedupEstimate(rounds, speedup, fit.basis, sentence)


def _count_rounds(
    spec: RunSpec,
    tokens_per_second: float,
    line: Line,
    machines: int,
    carrier_bytes: float = math.inf,
) -> tuple[float, bool]:
    """Return each machine's rounds in the run, and whether its updates hold all values.

    `carrier_bytes` is the uplink of a member that carries for others; inf: there is none.
    """
    run_steps = spec.recipe.token_budget / machines / spec.step_tokens
    step_seconds = spec.step_tokens / tokens_per_second
    update_rate = alike_uplink(line, machines, carrier_bytes).update_rate
    schedule = choose_schedule(spec, update_rate, step_seconds, run_steps)
    steps = schedule.steps_until_sent(step_seconds, spec.model.parameters, update_rate)
    return run_steps / steps, schedule.scheme.dense


def _describe_remedies(
    spec: RunSpec, tokens_per_second: float, line: Line, machines: int, fit: Fit
) -> str:
    """Return what would make the machines end sooner than one, as a sentence; "" if nothing."""

    def pays(other_spec: RunSpec, other_line: Line = line, carrier_bytes: float = math.inf) -> bool:
        rounds, is_dense = _count_rounds(
            other_spec, tokens_per_second, other_line, machines, carrier_bytes
        )
        return (fit.speedup(machines, rounds, is_dense) or 0.0) >= PAYS_FROM

    def widen(megabits: int) -> Line:
        return replace(line, up_megabits=megabits, down_megabits=max(megabits, line.down_megabits))

    def lengthen(tokens: int) -> RunSpec:
        budget = tokens * spec.model.parameters
        return replace(spec, recipe=replace(spec.recipe, token_budget=budget))

    uplink = _find_first(UPLINKS, lambda megabits: pays(spec, widen(megabits)))
    present = spec.recipe.token_budget / spec.model.parameters
    longer = [tokens for tokens in TOKENS_PER_PARAMETER if tokens > present]
    tokens = _find_first(longer, lambda tokens: pays(lengthen(tokens)))
    remedies: list[str] = []
    if uplink and uplink > line.up_megabits:
        remedies.append(f"with lines of {uplink} Mb/s up")
    if (
        machines > 2
        and line.up_bytes < CARRIER_LINE.up_bytes
        and pays(spec, carrier_bytes=CARRIER_LINE.up_bytes)
    ):
        remedies.append("with a member with 1 Gb/s that carries for others")
    if tokens:
        remedies.append(f"at {tokens} tokens a parameter")
    *others, last = remedies or [""]
    return f" It would {', '.join(others)}{' or ' if others else ''}{last}." if remedies else ""


def _find_first(values: Iterable[int], condition: Callable[[int], bool]) -> int | None:
    return next((value for value in values if condition(value)), None)
