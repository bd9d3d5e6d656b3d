"""Divide a worker's time among several runs, one after another.

A turn ends with the round in which its time is over, so that every round is whole. The run that has
had least of its share comes next; what a long round takes too much is repaid by later turns. A run
that waits, because it is paused or not launched, passes its turn on.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from barnraise.errors import BarnraiseError, CoordinatorUnreachableError, DeviceLostError
from barnraise.protocol.enums import Activity
from barnraise.protocol.polling import LOOP_POLL_SECONDS, PERSON_POLL_SECONDS
from barnraise.training.local_status import LocalStatus

log = logging.getLogger("barnraise")

CYCLE_SECONDS = 3600.0  # in which each run has a turn: fetching what it missed takes a minute
WAIT_SECONDS = 60.0  # a run that waits passes its turn on after so long
PREPARE_SECONDS = 900.0  # in which a run must begin to train, or pass its turn on
RETRY_SECONDS = 900.0  # after which a run that waited is tried again


@dataclass(frozen=True)
class PlannedTurn:
    """Which run comes next, and for how long. Both times are infinite for the only run."""

    run: str
    seconds: float
    patience: float  # seconds that it may wait before another run has its turn


class TurnPlanner:
    """Decide whose turn it is. Pure: times are arguments, in monotonic seconds."""

    def __init__(self, shares: Mapping[str, float]) -> None:
        """Divide the time among these runs in proportion to their shares."""
        self._shares = dict(shares)
        self._served = dict.fromkeys(shares, 0.0)  # seconds per share that each run has had
        self._waits_until = dict.fromkeys(shares, -math.inf)

    @property
    def runs(self) -> list[str]:
        """Return the runs that have not ended."""
        return list(self._shares)

    def plan_turn(self, now: float) -> PlannedTurn | None:
        """Return the next turn; None if all runs have ended."""
        if not self._shares:
            return None
        ready = [run for run in self._shares if self._waits_until[run] <= now]
        if ready:
            run = min(ready, key=self._served.__getitem__)
        else:  # all wait: the one that waits longest may be ready
            run = min(self._shares, key=self._waits_until.__getitem__)
        others = [self._waits_until[other] - now for other in self._shares if other != run]
        if not others:
            return PlannedTurn(run, math.inf, math.inf)
        share = self._shares[run] / sum(self._shares.values())
        return PlannedTurn(run, CYCLE_SECONDS * share, max(WAIT_SECONDS, min(others)))

    def record_turn(self, run: str, seconds: float) -> None:
        """Count a turn that a run has had."""
        self._served[run] += seconds / self._shares[run]

    def record_wait(self, run: str, now: float) -> None:
        """Pass the turn of a run on that waits. It is owed nothing for that time."""
        self._waits_until[run] = now + RETRY_SECONDS
        self._served[run] = max(self._served.values())

    def remove(self, run: str) -> None:
        """Hand the share of a run that has ended on to the others."""
        for facts in (self._shares, self._served, self._waits_until):
            del facts[run]


class Turn:
    """One turn of a run.

    Attributes:
        leaving: ends the worker, as Ctrl-C does.
        has_waited: whether the run waited, so that the turn was passed on.
    """

    def __init__(self, planned: PlannedTurn, stop: threading.Event) -> None:
        """Begin the turn. `stop` ends it as well, and with it the worker."""
        self.leaving = threading.Event()
        self.has_waited = False
        self._patience = planned.patience
        self._seconds = planned.seconds
        self._waits_since: float | None = time.monotonic()  # for the launch, at first
        self._started = time.monotonic()
        self._trains_since: float | None = None
        self._has_ended = False
        self._closed = threading.Event()
        self._stop = stop
        threading.Thread(target=self._watch, name="turn", daemon=True).start()

    @property
    def is_passed_on(self) -> bool:
        """Return whether the turn's end, and nobody's wish, let the worker leave."""
        return self._has_ended and not self._stop.is_set()

    def end_with_round(self) -> bool:
        """End the turn if its time is over; the worker asks between two rounds.

        The time begins with the training, so that fetching what the run lacks does not use it up.
        """
        since = self._trains_since
        if since is not None and time.monotonic() - since >= self._seconds:
            self._end()
        return self._has_ended

    def observe(self, status: LocalStatus) -> None:
        """Record whether the run waits; the worker calls this between two steps."""
        if self._trains_since is None and status.activity is Activity.TRAINING:
            self._trains_since = time.monotonic()
        if status.activity not in (Activity.PAUSED, Activity.SUSPENDED):
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = time.monotonic()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def _end(self) -> None:
        self._has_ended = True
        self.leaving.set()

    def _watch(self) -> None:
        """End the turn where no round will end it: the run waits, or does not begin to train."""
        longest = max(PREPARE_SECONDS, self._seconds)
        while not self._closed.wait(PERSON_POLL_SECONDS):
            now, since = time.monotonic(), self._waits_since
            is_stuck = self._trains_since is None and now - self._started > longest
            self.has_waited = is_stuck or (since is not None and now - since > self._patience)
            if self._stop.is_set():
                self.leaving.set()
            elif self.has_waited:
                self._end()
            if self.leaving.is_set():
                return


def train_in_turns(
    shares: Mapping[str, float],
    stop: threading.Event,
    train: Callable[[str, Turn], object],
) -> bool:
    """Train runs one after another until all have ended, or somebody ends the worker.

    Args:
        shares: of the time, by run.
        stop: ends the worker.
        train: trains a run until it ends, or the turn's `leaving` is set.

    Returns:
        Whether all runs have ended.

    Raises:
        BarnraiseError: the last run cannot be trained. What keeps this machine from another run is
            logged.
    """
    planner = TurnPlanner(shares)
    while planned := planner.plan_turn(time.monotonic()):
        if stop.is_set():
            return False
        turn = Turn(planned, stop)
        started = time.monotonic()
        try:
            train(planned.run, turn)
        except BarnraiseError as error:
            # A lost GPU is of no run: the program begins again.
            if len(planner.runs) == 1 or isinstance(error, DeviceLostError):
                raise
            log.error("%s", error)
            if isinstance(error, CoordinatorUnreachableError):
                planner.record_wait(planned.run, time.monotonic())
                stop.wait(LOOP_POLL_SECONDS)
            else:
                planner.remove(planned.run)
            continue
        finally:
            turn.close()
        if stop.is_set():
            return False
        if turn.has_waited:
            planner.record_wait(planned.run, time.monotonic())
        elif turn.is_passed_on:
            planner.record_turn(planned.run, time.monotonic() - started)
        elif turn.leaving.is_set():
            return False
        else:
            planner.remove(planned.run)
    return True
