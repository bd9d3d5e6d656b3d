"""The functions that compute an architecture, by the model that they are wanted for."""

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from barnraise.models import gpt2, llama
from barnraise.models.weights import KeyValueCache, Weights
from barnraise.spec.model_dimensions import ModelDimensions


class ModelFunctions(Protocol):
    """What a file of `models/` defines for its architecture.

    A model is these functions, because a layer is what gets swapped. A block comes in two parts,
    because recomputation for its backward needs only the first; `block_end` is the same for all.
    Each function takes its fragment's weights by name. Shapes: B sequences, T tokens, d width.
    """

    def embed(self, weights: Weights, tokens: Tensor, begin: int = 0) -> Tensor:
        """Embed tokens, the first one at position `begin`: int64 [B, T] → fp32 [B, T, d]."""
        ...

    def block(self, weights: Weights, x: Tensor, model: ModelDimensions) -> Tensor:
        """Compute one layer: [B, T, d] → [B, T, d]."""
        ...

    def block_start(
        self, weights: Weights, x: Tensor, model: ModelDimensions
    ) -> tuple[Tensor, Tensor]:
        """Compute all of a layer but its last product.

        Returns:
            The residual stream after attention [B, T, d], and the feed-forward's hidden values.
        """
        ...

    def block_with_cache(
        self, weights: Weights, x: Tensor, model: ModelDimensions, cache: KeyValueCache
    ) -> Tensor:
        """Compute one layer for tokens that follow those in the cache: [1, T, d] → [1, T, d]."""
        ...

    def final_norm(self, weights: Weights, x: Tensor, model: ModelDimensions) -> Tensor:
        """Apply the norm before the head: [B, T, d] → [B, T, d]."""
        ...


FUNCTIONS: dict[str, ModelFunctions] = {"gpt2": gpt2, "llama": llama}


def functions_of(model: ModelDimensions) -> ModelFunctions:
    """Return the functions that compute a model."""
    return FUNCTIONS[model.architecture]


def head(final: Weights, table: Tensor, x: Tensor, model: ModelDimensions) -> Tensor:
    """Compute logits with the output table [V, d]: [B, T, d] → [B, T, V]."""
    return F.linear(functions_of(model).final_norm(final, x, model), table)
