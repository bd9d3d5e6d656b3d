"""Fixtures: machines with keys and tickets on a network in memory, and engines."""

import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.network.memory_transport import MemoryNetwork
from helpers.wait_for import wait_until
from helpers.worker.plans import RECIPE, engine_of, tiny_plan
from memory_anchor import MemoryAnchor

from barnraise.exchange.exchange import Exchange, ExchangeConfig
from barnraise.exchange.gossip import gossip, requests
from barnraise.exchange.gossip.state_intervals import StateIntervals
from barnraise.exchange.snapshots import snapshot_client
from barnraise.exchange.verdicts import verdict_sync
from barnraise.ledger.codec import decode, encode
from barnraise.ledger.ledger import Ledger
from barnraise.ledger.update_queue import ReceivedUpdate
from barnraise.protocol import enums, messages
from barnraise.protocol.signing import Identity
from barnraise.protocol.verdicts import SignedVerdict, Verdict
from barnraise.spec import ModelSpec, RunSpec
from barnraise.swap.engine import Engine

RUN = "01890000-0000-7000-8000-000000000001"
TINY = ModelSpec(layers=1, width=16, heads=1, context=8, vocabulary=256)
# For most tests of several machines, longer intervals between States only mean longer waits.
FREQUENT_STATES = StateIntervals(
    usual_seconds=1.0,
    longest_seconds=2.4,
    shortest_seconds=0.4,
    full_seconds=6.0,
    slack_seconds=0.3,
    peers_seconds=6.0,
)
# What peers are waited for, on a network without distances.
SHORT_WAITS = [
    (gossip, "STATE_INTERVALS", FREQUENT_STATES),
    (requests, "RESPONSE_SECONDS", 2.0),
    (requests, "STALL_SECONDS", 2.0),
    (verdict_sync, "VERDICT_RESEND_SECONDS", 1.0),
    (verdict_sync, "HEADS_SECONDS", 1.0),
    (snapshot_client, "FRESH_SECONDS", 1.0),
    (snapshot_client, "INTRODUCTION_SECONDS", 0.5),
    (snapshot_client, "CONNECTION_SECONDS", 2.0),
    (snapshot_client, "CONFIRMED_TIMEOUT", 3.0),
]


class Machine:
    """A worker that does not train: its updates are noise, and everything else is real."""

    def __init__(self, world: "World", number: int, name: str | None = None):
        self.world = world
        self.number = number
        self.identity = Identity(bytes([number]) * 32)
        self.folder = world.folder / (name or f"machine{number}")
        self.incarnation = f"{number:016x}"
        self.ticket = world.ticket(self.identity.key, volunteer=number)
        self.open()

    def open(self, **changes) -> None:
        """Open everything from the directory, as a new process does, with some changes."""
        self.ledger = Ledger(self.folder)
        config = ExchangeConfig(
            spec=self.world.spec,
            run=RUN,
            identity=self.identity,
            incarnation=self.incarnation,
            ticket=self.ticket,
            mirrors=frozenset([self.world.mirror.key]),
        )
        self.exchange = Exchange(
            replace(config, **changes), self.ledger, self.world.transport(self.identity)
        )
        self.anchor = MemoryAnchor.from_seed(self.world.spec.model, self.world.spec.seed)

    def start(self) -> "Machine":
        """Start the exchange and apply what the ledger has past the anchor."""
        self.exchange.start(self.anchor.vector, self.anchor.retracted)
        self.step()
        return self

    def add_peers(self, *others: "Machine") -> "Machine":
        """Introduce other machines to this one."""
        self.exchange.add_peers(
            [messages.Peer(key=o.identity.key, addresses=o.exchange.addresses()) for o in others]
        )
        return self

    def publish_round(
        self, seed: int, tokens: int = 100, due: Collection[int] | None = None
    ) -> messages.Update | None:
        """Publish an update of noise, after adding it to the own anchor as the training loop does.

        Args:
            seed: Of the noise.
            tokens: Tokens that the update states.
            due: The fragments that it changes; None for all.

        Returns:
            None where it would not count: then it is withdrawn.
        """
        noise = torch.Generator().manual_seed(seed)
        with self.exchange.new_update(tokens) as update:
            for index, fragment in enumerate(self.anchor.fragments):
                if due is not None and index not in due:
                    continue
                values = torch.randint(
                    -(1 << 20), 1 << 20, fragment.shape, dtype=torch.int32, generator=noise
                )
                payload, units = encode(values)
                self.anchor.add_units(index, units)
                update.add(index, payload, units)
        if update.withdrawal is None:
            self.anchor.record(update.header)
            return update.header
        self.add_to_anchor(self.exchange.withdraw(update.withdrawal))
        self.exchange.on_withdrawn(update.withdrawal)
        return None

    def step(self) -> None:
        """Do what the training loop does between two steps."""
        for received in self.exchange.poll_updates():
            self.add_to_anchor(received)
        self.exchange.serve_snapshots(self.anchor)

    def add_to_anchor(self, received: ReceivedUpdate) -> None:
        """Add what the exchange delivers to the anchor."""
        for index in range(len(self.anchor.fragments)):
            units = received.decode(index)
            if units is not None:
                self.anchor.add_units(index, units)
        self.anchor.record(received.header)

    def apply_verdict(self, verdict: SignedVerdict) -> None:
        """Apply a verdict, as if it came from this machine's folder, and send it to the peers."""
        self.exchange.thread.run(self.exchange.server.verdicts.on_proof(verdict), None)

    @property
    def expected_state(self) -> tuple:
        """The version vector and the retracted updates that its anchor should have."""
        vector = self.ledger.vector()
        return vector, self.ledger.verdicts.retracted_within(vector)

    def stop(self) -> None:
        """Stop the exchange and close the ledger."""
        self.exchange.stop()
        self.ledger.close()


