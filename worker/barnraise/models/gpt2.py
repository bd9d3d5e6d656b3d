"""GPT-2's architecture.

Pre-LayerNorm blocks, learned positions, GELU (tanh), head tied to the token embedding, as Hugging
Face's `gpt2` (Radford et al. 2019) computes it, without dropout. `models/functions.py` says what
the functions are for. Shapes: B sequences, T tokens, d width. All fp32, on the device of the
weights.
"""

import torch.nn.functional as F
from torch import Tensor

from barnraise.models.weights import KeyValueCache, Weights, attend, block_end
from barnraise.spec.model_dimensions import ModelDimensions

NORM_EPSILON = 1e-5


def embed(weights: Weights, tokens: Tensor, begin: int = 0) -> Tensor:
    """Embed tokens, the first one at position `begin`: int64 [B, T] → fp32 [B, T, d]."""
    positions = weights["position"][begin : begin + tokens.shape[1]]
    return F.embedding(tokens, weights["token"]) + positions


def block(weights: Weights, x: Tensor, model: ModelDimensions) -> Tensor:
    """Compute one layer: [B, T, d] → [B, T, d]."""
    return block_end(weights, *block_start(weights, x, model))


def block_start(weights: Weights, x: Tensor, model: ModelDimensions) -> tuple[Tensor, Tensor]:
    """Compute all of a layer but its last product.

    Returns:
        The residual stream after attention [B, T, d], and the feed-forward's hidden values [B, T,
        4d].
    """
    x = x + _attention(weights, norm(weights, "norm1", x), model)
    return x, expand(weights, norm(weights, "norm2", x))


def block_with_cache(
    weights: Weights, x: Tensor, model: ModelDimensions, cache: KeyValueCache
) -> Tensor:
    """Compute one layer for tokens that follow those in the cache: [1, T, d] → [1, T, d].

    Their keys and values are added to the cache.
    """
    x = x + _attention(weights, norm(weights, "norm1", x), model, cache)
    return block_end(weights, x, expand(weights, norm(weights, "norm2", x)))


def _attention(
    weights: Weights, x: Tensor, model: ModelDimensions, cache: KeyValueCache | None = None
) -> Tensor:
    """Compute causal self-attention over x and the tokens in a cache: [B, T, d] → [B, T, d].

    The rows of the qkv matrix are all queries, then all keys, then all values, each by head.
    """
    b, t, _ = x.shape
    qkv = F.linear(x, weights["qkv.weight"], weights["qkv.bias"])
    qkv = qkv.view(b, t, 3, model.heads, model.head_width)
    # Three views of [B, heads, T, d / heads].
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    mixed = attend(query, key, value, cache)
    return F.linear(mixed.transpose(1, 2).flatten(2), weights["out.weight"], weights["out.bias"])


def expand(weights: Weights, x: Tensor) -> Tensor:
    """Compute the feed-forward's hidden values: [B, T, d] → [B, T, 4d]."""
    return F.gelu(F.linear(x, weights["up.weight"], weights["up.bias"]), approximate="tanh")


def final_norm(weights: Weights, x: Tensor, model: ModelDimensions) -> Tensor:
    """Apply the norm before the head: [B, T, d] → [B, T, d]."""
    return norm(weights, "norm", x)


def norm(weights: Weights, name: str, x: Tensor) -> Tensor:
    """Apply the layer norm `name` to x, which may be of a wider type than the weights."""
    scale = weights[f"{name}.weight"].to(x.dtype)
    shift = weights[f"{name}.bias"].to(x.dtype)
    return F.layer_norm(x, x.shape[-1:], scale, shift, NORM_EPSILON)
