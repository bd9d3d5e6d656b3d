"""Let one of an engine's devices fail in the middle of a step, as a card that is pulled out."""

import itertools

from barnraise.planning.program import Operation, OperationKind
from barnraise.swap.engine import Engine
from barnraise.swap.executor import Task


def lose_device(engine: Engine, kind: OperationKind, device: int, operations: int = 1) -> None:
    """Let a device fail for good in its next operation of a kind, or after so many of them."""
    original = engine.executor.handlers[kind]
    left = itertools.count(operations - 1, -1)

    def failing(op: Operation) -> Task:
        call = original(op)

        def run() -> None:
            if op.device == device and next(left) <= 0:
                raise RuntimeError("CUDA error: unspecified launch failure")
            call()

        return run

    engine.executor.handlers[kind] = failing
