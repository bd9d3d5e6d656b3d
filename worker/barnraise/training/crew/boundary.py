"""The activations of one machine of a crew: what others compute arrives, what they need is sent."""

import torch
from torch import Tensor

from barnraise.planning.plan import Plan
from barnraise.swap.activations import Activations
from barnraise.training.crew.roster import CrewRoster
from barnraise.training.crew.step_protocol import StepSide


class BoundaryActivations(Activations):
    """Activations that stay on this machine, in `inner`, or pass between it and its neighbours.

    A step that is cancelled goes on with zeros up to where its computation asks whether to stop.
    """

    def __init__(self, inner: Activations, plan: Plan, roster: CrewRoster, step: StepSide) -> None:
        """Divide a step's activations by the roster."""
        super().__init__()
        self._inner, self._roster, self._step = inner, roster, step
        self._number = roster.holders[plan.blocks.start]
        self._device = torch.device(plan.device)
        self._received: set[tuple[int, int]] = set()  # what arrived and stays stored

    @property
    def count(self) -> int:
        """Return the number of activations stored."""
        return self._inner.count

    def store(self, i: int, m: int, x: Tensor) -> None:
        """Store the input of block i for micro-batch m, or send it to the machine that needs it."""
        if self._roster.receiver_of(i) == self._number:
            self._inner.store(i, m, x)
        else:
            self._step.send(i, m, x)

    def get(self, i: int, m: int) -> Tensor:
        """Return the input of block i for micro-batch m, or wait for it; it stays stored."""
        if self._arrives(i, m):
            self._inner.store(i, m, self._receive(i, m))
            self._received.add((i, m))
        return self._inner.get(i, m)

    def pop(self, i: int, m: int) -> Tensor:
        """Return the input of block i for micro-batch m, or wait for it, and remove it."""
        if self._arrives(i, m):
            return self._receive(i, m)
        return self._inner.pop(i, m)

    def finish(self) -> None:
        """End a step."""
        self._inner.finish()

    def _arrives(self, i: int, m: int) -> bool:
        """Return whether another machine sends this, and it is not stored here yet."""
        return self._roster.sender_of(i) != self._number and (i, m) not in self._received

    def _receive(self, i: int, m: int) -> Tensor:
        x = self._step.receive(i, m)
        if x is None:
            roster = self._roster
            x = torch.zeros(roster.sequences, roster.model.context, roster.model.width)
        return x.to(self._device)
