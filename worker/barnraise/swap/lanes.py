"""Bytes between tiers: lanes that work beside each other, events between them, and the disk past the page cache.

A lane is one Python thread; under CUDA it has a stream as well, so that what it starts there runs beside the kernels.
Whoever depends on what a lane does waits for its event: within CUDA by the stream, elsewhere by the thread. The
machine without a GPU runs the very same lanes, without streams.
"""

import contextlib
import errno
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from barnraise.errors import BarnraiseError, StateError
from barnraise.swap.arena import PAGE

REQUEST_BYTES = (
    8 << 20
)  # bytes a disk is asked for at a time: large enough to stream, small enough to be fair


class LaneEvent:
    """Something a lane will have done. Carries the failure of what could not be done."""

    def __init__(self) -> None:
        self._said = threading.Event()
        self._mark: torch.cuda.Event | None = None
        self.error: BaseException | None = None

    @property
    def is_issued(self) -> bool:
        """Whether the lane has come to it (its stream may still be at it)."""
        return self._said.is_set()

    @property
    def is_finished(self) -> bool:
        """Whether it is done altogether."""
        return self.is_issued and (self._mark is None or self._mark.query())

    def complete(
        self, mark: "torch.cuda.Event | None" = None, error: BaseException | None = None
    ) -> None:
        self._mark, self.error = mark, error
        self._said.set()

    def wait(self, stream: "torch.cuda.Stream | None" = None) -> None:
        """Until it is done; on a stream: what the stream does next waits for it. Raises what the lane raised."""
        self._said.wait()
        if self.error is not None:
            raise self.error
        if self._mark is not None:
            if stream is not None:
                stream.wait_event(self._mark)
            else:
                self._mark.synchronize()


class WorkerLane:
    """Work done beside the others' work: in the order given or, `eager`, whatever can begin, the most urgent first.
    `inline`: in the caller's own thread, at once."""

    def __init__(
        self,
        name: str,
        device: torch.device | None = None,
        inline: bool = False,
        eager: bool = False,
        threads: int = 1,
    ):
        """`threads`: that torch computes with in it."""
        self.name, self.inline, self.eager, self._threads = name, inline, eager, threads
        self.stream = None
        if device is not None and device.type == "cuda":
            self.stream = torch.cuda.current_stream(device) if inline else torch.cuda.Stream(device)
        self.watch: Callable[[str, object, float, float], None] | None = (
            None  # (lane, label, began, ended)
        )
        self._queue: deque[tuple[Callable[[], None], list[LaneEvent], LaneEvent, object, float]] = (
            deque()
        )
        self._more = threading.Condition()
        self._closed = self._busy = False
        self._thread = (
            None
            if inline
            else threading.Thread(target=self._work, name=f"barnraise-{name}", daemon=True)
        )
        if self._thread:
            # In torch this number is each thread's own, and the last one set is what new threads begin with: whoever
            # makes lanes sets its own again.
            self._ready = threading.Event()
            self._thread.start()
            self._ready.wait()

    def submit(
        self,
        call: Callable[[], None],
        after: Iterable[LaneEvent] = (),
        label: object = "",
        urgency: float = 0.0,
    ) -> LaneEvent:
        """Runs `call` once all of `after` are done. The least `urgency` is the most urgent."""
        event, after = LaneEvent(), list(after)
        if self._thread is None:
            self._run(call, after, event, label)
            if event.error is not None:
                raise event.error
            return event
        with self._more:
            self._queue.append((call, after, event, label, urgency))
            self._more.notify_all()
        return event

    def record_event(self) -> LaneEvent:
        """An event for all that an inline lane has begun."""
        event = LaneEvent()
        event.complete(None if self.stream is None else self.stream.record_event())
        return event

    def wait_until_idle(self) -> None:
        """Until all that was submitted is done."""
        if self._thread is not None:
            with self._more:
                self._more.wait_for(lambda: not self._queue and not self._busy)
        if self.stream is not None:
            self.stream.synchronize()

    def close(self) -> None:
        """Ends the thread after what was submitted."""
        if self._thread is not None:
            with self._more:
                self._closed = True
                self._more.notify_all()
            self._thread.join()

    def _work(self) -> None:
        torch.set_num_threads(self._threads)
        self._ready.set()
        while True:
            with self._more:
                self._more.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                chosen = self._queue[0]
                if self.eager:
                    ready = [
                        each for each in self._queue if all(event.is_issued for event in each[1])
                    ]
                    chosen = min(ready, key=lambda each: each[4], default=chosen)
                self._queue.remove(chosen)
                self._busy = True
            call, after, event, label, _ = chosen
            self._run(call, after, event, label)
            del (
                call,
                after,
                event,
                chosen,
            )  # nothing of a finished task is kept alive while waiting for the next
            with self._more:
                self._busy = False
                self._more.notify_all()

    def _run(
        self, call: Callable[[], None], after: list[LaneEvent], event: LaneEvent, label: object
    ) -> None:
        try:
            for each in after:
                each.wait(self.stream)
            began = time.perf_counter()
            with torch.no_grad() if not self.inline else contextlib.nullcontext():
                if self.stream is None:
                    call()
                    mark = None
                else:
                    with torch.cuda.stream(self.stream):
                        call()
                        mark = torch.cuda.Event(enable_timing=False)
                        mark.record(self.stream)
            if self.watch is not None:
                if mark is not None:
                    mark.synchronize()  # a trace is of what happened, at the price of some overlap
                self.watch(self.name, label, began, time.perf_counter())
            event.complete(mark)
        except BaseException as error:  # whoever waits for the event gets it
            event.complete(error=error)


