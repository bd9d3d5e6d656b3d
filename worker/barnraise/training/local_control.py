"""Control a worker from its own machine, by files in its run's folder; no site is involved.

Files work alike on every system and between users' sessions, where signals do not.
"""

import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
from pydantic import AliasChoices, BaseModel, Field, ValidationError

from barnraise.durable_io import write_atomically
from barnraise.errors import StateError
from barnraise.protocol.polling import PERSON_POLL_SECONDS
from barnraise.state_dir import RunDir, StateDir

WORKER_FILE = "worker.json"  # the process that works in the folder
PAUSE_FILE = "paused"  # the worker pauses while it exists; a `LocalPause`, or empty
STOP_FILE = "stop.json"  # the process that is to stop


class WorkerProcess(BaseModel, frozen=True):
    """A worker's process. A process id is used again; together with its start it is unique."""

    pid: int
    started: float  # seconds since 1970
    trains: bool = True  # or else it serves or fetches weights

    @classmethod
    def current(cls, trains: bool = True) -> "WorkerProcess":
        """Return this process."""
        process = psutil.Process()
        return cls(pid=process.pid, started=process.create_time(), trains=trains)

    @classmethod
    def load(cls, path: Path) -> "WorkerProcess | None":
        """Load a process from a file; None if there is none, or a crash cut the file off."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            return None

    def save(self, path: Path) -> None:
        """Store the process in a file."""
        write_atomically(path, self.model_dump_json().encode())

    @property
    def is_running(self) -> bool:
        """Return whether the process exists still."""
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) < 1.0
        except psutil.Error:
            return False


class LocalPause(BaseModel, frozen=True):
    """A pause that somebody ordered on this machine."""

    until: float | None = None  # seconds since 1970 at which it ends by itself; None: by `resume`
    # Whether the worker leaves its peers meanwhile; older files name it "offline".
    is_offline: bool = Field(default=False, validation_alias=AliasChoices("is_offline", "offline"))


class LocalControl:
    """What people on this machine want of the worker of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def is_paused(self) -> bool:
        """Return whether the worker is to pause, now and at its next start."""
        return self.find_pause(time.time()) is not None

    def find_pause(self, now: float) -> LocalPause | None:
        """Return the pause that is in force at `now`, in seconds since 1970; None: there is none.

        A file that a crash cut off, or an older version wrote, is a pause until `resume`.
        """
        try:
            pause = LocalPause.model_validate_json((self.folder / PAUSE_FILE).read_bytes())
        except OSError:
            return None
        except ValidationError:
            return LocalPause()
        return pause if pause.until is None or now < pause.until else None

    def pause(self, pause: LocalPause | None = None) -> None:
        """Let the worker pause after its current step, in place of a pause before."""
        text = (pause or LocalPause()).model_dump_json()
        write_atomically(self.folder / PAUSE_FILE, text.encode())

    def resume(self) -> None:
        """Let the worker go on."""
        (self.folder / PAUSE_FILE).unlink(missing_ok=True)

    def register_worker(self, trains: bool = True) -> None:
        """Record that this process is the folder's worker. The caller has locked the folder."""
        WorkerProcess.current(trains).save(self.folder / WORKER_FILE)

    def find_worker(self) -> WorkerProcess | None:
        """Return the process that works in the folder now; None if there is none."""
        process = WorkerProcess.load(self.folder / WORKER_FILE)
        return process if process is not None and process.is_running else None

    def request_stop(self, process: WorkerProcess) -> None:
        """Let this process save its work and stop; a later worker is not concerned."""
        process.save(self.folder / STOP_FILE)

    def watch_stop(self, folder: RunDir, leaving: threading.Event) -> None:
        """Set `leaving` once this registered process is to stop, as long as the folder is open."""
        own = self.find_worker()
        assert own is not None, "it is registered"

        def watch() -> None:
            while folder.is_open and not leaving.wait(PERSON_POLL_SECONDS):
                if WorkerProcess.load(self.folder / STOP_FILE) == own:
                    leaving.set()

        threading.Thread(target=watch, name="local control", daemon=True).start()


def find_other_worker(folders: Iterable[Path]) -> WorkerProcess | None:
    """Return another process that works in one of these folders, the one that trains first."""
    found = (LocalControl(folder).find_worker() for folder in folders)
    others = [worker for worker in found if worker is not None and worker.pid != os.getpid()]
    return max(others, key=lambda worker: worker.trains, default=None)


def refuse_other_worker(home: StateDir, advice: str = "", *, only_trainers: bool = False) -> None:
    """Refuse what must not happen while another process trains for this machine.

    Args:
        home: the machine's state directory.
        advice: more to do, as the end of the sentence.
        only_trainers: whether a process that serves or fetches weights may go on.

    Raises:
        StateError: names the process.
    """
    worker = find_other_worker(home.run_folders())
    if worker is not None and (worker.trains or not only_trainers):
        verb = "trains" if worker.trains else "serves"
        raise StateError(
            f"process {worker.pid} {verb} on this machine: `barnraise status` shows it, and "
            f"`barnraise stop` ends it{advice}"
        )
