"""One machine of a crew in a process of its own, by requests; or one that trains alone.

`Machine` is the requesting side; run as a program, this file is the other one. Requests are
pickled, replies are lines of JSON.
"""

import asyncio
import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from engine_child import ChildError, answer_requests, find_peaks, show_allocations
from gpipe_rank import GpipeRank
from helpers.worker.crews import IDENTITIES, RUN
from helpers.worker.plans import bitwise
from torch.profiler import ProfilerActivity, profile, record_function

from barnraise.ledger.anchor import Anchor
from barnraise.peering.transports.iroh_transport import IrohTransport
from barnraise.peering.transports.transport import ChannelClosedError
from barnraise.planning.plan import Plan
from barnraise.planning.quantization_scheme import QuantizationScheme
from barnraise.protocol.messages import Peer
from barnraise.spec import ModelSpec
from barnraise.swap.engine import Engine
from barnraise.swap.state_store import FragmentSequence, StateStore
from barnraise.training.crew.crew_engine import CrewEngine
from barnraise.training.crew.crew_fragments import CrewFragments
from barnraise.training.crew.crew_frames import pack_control
from barnraise.training.crew.crew_links import CrewLinks
from barnraise.training.crew.crew_member import CrewMember, NoLedger
from barnraise.training.crew.crew_messages import Ping
from barnraise.training.crew.crew_orders import CrewOrders
from barnraise.training.crew.crew_state import CrewState
from barnraise.training.crew.roster import CrewRoster
from barnraise.training.crew.stage_engine import StageEngine
from barnraise.training.training_engine import Encoder

REPLY_SECONDS = 600.0  # A machine that takes longer is stuck.
CONNECT_SECONDS = 60.0
REDIAL_SECONDS = 0.1
SLICE_SECONDS = 0.01  # for which a slowed machine computes at a time
PEAK, NOW = "VmHWM", "VmRSS"  # lines of /proc/self/status


