"""Train what the exchange is compared with.

These are data parallelism with one gradient of everybody's text each step, synchronous DiLoCo in
fp32, and one machine alone.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from study_case import Case
from study_model import SIZE, STEP_TOKENS, Replica, initial_units, rate_scale, sample_batch, zeros

from barnraise.swap.precision import units_to_float

FINAL_SEQUENCES = 512  # of the last validation
CURVE_SEQUENCES = 64  # of the validations on the way
CURVE_POINTS = 8  # of the training, the last validation included


class LossCurve:
    """Validation losses at even distances of tokens."""

    def __init__(self, budget: int) -> None:
        """Prepare the curve of a training of `budget` tokens."""
        self.budget = budget
        self.points: list[list[float]] = []
        self._next = 1

    def record(self, tokens: float, validate: Callable[[int], float]) -> None:
        """Validate if a point is due.

        Args:
            tokens: trained so far.
            validate: returns the loss over so many sequences.
        """
        while self._next < CURVE_POINTS and tokens >= self._next * self.budget / CURVE_POINTS:
            self.points.append([int(tokens), round(validate(CURVE_SEQUENCES), 4)])
            self._next += 1


def make_result(curve: LossCurve, loss: float, **more: Any) -> dict[str, Any]:
    """Return a result; the loss of a training that diverged is None."""
    final = round(loss, 5) if math.isfinite(loss) else None
    return {"loss": final, "curve": curve.points, **more}


def train_parallel(case: Case) -> dict[str, Any]:
    """Train by synchronous data parallelism, or one replica alone.

    The gradients of data parallelism would cross the network each step, 4 bytes a parameter. One
    replica alone takes as many steps, each of its own text only.
    """
    machine, curve = Replica(case), LossCurve(case.tokens)
    machine.flat.copy_(units_to_float(initial_units(case.seed)))
    replicas = 1 if case.kind == "alone" else case.replicas
    steps = case.tokens // (case.replicas * STEP_TOKENS)
    for step in range(steps):
        batches = [sample_batch(case.seed, i, step) for i in range(replicas)]
        machine.compute_gradient(torch.cat(batches))
        machine.step(case.rate * rate_scale(step / steps * case.tokens, case.tokens))
        curve.record((step + 1) / steps * case.tokens, partial(machine.validate, machine.flat))
    sent = 0 if replicas == 1 else 4 * SIZE * steps * replicas
    loss = machine.validate(machine.flat, FINAL_SEQUENCES)
    return make_result(curve, loss, bytes=sent, tokens=steps * replicas * STEP_TOKENS)


def train_diloco(case: Case) -> dict[str, Any]:
    """Train by synchronous DiLoCo, all in fp32.

    After H local steps the mean of all changes goes through Nesterov's momentum; everybody waits
    for everybody.
    """
    machines = [Replica(case) for _ in range(case.replicas)]
    anchor, momentum = units_to_float(initial_units(case.seed)), zeros()
    curve = LossCurve(case.tokens)
    steps = case.tokens // (case.replicas * STEP_TOKENS)
    sent = 0
    for begin in range(0, steps, case.steps):
        end = min(steps, begin + case.steps)
        mean = zeros()
        for i, machine in enumerate(machines):
            machine.flat.copy_(anchor)
            for step in range(begin, end):
                machine.compute_gradient(sample_batch(case.seed, i, step))
                machine.step(case.rate * rate_scale(step / steps * case.tokens, case.tokens))
            mean += (anchor - machine.flat) / case.replicas
        momentum.mul_(case.momentum).add_(mean)
        anchor -= case.outer_rate * (mean + case.momentum * momentum)
        sent += 4 * SIZE * case.replicas
        curve.record(end / steps * case.tokens, partial(machines[0].validate, anchor))
    loss = machines[0].validate(anchor, FINAL_SEQUENCES)
    tokens = steps * case.replicas * STEP_TOKENS
    return make_result(curve, loss, bytes=sent, tokens=tokens)