class World:
    """A run with an owner and a mirror, and machines on a network in memory."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.network = MemoryNetwork()
        self.mirror = Identity(b"m" * 32)
        self.owner = Identity(b"o" * 32)
        self.spec = RunSpec(model=TINY, seed=3, owner=self.owner.key, roots=(self.mirror.key,))
        self.machines: list[Machine] = []
        self.standings: dict[int, enums.Standing] = {}  # by volunteer; others are strangers

    def transport(self, identity: Identity):
        """Return a transport for a machine; tests replace this method."""
        return self.network.transport(identity.key)

    def ticket(
        self,
        key: str,
        volunteer: int = 0,
        expires: float | None = None,
        run: str = RUN,
        by=None,
        rate: int = 1 << 40,
    ):
        """Sign a ticket that was issued a minute ago, by the mirror or another identity.

        Args:
            key: Whom it permits to take part.
            volunteer: The number of the key's owner.
            expires: When it ends; in a day by default.
            run: The run's id.
            by: Who signs it.
            rate: Tokens per second that updates under it may state.
        """
        by = by or self.mirror
        issued = time.time() - 60.0
        ticket = messages.Ticket(
            run=run,
            peer=key,
            machine=RUN,
            volunteer=f"{volunteer:064x}",
            roles=[enums.Role.WORKER],
            standing=self.standings.get(volunteer, enums.Standing.STRANGER),
            max_tokens_per_second=rate,
            issued=issued,
            expires=issued + 86400 if expires is None else expires,
            mirror=by.key,
        )
        return by.sign("ticket", ticket)

    def sign_verdict(
        self, after=None, updates=None, by: tuple[Identity, ...] = (), run: str = RUN, **fields
    ) -> SignedVerdict:
        """Sign a verdict, by the owner unless other identities are given."""
        verdict = Verdict(
            run=run,
            after=after or {},
            updates=updates or {},
            reason="a test",
            **{"issued": 1.0, **fields},
        )
        copies = [identity.sign("verdict", verdict) for identity in by or (self.owner,)]
        return SignedVerdict(
            body=copies[0].body, signatures={signed.key: signed.signature for signed in copies}
        )

    def sum_digest(self, machine: Machine, after=None, updates=None) -> str:
        """Return the digest of the initial weights plus all updates that are not retracted.

        Args:
            machine: The machine whose files the updates are read from.
            after: The last update of an author that counts, as in a verdict.
            updates: Single updates of an author that do not count, as in a verdict.
        """
        after, updates = after or {}, updates or {}
        anchor = MemoryAnchor.from_seed(TINY, self.spec.seed)
        ledger = machine.ledger
        for author in ledger.vector():
            for _, update in ledger.headers(author, 1, 1 << 40):
                if update.seq > after.get(author, update.seq) or update.seq in updates.get(
                    author, ()
                ):
                    continue
                for index, part in enumerate(update.fragments):
                    size = anchor.fragments[index].numel()
                    anchor.add_units(index, decode(ledger.blobs.read(part.digest), size))
        return anchor.digest()

    def machine(self, number: int, name: str | None = None) -> Machine:
        """Create a machine, which is stopped at the end of the test."""
        self.machines.append(Machine(self, number, name))
        return self.machines[-1]

    def start_linked(self, *numbers: int) -> list[Machine]:
        """Start machines and introduce each to those before it."""
        machines: list[Machine] = []
        for number in numbers:
            machines.append(self.machine(number).start().add_peers(*machines))
        return machines

    def start_agreed(self, *numbers: int) -> list[Machine]:
        """Start linked machines that all have the one update that the first published."""
        machines = self.start_linked(*numbers)
        machines[0].publish_round(1)
        self.wait_for_agreement(*machines)
        return machines

    def start_machine_with_clock(self, number: int) -> tuple[Machine, list[float]]:
        """Start a machine; return it and its clock, a list whose one value a test changes."""
        now = [time.time()]
        machine = self.machine(number)
        machine.exchange.stop()
        machine.open(clock=lambda: now[0])
        return machine.start(), now

    def wait_for_agreement(self, *machines: Machine, seconds: float = 20.0) -> str:
        """Step machines until their anchors are the same; return the anchors' digest."""

        def have_same_state() -> bool:
            for machine in machines:
                machine.step()
            # The states are read once: a verdict may arrive meanwhile.
            states = [
                (machine.expected_state, machine.ledger.verdicts.digest) for machine in machines
            ]
            for machine, (expected, _) in zip(machines, states, strict=True):
                if (machine.anchor.vector, machine.anchor.retracted) != expected:
                    return False
            return len({str(state) for state in states}) == 1

        wait_until(have_same_state, seconds)
        digests = {machine.anchor.digest() for machine in machines}
        assert len(digests) == 1
        return digests.pop()


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let machines wait for each other as briefly as a network without distances allows.

    A module whose tests count bytes or use slow lines replaces this fixture by an empty one.
    """
    for module, name, value in SHORT_WAITS:
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def world(tmp_path: Path, short_waits: None) -> Iterator[World]:
    """Provide a run with machines, which are stopped at the end."""
    created = World(tmp_path)
    yield created
    for machine in created.machines:
        machine.stop()


@pytest.fixture
def new_engine(tmp_path):
    """Provide a factory of engines with directories of their own, closed at the end."""
    engines: list[Engine] = []

    def create(kind: str = "resident", plan: dict | None = None, **recipe) -> Engine:
        folder = tmp_path / str(len(engines))
        engine = engine_of(tiny_plan(kind, **(plan or {})), folder, replace(RECIPE, **recipe))
        engines.append(engine)
        return engine

    yield create
    for engine in engines:
        engine.close()
