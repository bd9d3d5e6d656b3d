"""Ways to break the order of the engine's operations. A race detector must find each one."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from unittest import mock

from barnraise.planning import program
from barnraise.planning.program import Hazards, Operation, OperationKind
from barnraise.swap import activations


@contextlib.contextmanager
def forget(kind: OperationKind, uses: bool, resource: str = "") -> Iterator[None]:
    """Let operations of a kind forget what they use, or what they change.

    Args:
        kind: of the operations.
        uses: forget what they use; else what they change.
        resource: the first word of the resources that are forgotten; all if empty.
    """

    def cut(op: Operation) -> Operation:
        if op.kind is not kind:
            return op
        field = "uses" if uses else "changes"
        left = tuple(r for r in getattr(op, field) if resource and r[0] != resource)
        return replace(op, **{field: left})

    dependencies, record = Hazards.dependencies, Hazards.record
    with (
        mock.patch.object(Hazards, "dependencies", lambda self, op: dependencies(self, cut(op))),
        mock.patch.object(Hazards, "record", lambda self, op, token: record(self, cut(op), token)),
    ):
        yield


@contextlib.contextmanager
def fetch_activations_at_once() -> Iterator[None]:
    """Let activations come back without waiting for the kernels that may use their memory."""
    original = activations.HostActivations._copy_in

    def copy_in(self, i, m):
        compute = self._lanes[program.LaneName.COMPUTE]
        with mock.patch.object(compute, "record_event", _finished_event):
            return original(self, i, m)

    with mock.patch.object(activations.HostActivations, "_copy_in", copy_in):
        yield


def _finished_event() -> activations.LaneEvent:
    event = activations.LaneEvent()
    event.complete()
    event.clock = {}
    return event


@contextlib.contextmanager
def forget_copies_back() -> Iterator[None]:
    """Let activations that come back be used at once, without waiting for their copies."""
    original = activations.HostActivations._copy_in

    def copy_in(self, i, m):
        _, x = original(self, i, m)
        return _finished_event(), x

    with mock.patch.object(activations.HostActivations, "_copy_in", copy_in):
        yield


DAMAGES: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "activations come too early": fetch_activations_at_once,
    "activations are used before they are here": forget_copies_back,
    "load ignores its source": partial(forget, OperationKind.LOAD, uses=True),
    "load ignores its slot": partial(forget, OperationKind.LOAD, uses=False),
    "offload ignores the gradient": partial(forget, OperationKind.OFFLOAD, uses=True),
    "offload ignores its target": partial(forget, OperationKind.OFFLOAD, uses=False),
    "add ignores what it adds": partial(forget, OperationKind.ADD, uses=True),
    "add ignores its sum": partial(forget, OperationKind.ADD, uses=False),
    "update ignores the gradient": partial(
        forget, OperationKind.UPDATE, uses=True, resource="host gradient"
    ),
    "forward ignores the slots": partial(forget, OperationKind.FORWARD, uses=True),
    "fetch ignores the ring": partial(forget, OperationKind.FETCH, uses=False),
    "store ignores the ring": partial(forget, OperationKind.STORE, uses=True),
    "read ignores its buffer": partial(forget, OperationKind.READ, uses=False),
}
