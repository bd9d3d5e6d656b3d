"""How large a run's text is next to its budget: how often the training reads it. Pure."""

import itertools
import math
from dataclasses import dataclass

from barnraise.spec import RunSpec
from coordinator.web.text_facts import TextFacts

STDLIB_BYTES = 12_600_000  # of Python 3.11's standard library, in 799 files
# Its bytes for each token of a vocabulary of that size; others are interpolated. Those of 2,048
# are measured, those of 50,257 are assumed.
BYTES_PER_TOKEN = ((256, 1.0), (2_048, 3.1), (50_257, 4.1))
MANY_PASSES = 10  # from here on a model rather memorises its text


@dataclass(frozen=True)
class TextSize:
    """The size of a text, and how often a budget reads it."""

    tokens: int  # to train on
    passes: float
    is_estimate: bool  # the text is not prepared yet

    @property
    def is_repeated_much(self) -> bool:
        """Whether the model would rather memorise the text."""
        return self.passes > MANY_PASSES


def text_size(spec: RunSpec, facts: TextFacts | None) -> TextSize | None:
    """Return the size of a run's text; None where only its preparation can count it."""
    if facts is not None:
        tokens = facts.train_tokens
    elif spec.text.source == "stdlib":
        share = 1 - spec.text.held_out
        tokens = round(STDLIB_BYTES * share / _bytes_per_token(spec.model.vocabulary))
    else:
        return None
    passes = spec.recipe.token_budget / max(1, tokens)
    return TextSize(tokens, passes, is_estimate=facts is None)


def _bytes_per_token(vocabulary: int) -> float:
    """Interpolate between these vocabularies, over their logarithm."""
    for (small, low), (large, high) in itertools.pairwise(BYTES_PER_TOKEN):
        if vocabulary <= large:
            share = math.log(max(vocabulary, small) / small) / math.log(large / small)
            return low + share * (high - low)
    return BYTES_PER_TOKEN[-1][1]
