"""What every rank does for a command, rank 0 included: all ranks run the same collectives."""

import json
import math
import struct
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from barnraise.spec import Fragment, ModelSpec
from barnraise.swap.adamw import BETA2, AdamWKernel
from barnraise.swap.device import release_device_memory
from barnraise.swap.sharded.sharded_model import (
    SHARD,
    TENSOR,
    ShardedModel,
    ShardedWeight,
    cut_shard,
)
from barnraise.swap.sharded.tensor_split import SPLIT_TENSORS, cut_part, join_parts

WORDS = 6  # of a command: its opcode and its numbers, int64 each


class Opcode(IntEnum):
    """What rank 0 commands the others to do; the numbers that follow are in brackets."""

    END = 0  # end the process
    BUILD = 1  # build a model of zeros [bytes of its description]
    ACCUMULATE = 2  # add a micro-batch's gradients [sequences of all ranks, of the step]
    APPLY = 3  # clip and make a step [number, learning rate, weight decay, limit of the norm]
    DROP = 4  # drop the gradients
    GATHER = 5  # gather a kind of state of a fragment on rank 0 [kind, fragment]
    SCATTER = 6  # scatter it from there [kind, fragment]
    RELEASE = 7  # free the model


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
    """

    model: ModelSpec
    dtype: str = "float32"
    tensor: int = 1
    retained_blocks: int = 0
    threads: int = 1

    def to_bytes(self) -> bytes:
        """Return the settings for `from_bytes`."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> "SharedSettings":
        """Return the settings that rank 0 has sent."""
        fields: dict[str, Any] = json.loads(text)
        model = ModelSpec(**fields.pop("model"))
        return cls(model, **fields)


def float_to_word(value: float) -> int:
    """Return the bits of a number in fp64 as an integer."""
    return struct.unpack("<q", struct.pack("<d", value))[0]


def word_to_float(word: int) -> float:
    """Return the number whose bits `float_to_word` has returned."""
    return struct.unpack("<d", struct.pack("<q", word))[0]


