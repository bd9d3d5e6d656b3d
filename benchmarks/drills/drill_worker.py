"""One machine of the drill: a real worker over iroh, in which the drill injects faults.

The drill writes small files, its orders (`Orders`); the worker looks for them between two steps.
It also measures what its exchange costs in CPU seconds, thread by thread (`CpuMeter`).
"""

import asyncio
import json
import logging
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakSet

import psutil
import torch
from arrival_log import ArrivalLog
from joined_run import Setup, build_joined_run
from thread_profile import ThreadProfile

from barnraise.errors import BarnraiseError
from barnraise.exchange import exchange
from barnraise.exchange.blobs import blob_scrub
from barnraise.exchange.updates import update_writer
from barnraise.ledger import anchor_scrub, blob_store, ledger, update_queue
from barnraise.ledger.scrub_pace import ScrubPace
from barnraise.peering.transports.iroh_transport import IrohTransport
from barnraise.peering.transports.transport import Channel, ChannelClosedError
from barnraise.planning.limits import Limits
from barnraise.protocol.messages import Peer
from barnraise.state_dir import StateDir
from barnraise.swap.engine import EncodedFragment
from barnraise.training import training_engine
from barnraise.training.local_status import LocalStatus
from barnraise.training.train import Worker

PROFILE = "profile.json"  # of a machine's exchange, in its state folder


def run_worker(setup: Setup) -> None:
    """Run a worker until SIGINT or the run's end; its messages go to the folder's log."""
    state_dir = StateDir(setup.state_folder)
    logging.basicConfig(
        filename=state_dir.path / "log",
        level=logging.INFO,
        format="%(asctime)s %(message)s",
        force=True,
    )
    leaving = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: leaving.set())
    torch.set_num_threads(setup.threads)
    try:
        _train(setup, state_dir, leaving)
    except BarnraiseError as error:
        logging.getLogger("barnraise").error("%s", error)
        sys.exit(1)
    except Exception:
        logging.getLogger("barnraise").exception("the worker failed")
        raise


def _train(setup: Setup, state_dir: StateDir, leaving: threading.Event) -> None:
    orders = Orders(state_dir.path)
    meter = CpuMeter()
    profile = ThreadProfile(EXCHANGE_THREADS) if setup.profiled else None
    ArrivalLog(state_dir.path / "arrivals").wrap_ledger()

    def on_status(_: LocalStatus) -> None:
        orders.obey(worker)
        transport.cut_off(orders.severed_peers())
        meter.write(state_dir.path / "cpu.json")
        if profile is not None:
            profile.write(state_dir.path / PROFILE)

    transport = SeverableTransport(state_dir.identity.secret, setup.port, orders.severed_peers)
    worker = DrillWorker(
        build_joined_run(setup, state_dir),
        leaving,
        setup.hardware,
        Limits(uplink=setup.uplink, device_memory=setup.device_memory),
        on_status,
        transport,
    )
    worker.rest_seconds = setup.rest_seconds
    worker.evaluations = state_dir.path / "evaluations"
    worker.run()


class DrillWorker(Worker):
    """A worker that rests after each step and logs what its evaluations are based on.

    Attributes:
        rest_seconds: How long it rests.
        evaluations: The log, one JSON array a line: the loss, and {author: tokens in the anchor}.
    """

    rest_seconds = 0.0
    evaluations: Path

    def run_between_steps(self) -> None:
        """Do what is due between two steps, and rest."""
        super().run_between_steps()
        if self.rest_seconds:
            time.sleep(self.rest_seconds)

    def evaluate_if_due(self, at_once: bool = False) -> None:
        """Evaluate if it is due, and log the result."""
        before = self.metrics.last_validation
        super().evaluate_if_due(at_once)
        after = self.metrics.last_validation
        if after is not None and after != before:
            totals = {author: head.total for author, head in self.anchor.heads.items()}
            with self.evaluations.open("a") as file:
                file.write(json.dumps([after[1], totals]) + "\n")


