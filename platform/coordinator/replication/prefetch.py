"""What another mirror has, page by page: while one page is kept here, later ones are fetched and read."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import TypeVar

from coordinator.eventlog.event import Event, read_all
from coordinator.replication.client import Peer
from coordinator.replication.protocol import LogPart

AHEAD = 4  # pages fetched and not yet kept
END = object()
T = TypeVar("T")


@dataclass(frozen=True)
class Page:
    """`read`: its events, once each one's signature holds. Raises MessageError."""

    part: LogPart
    read: Callable[[], list[Event]]


@contextmanager
def reader() -> Iterator[Executor]:
    """A process that checks signatures, for a whole log: each holds the interpreter for a sixth of a millisecond."""
    with ProcessPoolExecutor(1, get_context("spawn")) as crew:
        yield crew


def pages(peer: Peer, origin: str, after: int, crew: Executor | None = None) -> Iterator[Page]:
    """From number `after` + 1 to the end that the other shows; `crew` reads them. Raises Unheard."""
    more = True
    while more:
        part = peer.events(origin, after)
        yield Page(
            part,
            crew.submit(read_all, part.events).result if crew else partial(read_all, part.events),
        )
        after += len(part.events)  # numbers without a hole, or it is refused
        more = part.more and bool(part.events)


@contextmanager
def ahead(source: Iterator[T]) -> Iterator[Iterator[T]]:
    """The same, made by a thread as far ahead as AHEAD. Who leaves early waits for no more than is being made."""
    with ThreadPoolExecutor(1) as line:
        coming = deque(line.submit(next, source, END) for _ in range(AHEAD))

        def take() -> Iterator[T]:
            while (made := coming.popleft().result()) is not END:
                coming.append(line.submit(next, source, END))
                yield made

        try:
            yield take()
        finally:
            line.shutdown(cancel_futures=True)
