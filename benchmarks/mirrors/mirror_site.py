"""One mirror of the drill: its processes, who decides things there, and what can be done to it."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from coordinator.demo.mirrors import CELERY, SERVERS, SITE, DemoMirror

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MANAGE = (sys.executable, str(ROOT / "manage.py"))
CLERK = f"import sys; sys.path.append({str(HERE)!r}); import load_driver; load_driver.main()"


class Site(DemoMirror):
    """`afflicted`: something of it is down on purpose, so that what it refuses surprises nobody."""

    clerk: subprocess.Popen | None = None
    afflicted = False

    @property
    def _told(self) -> dict[str, str]:
        """What its commands find in their environment."""
        paths = os.pathsep.join(str(ROOT / source) for source in ("platform", "worker"))
        return {**os.environ, **self.environment, "PYTHONPATH": paths}

    def manage(self, *command: str) -> str:
        """What `manage.py` printed there."""
        done = subprocess.run(
            [*self.through, *MANAGE, *command],
            env=self._told,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(
                f"{self.name}: {' '.join(command)[:200]}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
            )
        return done.stdout

    # ---- who decides there

    def start_clerk(self, **environment: str) -> None:
        self._answers: queue.SimpleQueue[dict] = queue.SimpleQueue()
        self._number, self._lock = 0, threading.Lock()
        self.clerk = subprocess.Popen(
            [*self.through, *MANAGE, "shell", "-v", "0", "-c", CLERK],
            env={**self._told, **environment},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=(self.folder / "logs" / "clerk.log").open("ab"),
            text=True, bufsize=1,
        )  # fmt: skip
        threading.Thread(target=self._listen, args=(self.clerk, self._answers), daemon=True).start()

    def _listen(self, clerk: subprocess.Popen, answers: queue.SimpleQueue) -> None:
        for line in clerk.stdout:
            answers.put(json.loads(line))

    def request(self, do: str, seconds: float = 60.0, **what: Any) -> dict[str, Any]:
        """Its answer: {"ok": True, …} or {"ok": False, "error": …}. What comes later than `seconds` counts as none."""
        with self._lock:
            self._number += 1
            try:
                self.clerk.stdin.write(
                    json.dumps({"number": self._number, "do": do, **what}) + "\n"
                )
                self.clerk.stdin.flush()
                deadline = time.monotonic() + seconds
                while True:
                    said = self._answers.get(timeout=max(0.01, deadline - time.monotonic()))
                    if said["number"] == self._number:
                        return said
            except (queue.Empty, BrokenPipeError):
                return {"ok": False, "error": f"no answer in {seconds:.0f} s", "events": []}

    def require(self, do: str, **what: Any) -> dict[str, Any]:
        """The same where nothing but yes will do."""
        said = self.request(do, **what)
        assert said["ok"], f"{self.name}: {do}: {said['error']}"
        return said

    def dismiss(self) -> None:
        if self.clerk is not None and self.clerk.poll() is None:
            self.clerk.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.clerk.wait(10)
            self.clerk.kill()
            self.clerk.wait()

    # ---- what is done to it

    def restart_servers(self) -> None:
        """As a supervisor would: what was killed comes up again on the same files."""
        self.processes.children[SERVERS].send_signal(signal.SIGHUP)

    def kill_postgres(self) -> int:
        """The postmaster and all that it forked, at once. How many processes those were."""
        return self._kill_all("postgres")

    def kill_valkey(self) -> int:
        return self._kill_all("valkey")

    def _kill_all(self, server: str) -> int:
        found = [each for each in psutil.process_iter() if _works_in(each, self.folder / server)]
        for each in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        return len(found)

    def kill_celery(self) -> None:
        self.processes.kill(CELERY)

    def is_working(self) -> bool:
        """Whether Celery is in the middle of something: a process that waits for work sleeps."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.processes.children[CELERY].pid).cpu_percent(0.05) > 20
        return False

    def answers(self) -> bool:
        return self.fetch_status(5.0) is not None

    def last_words(self) -> str:
        return "\n".join(
            self.processes.log_tail(name) for name in (SITE, CELERY) if (self._log(name)).exists()
        )

    def _log(self, name: str) -> Path:
        return self.processes.logs / f"{name}.log"

    def log_contains(self, name: str, words: str) -> bool:
        """Whether these stand in the log of one of its processes."""
        return words in self._log(name).read_text(errors="replace")

    def stop(self) -> None:
        self.dismiss()
        super().stop()


def until(done: Callable[[], object], what: str, seconds: float) -> float:
    """Seconds that it took. Raises TimeoutError."""
    began = time.monotonic()
    while not done():
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"{what}: not within {seconds:.0f} seconds")
        time.sleep(0.1)
    return time.monotonic() - began


def _works_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.cwd() == str(folder)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
