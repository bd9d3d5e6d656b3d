"""Run child processes that end with this one, each with a log file of its own."""

import json
import os
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
from django.conf import settings

STOP_SECONDS = 15.0  # for a process to end by itself before it is killed


class ProcessGroup:
    """Start and stop named child processes.

    Children start in sessions of their own, so that a Ctrl-C at the terminal reaches only this
    process, which ends them in its own order.

    Args:
        logs: Folder with one log file for each process.
    """

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        logs.mkdir(parents=True, exist_ok=True)
        self.children: dict[str, subprocess.Popen] = {}
        self._record = logs / "children.json"
        self._end_orphans()

    def _end_orphans(self) -> None:
        """Kill what an earlier group left behind when its process was killed.

        A pid and a start time together identify a process.
        """
        try:
            recorded = json.loads(self._record.read_text())
        except (FileNotFoundError, ValueError):
            return
        for pid, started in recorded:
            try:
                orphan = psutil.Process(pid)
                if orphan.create_time() == started:
                    orphan.kill()
                    orphan.wait(5)
            except psutil.NoSuchProcess:
                continue

    def _store_pids(self) -> None:
        """Store which processes run, for `_end_orphans` of a later group."""
        alive = [child.pid for child in self.children.values() if child.poll() is None]
        unfinished = self._record.with_suffix(".new")
        unfinished.write_text(
            json.dumps([(pid, psutil.Process(pid).create_time()) for pid in alive])
        )
        unfinished.replace(self._record)

    def start(self, name: str, *command: str | Path, **environment: str) -> subprocess.Popen:
        """Start a process with additions to this process's environment."""
        paths = os.pathsep.join(str(settings.ROOT / source) for source in ("platform", "worker"))
        with (self.logs / f"{name}.log").open("wb") as log:
            self.children[name] = subprocess.Popen(
                [str(part) for part in command],
                cwd=settings.ROOT,
                env={**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._store_pids()
        return self.children[name]

    def failed_process(self) -> str | None:
        """Return the name of a process that ended with an error, if there is one."""
        return next(
            (name for name, child in self.children.items() if child.poll() not in (None, 0)), None
        )

    def log_tail(self, name: str, lines: int = 15) -> str:
        """Return the last lines of a process's log."""
        return "\n".join(
            (self.logs / f"{name}.log").read_text(errors="replace").splitlines()[-lines:]
        )

    def stop(self, *names: str, seconds: float = STOP_SECONDS) -> None:
        """Ask these processes (or all, newest first) to end, wait, and kill those that have not.

        Args:
            names: The processes; none for all.
            seconds: How long to wait for each before it is killed.
        """
        stopping = [
            self.children.pop(name)
            for name in (names or reversed(list(self.children)))
            if name in self.children
        ]
        for child in stopping:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
        for child in stopping:
            try:
                child.wait(seconds)
            except subprocess.TimeoutExpired:
                _kill_all(child)
            _kill_orphans(child)
        self._store_pids()

    def kill(self, name: str) -> None:
        """Kill a process and what it started, as a power cut would."""
        _kill_all(self.children.pop(name))


def _kill_all(child: subprocess.Popen) -> None:
    """Kill the process and its group."""
    if hasattr(os, "killpg"):
        os.killpg(child.pid, signal.SIGKILL)
    else:
        child.kill()
    child.wait(5)


def _kill_orphans(child: subprocess.Popen) -> None:
    """Kill the rest of a group whose leader somebody else killed.

    If the leader's pid is in use, it belongs to another process by now.
    """
    if hasattr(os, "killpg") and not psutil.pid_exists(child.pid):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def free_port(wanted: int) -> int:
    """Return the port `wanted`, or the next free one above it."""
    for port in range(wanted, wanted + 200):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no port from {wanted} to {wanted + 199} is free")
