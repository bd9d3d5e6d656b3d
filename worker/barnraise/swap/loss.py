"""The tied head and its cross-entropy in one, a slice of rows at a time, gradient included.

Logits are the largest tensor of a step (tokens × vocabulary). Here a slice of them is made, turned into its gradient in
place, multiplied into the gradients of the stream and of the embedding, and forgotten: memory stays free, and a slice
fits a cache where the vocabulary lets it (the idea of Liger's and Apple's "cut" cross-entropy, in plain torch).
"""

from typing import Any

import torch
from torch import Tensor

from barnraise.model import Weights, norm

CPU_SLICE = 1 << 20  # logits at a time: 4 MiB…
GPU_SLICE = 1 << 26
ROWS = 256  # …but never fewer tokens: each slice reads the whole embedding, and with 50,257 × 768 of it that decides


def head_loss(final: Weights, embedding: Weights, x: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, nats a token: fp32 [B, T, d], int64 [B, T] → []. Differentiable in the weights and x."""
    x = norm(final, "norm", x)
    return _TiedCrossEntropy.apply(x.reshape(-1, x.shape[-1]), embedding["token"], targets.reshape(-1))


class _TiedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, targets: Tensor) -> Tensor:
        rows, vocabulary = x.shape[0], token.shape[0]
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        at_once = max(ROWS, (CPU_SLICE if x.device.type == "cpu" else GPU_SLICE) // vocabulary)
        chances = x.new_empty(rows)  # given to the right token
        dx = torch.empty_like(x) if wanted else None
        dtoken = torch.zeros_like(token) if wanted else None
        for begin in range(0, rows, at_once):
            part, right = x[begin : begin + at_once], targets[begin : begin + at_once, None]
            slab = torch.softmax(part @ token.t(), dim=-1)
            chances[begin : begin + at_once] = slab.gather(1, right)[:, 0]
            if wanted:
                slab.scatter_add_(1, right, slab.new_full((1, 1), -1.0).expand_as(right)).div_(rows)
                torch.mm(slab, token, out=dx[begin : begin + at_once])
                dtoken.addmm_(slab.t(), part)
        ctx.gradients = dx, dtoken
        return chances.clamp_min_(torch.finfo(x.dtype).tiny).log_().mean().neg_()  # at most 87 nats; nan stays nan

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, Tensor, None]:
        dx, dtoken = ctx.gradients
        ctx.gradients = None  # each is used once, and in place
        return dx.mul_(outer), dtoken.mul_(outer), None
