"""Have peers dial this machine to learn whether strangers reach it: see `membership.dial_back`."""

import asyncio
import itertools
import logging
from dataclasses import dataclass

from barnraise.errors import MessageError
from barnraise.peering.addresses.addresses import host_of, join_address, parse_address
from barnraise.peering.addresses.nat_type import DialBack
from barnraise.peering.addresses.reachability import Reachability
from barnraise.peering.links.connection import Connection
from barnraise.peering.links.link_context import LinkContext
from barnraise.peering.links.received import MessageHandlers, Received
from barnraise.peering.membership.dial_back import (
    DialBackLimits,
    Helper,
    choose_asked,
    choose_helper,
)
from barnraise.peering.transports.transport import Transport
from barnraise.protocol.ip_addresses import is_inner_host, is_public_host
from barnraise.protocol.messages import (
    DialBackErrand,
    DialBackRequest,
    DialBackResult,
    Peer,
)

log = logging.getLogger("barnraise.exchange")

MAX_ASKED = 3  # peers that are asked in one test
ANSWER_SECONDS = 9.0  # until a peer that was asked must have answered
MAX_ERRANDS = 64  # that other peers are doing for machines that asked this one
MAX_MET = 64  # keys in a request
TEST_POLL_SECONDS = 2.0  # between two looks whether a test is due
TEST_SECONDS = 1800.0  # between two tests
TEST_RETRY_SECONDS = 300.0  # after a test that nobody answered


@dataclass(frozen=True)
class _Errand:
    """What another peer does for a machine that asked this one.

    Attributes:
        asked_by: The machine's key.
        done_by: The other peer's key.
        addresses: Where the machine is dialled.
    """

    asked_by: str
    done_by: str
    addresses: tuple[str, ...]


