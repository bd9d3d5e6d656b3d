"""Wait, without peers, for the end of a pause in which a worker has left them."""

import threading
import time
from collections.abc import Callable

from barnraise.protocol.enums import Activity
from barnraise.protocol.polling import PERSON_POLL_SECONDS
from barnraise.protocol.reports import NO_FIGURES
from barnraise.state_dir import RunDir, StateDir
from barnraise.training.limits.rule_watch import RuleWatch, local_now
from barnraise.training.local_control import LocalControl
from barnraise.training.local_status import LocalStatus, read_status
from barnraise.training.memory_return import return_memory
from barnraise.training.pauses import Pause, choose_pause
from barnraise.training.train import Worker

STATUS_SECONDS = 2.0  # between two statuses while nothing happens


def follow_event(leaving: threading.Event) -> threading.Event:
    """Return an event that is set once `leaving` is, and that can also be set alone."""
    following = threading.Event()

    def follow() -> None:
        leaving.wait()
        following.set()

    threading.Thread(target=follow, name="leaving", daemon=True).start()
    return following


class OfflinePauses:
    """Waits between two workers of one machine."""

    def __init__(
        self,
        home: StateDir,
        rules: RuleWatch,
        leaving: threading.Event,
        on_status: Callable[[LocalStatus], None],
    ) -> None:
        """Wait by the rules of the machine's owner; `leaving` ends the command."""
        self._home = home
        self._rules = rules
        self._leaving = leaving
        self._on_status = on_status

    def run_between(self, train: Callable[[], Worker | None]) -> Worker | None:
        """Create and run workers, as long as one has left its peers for a pause alone.

        Returns:
            The last worker; None if there was none.
        """
        while True:
            worker = train()
            if worker is None or worker.offline_pause is None or self._leaving.is_set():
                return worker
            self._wait(worker)
            if self._leaving.is_set():
                return worker

    def _wait(self, worker: Worker) -> None:
        """Wait until the pause is over; the worker has stopped, and its folder is closed.

        Another pause may follow the first one: the next worker returns to its peers and pauses.
        """
        folder = self._home.open_run(worker.joined.run)
        try:
            control = LocalControl(folder.path)
            control.register_worker()
            control.watch_stop(folder, self._leaving)
            directive = worker.reporter.directive
            return_memory()
            last = read_status(folder.path) or LocalStatus(**dict(NO_FIGURES))
            shown_at = 0.0
            while not self._leaving.is_set():
                now = local_now()
                local = control.find_pause(now.timestamp())
                pause = choose_pause(local, self._rules.decision, directive, now)
                if pause is None or not pause.is_offline:
                    return
                if time.monotonic() - shown_at >= STATUS_SECONDS:
                    shown_at = time.monotonic()
                    self._show(folder, last, pause)
                self._leaving.wait(PERSON_POLL_SECONDS)
        finally:
            folder.close()

    def _show(self, folder: RunDir, last: LocalStatus, pause: Pause) -> None:
        fields = {
            "activity": Activity.PAUSED,
            "reason": pause.sentence,
            "pause": pause.view,
            "rate": 0.0,
            "peers": 0,
            "at": time.time(),
        }
        status = last.model_copy(update=fields)
        folder.write_status(status.model_dump(mode="json"))
        self._on_status(status)
