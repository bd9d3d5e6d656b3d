"""Divide a worker's time among several runs, one after another.

A turn ends with the round in which its time is over, so that every round is whole. The run that has
had least of its share comes next; what a long round takes too much is repaid by later turns. A run
that waits, because its owner paused it or it is not launched, passes its turn on.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping

from barnraise.errors import BarnraiseError, CoordinatorUnreachableError, DeviceLostError
from barnraise.protocol.enums import Activity
from barnraise.protocol.polling import LOOP_POLL_SECONDS, PERSON_POLL_SECONDS
from barnraise.training.local_status import LocalStatus

log = logging.getLogger("barnraise")

CYCLE_SECONDS = 3600.0  # in which each run has a turn: fetching what it missed takes a minute
WAIT_SECONDS = 120.0  # a run that waits passes its turn on after so long
PREPARE_SECONDS = 900.0  # in which a run must begin to train, or pass its turn on


class Turn:
    """One turn of a run."""

    def __init__(self, seconds: float, stop: threading.Event) -> None:
        """Begin a turn of so many seconds. `stop` ends it as well, and with it the worker."""
        self.leaving = threading.Event()  # ends the worker, as Ctrl-C does
        self.has_waited = False  # whether the run waited, so that the turn was passed on
        self._seconds = seconds
        self._patience = min(WAIT_SECONDS, seconds)
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
        # Where the whole machine pauses, no other run would train meanwhile.
        is_machines = status.pause is not None and status.pause.reason.concerns_one_machine
        self._patience = self._seconds if is_machines else min(WAIT_SECONDS, self._seconds)

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


def plan_turn(shares: Mapping[str, float], served: Mapping[str, float]) -> tuple[str, float]:
    """Return which run comes next, and for how many seconds: without end for the only one. Pure.

    Args:
        shares: of the time, by run.
        served: seconds per share that each run has had.
    """
    run = min(shares, key=served.__getitem__)
    share = shares[run] / sum(shares.values())
    return run, CYCLE_SECONDS * share if len(shares) > 1 else math.inf


def train_in_turns(
    shares: Mapping[str, float],
    stop: threading.Event,
    train: Callable[[str, Turn], object],
) -> bool:
    """Train runs one after another until all have ended, or somebody ends the worker.

    Args:
        shares: of the time, by run. That of a run which ends goes to the others.
        stop: ends the worker.
        train: trains a run until it ends, or the turn's `leaving` is set.

    Returns:
        Whether all runs have ended.

    Raises:
        BarnraiseError: the last run cannot be trained. What keeps this machine from another run is
            logged.
    """
    shares = dict(shares)
    served = dict.fromkeys(shares, 0.0)
    while shares and not stop.is_set():
        run, seconds = plan_turn(shares, served)
        turn = Turn(seconds, stop)
        started = time.monotonic()
        has_ended = False
        try:
            train(run, turn)
            has_ended = not turn.leaving.is_set()
        except BarnraiseError as error:
            # A lost GPU is of no run: the program begins again.
            if len(shares) == 1 or isinstance(error, DeviceLostError):
                raise
            log.error("%s", error)
            has_ended = not isinstance(error, CoordinatorUnreachableError)
            turn.has_waited = not has_ended
            stop.wait(LOOP_POLL_SECONDS)
        finally:
            turn.close()
        if has_ended:
            del shares[run]
        elif not (turn.is_passed_on or turn.has_waited):
            return False
        else:
            # Who waits is owed nothing for its turn.
            seconds = max(seconds if turn.has_waited else 0.0, time.monotonic() - started)
            served[run] += seconds / shares[run]
    return not shares
