"""How much of the training is whose, and how often and how thinly a machine says what it learnt. Pure.

Weights make concurrent updates average. Peers announce their tokens per second; once two rounds of a peer are in, what
the ledger got from it corrects what it says, within a factor. A peer that is connected and has announced nothing yet is
taken to be as fast as oneself for a while: three machines that start together must not each count for the whole.
"""

import math
from collections import deque
from dataclasses import dataclass, field

from barnraise.exchange.form import Form

STRETCH = 4.0  # the ledger corrects an announced rate by this factor at most
QUIET = 90.0  # seconds for which a peer that announced nothing counts as being about to
_ROUNDS = 8  # of a peer, remembered
SHARE = 0.8  # of the uplink that updates may take


@dataclass
class Pace:
    """One peer's rounds as they came in: (seconds, tokens)."""

    rounds: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_ROUNDS))

    def note(self, now: float, tokens: int) -> None:
        self.rounds.append((now, tokens))

    def rate(self, announced: float) -> float:
        """Tokens/s: as announced, corrected by what came between the first and the last round that is remembered."""
        if announced <= 0 or len(self.rounds) < 2 or (span := self.rounds[-1][0] - self.rounds[0][0]) <= 0:
            return announced
        measured = sum(tokens for _, tokens in list(self.rounds)[1:]) / span
        return min(max(measured, announced / STRETCH), announced * STRETCH)


@dataclass(frozen=True)
class Fellow:
    """A connected peer that trains too. `rate`: corrected tokens/s; `since`: when it connected, seconds."""

    rate: float
    since: float


def weight(own: float, fellows: list[Fellow], now: float) -> float:
    """This author's share of all the training going on, in (0, 1]; 1 when nobody else is at it."""
    rates = [fellow.rate or (own if now < fellow.since + QUIET else 0.0) for fellow in fellows]
    if own <= 0:
        return 1.0 / (1 + len(fellows))
    return own / (own + sum(rates))


# ---- how often, how thinly


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
