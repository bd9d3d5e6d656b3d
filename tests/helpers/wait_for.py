"""What tests of several machines in threads wait for, and how long."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def waits_for(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.01)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


@contextmanager
def stepping(*machines, then: Callable[[object], None] | None = None) -> Iterator[None]:
    """These machines' loops, in threads: they take arrivals and answer joining peers."""
    over, failures = threading.Event(), []

    def loop(machine) -> None:
        try:
            while not over.is_set():
                machine.step()
                if then:
                    then(machine)
                time.sleep(0.02)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=loop, args=(machine,)) for machine in machines]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not failures


def joined(machine, *others, timeout: float = 30.0):
    """Joins as the loop does: the snapshot if there is one, then everything since."""
    machine.knows(*others)
    snapshot = machine.exchange.fetch_snapshot(timeout)
    if snapshot is not None:
        machine.anchor.load(snapshot.fragments, snapshot.heads, snapshot.retracted)
    machine.start()
    return snapshot
