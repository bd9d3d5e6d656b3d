"""One machine of the relay measurement: a real exchange over iroh, without arithmetic.

Usage: relay_peer.py SETUP, a JSON file (`PeerSetup`). It waits instead of training, ends its
rounds as the worker does, and publishes noise. Orders are files in its folder: `uplink` (bytes per
second), `stop` (publish no more). Each event is a line of JSON in `events`; `status` is what it
has.
"""

import dataclasses
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))

import torch
from joined_run import MIRROR, RUN, issue_ticket
from memory_anchor import MemoryAnchor

from barnraise.durable_io import write_atomically
from barnraise.exchange.exchange import Exchange, ExchangeConfig
from barnraise.ledger.codec import encode
from barnraise.ledger.ledger import Ledger
from barnraise.peering.transports.iroh_transport import IrohTransport
from barnraise.planning.quantization_scheme import QuantizationScheme
from barnraise.protocol.messages import Peer, Update
from barnraise.protocol.signing import Identity
from barnraise.spec import ModelSpec, Recipe, RunSpec

MODEL = ModelSpec(layers=3, width=128, heads=4, context=128, vocabulary=256)
RECIPE = Recipe(
    token_budget=1 << 40, step_sequences=16, codec="auto", strategy="windows", schedule="constant"
)
SPEC = RunSpec(MODEL, recipe=RECIPE, seed=7, owner=MIRROR.key, roots=(MIRROR.key,))
STATUS_SECONDS = 4.0


@dataclass(frozen=True)
class PeerSetup:
    """What a machine is started with.

    Attributes:
        folder: of its files.
        rank: its number, which is its key.
        hosts: the address of each machine, by rank.
        port: at which all of them listen.
        uplink: bytes per second that its volunteer gives.
        step_seconds: of a training step.
    """

    folder: str
    rank: int
    hosts: list[str]
    port: int
    uplink: float
    step_seconds: float


def identity_of(rank: int) -> Identity:
    """Return the identity of a machine."""
    return Identity(bytes([65 + rank]) * 32)


class RelayPeer:
    """A machine that publishes noise in the rounds that its line allows."""

    def __init__(self, setup: PeerSetup) -> None:
        """Start the exchange."""
        self._folder = Path(setup.folder)
        self._events = (self._folder / "events").open("a", buffering=1)
        identity = identity_of(setup.rank)
        config = ExchangeConfig(
            spec=SPEC,
            run=RUN,
            identity=identity,
            incarnation=f"{1:016x}",
            ticket=issue_ticket(identity.key, f"volunteer {setup.rank}"),
            mirrors=frozenset([MIRROR.key]),
        )
        transport = IrohTransport(identity.secret, setup.hosts[setup.rank], setup.port)
        self._exchange = Exchange(config, Ledger(self._folder / "ledger"), transport)
        self._exchange.set_uplink_limit(setup.uplink)
        self._anchor = MemoryAnchor.from_seed(MODEL, SPEC.seed)
        self._exchange.start(self._anchor.vector)
        self._exchange.add_peers(
            [
                Peer(key=identity_of(rank).key, addresses=[f"{host}:{setup.port}"])
                for rank, host in enumerate(setup.hosts)
                if rank != setup.rank
            ]
        )
        self._step_seconds = setup.step_seconds
        self._noise = torch.Generator().manual_seed(setup.rank)
        self._status_at = 0.0

    def run(self) -> None:
        """Publish rounds until the order to stop, then exchange what is left until killed."""
        exchange = self._exchange
        rate = SPEC.step_tokens / self._step_seconds
        exchange.announce_rate(rate)
        schedule, steps = exchange.plan_round(rate), 0
        while True:
            time.sleep(self._step_seconds)
            self._obey_orders()
            self._receive()
            if (self._folder / "stop").exists():
                exchange.announce_completion()
            else:
                steps += 1
                if exchange.is_round_over(schedule, steps, time.time()):
                    self._publish(steps, schedule.scheme)
                    schedule, steps = exchange.plan_round(rate), 0
            if time.monotonic() >= self._status_at:
                self._status_at = time.monotonic() + STATUS_SECONDS
                self._write_status(schedule.period, str(schedule.scheme))

    def _obey_orders(self) -> None:
        order = self._folder / "uplink"
        if order.exists():
            self._exchange.set_uplink_limit(float(order.read_text()))
            order.unlink()

    def _receive(self) -> None:
        for received in self._exchange.poll_updates():
            for index in range(len(self._anchor.fragments)):
                units = received.decode(index)
                if units is not None:
                    self._anchor.add_units(index, units)
            self._anchor.record(received.header)
            if isinstance(received.header, Update):
                self._log("arrived", received.header)

    def _publish(self, steps: int, scheme: QuantizationScheme) -> None:
        """Publish an update that agrees with the others', as those of honest machines do."""
        size = steps << 5
        common = torch.Generator().manual_seed(SPEC.seed)
        with self._exchange.new_update(steps * SPEC.step_tokens) as update:
            for index, fragment in enumerate(self._anchor.fragments):
                values = torch.zeros(fragment.shape, dtype=torch.int32)
                for noise in (common, self._noise):
                    values += torch.randint(
                        -size, size, fragment.shape, dtype=torch.int32, generator=noise
                    )
                payload, units = encode(values, scheme)
                self._anchor.add_units(index, units)
                update.add(index, payload, units)
        self._anchor.record(update.header)
        self._log("published", update.header)

    def _log(self, event: str, update: Update) -> None:
        line = {"event": event, "at": time.time(), "author": update.peer, "seq": update.seq}
        self._events.write(json.dumps(line) + "\n")

    def _write_status(self, period: float, scheme: str) -> None:
        use = self._exchange.server.uplink_use()
        gossip = self._exchange.server.gossip
        status: dict[str, Any] = dataclasses.asdict(use) | {
            "owes_update": self._exchange.server.owes_update,
            "has_carrier": gossip.has_carrier,
            "links": len(gossip.links),
            "period": period,
            "scheme": scheme,
            "vector": self._anchor.vector,
            "anchor": self._anchor.digest(),
        }
        write_atomically(self._folder / "status", json.dumps(status).encode())


if __name__ == "__main__":
    torch.set_num_threads(1)
    RelayPeer(PeerSetup(**json.loads(Path(sys.argv[1]).read_text()))).run()
