"""The GPT, architecture only: pre-LayerNorm blocks, learned positions, GELU (tanh), head tied to the token embedding.

GPT-2 (Radford et al. 2019) as Hugging Face's `gpt2` computes it, without dropout. Three functions, because a layer is
what gets swapped: `embed`, `block`, `head`; a block comes in two parts, because who computes it again for its backward
needs only the first. Each takes its fragment's weights as a dict of views of one flat buffer, named as in
`ModelSpec.fragments()`. Shapes: B sequences, T tokens, d width, V vocabulary. All fp32, on whatever device the weights
are.
"""

import torch.nn.functional as F
from torch import Tensor

from barnraise.spec import Fragment

NORM_EPSILON = 1e-5

Weights = dict[str, Tensor]  # one fragment's tensors by name


def views(fragment: Fragment, flat: Tensor) -> Weights:
    """The fragment's tensors, sharing `flat`'s memory (flat: [fragment.size], any dtype)."""
    assert flat.shape == (fragment.size,), (
        f"{fragment.name} has {fragment.size} elements, not {tuple(flat.shape)}"
    )
    return {
        slot.name: flat[slot.offset : slot.offset + slot.size].view(slot.shape)
        for slot in fragment.slots
    }


def embed(weights: Weights, tokens: Tensor) -> Tensor:
    """int64 [B, T] → fp32 [B, T, d]."""
    return F.embedding(tokens, weights["token"]) + weights["position"][: tokens.shape[1]]


def block(weights: Weights, x: Tensor, heads: int) -> Tensor:
    """One layer: [B, T, d] → [B, T, d]."""
    return block_end(weights, *block_start(weights, x, heads))


def block_start(weights: Weights, x: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """All of a layer but its last product: the stream after attention [B, T, d], and [B, T, 4d] for `finish`."""
    x = x + attention(weights, norm(weights, "norm1", x), heads)
    return x, expand(weights, norm(weights, "norm2", x))


def block_end(weights: Weights, x: Tensor, wide: Tensor) -> Tensor:
    """The layer's end, which its backward does not need: [B, T, d], [B, T, 4d] → [B, T, d]."""
    return x + F.linear(wide, weights["down.weight"], weights["down.bias"])


def attention(weights: Weights, x: Tensor, heads: int) -> Tensor:
    """Causal self-attention; rows of the qkv matrix are all queries, then all keys, then all values, each by head."""
    b, t, d = x.shape
    qkv = F.linear(x, weights["qkv.weight"], weights["qkv.bias"]).view(b, t, 3, heads, d // heads)
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(
        0
    )  # each [B, heads, T, d / heads], not copied
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return F.linear(
        mixed.transpose(1, 2).reshape(b, t, d), weights["out.weight"], weights["out.bias"]
    )


def expand(weights: Weights, x: Tensor) -> Tensor:
    """The feed-forward's hidden values: [B, T, d] → [B, T, 4d]."""
    return F.gelu(F.linear(x, weights["up.weight"], weights["up.bias"]), approximate="tanh")


def head(final: Weights, embedding: Weights, x: Tensor) -> Tensor:
    """Logits: [B, T, d] → [B, T, V]."""
    return F.linear(norm(final, "norm", x), embedding["token"])


def norm(weights: Weights, name: str, x: Tensor) -> Tensor:
    scale, shift = (
        weights[f"{name}.{part}"].to(x.dtype) for part in ("weight", "bias")
    )  # x may be wider
    return F.layer_norm(x, x.shape[-1:], scale, shift, NORM_EPSILON)
