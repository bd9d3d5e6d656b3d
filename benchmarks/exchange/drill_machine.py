"""A machine of the drill as the drill sees it: a folder, a port and, while it runs, a process."""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import drill_worker
from drill_worker import RUN, Setup

from barnraise.durable_io import write_atomically
from barnraise.exchange.compression.codec import decode
from barnraise.exchange.ledger.anchor import Anchor
from barnraise.exchange.ledger.ledger import Ledger
from barnraise.spec import RunSpec
from barnraise.state_dir import RunDir, StateDir

FORK = multiprocessing.get_context("forkserver")
UPLINK = 600_000  # bytes a second that each volunteer gives


@dataclass
class World:
    """What all machines of a drill share. `text`: a folder of blobs; `manifest`: signed."""

    folder: Path
    text: Path
    spec: RunSpec
    manifest: str
    machines: list["Machine"]


class Machine:
    def __init__(self, world: World, name: str):
        self.world, self.name = world, name
        self.home = StateDir(world.folder / name)
        self.key, self.port = self.home.identity.key, free_port()
        self.folder = self.home.path / "runs" / RUN
        RunDir(self.folder, RUN, self.key).close()
        shutil.copytree(
            world.text, self.folder / "blobs", copy_function=os.link, dirs_exist_ok=True
        )
        self.process: BaseProcess | None = None

    def start(self, **changed: object) -> "Machine":
        others = tuple((each.key, each.port) for each in self.world.machines if each is not self)
        setup = Setup(
            self.home.path,
            self.world.spec.to_json(),
            self.world.manifest,
            self.port,
            others,
            UPLINK,
        )
        self.process = FORK.Process(
            target=drill_worker.work, args=(replace(setup, **changed),), daemon=True
        )
        self.process.start()
        return self

    def kill(self, how: int = signal.SIGKILL) -> None:
        assert self.process is not None and self.process.pid is not None
        os.kill(self.process.pid, how)

    def dead(self, seconds: float = 20.0) -> "Machine":
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"{self.name} did not end"
        return self

    def leave(self) -> None:
        self.kill(signal.SIGINT)
        self.dead(60.0)
        assert self.process.exitcode == 0, f"{self.name}: {self.said()[-500:]}"

    @property
    def status(self) -> dict:
        return read(self.folder / "status.json")

    @property
    def sent(self) -> int:
        return self.status.get("updates_sent", 0)

    @property
    def loss(self) -> float:
        return (self.status.get("validation_last") or [0, float("nan")])[1]

    def published(self) -> tuple[float, float]:
        """Steps that its updates hold, and rounds, each of which says every fragment once, at once or in turns."""
        with self.ledger() as ledger:
            mine = [update for _, update in ledger.updates_since({}) if update.peer == self.key]
        tokens, said = (
            sum(update.tokens for update in mine),
            sum(len(update.payload_parts) for update in mine),
        )
        spec = self.world.spec
        return tokens / (spec.recipe.step_sequences * spec.model.context), said / len(
            spec.model.fragments()
        )

    def cpu(self) -> dict:
        return read(self.home.path / "cpu.json")

    def said(self) -> str:
        path = self.home.path / "log"
        return path.read_text() if path.exists() else ""

    def order(self, what: str, text: str = "") -> None:
        write_atomically(self.home.path / what, text.encode())

    def withdraw(self, what: str) -> None:
        (self.home.path / what).unlink()

    @contextlib.contextmanager
    def ledger(self) -> Iterator[Ledger]:
        with contextlib.closing(Ledger(self.folder, sweep=False)) as ledger:
            yield ledger


def read(path: Path) -> dict:
    with contextlib.suppress(FileNotFoundError, ValueError):
        return json.loads(path.read_text())
    return {}


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def forked(machine: Machine) -> frozenset[str]:
    with machine.ledger() as ledger:
        return ledger.forked_authors


def last(machine: Machine, author: str) -> int:
    with machine.ledger() as ledger:
        return ledger.head(author).seq


def added_up(machine: Machine) -> str:
    """The digest of the initial weights and all updates that are in, added up anew from a folder's files."""
    with machine.ledger() as ledger:
        anchor = Anchor.from_seed(machine.world.spec.model, machine.world.spec.seed)
        for _, update in ledger.updates_since({}):
            for index, part in enumerate(update.fragments):
                if not part.size:  # another turn says it
                    continue
                anchor.add_units(
                    index, decode(ledger.blobs.read(part.digest), anchor.fragments[index].numel())
                )
        return anchor.digest()


def free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
