"""How much sooner a run ends with more machines, at the same loss. Pure, but for reading the fit.

`make study-speedup` measured it on a small model, and writes `speedup_fit.json`. What decides is
how often a machine is heard in the whole run. The site imports this module: no torch.
"""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from barnraise.planning.compression_ladder import COMPRESSION_LADDER
from barnraise.planning.lines import HOME_LINE, LINES, Line
from barnraise.planning.quantization_scheme import QuantizationScheme
from barnraise.planning.round_schedule import choose_schedule
from barnraise.planning.uplink_budget import alike_uplink
from barnraise.spec import AUTO, RunSpec

FIT = Path(__file__).with_name("speedup_fit.json")
FIT_VERSION = 1
PAYS_FROM = 1.05  # below it, machines together end no sooner than one, within chance
UPLINKS = (30, 60, 100, 250, 500, 1_000)  # Mb/s that are tried where joining does not pay
TOKENS_PER_PARAMETER = (20, 40, 80, 160)
CARRIER_LINE = LINES[-1]
ALL_VALUES = COMPRESSION_LADDER[0]

Points = Sequence[tuple[float, float | None]]


@dataclass(frozen=True)
class Fit:
    """Measured speed-ups.

    Attributes:
        basis: what was trained, in a phrase.
        curves: (whether updates hold all values, machines) → rounds in the run and the speed-up at
            the same loss, in ascending order of rounds. More rounds have no lower one.
    """

    basis: str = ""
    curves: dict[tuple[bool, int], Points] = field(default_factory=dict[tuple[bool, int], Points])

    def speedup(self, machines: int, rounds: float, is_dense: bool) -> float | None:
        """Return the speed-up of so many machines with so many rounds; None if not measured.

        Between measured points it is interpolated, linearly in the logarithms of rounds and of
        machines. More rounds than were measured count as the most that were.
        """
        measured: dict[float, float | None] = {1: 1.0}
        for (dense, count), points in self.curves.items():
            if dense == is_dense:
                measured[count] = _interpolate(points, rounds)
        if machines > max(measured):
            return None
        speedup = _interpolate(sorted(measured.items()), machines)
        return speedup and min(speedup, machines)


def _interpolate(points: Points, x: float) -> float | None:
    """Interpolate in the logarithm of `x`: None before the first, the last beyond it."""
    before_x, before = 0.0, None
    for after_x, after in points:
        if x == after_x:
            return after
        if x < after_x:
            if before is None or after is None:
                return None
            part = math.log(x / before_x) / math.log(after_x / before_x)
            return before + part * (after - before)
        before_x, before = after_x, after
    return before


@cache
def read_fit(path: Path = FIT) -> Fit:
    """Read the committed fit; an empty one if it is missing, or of another program version.

    A speed-up that chance put above one with more rounds counts as that.
    """
    try:
        raw = json.loads(path.read_text())
        if raw["version"] != FIT_VERSION:
            return Fit()
        measured = defaultdict[tuple[bool, int], list[tuple[float, float]]](list)
        for point in raw["points"]:
            key = bool(point["dense"]), int(point["machines"])
            measured[key].append((float(point["rounds"]), float(point["speedup"])))
        curves = {
            key: [
                (rounds, min(y for x, y in points if x >= rounds)) for rounds, _ in sorted(points)
            ]
            for key, points in measured.items()
        }
        return Fit(str(raw["basis"]), {**curves})
    except (OSError, ValueError, KeyError, TypeError):
        return Fit()


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


