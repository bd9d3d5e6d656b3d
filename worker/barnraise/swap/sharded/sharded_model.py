"""The model whose weights torch's FSDP2 shards, computed by the functions of `barnraise.models`.

Each block and the two ends are modules of `fully_shard` (Zhao et al. 2023, arXiv:2304.11277): their
weights are DTensors, whole only while they compute. The head's loss is the fused one.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from barnraise.models.functions import functions_of
from barnraise.models.weights import Weights
from barnraise.spec import ADAMW, MUON, Fragment, ModelSpec, Slot
from barnraise.swap.fused_loss import FusedLoss
from barnraise.swap.sharded.tensor_split import (
    SPLIT_TENSORS,
    TensorParallelism,
    cut_part,
    join_parts,
    narrow_model,
)

SHARD, TENSOR = "shard", "tensor"  # the dimensions of the mesh of ranks


class SharedKind(IntEnum):
    """The kinds of state that ranks share."""

    WEIGHTS = 0
    FIRST_MOMENTS = 1
    SECOND_MOMENTS = 2


@dataclass(frozen=True)
class SharedSettings:
    """What all ranks build their model by.

    Attributes:
        model: the model.
        dtype: of the products, "float32" or "bfloat16".
        tensor: how many ranks split each block.
        retained_blocks: how many of the top blocks retain their activations.
        threads: of each rank on a CPU.
        optimizer: "adamw", or "muon" for the blocks' matrices.
    """

    model: ModelSpec
    dtype: str = "float32"
    tensor: int = 1
    retained_blocks: int = 0
    threads: int = 1
    optimizer: str = ADAMW

    def to_bytes(self) -> bytes:
        """Return the settings for `from_bytes`."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> "SharedSettings":
        """Return the settings that rank 0 has sent."""
        fields: dict[str, Any] = json.loads(text)
        model = ModelSpec(**fields.pop("model"))
        return cls(model, **fields)


@dataclass(frozen=True)
class ShardedWeight:
    """One tensor of a fragment, as a rank has it.

    Attributes:
        fragment: the fragment's layout.
        slot: the tensor's place in it.
        state: the rank's shards by kind, fp32 DTensors; the weights are the model's parameter. A
            tensor that Muon trains has no second moments.
        tensor_mesh: of the ranks that split a block.
    """

    fragment: Fragment
    slot: Slot
    state: tuple[DTensor, ...]
    tensor_mesh: DeviceMesh

    @property
    def decays(self) -> bool:
        """Whether AdamW decays it: matrices and embeddings, not norms and biases."""
        return len(self.slot.shape) >= 2

    @property
    def copies(self) -> int:
        """Return how many tensor-parallel ranks have the same part."""
        return 1 if self.slot.name in SPLIT_TENSORS else self.tensor_mesh.size()

    @property
    def gradient(self) -> DTensor:
        """Return the rank's shard of the gradient."""
        gradient = self.state[SharedKind.WEIGHTS].grad
        assert isinstance(gradient, DTensor), "no gradient was accumulated"
        return gradient

    @property
    def shards(self) -> list[Tensor]:
        """Return this rank's part of weights, gradient and moments, which may be empty."""
        weights, *moments = self.state
        return [each.to_local().detach() for each in (weights, self.gradient, *moments)]

    def gather(self, shards: DTensor) -> Tensor:
        """Return the whole tensor that all ranks have shards of, on each of them."""
        part = shards.full_tensor().detach()
        parts = [part]
        if self.copies == 1:
            ranks = self.tensor_mesh.size()
            joined = DTensor.from_local(part, self.tensor_mesh, [Shard(0)])
            parts = list(joined.full_tensor().chunk(ranks))
        return join_parts(self.fragment, self.slot, parts)

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor that each of them has."""
        rank, ranks = self.tensor_mesh.get_local_rank(), self.tensor_mesh.size()
        part = cut_part(self.fragment, self.slot, whole, rank, ranks)
        weights = self.state[SharedKind.WEIGHTS]
        shards = distribute_tensor(
            part, weights.device_mesh, weights.placements, src_data_rank=None
        )
        return shards.to_local()


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
        mesh: of the ranks, [SHARD, TENSOR].
        weights: all tensors of all fragments, in order.
    """

    def __init__(self, settings: SharedSettings, mesh: DeviceMesh) -> None:
        """Lay out and shard a model of zeros for ranks of a mesh [SHARD, TENSOR]."""
        super().__init__()
        model, dtype = settings.model, settings.dtype
        self.dimensions, self.mesh, self._dtype = model, mesh, dtype
        first, *blocks, last = model.fragments()
        tensor_ranks = mesh[TENSOR].size()
        tensor = TensorParallelism(mesh[TENSOR]) if tensor_ranks > 1 else None
        self._embedding, self._final = FragmentWeights(first, 1), FragmentWeights(last, 1)
        first_retained = model.layers + 1 - settings.retained_blocks
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
        self.weights: list[ShardedWeight] = []
        for module in (self._embedding, *self._blocks, self._final):
            assert isinstance(module, FragmentWeights)
            slots = module.fragment.slots
            for slot, parameter in zip(slots, module.parameters(), strict=True):
                assert isinstance(parameter, DTensor)
                parameter.to_local().detach().zero_()
                is_matrix = module in self._blocks and slot.kind == "matrix"
                state: list[DTensor] = [parameter]
                for _ in range(1 if is_matrix and settings.optimizer == MUON else 2):
                    zeros = torch.zeros_like(parameter.detach())
                    assert isinstance(zeros, DTensor)
                    state.append(zeros)
                weight = ShardedWeight(module.fragment, slot, tuple(state), mesh[TENSOR])
                self.weights.append(weight)

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
            return torch.autocast(self.mesh.device_type, torch.bfloat16)
        return contextlib.nullcontext()

    def of_fragment(self, i: int) -> Iterator[ShardedWeight]:
        """Yield the tensors of fragment i."""
        return (weight for weight in self.weights if weight.fragment.index == i)
