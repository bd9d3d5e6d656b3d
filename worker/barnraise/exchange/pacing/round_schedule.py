"""How often and how thinly a machine says what it learnt, from what its link carries. Pure."""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from barnraise.exchange.compression.scheme import Form
from barnraise.exchange.pacing.streaming import Turns, fitting
from barnraise.spec import AUTO, Recipe

SHARE = 0.8  # of the uplink that updates may take
STRETCH = 1.5  # times the steps of a window that a round may have
FIRST = Form.parse("dense2")  # on a line that is not known yet


@dataclass(frozen=True)
class Rung:
    """A form of updates, and the rounds it is good for: from `shortest` to `longest` steps."""

    form: Form
    shortest: int
    longest: int


def _rung(form: str, shortest: int, longest: int) -> Rung:
    return Rung(Form.parse(form), shortest, longest)


LADDER = (
    _rung("dense2", 10, 60),
    _rung("top256x2", 26, 120),
    _rung("top64x2", 30, 10_000),
)


@dataclass(frozen=True)
class Rhythm:
    """A round of `steps`, or of about so many where it `ends` by the clock that machines share; the form of its
    update. With `turns` it is the next of them that ends then, of a round of `period` seconds."""

    steps: int
    form: Form
    ends: float = math.inf  # seconds since 1970
    period: float = math.inf
    turns: Turns | None = None
    since: float = 0.0  # when something was said last

    def over(self, steps: int, now: float) -> bool:
        """Whether a round of `steps` so far ends here. A clock that jumps changes the round it jumps in by no more than
        STRETCH."""
        if math.isinf(self.ends):
            return steps >= self.steps
        return steps > 0 and (now >= self.ends or steps >= int(STRETCH * self.steps))

    @property
    def updates(self) -> int:
        """That such a round has."""
        return 1 if self.turns is None else len(self.turns.ends)

    def due(self, now: float) -> Collection[int] | None:
        """The fragments that are to be said, of a round that is over; None for all of them."""
        if self.turns is None:
            return None
        return self.turns.due(self.since / self.period, now / self.period) or None

    def streamed(self, sizes: tuple[int, ...], since: float, now: float) -> "Rhythm":
        """This round said in turns, of fragments of these sizes, where it is long enough for two; at `now`, by a
        machine that said something last at `since`."""
        turns = fitting(sizes, self.period, self.steps)
        if math.isinf(self.period) or len(turns.ends) == 1:
            return self
        return replace(
            self, ends=self.period * turns.next(now / self.period), turns=turns, since=since
        )


def agreed(
    recipe: Recipe, parameters: int, line: float, step_seconds: float | None, pushes: int, most: int
) -> Rhythm:
    """A machine's next round: as the recipe says or, with "auto", as its line allows, of which updates may take SHARE.
    `line`: bytes a second as measured, or the volunteer's cap where that is less; inf while neither is known. Then, and
    before the first step was timed, rounds are the recipe's own and updates FIRST."""
    if recipe.codec != AUTO:
        return Rhythm(recipe.round_steps, Form.parse(recipe.codec))
    if math.isinf(line) or step_seconds is None:
        return Rhythm(min(recipe.round_steps, most), FIRST)
    return rhythm(SHARE * line, step_seconds, parameters, pushes, most)


def rhythm(
    allowed: float, step_seconds: float, parameters: int, pushes: int = 1, most: int = 10_000
) -> Rhythm:
    """How a machine publishes that may send `allowed` bytes a second, takes `step_seconds` a step, and sends each
    update to `pushes` peers itself.

    A round of H steps lasts as long as its update may take to leave, so H steps of what is allowed must carry it:
    H ≥ pushes · bytes / (allowed · step_seconds). The ladder is in the order of loss a byte as the study measured it
    (docs/benchmarks/exchange_study.md): every value in two bits every ten steps, then rounds lengthen, then values are
    left out. Four and eight bits cost bytes and gain nothing, and an update that is late costs more than one that says
    less: so what a fast link carries beyond the first rung makes updates arrive sooner. The first rung is taken that
    the link carries in rounds it is good for, and on it the shortest round that fits: never thinner, never rarer than
    the link demands. `most` bounds the steps (an update may state only so many tokens); a link too slow even for the
    thinnest form of so many steps is given that, and takes longer than a round."""
    carried = max(allowed * step_seconds, 1e-9)
    for rung in LADDER:
        steps = math.ceil(pushes * rung.form.size(parameters) / carried)
        if steps <= min(rung.longest, most):
            return Rhythm(min(most, max(steps, rung.shortest)), rung.form)
    return Rhythm(most, LADDER[-1].form)


def together(
    recipe: Recipe,
    alone: Rhythm,
    step_seconds: float,
    mean_seconds: float,
    now: float,
    most: int = 10_000,
) -> Rhythm:
    """The round that `alone` would be, so that it ends when those of the others do: at the next multiple, on the clock
    all machines share, of a power of two of seconds. Who is slower ends with the others every second time, or every
    fourth, without a word between them. Nobody waits: a round ends with the first step that is done by then.

    "auto": no shorter than the line demands. Else the nearest to the recipe's steps at the average machine's
    `mean_seconds` a step, so that all have the same and a fast one takes more steps in it."""
    if recipe.codec == AUTO:
        period = 2.0 ** math.ceil(math.log2(alone.steps * step_seconds))
    else:
        period = 2.0 ** round(math.log2(alone.steps * mean_seconds))
    steps = max(1, min(int(most / STRETCH), round(period / step_seconds)))
    return Rhythm(steps, alone.form, period * (math.floor(now / period) + 1), period)
