"""Fetch a log page by page, and fetch and verify later pages while one is being stored."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any, TypeVar

from coordinator.eventlog.event import Event, open_events
from coordinator.replication.client import MirrorClient
from coordinator.replication.protocol import LogPart

PAGES_AHEAD = 4  # fetched and not stored yet
T = TypeVar("T")


@dataclass(frozen=True)
class LogPage:
    """Hold a page; `open_events` returns its verified events, or raises MessageError."""

    part: LogPart
    open_events: Callable[[], list[Event]]


@contextmanager
def signature_checker() -> Iterator[Executor]:
    """Start a process that verifies signatures, for a whole log.

    Each signature keeps the interpreter busy for a sixth of a millisecond.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as executor:
        yield executor


def fetch_pages(
    client: MirrorClient, origin: str, after: int, executor: Executor | None = None
) -> Iterator[LogPage]:
    """Yield a log's pages from number `after` + 1 to the end that the mirror shows.

    Args:
        client: The mirror.
        origin: The log.
        after: Number of the last event not to fetch.
        executor: Verifies the signatures; without one, `LogPage.open_events` does.

    Raises:
        PeerError: The mirror does not answer, or not as a mirror does.
    """
    has_more = True
    while has_more:
        part = client.fetch_events(origin, after)
        if executor:
            yield LogPage(part, executor.submit(open_events, part.events).result)
        else:
            yield LogPage(part, partial(open_events, part.events))
        after += len(part.events)  # `ingest` rejects a page with a gap
        has_more = part.more and bool(part.events)


@contextmanager
def prefetched(source: Iterator[T]) -> Iterator[Iterator[T]]:
    """Iterate over `source` in a thread that is PAGES_AHEAD items ahead.

    Leaving early waits only for the item that is being produced.
    """
    end: Any = object()
    with ThreadPoolExecutor(1) as executor:
        pending = deque(executor.submit(next, source, end) for _ in range(PAGES_AHEAD))

        def items() -> Iterator[T]:
            while (item := pending.popleft().result()) is not end:
                pending.append(executor.submit(next, source, end))
                yield item

        try:
            yield items()
        finally:
            executor.shutdown(cancel_futures=True)
