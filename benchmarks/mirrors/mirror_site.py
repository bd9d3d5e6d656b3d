"""Run one mirror of a drill: its processes, its load driver, and what a fault does to them."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from child_processes import ChildStatus, list_statuses

from coordinator.demo.mirrors import BEAT, CELERY, RAISING, SERVERS, SITE, DemoMirror

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MANAGE = (sys.executable, str(ROOT / "manage.py"))
LOAD_DRIVER = f"import sys; sys.path.append({str(HERE)!r}); import load_driver; load_driver.main()"
BUSY_PERCENT = 20  # CPU of a Celery that works: a process that waits for a task sleeps
LOAD_DRIVER_LOG = "load-driver.log"
REQUIRED_SECONDS = 600.0  # for an answer without which a drill cannot go on
STATUS_SECONDS = 10.0  # within which a mirror on a busy machine answers what its state is


class LoadDriverProcess:
    """Run `load_driver.py` inside a mirror; exchange a JSON line for each request."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
            )
        self._replies: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._number = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._read_replies, daemon=True).start()

    def _read_replies(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._replies.put(json.loads(line))

    def request(self, action: str, seconds: float, arguments: dict[str, Any]) -> dict[str, Any]:
        """Run an action of `load_driver.LoadDriver`.

        Returns:
            The reply: {"ok": True, …} or {"ok": False, "error": …}. A reply that takes longer than
            `seconds` counts as none.
        """
        assert self._process.stdin is not None
        with self._lock:
            self._number += 1
            message = {"number": self._number, "action": action, "arguments": arguments}
            try:
                self._process.stdin.write(json.dumps(message) + "\n")
                self._process.stdin.flush()
            except (BrokenPipeError, ValueError):  # it died, or its input was closed
                return {"ok": False, "error": "the load driver has ended", "events": []}
            return self._await_reply(seconds)

    def _await_reply(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while (remaining := deadline - time.monotonic()) > 0:
            try:
                reply = self._replies.get(timeout=min(1.0, remaining))
            except queue.Empty:
                if self._process.poll() is None:
                    continue
                return {"ok": False, "error": "the load driver has died", "events": []}
            if reply["number"] == self._number:
                return reply
        return {"ok": False, "error": f"no answer in {seconds:.0f} s", "events": []}

    @property
    def exit_code(self) -> int | None:
        """Return its exit code; None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """End the process."""
        if self._process.poll() is not None:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait()


class Site(DemoMirror):
    """Run one mirror of the drill.

    Attributes:
        has_fault: Whether a part of it is down on purpose, so that refusals are expected.
    """

    _load_driver: LoadDriverProcess | None = None
    has_fault = False
    servers_options = ("--manual",)  # the drill decides how long a killed server is away

    @property
    def _command_environment(self) -> dict[str, str]:
        paths = os.pathsep.join(str(ROOT / source) for source in ("platform", "worker"))
        return {**os.environ, **self.environment, "PYTHONPATH": paths}

    def manage(self, *command: str) -> str:
        """Run a `manage.py` command of this mirror and return its output."""
        result = subprocess.run(
            [*self.through, *MANAGE, *command],
            env=self._command_environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode:
            output = f"{result.stdout[-2000:]}{result.stderr[-4000:]}"
            raise SystemExit(f"{self.name}: {' '.join(command)[:200]}\n{output}")
        return result.stdout

    # ---- its load driver

    def start_load_driver(self, **environment: str) -> None:
        """Start the process that makes changes at this mirror."""
        self._load_driver = LoadDriverProcess(
            [*self.through, *MANAGE, "shell", "-v", "0", "-c", LOAD_DRIVER],
            {**self._command_environment, **environment},
            self.folder / "logs" / LOAD_DRIVER_LOG,
        )

    def request(self, action: str, seconds: float = 60.0, **arguments: Any) -> dict[str, Any]:
        """Run an action of the load driver; see `LoadDriverProcess.request`."""
        assert self._load_driver is not None, "start_load_driver first"
        return self._load_driver.request(action, seconds, arguments)

    def require(self, action: str, **arguments: Any) -> dict[str, Any]:
        """Run an action that must succeed, and return the reply."""
        reply = self.request(action, REQUIRED_SECONDS, **arguments)
        assert reply["ok"], f"{self.name}: {action}: {reply['error']}"
        return reply

    def stop_load_driver(self) -> None:
        """Stop the load driver, if it runs."""
        if self._load_driver is not None:
            self._load_driver.stop()
            self._load_driver = None

    def child_statuses(self) -> list[ChildStatus]:
        """Return the statuses of its processes and of its load driver."""
        logs = self.processes.logs
        restarted = self.processes.supervised_names()  # again, if they have ended
        others = {
            name: child for name, child in self.processes.children.items() if name not in restarted
        }
        statuses = list_statuses(others, logs, may_finish=(RAISING,))
        if failure := self.processes.failure:
            statuses.append(ChildStatus("supervision", 1, logs / f"{CELERY}.log", cause=failure))
        driver = self._load_driver
        if driver is not None:
            log = logs / LOAD_DRIVER_LOG
            statuses.append(ChildStatus("load driver", driver.exit_code, log))
        return [replace(status, name=f"{self.name}'s {status.name}") for status in statuses]

    # ---- faults

    def restart_servers(self) -> None:
        """Start killed servers again on the same files, as a supervisor would."""
        self.processes.children[SERVERS].send_signal(signal.SIGHUP)

    def kill_postgres(self) -> int:
        """Kill Postgres with all its processes at once; return their number."""
        return self._kill_server("postgres")

    def kill_valkey(self) -> int:
        """Kill Valkey; return the number of its processes."""
        return self._kill_server("valkey")

    def _kill_server(self, server: str) -> int:
        killed = [p for p in psutil.process_iter() if _works_in(p, self.folder / server)]
        for process in killed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return len(killed)

    def kill_celery(self) -> None:
        """Kill Celery and its scheduler."""
        for name in (CELERY, BEAT):
            self.processes.kill(name)

    def is_celery_busy(self) -> bool:
        """Return whether Celery is in the middle of a task."""
        with contextlib.suppress(psutil.NoSuchProcess):
            celery = psutil.Process(self.processes.children[CELERY].pid)
            return celery.cpu_percent(0.05) > BUSY_PERCENT
        return False

    def answers(self) -> bool:
        """Return whether its web server answers."""
        return self.fetch_status(STATUS_SECONDS) is not None

    def log_contains(self, text: str) -> bool:
        """Return whether the log of its web server or of its Celery contains the text."""
        logs = [self.processes.logs / f"{name}.log" for name in (SITE, CELERY, BEAT)]
        return any(text in log.read_text(errors="replace") for log in logs)

    def stop(self) -> None:
        """Stop its load driver, its processes and its servers."""
        self.stop_load_driver()
        super().stop()


def read_common_state(sites: Sequence[Site]) -> str | None:
    """Return the state hash that all mirrors publish; None if one is silent or they differ."""
    hashes = set()
    for site in sites:
        status = site.fetch_status(STATUS_SECONDS)
        if status is None:
            return None
        hashes.add(status["state"])
    return hashes.pop() if len(hashes) == 1 else None


def _works_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.cwd() == str(folder)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
