"""What every rank does for a command, rank 0 included: all ranks run the same collectives."""

import math
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from barnraise.models.weights import views
from barnraise.swap.adamw import BETA2, AdamWKernel
from barnraise.swap.device import release_device_memory
from barnraise.swap.muon import MOMENTUM, find_direction
from barnraise.swap.sharded.sharded_model import (
    SHARD,
    TENSOR,
    ShardedModel,
    ShardedWeight,
    SharedKind,
    SharedSettings,
)

WORDS = 6  # of a command: its opcode and its numbers, int64 each


class Opcode(IntEnum):
    """What rank 0 commands the others to do; the numbers that follow are in brackets."""

    END = 0  # end the process
    BUILD = 1  # build a model of zeros [bytes of its description]
    ACCUMULATE = 2  # add a micro-batch's gradients [sequences of all ranks, of the step]
    APPLY = 3  # clip, make a step [number, learning rate, decay, limit of the norm, matrices' rate]
    DROP = 4  # drop the gradients
    GATHER = 5  # gather a kind of state of a fragment on rank 0 [kind, fragment]
    SCATTER = 6  # scatter it from there [kind, fragment]
    RELEASE = 7  # free the model


class RankProgram:
    """One rank's part of the state, and what it does with it.

    Attributes:
        device: where this rank computes.
    """

    def __init__(self, device: torch.device) -> None:
        """Work in the process group that is joined already."""
        self.device = device
        self._model: ShardedModel | None = None
        self._meshes: dict[int, DeviceMesh] = {}  # by how many ranks split a block
        self._loss = torch.zeros((), dtype=torch.float64, device=device)

    def execute(self, words: list[int], payload: Tensor | None) -> Tensor:
        """Do what a command says.

        Args:
            words: the opcode and its numbers.
            payload: what rank 0 sends with it; None on other ranks.

        Returns:
            The result, on rank 0; an empty tensor where there is none.
        """
        opcode, first, second, *_ = words
        match opcode:
            case Opcode.BUILD:
                self._build(self._receive((first,), torch.uint8, payload))
            case Opcode.ACCUMULATE:
                self._accumulate(first, second, payload)
            case Opcode.APPLY:
                return self._apply(first, *torch.tensor(words[2:]).view(torch.float64).tolist())
            case Opcode.DROP:
                self._drop()
            case Opcode.GATHER:
                return self._gather(SharedKind(first), second)
            case Opcode.SCATTER:
                self._scatter(SharedKind(first), second, payload)
            case Opcode.RELEASE:
                self._release()
        return torch.empty(0)

    def _receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, payload: Tensor | None
    ) -> Tensor:
        """Return what rank 0 sends, where this rank computes."""
        if payload is None:
            payload = torch.empty(shape, dtype=dtype)
        payload = payload.to(self.device)
        dist.broadcast(payload, 0)
        return payload

    # ---- the model -----------------------------------------------------------------------------

    @property
    def _built(self) -> ShardedModel:
        assert self._model is not None, "no model is built"
        return self._model

    def _build(self, description: Tensor) -> None:
        self._release()
        settings = SharedSettings.from_bytes(bytes(description.tolist()))
        torch.set_num_threads(settings.threads)
        split = settings.tensor
        if split not in self._meshes:  # it has process groups, which stay
            shape = dist.get_world_size() // split, split
            names = SHARD, TENSOR
            self._meshes[split] = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        self._model = ShardedModel(settings, self._meshes[split])
        self._drop()

    def _release(self) -> None:
        self._model = None
        release_device_memory(self.device)

    # ---- steps ---------------------------------------------------------------------------------

    def _accumulate(self, sequences: int, of_step: int, payload: Tensor | None) -> None:
        """Add the gradients of a micro-batch, whose sequences all ranks share evenly."""
        model = self._built
        shape = sequences, model.dimensions.context + 1
        tokens = self._receive(shape, torch.int64, payload)
        ranks = model.mesh[SHARD].size()
        tokens = tokens.chunk(ranks)[model.mesh[SHARD].get_local_rank()]
        share = len(tokens) / of_step
        loss = model(tokens)
        # FSDP takes the mean of the ranks' gradients, and each has a share of the sum.
        (loss * (share * ranks)).backward()
        self._loss += loss.detach().double() * share

    def _drop(self) -> None:
        self._built.zero_grad()
        self._loss.zero_()

    def _apply(
        self, number: int, learning_rate: float, decay: float, limit: float, matrix_rate: float
    ) -> Tensor:
        """Make a step unless loss or norm is not finite; return both, fp64 [2]."""
        model = self._built
        sums = torch.stack([self._loss / model.mesh[TENSOR].size(), self._sum_of_squares()])
        dist.all_reduce(sums)
        loss, norm = float(sums[0]), math.sqrt(float(sums[1]))
        if math.isfinite(loss) and math.isfinite(norm):
            kernel = AdamWKernel(
                spans=[],
                step_count=torch.full((), float(number), device=self.device),
                learning_rate=learning_rate,
                weight_decay=decay,
                gradient_divisor=torch.full((), max(1.0, norm / limit), device=self.device),
                found_inf=None,
                beta2=BETA2,
            )
            lists: dict[bool, list[list[Tensor]]] = {True: [], False: []}  # of AdamW, by decay
            for weight in model.weights:
                if len(weight.state) > SharedKind.SECOND_MOMENTS:
                    lists[weight.decays].append(weight.shards)
                else:
                    _update_matrices(weight, matrix_rate, decay)
            for decays, shards in lists.items():  # a GPU updates many tensors in one launch
                kernel.apply_lists(decays, *map(list, zip(*shards, strict=True)))
        self._drop()
        return torch.tensor([loss, norm], dtype=torch.float64)

    def _sum_of_squares(self) -> Tensor:
        """Return this rank's part of the gradient's squared norm, fp64 []."""
        parts = [
            torch.linalg.vector_norm(weight.shards[1], dtype=torch.float64).square() / weight.copies
            for weight in self._built.weights
        ]
        return torch.stack(parts).sum()

    # ---- fragments -----------------------------------------------------------------------------

    def _gather(self, kind: SharedKind, i: int) -> Tensor:
        """Return a fragment's whole weights or moments on rank 0's host, fp32 [n]."""
        model = self._built
        fragment = model.dimensions.fragments()[i]
        flat = torch.zeros(fragment.size if dist.get_rank() == 0 else 0)
        for weight in model.of_fragment(i):
            if kind == len(weight.state):  # Muon has no second moments
                continue
            whole = weight.gather(weight.state[kind])
            if len(flat):
                views(fragment, flat)[weight.slot.name].copy_(whole)
        return flat

    def _scatter(self, kind: SharedKind, i: int, payload: Tensor | None) -> None:
        """Take this rank's part of a fragment's weights or moments, fp32 [n], from rank 0."""
        model = self._built
        fragment = model.dimensions.fragments()[i]
        flat = self._receive((fragment.size,), torch.float32, payload)
        for weight in model.of_fragment(i):
            if kind < len(weight.state):
                part = weight.cut(views(fragment, flat)[weight.slot.name])
                weight.state[kind].to_local().detach().copy_(part)


def _update_matrices(weight: ShardedWeight, rate: float, decay: float) -> None:
    """Make Muon's step on a tensor of matrices, which each rank orthogonalises as a whole."""
    weights, gradient, momentum = weight.shards
    momentum.lerp_(gradient, 1 - MOMENTUM)
    gradient.lerp_(momentum, MOMENTUM)
    average = weight.gather(weight.gradient)
    matrices = average.split(list(weight.slot.parts) or len(average))
    direction = torch.cat([find_direction(matrix) for matrix in matrices])
    weights.mul_(1 - rate * decay).sub_(weight.cut(direction), alpha=rate)