def checksum(data: Tensor) -> int:
    """64 bits over uint8 [n] (n a multiple of 8): sums of 64-bit words by 4 KiB sectors, each sector weighted by an odd
    number, mod 2**64. As fast as memory, and finds flipped bits, lost, stale and swapped sectors; against accidents,
    not against attackers."""
    words = data.view(torch.int64)
    sectors = PAGE // 8
    whole = words.numel() // sectors * sectors
    sums = words[:whole].view(-1, sectors).sum(1)
    if whole < words.numel():
        sums = torch.cat((sums, words[whole:].sum().view(1)))
    weights = torch.arange(1, 2 * sums.numel(), 2, dtype=torch.int64)
    weights.mul_(0x5851F42D4C957F2D).bitwise_xor_(weights >> 29)
    return int(sums.mul_(weights | 1).sum().item()) & ((1 << 64) - 1)


class DirectFile:
    """One file of a fixed size, read and written in large aligned requests, past the page cache where the system
    can."""

    def __init__(self, path: Path, size: int):
        """Takes the space at once. Raises StateError naming the folder and the need."""
        self.path, self.size = path, size
        self.direct = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._open(path)
        except OSError as error:
            raise StateError(
                f"{path.parent} cannot hold the model's state: {error.strerror or error}"
            ) from None
        try:
            self._reserve(size)
        except OSError as error:
            os.close(self._file)
            what = "is full" if error.errno == errno.ENOSPC else (error.strerror or str(error))
            raise StateError(
                f"{path.parent} {what}: the model's state needs {size / 1e9:,.1f} GB there"
            ) from None

    def _open(self, path: Path) -> int:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
        if hasattr(os, "O_DIRECT"):
            try:
                opened = os.open(path, flags | os.O_DIRECT, 0o600)
            except OSError as error:
                if error.errno != errno.EINVAL:  # a file system in memory has no way past the cache
                    raise
            else:
                self.direct = True
                return opened
        opened = os.open(path, flags, 0o600)
        if hasattr(os, "F_NOCACHE"):
            import fcntl

            fcntl.fcntl(opened, fcntl.F_NOCACHE, 1)
        return opened

    def _reserve(self, size: int) -> None:
        if os.fstat(self._file).st_size >= size:
            return
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._file, 0, size)
        else:
            os.ftruncate(self._file, size)

    def read(self, offset: int, into: Tensor) -> None:
        """Fills uint8 [n] from `offset`, both multiples of a page. Raises OSError."""
        view = memoryview(into.numpy())
        while len(view):
            with self._named():
                got = self._read(view[:REQUEST_BYTES], offset)
            if got <= 0:
                raise OSError(errno.EIO, f"{self.path} ends at {offset}")
            offset, view = offset + got, view[got:]

    def write(self, offset: int, data: Tensor) -> None:
        view = memoryview(data.numpy())
        while len(view):
            with self._named():
                put = self._write(view[:REQUEST_BYTES], offset)
            offset, view = offset + put, view[put:]

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Failures of an open file do not say which it was."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror or str(error), str(self.path)) from None

    if hasattr(os, "preadv"):

        def _read(self, view: memoryview, offset: int) -> int:
            return os.preadv(self._file, [view], offset)

        def _write(self, view: memoryview, offset: int) -> int:
            return os.pwritev(self._file, [view], offset)

    else:  # Windows: one position for all
        _turn = threading.Lock()

        def _read(self, view: memoryview, offset: int) -> int:
            with self._turn:
                os.lseek(self._file, offset, os.SEEK_SET)
                data = os.read(self._file, len(view))
            view[: len(data)] = data
            return len(data)

        def _write(self, view: memoryview, offset: int) -> int:
            with self._turn:
                os.lseek(self._file, offset, os.SEEK_SET)
                return os.write(self._file, view)

    def sync(self) -> None:
        """What was written survives a power cut."""
        (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(self._file)

    def close(self) -> None:
        os.close(self._file)


def as_state_error(error: BaseException, what: str) -> BarnraiseError:
    """A failure as a sentence about the resource that failed."""
    if isinstance(error, BarnraiseError):
        return error
    told = getattr(error, "strerror", None) or str(error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in told:
        asked = re.search(r"allocate (\d+) bytes", told)
        need = f" ({int(asked[1]) / 1e6:,.0f} MB more)" if asked else ""
        told = (
            f"there is not as much memory left as it needs{need}; another program may have taken it"
        )
    where = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
    return StateError(f"{what}: {told}{where}")
