"""Updates that are under way, guessed by one's own momentum: where the others will have taken the anchor. Pure.

A machine that goes on as before says ηm in a round: s = η(Δ + μm), and m is Δ/(1 − μ) by then. Another's update is as
much larger as its weight, which goes by its rate, and as its round, by its tokens. Of all guesses that the study tried
(docs/benchmarks/exchange_study.md) this needs nothing but a number a fragment kept: own momentum is there anyway, on
its tier.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from barnraise.spec import Recipe

MOST = 3  # of one author's updates of a fragment that are thought to be under way, whatever is announced
IN_TURNS = 0.5  # of the momentum for an update that says some fragments only: it comes sooner (found by the study)
LARGEST = (
    16.0  # by which one update may be thought larger than ours: beyond, our own says little of it
)


@dataclass(frozen=True)
class Absent:
    """An update whose header is here and whose payloads are not. `whole`: it says all fragments; `larger`: of each,
    than our last of it; 0 of those that it does not say."""

    author: str
    whole: bool
    larger: tuple[float, ...]


def larger(
    said: Sequence[bool], tokens: int, rate: float, own_tokens: Sequence[int], own_rate: float
) -> tuple[float, ...]:
    """How much larger an update is than ours, by fragment: of `tokens`, by who trains `rate` tokens/s. `said`: which
    fragments it says; `own_tokens`: of our last update that said each, 0 where there is none to guess by."""
    if own_rate <= 0:
        return (0.0,) * len(said)
    return tuple(
        min(LARGEST, rate / own_rate * tokens / own) if says and own else 0.0
        for says, own in zip(said, own_tokens, strict=True)
    )


def momenta(recipe: Recipe, absent: Iterable[Absent], fragments: int) -> tuple[float, ...]:
    """What is under way of each fragment, in our momenta. `absent`: of each author in order."""
    guessed, counted = [0.0] * fragments, Counter[tuple[str, int]]()
    for update in absent:
        one = recipe.speculation * recipe.outer_rate * (1.0 if update.whole else IN_TURNS)
        for i, times in enumerate(update.larger):
            if times and counted[update.author, i] < MOST:
                counted[update.author, i] += 1
                guessed[i] += one * times
    return tuple(guessed)