@dataclass(frozen=True)
class _AlikeMachines:
    """Several machines that train so many tokens per second each, on alike lines.

    `carrier_bytes` is the uplink of a member that carries for others; inf: there is none.
    """

    spec: RunSpec
    tokens_per_second: float
    line: Line
    machines: int
    carrier_bytes: float = math.inf

    def count_rounds(self, scheme: QuantizationScheme, least_steps: int) -> float:
        """Count each machine's rounds in the run, of so many steps or as the line carries them."""
        tokens = self.spec.recipe.token_budget / self.machines
        update_rate = alike_uplink(self.line, self.machines, self.carrier_bytes).update_rate
        update_seconds = scheme.payload_size(self.spec.model.parameters) / update_rate
        sent = tokens / self.tokens_per_second / update_seconds
        return min(sent, tokens / self.spec.step_tokens / least_steps)

    def choose_rounds(self) -> tuple[float, bool]:
        """Return each machine's rounds as it chooses them, and whether they hold all values."""
        spec = self.spec
        run_steps = spec.recipe.token_budget / self.machines / spec.step_tokens
        update_rate = alike_uplink(self.line, self.machines, self.carrier_bytes).update_rate
        step_seconds = spec.step_tokens / self.tokens_per_second
        schedule = choose_schedule(spec, update_rate, step_seconds, run_steps)
        return self.count_rounds(schedule.scheme, schedule.steps), schedule.scheme.dense

    def find_speedup(self, fit: Fit) -> float | None:
        """Return the speed-up over one machine; None if it was not measured.

        With the codec "auto" machines send few values often where all values would be as good at
        most, so that what was measured with all of them is reached as well.
        """
        rounds, is_dense = self.choose_rounds()
        reached = [fit.speedup(self.machines, rounds, is_dense)]
        if self.spec.recipe.codec == AUTO and not is_dense:
            dense = self.count_rounds(ALL_VALUES.scheme, ALL_VALUES.min_steps)
            reached.append(fit.speedup(self.machines, dense, is_dense=True))
        return max((speedup for speedup in reached if speedup is not None), default=None)


def estimate_speedup(
    spec: RunSpec, tokens_per_second: float, line: Line, machines: int, fit: Fit | None = None
) -> SpeedupEstimate:
    """Estimate what alike machines on alike lines gain in a run, and where they would gain more.

    `tokens_per_second` is of each machine, 0 if it is not known; `fit` is the measured speed-ups.
    Nothing is known of machines that average their weights.
    """
    is_known = math.isfinite(tokens_per_second) and tokens_per_second > 0
    if machines < 2 or not is_known or spec.recipe.token_budget <= 0 or spec.recipe.mixes_weights:
        return SpeedupEstimate()
    alike = _AlikeMachines(spec, tokens_per_second, line, machines)
    rounds, _ = alike.choose_rounds()
    if rounds < 1:
        return SpeedupEstimate()
    fit = fit or read_fit()
    speedup = alike.find_speedup(fit)
    name = "home lines" if line == HOME_LINE else f"lines of {line}"
    together = f"With {machines} machines on {name}"
    heard = f"{rounds:,.0f} times" if rounds >= 1.5 else "once"
    if speedup is None:
        most = max((count for _, count in fit.curves), default=1)
        lack = "so many machines" if machines > most else "so few rounds"
        sentence = (
            f"{together} each is heard {heard} in the whole run: how much sooner it ends than "
            f"with one, at the same loss, was not measured for {lack}."
        )
        return SpeedupEstimate(rounds, sentence=sentence)
    if speedup >= PAYS_FROM:
        sentence = (
            f"{together} this run ends {speedup:.1f} × sooner than with one, at the same loss."
        )
    else:
        sentence = (
            f"{together} each would be heard {heard} in the whole run: it would not end sooner "
            f"than with one.{_describe_remedies(alike, fit)}"
        )
    return SpeedupEstimate(rounds, speedup, fit.basis, sentence)


def _describe_remedies(alike: _AlikeMachines, fit: Fit) -> str:
    """Return what would make the machines end sooner than one, as a sentence; "" if nothing."""
    spec, line = alike.spec, alike.line

    def pays(other: _AlikeMachines) -> bool:
        return (other.find_speedup(fit) or 0.0) >= PAYS_FROM

    def widen(megabits: int) -> _AlikeMachines:
        down = max(megabits, line.down_megabits)
        return replace(alike, line=replace(line, up_megabits=megabits, down_megabits=down))

    def lengthen(tokens: int) -> _AlikeMachines:
        recipe = replace(spec.recipe, token_budget=tokens * spec.model.parameters)
        return replace(alike, spec=replace(spec, recipe=recipe))

    uplinks = [up for up in UPLINKS if up > line.up_megabits and pays(widen(up))]
    remedies = [f"with lines of {up} Mb/s up" for up in uplinks[:1]]
    if pays(replace(alike, carrier_bytes=CARRIER_LINE.up_bytes)):
        remedies.append("with a member with 1 Gb/s that carries for others")
    present = spec.recipe.token_budget / spec.model.parameters
    budgets = [tokens for tokens in TOKENS_PER_PARAMETER if tokens > present]
    longer = [tokens for tokens in budgets if pays(lengthen(tokens))]
    remedies += [f"at {tokens} tokens a parameter" for tokens in longer[:1]]
    *others, last = remedies or [""]
    return f" It would {', '.join(others)}{' or ' if others else ''}{last}." if remedies else ""
