"""Updates that are under way, guessed by one's own momentum: where the others will have taken the anchor. Pure.

A machine that goes on as before says ηm in a round: s = η(Δ + μm), and m is Δ/(1 − μ) by then. Another's update is as
much larger as its weight, which goes by its rate, and as its round, by its tokens. Of all guesses that the study tried
(docs/benchmarks/exchange_study.md) this needs nothing but one number kept: own momentum is there anyway, on its tier.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from barnraise.spec import Recipe

MOST = 3  # of one author's updates that are thought to be under way, whatever is announced
LARGEST = 16.0  # by which one update may be thought larger than ours: beyond, our own says little of it


@dataclass(frozen=True)
class Absent:
    """An author's updates that are announced and not here: how many, the tokens of its last, its tokens/s."""

    count: int
    tokens: int
    rate: float


def momenta(recipe: Recipe, absent: Iterable[Absent], tokens: int, rate: float) -> float:
    """What is under way, in momenta of a machine that trains `rate` tokens/s and said `tokens` in its last update."""
    if not tokens or rate <= 0:
        return 0.0  # nothing of our own to guess by
    larger = (min(LARGEST, each.rate / rate * each.tokens / tokens) * min(each.count, MOST) for each in absent)
    return recipe.speculation * recipe.outer_rate * sum(larger)
