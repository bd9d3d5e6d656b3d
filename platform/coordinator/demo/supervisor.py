"""Start child processes again when they end, and stop everything when that repairs nothing."""

import logging
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import redis
import redis.exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from coordinator.demo.processes import STOP_SECONDS, ChildCommand, ProcessGroup, kill_orphans
from coordinator.demo.restart_policy import MAX_FAILURES, WINDOW_SECONDS, RestartPolicy
from coordinator.lib import counters

log = logging.getLogger("coordinator.demo.supervisor")

POLL_SECONDS = 0.1  # between two looks at all children
LOG_SECONDS = 10.0  # between two looks at the sizes of all logs
COUNT_SECONDS = 1.0  # between two attempts to count restarts while Valkey is away
CAUSE_LINES = 5  # of a child's log, in the message about its end


@dataclass
class SupervisedChild:
    """A child that must run."""

    command: ChildCommand
    # Returns why it cannot be started now; "" if it can. What prevents a start from outside, such
    # as a full disk, is no failure of the child.
    blocker: Callable[[], str]
    process: subprocess.Popen  # an ended one until the next is started
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    start_at: float | None = None  # seconds of the monotonic clock; None while it runs
    blocked: str = ""  # why the last attempt to start it failed


class Supervisor(ProcessGroup):
    """A group of processes that starts those again that must run and have ended.

    One thread watches all of them. It logs why a child ended, waits as `RestartPolicy` says, and
    counts the restart in Valkey for /metrics. If a child fails too often, all children are stopped
    and `failure` says so. A child that was stopped or killed through this group stays down.

    Args:
        logs: Folder with one log file for each process.

    Attributes:
        restarts: How often each child was started again.
        failure: A sentence about the child that made it stop everything; "" for none.
    """

    def __init__(self, logs: Path) -> None:
        super().__init__(logs)
        self.restarts: Counter[str] = Counter()
        self.failure = ""
        self._supervised: dict[str, SupervisedChild] = {}
        self._restart_counter: RestartCounter | None = None
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def supervise(
        self, name: str, command: ChildCommand, blocker: Callable[[], str] = lambda: ""
    ) -> subprocess.Popen:
        """Start a process; whenever it ends, start it again once `blocker` names no obstacle."""
        with self._lock:
            process = self.start_child(name, command)
            self._supervised[name] = SupervisedChild(command, blocker, process)
            if self._thread is None:
                self._ending.clear()
                self._thread = threading.Thread(
                    target=self._watch, name="supervisor of child processes", daemon=True
                )
                self._thread.start()
        return process

    def count_restarts_in(self, valkey_url: str) -> None:
        """Count restarts from now on in this Valkey, for /metrics."""
        self._restart_counter = RestartCounter(valkey_url)

    def supervised_names(self) -> list[str]:
        """List the children that are supervised now."""
        with self._lock:
            return [name for name in self._supervised if self._is_ours(name)]

    def running_pid(self, name: str) -> int | None:
        """Return the pid of a child; None while it does not run."""
        process = self.children.get(name)
        return process.pid if process is not None and process.poll() is None else None

    def failed_process(self) -> str | None:
        """Return the name of a process that ended with an error and is not started again."""
        with self._lock:
            children = list(self.children.items())
            return next(
                (
                    name
                    for name, child in children
                    if child.poll() not in (None, 0) and not self._is_ours(name)
                ),
                None,
            )

    def stop(self, *names: str, seconds: float = STOP_SECONDS) -> None:
        """Stop these processes, or all and the supervision with them."""
        super().stop(*names, seconds=seconds)
        if names:
            return
        self._ending.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._thread = None

    def _is_ours(self, name: str) -> bool:
        """Return whether a child is supervised: nobody has stopped or replaced its process."""
        child = self._supervised.get(name)
        return child is not None and self.children.get(name) is child.process

    # ---- the watching thread

    def _watch(self) -> None:
        count_at = look_at_logs = 0.0
        while not self._ending.wait(POLL_SECONDS):
            for name in list(self._supervised):
                self._look_at(name)
            if self.failure:
                self.stop()
            if self._restart_counter and time.monotonic() >= count_at:
                self._restart_counter.publish()
                count_at = time.monotonic() + COUNT_SECONDS
            if time.monotonic() >= look_at_logs:
                self.bound_logs()
                look_at_logs = time.monotonic() + LOG_SECONDS

    def _look_at(self, name: str) -> None:
        """Start a child again if it has ended and its delay is over."""
        with self._lock:
            if not self._is_ours(name):
                self._supervised.pop(name, None)
                return
            child = self._supervised[name]
            if child.process.poll() is None:
                return
            if child.start_at is None:
                self._plan_restart(name, child)
            elif time.monotonic() >= child.start_at:
                self._restart(name, child)

    def _plan_restart(self, name: str, child: SupervisedChild) -> None:
        kill_orphans(child.process)
        delay = child.policy.record_failure(time.monotonic())
        cause = describe_end(child.process.returncode)
        tail = self.log_tail(name, CAUSE_LINES)
        if delay is None:
            self.failure = (
                f"{name} ended {MAX_FAILURES} times within {WINDOW_SECONDS:.0f} seconds, so "
                f"everything was stopped. The last time it {cause}. "
                f"The end of its log {self.logs / (name + '.log')}:\n{tail}"
            )
            log.error("%s", self.failure)
            return
        child.start_at = time.monotonic() + delay
        log.warning(
            "%s %s and is started again in %.1f s. The end of its log:\n%s",
            *(name, cause, delay, tail),
        )

    def _restart(self, name: str, child: SupervisedChild) -> None:
        reason = child.blocker()
        if not reason:
            try:
                child.process = self.start_child(name, child.command, append_log=True)
            except OSError as error:  # out of memory or of files: not the child's failure
                reason = str(error)
        if reason:
            if reason != child.blocked:
                log.warning("%s is not started yet: %s", name, reason)
            child.blocked = reason
            return
        child.start_at = None
        child.blocked = ""
        self.restarts[name] += 1
        if self._restart_counter:
            self._restart_counter.add(name)


class RestartCounter:
    """Count restarts in Valkey, where /metrics finds them; while it is away, later."""

    def __init__(self, url: str) -> None:
        options = {"socket_timeout": 0.5, "socket_connect_timeout": 0.5}
        self._client = redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **options)
        self._pending: Counter[str] = Counter()

    def add(self, name: str) -> None:
        """Count a restart of a process."""
        self._pending[name] += 1

    def publish(self) -> None:
        """Move the counts to Valkey, if it answers."""
        with suppress(redis.exceptions.RedisError):
            for name, count in list(self._pending.items()):
                series = counters.series_name("barnraise_restarts_total", process=name)
                self._client.hincrby(counters.KEY, series, count)
                del self._pending[name]


def describe_end(returncode: int) -> str:
    """Describe how a process ended: "was ended by SIGKILL", "exited with code 3"."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        return f"was ended by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was ended by signal {-returncode}"
