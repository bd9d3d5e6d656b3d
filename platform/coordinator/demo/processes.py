"""Child processes that live and die with us: each with a log of its own, none left behind."""

import json
import os
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
from django.conf import settings

PATIENCE = 15.0  # seconds a process gets to end by itself before it is killed


class ProcessGroup:
    """`logs` holds one file a process. Children start in sessions of their own, so that a Ctrl-C at the terminal
    reaches only us, and we end them in our order."""

    def __init__(self, logs: Path):
        self.logs = logs
        logs.mkdir(parents=True, exist_ok=True)
        self.children: dict[str, subprocess.Popen] = {}
        self._record = logs / "children.json"
        self._end_orphans()

    def _end_orphans(self) -> None:
        """Ends what an earlier family left behind when it was killed itself. A pid and its birth name a process."""
        try:
            known = json.loads(self._record.read_text())
        except (FileNotFoundError, ValueError):
            return
        for pid, born in known:
            try:
                orphan = psutil.Process(pid)
                if orphan.create_time() == born:
                    orphan.kill()
                    orphan.wait(5)
            except psutil.NoSuchProcess:
                continue

    def _remember(self) -> None:
        alive = [child.pid for child in self.children.values() if child.poll() is None]
        fresh = self._record.with_suffix(".new")
        fresh.write_text(json.dumps([(pid, psutil.Process(pid).create_time()) for pid in alive]))
        fresh.replace(self._record)

    def start(self, name: str, *command: str | Path, **environment: str) -> subprocess.Popen:
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
        self._remember()
        return self.children[name]

    def failed_process(self) -> str | None:
        """The name of a process that ended with an error, if one did."""
        return next(
            (name for name, child in self.children.items() if child.poll() not in (None, 0)), None
        )

    def log_tail(self, name: str, lines: int = 15) -> str:
        return "\n".join(
            (self.logs / f"{name}.log").read_text(errors="replace").splitlines()[-lines:]
        )

    def stop(self, *names: str) -> None:
        """Asks these (or all, youngest first) to end, waits, and kills what has not."""
        leaving = [
            self.children.pop(name)
            for name in (names or reversed(list(self.children)))
            if name in self.children
        ]
        for child in leaving:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
        for child in leaving:
            try:
                child.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                _kill_all(child)
            _kill_orphans(child)
        self._remember()

    def kill(self, name: str) -> None:
        """As a power cut would."""
        _kill_all(self.children.pop(name))


def _kill_all(child: subprocess.Popen) -> None:
    """The process and what it started."""
    if hasattr(os, "killpg"):
        os.killpg(child.pid, signal.SIGKILL)
    else:
        child.kill()
    child.wait(5)


def _kill_orphans(child: subprocess.Popen) -> None:
    """What somebody else's kill of a process left of its group. Where its number lives on, that is another's."""
    if hasattr(os, "killpg") and not psutil.pid_exists(child.pid):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def free_port(wanted: int) -> int:
    """`wanted`, or the next free one above it."""
    for port in range(wanted, wanted + 200):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no port from {wanted} to {wanted + 199} is free")
