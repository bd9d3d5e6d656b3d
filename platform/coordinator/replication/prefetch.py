"""What another mirror has, page by page: while one page is kept here, later ones are fetched and read."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import TypeVar

from coordinator.eventlog.event import Event, open_events
from coordinator.replication.client import MirrorClient
from coordinator.replication.protocol import LogPart

AHEAD = 4  # pages fetched and not yet kept
END = object()
T = TypeVar("T")


@dataclass(frozen=True)
class LogPage:
    """`read`: its events, once each one's signature holds. Raises MessageError."""

    part: LogPart
    open_events: Callable[[], list[Event]]


@contextmanager
def signature_checker() -> Iterator[Executor]:
    """A process that checks signatures, for a whole log: each holds the interpreter for a sixth of a millisecond."""
    with ProcessPoolExecutor(1, get_context("spawn")) as crew:
        yield crew


def fetch_pages(
    peer: MirrorClient, origin: str, after: int, crew: Executor | None = None
) -> Iterator[LogPage]:
    """From number `after` + 1 to the end that the other shows; `crew` reads them. Raises PeerError."""
    more = True
    while more:
        part = peer.fetch_events(origin, after)
        yield LogPage(
            part,
            crew.submit(open_events, part.events).result
            if crew
            else partial(open_events, part.events),
        )
        after += len(part.events)  # numbers without a hole, or it is refused
        more = part.more and bool(part.events)


@contextmanager
def prefetched(source: Iterator[T]) -> Iterator[Iterator[T]]:
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
