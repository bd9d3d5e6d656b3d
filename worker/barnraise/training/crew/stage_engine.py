"""The engine of one machine of a crew: a swap engine over its part of the model."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from barnraise.errors import StateError
from barnraise.ledger.anchor import fragment_from_bytes, fragment_to_bytes
from barnraise.mixing.payloads import Payload, decode_weights, encode_weights
from barnraise.models.functions import functions_of
from barnraise.spec.architecture import FP32_BYTES
from barnraise.swap.activations import Activations
from barnraise.swap.engine import Engine, StepStats
from barnraise.swap.executor import DecodableUpdate, EngineProgress
from barnraise.swap.forward_backward import ForwardBackward
from barnraise.training.crew.boundary import BoundaryActivations
from barnraise.training.crew.crew_messages import PartName
from barnraise.training.crew.roster import CrewRoster
from barnraise.training.crew.step_protocol import CrewStep


class StageEngine(Engine):
    """Train the fragments of a plan's stage, in steps that all machines of a crew make together."""

    _side: CrewStep | None = None  # this machine's side of the step that is being made
    _roster: CrewRoster | None = None

    def step_with(
        self,
        side: CrewStep,
        roster: CrewRoster,
        batches: list[Tensor],
        rate_scale: float,
        position: int,
    ) -> StepStats:
        """Make one step together with the crew; see `Engine.step`.

        Until all machines agree on the norm, nothing but the update of the step before changes.
        """
        self._side, self._roster = side, roster
        try:
            return self.step(batches, rate_scale, position, lambda: side.is_cancelled)
        finally:
            self._side = None

    def abandon_step(self, position: int) -> None:
        """Drop the round, because a step has diverged before its norm was known."""
        self.progress = replace(self.progress, position=position)
        self.reset_round()

    def empty_batches(self, roster: CrewRoster, count: int) -> list[Tensor]:
        """Return micro-batches of a machine that needs none of their tokens, but their sizes."""
        tokens = torch.zeros(1, 1, dtype=torch.int64)
        batch = tokens.expand(roster.sequences, roster.model.context + 1)
        return [batch] * count

    def set_label(self, label: int) -> None:
        """Set the label under which this state is saved."""
        self._change_progress(label=label)

    def queue_updates(
        self, *updates: DecodableUpdate, prediction: tuple[float, ...] | None = None
    ) -> None:
        """Queue other authors' updates; a state on disk is no longer that of its label then."""
        if updates and self.plan.on_disk:
            self.set_label(-abs(self.progress.label))
        super().queue_updates(*updates, prediction=prediction)

    def forget_training(self) -> None:
        """Set moments, outer momentum and error feedback to zero, and begin at the anchor."""
        for kind in ("moments", "momentum", "feedback"):
            self.store.clear(kind)
        self.progress = EngineProgress(
            prediction=self._no_prediction,
            residual=self._no_prediction,
            forecast=self._no_prediction,
        )
        self.reset_round()

    def forget_fragment(self, index: int) -> None:
        """Set a fragment's moments, outer momentum and error feedback to zero."""
        size = self.fragments[index].size
        second_moments = self.plan.tile_layouts(index)[-1].second_end
        self._tiles.write_moments(index, torch.zeros(size), torch.zeros(second_moments))
        for _, sequence in self._exchange_state()[1:]:
            sequence[index] = torch.zeros_like(sequence[index])

    @torch.no_grad()
    def write_part(self, index: int, part: PartName, payload: bytes | bytearray) -> None:
        """Store a part of a fragment's state, as `read_part` returned it, or its replica, fp32 [n].

        Raises:
            StateError: it is of another size, or not finite.
        """
        self.executor.drain()
        size = self.fragments[index].size
        second_moments = self.plan.tile_layouts(index)[-1].second_end
        elements = size + second_moments if part == "moments" else size
        if len(payload) != FP32_BYTES * elements:
            raise StateError(f"the {part} of {self.fragments[index].name} have another size")
        if part == "moments":
            m, v = _decode_finite(payload, elements).split([size, second_moments])
            self._tiles.write_moments(index, m, v)
            return
        if part == "replica":
            values = _decode_finite(payload, size)
            for tile in self._tiles.iterate(index):
                tile.set_master(values[tile.begin : tile.end])
            self.executor.invalidate_cached_weights()
            return
        is_float = part == "momentum"
        sequence = dict(self._exchange_state())[part]
        sequence[index] = (
            _decode_finite(payload, size) if is_float else fragment_from_bytes(payload)
        )

    def read_replica_fragment(self, index: int, flushes: bool) -> Tensor:
        """Return a copy of a fragment of the replica, fp32 [n]; `flushes`: with a pending step."""
        if flushes:
            self.flush()
        self.executor.drain()
        return torch.cat([tile.host_master() for tile in self._tiles.iterate(index, False)])

    def _open_activations(self, device: int) -> Activations:
        inner = super()._open_activations(device)
        assert self._side is not None and self._roster is not None, "a crew makes steps together"
        return BoundaryActivations(inner, self.plan, self._roster, self._side)

    def _loss_and_norm(self, passes: Sequence[ForwardBackward]) -> tuple[float, float]:
        losses, norms = self._read_scalars(passes)
        assert self._side is not None
        agreed = self._side.agree(losses, dict(zip(self.plan.local_fragments, norms, strict=True)))
        if agreed is None:
            passes[0].interrupt()
            return math.nan, math.nan
        return agreed

    # ---- validation ----------------------------------------------------------------------------

    @torch.no_grad()
    def embed_parts(self, parts: list[Tensor]) -> list[Tensor]:
        """Return the anchor's first blocks' inputs for parts of a text, fp32, on the host."""
        functions, weights = functions_of(self.plan.model), self._anchor_weights(0)
        return [functions.embed(weights, part[:, :-1].to(self.device)).cpu() for part in parts]

    @torch.no_grad()
    def pass_blocks(
        self, streams: list[Tensor], should_stop: Callable[[], bool] = lambda: False
    ) -> bool:
        """Replace the inputs of this machine's blocks by their outputs; return whether it ended."""
        self.apply_queued()
        return self._pass_anchor_blocks(streams, should_stop)

    @torch.no_grad()
    def measure_loss(self, parts: list[Tensor], streams: list[Tensor]) -> float:
        """Return the mean loss of the anchor's head for the last block's outputs."""
        return self._mean_loss(parts, streams)


def list_fragments(tensors: Mapping[str, Tensor]) -> list[int]:
    """Return the fragments whose state a `state_dict` has."""
    names = [name.partition(".") for name in tensors]
    return sorted(int(index) for kind, _, index in names if kind == "anchor")


def read_part(tensors: Mapping[str, Tensor], index: int, part: PartName) -> Payload:
    """Return the bytes of a part of a fragment's state, from a `state_dict`."""
    match part:
        case "moments":
            return encode_weights(torch.cat([tensors[f"m.{index}"], tensors[f"v.{index}"]]), 32)
        case "momentum":
            return encode_weights(tensors[f"momentum.{index}"], 32)
        case _:
            return fragment_to_bytes(tensors[f"{part}.{index}"])


def _decode_finite(payload: bytes | bytearray, elements: int) -> Tensor:
    """Return fp32 [elements] of a payload.

    Raises:
        StateError: they are not finite.
    """
    try:
        return decode_weights(payload, elements, 32)
    except ValueError as error:
        raise StateError(f"a part of a crew's state is of no use: {error}") from None
