"""Run real workers whose coordinator never answers, unless a test gives them a site."""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from example_hardware import ONE_CORE_MACHINE
from helpers.network.memory_transport import MemoryNetwork
from sharded_documents import shard_documents
from single_site import SingleSite

from barnraise.ledger.blob_store import BlobStore
from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import Limits
from barnraise.protocol.coordinator_messages import Directive, TextManifest
from barnraise.protocol.enums import Role, RunStatus, Standing
from barnraise.protocol.messages import Peer, Ticket
from barnraise.protocol.signing import Identity, digest
from barnraise.spec import ModelSpec, Recipe, RunSpec, TextSpec
from barnraise.state_dir import RunDir, StateDir
from barnraise.text.stdlib_text import read_stdlib
from barnraise.training.join import JoinedRun
from barnraise.training.local_status import LocalStatus
from barnraise.training.mixing_worker import MixingWorker
from barnraise.training.train import Worker

RUN = "0192f0c1-2d3e-7f40-8a5b-6c7d8e9f0a1b"
UNREACHABLE = "http://127.0.0.1:9"  # the discard port, which refuses connections at once
MIRROR = Identity(b"m" * 32)
LARGE_BUDGET = 1_000_000  # tokens; no test trains for so long
REST_SECONDS = 0.01


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> tuple[Path, TextManifest]:
    """Prepare a part of the standard library's source as bytes, once."""
    blobs = BlobStore(tmp_path_factory.mktemp("text"))
    return blobs.folder, shard_documents(
        TextSpec(tokenizer="bytes", shard_tokens=1 << 20),
        256,
        RUN,
        blobs.store,
        list(read_stdlib())[::4],
    )


class RestingWorker(Worker):
    """A worker that rests before each step.

    A run with a large budget lasts until its test ends. Its workers would compute all the time that
    the test waits for messages.
    """

    def prepare_step(self) -> None:
        """Rest for about as long as a step takes."""
        time.sleep(REST_SECONDS)


class Killed(BaseException):
    """Raised in a worker's thread between two steps, in place of a power failure."""


@dataclass
class Volunteer:
    """One worker in a thread.

    Attributes:
        worker: The worker.
        thread: The thread that runs it.
        leaving: Set to let it finish its round and leave.
        killing: Set to end it between two steps, as a power failure does.
        status: The last status that it published.
        failure: The exception that ended it.
    """

    worker: Worker
    thread: threading.Thread
    leaving: threading.Event
    killing: threading.Event
    status: dict[str, Any]
    failure: list[BaseException]

    def leave(self) -> None:
        """Let the worker leave, and wait until it has."""
        self.leaving.set()
        self.join()

    def kill(self) -> None:
        """End the worker between two steps."""
        self.killing.set()
        self.join()

    def join(self, seconds: float = 60.0) -> None:
        """Wait until the worker has ended; raise the exception that ended it."""
        self.thread.join(seconds)
        assert not self.thread.is_alive(), "the worker did not end"
        if self.failure:
            raise self.failure[0]


