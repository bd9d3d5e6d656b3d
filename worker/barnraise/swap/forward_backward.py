"""Forward and backward of a group of blocks, all micro-batches, and where their inputs wait in between."""

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from barnraise.models import gpt2 as gpt
from barnraise.planning.plan import Plan
from barnraise.swap.activations import Activations
from barnraise.swap.arena import Leaves
from barnraise.swap.fused_loss import head_step

STREAM = -1  # the boundary that gradients travel in, on their way down


class BlockEnd(torch.autograd.Function):
    """The end of a block for its backward, which needs none of its results: where the stream is not `wanted`, it is not
    computed (a twelfth of a step's products), and there is no memory behind what stands for it. The last matrix's
    gradient is added in place."""

    @staticmethod
    def forward(ctx, x: Tensor, wide: Tensor, leaves: Leaves, wanted: bool) -> Tensor:
        ctx.save_for_backward(wide)
        ctx.leaves = leaves
        return gpt.block_end(leaves.weights, x, wide) if wanted else x.new_empty(1).expand_as(x)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (wide,), leaves = ctx.saved_tensors, ctx.leaves
        weight, rows = leaves.weights["down.weight"], dy.reshape(-1, dy.shape[-1])
        leaves.add_vector_gradient("down.bias", rows.sum(0))
        rows = rows.to(weight.dtype)
        leaves.add_matrix_gradient("down.weight", rows, wide.reshape(-1, wide.shape[-1]))
        return dy, (rows @ weight).view_as(wide), None, None


class ForwardBackward:
    """One step's activations and figures. `losses`: share · loss of each micro-batch, `norms`: of each fragment's
    gradient; both stay on the device."""

    def __init__(
        self,
        plan: Plan,
        batches: Sequence[Tensor],
        shares: Sequence[float],
        boundaries: Activations,
    ):
        """`batches`: int64 [sequences, context + 1] each, on the device."""
        self.plan, self.heads = plan, plan.model.heads
        self.batches, self.shares = batches, shares
        self.activations = boundaries
        self.losses: list[Tensor] = []
        self.norms: dict[int, Tensor] = {}
        self._graphs: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._first_retained = plan.last - plan.retained
        starts = {group[0] for group in plan.backward_groups}
        self._kept = {i for i in plan.blocks if plan.kept_inputs == "block" or i in starts}

    def _precision(self) -> contextlib.AbstractContextManager:
        if self.plan.dtype == "bfloat16":
            return torch.autocast(self.plan.device, torch.bfloat16)
        return contextlib.nullcontext()

    def _block(self, leaves: Leaves, x: Tensor) -> Tensor:
        with self._precision():
            return gpt.block(leaves.weights, x, self.heads)

    def _graph(self, leaves: Leaves, leaf: Tensor, wanted: bool) -> Tensor:
        """What a block's backward starts from; its stream only if `wanted`."""
        with torch.enable_grad(), self._precision():
            return BlockEnd.apply(
                *gpt.block_start(leaves.weights, leaf, self.heads), leaves, wanted
            )

    def embed(self, embedding: Leaves) -> None:
        with torch.no_grad():
            for m, batch in enumerate(self.batches):
                self.activations.store(1, m, gpt.embed(embedding.weights, batch[:, :-1]).float())

    def forward(self, group: Sequence[int], leaves: Sequence[Leaves]) -> None:
        for m in range(len(self.batches)):
            first = group[0]
            keeps = first in self._kept and first < self._first_retained
            x = self.activations.get(first, m) if keeps else self.activations.pop(first, m)
            for i, mine in zip(group, leaves, strict=True):
                if i >= self._first_retained:
                    leaf = x.detach().requires_grad_()
                    y = self._graph(mine, leaf, wanted=True)
                    self._graphs[i, m] = leaf, y
                    x = y.detach()
                    continue
                if i != first and i in self._kept:
                    self.activations.store(i, m, x)
                with torch.no_grad():
                    x = self._block(mine, x)
            self.activations.store(group[-1] + 1, m, x)

    def head(self, final: Leaves, embedding: Leaves, token_gradient: Tensor) -> None:
        """`token_gradient`: fp32 [V, d], added to."""
        for m, (batch, share) in enumerate(zip(self.batches, self.shares, strict=True)):
            x = self.activations.pop(self.plan.last, m)
            with self._precision():
                loss, dx = head_step(
                    final.weights,
                    embedding.weights["token"],
                    x,
                    batch[:, 1:],
                    share,
                    token_gradient,
                )
            self.losses.append(loss)
            self.activations.store(STREAM, m, dx)

    def backward(self, group: Sequence[int], leaves: Sequence[Leaves]) -> None:
        """Adds to the leaves' gradients, micro-batch after micro-batch in ascending order."""
        of = dict(zip(group, leaves, strict=True))
        for m in range(len(self.batches)):
            inputs = self._inputs(group, of, m)
            dy = self.activations.pop(STREAM, m)
            for i in reversed(group):
                if i >= self._first_retained:
                    leaf, y = self._graphs.pop((i, m))
                else:
                    leaf = inputs.pop(i).detach().requires_grad_()
                    y = self._graph(of[i], leaf, wanted=False)
                y.backward(dy)
                dy = leaf.grad
                del leaf, y
            self.activations.store(STREAM, m, dy)

    def _inputs(self, group: Sequence[int], of: dict[int, Leaves], m: int) -> dict[int, Tensor]:
        """Inputs of the group's blocks that compute again: kept ones, or from the group's first on."""
        again = [i for i in group if i < self._first_retained]
        found: dict[int, Tensor] = {}
        for i in again:
            if i in self._kept:
                found[i] = self.activations.pop(i, m)
            else:
                with torch.no_grad():
                    found[i] = self._block(of[i - 1], found[i - 1])
        return found

    def embed_backward(self, gradient: gpt.Weights, token_gradient: Tensor) -> None:
        """Adds to the embedding's gradient, and to its table's what the head added up (the two are tied)."""
        with torch.no_grad():
            for m, batch in enumerate(self.batches):
                dx, tokens = self.activations.pop(STREAM, m), batch[:, :-1]
                gradient["position"][: tokens.shape[1]].add_(dx.sum(0))
                rows = dx.reshape(-1, dx.shape[-1])
                if dx.device.type == "cpu":
                    gradient["token"].index_add_(0, tokens.reshape(-1), rows)
                else:  # index_add_ there is a race of atomics; this sorts
                    count = gradient["token"].shape[0]
                    gradient["token"].add_(
                        torch.ops.aten.embedding_dense_backward(
                            rows, tokens.reshape(-1), count, -1, False
                        )
                    )
            gradient["token"].add_(token_gradient)
