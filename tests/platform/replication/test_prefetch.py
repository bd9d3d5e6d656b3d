"""Pages of another mirror's log, fetched and read ahead of who keeps them."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.event_log_builder import LogBuilder
from helpers.wait_for import wait_until
from hypothesis import given
from hypothesis import strategies as st

from barnraise.errors import MessageError
from coordinator.eventlog.event import open_event
from coordinator.replication.client import PeerError
from coordinator.replication.prefetch import PAGES_AHEAD, fetch_pages, prefetched, signature_checker
from coordinator.replication.protocol import LogPart


class PageServer:
    """Serves a log in pages of two; after `breaks` of them it is silent."""

    def __init__(self, log: LogBuilder, breaks: int = 1000):
        self.log, self.breaks, self.asked = log, breaks, []

    def fetch_events(self, origin: str, after: int) -> LogPart:
        assert origin == self.log.origin
        if len(self.asked) == self.breaks:
            raise PeerError("silent")
        self.asked.append(after)
        left = self.log.events[after:]
        return LogPart(events=left[:2], more=len(left) > 2)


@pytest.fixture
def log():
    other = LogBuilder()
    for n in range(6):
        other.append("note.write", "a", {"text": str(n)})
    return other  # seven events, with the first that begins it


def seqs(found) -> list[int]:
    return [event.seq for page in found for event in page.open_events()]


def test_log_is_fetched_whole_with_and_without_an_executor(log):
    with (
        ThreadPoolExecutor(1) as crew,
        prefetched(fetch_pages(PageServer(log), log.origin, 0, crew)) as found,
    ):
        assert seqs(found) == [1, 2, 3, 4, 5, 6, 7]
    with prefetched(fetch_pages(server := PageServer(log), log.origin, 3)) as found:
        assert seqs(found) == [4, 5, 6, 7]
    assert server.asked == [3, 5]
    with prefetched(fetch_pages(PageServer(log), log.origin, 7)) as found:
        [page] = found
        assert page.part.events == [] and page.open_events() == []


def test_process_decodes_pages_and_errors_like_this_one(log):
    """In a process of its own what it found, and what it refused, must survive the way back."""
    altered = log.events[4].model_copy(update={"body": log.events[4].body.replace('"3"', '"4"')})
    assert altered != log.events[4]
    log.events[4] = altered
    with (
        signature_checker() as crew,
        prefetched(fetch_pages(PageServer(log), log.origin, 0, crew)) as found,
    ):
        first, second, third, fourth = found
        assert [*first.open_events(), *second.open_events()] == [
            open_event(each) for each in log.events[:4]
        ]
        with pytest.raises(MessageError, match="its signature does not match"):
            third.open_events()
        assert [event.seq for event in fourth.open_events()] == [7]


def test_silence_comes_after_the_pages_that_came_before_it(log):
    came = []
    with (
        pytest.raises(PeerError),
        prefetched(fetch_pages(PageServer(log, breaks=2), log.origin, 0)) as found,
    ):
        for page in found:
            came.append(page.part.events[0])
    assert came == [log.events[0], log.events[2]]


@given(st.integers(0, 20), st.integers(0, 25))
def test_early_exit_leaves_the_pages_read_in_order(length, count):
    produced = []

    def source():
        for n in range(length):
            produced.append(n)
            yield n

    with prefetched(source()) as found:
        read = [n for _, n in zip(range(count), found, strict=False)]
    assert read == list(range(min(length, count)))
    assert produced == list(range(len(produced))) and len(produced) <= min(
        length, count + PAGES_AHEAD + 1
    )


def test_it_goes_no_further_ahead_than_it_may():
    made, gate = [], threading.Event()

    def source():
        for n in range(100):
            made.append(n)
            yield n

    with prefetched(source()) as found:
        wait_until(lambda: len(made) == PAGES_AHEAD)
        assert not gate.wait(0.1) and len(made) == PAGES_AHEAD
        assert next(found) == 0
        wait_until(lambda: len(made) == PAGES_AHEAD + 1)
