"""Find every process that a drill has started, including those that left its process tree.

Postgres, for example, detaches itself from the process that starts it. The drill's processes carry
a mark in their environment; a server that overwrites its environment, as Postgres does, works in
the drill's folder.
"""

import os
import time
from pathlib import Path

import psutil

VARIABLE = "BARNRAISE_DRILL"  # holds the folders of a drill and of those that run it
SETTLED_SECONDS = 5.0  # age at which a process has the environment and folder that it works in
END_SECONDS = 60.0  # within which killed processes must be gone
START_SECONDS = 0.2  # in which a process that is just being started gets its environment
Identity = tuple[int, float]  # of a process: a pid and a start time


class OwnProcesses:
    """The processes of the drill that works in a folder.

    Creating the object marks all processes that this one starts later.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder.resolve())
        outer = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = os.pathsep.join([*([outer] if outer else []), self._folder])
        self._is_own: dict[Identity, bool] = {}
        self._used: dict[Identity, float] = {}  # CPU seconds of those that run
        self._cpu_seconds = 0.0

    def find(self) -> dict[Identity, psutil.Process]:
        """Return all that run now, without this process."""
        own: dict[Identity, psutil.Process] = {}
        known: dict[Identity, bool] = {}
        for process in psutil.process_iter():
            try:
                identity = (process.pid, process.create_time())
                is_own = self._is_own.get(identity)
                if is_own is None:
                    is_own = process.pid != os.getpid() and self._belongs_to_us(process)
                if is_own or time.time() - identity[1] > SETTLED_SECONDS:
                    known[identity] = is_own
                if is_own and process.status() != psutil.STATUS_ZOMBIE:
                    own[identity] = process
            except psutil.NoSuchProcess:
                continue
        self._is_own = known
        return own

    def _belongs_to_us(self, process: psutil.Process) -> bool:
        try:
            mark = process.environ().get(VARIABLE, "")
        except (psutil.AccessDenied, OSError):
            mark = ""
        if self._folder in mark.split(os.pathsep):
            return True
        try:
            return Path(process.cwd()).is_relative_to(self._folder)
        except (psutil.AccessDenied, OSError):
            return False

    def cpu_seconds(self) -> float:
        """Return the CPU seconds that they and this process have used since the first call.

        The last moments of a process that has ended are missing.
        """
        used: dict[Identity, float] = {}
        for identity, process in [*self.find().items(), ((os.getpid(), 0.0), psutil.Process())]:
            try:
                times = process.cpu_times()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            used[identity] = times.user + times.system
            self._cpu_seconds += used[identity] - self._used.get(identity, 0.0)
        self._used = used
        return self._cpu_seconds

    def end_all(self) -> list[psutil.Process]:
        """Kill all, those included that they start meanwhile; return what could not be ended."""
        deadline = time.monotonic() + END_SECONDS
        empty_looks = 0  # in turn: the first may miss a process that is just being started
        while empty_looks < 2:
            own = list(self.find().values())
            if not own:
                empty_looks += 1
                time.sleep(START_SECONDS)
                continue
            if time.monotonic() > deadline:
                return own
            empty_looks = 0
            for process in own:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(own, timeout=1.0)
        return []