class DialBackHandler:
    """Send, serve and pass on dial-back requests."""

    def __init__(
        self, context: LinkContext, transport: Transport, reachability: Reachability
    ) -> None:
        """Test one machine's reachability, and that of its peers."""
        self._context = context
        self._transport = transport
        self._reachability = reachability
        self._limits = DialBackLimits()
        self._numbers = itertools.count(1)
        self._errands: dict[int, _Errand] = {}
        self._answers: dict[str, asyncio.Future[DialBackResult]] = {}  # by the key that was asked
        self.served = 0  # dials that this machine made for others

    # ---- this machine asks

    async def run(self) -> None:
        """Test now and then whether the internet reaches this machine, until cancelled."""
        clock = asyncio.get_running_loop().time
        next_test = 0.0
        tested_hosts: set[str] = set()
        while True:
            await asyncio.sleep(TEST_POLL_SECONDS)
            hosts = self._list_public_hosts()
            if not hosts or (clock() < next_test and hosts <= tested_hosts):
                continue
            if tested_hosts and not hosts & tested_hosts:
                self._reachability.forget_dial_backs()
            tested_hosts = hosts
            answers = await self.test()
            next_test = clock() + (TEST_SECONDS if answers else TEST_RETRY_SECONDS)

    def _list_public_hosts(self) -> set[str]:
        """Return the public hosts at which linked peers see this machine."""
        connections = self._context.connections.values()
        hosts = {host_of(_find_seen_at(connection)) for connection in connections}
        return {host for host in hosts if is_public_host(host)}

    async def test(self) -> int:
        """Have a few linked peers dial this machine; return how many tried."""
        connections = dict(self._context.connections)
        helpers = [_describe(connection) for connection in connections.values()]
        asked = choose_asked(helpers, self._context.membership.volunteer, MAX_ASKED)
        tried = await asyncio.gather(*(self._ask(connections[key]) for key in asked))
        return sum(tried)

    async def _ask(self, connection: Connection) -> bool:
        """Ask a peer, and record the outcome; return whether this machine was dialled."""
        seen_at = parse_address(connection.hello.observed or "")
        ports = self._reachability.list_ports(seen_at or "")
        if not ports or connection.key in self._answers:
            return False
        met = [*self._context.connections, *self._context.membership.list_met()]
        answer = asyncio.get_running_loop().create_future()
        self._answers[connection.key] = answer
        probes_before = self._transport.probes_received
        connection.send_message(DialBackRequest(ports=ports, met=[*dict.fromkeys(met)][:MAX_MET]))
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                result = await answer
        except TimeoutError:
            return False
        finally:
            self._answers.pop(connection.key, None)
        if result.outcome == "refused":
            return False
        is_reached = result.outcome == "reached"
        if is_reached and self._transport.probes_received == probes_before:
            log.debug("%s claims to have reached this machine", connection.key[:8])
            return False
        host = host_of(_find_seen_at(connection))
        outcome = DialBack(connection.key, host, is_reached, result.by_another)
        self._reachability.on_dial_back(outcome, asyncio.get_running_loop().time())
        return True

    # ---- peers ask

    def message_handlers(self) -> MessageHandlers:
        """Return what receives each type of message."""
        return {
            DialBackRequest: self.on_request,
            DialBackErrand: self.on_errand,
            DialBackResult: self.on_result,
        }

    def on_request(self, received: Received[DialBackRequest]) -> None:
        """Have a peer dialled at the host from which this machine sees it."""
        connection, request, now = received.connection, received.message, received.at
        machine = _describe(connection)
        if not machine.address or not self._limits.may_serve(machine.key, machine.address, now):
            connection.send_message(DialBackResult(outcome="refused"))
            return
        addresses = tuple(join_address(host_of(machine.address), port) for port in request.ports)
        helpers = [_describe(other) for other in self._context.connections.values()]
        own_hosts = {host_of(_find_seen_at(connection))}
        helper = choose_helper(helpers, machine, request.met, own_hosts)
        if helper is None or len(self._errands) >= MAX_ERRANDS:
            self._context.spawn(self._dial_for(connection, machine.key, addresses, 0))
            return
        number = next(self._numbers)
        self._errands[number] = _Errand(machine.key, helper, addresses)
        asyncio.get_running_loop().call_later(ANSWER_SECONDS, self._errands.pop, number, None)
        self._context.connections[helper].send_message(
            DialBackErrand(number=number, peer=machine.key, addresses=list(addresses))
        )

    def on_errand(self, received: Received[DialBackErrand]) -> None:
        """Dial a machine for a peer that it has asked.

        Raises:
            MessageError: When the errand names several hosts.
        """
        connection, errand, now = received.connection, received.message, received.at
        if len({host_of(address) for address in errand.addresses}) > 1:
            raise MessageError("a dial-back errand names several hosts")
        address = errand.addresses[0]
        # Nobody on the internet may have this machine probe its own home network.
        is_allowed = (
            errand.peer != self._transport.key
            and (_is_near(connection) or is_public_host(host_of(address)))
            and self._limits.may_do_errand(connection.ticket.volunteer, address, now)
        )
        if not is_allowed:
            connection.send_message(DialBackResult(number=errand.number, outcome="refused"))
            return
        work = self._dial_for(connection, errand.peer, tuple(errand.addresses), errand.number)
        self._context.spawn(work)

    async def _dial_for(
        self, connection: Connection, key: str, addresses: tuple[str, ...], number: int
    ) -> None:
        """Dial a machine as a stranger, and send the outcome over a connection."""
        now = asyncio.get_running_loop().time()
        chosen = self._context.membership.choose_probe(addresses, now)
        if not chosen:
            connection.send_message(DialBackResult(number=number, outcome="refused"))
            return
        self.served += 1
        is_reached = await self._transport.probe(Peer(key=key, addresses=list(chosen)))
        outcome = "reached" if is_reached else "not_reached"
        connection.send_message(DialBackResult(number=number, outcome=outcome))

    def on_result(self, received: Received[DialBackResult]) -> None:
        """Receive the outcome of an own request, or pass on that of an errand."""
        connection, result = received.connection, received.message
        if not result.number:
            answer = self._answers.get(connection.key)
            if answer is not None and not answer.done():
                answer.set_result(result)
            return
        errand = self._errands.get(result.number)
        if errand is None or errand.done_by != connection.key:
            return
        del self._errands[result.number]
        asked_by = self._context.connections.get(errand.asked_by)
        if asked_by is None:
            return
        if result.outcome == "refused":
            self._context.spawn(self._dial_for(asked_by, errand.asked_by, errand.addresses, 0))
        else:
            passed = DialBackResult(outcome=result.outcome, by_another=True)
            asked_by.send_message(passed)


def _describe(connection: Connection) -> Helper:
    address = "" if connection.channel.is_relayed else connection.channel.remote_address
    return Helper(connection.key, connection.ticket.volunteer, address)


def _find_seen_at(connection: Connection) -> str:
    """Return the host:port at which a peer says that it sees this machine.

    On one machine or cable it states none: then both are in the scope of its own address.
    """
    return parse_address(connection.hello.observed or "") or connection.channel.remote_address


def _is_near(connection: Connection) -> bool:
    """Return whether a peer is in the same home: seen directly, at a private address.

    A peer that is reached through a relay has no address here, wherever it is.
    """
    return is_inner_host(host_of(_describe(connection).address))
