"""Predict the effect of updates in flight from this machine's own momentum. Pure.

This is weight prediction for delayed updates, as in SpecTrain (Chen et al., arXiv 1809.02839,
“weight prediction”) and PipeMare (Yang et al., arXiv 1910.05124, “discrepancy correction”). A
machine that goes on as before publishes s = ηm in a round: with the outer step s = η(Δ + μm), its
momentum m ← μm + Δ converges to m = Δ/(1 − μ). Another machine's update is larger than ours by its
weight, which is proportional to its training rate, and by its round, which is proportional to its
tokens. The prediction for fragment i, in multiples of this machine's momentum, is

    g_i = p · η · Σ_u f_u · r_ui

    u     updates in flight               at most MAX_IN_FLIGHT of each author
    p     strength of the prediction      `Recipe.delay_compensation`
    η     outer learning rate             `Recipe.outer_rate`
    f_u   1, or STREAMED_FACTOR           the latter for an update of some fragments only
    r_ui  relative size of fragment i     `InFlightUpdate.relative_sizes`

Of all predictors in the study (docs/benchmarks/exchange_study.md) this one needs only one number
for each fragment: the momentum is stored anyway, on its tier.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from barnraise.spec import Recipe

MAX_IN_FLIGHT = 3  # updates of one author and fragment that count, however many are announced
STREAMED_FACTOR = 0.5  # for an update of some fragments only: it arrives sooner (from the study)
MAX_RELATIVE_SIZE = 16.0  # of an update; our momentum predicts little about a larger one


@dataclass(frozen=True)
class InFlightUpdate:
    """An update whose header has arrived and whose payloads have not."""

    author: str
    is_complete: bool  # whether it contains every fragment
    # For each fragment, its size relative to our last update of it; 0 for fragments that it does
    # not contain.
    relative_sizes: tuple[float, ...]


def estimate_relative_sizes(
    has_payload: Sequence[bool],
    tokens: int,
    rate: float,
    own_tokens: Sequence[int],
    own_rate: float,
) -> tuple[float, ...]:
    """Estimate how much larger another machine's update is than ours, for each fragment.

    Args:
        has_payload: For each fragment, whether the update contains it.
        tokens: Training tokens of the update.
        rate: Tokens per second at which its author trains.
        own_tokens: For each fragment, training tokens of our last update of it; 0 if there is none.
        own_rate: Tokens per second at which this machine trains.
    """
    if own_rate <= 0:
        return (0.0,) * len(has_payload)
    return tuple(
        min(MAX_RELATIVE_SIZE, rate / own_rate * tokens / own) if contained and own else 0.0
        for contained, own in zip(has_payload, own_tokens, strict=True)
    )


def predict_in_flight(
    recipe: Recipe, in_flight: Iterable[InFlightUpdate], fragments: int
) -> tuple[float, ...]:
    """Predict what the updates in flight will add to each fragment, in multiples of our momentum.

    Those of one author come in the order of their sequence numbers.
    """
    predicted = [0.0] * fragments
    counted: Counter[tuple[str, int]] = Counter()
    for update in in_flight:
        factor = recipe.delay_compensation * recipe.outer_rate
        factor *= 1.0 if update.is_complete else STREAMED_FACTOR
        for i, relative_size in enumerate(update.relative_sizes):
            if relative_size and counted[update.author, i] < MAX_IN_FLIGHT:
                counted[update.author, i] += 1
                predicted[i] += factor * relative_size
    return tuple(predicted)
