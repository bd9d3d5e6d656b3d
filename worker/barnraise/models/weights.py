"""What all architectures share: named weights, keys and values of earlier tokens, a block's end."""

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
        heads = model.key_value_width // model.head_width
        shape = (1, heads, capacity, model.head_width)
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
