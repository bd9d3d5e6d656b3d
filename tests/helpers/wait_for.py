"""Wait for conditions, and run the loops of several machines in threads."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until a condition holds; fail the test after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"the condition did not hold within {seconds:.0f} seconds"
        time.sleep(0.01)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fail the test when the block takes longer."""
    started_at = time.monotonic()
    yield
    assert time.monotonic() - started_at < seconds


@contextmanager
def stepping(*machines, then: Callable[[object], None] | None = None) -> Iterator[None]:
    """Run the loops of machines in threads during the block: they apply updates and serve joiners.

    Args:
        machines: The machines.
        then: Called with a machine after each of its steps.
    """
    stopping = threading.Event()
    failures = []

    def loop(machine) -> None:
        try:
            while not stopping.is_set():
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
        stopping.set()
        for thread in threads:
            thread.join()
    assert not failures


def join_peers(machine, *others, timeout: float = 30.0, trust_one: bool = False, confirmed=None):
    """Join as the training loop does: load a snapshot if there is one, then all later updates.

    Returns:
        The snapshot, or None.
    """
    machine.add_peers(*others)
    machine.exchange.set_listed_anchors(confirmed or {})
    snapshot = machine.exchange.fetch_snapshot(timeout, trust_all=trust_one)
    if snapshot is not None:
        machine.anchor.load(snapshot.fragments, snapshot.heads, snapshot.retracted)
    machine.start()
    return snapshot
