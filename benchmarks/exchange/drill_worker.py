"""One machine of the drill: a real worker over iroh, with what a drill does to it from outside by small files.

`severed`: keys that its network does not reach just now. `flip`: one bit of its anchor changes in memory. `poison`:
from now on it publishes loud noise. It measures what its exchange costs in CPU seconds, thread by thread.
"""

import asyncio
import json
import logging
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.errors import BarnraiseError
from barnraise.exchange import exchange, update_writer
from barnraise.exchange.handlers import blob_scrub, update_queue
from barnraise.exchange.ledger import anchor_scrub, blob_store, ledger
from barnraise.exchange.network.iroh_transport import IrohTransport
from barnraise.exchange.network.transport import Channel, ChannelClosedError
from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import Limits
from barnraise.protocol.coordinator_messages import Directive, TextManifest
from barnraise.protocol.enums import Role, RunStatus
from barnraise.protocol.messages import Peer, Signed, Ticket
from barnraise.protocol.signing import Identity, digest
from barnraise.spec import RunSpec
from barnraise.state_dir import StateDir
from barnraise.training import train as worker_module
from barnraise.training.join import JoinedRun
from barnraise.training.train import Worker

RUN = "0192f0c1-2d3e-7f40-8a5b-6c7d8e9f0a1b"
NOBODY = "http://127.0.0.1:9"  # the coordinator is down throughout
MIRROR = Identity(b"m" * 32)
MACHINE = Hardware(  # nothing is measured: a drill's models fit anywhere
    device="cpu", name="a drill's machine", cores=1, memory=8 << 30, device_memory=0, disk=8 << 30, dtype="float32",
    matmul=((128, 2e10),), attention=1e10, elementwise=5e9, to_device=5e9, from_device=5e9, stream=1e10, adam=2e8,
    disk_read=5e8, disk_write=5e8,
)  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """What a machine is started with."""

    home: Path
    spec: str
    manifest: str  # signed
    port: int
    knows: tuple[tuple[str, int], ...]  # keys and ports of whom it dials first
    uplink: int | None = None
    clock: float = 0.0  # seconds that its clock is off
    finished: bool = False  # the run is over: what is left is to agree


def ticket(key: str, volunteer: str, run: str = RUN) -> Signed:
    """For an honest day."""
    now = time.time()
    machine = f"0192f0c1-2d3e-7f40-8a5b-{key[:12]}"
    body = Ticket(
        run=run, peer=key, machine=machine, volunteer=digest(volunteer), roles=[Role.WORKER], issued=now,
        expires=now + 86400, mirror=MIRROR.key,
    )  # fmt: skip
    return MIRROR.sign("ticket", body)


def work(setup: Setup) -> None:
    """Until SIGINT, or the run's end. What a person would read goes to the folder's log."""
    home = StateDir(setup.home)
    logging.basicConfig(
        filename=home.path / "log", level=logging.INFO, format="%(asctime)s %(message)s", force=True
    )
    leaving = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: leaving.set())
    torch.set_num_threads(1)
    try:
        _work(setup, home, leaving)
    except BarnraiseError as error:
        logging.getLogger("barnraise").error("%s", error)
        sys.exit(1)


def _work(setup: Setup, home: StateDir, leaving: threading.Event) -> None:
    spec, signed = RunSpec.from_json(setup.spec), Signed.model_validate_json(setup.manifest)
    coordinator = CoordinatorClient(NOBODY, home.identity, MIRROR.key)
    real = coordinator.now
    coordinator.now = lambda: real() + setup.clock
    key, status = home.identity.key, RunStatus.FINISHED if setup.finished else RunStatus.TRAINING
    place = JoinedRun(
        run=RUN,
        name="a drill",
        machine=f"0192f0c1-2d3e-7f40-8a5b-{key[:12]}",
        folder=home.open_run(RUN),
        coordinator=coordinator,
        spec=spec,
        spec_digest=digest(spec.to_json()),
        manifest=TextManifest.model_validate_json(signed.body),
        ticket=ticket(key, home.path.name),
        directive=Directive(
            run=RUN, machine=RUN, status=status, report_every=1.0, issued=time.time()
        ),
        acknowledged=0,
        peers=tuple(Peer(key=k, addresses=[f"127.0.0.1:{port}"]) for k, port in setup.knows),
    )
    orders = Orders(home.path)
    spent = Spent()

    def watch(_: dict[str, Any]) -> None:
        orders.heed(worker)
        spent.tell(home.path / "cpu.json")

    transport = Severed(home.identity.secret, setup.port, orders.severed)
    worker = Worker(place, leaving, MACHINE, Limits(uplink=setup.uplink), watch, transport)
    worker.run()


# ---- what is done to it --------------------------------------------------------------------------------------------


