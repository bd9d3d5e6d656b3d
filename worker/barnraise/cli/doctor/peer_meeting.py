"""Meet other machines of a run as a worker does, and learn how they see this one."""

import contextlib
import logging
import secrets
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from barnraise.cli.doctor.reach_verdict import NetworkFacts
from barnraise.coordinator_client.failover import FailoverClient
from barnraise.errors import StateError
from barnraise.exchange.exchange import Exchange, ExchangeConfig
from barnraise.ledger.ledger import Ledger
from barnraise.peering.addresses.nat_type import ReachFacts
from barnraise.peering.links.bandwidth_meter import LineRates
from barnraise.peering.transports.iroh_transport import IrohTransport
from barnraise.protocol.coordinator_messages import JoinReply
from barnraise.protocol.enums import JoinPurpose
from barnraise.protocol.polling import LOOP_POLL_SECONDS
from barnraise.spec import RunSpec
from barnraise.state_dir import StateDir
from barnraise.training.local_status import read_status

log = logging.getLogger("barnraise")

PEER_SECONDS = 20.0  # in which peers answer
TEST_SECONDS = 10.0  # in which a test of reachability that has begun ends
ENOUGH_PEERS = 2  # whose views together show which kind of NAT there is


def meet_peers(
    state_dir: StateDir, run: str, network: NetworkFacts, seconds: float = PEER_SECONDS
) -> NetworkFacts:
    """Connect to peers of a run for so many seconds at most; return the facts with what they see.

    Nothing is trained or published. The folder of the run is locked meanwhile, so that no worker on
    this machine takes the connections. Where one trains already, what it knows is used.

    Raises:
        BarnraiseError: the run cannot be joined.
    """
    coordinator = FailoverClient.from_state_dir(state_dir)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(coordinator.close)
        view = coordinator.fetch_run(run)
        try:
            folder = state_dir.open_run(view.id)
        except StateError as error:  # a worker trains there, and knows
            log.debug("%s", error)
            return read_worker_reach(state_dir, view.id, network)
        cleanup.callback(folder.close)
        reply = coordinator.join_run(view.id, [], purpose=JoinPurpose.FETCH)
        peers = [peer for peer in reply.peers if peer.addresses]
        if reply.ticket is None or not peers:
            return network
        temporary = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        ledger = Ledger(Path(cleanup.enter_context(temporary)))
        cleanup.callback(ledger.close)
        exchange = _open_exchange(state_dir, reply, coordinator, ledger, network.port)
        cleanup.callback(exchange.stop)
        try:
            exchange.open()
        except OSError as error:
            raise StateError(f"no connection to peers can be opened: {error}") from None
        exchange.set_source_ip(reply.source_ip or "")
        exchange.add_peers(peers)
        wanted = min(ENOUGH_PEERS, len(peers))
        deadline = time.monotonic() + seconds
        connected = 0
        # A peer states how it sees this machine in its greeting.
        while time.monotonic() < deadline and connected < wanted:
            time.sleep(LOOP_POLL_SECONDS)
            connected = max(connected, exchange.stats.peers)
        if connected and not exchange.test_reachability():
            # The exchange tests itself, too; a peer serves only a few tests.
            wait_for_dial_back(exchange, TEST_SECONDS)
        return replace(
            network,
            peers_tried=len(peers),
            peers_connected=connected,
            line=exchange.measure_line() if connected else LineRates(),
            reach=exchange.reach_facts,
        )


def wait_for_dial_back(exchange: Exchange, seconds: float) -> None:
    """Wait until a peer has tried to reach this machine, or so many seconds at most."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not exchange.reach_facts.dial_backs:
        time.sleep(LOOP_POLL_SECONDS)


def _open_exchange(
    state_dir: StateDir, reply: JoinReply, coordinator: FailoverClient, ledger: Ledger, port: int
) -> Exchange:
    """Return an exchange with the run's peers that has nothing to send and receives no updates."""
    assert reply.ticket is not None
    spec = RunSpec.from_json(reply.run.spec)
    limits = state_dir.limits
    config = ExchangeConfig(
        spec=spec,
        run=reply.run.id,
        identity=state_dir.identity,
        incarnation=secrets.token_hex(8),
        ticket=reply.ticket,
        mirrors=frozenset(spec.roots) | coordinator.keys,
        clock=coordinator.now,
        announced=limits.announce,
        port_mapping=limits.port_mapping,
    )
    transport = IrohTransport(state_dir.identity.secret, port=port)
    return Exchange(config, ledger, transport)


def read_worker_reach(state_dir: StateDir, run: str, network: NetworkFacts) -> NetworkFacts:
    """Return the facts with what a worker that trains in the run on this machine knows."""
    status = read_status(state_dir.path / "runs" / run)
    if status is None or not status.reach_facts:
        return network  # no worker, or one that has just started
    try:
        facts = TypeAdapter(ReachFacts).validate_python(status.reach_facts)
    except ValidationError:
        return network  # an older worker
    return replace(network, peers_tried=status.peers, peers_connected=status.peers, reach=facts)
