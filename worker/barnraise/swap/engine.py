"""One machine's training: local steps on a replica, and the arithmetic between replica, anchor and updates.

Everything of the model is resident here; plans that swap come behind the same methods. The anchor is handed in and only
duck-typed: `.fragments` (int32 tensors on the host), `.add(index, units)` in place, `.note(header)`. One thread calls
all of this.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from barnraise import model as gpt
from barnraise.errors import StateError
from barnraise.model import views
from barnraise.spec import UNIT_BITS, ModelSpec, Recipe
from barnraise.swap.arena import Arena, to_float
from barnraise.swap.loss import head_loss
from barnraise.swap.optimizer import AdamW

FEEDBACK_BOUND = 1 << 30  # units, 16.0: far beyond what an update may say, and room below int32's end
STEP_BOUND = 1 << 29

Encode = Callable[[Tensor], tuple[bytes, Tensor]]  # int32 [n] → payload, and the int32 [n] it decodes to


class AnchorLike(Protocol):
    fragments: list[Tensor]

    def add(self, index: int, units: Tensor) -> None: ...

    def note(self, header: Any) -> None: ...


class ArrivalLike(Protocol):
    header: Any

    def decode(self, index: int) -> Tensor: ...


@dataclass(frozen=True)
class StepStats:
    """`loss`: nats a token before the step; `norm`: of the gradient before clipping. `abandoned`: a loss or gradient
    was not finite, the round's progress is dropped (the replica is the anchor again) and `tokens` is 0."""

    loss: float
    tokens: int
    seconds: float
    norm: float
    abandoned: bool = False


