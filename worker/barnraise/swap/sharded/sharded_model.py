"""The model whose weights torch's FSDP2 shards, computed by the functions of `barnraise.models`.

Each block and the two ends are modules of `fully_shard` (Zhao et al. 2023, arXiv:2304.11277): their
weights are DTensors, whole only while they compute. The head's loss is the fused one.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from barnraise.models.functions import functions_of
from barnraise.models.weights import Weights
from barnraise.spec import Fragment, ModelSpec
from barnraise.swap.fused_loss import FusedLoss
from barnraise.swap.sharded.tensor_split import TensorParallelism, cut_part, narrow_model

SHARD, TENSOR = "shard", "tensor"  # the dimensions of the mesh of ranks


@dataclass(frozen=True)
class ShardedWeight:
    """One tensor of a fragment, as a rank has it.

    Attributes:
        fragment: the fragment's layout.
        number: the tensor's place in it.
        parameter: the rank's shard of it.
    """

    fragment: Fragment
    number: int
    parameter: nn.Parameter

    @property
    def decays(self) -> bool:
        """Whether AdamW decays it: matrices and embeddings, not norms and biases."""
        return len(self.fragment.slots[self.number].shape) >= 2

    @property
    def shard(self) -> Tensor:
        """Return this rank's part, fp32 of any shape, which may be empty."""
        assert isinstance(self.parameter, DTensor)
        return self.parameter.to_local().detach()

    @property
    def gradient(self) -> Tensor | None:
        """Return the gradient by this rank's part, fp32."""
        gradient = self.parameter.grad
        return gradient.to_local() if isinstance(gradient, DTensor) else None


class FragmentWeights(nn.Module):
    """A fragment's tensors as parameters, without memory until they are sharded."""

    def __init__(self, fragment: Fragment, tensor_ranks: int) -> None:
        """Register the parts of the tensors that one of several ranks computes with."""
        super().__init__()
        self.fragment = fragment
        for slot in fragment.slots:
            whole = torch.empty(slot.shape, device="meta")
            part = cut_part(fragment, slot, whole, 0, tensor_ranks)
            self.register_parameter(_attribute(slot.name), nn.Parameter(part.contiguous()))

    def by_name(self) -> Weights:
        """Return the tensors by their names in the fragment, whole while the module computes."""
        return {slot.name: getattr(self, _attribute(slot.name)) for slot in self.fragment.slots}


def _attribute(name: str) -> str:
    return name.replace(".", "_")


class ShardedBlock(FragmentWeights):
    """One block."""

    def __init__(
        self,
        model: ModelSpec,
        fragment: Fragment,
        tensor: TensorParallelism | None,
        tensor_ranks: int,
        retains: bool,
    ) -> None:
        """Describe a block.

        Args:
            model: the whole model.
            fragment: the block's layout.
            tensor: what it computes with on several tensor-parallel ranks.
            tensor_ranks: their number.
            retains: whether its activations stay until backward; else they are computed again.
        """
        super().__init__(fragment, tensor_ranks)
        self._functions = functions_of(model)
        self._model, self._tensor = narrow_model(model, tensor_ranks), tensor
        self._retains = retains

    def forward(self, x: Tensor) -> Tensor:
        """Compute the block: fp32 [B, T, d] → [B, T, d]."""
        compute = self._compute if self._tensor is None else self._compute_part
        if self._retains:
            return compute(x)
        output = checkpoint(compute, x, use_reentrant=False)
        assert isinstance(output, Tensor)
        return output

    def _compute(self, x: Tensor) -> Tensor:
        return self._functions.block(self.by_name(), x, self._model)

    def _compute_part(self, x: Tensor) -> Tensor:
        """Compute this rank's heads and hidden values, and add up those of all ranks."""
        tensor, functions, model = self._tensor, self._functions, self._model
        assert tensor is not None
        weights = tensor.prepare_weights(self.by_name())
        normed = tensor.copy_to_ranks(functions.norm(weights, "norm1", x, model))
        x = x + tensor.sum_over_ranks(functions.attention(weights, normed, model, None))
        normed = tensor.copy_to_ranks(functions.norm(weights, "norm2", x, model))
        expanded = functions.expand(weights, normed)
        down = F.linear(expanded, weights["down.weight"], weights.get("down.bias"))
        return x + tensor.sum_over_ranks(down)


class ShardedModel(nn.Module):
    """The whole model of one rank.

    Attributes:
        dimensions: the model's.
        weights: all tensors of all fragments, in order.
    """

    def __init__(
        self, model: ModelSpec, mesh: DeviceMesh, dtype: str, retained_blocks: int
    ) -> None:
        """Lay out and shard a model of zeros.

        Args:
            model: the model's dimensions.
            mesh: of the ranks, [SHARD, TENSOR].
            dtype: the type of the products, "float32" or "bfloat16".
            retained_blocks: how many of the top blocks retain their activations.
        """
        super().__init__()
        self.dimensions, self._dtype, self._device = model, dtype, mesh.device_type
        first, *blocks, last = model.fragments()
        tensor_ranks = mesh[TENSOR].size()
        tensor = TensorParallelism(mesh[TENSOR]) if tensor_ranks > 1 else None
        self._embedding, self._final = FragmentWeights(first, 1), FragmentWeights(last, 1)
        first_retained = model.layers + 1 - retained_blocks
        self._blocks = nn.ModuleList(
            ShardedBlock(model, block, tensor, tensor_ranks, block.index >= first_retained)
            for block in blocks
        )
        narrow = torch.bfloat16 if dtype == "bfloat16" else None
        policy = MixedPrecisionPolicy(narrow, torch.float32, cast_forward_inputs=False)
        for block in self._blocks:
            fully_shard(block, mesh=mesh[SHARD], mp_policy=policy)
        fully_shard(self, mesh=mesh[SHARD], mp_policy=policy)
        self.to_empty(device=torch.device(mesh.device_type))
        self.weights = [
            ShardedWeight(module.fragment, number, parameter)
            for module in (self._embedding, *self._blocks, self._final)
            if isinstance(module, FragmentWeights)
            for number, parameter in enumerate(module.parameters())
        ]
        for weight in self.weights:
            weight.shard.zero_()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of int64 [B, T + 1] tokens, in nats a token."""
        functions = functions_of(self.dimensions)
        with self._autocast_context():
            embedding, final = self._embedding.by_name(), self._final.by_name()
            x = functions.embed(embedding, tokens[:, :-1]).float()
            for block in self._blocks:
                x = block(x)
            hidden = functions.norm(final, "norm", x, self.dimensions)
            fragment, name = self.dimensions.head_table
            table = (final if fragment else embedding)[name]
            targets = tokens[:, 1:].reshape(-1)
            loss = FusedLoss.apply(hidden.reshape(-1, hidden.shape[-1]), table, targets)
        assert isinstance(loss, Tensor)
        return loss

    def _autocast_context(self) -> contextlib.AbstractContextManager:
        if self._dtype == "bfloat16":
            return torch.autocast(self._device, torch.bfloat16)
        return contextlib.nullcontext()

    def of_fragment(self, i: int) -> Iterator[tuple[int, ShardedWeight]]:
        """Yield the tensors of fragment i, and the place of each in `weights`."""
        for place, weight in enumerate(self.weights):
            if weight.fragment.index == i:
                yield place, weight


def cut_shard(part: Tensor, rank: int, ranks: int) -> Tensor:
    """Return a rank's shard of a tensor, as `fully_shard` cuts it: in rows; it may be empty."""
    chunks: Sequence[Tensor] = part.chunk(ranks)
    return chunks[rank] if rank < len(chunks) else part[:0]
