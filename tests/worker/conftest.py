"""Machines with keys and tickets on a network in memory; and engines, each with a folder of its own."""

import dataclasses
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.plans import RECIPE, engine_of, tiny_plan
from helpers.wait_for import waits_for

from barnraise.exchange.compression.codec import decode, encode
from barnraise.exchange.exchange import Exchange, ExchangeConfig
from barnraise.exchange.ledger.anchor import Anchor
from barnraise.exchange.ledger.ledger import Ledger
from barnraise.exchange.network.memory_transport import MemoryNetwork
from barnraise.protocol import enums, messages
from barnraise.protocol.signing import Identity
from barnraise.protocol.verdicts import SignedVerdict, Verdict
from barnraise.spec import ModelSpec, RunSpec
from barnraise.swap.engine import Engine

RUN = "01890000-0000-7000-8000-000000000001"
TINY = ModelSpec(layers=1, width=16, heads=1, context=8, vocabulary=256)


class Machine:
    """A worker without training: its updates are noise, everything else is real."""

    def __init__(self, world: "World", number: int, name: str | None = None):
        self.world, self.number = world, number
        self.identity = Identity(bytes([number]) * 32)
        self.folder = world.folder / (name or f"machine{number}")
        self.incarnation = f"{number:016x}"
        self.ticket = world.ticket(self.identity.key, volunteer=number)
        self.open()

    def open(self, **changed) -> None:
        """As a freshly started process would: everything from the folder."""
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
            replace(config, **changed), self.ledger, self.world.transport(self.identity)
        )
        self.anchor = Anchor.from_seed(self.world.spec.model, self.world.spec.seed)

    def start(self) -> "Machine":
        self.exchange.start(self.anchor.vector, self.anchor.retracted)
        self.step()  # what the ledger holds past the anchor comes first, own updates among it
        return self

    def knows(self, *others: "Machine") -> "Machine":
        self.exchange.add_peers(
            [messages.Peer(key=o.identity.key, addresses=o.exchange.addresses()) for o in others]
        )
        return self

    def round(
        self, seed: int, tokens: int = 100, due: Collection[int] | None = None
    ) -> messages.Update:
        """Publishes an update of noise, as the loop would: own anchor first, in integers. `due`: of these fragments."""
        noise = torch.Generator().manual_seed(seed)

        def payloads():
            for index, fragment in enumerate(self.anchor.fragments):
                if due is not None and index not in due:
                    yield None
                    continue
                values = torch.randint(
                    -(1 << 20), 1 << 20, fragment.shape, dtype=torch.int32, generator=noise
                )
                payload, sent = encode(values)
                self.anchor.add_units(index, sent)
                yield payload, sent

        header = self.exchange.publish(payloads(), tokens)
        self.anchor.record(header)
        return header

    def step(self) -> None:
        """What the loop does between two steps."""
        for arrival in self.exchange.poll_updates():
            for index in range(len(self.anchor.fragments)):
                if (units := arrival.decode(index)) is not None:
                    self.anchor.add_units(index, units)
            self.anchor.record(arrival.header)
        self.exchange.serve_snapshots(self.anchor)

    @property
    def standing(self) -> tuple:
        """Where its anchor should be."""
        vector = self.ledger.vector()
        return vector, self.ledger.verdicts.retracted_within(vector)

    def stop(self) -> None:
        self.exchange.stop()
        self.ledger.close()


class World:
    def __init__(self, folder: Path):
        self.folder, self.network = folder, MemoryNetwork()
        self.mirror, self.owner = Identity(b"m" * 32), Identity(b"o" * 32)
        self.spec = RunSpec(model=TINY, seed=3, owner=self.owner.key, roots=(self.mirror.key,))
        self.machines: list[Machine] = []

    def transport(self, identity: Identity):
        return self.network.transport(identity.key)

    def ticket(
        self, key: str, volunteer: int = 0, expires: float | None = None, run: str = RUN, by=None
    ):
        by, now = by or self.mirror, time.time()
        ticket = messages.Ticket(
            run=run, peer=key, machine=RUN, volunteer=f"{volunteer:064x}", roles=[enums.Role.WORKER], issued=now,
            expires=now + 86400 if expires is None else expires, mirror=by.key,
        )  # fmt: skip
        return by.sign("ticket", ticket)

    def ruling(
        self, after=None, updates=None, by: tuple[Identity, ...] = (), run: str = RUN
    ) -> SignedVerdict:
        """A verdict, by the owner if nobody else is named."""
        verdict = Verdict(
            run=run, after=after or {}, updates=updates or {}, reason="a test", issued=1.0
        )
        signed = [one.sign("verdict", verdict) for one in by or (self.owner,)]
        return SignedVerdict(
            body=signed[0].body, signatures={each.key: each.signature for each in signed}
        )

    def sum(self, machine: Machine, keep: Callable[[str, int], bool]) -> str:
        """The digest of the initial weights and those updates in a machine's files that `keep` takes."""
        anchor, ledger = Anchor.from_seed(TINY, self.spec.seed), machine.ledger
        for author in ledger.vector():
            for _, update in ledger.headers(author, 1, 1 << 40):
                for index, part in enumerate(update.fragments if keep(author, update.seq) else ()):
                    anchor.add_units(
                        index,
                        decode(ledger.blobs.read(part.digest), anchor.fragments[index].numel()),
                    )
        return anchor.digest()

    def machine(self, number: int, name: str | None = None) -> Machine:
        self.machines.append(Machine(self, number, name))
        return self.machines[-1]

    def agree(self, *machines: Machine, seconds: float = 20.0) -> str:
        """Steps these machines until their anchors are the same; the digest."""

        def same() -> bool:
            for machine in machines:
                machine.step()
            stands = [
                (m.standing, m.ledger.verdicts.digest) for m in machines
            ]  # once: a verdict may come in between
            for machine, (where, _) in zip(machines, stands, strict=True):
                if (machine.anchor.vector, machine.anchor.retracted) != where:
                    return False
            return len({str(each) for each in stands}) == 1

        waits_for(same, seconds)
        digests = {machine.anchor.digest() for machine in machines}
        assert len(digests) == 1
        return digests.pop()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    for machine in made.machines:
        machine.stop()


@pytest.fixture
def new_engine(tmp_path):
    """Engines with folders of their own, closed at the end."""
    made: list[Engine] = []

    def new(kind: str = "resident", plan: dict | None = None, **recipe) -> Engine:
        folder = tmp_path / str(len(made))
        made.append(
            engine_of(
                tiny_plan(kind, **(plan or {})), folder, dataclasses.replace(RECIPE, **recipe)
            )
        )
        return made[-1]

    yield new
    for engine in made:
        engine.close()
