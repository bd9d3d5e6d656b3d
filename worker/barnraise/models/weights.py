"""What all architectures share: named weights, keys and values of earlier tokens, and a block."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from barnraise.spec import Fragment
from barnraise.spec.model_dimensions import ModelDimensions

Weights = dict[str, Tensor]  # one fragment's tensors by name


@dataclass
class KeyValueCache:
    """One layer's keys and values of one sequence.

    Attributes:
        keys: fp32 [1, key-value heads, capacity, head width].
        values: the same shape.
        length: tokens in it, from the sequence's start.
    """

    keys: Tensor
    values: Tensor
    length: int = 0

    @classmethod
    def empty(cls, model: ModelDimensions, capacity: int, device: torch.device) -> "KeyValueCache":
        """Allocate a cache for `capacity` tokens."""
        shape = (1, model.grouped_heads, capacity, model.head_width)
        return cls(torch.zeros(shape, device=device), torch.zeros(shape, device=device))

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens; return those of all tokens so far."""
        before, after = self.length, self.length + key.shape[2]
        self.keys[:, :, before:after] = key
        self.values[:, :, before:after] = value
        self.length = after
        return self.keys[:, :, :after], self.values[:, :, :after]


def views(fragment: Fragment, flat: Tensor) -> Weights:
    """Return the fragment's tensors by name, as views of `flat` ([fragment.size], any dtype)."""
    assert flat.shape == (fragment.size,), (
        f"{fragment.name} has {fragment.size} elements, not {tuple(flat.shape)}"
    )
    return {
        slot.name: flat[slot.offset : slot.offset + slot.size].view(slot.shape)
        for slot in fragment.slots
    }


class ModelFunctions(ABC):
    """The functions that compute an architecture, whose blocks are pre-norm.

    A model is these functions, because a layer is what gets swapped. A block comes in two parts,
    because recomputation for its backward needs only the first; `block_end` is the second. Each
    function takes its fragment's weights by name. Shapes: B sequences, T tokens, d width.
    """

    @abstractmethod
    def embed(self, weights: Weights, tokens: Tensor, begin: int = 0) -> Tensor:
        """Embed tokens, the first one at position `begin`: int64 [B, T] → fp32 [B, T, d]."""

    @abstractmethod
    def norm(self, weights: Weights, name: str, x: Tensor, model: ModelDimensions) -> Tensor:
        """Apply the norm `name` to x, which may be of a wider type than the weights."""

    @abstractmethod
    def attention(
        self, weights: Weights, x: Tensor, model: ModelDimensions, cache: KeyValueCache | None
    ) -> Tensor:
        """Compute causal self-attention over x and the tokens in a cache: [B, T, d] → [B, T, d].

        The rows of the qkv matrix are all queries, then all keys, then all values, each by head.
        """

    @abstractmethod
    def expand(self, weights: Weights, x: Tensor) -> Tensor:
        """Compute the feed-forward's hidden values: [B, T, d] → [B, T, hidden]."""

    def block_start(
        self,
        weights: Weights,
        x: Tensor,
        model: ModelDimensions,
        cache: KeyValueCache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute all of a layer but its last product.

        Returns:
            The residual stream after attention [B, T, d], and the feed-forward's hidden values.
        """
        x = x + self.attention(weights, self.norm(weights, "norm1", x, model), model, cache)
        return x, self.expand(weights, self.norm(weights, "norm2", x, model))

    def block(
        self,
        weights: Weights,
        x: Tensor,
        model: ModelDimensions,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Compute one layer: [B, T, d] → [B, T, d].

        With a cache, for tokens that follow those in it; their keys and values are added to it.
        """
        return block_end(weights, *self.block_start(weights, x, model, cache))


def block_end(weights: Weights, x: Tensor, expanded: Tensor) -> Tensor:
    """Compute a layer's last product and add it to x: [B, T, d], [B, T, hidden] → [B, T, d]."""
    return x + F.linear(expanded, weights["down.weight"], weights.get("down.bias"))


def attend(query: Tensor, key: Tensor, value: Tensor, cache: KeyValueCache | None) -> Tensor:
    """Compute causal attention: queries of new tokens over their keys and values, and the cache's.

    Args:
        query: [B, heads, T, head width].
        key: [B, key-value heads, T, head width].
        value: the same shape.
        cache: of earlier tokens; the new keys and values are added to it. None for none.

    Returns:
        [B, heads, T, head width].
    """
    mask = None
    if cache is not None:
        key, value = cache.append(key, value)
        # Row i of the new tokens sees all earlier tokens, and the new ones up to itself.
        new, tokens = query.shape[2], key.shape[2]
        mask = torch.ones(new, tokens, dtype=torch.bool, device=query.device).tril(tokens - new)
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1 and query.is_cuda and query.dtype == torch.float32:
        # Of a GPU's kernels only those for narrow types share keys among queries. In fp32 torch
        # would compute all scores at once.
        key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
        repeats = 1
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=repeats > 1
    )
