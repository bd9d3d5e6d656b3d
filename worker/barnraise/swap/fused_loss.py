"""The tied head and its cross-entropy in one, a slice of rows at a time, gradient included.

Logits are the largest tensor of a step (tokens × vocabulary). Here a slice of them is made, turned into its gradient in
place, multiplied into the gradients of the stream and of the table, and forgotten: memory stays free, and a slice fits
a cache where the vocabulary lets it (the idea of Liger's and Apple's "cut" cross-entropy, in plain torch).
"""

import torch
from torch import Tensor

from barnraise.models.gpt2 import Weights, norm

CPU_SLICE = 1 << 20  # logits at a time: 4 MiB…
GPU_SLICE = 1 << 26
WORDS = (
    1 << 13
)  # whose gradients are made at a time where they are not fp32: they need a copy that is
ROWS = 256  # …but never fewer tokens: each slice reads the whole table, and with 50,257 × 768 of it that decides


def head_loss(final: Weights, token: Tensor, x: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, nats a token: [B, T, d], int64 [B, T] → []. No gradient."""
    with torch.no_grad():
        hidden = norm(final, "norm", x)
        return _sweep(hidden.reshape(-1, hidden.shape[-1]), token, targets.reshape(-1), None, None)


def head_step(
    final: Weights, token: Tensor, x: Tensor, targets: Tensor, share: float, token_gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """(share · mean cross-entropy [], its gradient by x [B, T, d]). Adds the gradients of the final norm to its leaves'
    .grad and that of the table to `token_gradient` (fp32 [V, d])."""
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        hidden = norm(final, "norm", leaf)
    flat = hidden.detach().reshape(-1, hidden.shape[-1])
    gradient = torch.empty_like(flat)
    with torch.no_grad():
        loss = _sweep(flat, token, targets.reshape(-1), gradient, token_gradient, share)
    hidden.backward(gradient.view_as(hidden))
    return loss.mul_(share), leaf.grad


def _sweep(
    x: Tensor,
    token: Tensor,
    targets: Tensor,
    dx: Tensor | None,
    dtoken: Tensor | None,
    share: float = 1.0,
) -> Tensor:
    """Mean cross-entropy of rows x [n, d]; fills dx and adds to dtoken, both for share · mean."""
    rows, vocabulary = x.shape[0], token.shape[0]
    at_once = max(ROWS, (CPU_SLICE if x.device.type == "cpu" else GPU_SLICE) // vocabulary)
    chances = torch.empty(rows, dtype=torch.float32, device=x.device)  # given to the right token
    for begin in range(0, rows, at_once):
        part, right = (
            x[begin : begin + at_once].to(token.dtype),
            targets[begin : begin + at_once, None],
        )
        slab = torch.softmax(part @ token.t(), dim=-1, dtype=torch.float32)
        chances[begin : begin + at_once] = slab.gather(1, right)[:, 0]
        if dx is not None:
            slab.scatter_add_(1, right, slab.new_full((1, 1), -1.0).expand_as(right)).mul_(
                share / rows
            )
            if token.dtype == torch.float32:
                torch.mm(slab, token, out=dx[begin : begin + at_once])
                dtoken.addmm_(slab.t(), part)
            else:
                slab = slab.to(token.dtype)
                dx[begin : begin + at_once] = slab @ token
                for first in range(0, vocabulary, WORDS):
                    words = slice(first, first + WORDS)
                    dtoken[words].add_(slab[:, words].t() @ part)
    return (
        chances.clamp_min_(torch.finfo(torch.float32).tiny).log_().mean().neg_()
    )  # at most 87 nats; nan stays nan
