"""The activations of one machine of a crew: what others compute arrives, what they need is sent."""

import torch
from torch import Tensor

from barnraise.planning.plan import Plan
from barnraise.swap.activations import Activations
from barnraise.training.crew.roster import CrewRoster
from barnraise.training.crew.step_protocol import CrewStep


class BoundaryActivations(Activations):
    """Activations that stay on this machine, in `inner`, or pass between it and its neighbours.

    A step that is cancelled goes on with zeros up to where its computation asks whether to stop.
    """

    def __init__(self, inner: Activations, plan: Plan, roster: CrewRoster, step: CrewStep) -> None:
        """Divide a step's activations by its routes; `m` counts this machine's micro-batches."""
        super().__init__()
        self._inner, self._roster, self._step = inner, roster, step
        self._device = torch.device(plan.device)

    @property
    def count(self) -> int:
        """Return the number of activations stored."""
        return self._inner.count

    def send(self, i: int, m: int, x: Tensor) -> None:
        """Pass on what the group of block i needs next, here or on another machine."""
        if self._step.sends(i):
            self._step.send(i, m, x)
        else:
            self._inner.send(i, m, x)

    def receive(self, i: int, m: int) -> Tensor:
        """Return what was passed on to the group of block i, or wait until it arrives."""
        if self._step.receives(i):
            return self._receive(i, m)
        return self._inner.receive(i, m)

    def store(self, i: int, m: int, x: Tensor) -> None:
        """Store the input of block i for micro-batch m."""
        self._inner.store(i, m, x)

    def pop(self, i: int, m: int) -> Tensor:
        """Return the input of block i for micro-batch m, and remove it."""
        return self._inner.pop(i, m)

    def prefetch(self) -> None:
        """Prepare for `pop`."""
        self._inner.prefetch()

    def finish(self) -> None:
        """End a step."""
        self._inner.finish()

    def _receive(self, i: int, m: int) -> Tensor:
        x = self._step.receive(i, m)
        if x is None:
            roster = self._roster
            x = torch.zeros(roster.sequences, roster.model.context, roster.model.width)
        return x.to(self._device)
