"""Train again with a smaller plan when memory runs out, a few times.

A plan fits what the machine had free when it was made. Other programs may take some of it since: a
browser or a game, or a desktop whose window grows on the GPU.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

from barnraise.errors import MemoryShortageError
from barnraise.planning.budgets import device_limit
from barnraise.planning.limits import Limits
from barnraise.planning.memory_pressure import ATTEMPTS, CALM_SECONDS, RETRY_SHARE
from barnraise.planning.plan import Plan
from barnraise.training.memory_watch import MemoryWatch

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
        return replace(limits, device_memory=device_limit(int(RETRY_SHARE * plan.device_bytes)))
    return replace(limits, memory=int(RETRY_SHARE * plan.host_bytes))


def run_within_memory(
    create: Callable[[Limits], TrainerT | None],
    limits: Limits,
    watch: MemoryWatch,
    clock: Callable[[], float] = time.monotonic,
) -> TrainerT | None:
    """Create a trainer and run it; if memory runs out, do so again under smaller limits.

    Each further attempt uses less; one that has trained for `CALM_SECONDS` is the last of its row.

    Args:
        create: measures what is free now and returns a trainer under limits; None if this machine
            is to leave.
        limits: what the trainer may use at first.
        watch: remembers each shortage.
        clock: returns monotonic seconds.

    Returns:
        The trainer that ran last; None if there was none.

    Raises:
        MemoryShortageError: memory ran out after `ATTEMPTS` smaller plans.
        PlanError: no smaller plan fits the model.
    """
    attempts = 0
    while True:
        trainer = create(limits)
        if trainer is None:
            return None
        started = clock()
        try:
            trainer.run()
        except MemoryShortageError as error:
            attempts = 1 if clock() - started >= CALM_SECONDS else attempts + 1
            if attempts > ATTEMPTS:
                raise
            limits = smaller_limits(trainer.plan, limits, error.device)
            _log_attempt(error, limits, attempts)
        else:
            return trainer
        watch.on_shortage()
        # The error is gone here, and with it what its frames held of the trainer's memory.
        del trainer


def _log_attempt(error: MemoryShortageError, limits: Limits, attempt: int) -> None:
    memory, option, limit = "RAM", "memory", limits.memory
    if error.device:
        memory, option, limit = "GPU memory", "device-memory", limits.device_memory
    log.warning(
        "%s. Training goes on from the last checkpoint with a plan for what is free now, which "
        "takes at least %.0f %% less %s (attempt %d of %d). To plan so from the start: barnraise "
        "limits --%s %dMB",
        error,
        100 * (1 - RETRY_SHARE),
        memory,
        attempt,
        ATTEMPTS,
        option,
        (limit or 0) // 10**6,
    )
