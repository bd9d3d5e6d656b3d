"""The tied head and its cross-entropy in one, a slice of rows at a time, with gradients.

Logits are the largest tensor of a step (tokens × vocabulary). Here a slice of them is computed,
turned into its gradient in place, multiplied into the gradients of the stream and of the table, and
discarded. So memory stays free, and a slice fits a cache if the vocabulary permits. The idea is
that of Liger-Kernel (arXiv:2410.10989) and of Apple's Cut Cross-Entropy (arXiv:2411.09009), here in
plain torch.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from barnraise.models.functions import functions_of
from barnraise.models.weights import Weights
from barnraise.planning.cost_model import loss_rows, loss_words
from barnraise.spec import ModelSpec
from barnraise.swap.given_gradient import run_backward

# The memory model counts with the same slices. A slice has LOSS_ROWS tokens at least: each slice
# reads the whole table, whose 50,257 × 768 elements outweigh a few logits. Gradients of the table
# that are not fp32 need an fp32 copy on a CPU, so that a few rows of them are computed at a time.


@dataclass(frozen=True)
class Head:
    """What turns the last block's outputs into logits.

    Attributes:
        model: the model.
        final: the weights of the final norm; leaves, where their gradients are wanted.
        table: the output table [V, d]; or with more rows, which stand for no words, so that a GPU's
            products have aligned rows.
    """

    model: ModelSpec
    final: Weights
    table: Tensor

    def norm(self, x: Tensor) -> Tensor:
        """Apply the final norm."""
        return functions_of(self.model).norm(self.final, "norm", x, self.model)


@dataclass(frozen=True)
class _Gradients:
    """The gradients of share · mean loss: `x` [n, d] is filled in, `token` fp32 [V, d] added to."""

    x: Tensor
    token: Tensor
    share: float


def head_loss(head: Head, x: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy, nats a token, without gradients.

    Args:
        head: the final norm and the output table.
        x: the last block's outputs, [B, T, d].
        targets: int64 [B, T].
    """
    with torch.no_grad():
        hidden = head.norm(x)
        return _sweep(hidden.reshape(-1, hidden.shape[-1]), head.table, targets.reshape(-1), None)


def head_step(
    head: Head, x: Tensor, targets: Tensor, share: float, token_gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute share · mean cross-entropy and its gradients.

    Args:
        head: the final norm and the output table. The gradients of the norm's leaves are added to
            their `.grad`.
        x: the last block's outputs, [B, T, d].
        targets: int64 [B, T].
        share: the micro-batch's share of the step's tokens.
        token_gradient: the table's gradient, fp32 [V, d], added to.

    Returns:
        The loss [] and its gradient by x [B, T, d].
    """
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        hidden = head.norm(leaf)
    flat = hidden.detach().reshape(-1, hidden.shape[-1])
    gradients = _Gradients(torch.empty_like(flat), token_gradient, share)
    with torch.no_grad():
        loss = _sweep(flat, head.table, targets.reshape(-1), gradients)
    run_backward(hidden, gradients.x.view_as(hidden))
    assert leaf.grad is not None
    return loss.mul_(share), leaf.grad


class FusedLoss(torch.autograd.Function):
    """The mean cross-entropy of rows as a part of autograd's graph: its gradients are ready."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, targets: Tensor) -> Tensor:
        """Return the loss [] of rows x [n, d] with a table [V, d] and targets, int64 [n]."""
        by_table = torch.zeros(table.shape, dtype=torch.float32, device=table.device)
        gradients = _Gradients(torch.empty_like(x), by_table, 1.0)
        loss = _sweep(x, table, targets, gradients)
        ctx.save_for_backward(gradients.x, by_table)
        ctx.dtype = table.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> tuple[Tensor, Tensor, None]:
        """Return the gradients by the rows and by the table."""
        by_x, by_table = ctx.saved_tensors
        return by_x.mul_(outputs[0]), by_table.mul_(outputs[0]).to(ctx.dtype), None


def _sweep(x: Tensor, token: Tensor, targets: Tensor, gradients: _Gradients | None) -> Tensor:
    """Return the mean cross-entropy of rows x [n, d] with targets [n], slice by slice."""
    rows = x.shape[0]
    vocabulary = (token if gradients is None else gradients.token).shape[0]
    slice_rows = loss_rows(vocabulary, x.device.type, gradients is not None)
    probabilities = torch.empty(rows, dtype=torch.float32, device=x.device)  # of the targets
    for begin in range(0, rows, slice_rows):
        part = x[begin : begin + slice_rows].to(token.dtype)
        target = targets[begin : begin + slice_rows, None]
        logits = part @ token.t()
        slab = torch.softmax(logits[:, :vocabulary], dim=-1, dtype=torch.float32)
        del logits
        probabilities[begin : begin + slice_rows] = slab.gather(1, target)[:, 0]
        if gradients is not None:
            slab.scatter_add_(1, target, slab.new_full((1, 1), -1.0).expand_as(target))
            slab.mul_(gradients.share / rows)
            slab = _narrow(slab, token)  # the logits' gradient; frees the fp32 copy
            _add_gradients(gradients, slab, part, token, begin)
    # The clamp bounds the loss at 87 nats; nan stays nan.
    return probabilities.clamp_min_(torch.finfo(torch.float32).tiny).log_().mean().neg_()


def _narrow(slab: Tensor, token: Tensor) -> Tensor:
    """Return the logits' gradient in the table's type, with zeros for rows that are no words."""
    rows, vocabulary = slab.shape
    if len(token) == vocabulary:
        return slab.to(token.dtype)
    narrow = torch.empty(rows, len(token), dtype=token.dtype, device=token.device)
    narrow[:, :vocabulary].copy_(slab)
    narrow[:, vocabulary:].zero_()
    return narrow


def _add_gradients(
    gradients: _Gradients, dlogits: Tensor, part: Tensor, token: Tensor, begin: int
) -> None:
    """Multiply a slice of logits' gradients into those of its rows and of the table."""
    rows = slice(begin, begin + len(part))
    if token.dtype == torch.float32:
        torch.mm(dlogits, token, out=gradients.x[rows])
        gradients.token.addmm_(dlogits.t(), part)
        return
    gradients.x[rows] = dlogits @ token
    vocabulary, width = gradients.token.shape
    count = loss_words(width, token.device.type)
    for first in range(0, vocabulary, count):
        words = slice(first, min(first + count, vocabulary))
        gradients.token[words].add_(dlogits[:, words].t() @ part)
