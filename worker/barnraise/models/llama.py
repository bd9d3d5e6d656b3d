"""The architecture of Llama, Mistral, SmolLM and Qwen3.

Pre-RMSNorm blocks (Zhang & Sennrich 2019, arXiv:1910.07467), rotary positions (Su et al. 2021,
arXiv:2104.09864), grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245), SwiGLU (Shazeer
2020, arXiv:2002.05202) and no biases, as the transformers library's `LlamaForCausalLM` computes it
(Touvron et al. 2023, arXiv:2302.13971); with norms of queries and keys as `Qwen3ForCausalLM` does.
Shapes: B sequences, T tokens, d width, f hidden width of the feed-forward.

Norm, rotation and SwiGLU are autograd functions of their own, because composed of torch's
operations they would save two to three times as much for their backward.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from barnraise.models.weights import KeyValueCache, ModelFunctions, Weights, attend
from barnraise.spec.model_dimensions import ModelDimensions


class LlamaFunctions(ModelFunctions):
    """The functions of Llama's architecture; see `ModelFunctions`."""

    def embed(self, weights: Weights, tokens: Tensor, begin: int = 0) -> Tensor:
        """Return the rows of tokens. Positions are in the blocks."""
        return F.embedding(tokens, weights["token"])

    def norm(self, weights: Weights, name: str, x: Tensor, model: ModelDimensions) -> Tensor:
        """Apply an RMSNorm."""
        return _apply(RMSNorm, x, weights[f"{name}.weight"].to(x.dtype), model.norm_epsilon)

    def attention(
        self, weights: Weights, x: Tensor, model: ModelDimensions, cache: KeyValueCache | None
    ) -> Tensor:
        """Compute attention with rotated queries and keys, which are normed before with Qwen3."""
        b, t, _ = x.shape
        qkv = F.linear(x, weights["qkv.weight"]).view(b, t, -1, model.head_width)
        cosines, sines = _rotation(model, cache.length if cache else 0, qkv)
        grouped = model.grouped_heads
        sizes = (model.heads, grouped, grouped)
        if model.qk_norm:
            query, key, value = qkv.split(sizes, dim=2)
            query = self.norm(weights, "query_norm", query, model)
            query = _apply(Rotation, query, cosines, sines, model.heads)
            key = self.norm(weights, "key_norm", key, model)
            key = _apply(Rotation, key, cosines, sines, grouped)
        else:
            qkv = _apply(Rotation, qkv, cosines, sines, sum(sizes[:2]))
            query, key, value = qkv.split(sizes, dim=2)
        mixed = attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), cache)
        return F.linear(mixed.transpose(1, 2).flatten(2), weights["out.weight"])

    def expand(self, weights: Weights, x: Tensor) -> Tensor:
        """Compute SwiGLU of the first product."""
        return _apply(SwiGLU, F.linear(x, weights["gate_up.weight"]))


def _rotation(model: ModelDimensions, begin: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles of T positions from `begin` on: [T, 1, width / 2]."""
    steps = torch.arange(0, model.head_width, 2, device=like.device, dtype=torch.float32)
    frequencies = 1.0 / model.rope_theta ** (steps / model.head_width)
    positions = torch.arange(begin, begin + like.shape[1], device=like.device)
    angles = torch.outer(positions.float(), frequencies)[:, None]
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    output = function.apply(*arguments)
    assert isinstance(output, Tensor)
    return output


class RMSNorm(torch.autograd.Function):
    """x / √(mean(x²) + ε) · scale, computed in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, epsilon: float) -> Tensor:
        """Return the norm of x [..., n], in its type."""
        wide = x.float()
        inverse = wide.square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, scale, inverse)
        return (wide * inverse).to(x.dtype).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> tuple[Tensor, Tensor, None]:
        """Return the gradients by x and by the scale."""
        (dy,) = outputs
        x, scale, inverse = ctx.saved_tensors
        normal = x * inverse  # fp32 in any case
        dx = dy * normal
        dscale = dx.flatten(0, -2).sum(0)
        mean = dx.mul_(scale).mean(-1, keepdim=True)
        dx.copy_(dy).mul_(scale)
        dx.sub_(normal.mul_(mean)).mul_(inverse)
        return dx.to(x.dtype), dscale.to(scale.dtype), None


class Rotation(torch.autograd.Function):
    """Rotary positions: element i and element i + width / 2 of a head turn by an angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor, heads: int) -> Tensor:
        """Return x [B, T, any, width] with the first `heads` rotated."""
        ctx.save_for_backward(cosines, sines)
        ctx.heads = heads
        return _turn(x, cosines, sines, heads)

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> tuple[Tensor, None, None, None]:
        """Return the gradient by x: the gradient turned back."""
        cosines, sines = ctx.saved_tensors
        return _turn(outputs[0], cosines, -sines, ctx.heads), None, None, None


def _turn(x: Tensor, cosines: Tensor, sines: Tensor, heads: int) -> Tensor:
    turned = x.clone(memory_format=torch.contiguous_format)
    old_left, old_right = x[:, :, :heads].chunk(2, -1)
    left, right = turned[:, :, :heads].chunk(2, -1)
    left.mul_(cosines).addcmul_(old_right, sines, value=-1)
    right.mul_(cosines).addcmul_(old_left, sines)
    return turned


class SwiGLU(torch.autograd.Function):
    """SiLU(gate) · up, of a tensor that holds both."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        """Return the hidden values: [..., 2 f] → [..., f]."""
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Tensor:
        """Return the gradient by both, in one tensor."""
        (dy,) = outputs
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        gradient = torch.empty_like(gate_up)
        by_gate, by_up = gradient.chunk(2, -1)
        torch.ops.aten.silu_backward.grad_input(dy * up, gate, grad_input=by_gate)
        torch.mul(F.silu(gate), dy, out=by_up)
        return gradient
