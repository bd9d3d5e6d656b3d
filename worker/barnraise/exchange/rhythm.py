"""How often and how thinly a machine says what it learnt, from what its link carries. Pure."""

import math
from dataclasses import dataclass

from barnraise.exchange.form import Form

SHARE = 0.8  # of the uplink that updates may take


@dataclass(frozen=True)
class Rung:
    """A form of updates, and the rounds it is good for: from `shortest` to `longest` steps."""

    form: Form
    shortest: int
    longest: int


def _rung(form: str, shortest: int, longest: int) -> Rung:
    return Rung(Form.parse(form), shortest, longest)


LADDER = (
    _rung("dense8", 5, 10),
    _rung("dense4", 5, 40),
    _rung("dense2", 20, 60),
    _rung("top256x2", 26, 120),
    _rung("top64x2", 30, 10_000),
)


@dataclass(frozen=True)
class Rhythm:
    """`steps` a round, and the form of its update."""

    steps: int
    form: Form


def budget(uplink: float, cap: float | None = None, share: float = SHARE) -> float:
    """Bytes a second that updates may take of a measured uplink, or of the volunteer's cap where that is less."""
    return share * min(uplink, uplink if cap is None else cap)


def rhythm(allowed: float, step_seconds: float, parameters: int, pushes: int = 1, most: int = 10_000) -> Rhythm:
    """How a machine publishes that may send `allowed` bytes a second, takes `step_seconds` a step, and sends each
    update to `pushes` peers itself.

    A round of H steps lasts as long as its update may take to leave, so H steps of what is allowed must carry it:
    H ≥ pushes · bytes / (allowed · step_seconds). The ladder is in the order of loss a byte as the study measured it
    (docs/benchmarks/exchange_study.md): of what a link carries, first bits are given up that cost nothing, then rounds
    lengthen, then values are left out. The first rung is taken that the link carries in rounds it is good for, and on
    it the shortest round that fits: never thinner, never rarer than the link demands, so that a faster link always says
    more. `most` bounds the steps (an update may state only so many tokens); a link too slow even for the thinnest form
    of so many steps is given that, and takes longer than a round."""
    carried = max(allowed * step_seconds, 1e-9)
    for rung in LADDER:
        steps = math.ceil(pushes * rung.form.size(parameters) / carried)
        if steps <= min(rung.longest, most):
            return Rhythm(min(most, max(steps, rung.shortest)), rung.form)
    return Rhythm(most, LADDER[-1].form)
