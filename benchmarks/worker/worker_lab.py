"""Start workers for the benchmark's parts, watch them from outside, and end them in every case."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))

from child_processes import ChildProcesses
from joined_run import RUN

from barnraise.ledger.ledger import Ledger
from barnraise.protocol.signing import digest
from barnraise.state_dir import StateDir
from barnraise.training.checkpoint import CheckpointSlots
from barnraise.training.local_control import LocalControl
from barnraise.training.local_status import LocalStatus, read_status

CHILD = Path(__file__).with_name("worker_child.py")
LONG_RUN = 10_000_000  # steps: no part of the benchmark takes so many
WAIT_SECONDS = 120.0  # for anything: a busy computer is slow
POLL_SECONDS = 0.1


class TestedWorker:
    """A worker in a process of its own, as somebody at the machine sees and controls it."""

    def __init__(self, children: ChildProcesses, home: Path, *arguments: str) -> None:
        """Start it with these arguments of `worker_child.py`, among the benchmark's processes."""
        self._children = children
        self.home = home
        self.folder = home / "runs" / RUN
        self.control = LocalControl(self.folder)
        # In a session of its own, whose priority it lowers on Linux.
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), str(home), *arguments], start_new_session=True
        )
        self._measured = psutil.Process(self.process.pid)

    @property
    def status(self) -> LocalStatus | None:
        """What it has written for people at its machine; None before it has written anything."""
        return read_status(self.folder)

    def wait_until(self, is_done: Callable[[LocalStatus], bool], what: str) -> float:
        """Wait until its status says so.

        Returns:
            The seconds that this took on a machine without other work; see `AvailableClock`.
        """

        def happened() -> bool:
            assert self.process.poll() is None, f"{self.home / 'log'} says why it ended"
            status = self.status
            return status is not None and is_done(status)

        return self._children.wait_until(happened, what, WAIT_SECONDS)

    def wait_for_steps(self, count: int) -> float:
        """Wait until it has taken so many more steps."""
        first = self.status.step if self.status else 0
        return self.wait_until(lambda status: status.step >= first + count, f"{count} steps")

    @property
    def rss_mb(self) -> float:
        """The memory that it occupies, in 10⁶ bytes."""
        return self._measured.memory_info().rss / 1e6

    @property
    def cpu_seconds(self) -> float:
        """The CPU time that it has used."""
        times = self._measured.cpu_times()
        return times.user + times.system

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let none of its threads run while the block does."""
        self._measured.suspend()
        try:
            yield
        finally:
            self._measured.resume()

    def stop(self) -> None:
        """Let it leave, as Ctrl-C does."""
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(2 * WAIT_SECONDS)

    def wait_for_end(self) -> None:
        """Wait until its run has ended."""
        self._children.wait_until(
            lambda: self.process.poll() is not None, "the end of the run", WAIT_SECONDS
        )
        assert self.process.returncode == 0, f"{self.home / 'log'} says why"


@dataclass
class WorkerLab:
    """Where the parts of the benchmark work.

    Attributes:
        folder: of this benchmark, with a folder for each worker.
        is_quick: whether each part is to be as short as it can be.
        cleanup: ends what the parts start.
    """

    folder: Path
    is_quick: bool
    cleanup: ExitStack

    def __post_init__(self) -> None:
        self.children = ChildProcesses(self.folder, self.cleanup)

    def create_home(self, name: str, key_of: Path | None = None) -> StateDir:
        """Create the state directory of a machine, or of a second one with the same key."""
        home = self.folder / name
        home.mkdir()
        if key_of is not None:
            (home / "key").write_bytes((key_of / "key").read_bytes())
        return StateDir(home)

    def wait(self, seconds: float) -> None:
        """Wait for so many seconds of a machine without other work."""
        started = self.children.clock.now()
        while self.children.clock.now() - started < seconds:
            time.sleep(POLL_SECONDS)

    def start(
        self, home: StateDir, steps: int = LONG_RUN, round_steps: int = 8, *peers: str
    ) -> TestedWorker:
        """Start a worker, which is stopped when the benchmark ends."""
        arguments = (str(steps), str(round_steps), *peers)
        worker = TestedWorker(self.children, home.path, *arguments)
        self.cleanup.callback(worker.stop)
        return worker


def saved_digest(worker: TestedWorker) -> str:
    """Return the digest of the shared weights that a stopped worker has saved."""
    saved = CheckpointSlots(worker.folder / "checkpoint").load()
    assert saved is not None, f"{worker.folder} has no checkpoint"
    names = sorted(name for name in saved[0] if name.startswith("anchor."))
    return digest(b"".join(saved[0][name].numpy().tobytes() for name in names))


def published_tokens(worker: TestedWorker) -> dict[str, int]:
    """Return the tokens in a stopped worker's ledger, by author."""
    ledger = Ledger(worker.folder)
    try:
        return {author: head.total for author, head in ledger.last_updates().items()}
    finally:
        ledger.close()
