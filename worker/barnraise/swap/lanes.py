"""Lanes that work in parallel, and the events between them.

A lane is one Python thread. Under CUDA it has a stream as well, so that what it starts there runs
alongside the kernels. Work that depends on a lane's work waits for its event: on CUDA the stream
waits, elsewhere the thread. A machine without a GPU runs the same lanes, without streams.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from barnraise.swap.device import (
    Stream,
    StreamEvent,
    current_stream,
    has_streams,
    new_stream,
    record_event,
    use_device,
    use_stream,
)
from barnraise.swap.tile_threads import sharing_tiles

# Receives (lane, label, start, end) of a finished task; times as of time.perf_counter().
Observer = Callable[[str, object, float, float], None]


class LaneEvent:
    """The completion of a task on a lane, or its failure."""

    def __init__(self) -> None:
        self._issued = threading.Event()
        self._cuda_event: StreamEvent | None = None
        self.error: BaseException | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the task is complete, on the stream too."""
        return self._issued.is_set() and (self._cuda_event is None or self._cuda_event.query())

    def complete(
        self, cuda_event: "StreamEvent | None" = None, error: BaseException | None = None
    ) -> None:
        """Mark the task as run, with the event of its stream or with its failure."""
        self._cuda_event, self.error = cuda_event, error
        self._issued.set()

    def wait(self, stream: "Stream | None" = None) -> None:
        """Wait until the task is complete; with a stream, only let the stream wait.

        Raises:
            BaseException: what the task raised.
        """
        self._issued.wait()
        if self.error is not None:
            raise self.error
        if self._cuda_event is not None:
            if stream is not None:
                stream.wait_event(self._cuda_event)
            else:
                self._cuda_event.synchronize()


@dataclass(eq=False)
class _Task:
    call: Callable[[], object] | None  # until it runs
    dependencies: list[LaneEvent]
    event: LaneEvent
    label: object
    urgency: float


class WorkerLane:
    """Run tasks in the order submitted or, if `eager`, the most urgent task that can start.

    An `inline` lane runs each task at once in the caller's thread.

    Attributes:
        name: the lane's name.
        stream: the CUDA stream, or None.
    """

    def __init__(
        self,
        name: str,
        device: torch.device | None = None,
        inline: bool = False,
        eager: bool = False,
        threads: int = 1,
        shares_tiles: bool = False,
    ) -> None:
        """Start the lane.

        Args:
            name: names the thread.
            device: with a CUDA device, the lane has a stream there.
            inline: run tasks in the caller's thread.
            eager: choose among the tasks that can start.
            threads: number of threads with which torch computes in this lane.
            shares_tiles: whether these may share a tile; see `sharing_tiles`.
        """
        self.name = name
        self._device = device
        self.stream: Stream | None = None
        if device is not None and has_streams(device):
            self.stream = current_stream(device) if inline else new_stream(device)
        self._eager, self._threads = eager, threads
        self._shares_tiles = shares_tiles
        self._observer: Observer | None = None
        self._queue: deque[_Task] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._busy = False
        self._thread: threading.Thread | None = None
        if not inline:
            # torch's number of threads belongs to each thread, and new threads get the number set
            # last: code that starts lanes sets its own number again.
            self._started = threading.Event()
            self._thread = threading.Thread(
                target=self._work, name=f"barnraise-{name}", daemon=True
            )
            self._thread.start()
            self._started.wait()

    def observe(self, observer: Observer) -> None:
        """Report each finished task to `observer`, for traces; this costs some overlap."""
        self._observer = observer

    def submit(
        self,
        call: Callable[[], object],
        after: Iterable[LaneEvent] = (),
        label: object = "",
        urgency: float = 0.0,
    ) -> LaneEvent:
        """Run `call` once all events in `after` are complete.

        Args:
            call: the task.
            after: what it depends on.
            label: names the task to the observer.
            urgency: the smallest is the most urgent.

        Returns:
            The task's event.

        Raises:
            BaseException: an inline task raised it.
        """
        task = _Task(call, list(after), LaneEvent(), label, urgency)
        if self._thread is None:
            self._run(task)
            if task.event.error is not None:
                raise task.event.error
            return task.event
        with self._changed:
            self._queue.append(task)
            self._changed.notify_all()
        return task.event

    def record_event(self) -> LaneEvent:
        """Return an event for everything that an inline lane has started."""
        event = LaneEvent()
        if self.stream is None:
            event.complete()
        else:
            event.complete(record_event(self.stream))
        return event

    def wait_until_idle(self) -> None:
        """Wait until all submitted tasks are complete."""
        if self._thread is not None:
            with self._changed:
                self._changed.wait_for(lambda: not self._queue and not self._busy)
        if self.stream is not None:
            self.stream.synchronize()

    def close(self) -> None:
        """Stop the thread after the submitted tasks."""
        if self._thread is not None:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            self._thread.join()
        if self.stream is not None:
            # Buffers are unpinned next. A device that failed has no copies left to wait for.
            with contextlib.suppress(RuntimeError):
                self.stream.synchronize()

    def _work(self) -> None:
        torch.set_num_threads(self._threads)
        self._started.set()
        # Each thread has a current device: without this one it would set up the first GPU as well.
        with use_device(self._device), sharing_tiles(self._shares_tiles):
            self._work_off_tasks()

    def _work_off_tasks(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                task = self._next_task()
                self._queue.remove(task)
                self._busy = True
            self._run(task)
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _next_task(self) -> _Task:
        if not self._eager:
            return self._queue[0]
        # A copy that is only issued may lie behind many kernels: the lane would wait for it.
        ready = [
            task for task in self._queue if all(event.is_finished for event in task.dependencies)
        ]
        return min(ready, key=lambda task: task.urgency, default=self._queue[0])

    def _run(self, task: _Task) -> None:
        try:
            cuda_event = self._execute(task)
        except BaseException as error:  # is raised where the event is waited for
            task.event.complete(error=error)
        else:
            task.event.complete(cuda_event)

    def _execute(self, task: _Task) -> "StreamEvent | None":
        """Run a task after what it depends on; return the event that its stream records after it.

        Once the task's own event is complete, the lane holds none of its tensors: the thread that
        waits for the event frees their memory.
        """
        call, task.call = task.call, None
        assert call is not None, "a task runs once"
        for event in task.dependencies:
            event.wait(self.stream)
        started = time.perf_counter()
        cuda_event = self._call(call)
        if self._observer is not None:
            if cuda_event is not None:
                cuda_event.synchronize()  # a trace shows when the work was done, not started
            self._observer(self.name, task.label, started, time.perf_counter())
        return cuda_event

    def _call(self, call: Callable[[], object]) -> "StreamEvent | None":
        """Run a task on the lane's stream; return the event that its stream records after it."""
        inline = self._thread is None
        with contextlib.nullcontext() if inline else torch.no_grad():
            if self.stream is None:
                call()
                return None
            with use_stream(self.stream):
                call()
                return record_event(self.stream)
