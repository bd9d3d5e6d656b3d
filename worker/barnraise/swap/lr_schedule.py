"""The learning-rate schedule: warm-up, then constant or cosine, on the ledger's tokens. Pure."""

import math

from barnraise.spec import Recipe

# The ledger's token count moves once a round: from a rate of zero, the whole first round would
# learn nothing.
WARMUP_FROM = 0.1
COSINE_TO = 0.1


def learning_rate_scale(recipe: Recipe, tokens: int) -> float:
    """Return the factor, 0 to 1, on the learning rate when the ledger holds `tokens`."""
    if tokens < recipe.warmup_tokens:
        return WARMUP_FROM + (1 - WARMUP_FROM) * tokens / recipe.warmup_tokens
    if recipe.schedule == "constant":
        return 1.0
    decay_tokens = recipe.token_budget - recipe.warmup_tokens
    fraction = 1.0
    if decay_tokens > 0:
        fraction = min(1.0, (tokens - recipe.warmup_tokens) / decay_tokens)
    return COSINE_TO + (1 - COSINE_TO) * (1 + math.cos(math.pi * fraction)) / 2
