"""What ours is held against: one gradient of everybody's text a step, synchronous DiLoCo in fp32, and one alone."""

import math
from functools import partial

import torch
from study_case import Case
from study_model import SIZE, STEP_TOKENS, Replica, batch, initial_units, nothing, rate_scale

from barnraise.swap.precision import units_to_float

FINAL, BETWEEN, POINTS = (
    512,
    64,
    8,
)  # sequences of the last validation and of those on the way; how many of these


class Curve:
    """Validation losses at even distances of tokens."""

    def __init__(self, budget: int):
        self.budget, self.points, self._next = budget, [], 1

    def note(self, tokens: float, validate) -> None:
        """`validate(sequences)` is called when it is time."""
        while self._next < POINTS and tokens >= self._next * self.budget / POINTS:
            self.points.append([int(tokens), round(validate(BETWEEN), 4)])
            self._next += 1


def finished(curve: Curve, loss: float, **more) -> dict:
    return {"loss": round(loss, 5) if math.isfinite(loss) else None, "curve": curve.points, **more}


def parallel(case: Case) -> dict:
    """Synchronous data parallel: its gradients would cross the net each step, 4 bytes a parameter."""
    machine, curve = Replica(case.optimizer), Curve(case.tokens)
    machine.flat.copy_(units_to_float(initial_units(case.seed)))
    replicas = 1 if case.kind == "alone" else case.replicas
    steps = case.tokens // (
        case.replicas * STEP_TOKENS
    )  # alone: as many, each of one replica's text
    for step in range(steps):
        machine.learn(torch.cat([batch(case.seed, i, step) for i in range(replicas)]))
        machine.step(case.rate * rate_scale(step / steps * case.tokens, case.tokens))
        curve.note((step + 1) / steps * case.tokens, lambda n: machine.validate(machine.flat, n))
    sent = 0 if replicas == 1 else 4 * SIZE * steps * replicas
    return finished(
        curve,
        machine.validate(machine.flat, FINAL),
        bytes=sent,
        tokens=steps * replicas * STEP_TOKENS,
    )


def diloco(case: Case) -> dict:
    """H local steps, the mean of all changes, Nesterov's momentum on it, all in fp32; everybody waits for everybody."""
    machines = [Replica(case.optimizer) for _ in range(case.replicas)]
    anchor, momentum = units_to_float(initial_units(case.seed)), nothing()
    curve, steps, sent = Curve(case.tokens), case.tokens // (case.replicas * STEP_TOKENS), 0
    for begin in range(0, steps, case.steps):
        end = min(steps, begin + case.steps)
        mean = nothing()
        for i, machine in enumerate(machines):
            machine.flat.copy_(anchor)
            for step in range(begin, end):
                machine.learn(batch(case.seed, i, step))
                machine.step(case.rate * rate_scale(step / steps * case.tokens, case.tokens))
            mean += (anchor - machine.flat) / case.replicas
        momentum.mul_(case.momentum).add_(mean)
        anchor -= case.outer_rate * (mean + case.momentum * momentum)
        sent += 4 * SIZE * case.replicas
        curve.note(end / steps * case.tokens, partial(machines[0].validate, anchor))
    loss = machines[0].validate(anchor, FINAL)
    return finished(curve, loss, bytes=sent, tokens=steps * case.replicas * STEP_TOKENS)