class Machine:
    """A process; it is a context manager."""

    def __init__(self, core: int | None = None, command_prefix: Sequence[str] = ()) -> None:
        """Start it, on one core if that is given; `command_prefix` may enter a namespace."""
        arguments = [] if core is None else [str(core)]
        self._process = subprocess.Popen(
            [*command_prefix, sys.executable, __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __enter__(self) -> "Machine":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def send(self, method: str, **arguments: Any) -> None:
        """Request something of the machine's `MachineHost`, without waiting for it."""
        assert self._process.stdin is not None
        pickle.dump((method, arguments), self._process.stdin)
        self._process.stdin.flush()

    def receive(self) -> Any:
        """Return the result of the oldest request without one.

        Raises:
            ChildError: it failed.
        """
        assert self._process.stdout is not None
        alarm = threading.Timer(REPLY_SECONDS, self._process.kill)
        alarm.start()
        line = self._process.stdout.readline()
        alarm.cancel()
        reply = json.loads(line) if line else {"error": "a machine's process has ended"}
        if "error" in reply:
            raise ChildError(reply["error"])
        return reply["value"]

    def request(self, method: str, **arguments: Any) -> Any:
        """Request something and wait for its result."""
        self.send(method, **arguments)
        return self.receive()

    @contextlib.contextmanager
    def slowed(self, factor: int) -> Iterator[None]:
        """Stop the process for so much of a block of statements that it takes `factor` times."""
        is_over = threading.Event()

        def stop_and_go() -> None:
            while not is_over.wait(SLICE_SECONDS):
                self._process.send_signal(signal.SIGSTOP)
                time.sleep((factor - 1) * SLICE_SECONDS)
                self._process.send_signal(signal.SIGCONT)

        thread = threading.Thread(target=stop_and_go)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


# ---- in the process ------------------------------------------------------------------------------


def read_memory(name: str) -> int:
    """Return the bytes of this process that a line of its status names."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


class MachineHost:
    """Answer a `Machine`'s requests."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._engine: Engine | CrewEngine | None = None
        self._loop = asyncio.new_event_loop()
        self._folder = tempfile.TemporaryDirectory()
        self._before = 0  # bytes of this process without an engine
        self._counts = False  # whether all of torch's allocations are counted
        self._peak = 0  # bytes that were allocated at most, as counted

    def listen(self, number: int, host: str) -> list[str]:
        """Open the machine's endpoint; return its addresses."""
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._transport = IrohTransport(IDENTITIES[number].secret, host)
        self._source = self._transport.add_protocol("crew")
        asyncio.run_coroutine_threadsafe(self._transport.start(), self._loop).result(30)
        return self._transport.addresses()

    def count_allocations(self) -> None:
        """Count what the engine, to be opened next, allocates; it is slower then."""
        show_allocations()
        self._counts = True

    @contextlib.contextmanager
    def _counted(self, store: StateStore) -> Iterator[None]:
        """Count the allocations of this thread in a block of statements, and those of before."""
        if not self._counts:
            yield
            return
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            with record_function("phase all"):
                pass
            yield
        events: Any = record.profiler
        peaks, _ = find_peaks(events.kineto_results.events())
        self._peak = max(self._peak, store.host.allocated + max(peaks.values()))

    def open_alone(self, plan: Plan) -> None:
        """Open an engine that trains the whole model."""
        self._note_memory(plan)
        engine = bitwise.open_engine(plan)
        self._store = engine.store
        self._anchor = Anchor(FragmentSequence(engine.store, "anchor"))
        self._engine = engine

    def lead(self, plan: Plan, roster: CrewRoster, addresses: Mapping[int, list[str]]) -> None:
        """Connect to the members, and open the crew's engine at the initial weights."""
        links = self._connect(roster, 0, addresses)
        others = set(range(1, len(roster.seats)))
        if not links.wait(lambda: others <= links.connected(), CONNECT_SECONDS):
            raise ChildError(f"of the crew's members only {links.connected()} have connected")
        self._note_memory(plan)
        self._store = store = StateStore(plan)
        orders = CrewOrders(links)
        self._anchor = Anchor(CrewFragments(FragmentSequence(store, "anchor"), orders))
        recipe = replace(bitwise.RECIPE, optimizer=plan.optimizer)
        stage = StageEngine(plan, recipe, store, self._anchor)
        for fragment in plan.fragments:
            self._anchor.fragments[fragment.index] = bitwise.initial_units(fragment)
        self._engine = CrewEngine(stage, orders, is_fresh=True)

    def serve(
        self, plan: Plan, roster: CrewRoster, number: int, addresses: Mapping[int, list[str]]
    ) -> list[int]:
        """Be a member until the lead leaves; return `measure_memory`'s bytes."""
        links = self._connect(roster, number, addresses)
        self._note_memory(plan)
        state = CrewState(Path(self._folder.name), RUN, "0" * 64)
        store, progress = state.open_store(plan)
        recipe = replace(bitwise.RECIPE, optimizer=plan.optimizer)
        engine = StageEngine(plan, recipe, store, NoLedger(), state.describe, progress)
        with self._counted(store):
            CrewMember(engine, links, state).run()
        engine.close()
        return self.measure_memory()

    def _note_memory(self, plan: Plan) -> None:
        """Remember the plan, and what this process needs without the engine."""
        self._plan = plan
        small = bitwise.open_engine(bitwise.resident_plan())
        bitwise.train(small, 1)  # it loads what torch loads late
        small.close()
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now
        self._before = read_memory(NOW)

    def measure_memory(self) -> list[int]:
        """Return the bytes that were counted at most, and those by which the process has grown."""
        return [self._peak, read_memory(PEAK) - self._before]

    def train(self, steps: int, first: int = 0, rate: float = 1.0) -> dict[str, list[float]]:
        """Train on the texts of step `first` and after, with so much of the learning rate."""
        engine = self._engine
        assert engine is not None
        plan = self._plan
        found: dict[str, list[float]] = {"losses": [], "norms": [], "seconds": []}
        with self._counted(self._store):
            for step in range(first, first + steps):
                count = plan.sequences * plan.micro_batches
                text = bitwise.sample_text(plan.model, count, seed=step)
                started = time.perf_counter()
                stats = engine.step(list(text.split(plan.sequences)), rate, position=step + 1)
                found["seconds"].append(time.perf_counter() - started)
                found["losses"].append(stats.loss)
                found["norms"].append(stats.norm)
        return found

    def open_gpipe(
        self, model: ModelSpec, blocks: int, rank: int, shape: tuple[int, int], port: int
    ) -> None:
        """Be a rank of torch's pipeline; see `GpipeRank`."""
        self._gpipe = GpipeRank(model, blocks, rank, shape, port)
        self._model, self._step_sequences = model, shape[0] * shape[1]

    def train_gpipe(self, steps: int) -> list[float]:
        """Return the seconds of steps of torch's pipeline."""
        seconds: list[float] = []
        for step in range(steps):
            text = bitwise.sample_text(self._model, self._step_sequences, seed=step)
            started = time.perf_counter()
            self._gpipe.step(text)
            seconds.append(time.perf_counter() - started)
        return seconds

    def train_without(self, number: int) -> float:
        """Return the seconds of a step in which a holder has no part."""
        assert isinstance(self._engine, CrewEngine)
        self._engine.holders.skip(number, REPLY_SECONDS)
        seconds = self.train(1)["seconds"][0]
        self._engine.holders.skip(number, 0.0)
        return seconds

    def count_dealt(self) -> list[int]:
        """Return the micro-batches that each member computes in a step."""
        assert isinstance(self._engine, CrewEngine)
        before = list(self._engine.holders.dealt.values())
        self.train(1)
        after = self._engine.holders.dealt.values()
        return [new - old for old, new in zip(before, after, strict=True)]

    def end_round(self) -> str:
        """Publish a round; return its payloads' digest."""
        assert self._engine is not None
        hasher = blake2b()
        for part in self._engine.end_round(Encoder(QuantizationScheme.parse("dense2")), 1.0):
            hasher.update(part.payload)
        return hasher.hexdigest()

    def evaluate(self, sequences: int) -> float:
        """Return the anchor's loss on text of its own."""
        assert self._engine is not None
        return self._engine.evaluate([bitwise.sample_text(self._plan.model, sequences, seed=77)])

    def read_anchor(self) -> str:
        """Return a checksum of the whole anchor."""
        assert self._engine is not None
        self._engine.apply_queued()
        return str(self._anchor.checksum())

    def close(self) -> list[int]:
        """End the crew, or the training alone; return `measure_memory`'s bytes."""
        assert self._engine is not None
        self._engine.close()
        return self.measure_memory()

    # ---- channels ------------------------------------------------------------------------------

    def _connect(
        self, roster: CrewRoster, number: int, addresses: Mapping[int, list[str]]
    ) -> CrewLinks:
        links = CrewLinks(roster, number, self._loop)
        peers = {n: Peer(key=IDENTITIES[n].key, addresses=addresses[n]) for n in addresses}
        asyncio.run_coroutine_threadsafe(self._accept(links), self._loop)
        for other in roster.neighbours(number):
            if other < number:
                asyncio.run_coroutine_threadsafe(self._dial(links, peers[other]), self._loop)
        return links

    async def _accept(self, links: CrewLinks) -> None:
        while True:
            self._loop.create_task(links.serve(await self._source.accept()))

    async def _dial(self, links: CrewLinks, peer: Peer) -> None:
        while True:
            with contextlib.suppress(ChannelClosedError):
                channel = await self._source.connect(peer)
                await channel.send(pack_control(Ping()))
                await links.serve(channel)
            await asyncio.sleep(REDIAL_SECONDS)


if __name__ == "__main__":
    if sys.argv[1:]:
        os.sched_setaffinity(0, {int(sys.argv[1])})
    torch.set_num_threads(1)
    answer_requests(MachineHost())