class Engine:
    """`round_tokens`: trained on since the last harvest; what the next update's header states."""

    def __init__(self, model: ModelSpec, recipe: Recipe, anchor: AnchorLike, device: str = "cpu"):
        self.model, self.recipe, self.anchor = model, recipe, anchor
        self.device = torch.device(device)
        self.arena = Arena(model, self.device)
        self.optimizer = AdamW(self.arena.layers, recipe.weight_decay)
        self.reset_round()

    # ---- training --------------------------------------------------------------------------------------------

    def step(self, batches: list[Tensor], rate_scale: float = 1.0) -> StepStats:
        """One AdamW step on the mean gradient of the micro-batches (int64 [sequences, context + 1] each), clipped by
        its global norm. `rate_scale` is what `schedule` says."""
        started = time.perf_counter()
        tokens = [batch.shape[0] * (batch.shape[1] - 1) for batch in batches]
        self.arena.clear_gradients()
        shares = [self._backward(batch, mine / sum(tokens)) for batch, mine in zip(batches, tokens, strict=True)]
        norms = [torch.linalg.vector_norm(layer.gradient) for layer in self.arena.layers]
        figures = torch.stack([*shares, *norms]).tolist()  # the step's only wait for the device
        loss = sum(figures[: len(shares)])
        norm = math.sqrt(sum(n * n for n in figures[len(shares) :]))
        abandoned = not (math.isfinite(loss) and math.isfinite(norm))
        if abandoned:
            self.reset_round()  # nothing has touched the moments yet: they stay
        else:
            self.optimizer.step(self.recipe.learning_rate * rate_scale, max(1.0, norm / self.recipe.clip))
            self.round_tokens += sum(tokens)
        return StepStats(loss, 0 if abandoned else sum(tokens), time.perf_counter() - started, norm, abandoned)

    def _backward(self, batch: Tensor, share: float) -> Tensor:
        """Adds share · gradient to the gradients; returns share · loss, on the device."""
        batch = batch.to(self.device, non_blocking=True)
        embedding, *blocks, final = self.arena.parameters
        x = gpt.embed(embedding, batch[:, :-1])
        for weights in blocks:
            x = gpt.block(weights, x, self.model.heads)
        loss = head_loss(final, embedding, x, batch[:, 1:]) * share
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Tensor]) -> float:
        """Mean loss of the *anchor*, whatever the replica is in the middle of: peers with one anchor get one number.

        Layer by layer over all batches, so that one layer's weights are unpacked at a time."""
        batches = [batch.to(self.device) for batch in batches]
        embedding = self._anchored(0)
        streams = [gpt.embed(embedding, batch[:, :-1]) for batch in batches]
        for index in range(1, len(self.arena.layers) - 1):
            weights = self._anchored(index)
            streams = [gpt.block(weights, stream, self.model.heads) for stream in streams]
        final, total, count = self._anchored(-1), 0.0, 0
        for batch, stream in zip(batches, streams, strict=True):
            targets = batch[:, 1:]
            total += head_loss(final, embedding, stream, targets).item() * targets.numel()
            count += targets.numel()
        return total / count

    def _anchored(self, index: int) -> gpt.Weights:
        return views(self.arena.layers[index].fragment, to_float(self.anchor.fragments[index].to(self.device)))

    # ---- trading ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def add(self, arrival: ArrivalLike) -> None:
        """Another author's update, at any moment of a round: into the anchor and the replica alike, so that their
        difference stays this machine's own progress."""
        for index, layer in enumerate(self.arena.layers):
            units = arrival.decode(index)
            self.anchor.add(index, units)
            layer.weights.add_(to_float(units.to(self.device)))
        self.anchor.note(arrival.header)

    @torch.no_grad()
    def harvest(self, encode: Encode, weight: float) -> Iterator[tuple[bytes, Tensor]]:
        """Ends the round: for each fragment in order the update's payload and the integers it decodes to, by then
        applied to the anchor and the replica. Consume it whole, then `anchor.note` the header. `weight`: this
        author's share, 0…1.

        Δ ← w(anchor − replica); m ← μm + Δ; s = η(Δ + μm); e ← round(βe) + round(s/unit); the update is −C(e). The
        two are rounded apart so that with β = 1 all that was sent plus the residual is exactly the sum of the
        rounded steps."""
        recipe = self.recipe
        for index, layer in enumerate(self.arena.layers):
            anchor = self.anchor.fragments[index]
            delta = to_float(anchor).sub_(layer.weights.to(anchor.device)).mul_(weight)
            assert torch.isfinite(delta).all(), f"the replica of {layer.fragment.name} is not finite"
            layer.momentum.mul_(recipe.outer_momentum).add_(delta)
            step = layer.momentum.mul(recipe.outer_momentum).add_(delta).mul_(recipe.outer_rate)
            accumulate(layer.feedback, step, recipe.feedback_decay)
            payload, units = encode(layer.feedback.neg())
            layer.feedback.add_(units)
            self.anchor.add(index, units)
            layer.weights.copy_(to_float(self.anchor.fragments[index]))
            yield payload, units
        self.round_tokens = 0

    def reset_round(self) -> None:
        """The replica is the anchor again; what the round had learnt is dropped."""
        for layer, units in zip(self.arena.layers, self.anchor.fragments, strict=True):
            layer.weights.copy_(to_float(units))
        self.round_tokens = 0

    def forget_feedback(self) -> None:
        """The ledger holds an update of mine newer than the saved feedback: what it owed may have been said already."""
        for layer in self.arena.layers:
            layer.feedback.zero_()

    # ---- keeping ---------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """All that a restart needs besides the anchor's heads, on the host, by reference where it lies there. The
        replica is not in it: a restart begins a round."""
        tensors = {"optimizer.steps": self.optimizer.steps.cpu()}
        for index, layer in enumerate(self.arena.layers):
            tensors[f"anchor.{index}"] = self.anchor.fragments[index]
            for kind in ("m", "v", "momentum", "feedback"):
                tensors[f"{kind}.{index}"] = getattr(layer, kind).cpu()
        return tensors

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Takes back what `state` gave, and begins a round. Raises StateError, with nothing changed, if it does not
        fit."""
        mine, theirs = ({n: (t.shape, t.dtype) for n, t in kept.items()} for kept in (self.state(), tensors))
        if wrong := sorted(name for name, _ in mine.items() ^ theirs.items()):
            raise StateError(f"the saved state is not of this model: '{wrong[0]}' does not fit")
        self.optimizer.steps.copy_(tensors["optimizer.steps"])
        for index, layer in enumerate(self.arena.layers):
            self.anchor.fragments[index].copy_(tensors[f"anchor.{index}"])
            for kind in ("m", "v", "momentum", "feedback"):
                getattr(layer, kind).copy_(tensors[f"{kind}.{index}"])
        self.reset_round()


def accumulate(feedback: Tensor, step: Tensor, decay: float) -> None:
    """feedback (int32 units) ← round(decay · feedback) + round(step / unit), in place, bounded; uses up `step`
    (fp32)."""
    rounded = step.mul_(2.0**UNIT_BITS).round_().clamp_(-STEP_BOUND, STEP_BOUND).to(torch.int32)
    if decay != 1.0:
        feedback.copy_(feedback.double().mul_(decay).round_())
    feedback.add_(rounded).clamp_(-FEEDBACK_BOUND, FEEDBACK_BOUND)