# ---- faults -----------------------------------------------------------------------------------


# The paces of checking the anchor and the files.
NORMAL_SCRUB = (anchor_scrub.FRAGMENT_PACE, blob_scrub.FILE_PACE)
FAST_SCRUB = (ScrubPace(0.1), ScrubPace(0.01, 0.5))


class Orders:
    """The drill's orders to a worker, each a file in its folder.

    * `severed`: keys of peers that its network does not reach now.
    * `hurry`: scrub fast, as a drill cannot wait hours for a whole pass.
    * `flip`: flip one bit of the anchor in memory, once.
    * `poison`: publish loud noise from now on.
    """

    def __init__(self, folder: Path) -> None:
        """Read orders from a folder."""
        self._folder = folder
        self._poisoned = False

    def severed_peers(self) -> set[str]:
        """Return the keys of the peers that cannot be reached now."""
        path = self._folder / "severed"
        return set(json.loads(path.read_text())) if path.exists() else set()

    def obey(self, worker: Worker) -> None:
        """Inject the faults that are ordered. Call it between two steps."""
        is_fast = (self._folder / "hurry").exists()
        paces = FAST_SCRUB if is_fast else NORMAL_SCRUB
        anchor_scrub.FRAGMENT_PACE, blob_scrub.FILE_PACE = paces
        flip_order = self._folder / "flip"
        if flip_order.exists() and len(worker.anchor.fragments):
            units = worker.anchor.fragments[0]
            units[7] ^= 1 << 12
            worker.anchor.fragments[0] = units
            flip_order.unlink()
        is_poison = (self._folder / "poison").exists()
        if is_poison and not self._poisoned and hasattr(worker, "engine"):
            self._poisoned = True
            _poison_engine(worker)


class NoiseEncoder(training_engine.Encoder):
    """Encode noise in the place of what a round has learnt."""

    def __call__(self, units: torch.Tensor) -> tuple[bytes, torch.Tensor]:
        """Return noise as large as the units; see `Encoder`."""
        return super().__call__(noise_like(units))


def _poison_engine(worker: Worker) -> None:
    """Make every later update of a worker noise."""
    honest_end_round = worker.engine.end_round

    def end_round(
        encode: training_engine.Encoder,
        weight: float,
        fragments: Collection[int] | None = None,
        carries_residual: bool = False,
        has_momentum: bool = True,
    ) -> Iterator[EncodedFragment]:
        noise = NoiseEncoder(encode.scheme)
        return honest_end_round(noise, weight, fragments, carries_residual, has_momentum)

    worker.engine.end_round = end_round


def noise_like(values: torch.Tensor) -> torch.Tensor:
    """Return noise that is as loud as an update may be, int32 of the same shape."""
    return torch.randint(-(1 << 26), 1 << 26, values.shape, dtype=torch.int32)


