"""Watch a machine's rules and facts while a worker runs, and decide whether it may train."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime

from barnraise.errors import StateError
from barnraise.planning.limits import Limits
from barnraise.protocol.enums import PauseReason
from barnraise.state_dir import StateDir
from barnraise.training.limits.decision import HOLD_SECONDS, TRAIN, Facts, TrainingDecision, decide
from barnraise.training.limits.machine_facts import FactsReader
from barnraise.training.limits.monthly_traffic import MonthlyTraffic

log = logging.getLogger("barnraise")

READ_SECONDS = 1.5  # between two looks at the facts: a pause follows within two seconds
UNREADABLE_REASON = "paused: its limits cannot be read; `barnraise limits` says why"


def local_now() -> datetime:
    """Return the time without a zone: this machine's, also after somebody has set another one."""
    if hasattr(time, "tzset"):
        time.tzset()
    return datetime.now()


class RuleWatch:
    """Reads the facts every `READ_SECONDS` in a thread of its own, and remembers the decision.

    The rules are those in the machine's file now: a rule that changes applies at once.
    """

    def __init__(
        self,
        state_dir: StateDir,
        reader: FactsReader,
        clock: Callable[[], datetime] = local_now,
    ) -> None:
        """Watch the rules of a machine; `clock` returns the time in its zone."""
        self._state_dir = state_dir
        self._reader = reader
        self._clock = clock
        self._limits = Limits()
        self._is_readable = True
        self._decision = TRAIN
        self._looked_at = 0.0  # seconds since 1970
        self._traffic = MonthlyTraffic(state_dir.path)
        self._count_sent: Callable[[], int] = lambda: 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rules", daemon=True)

    @property
    def decision(self) -> TrainingDecision:
        """Return the newest decision."""
        return self._decision

    @property
    def limits(self) -> Limits:
        """Return the newest limits that could be read."""
        return self._limits

    def count_traffic(self, count_sent: Callable[[], int]) -> None:
        """Count what a new worker sends: `count_sent` returns its bytes since it started."""
        self._traffic.save()
        self._traffic = MonthlyTraffic(self._state_dir.path)
        self._count_sent = count_sent

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Decide once, then go on in a thread while the block runs."""
        self.refresh()
        self._thread.start()
        try:
            yield
        finally:
            self._ended.set()
            self._thread.join()
            self._traffic.save()

    def refresh(self) -> TrainingDecision:
        """Read the rules and the facts, and decide."""
        self._load_limits()
        now = self._clock()
        if now.timestamp() < self._looked_at:  # the clock was set back: a pause would end too late
            self._decision = TRAIN
        self._looked_at = now.timestamp()
        if not self._is_readable:
            until = now.timestamp() + HOLD_SECONDS
            self._decision = TrainingDecision(PauseReason.RULES, UNREADABLE_REASON, until)
            return self._decision
        facts = self._read_facts(self._limits, now)
        decision = decide(self._limits, facts, now)
        if decision.kind != self._decision.kind:
            log.info("%s", decision.reason or "training may go on by this machine's limits")
        self._decision = decision
        return decision

    def _read_facts(self, limits: Limits, now: datetime) -> Facts:
        sent = self._traffic.record(self._count_sent(), f"{now:%Y-%m}")
        return replace(self._reader.read(limits), month_sent=sent, last=self._decision)

    def _load_limits(self) -> None:
        """Load the limits; forget the last decision if they are others than before."""
        before = self._limits, self._is_readable
        try:
            self._limits = self._state_dir.limits
            self._is_readable = True
        except StateError as error:
            if self._is_readable:
                log.error("%s. Training waits until then", error)
            self._is_readable = False
        if (self._limits, self._is_readable) != before:
            self._decision = TRAIN

    def _watch(self) -> None:
        while not self._ended.wait(READ_SECONDS):
            try:
                self.refresh()
            except OSError as error:  # a full disk, or a sensor that has gone
                log.warning("the machine's facts cannot be read: %s", error)
