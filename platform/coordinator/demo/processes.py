"""Run child processes that end with this one, each with a log file of its own."""

import json
import logging
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from coordinator.lib import parent_death

log = logging.getLogger("coordinator.demo.processes")

ROOT = Path(__file__).resolve().parents[3]  # of the repository
MAX_LOG_BYTES = 10_000_000  # of a log file, before it is moved
OLD_LOGS = 2  # files that are kept of each log, without the one that is written
STOP_SECONDS = 15.0  # for a process to end by itself before it is killed
KILL_SECONDS = 60.0  # a killed process with the lowest priority dies once a core has time for it
# Linux ends a child with the *thread* that started it, so one thread, which lasts as long as this
# process, starts all of them.
_starter = ThreadPoolExecutor(1, "child processes")


@dataclass(frozen=True)
class ChildCommand:
    """How to start and stop a child process."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)  # in addition to this process's
    user: str = ""  # the system user that runs it; "" for this process's own
    folder: Path | None = None  # its working folder; None for the repository's root
    stop_signal: int = signal.SIGTERM  # that asks it to end
    is_server: bool = False  # others need it, so it is stopped after them


class ProcessGroup:
    """Start and stop named child processes.

    Children start in sessions of their own, so that a Ctrl-C at the terminal reaches only this
    process, which ends them in its own order. If this process is killed, Linux kills them;
    elsewhere the next group with the same folder does.

    Args:
        logs: Folder with one log file for each process.
    """

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        logs.mkdir(parents=True, exist_ok=True)
        self.children: dict[str, subprocess.Popen] = {}
        self._commands: dict[subprocess.Popen, ChildCommand] = {}
        self._lock = threading.RLock()  # held while children are started or forgotten
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
        recorded = []
        for child in self.children.values():
            with suppress(psutil.NoSuchProcess):
                recorded.append((child.pid, psutil.Process(child.pid).create_time()))
        unfinished = self._record.with_suffix(".new")
        try:
            unfinished.write_text(json.dumps(recorded))
            unfinished.replace(self._record)
        except OSError as error:  # on a full disk processes are started and stopped nevertheless
            log.warning("which processes run cannot be recorded: %s", error)

    def start(self, name: str, *command: str | Path, **environment: str) -> subprocess.Popen:
        """Start a process with additions to this process's environment."""
        return self.start_child(name, ChildCommand(tuple(map(str, command)), environment))

    def start_child(
        self, name: str, child: ChildCommand, *, append_log: bool = False
    ) -> subprocess.Popen:
        """Start a process; with `append_log`, add to its log instead of beginning a new one."""
        path = self.logs / f"{name}.log"
        with self._lock, path.open("ab") as log:
            if not append_log:
                log.truncate(0)
            paths = (str(ROOT / source) for source in ("platform", "worker"))
            environment = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
            process = _starter.submit(
                subprocess.Popen,
                parent_death.child_command(child.command, child.user),
                cwd=child.folder or ROOT,
                env={**os.environ, **environment, **child.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ).result()
            self.children[name] = process
            self._commands[process] = child
            self._store_pids()
        return process

    def failed_process(self) -> str | None:
        """Return the name of a process that ended with an error, if there is one."""
        children = list(self.children.items())
        return next((name for name, child in children if child.poll() not in (None, 0)), None)

    def log_tail(self, name: str, lines: int = 15) -> str:
        """Return the last lines of a process's log."""
        return "\n".join(
            (self.logs / f"{name}.log").read_text(errors="replace").splitlines()[-lines:]
        )

    def bound_logs(self) -> None:
        """Move what large logs contain to older files, and drop the oldest.

        A child writes to the end of its log, and so continues at the start of an emptied one. What
        it writes between the copy and the truncation is lost.
        """
        for path in self.logs.glob("*.log"):
            if path.stat().st_size <= MAX_LOG_BYTES:
                continue
            older = [path.with_suffix(f".log.{number}") for number in range(1, OLD_LOGS + 1)]
            for source, target in zip(reversed(older[:-1]), reversed(older[1:]), strict=True):
                if source.exists():
                    source.replace(target)
            try:
                shutil.copyfile(path, older[0])
                os.truncate(path, 0)
            except OSError as error:  # the disk is full: the next attempt may find room
                log.warning("the log %s cannot be moved: %s", path, error)

    def stop(self, *names: str, seconds: float = STOP_SECONDS) -> None:
        """Ask these processes (or all, newest first) to end, wait, and kill those that have not.

        Servers are stopped once all others have ended.

        Args:
            names: The processes; none for all.
            seconds: How long to wait for each before it is killed.
        """
        with self._lock:
            stopping = [
                self.children.pop(name)
                for name in (names or reversed(list(self.children)))
                if name in self.children
            ]
        commands = {child: self._commands.pop(child) for child in stopping}
        for is_server in (False, True):
            batch = [child for child in stopping if commands[child].is_server == is_server]
            for child in batch:
                if child.poll() is None:
                    child.send_signal(commands[child].stop_signal)
            for child in batch:
                try:
                    child.wait(seconds)
                except subprocess.TimeoutExpired:
                    _kill_all(child)
                kill_orphans(child)
        with self._lock:
            self._store_pids()

    def kill(self, name: str) -> None:
        """Kill a process and what it started, as a power cut would."""
        with self._lock:
            child = self.children.pop(name)
            self._commands.pop(child)
        _kill_all(child)


def _kill_all(child: subprocess.Popen) -> None:
    """Kill the process and its group, which may have ended already."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    else:
        child.kill()
    child.wait(KILL_SECONDS)


def kill_orphans(child: subprocess.Popen) -> None:
    """Kill the rest of a group whose leader somebody else killed.

    If the leader's pid is in use, it belongs to another process by now.
    """
    if hasattr(os, "killpg") and not psutil.pid_exists(child.pid):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
