"""Train again with a smaller plan when memory runs out, once.

A plan fits what the machine had free when it was made. Other programs may take some of it since: a
browser or a game, or a desktop whose window grows on the GPU.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

from barnraise.errors import MemoryShortageError
from barnraise.planning.limits import Limits
from barnraise.planning.memory_pressure import SMALLER
from barnraise.planning.plan import Plan

log = logging.getLogger("barnraise")


class Trainer(Protocol):
    """What trains under a plan: a worker."""

    plan: Plan

    def run(self) -> None:
        """Train until the run ends or this machine leaves."""
        ...


TrainerT = TypeVar("TrainerT", bound=Trainer)


def smaller_limits(plan: Plan, limits: Limits, device: bool) -> Limits:
    """Return limits under which a plan uses less of the device's memory, or of the RAM."""
    if device:
        return replace(limits, device_memory=int(SMALLER * plan.device_bytes))
    return replace(limits, memory=int(SMALLER * plan.host_bytes))


def run_within_memory(
    create: Callable[[Limits], TrainerT | None], limits: Limits
) -> TrainerT | None:
    """Create a trainer and run it; if memory runs out, do so again under smaller limits, once.

    Args:
        create: returns a trainer under limits; None if this machine is to leave.
        limits: what the trainer may use at first.

    Returns:
        The trainer that ran last; None if there was none.

    Raises:
        MemoryShortageError: memory ran out twice.
        PlanError: no smaller plan fits the model.
    """
    trainer = create(limits)
    if trainer is None:
        return None
    try:
        trainer.run()
    except MemoryShortageError as error:
        limits = smaller_limits(trainer.plan, limits, error.device)
        memory, option = ("GPU memory", "device-memory") if error.device else ("RAM", "memory")
        log.warning(
            "%s. Training goes on from the last checkpoint with a plan that takes %.0f %% less %s. "
            "To plan so from the start: barnraise limits --%s",
            error,
            100 * (1 - SMALLER),
            memory,
            option,
        )
    else:
        return trainer
    # The error is gone here, and with it what its frames held of the first trainer's memory.
    trainer = create(limits)
    if trainer is not None:
        trainer.run()
    return trainer
