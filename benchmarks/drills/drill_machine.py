"""Control one machine of the drill: a folder, a port and, while it runs, a process."""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import drill_worker
from child_processes import ChildProcesses, ChildStatus, read_tail
from joined_run import RUN, Setup
from memory_anchor import MemoryAnchor
from udp_ports import free_udp_port

from barnraise.durable_io import write_atomically
from barnraise.ledger.codec import decode
from barnraise.ledger.ledger import Ledger
from barnraise.spec import Recipe, RunSpec
from barnraise.state_dir import RunDir, StateDir

FORK = multiprocessing.get_context("forkserver")
RECIPE = Recipe(
    token_budget=1 << 40,
    learning_rate=2e-3,
    schedule="constant",
    warmup_tokens=20_000,
    step_sequences=16,
    round_steps=30,
    codec="dense4",
    evaluate_every=150_000,
)
UPLINK = 600_000  # bytes per second that each volunteer gives
EXIT_SECONDS = 120.0  # for a machine that leaves or finishes


@dataclass
class DrillWorld:
    """What all machines of a drill share."""

    children: ChildProcesses
    folder: Path
    text: Path  # a folder of blobs
    spec: RunSpec
    manifest: str  # signed
    machines: list["DrillMachine"]
    setup_changes: dict[str, Any] = field(default_factory=dict)  # of the `Setup` of all machines


class DrillMachine:
    """One machine of the drill."""

    def __init__(self, world: DrillWorld, name: str) -> None:
        """Create the machine's folder, with a key, the run's folder and the whole text."""
        self.world = world
        self.name = name
        self.state_dir = StateDir(world.folder / name)
        self.key = self.state_dir.identity.key
        self.port = free_udp_port()
        self.folder = self.state_dir.path / "runs" / RUN
        RunDir(self.folder, RUN, self.key).close()
        shutil.copytree(
            world.text, self.folder / "blobs", copy_function=os.link, dirs_exist_ok=True
        )
        self.process: BaseProcess | None = None
        self._should_run = False
        self._may_finish = False
        world.children.watch(self._child_statuses)

    def _child_statuses(self) -> list[ChildStatus]:
        if self.process is None or not self._should_run:
            return []
        log = self.state_dir.path / "log"
        return [ChildStatus(self.name, self.process.exitcode, log, self._may_finish)]

    def start(self, **changes: Any) -> None:
        """Start a worker on the folder; `changes` are fields of its `Setup`."""
        others = tuple((m.key, m.port) for m in self.world.machines if m is not self)
        setup = Setup(
            state_folder=self.state_dir.path,
            spec=self.world.spec.to_json(),
            manifest=self.world.manifest,
            port=self.port,
            first_peers=others,
            uplink=UPLINK,
        )
        self.process = FORK.Process(
            target=drill_worker.run_worker,
            args=(replace(setup, **(self.world.setup_changes | changes)),),
            daemon=True,
        )
        self.process.start()
        self._should_run = True
        self._may_finish = changes.get("finished", False)

    def send_signal(self, number: int = signal.SIGKILL) -> None:
        """Send the process a signal; by default kill it."""
        assert self.process is not None and self.process.pid is not None
        if number in (signal.SIGKILL, signal.SIGINT):
            self._should_run = False
        os.kill(self.process.pid, number)

    def wait_for_exit(self, seconds: float = EXIT_SECONDS) -> int:
        """Wait until the process has ended, and return its exit code."""
        process = self.process
        assert process is not None
        self._should_run = False
        self.world.children.wait_until(
            lambda: process.exitcode is not None, f"the end of {self.name}", seconds
        )
        assert process.exitcode is not None
        return process.exitcode

    def leave(self) -> None:
        """Interrupt the worker and wait until it has left the run properly."""
        self.send_signal(signal.SIGINT)
        self.wait_for_success()

    def wait_for_success(self) -> None:
        """Wait until the process has ended without an error."""
        status = self.wait_for_exit()
        assert status == 0, f"{self.name} ended with {status}:\n{self.log_tail()}"

    def start_second(self) -> int:
        """Start a second worker on the folder while one runs; return its exit code."""
        first = self.process
        self.start()
        status = self.wait_for_exit()
        self.process = first
        self._should_run = True
        return status

    @property
    def status(self) -> dict[str, Any]:
        """The status that the worker wrote last."""
        return read_json(self.folder / "status.json")

    @property
    def updates_sent(self) -> int:
        """Updates that the worker has published."""
        return self.status.get("updates_sent", 0)

    @property
    def loss(self) -> float:
        """The last validation loss, in nats per token."""
        return (self.status.get("validation_last") or [0, float("nan")])[1]

    def count_published(self) -> tuple[float, float]:
        """Count the steps in its own updates, and its rounds.

        Each round publishes every fragment once, at once or in turns.
        """
        with self.open_ledger() as ledger:
            own = [update for _, update in ledger.updates_since({}) if update.peer == self.key]
        tokens = sum(update.tokens for update in own)
        parts = sum(len(update.payload_parts) for update in own)
        spec = self.world.spec
        tokens_per_step = spec.step_tokens
        return tokens / tokens_per_step, parts / len(spec.model.fragments())

    def read_cpu(self) -> dict[str, Any]:
        """Read the CPU seconds that the worker measured last."""
        return read_json(self.state_dir.path / "cpu.json")

    def log_text(self) -> str:
        """Return the worker's log."""
        path = self.state_dir.path / "log"
        return path.read_text() if path.exists() else ""

    def log_tail(self) -> str:
        """Return the last lines of the worker's log."""
        return read_tail(self.state_dir.path / "log")

    def clear_log(self) -> None:
        """Empty the worker's log, which it appends to."""
        os.truncate(self.state_dir.path / "log", 0)

    def write_order(self, name: str, text: str = "") -> None:
        """Write an order, which the worker reads between two steps; see `drill_worker.Orders`."""
        write_atomically(self.state_dir.path / name, text.encode())

    def remove_order(self, name: str) -> None:
        """Remove an order."""
        (self.state_dir.path / name).unlink()

    @contextlib.contextmanager
    def open_ledger(self) -> Iterator[Ledger]:
        """Open the machine's ledger while the worker may be using it."""
        with contextlib.closing(Ledger(self.folder, sweep=False)) as ledger:
            yield ledger


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; an empty one where the file is missing or being written."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return json.loads(path.read_text())
    return {}


