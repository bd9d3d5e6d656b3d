"""Crews whose machines are threads of this process, connected by real channels over loopback."""

import asyncio
import contextlib
import dataclasses
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from helpers.network.memory_transport import MemoryNetwork
from helpers.worker.plans import bitwise, stage_of
from torch import Tensor

from barnraise.ledger.anchor import Anchor
from barnraise.peering.transports.iroh_transport import IrohTransport
from barnraise.peering.transports.transport import Channel, ChannelClosedError
from barnraise.planning.plan import Plan
from barnraise.protocol.messages import Peer
from barnraise.protocol.signing import Identity
from barnraise.spec import Recipe
from barnraise.swap.executor import EngineProgress
from barnraise.swap.state_store import FragmentSequence, StateStore
from barnraise.training.crew.crew_engine import CrewEngine
from barnraise.training.crew.crew_fragments import CrewFragments
from barnraise.training.crew.crew_frames import pack_control
from barnraise.training.crew.crew_links import CrewLinks
from barnraise.training.crew.crew_member import CrewMember, NoLedger
from barnraise.training.crew.crew_messages import Ping
from barnraise.training.crew.crew_orders import CrewOrders
from barnraise.training.crew.crew_state import CrewState
from barnraise.training.crew.forming_messages import CrewSeat, Seating
from barnraise.training.crew.roster import CrewRoster
from barnraise.training.crew.stage_engine import StageEngine

RUN = "01890a5d-ac96-774b-bcce-b302099a8057"
IDENTITIES = [Identity(bytes([number]) * 32) for number in range(1, 6)]
REDIAL_SECONDS = 0.02


def deal(
    plan: Plan, counts: Sequence[int], bits: int = 32, holders: Sequence[int] = ()
) -> CrewRoster:
    """Return a crew whose spans have so many blocks each, with the lead's first.

    Each span has one holder, or as many as `holders` states.
    """
    assert sum(counts) == plan.model.layers
    seats, first = [], 1
    for count, machines in zip(counts, holders or [1] * len(counts), strict=True):
        for _ in range(machines):
            number = len(seats)
            key, name = IDENTITIES[number].key, f"machine {number}"
            seats.append(CrewSeat(key=key, name=name, first_block=first, blocks=count))
        first += count
    seating = Seating(
        epoch=1,
        sequences=plan.sequences,
        micro_batches=plan.micro_batches,
        boundary_bits=bits,
        seats=seats,
    )
    return CrewRoster(plan.model, seating)


def describe_progress(progress: EngineProgress) -> str:
    """Return what a state on disk is committed with."""
    return json.dumps(dataclasses.asdict(progress))


@dataclasses.dataclass
class Cut:
    """When a line breaks: once so many more frames have arrived; 0: never."""

    frames: int = 0
    again: int = 0


class CutChannel:
    """A channel that breaks while it receives a certain frame, which is lost."""

    def __init__(self, channel: Channel, cut: Cut) -> None:
        """Wrap a channel; `cut` may change later."""
        self._channel, self._cut = channel, cut
        self.peer, self.send, self.close = channel.peer, channel.send, channel.close

    async def receive(self) -> bytes:
        """Return the next frame, or break."""
        frame = await self._channel.receive()
        if self._cut.frames > 0:
            self._cut.frames -= 1
            if self._cut.frames == 0:
                self._cut.frames = self._cut.again
                self.close("the line is cut")
                raise ChannelClosedError("the line is cut")
        return frame


