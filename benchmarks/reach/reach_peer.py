"""One peer of `bench_reach.py`: a real exchange over iroh, in the namespace where it is started.

Usage: reach_peer.py SETUP, where SETUP is JSON (see `PeerSetup`). It prints a line of JSON about
its links twice a second, obeys lines of JSON on its input, and leaves when the input ends.
"""

import contextlib
import json
import logging
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from barnraise.exchange.exchange import Exchange, ExchangeConfig
from barnraise.ledger.ledger import Ledger
from barnraise.peering.addresses.nat_type import classify_nat, describe_nat
from barnraise.peering.transports.iroh_transport import IrohTransport
from barnraise.protocol.enums import Role
from barnraise.protocol.messages import Peer, Signed, Ticket
from barnraise.protocol.signing import Identity, digest
from barnraise.spec import ModelSpec, Recipe, RunSpec

MIRROR = Identity(b"m" * 32)
RUN = "0192f0c1-2d3e-7f40-8a5b-6c7d8e9f0a1b"
MODEL = ModelSpec(layers=1, width=32, heads=2, context=32, vocabulary=256)
SPEC = RunSpec(MODEL, recipe=Recipe(), seed=7, owner=MIRROR.key, roots=(MIRROR.key,))
PRINT_SECONDS = 0.5


@dataclass(frozen=True)
class PeerSetup:
    """What a peer is started with.

    Attributes:
        number: Names its key; each peer is another volunteer's.
        folder: Of its ledger.
        port: UDP port; 0: any.
        peers: Others, as a coordinator names them: key → addresses.
        announced: What its owner announces.
        source_ip: From where a coordinator receives its requests; "" without a coordinator.
        port_mapping: Whether the router is asked to forward the port.
        relays: URLs of relays.
    """

    number: int
    folder: str
    port: int = 0
    peers: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    announced: list[str] = field(default_factory=list[str])
    source_ip: str = ""
    port_mapping: bool = False
    relays: list[str] = field(default_factory=list[str])

    def to_json(self) -> str:
        """Return the setup as the command's argument."""
        return json.dumps(asdict(self))


def identity_of(number: int) -> Identity:
    """Return the key of a peer."""
    return Identity(bytes([number]) * 32)


def issue_ticket(identity: Identity) -> Signed:
    """Sign a ticket for one day."""
    now = time.time() - 60
    ticket = Ticket(
        run=RUN,
        peer=identity.key,
        machine=f"0192f0c1-2d3e-7f40-8a5b-{identity.key[:12]}",
        volunteer=digest(identity.key),
        roles=[Role.WORKER],
        max_tokens_per_second=1000,
        issued=now,
        expires=now + 86400,
        mirror=MIRROR.key,
    )
    return MIRROR.sign("ticket", ticket)


class ReachPeer:
    """The exchange of one peer, and what it prints."""

    def __init__(self, setup: PeerSetup) -> None:
        """Start the exchange."""
        identity = identity_of(setup.number)
        config = ExchangeConfig(
            spec=SPEC,
            run=RUN,
            identity=identity,
            incarnation=f"{1:016x}",
            ticket=issue_ticket(identity),
            mirrors=frozenset([MIRROR.key]),
            announced=tuple(setup.announced),
            port_mapping=setup.port_mapping,
        )
        transport = IrohTransport(identity.secret, port=setup.port)
        self.exchange = Exchange(config, Ledger(Path(setup.folder)), transport)
        self.exchange.start({})  # of the initial weights
        if setup.source_ip:
            self.exchange.set_source_ip(setup.source_ip)
        self.add_peers(setup.peers)

    def add_peers(self, peers: dict[str, list[str]]) -> None:
        """Add peers as a coordinator names them."""
        named = [Peer(key=key, addresses=addresses) for key, addresses in peers.items()]
        if named:
            self.exchange.add_peers(named)

    def describe(self) -> dict[str, Any]:
        """Return what the benchmark reads."""
        server = self.exchange.server
        facts = self.exchange.reach_facts
        return {
            "at": time.time(),
            "links": {
                connection.key: connection.channel.remote_address
                for connection in list(server.peers.connections.values())
            },
            "addresses": self.exchange.addresses(),
            "facts": asdict(facts),
            "nat": {version: classify_nat(facts, version).value for version in (4, 6)},
            "said": describe_nat(facts),
            "reached": facts.is_reached,
            "mapped": facts.mapped_address,
            "observed": [observation.address for observation in facts.observations],
            "passed": server.peers.hole_punching.passed,
            "obeyed": server.peers.hole_punching.obeyed,
        }


def obey(peer: ReachPeer, ended: threading.Event) -> None:
    """Obey the benchmark until its end of the pipe is closed."""
    for line in sys.stdin:
        with contextlib.suppress(ValueError):
            peer.add_peers(json.loads(line))
    ended.set()


def main() -> None:
    """Run one peer."""
    torch.set_num_threads(1)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    peer = ReachPeer(PeerSetup(**json.loads(sys.argv[1])))
    ended = threading.Event()
    threading.Thread(target=obey, args=(peer, ended), daemon=True).start()
    while not ended.wait(PRINT_SECONDS):
        print(json.dumps(peer.describe()), flush=True)
    peer.exchange.stop()


if __name__ == "__main__":
    main()
