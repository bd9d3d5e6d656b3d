"""GPT-2's architecture.

Pre-LayerNorm blocks, learned positions, GELU (tanh), head tied to the token embedding, as Hugging
Face's `gpt2` (Radford et al. 2019) computes it, without dropout. The model is three functions,
because a layer is what gets swapped: `embed`, `block`, `head`. A block comes in two parts, because
recomputation for its backward needs only the first. Each function takes its fragment's weights as a
dict of views of one flat buffer, named as in `ModelSpec.fragments()`. Shapes: B sequences, T
tokens, d width, V vocabulary. All fp32, on the device of the weights.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from barnraise.spec import Fragment, ModelSpec

NORM_EPSILON = 1e-5

Weights = dict[str, Tensor]  # one fragment's tensors by name


@dataclass
class KeyValueCache:
    """One layer's keys and values of one sequence.

    Attributes:
        keys: fp32 [1, heads, capacity, d / heads].
        values: the same shape.
        length: tokens in it, from the sequence's start.
    """

    keys: Tensor
    values: Tensor
    length: int = 0

    @classmethod
    def empty(cls, model: ModelSpec, capacity: int, device: torch.device) -> "KeyValueCache":
        """Allocate a cache for `capacity` tokens."""
        shape = (1, model.heads, capacity, model.width // model.heads)
        return cls(torch.zeros(shape, device=device), torch.zeros(shape, device=device))


def views(fragment: Fragment, flat: Tensor) -> Weights:
    """Return the fragment's tensors by name, as views of `flat` ([fragment.size], any dtype)."""
    assert flat.shape == (fragment.size,), (
        f"{fragment.name} has {fragment.size} elements, not {tuple(flat.shape)}"
    )
    return {
        slot.name: flat[slot.offset : slot.offset + slot.size].view(slot.shape)
        for slot in fragment.slots
    }


def embed(weights: Weights, tokens: Tensor, begin: int = 0) -> Tensor:
    """Embed tokens, the first one at position `begin`: int64 [B, T] → fp32 [B, T, d]."""
    positions = weights["position"][begin : begin + tokens.shape[1]]
    return F.embedding(tokens, weights["token"]) + positions


def block(weights: Weights, x: Tensor, heads: int) -> Tensor:
    """Compute one layer: [B, T, d] → [B, T, d]."""
    return block_end(weights, *block_start(weights, x, heads))


def block_start(weights: Weights, x: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Compute all of a layer but its last product.

    Returns:
        The residual stream after attention [B, T, d], and the feed-forward's hidden values [B, T,
        4d].
    """
    x = x + attention(weights, norm(weights, "norm1", x), heads)
    return x, expand(weights, norm(weights, "norm2", x))


def block_end(weights: Weights, x: Tensor, expanded: Tensor) -> Tensor:
    """Compute the layer's last product: [B, T, d], [B, T, 4d] → [B, T, d]."""
    return x + F.linear(expanded, weights["down.weight"], weights["down.bias"])


def attention(weights: Weights, x: Tensor, heads: int) -> Tensor:
    """Compute causal self-attention: [B, T, d] → [B, T, d].

    The rows of the qkv matrix are all queries, then all keys, then all values, each by head.
    """
    b, t, d = x.shape
    qkv = F.linear(x, weights["qkv.weight"], weights["qkv.bias"]).view(b, t, 3, heads, d // heads)
    # Three views of [B, heads, T, d / heads].
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return F.linear(
        mixed.transpose(1, 2).reshape(b, t, d), weights["out.weight"], weights["out.bias"]
    )


def block_with_cache(weights: Weights, x: Tensor, heads: int, cache: KeyValueCache) -> Tensor:
    """Compute one layer for tokens that follow those in the cache: [1, T, d] → [1, T, d].

    Their keys and values are added to the cache.
    """
    x = x + _cached_attention(weights, norm(weights, "norm1", x), heads, cache)
    return block_end(weights, x, expand(weights, norm(weights, "norm2", x)))


def _cached_attention(weights: Weights, x: Tensor, heads: int, cache: KeyValueCache) -> Tensor:
    _, t, d = x.shape
    qkv = F.linear(x, weights["qkv.weight"], weights["qkv.bias"]).view(1, t, 3, heads, d // heads)
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    before, after = cache.length, cache.length + t
    cache.keys[:, :, before:after] = key
    cache.values[:, :, before:after] = value
    cache.length = after
    # Row i of the new tokens sees all earlier tokens, and the new ones up to itself.
    visible = torch.ones(t, after, dtype=torch.bool, device=x.device).tril(before)
    mixed = F.scaled_dot_product_attention(
        query, cache.keys[:, :, :after], cache.values[:, :, :after], attn_mask=visible
    )
    return F.linear(
        mixed.transpose(1, 2).reshape(1, t, d), weights["out.weight"], weights["out.bias"]
    )


def expand(weights: Weights, x: Tensor) -> Tensor:
    """Compute the feed-forward's hidden values: [B, T, d] → [B, T, 4d]."""
    return F.gelu(F.linear(x, weights["up.weight"], weights["up.bias"]), approximate="tanh")


def head(final: Weights, embedding: Weights, x: Tensor) -> Tensor:
    """Compute logits: [B, T, d] → [B, T, V]."""
    return F.linear(norm(final, "norm", x), embedding["token"])


def norm(weights: Weights, name: str, x: Tensor) -> Tensor:
    """Apply the layer norm `name` to x, which may be of a wider type than the weights."""
    scale = weights[f"{name}.weight"].to(x.dtype)
    shift = weights[f"{name}.bias"].to(x.dtype)
    return F.layer_norm(x, x.shape[-1:], scale, shift, NORM_EPSILON)