USUAL = (
    anchor_scrub.MIN_INTERVAL,
    blob_scrub.MIN_INTERVAL,
    blob_scrub.TIME_SHARE,
)  # seconds between two looks at fragments, at files, and the latter's time
HURRIED = 0.1, 0.01, 0.5


class Orders:
    def __init__(self, folder: Path):
        self._folder, self._poisoned = folder, False

    def severed(self) -> set[str]:
        path = self._folder / "severed"
        return set(json.loads(path.read_text())) if path.exists() else set()

    def heed(self, worker: Worker) -> None:
        """Between two steps. `hurry`: a drill has no hours to wait until everything was looked at again."""
        anchor_scrub.MIN_INTERVAL, blob_scrub.MIN_INTERVAL, blob_scrub.TIME_SHARE = (
            HURRIED if (self._folder / "hurry").exists() else USUAL
        )
        if (path := self._folder / "flip").exists() and len(worker.anchor.fragments):
            units = worker.anchor.fragments[0]
            units[7] ^= 1 << 12
            worker.anchor.fragments[0] = units
            path.unlink()
        if (self._folder / "poison").exists() and not self._poisoned and hasattr(worker, "engine"):
            self._poisoned, honest = True, worker.engine.end_round

            def end_round(encode: Callable, *rest: Any) -> Any:
                return honest(lambda values: encode(noise_like(values)), *rest)

            worker.engine.end_round = end_round


def noise_like(values: torch.Tensor) -> torch.Tensor:
    """As loud as an update may be."""
    return torch.randint(-(1 << 26), 1 << 26, values.shape, dtype=torch.int32)


class Severed(IrohTransport):
    """A network that does not reach some just now, as when a router is gone."""

    def __init__(self, secret: bytes, port: int, severed: Callable[[], set[str]]):
        super().__init__(secret, host="127.0.0.1", port=port)
        self._severed, self._open = severed, set[Channel]()

    async def start(self) -> None:
        await super().start()
        self._spawn(self._cut())

    async def connect(self, peer: Peer) -> Channel:
        if peer.key in self._severed():
            raise ChannelClosedError("the network is cut")
        return self._noted(await super().connect(peer))

    async def accept(self) -> Channel:
        while (channel := await super().accept()).peer in self._severed():
            channel.close("the network is cut")
        return self._noted(channel)

    def _noted(self, channel: Channel) -> Channel:
        self._open.add(channel)
        return channel

    async def _cut(self) -> None:
        while True:
            for channel in [each for each in self._open if each.peer in self._severed()]:
                channel.close("the network is cut")
                self._open.discard(channel)
            await asyncio.sleep(1.0)  # looking is charged to the exchange


# ---- what its exchange costs ---------------------------------------------------------------------------------------


RUNTIMES = ("tokio", "iroh", "async-compat")  # what iroh's threads call themselves


class Spent:
    """CPU seconds: of the exchange (its threads and iroh's, and what the loop's own thread does for it), and of all."""

    OURS = (
        "barnraise-exchange",
        "barnraise-disk_",
        "barnraise-cuts_",
    )  # "barnraise-disk read" is the engine's
    CALLS = (
        (worker_module.codec, "encode"), (update_queue.ReceivedUpdate, "decode"), (blob_store.BlobStore, "store"), (ledger.Ledger, "append"),
        (exchange.Exchange, "find_damaged_fragment"), (exchange.Exchange, "serve_snapshots"), (exchange.Exchange, "poll_updates"), (update_writer, "compute_sketch"),
    )  # fmt: skip

    def __init__(self) -> None:
        self.process, self._loop, self._depth = psutil.Process(), 0.0, 0
        self._thread = threading.get_ident()
        for owner, name in self.CALLS:
            setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, call: Callable) -> Callable:
        def counted(*given: Any, **named: Any) -> Any:
            if threading.get_ident() != self._thread or self._depth:
                return call(*given, **named)
            self._depth, began = 1, time.thread_time()
            try:
                return call(*given, **named)
            finally:
                self._depth, self._loop = 0, self._loop + time.thread_time() - began

        return counted

    def tell(self, path: Path) -> None:
        known = {t.native_id: t.name for t in threading.enumerate()}
        parts = Counter({"in the loop's own thread": self._loop})
        for thread in self.process.threads():
            name = "iroh" if _comm(thread.id).startswith(RUNTIMES) else known.get(thread.id, "")
            if name == "iroh" or name.startswith(self.OURS):
                parts[name] += thread.user_time + thread.system_time
        times = self.process.cpu_times()
        whole = {
            "exchange": parts.total(),
            "all": times.user + times.system,
            "at": time.time(),
            "parts": parts,
        }
        part = path.with_suffix(".part")
        part.write_text(json.dumps(whole))
        part.replace(path)


def _comm(thread: int) -> str:
    path = Path(f"/proc/self/task/{thread}/comm")
    return path.read_text() if path.exists() else ""