class Swarm:
    """A run's workers on a network in memory that loses messages."""

    def __init__(
        self,
        folder: Path,
        text: tuple[Path, TextManifest],
        recipe: Recipe,
        model: ModelSpec | None = None,
    ):
        self.folder = folder
        self.text, self.manifest = text
        self.network = MemoryNetwork(bandwidth=50e6, delay=0.002, loss=0.02)
        self.volunteers: list[Volunteer] = []
        self._person = ""
        self._trust_one = False
        self._standings: dict[str, Standing] = {}
        self._machines: dict[str, Hardware] = {}
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

    def set_person(self, person: str) -> None:
        """Let all machines that are started from now on be of one person, who believes them."""
        self._person = person

    def set_standings(self, **standings: Standing) -> None:
        """Let the tickets of machines, by name, that are started from now on state these."""
        self._standings |= standings

    def set_machine(self, name: str, hardware: Hardware) -> None:
        """Let the worker of this name train on another machine from now on."""
        self._machines[name] = hardware

    def trust_peers(self) -> None:
        """Let all machines that are started from now on take weights that no site confirms."""
        self._trust_one = True

    def home(self, name: str, with_text: bool = True) -> StateDir:
        """Return a worker's state directory, with the run's text unless it should lack it."""
        home = StateDir(self.folder / name)
        blobs = home.path / "runs" / RUN / "blobs"
        if with_text and not blobs.exists():
            RunDir(blobs.parent, RUN, home.identity.key).close()
            shutil.copytree(self.text, blobs, copy_function=os.link)
        return home

    def join(
        self,
        name: str,
        with_text: bool = True,
        knows: list[str] | None = None,
        site: str = UNREACHABLE,
        max_tokens_per_second: int = 1 << 40,
    ) -> JoinedRun:
        """Return a machine's part in the run, with a ticket; the arguments are those of `start`."""
        home = self.home(name, with_text)
        now, key = time.time(), home.identity.key
        machine = f"0192f0c1-2d3e-7f40-8a5b-{key[:12]}"
        ticket = Ticket(
            run=RUN,
            peer=key,
            machine=machine,
            volunteer=digest(self._person or name),
            roles=[Role.WORKER],
            standing=self._standings.get(name, Standing.STRANGER),
            max_tokens_per_second=max_tokens_per_second,
            issued=now,
            expires=now + 86400,
            mirror=MIRROR.key,
        )
        peer_keys = [StateDir(self.folder / other).identity.key for other in knows or []]
        return JoinedRun(
            run=RUN,
            name="a swarm",
            machine=machine,
            folder=home.open_run(RUN),
            coordinator=SingleSite(site, home.identity, MIRROR.key),
            spec=self.spec,
            spec_digest=digest(self.spec.to_json()),
            manifest=self.manifest,
            ticket=MIRROR.sign("ticket", ticket),
            directive=Directive(
                run=RUN, machine=machine, status=RunStatus.TRAINING, report_every=0.5, issued=now
            ),
            acknowledged=0,
            trust_one=self._trust_one,
            peers=tuple(Peer(key=k, addresses=[f"memory:{k[:16]}"]) for k in peer_keys),
        )

    def start(
        self,
        name: str,
        with_text: bool = True,
        knows: list[str] | None = None,
        limits: Limits | None = None,
        site: str = UNREACHABLE,
        max_tokens_per_second: int = 1 << 40,
    ) -> Volunteer:
        """Start a worker with a ticket.

        Args:
            name: The worker's name.
            with_text: Whether it has the run's text.
            knows: The names of the peers that it connects to first.
            limits: What it may use of its machine; None for everything.
            site: The address that it reports to.
            max_tokens_per_second: What its ticket allows it to state.
        """
        joined = self.join(name, with_text, knows, site, max_tokens_per_second)
        leaving, killing = threading.Event(), threading.Event()
        status: dict[str, Any] = {}
        failure: list[BaseException] = []

        def on_status(published: LocalStatus) -> None:
            status.update(published.model_dump(mode="json"))
            if killing.is_set():
                killing.clear()
                raise Killed

        transport = self.network.transport(joined.coordinator.identity.key)
        recipe = self.spec.recipe
        worker_class = MixingWorker if recipe.mixes_weights else Worker
        if worker_class is Worker and recipe.token_budget >= LARGE_BUDGET:
            worker_class = RestingWorker
        hardware = self._machines.get(name, ONE_CORE_MACHINE)
        worker = worker_class(joined, leaving, hardware, limits, on_status, transport)

        def run_worker() -> None:
            torch.set_num_threads(1)
            try:
                worker.run()
            except Killed:
                return
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=run_worker, name=name)
        volunteer = Volunteer(worker, thread, leaving, killing, status, failure)
        self.volunteers.append(volunteer)
        thread.start()
        return volunteer

    def join_in_agreement(self, *volunteers: Volunteer, seconds: float = 60.0) -> None:
        """Wait until workers have ended; check that all have the same updates and weights."""
        for volunteer in volunteers:
            volunteer.join(seconds)
        assert len({(v.status["vector"], v.status["anchor"]) for v in volunteers}) == 1

    def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Wait until the condition holds; raise the exception of a worker that fails meanwhile."""
        deadline = time.monotonic() + seconds
        while not condition():
            for volunteer in self.volunteers:
                if volunteer.failure:
                    raise volunteer.failure[0]
            assert time.monotonic() < deadline, (
                f"the condition did not hold: {[v.status for v in self.volunteers]}"
            )
            time.sleep(0.05)


@contextmanager
def created_swarms(parent: Path, text: tuple[Path, TextManifest]) -> Iterator[Callable[..., Swarm]]:
    """Provide a function that creates a swarm with a quick recipe, changed by its arguments."""
    swarms: list[Swarm] = []

    def create(model: ModelSpec | None = None, folder: str = "", **recipe: Any) -> Swarm:
        quick = Recipe(
            token_budget=60_000,
            learning_rate=3e-3,
            warmup_tokens=2_000,
            step_sequences=8,
            round_steps=10,
            evaluate_every=20_000,
        )
        swarms.append(Swarm(parent / folder, text, replace(quick, **recipe), model))
        return swarms[-1]

    yield create
    volunteers = [volunteer for created in swarms for volunteer in created.volunteers]
    for volunteer in volunteers:
        volunteer.leaving.set()
    for volunteer in volunteers:
        volunteer.thread.join(60)


@pytest.fixture
def swarm(tmp_path, text) -> Iterator[Callable[..., Swarm]]:
    """Provide a function that creates swarms of one test."""
    with created_swarms(tmp_path, text) as create:
        yield create


@pytest.fixture(scope="module")
def shared_swarm(tmp_path_factory, text) -> Iterator[Callable[..., Swarm]]:
    """Provide a function that creates swarms which the tests of a module share."""
    with created_swarms(tmp_path_factory.mktemp("swarm"), text) as create:
        yield create
