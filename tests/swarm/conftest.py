"""Run real workers without a site: their coordinator never answers, and training goes on."""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.exchange.ledger.blob_store import BlobStore
from barnraise.exchange.network.memory_transport import MemoryNetwork
from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import Limits
from barnraise.protocol.coordinator_messages import Directive, TextManifest
from barnraise.protocol.enums import Role, RunStatus
from barnraise.protocol.messages import Peer, Ticket
from barnraise.protocol.signing import Identity, digest
from barnraise.spec import ModelSpec, Recipe, RunSpec, TextSpec
from barnraise.state_dir import RunDir, StateDir
from barnraise.text import shards
from barnraise.text.sources import read_stdlib
from barnraise.training.join import JoinedRun
from barnraise.training.train import Worker

RUN = "0192f0c1-2d3e-7f40-8a5b-6c7d8e9f0a1b"
NOBODY = "http://127.0.0.1:9"  # the discard port, which refuses connections at once
MIRROR = Identity(b"m" * 32)
MACHINE = Hardware(  # fixed figures, so that plans do not depend on this machine
    device="cpu",
    name="a test's machine",
    cores=1,
    memory=8 << 30,
    device_memory=0,
    disk=8 << 30,
    dtype="float32",
    matmul=((128, 2e10),),
    attention=1e10,
    elementwise=5e9,
    to_device=5e9,
    from_device=5e9,
    stream=1e10,
    adam=2e8,
    disk_read=5e8,
    disk_write=5e8,
)


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> tuple[Path, TextManifest]:
    """Prepare the standard library's source as bytes, once."""
    blobs = BlobStore(tmp_path_factory.mktemp("text"))
    return blobs.folder, shards.prepare_text(
        TextSpec(tokenizer="bytes", shard_tokens=1 << 20),
        256,
        RUN,
        blobs.store,
        list(read_stdlib()),
    )


class Killed(BaseException):
    """Raised in a worker's thread between two steps, in place of a power failure."""


@dataclass
class Volunteer:
    """One worker in a thread. `status` is the last one that it published."""

    worker: Worker
    thread: threading.Thread
    leaving: threading.Event
    doom: threading.Event
    status: dict[str, Any]
    failure: list[BaseException]

    def leave(self) -> None:
        self.leaving.set()
        self.join()

    def kill(self) -> None:
        self.doom.set()
        self.join()

    def join(self, seconds: float = 60.0) -> None:
        self.thread.join(seconds)
        assert not self.thread.is_alive(), "the worker did not end"
        if self.failure:
            raise self.failure[0]


class Swarm:
    def __init__(
        self,
        folder: Path,
        text: tuple[Path, TextManifest],
        recipe: Recipe,
        model: ModelSpec | None = None,
    ):
        self.folder, self.text, self.manifest = folder, *text
        self.network = MemoryNetwork(bandwidth=50e6, delay=0.002, loss=0.02)
        self.volunteers: list[Volunteer] = []
        signed = MIRROR.sign("manifest", self.manifest)
        self.spec = RunSpec(
            model or ModelSpec(layers=2, width=32, heads=2, context=32, vocabulary=256),
            TextSpec(tokenizer="bytes"),
            recipe,
            seed=7,
            owner=MIRROR.key,
            roots=(MIRROR.key,),
            manifest=digest(signed.body),
        )

    def home(self, name: str, with_text: bool = True) -> StateDir:
        home = StateDir(self.folder / name)
        blobs = home.path / "runs" / RUN / "blobs"
        if with_text and not blobs.exists():
            RunDir(blobs.parent, RUN, home.identity.key).close()
            shutil.copytree(self.text, blobs, copy_function=os.link)
        return home

    def start(
        self,
        name: str,
        with_text: bool = True,
        knows: list[str] | None = None,
        limits: Limits | None = None,
        site: str = NOBODY,
    ) -> Volunteer:
        """Start a worker that holds a ticket.

        `knows` names the peers that it connects to first; `site` is the address that it reports to.
        """
        home = self.home(name, with_text)
        now, key = time.time(), home.identity.key
        machine = f"0192f0c1-2d3e-7f40-8a5b-{key[:12]}"
        ticket = Ticket(
            run=RUN,
            peer=key,
            machine=machine,
            volunteer=digest(name),
            roles=[Role.WORKER],
            issued=now,
            expires=now + 86400,
            mirror=MIRROR.key,
        )
        coordinator = CoordinatorClient(site, home.identity, MIRROR.key)
        known = [StateDir(self.folder / other).identity.key for other in knows or []]
        place = JoinedRun(
            run=RUN,
            name="a swarm",
            machine=machine,
            folder=home.open_run(RUN),
            coordinator=coordinator,
            spec=self.spec,
            spec_digest=digest(self.spec.to_json()),
            manifest=self.manifest,
            ticket=MIRROR.sign("ticket", ticket),
            directive=Directive(
                run=RUN, machine=machine, status=RunStatus.TRAINING, report_every=0.5, issued=now
            ),
            acknowledged=0,
            peers=tuple(Peer(key=k, addresses=[f"memory:{k[:16]}"]) for k in known),
        )
        leaving, doom, status, failure = threading.Event(), threading.Event(), {}, []

        def watch(told: dict[str, Any]) -> None:
            status.update(told)
            if doom.is_set():
                doom.clear()
                raise Killed

        transport = self.network.transport(key)
        worker = Worker(place, leaving, MACHINE, limits, watch, transport)

        def work() -> None:
            torch.set_num_threads(1)
            try:
                worker.run()
            except Killed:
                return
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=work, name=name)
        volunteer = Volunteer(worker, thread, leaving, doom, status, failure)
        self.volunteers.append(volunteer)
        thread.start()
        return volunteer

    def until(self, happened: Callable[[], bool], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            for each in self.volunteers:
                if each.failure:
                    raise each.failure[0]
            assert time.monotonic() < deadline, (
                f"it did not happen: {[v.status for v in self.volunteers]}"
            )
            time.sleep(0.05)


@pytest.fixture
def swarm(tmp_path, text) -> Iterator[Callable[..., Swarm]]:
    made: list[Swarm] = []

    def make(model: ModelSpec | None = None, folder: str = "", **recipe: Any) -> Swarm:
        quick = Recipe(
            token_budget=120_000,
            learning_rate=3e-3,
            warmup_tokens=2_000,
            step_sequences=8,
            round_steps=10,
            evaluate_every=20_000,
        )
        made.append(Swarm(tmp_path / folder, text, replace(quick, **recipe), model))
        return made[-1]

    yield make
    for each in made:
        for volunteer in each.volunteers:
            volunteer.leaving.set()
        for volunteer in each.volunteers:
            volunteer.thread.join(60)
