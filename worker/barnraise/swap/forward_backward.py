"""Forward and backward of a group of blocks over all micro-batches, with recomputation."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from barnraise.models.functions import functions_of
from barnraise.models.weights import Weights, block_end
from barnraise.planning.plan import Plan
from barnraise.swap.activations import Activations, gradient_key
from barnraise.swap.fused_loss import Head, head_step
from barnraise.swap.given_gradient import run_backward
from barnraise.swap.leaves import Leaves

# Tensor cores load rows that begin on 16 bytes; cuBLAS is fastest with rows of whole 128.
VOCABULARY_MULTIPLE = 64


class BlockEnd(torch.autograd.Function):
    """The end of a block, whose backward needs none of its results.

    Where the output is not `wanted`, it is not computed (a twelfth of a step's products), and a
    tensor without memory stands for it. The last matrix's gradient is added in place.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, expanded: Tensor, leaves: Leaves, wanted: bool) -> Tensor:
        """Return the block's output, [B, T, d], if it is wanted."""
        ctx.save_for_backward(expanded)
        ctx.leaves = leaves
        if not wanted:
            return x.new_empty(1).expand_as(x)
        return block_end(leaves.weights, x, expanded)

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> tuple[Tensor, Tensor, None, None]:
        """Return the gradients by both inputs; add those of the weights to the leaves' sums."""
        (dy,) = outputs
        (expanded,) = ctx.saved_tensors
        leaves: Leaves = ctx.leaves
        weight = leaves.weights["down.weight"]
        rows = dy.reshape(-1, dy.shape[-1])
        if "down.bias" in leaves.weights:
            leaves.add_vector_gradient("down.bias", rows.sum(0))
        rows = rows.to(weight.dtype)
        leaves.add_matrix_gradient("down.weight", rows, expanded.reshape(-1, expanded.shape[-1]))
        return dy, (rows @ weight).view_as(expanded), None, None


class ForwardBackward:
    """One step's forward and backward.

    Attributes:
        losses: share · loss of each micro-batch; they stay on the device.
        norms: the norm of each fragment's gradient, filled in by the executor; they stay on the
            device.
        is_interrupted: whether `should_stop` has ended the step. What it has computed is worthless,
            and nothing more is computed.
    """

    def __init__(
        self,
        plan: Plan,
        batches: Sequence[Tensor],
        shares: Sequence[float],
        activations: Activations,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepare a step.

        Args:
            plan: how groups are formed and what is recomputed.
            batches: micro-batches on the device, int64 [sequences, context + 1] each.
            shares: each micro-batch's share of the step's tokens.
            activations: stores the inputs of blocks.
            should_stop: called before each micro-batch's pass through a group; ends the step.
        """
        self._should_stop = should_stop
        self.is_interrupted = False
        self._plan, self._model = plan, plan.model
        functions = functions_of(plan.model)
        self._block, self._block_start = functions.block, functions.block_start
        self._batches, self._shares = batches, shares
        self._activations = activations
        self.losses: list[Tensor] = []
        self.norms: dict[int, Tensor] = {}
        self._graphs: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._first_retained = plan.first_retained
        group_starts = {group[0] for group in plan.backward_groups}
        # Blocks whose inputs are stored; the inputs of the others are recomputed.
        self._checkpoints = {
            i for i in plan.blocks if plan.kept_inputs == "block" or i in group_starts
        }

    def check_interruption(self) -> bool:
        """Return whether the step has been interrupted, or is now."""
        self.is_interrupted = self.is_interrupted or self._should_stop()
        return self.is_interrupted

    def interrupt(self) -> None:
        """Interrupt the step after its computation: it must not count."""
        self.is_interrupted = True

    def has_ended_early(self) -> bool:
        """Return whether the step has been interrupted: what other devices' passes ask."""
        return self.is_interrupted

    def finish(self) -> None:
        """End the step: wait until no copy uses memory that is about to be freed."""
        self._activations.finish()

    def _autocast_context(self) -> contextlib.AbstractContextManager:
        if self._plan.dtype == "bfloat16":
            return torch.autocast(torch.device(self._plan.device).type, torch.bfloat16)
        return contextlib.nullcontext()

    def _forward_block(self, leaves: Leaves, x: Tensor) -> Tensor:
        with self._autocast_context():
            return self._block(leaves.weights, x, self._model)

    def _build_graph(self, leaves: Leaves, leaf: Tensor, wanted: bool) -> Tensor:
        """Return what a block's backward starts from; it holds the output only if `wanted`."""
        with torch.enable_grad(), self._autocast_context():
            x, expanded = self._block_start(leaves.weights, leaf, self._model)
            output = BlockEnd.apply(x, expanded, leaves, wanted)
        assert isinstance(output, Tensor)
        return output

    def embed(self, embedding: Leaves) -> None:
        """Compute the first block's inputs."""
        if self.check_interruption():
            return
        functions = functions_of(self._model)
        with torch.no_grad():
            for m, batch in enumerate(self._batches):
                x = functions.embed(embedding.weights, batch[:, :-1])
                self._activations.send(1, m, x.float())

    def forward(self, group: Sequence[int], leaves: Sequence[Leaves]) -> None:
        """Compute all micro-batches through a group; store the inputs that backward needs."""
        for m in range(len(self._batches)):
            if self.check_interruption():
                return
            x = self._activations.receive(group[0], m)
            for i, block_leaves in zip(group, leaves, strict=True):
                if i >= self._first_retained:
                    leaf = x.detach().requires_grad_()
                    y = self._build_graph(block_leaves, leaf, wanted=True)
                    self._graphs[i, m] = leaf, y
                    x = y.detach()
                    continue
                if i in self._checkpoints:
                    self._activations.store(i, m, x)
                with torch.no_grad():
                    x = self._forward_block(block_leaves, x)
            self._activations.send(group[-1] + 1, m, x)

    def head(self, final: Leaves, embedding: Leaves, token_gradient: Tensor) -> None:
        """Compute the losses, and the gradients by the last block's outputs.

        Adds to the gradients of `final`, and to the output table's, fp32 [V, d].
        """
        fragment, name = self._model.head_table
        leaves = final if fragment else embedding
        token = leaves.weights[name]
        if token.dtype != torch.float32 and token.device.type != "cpu":
            token = leaves.padded_rows(name, VOCABULARY_MULTIPLE)
        head = Head(self._model, final.weights, token)
        for m, (batch, share) in enumerate(zip(self._batches, self._shares, strict=True)):
            if self.check_interruption():
                return
            x = self._activations.receive(self._plan.last_fragment, m)
            with self._autocast_context():
                loss, dx = head_step(head, x, batch[:, 1:], share, token_gradient)
            self.losses.append(loss)
            self._activations.send(gradient_key(self._plan.last_fragment), m, dx)
            del x, dx
        self._activations.prefetch()

    def backward(self, group: Sequence[int], leaves: Sequence[Leaves]) -> None:
        """Add to the gradients of a group's leaves, micro-batches in ascending order."""
        leaves_of = dict(zip(group, leaves, strict=True))
        if not self._plan.ends and group[-1] == self._plan.blocks[-1]:  # there is no head here
            self._activations.prefetch()
        for m in range(len(self._batches)):
            if self.check_interruption():
                return
            inputs = self._recompute_inputs(group, leaves_of, m)
            dy = self._activations.receive(gradient_key(group[-1] + 1), m)
            for i in reversed(group):
                if i >= self._first_retained:
                    leaf, y = self._graphs.pop((i, m))
                else:
                    leaf = inputs.pop(i).detach().requires_grad_()
                    y = self._build_graph(leaves_of[i], leaf, wanted=False)
                run_backward(y, dy)
                assert leaf.grad is not None
                dy = leaf.grad
                del leaf, y
            self._activations.send(gradient_key(group[0]), m, dy)

    def _recompute_inputs(
        self, group: Sequence[int], leaves_of: dict[int, Leaves], m: int
    ) -> dict[int, Tensor]:
        """Return the inputs of the group's recomputed blocks: stored ones, or recomputed too."""
        recomputed = [i for i in group if i < self._first_retained]
        inputs: dict[int, Tensor] = {}
        for i in recomputed:
            if i in self._checkpoints:
                inputs[i] = self._activations.pop(i, m)
            else:
                with torch.no_grad():
                    inputs[i] = self._forward_block(leaves_of[i - 1], inputs[i - 1])
        return inputs

    def embed_backward(self, gradient: Weights, token_gradient: Tensor) -> None:
        """Add to the embedding's gradients, by name, and to them the head's of a tied table.

        `token_gradient` is what the head has added up, fp32 [V, d].
        """
        if self.check_interruption():
            return
        with torch.no_grad():
            for m, batch in enumerate(self._batches):
                dx, tokens = self._activations.receive(gradient_key(1), m), batch[:, :-1]
                if "position" in gradient:
                    gradient["position"][: tokens.shape[1]].add_(dx.sum(0))
                rows = dx.reshape(-1, dx.shape[-1])
                if dx.device.type == "cpu":
                    gradient["token"].index_add_(0, tokens.reshape(-1), rows)
                else:  # on a GPU index_add_ sums in random order by atomics; this kernel sorts
                    gradient["token"].index_put_((tokens.reshape(-1),), rows, accumulate=True)
            if self._model.tied_head:
                gradient["token"].add_(token_gradient)
