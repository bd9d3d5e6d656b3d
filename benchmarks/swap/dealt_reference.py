"""The reference of several devices over one host copy: the same deal on one device.

The micro-batches of each device are computed one run after the other, with everything resident.
Each run's gradient begins at zero, and the runs' gradients are added in the order of the devices.
No code of the engine that knows several devices is used.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate

import torch
from bitwise import RunResult, open_engine, read_state, resident_plan, sample_text
from torch import Tensor

from barnraise.planning import program
from barnraise.planning.plan import DeviceShare, Plan
from barnraise.spec import ADAMW, ModelSpec
from barnraise.swap.activations import Activations
from barnraise.swap.adamw import sum_of_squares
from barnraise.swap.engine import Engine
from barnraise.swap.executor import PendingUpdate
from barnraise.swap.forward_backward import ForwardBackward


def dealt(plan: Plan, counts: Sequence[int]) -> Plan:
    """Return a staged plan with its micro-batches dealt to windows of RAM."""
    devices = tuple(DeviceShare(plan.device, count) for count in counts)
    return replace(plan, staged=True, devices=devices, micro_batches=sum(counts))


@cache
def run_one_after_the_other(
    model: ModelSpec, counts: tuple[int, ...], clipping: str, steps: int, optimizer: str = ADAMW
) -> RunResult:
    """Return the losses and the state at the end of the dealt run on one device."""
    plan = resident_plan(model, sum(counts), "exact", optimizer=optimizer)
    return run_one_after_the_other_under(plan, counts, steps, clipping)


def run_one_after_the_other_under(
    plan: Plan, counts: tuple[int, ...], steps: int, clipping: str = "exact"
) -> RunResult:
    """Return the same under a plan with exact clipping.

    A step's program ends with the gradients then, and updates nothing.
    """
    engine = open_engine(plan)
    losses: list[float] = []
    try:
        for step in range(steps):
            batch = sample_text(plan.model, plan.sequences * sum(counts), seed=step)
            losses.append(_step(engine, batch.split(plan.sequences), counts, clipping))
        return losses, read_state(engine)
    finally:
        engine.close()


def _step(
    engine: Engine, batches: Sequence[Tensor], counts: tuple[int, ...], clipping: str
) -> float:
    """Make one step, and return its loss."""
    plan, executor = engine.plan, engine.executor
    totals: list[Tensor] = []
    losses: list[float] = []
    for end, count in zip(accumulate(counts), counts, strict=True):
        passes = ForwardBackward(
            replace(plan, micro_batches=count),
            [batch.to(plan.device) for batch in batches[end - count : end]],
            [1 / len(batches)] * count,
            Activations(),
        )
        executor.run(partial(program.step_program, pending=False), None, [passes])
        executor.drain()
        buffers, fragments = executor.buffers, range(len(plan.fragments))
        if plan.staged:
            gradients = [buffers.host_gradient(i) for i in fragments]
        else:
            gradients = [buffers.gradient(i, -1) for i in fragments]
        losses += torch.stack(passes.losses).tolist()
        if not totals:
            totals = [gradient.clone() for gradient in gradients]
        else:
            for total, gradient in zip(totals, gradients, strict=True):
                total.add_(gradient)
    for gradient, total in zip(gradients, totals, strict=True):
        gradient.copy_(total)
    _update(engine, totals, clipping)
    return sum(losses)


def _update(engine: Engine, totals: Sequence[Tensor], clipping: str) -> None:
    """Apply the update of a step whose gradients are in the engine's buffers."""
    recipe, progress = engine.recipe, engine.progress
    norms = {i: sum_of_squares(total).sqrt_() for i, total in enumerate(totals)}
    after = replace(progress, optimizer_steps=progress.optimizer_steps + 1)
    update = PendingUpdate(
        clipping=clipping,
        learning_rate=recipe.learning_rate,
        matrix_rate=recipe.peak_matrix_rate,
        step_number=after.optimizer_steps,
        prediction_growth=(0.0,) * len(totals),
        progress=after,
        norms=norms,
    )
    if clipping == "exact":
        whole = math.sqrt(sum(value * value for value in map(float, norms.values())))
        update.clip_to(whole, recipe.clip)
    engine.executor.run(program.flush_program, update)
    engine.executor.drain()
    engine.progress = after
