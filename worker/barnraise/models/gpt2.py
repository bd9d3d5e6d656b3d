"""GPT-2's architecture.

Pre-LayerNorm blocks, learned positions, GELU (tanh), head tied to the token embedding, as Hugging
Face's `gpt2` (Radford et al. 2019) computes it, without dropout. All fp32, on the device of the
weights.
"""

import torch.nn.functional as F
from torch import Tensor

from barnraise.models.weights import KeyValueCache, ModelFunctions, Weights, attend
from barnraise.spec.model_dimensions import ModelDimensions


class GPT2Functions(ModelFunctions):
    """The functions of GPT-2; see `ModelFunctions`."""

    def embed(self, weights: Weights, tokens: Tensor, begin: int = 0) -> Tensor:
        """Add the rows of tokens and of positions."""
        positions = weights["position"][begin : begin + tokens.shape[1]]
        return F.embedding(tokens, weights["token"]) + positions

    def norm(self, weights: Weights, name: str, x: Tensor, model: ModelDimensions) -> Tensor:
        """Apply a layer norm."""
        scale = weights[f"{name}.weight"].to(x.dtype)
        shift = weights[f"{name}.bias"].to(x.dtype)
        return F.layer_norm(x, x.shape[-1:], scale, shift, model.norm_epsilon)

    def attention(
        self, weights: Weights, x: Tensor, model: ModelDimensions, cache: KeyValueCache | None
    ) -> Tensor:
        """Compute attention with as many keys and values as queries."""
        b, t, _ = x.shape
        qkv = F.linear(x, weights["qkv.weight"], weights["qkv.bias"])
        qkv = qkv.view(b, t, 3, model.heads, model.head_width)
        # Three views of [B, heads, T, d / heads].
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = attend(query, key, value, cache).transpose(1, 2).flatten(2)
        return F.linear(mixed, weights["out.weight"], weights["out.bias"])

    def expand(self, weights: Weights, x: Tensor) -> Tensor:
        """Compute GELU of the first product."""
        return F.gelu(F.linear(x, weights["up.weight"], weights["up.bias"]), approximate="tanh")