def flip_bit(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def forked_authors(machine: DrillMachine) -> frozenset[str]:
    """Return the authors whose fork the machine has a proof of."""
    with machine.open_ledger() as ledger:
        return frozenset(ledger.verdicts.forks)


def last_update(machine: DrillMachine, author: str) -> int:
    """Return the number of an author's last update in the machine's ledger."""
    with machine.open_ledger() as ledger:
        return ledger.head(author).seq


def recompute_anchor_digest(
    machine: DrillMachine,
    keys: Collection[str] | None = None,
    vector: Mapping[str, int] | None = None,
) -> str:
    """Return the digest of the initial weights plus the accepted updates of a folder's files.

    Args:
        machine: Whose folder.
        keys: The machines whose updates are added; None: all.
        vector: Author → the last of its updates that is added; None: all.
    """
    with machine.open_ledger() as ledger:
        anchor = MemoryAnchor.from_seed(machine.world.spec.model, machine.world.spec.seed)
        for _, update in ledger.updates_since({}):
            if keys is not None and update.peer not in keys:
                continue
            if vector is not None and update.seq > vector.get(update.author, 0):
                continue
            for index, part in enumerate(update.fragments):
                if not part.size:
                    continue  # Another update of the same round has this fragment.
                payload = ledger.blobs.read(part.digest)
                anchor.add_units(index, decode(payload, anchor.fragments[index].numel()))
        return anchor.digest()