class RankProgram:
    """One rank's part of the state, and what it does with it.

    Attributes:
        device: where this rank computes.
    """

    def __init__(self, device: torch.device) -> None:
        """Work in the process group that is joined already."""
        self.device = device
        self._model: ShardedModel | None = None
        self._mesh: DeviceMesh | None = None
        self._moments: dict[SharedKind, list[Tensor]] = {}
        self._loss = torch.zeros((), dtype=torch.float64, device=device)

    def execute(self, words: list[int], payload: Tensor | None) -> Tensor | None:
        """Do what a command says.

        Args:
            words: the opcode and its numbers.
            payload: what rank 0 sends with it; None on other ranks.

        Returns:
            The result, on rank 0.
        """
        opcode, *numbers = words
        match opcode:
            case Opcode.BUILD:
                self._build(self._receive((numbers[0],), torch.uint8, payload))
            case Opcode.ACCUMULATE:
                self._accumulate(numbers[0], numbers[1], payload)
            case Opcode.APPLY:
                return self._apply(numbers[0], *map(word_to_float, numbers[1:4]))
            case Opcode.DROP:
                self._drop()
            case Opcode.GATHER:
                return self._gather(SharedKind(numbers[0]), numbers[1])
            case Opcode.SCATTER:
                self._scatter(SharedKind(numbers[0]), numbers[1], payload)
            case Opcode.RELEASE:
                self._release()
        return None

    def _receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, payload: Tensor | None
    ) -> Tensor:
        """Return what rank 0 sends."""
        if payload is None:
            payload = torch.empty(shape, dtype=dtype)
        dist.broadcast(payload, 0)
        return payload

    # ---- the model -----------------------------------------------------------------------------

    @property
    def _built(self) -> tuple[ShardedModel, DeviceMesh]:
        assert self._model is not None and self._mesh is not None, "no model is built"
        return self._model, self._mesh

    def _build(self, description: Tensor) -> None:
        self._release()
        settings = SharedSettings.from_bytes(bytes(description.tolist()))
        torch.set_num_threads(settings.threads)
        shape = dist.get_world_size() // settings.tensor, settings.tensor
        if self._mesh is None or self._mesh.shape != shape:  # a mesh has process groups
            self._mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=(SHARD, TENSOR))
        model = ShardedModel(settings.model, self._mesh, settings.dtype, settings.retained_blocks)
        self._model = model
        self._moments = {
            kind: [torch.zeros_like(weight.shard) for weight in model.weights]
            for kind in (SharedKind.FIRST_MOMENTS, SharedKind.SECOND_MOMENTS)
        }
        self._drop()

    def _release(self) -> None:
        self._model = None
        self._moments = {}
        release_device_memory(self.device)

    # ---- steps ---------------------------------------------------------------------------------

    def _accumulate(self, sequences: int, of_step: int, payload: Tensor | None) -> None:
        """Add the gradients of a micro-batch, whose sequences all ranks share evenly."""
        model, mesh = self._built
        context = model.dimensions.context
        tokens = self._receive((sequences, context + 1), torch.int64, payload)
        ranks = mesh[SHARD].size()
        tokens = tokens.chunk(ranks)[mesh[SHARD].get_local_rank()].to(self.device)
        share = len(tokens) / of_step
        loss = model(tokens)
        # FSDP takes the mean of the ranks' gradients, and each has a share of the sum.
        (loss * (share * ranks)).backward()
        self._loss += loss.detach().double() * share

    def _drop(self) -> None:
        model, _ = self._built
        for weight in model.weights:
            weight.parameter.grad = None
        self._loss.zero_()

    def _apply(self, number: int, learning_rate: float, decay: float, limit: float) -> Tensor:
        """Make AdamW's step unless loss or norm is not finite; return both, fp64 [2]."""
        model, mesh = self._built
        sums = torch.stack([self._loss / mesh[TENSOR].size(), self._sum_of_squares()])
        dist.all_reduce(sums)
        loss, norm = float(sums[0]), math.sqrt(float(sums[1]))
        if math.isfinite(loss) and math.isfinite(norm):
            divisor = max(1.0, norm / limit)
            for decays in (True, False):
                self._update(model, decays, number, learning_rate, decay, divisor)
        self._drop()
        return torch.tensor([loss, norm], dtype=torch.float64)

    def _sum_of_squares(self) -> Tensor:
        """Return this rank's part of the gradient's squared norm, fp64 []."""
        model, mesh = self._built
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for weight in model.weights:
            gradient = weight.gradient
            if gradient is None or not gradient.numel():
                continue
            # Each tensor-parallel rank has the same gradient by what is not split.
            copies = 1 if _is_split(weight) else mesh[TENSOR].size()
            total += torch.linalg.vector_norm(gradient, dtype=torch.float64).square() / copies
        return total

    def _update(
        self,
        model: ShardedModel,
        decays: bool,
        number: int,
        learning_rate: float,
        decay: float,
        divisor: float,
    ) -> None:
        """Update what decays, or what does not, with torch's fused kernel."""
        kernel = AdamWKernel(
            spans=[],
            step_count=torch.full((), float(number), device=self.device),
            learning_rate=learning_rate,
            weight_decay=decay,
            gradient_divisor=torch.full((), divisor, device=self.device),
            found_inf=None,
            beta2=BETA2,
        )
        lists: list[list[Tensor]] = [[], [], [], []]
        moments = zip(*self._moments.values(), strict=True)
        for weight, (m, v) in zip(model.weights, moments, strict=True):
            gradient = weight.gradient
            if weight.decays == decays and gradient is not None and gradient.numel():
                for each, tensor in zip(lists, (weight.shard, gradient, m, v), strict=True):
                    each.append(tensor)
        if lists[0]:
            kernel.apply_lists(decays, *lists)

    # ---- fragments -----------------------------------------------------------------------------

    def _shard_of(self, kind: SharedKind, place: int) -> Tensor:
        model, _ = self._built
        return (
            model.weights[place].shard if kind is SharedKind.WEIGHTS else self._moments[kind][place]
        )

    def _gather(self, kind: SharedKind, i: int) -> Tensor | None:
        """Return a fragment's whole weights or moments on rank 0's host, fp32 [n]."""
        model, mesh = self._built
        fragment = model.dimensions.fragments()[i]
        is_first = dist.get_rank() == 0
        flat = torch.zeros(fragment.size) if is_first else None
        for place, weight in model.of_fragment(i):
            slot = fragment.slots[weight.number]
            part = self._gather_rows(self._shard_of(kind, place), weight.parameter.shape, mesh)
            parts = [part]
            if _is_split(weight) and mesh[TENSOR].size() > 1:
                parts = [torch.empty_like(part) for _ in range(mesh[TENSOR].size())]
                dist.all_gather(parts, part.contiguous(), group=mesh[TENSOR].get_group())
            if flat is not None:
                whole = join_parts(fragment, slot, parts)
                flat[slot.offset : slot.offset + slot.size].copy_(whole.reshape(-1))
        return flat

    def _gather_rows(self, shard: Tensor, shape: torch.Size, mesh: DeviceMesh) -> Tensor:
        """Return the tensor of a shape that was sharded in rows, each shard padded to the first."""
        ranks = mesh[SHARD].size()
        rows = -(-shape[0] // ranks)
        padded = torch.zeros((rows, *shape[1:]), device=shard.device)
        padded[: len(shard)].copy_(shard)
        shards = [torch.empty_like(padded) for _ in range(ranks)]
        dist.all_gather(shards, padded, group=mesh[SHARD].get_group())
        return torch.cat(shards)[: shape[0]]

    def _scatter(self, kind: SharedKind, i: int, payload: Tensor | None) -> None:
        """Take this rank's part of a fragment's weights or moments, fp32 [n], from rank 0."""
        model, mesh = self._built
        fragment: Fragment = model.dimensions.fragments()[i]
        flat = torch.empty(fragment.size) if payload is None else payload
        flat = flat.to(self.device)
        dist.broadcast(flat, 0)
        shard_rank, tensor_rank = mesh[SHARD].get_local_rank(), mesh[TENSOR].get_local_rank()
        for place, weight in model.of_fragment(i):
            slot = fragment.slots[weight.number]
            whole = flat[slot.offset : slot.offset + slot.size].view(slot.shape)
            split_ranks = mesh[TENSOR].size() if _is_split(weight) else 1
            part = cut_part(fragment, slot, whole, tensor_rank, split_ranks)
            self._shard_of(kind, place).copy_(cut_shard(part, shard_rank, mesh[SHARD].size()))


def _is_split(weight: ShardedWeight) -> bool:
    """Return whether tensor-parallel ranks have different parts of a tensor: only of blocks."""
    return weight.fragment.slots[weight.number].name in SPLIT_TENSORS