class LocalCrew:
    """A crew of threads. The lead is the caller's thread.

    Attributes:
        roster: the crew.
        links: of each machine.
        engines: of each machine.
        lead: the lead's engine, from `start` on.
        failures: what members have raised.
        rebuilt: fragments of the anchor that the ledger has, for machines without a saved part.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        roster: CrewRoster,
        folder: Path,
        kind: str = "memory",
        recipe: Recipe = bitwise.RECIPE,
    ) -> None:
        """Prepare machines with these plans, which save in `folder`."""
        self.roster, self._folder = roster, folder
        self._recipe = dataclasses.replace(recipe, optimizer=plans[0].optimizer)
        self._plans = [
            stage_of(plan, stage.fragments)
            for plan, stage in zip(plans, roster.stages, strict=True)
        ]
        network = MemoryNetwork()
        self.transports = [
            network.transport(identity.key)
            if kind == "memory"
            else IrohTransport(identity.secret, "127.0.0.1")
            for identity in IDENTITIES[: len(plans)]
        ]
        self._sources = [transport.add_protocol("crew") for transport in self.transports]
        self._loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._threads: dict[int, threading.Thread] = {}
        self._member_stops: dict[int, threading.Event] = {}
        self._stopping = threading.Event()
        self._dialling = threading.Event()
        self._cuts: dict[tuple[int, int], Cut] = {}
        self.rebuilt: dict[int, Tensor] = {}
        self.failures: list[BaseException] = []

    def __enter__(self) -> "LocalCrew":
        self._loop_thread.start()
        self._dialling.set()
        self.links = [CrewLinks(self.roster, n, self._loop) for n in range(len(self._plans))]
        asyncio.run_coroutine_threadsafe(self._connect(), self._loop).result(30)
        self.engines = {number: self._open_engine(number) for number in range(len(self._plans))}
        for number in range(1, len(self._plans)):
            self._start_member(number)
        return self

    def _open_engine(self, number: int) -> StageEngine:
        plan = self._plans[number]
        if number > 0:
            state = self._state_of(number)
            store, progress = state.open_store(plan)
            return StageEngine(plan, self._recipe, store, NoLedger(), state.describe, progress)
        store = StateStore(plan, self._folder_of(number) if plan.on_disk else None)
        self._orders = CrewOrders(self.links[0])
        fragments = CrewFragments(FragmentSequence(store, "anchor"), self._orders)
        self.anchor = Anchor(fragments)
        progress = None if store.header is None else EngineProgress(**json.loads(store.header))
        return StageEngine(plan, self._recipe, store, self.anchor, describe_progress, progress)

    def _state_of(self, number: int) -> CrewState:
        return CrewState(self._folder_of(number), RUN, "0" * 64)

    def _start_member(self, number: int) -> None:
        stopping = self._member_stops[number] = threading.Event()
        thread = threading.Thread(target=self._serve_member, args=[number, stopping], daemon=True)
        self._threads[number] = thread
        thread.start()

    def restart_member(self, number: int) -> None:
        """End a member as if its process were killed, and start it again with what it saved."""
        self._member_stops[number].set()
        self._threads[number].join(30)
        killed = self.links[number]
        # A machine that dials at once must not reach the killed process again.
        self.links[number] = CrewLinks(self.roster, number, self._loop)
        killed.close("killed")
        self.engines[number].close()
        self.engines[number] = self._open_engine(number)
        self._start_member(number)

    def restart_lead(self) -> CrewEngine:
        """Begin again with another engine of the lead, into which its state is to be loaded."""
        self.links[0] = CrewLinks(self.roster, 0, self._loop)
        self.lead.suspend()
        self.engines[0] = self._open_engine(0)
        return self.start()

    def _folder_of(self, number: int) -> Path:
        folder = self._folder / str(number)
        folder.mkdir(exist_ok=True)
        return folder

    def start(self, units: Sequence | None = None) -> CrewEngine:
        """Begin with these fragments, or with the state that was saved last."""
        for i, each in enumerate(units or ()):
            self.anchor.fragments[i] = each
        is_fresh = units is not None
        rebuild = self.rebuilt.get
        self.lead = CrewEngine(self.engines[0], self._orders, is_fresh, rebuild)
        return self.lead

    def _serve_member(self, number: int, stopping: threading.Event) -> None:
        member = CrewMember(self.engines[number], self.links[number], self._state_of(number))
        try:
            member.run(stopping.is_set)
        except BaseException as error:
            self.failures.append(error)

    async def _connect(self) -> None:
        for transport in self.transports:
            await transport.start()
        for number in range(len(self._plans)):
            self._loop.create_task(self._accept(number))
            for other in self.roster.neighbours(number):
                if number < other:
                    self._loop.create_task(self._dial(number, other))

    async def _accept(self, number: int) -> None:
        while True:
            channel = await self._sources[number].accept()
            self._loop.create_task(self.links[number].serve(self._wrap(number, channel)))

    def _wrap(self, number: int, channel: Channel) -> Channel:
        """Return a machine's end of a channel that `cut_after` may break."""
        other = self.roster.find_seat(channel.peer)
        cut = self._cuts.setdefault((number, other), Cut())
        return cast(Channel, CutChannel(channel, cut))

    async def _dial(self, number: int, other: int) -> None:
        """Dial as the code that forms a crew does, again and again."""
        transport = self.transports[other]
        while not self._stopping.is_set():
            if self._dialling.is_set():
                with contextlib.suppress(ChannelClosedError):
                    peer = Peer(key=transport.key, addresses=transport.addresses())
                    channel = await self._sources[number].connect(peer)
                    await channel.send(pack_control(Ping()))
                    await self.links[number].serve(self._wrap(number, channel))
            await asyncio.sleep(REDIAL_SECONDS)

    def cut_after(self, number: int, other: int, frames: int, again: bool = False) -> None:
        """Cut a line when one machine has received so many more frames of another one."""
        cut = self._cuts.setdefault((number, other), Cut())
        cut.frames, cut.again = frames, frames if again else 0

    def set_dialling(self, dials: bool) -> None:
        """Let broken channels be dialled again, or not."""
        (self._dialling.set if dials else self._dialling.clear)()

    def __exit__(self, *details: object) -> None:
        if hasattr(self, "lead"):
            self.lead.close()
        self._stopping.set()
        for number, thread in self._threads.items():
            self._member_stops[number].set()
            thread.join(30)
            self.engines[number].close()
        asyncio.run_coroutine_threadsafe(self._disconnect(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop_thread.join(30)
        self._loop.close()

    async def _disconnect(self) -> None:
        for transport in self.transports:
            await transport.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def read_state(self) -> list:
        """Return (fp32 master weights, m, v) of each fragment, of its first holder, by index."""
        self.lead.flush()
        self.lead.apply_queued()
        by_fragment = {}
        for number, engine in self.engines.items():
            tensors = bitwise.read_state(engine)
            for place, i in enumerate(engine.plan.local_fragments):
                if self.roster.holders[i] != number:
                    continue
                by_fragment[i] = tensors[3 * place : 3 * place + 3]
        return [tensor for i in sorted(by_fragment) for tensor in by_fragment[i]]