class SeverableTransport(IrohTransport):
    """A network that cannot reach some peers now, as when a router is gone."""

    def __init__(self, secret: bytes, port: int, severed_peers: Callable[[], set[str]]) -> None:
        """Create the transport.

        Args:
            secret: the machine's secret key.
            port: its UDP port.
            severed_peers: returns the keys of the peers that cannot be reached now.
        """
        super().__init__(secret, host="127.0.0.1", port=port)
        self._severed_peers = severed_peers
        self._severed: set[str] = set()
        # Weak: a channel that has ended and that nobody uses any longer must not stay in memory.
        self._open_channels: WeakSet[Channel] = WeakSet()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Start; see `Transport.start`."""
        self._loop = asyncio.get_running_loop()
        await super().start()

    async def connect(self, peer: Peer) -> Channel:
        """Connect to a peer unless it is cut off.

        Raises:
            ChannelClosedError: if it is.
        """
        if peer.key in self._severed_peers():
            raise ChannelClosedError("the network is cut")
        return self._track(await super().connect(peer))

    async def accept(self) -> Channel:
        """Return the next connection of a peer that is not cut off."""
        while True:
            channel = await super().accept()
            if channel.peer not in self._severed_peers():
                return self._track(channel)
            channel.close("the network is cut")

    def _track(self, channel: Channel) -> Channel:
        self._open_channels.add(channel)
        return channel

    def cut_off(self, severed: set[str]) -> None:
        """Cut these peers off, if that is new. Call it from the training loop's thread.

        A task that looks for orders now and then would count as the exchange's own time.
        """
        if severed != self._severed and self._loop is not None:
            self._severed = severed
            self._loop.call_soon_threadsafe(self._close_channels, severed)

    def _close_channels(self, severed: set[str]) -> None:
        for channel in [c for c in self._open_channels if c.peer in severed]:
            channel.close("the network is cut")
            self._open_channels.discard(channel)


# ---- the exchange's cost ----------------------------------------------------------------------


IROH_THREADS = ("tokio", "iroh", "async-compat")  # prefixes of the names of iroh's threads
# The engine has a thread called "barnraise-disk read": the "_" excludes it.
EXCHANGE_THREADS = ("barnraise-exchange", "barnraise-disk_", "barnraise-snapshots_")
# What the training loop's own thread does for the exchange.
EXCHANGE_CALLS: tuple[tuple[Any, str], ...] = (
    (training_engine.codec, "encode"),
    (update_queue.ReceivedUpdate, "decode"),
    (blob_store.BlobStore, "store"),
    (ledger.Ledger, "append"),
    (exchange.Exchange, "find_damaged_fragment"),
    (exchange.Exchange, "serve_snapshots"),
    (exchange.Exchange, "poll_updates"),
    (update_writer, "compute_sketch"),
)


class CpuMeter:
    """Measures CPU seconds of the exchange and of the whole process.

    The exchange's are those of its threads, of iroh's, and of EXCHANGE_CALLS in the training loop's
    thread.
    """

    def __init__(self) -> None:
        """Wrap EXCHANGE_CALLS, so that they are timed in the thread that creates the meter."""
        self._process = psutil.Process()
        self._loop_seconds = 0.0
        self._is_timing = False
        self._thread = threading.get_ident()
        for owner, name in EXCHANGE_CALLS:
            setattr(owner, name, self._time_calls(getattr(owner, name)))

    def _time_calls(self, call: Callable) -> Callable:
        def timed(*arguments: Any, **options: Any) -> Any:
            # A call inside a timed call is already counted.
            if threading.get_ident() != self._thread or self._is_timing:
                return call(*arguments, **options)
            self._is_timing = True
            started = time.thread_time()
            try:
                return call(*arguments, **options)
            finally:
                self._is_timing = False
                self._loop_seconds += time.thread_time() - started

        return timed

    def write(self, path: Path) -> None:
        """Write the CPU seconds so far, as JSON."""
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        parts: dict[str, float] = defaultdict(float)
        parts["in the loop's own thread"] = self._loop_seconds
        for thread in self._process.threads():
            is_iroh = _system_name(thread.id).startswith(IROH_THREADS)
            name = "iroh" if is_iroh else names.get(thread.id, "")
            if is_iroh or name.startswith(EXCHANGE_THREADS):
                parts[name] += thread.user_time + thread.system_time
        times = self._process.cpu_times()
        measured = {
            "exchange": sum(parts.values()),
            "all": times.user + times.system,
            "at": time.time(),
            "parts": parts,
        }
        partial_file = path.with_suffix(".part")
        partial_file.write_text(json.dumps(measured))
        partial_file.replace(path)


def _system_name(thread: int) -> str:
    """Return the operating system's name of a thread of this process; "" if it has ended."""
    path = Path(f"/proc/self/task/{thread}/comm")
    return path.read_text() if path.exists() else ""
