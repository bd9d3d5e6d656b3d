"""Test prefetching and decoding pages of another mirror's log."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.mirrors.event_log_builder import LogBuilder
from hypothesis import given
from hypothesis import strategies as st

from barnraise.errors import MessageError
from coordinator.eventlog.event import open_event
from coordinator.replication.client import PeerError
from coordinator.replication.prefetch import PAGES_AHEAD, fetch_pages, prefetched, signature_checker
from coordinator.replication.protocol import LogPart


class PageServer:
    """Serve a log in pages of two; after `max_pages` of them raise PeerError."""

    def __init__(self, log: LogBuilder, max_pages: int = 1000):
        self.log = log
        self.max_pages = max_pages
        self.requested = []

    def fetch_events(self, origin: str, after: int) -> LogPart:
        assert origin == self.log.origin
        if len(self.requested) == self.max_pages:
            raise PeerError("silent")
        self.requested.append(after)
        left = self.log.events[after:]
        return LogPart(events=left[:2], more=len(left) > 2)


@pytest.fixture
def log():
    other = LogBuilder()
    for n in range(6):
        other.append("note.write", "a", {"text": str(n)})
    return other  # seven events, including the log's first


def read_seqs(pages) -> list[int]:
    return [event.seq for page in pages for event in page.open_events()]


def test_log_is_fetched_whole_with_and_without_an_executor(log):
    with (
        ThreadPoolExecutor(1) as executor,
        prefetched(fetch_pages(PageServer(log), log.origin, 0, executor)) as pages,
    ):
        assert read_seqs(pages) == [1, 2, 3, 4, 5, 6, 7]
    server = PageServer(log)
    with prefetched(fetch_pages(server, log.origin, 3)) as pages:
        assert read_seqs(pages) == [4, 5, 6, 7]
    assert server.requested == [3, 5]
    with prefetched(fetch_pages(PageServer(log), log.origin, 7)) as pages:
        [page] = pages
        assert page.part.events == [] and page.open_events() == []


def test_process_decodes_pages_and_errors_like_this_one(log):
    """Return both the events and the errors of another process unchanged."""
    altered = log.events[4].model_copy(update={"body": log.events[4].body.replace('"3"', '"4"')})
    assert altered != log.events[4]
    log.events[4] = altered
    with (
        signature_checker() as executor,
        prefetched(fetch_pages(PageServer(log), log.origin, 0, executor)) as pages,
    ):
        first, second, third, fourth = pages
        assert [*first.open_events(), *second.open_events()] == [
            open_event(event) for event in log.events[:4]
        ]
        with pytest.raises(MessageError, match="its signature does not match"):
            third.open_events()
        assert [event.seq for event in fourth.open_events()] == [7]


def test_error_is_raised_after_the_pages_fetched_before_it(log):
    first_events = []
    with (
        pytest.raises(PeerError),
        prefetched(fetch_pages(PageServer(log, max_pages=2), log.origin, 0)) as pages,
    ):
        for page in pages:
            first_events.append(page.part.events[0])
    assert first_events == [log.events[0], log.events[2]]


@given(st.integers(0, 20), st.integers(0, 25))
def test_early_exit_leaves_the_pages_read_in_order(length, count):
    produced = []

    def source():
        for n in range(length):
            produced.append(n)
            yield n

    with prefetched(source()) as pages:
        read = [n for _, n in zip(range(count), pages, strict=False)]
    assert read == list(range(min(length, count)))
    assert produced == list(range(len(produced)))
    assert len(produced) <= min(length, count + PAGES_AHEAD + 1)
