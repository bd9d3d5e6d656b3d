"""The connections of this machine: accept, dial, greet, receive, and dispatch what arrives.

Everything here runs on one asyncio event loop, in a thread that `ServerThread` starts; other
threads call only the methods that say so. Each handler registers the types of messages that it
receives. A message that should not have been sent ends its connection, with the reason in the log
on both sides, and changes nothing.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from barnraise.errors import FloodError, MessageError
from barnraise.peering.addresses.addresses import network_of
from barnraise.peering.addresses.port_mapping import PortMapper
from barnraise.peering.addresses.reachability import Reachability
from barnraise.peering.limits.rate_limit import FairShare, TokenBucket
from barnraise.peering.limits.repeated_warnings import RepeatedWarnings
from barnraise.peering.limits.service_limits import Rate
from barnraise.peering.links.address_watch import AddressWatch
from barnraise.peering.links.announced_names import AnnouncedNames
from barnraise.peering.links.bandwidth_probe import LineTest, line_test_messages
from barnraise.peering.links.connection import Connection, MessageSources, OutgoingMessages
from barnraise.peering.links.copied_keys import CopiedKeys
from barnraise.peering.links.dial_back_handler import DialBackHandler
from barnraise.peering.links.dialler import Dialler
from barnraise.peering.links.handshake import Handshake, OwnIntroduction
from barnraise.peering.links.hole_punch_handler import DialNowHandler, StatementSigner
from barnraise.peering.links.link_context import LinkContext
from barnraise.peering.links.mirror_list_sync import MirrorListSync
from barnraise.peering.links.pending_handshakes import IncomingGreetings
from barnraise.peering.links.received import MessageHandler, MessageHandlers, Received
from barnraise.peering.membership.link_actions import (
    CloseLink,
    Dial,
    LinkAction,
    RequestDial,
    SendGoodbye,
    SendPeers,
)
from barnraise.peering.membership.membership import Meeting, PartialView, PeerLink, PeerSource
from barnraise.peering.transports.framing import unpack
from barnraise.peering.transports.transport import LEAVING, Channel, ChannelClosedError, Transport
from barnraise.protocol.messages import (
    DirectiveRelay,
    Goodbye,
    Hello,
    Peer,
    PeerList,
    PeerState,
    Signed,
    Update,
)
from barnraise.protocol.run_mirrors import RunMirrors
from barnraise.protocol.signing import Identity
from barnraise.protocol.types import Message

log = logging.getLogger("barnraise.exchange")

MAX_CONNECTIONS = 128
MAX_MESSAGE_SECONDS = 0.001  # of work for one peer's message, until others have their turn

Task = Callable[[], Coroutine[Any, Any, None]]  # runs until it is cancelled


@dataclass(frozen=True)
class PeeringConfig:
    """What the connections of one machine are configured with.

    Attributes:
        identity: This machine's key.
        mirrors: The run, and the mirrors whose tickets count in it.
        spec_digest: The digest of the run's spec.
        ticket: This machine's ticket.
        clock: Returns seconds since 1970, by the coordinators' clock.
        announced: host:port pairs that its owner announces; a host may be a name.
        port_mapping: Whether the router may be asked to forward the port.
    """

    identity: Identity
    mirrors: RunMirrors
    spec_digest: str
    ticket: Signed
    clock: Callable[[], float]
    announced: tuple[str, ...] = ()
    port_mapping: bool = False


@dataclass(frozen=True)
class PeeringUser:
    """What the connections ask of the exchange that uses them, and report to it.

    Attributes:
        membership: Which peers this machine knows.
        links: The links to the connected peers by key.
        on_connected: Called with the key of a new link's peer, the time in seconds, and how the
            link came about.
        on_message: Called with the key of a peer that has sent a message, and the time.
        on_goodbye: Called with the key of a peer that asks this machine to leave, and the time.
        on_left: Called with the key of a peer whose program has ended.
        on_disconnected: Called with the key of a peer whose connection ended, and the time.
        incarnation: Returns the incarnation under which this machine publishes now.
        has_signed: Returns whether this machine has signed an update.
        is_excluded: Returns whether a verdict excludes a key, or the volunteer in its ticket.
        store_peer: Stores a peer, and the volunteer in its ticket, so that this machine can rejoin
            through it.
        on_mirrors_changed: Called with the mirrors that count by a new mirror list.
        wake: Has gossip decide again.
    """

    membership: PartialView
    links: Mapping[str, PeerLink]
    on_connected: Callable[[str, float, Meeting], None]
    on_message: Callable[[str, float], None]
    on_goodbye: Callable[[str, float], None]
    on_left: Callable[[str], None]
    on_disconnected: Callable[[str, float], None]
    incarnation: Callable[[], str]
    has_signed: Callable[[Update], bool]
    is_excluded: Callable[[str, str], bool]
    store_peer: Callable[[Peer, str], Coroutine[Any, Any, None]]
    on_mirrors_changed: Callable[[RunMirrors], None]
    wake: Callable[[], None]


class PeerServer:
    """Accept and dial connections, and give what arrives to the handler of its type.

    Attributes:
        connections: The connected peers by key.
        uplink: The share of the uplink that payloads wait for.
        transport: Opens and accepts channels.
    """

    def __init__(self, config: PeeringConfig, transport: Transport, user: PeeringUser) -> None:
        """Assemble the handlers of connections; `run` starts them."""
        self.connections: dict[str, Connection] = {}
        self.uplink = FairShare()
        self._downlink = TokenBucket(Rate(math.inf, 0.0))  # of all connections together
        self._closed_bytes_sent = 0  # over connections that have ended
        self._closed_bytes_received = 0
        self.transport = transport
        self._user = user
        self._membership = user.membership
        self.context = LinkContext(
            connections=self.connections,
            membership=self._membership,
            links=user.links,
            spawn=self.spawn,
            disconnect=self.disconnect,
            wake=user.wake,
        )
        self.reachability = Reachability(transport.addresses)
        signer = StatementSigner(config.identity, config.mirrors.run, config.clock)
        self.copied_keys = CopiedKeys(signer, user.has_signed)
        own = OwnIntroduction(
            transport.key,
            config.spec_digest,
            user.incarnation,
            self.addresses,
            self.copied_keys.sign_session,
        )
        self.handshake = Handshake(
            own, config.mirrors, config.ticket, config.clock, user.is_excluded
        )
        self._dialler = Dialler(
            transport,
            self._membership,
            self.reachability,
            self._is_dial_wanted,
            partial(self._serve, dialled=True),
        )
        self.hole_punching = DialNowHandler(self.context, signer, self.reachability, self._dialler)
        self.dial_back = DialBackHandler(self.context, transport, self.reachability)
        self.line_test = LineTest(self.connections)
        self.mirror_lists = MirrorListSync(
            config.mirrors, self.context, config.clock, self._on_mirrors_changed, self._set_relays
        )
        self._address_watch = AddressWatch(
            self.connections, self.addresses, self._introduce, self._on_moved
        )
        self._announced_names = AnnouncedNames(config.announced, self.reachability)
        self._port_mapping = config.port_mapping
        self._greetings = IncomingGreetings()
        self._repeats = RepeatedWarnings()
        self._is_offline = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._message_handlers: dict[type[Message], MessageHandler] = {}
        self.register(
            {
                Hello: self._on_hello,
                PeerList: self._on_peers,
                DirectiveRelay: self._on_directive,
                Goodbye: self._on_goodbye,
            }
        )
        for handler in (
            self.copied_keys,
            self.hole_punching,
            self.dial_back,
            self.line_test,
            self.mirror_lists,
        ):
            self.register(handler.message_handlers())

    def register(self, handlers: MessageHandlers) -> None:
        """Have messages of some types received by these handlers.

        Raises:
            ValueError: When a type has a handler already.
        """
        if twice := handlers.keys() & self._message_handlers.keys():
            names = ", ".join(sorted(kind.__name__ for kind in twice))
            raise ValueError(f"{names}: there is a handler already")
        self._message_handlers |= handlers

    def set_sources(
        self,
        compose_state: Callable[[str], PeerState | None],
        open_update: Callable[[str, str, int, bool, bool], OutgoingMessages],
        open_blob: Callable[[str, str, int], OutgoingMessages],
    ) -> None:
        """Read what connections send from here, see `MessageSources`; called before `run`."""
        self._sources = MessageSources(
            compose_state, open_update, open_blob, line_test_messages, self.uplink
        )

    # ---- life cycle

    async def run(
        self,
        ready: Callable[[], None],
        essential: Sequence[Task],
        optional: Mapping[str, Task],
    ) -> None:
        """Serve until `stop`.

        Args:
            ready: Called once the transport listens.
            essential: Further tasks; when one ends, so does the server.
            optional: Further tasks, by what goes missing when one fails.

        Raises:
            OSError: When the transport cannot listen.
        """
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        mapper: PortMapper | None = None
        try:
            await self.transport.start()
            ready()
            mapper = PortMapper(
                self.transport.mappable_port,
                self._port_mapping,
                self.reachability.observed.site_view,
                self.reachability.set_mapped,
            )
            recheck = partial(self.handshake.recheck_tickets, self.connections, self.disconnect)
            for run in (self._accept_connections, recheck, *essential):
                self.spawn(run()).add_done_callback(lambda task: self.stop())
            for name, run in {
                "a port that the router forwards": mapper.run,
                "looking up the announced names": self._announced_names.resolve_often,
                "tests of whether others reach this machine": self.dial_back.run,
                "noticing that addresses change": self._address_watch.run,
                **optional,
            }.items():
                self.spawn(run_optional(name, run))
            await self._stopping.wait()
        finally:
            for connection in self.connections.values():
                connection.channel.close(LEAVING)
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if mapper is not None:
                await mapper.close()
            await self.transport.close()

    def stop(self) -> None:
        """End `run`."""
        self._stopping.set()

    # ---- calls from the exchange

    def limit_download(self, bytes_per_second: float) -> None:
        """Limit what is read from all peers together. Safe to call from another thread."""
        self._downlink.rate = bytes_per_second

    def set_offline(self, is_offline: bool) -> None:
        """Leave all peers and accept none, or return to them."""
        if is_offline and not self._is_offline:
            for connection in self.connections.values():
                connection.channel.close(LEAVING)
        self._is_offline = is_offline

    def addresses(self) -> list[str]:
        """Return the addresses at which others may reach this machine. Safe from any thread."""
        return self.reachability.list_addresses(self._loop.time())

    @property
    def bytes_sent(self) -> int:
        """Bytes sent over all connections since the start; see `Channel`."""
        open_now = list(self.connections.values())
        return self._closed_bytes_sent + sum(other.channel.bytes_sent for other in open_now)

    @property
    def bytes_received(self) -> int:
        """Bytes received over all connections since the start."""
        open_now = list(self.connections.values())
        return self._closed_bytes_received + sum(other.channel.bytes_received for other in open_now)

    def add_peers(self, peers: Sequence[Peer], source: PeerSource = PeerSource.SITE) -> None:
        """Add peers that this machine may dial."""
        self._membership.add_peers(peers, self._loop.time(), source)
        self._user.wake()

    def set_ticket(self, ticket: Signed) -> None:
        """Use a new ticket, and send it to every peer."""
        self.handshake.set_ticket(ticket)
        for connection in self.connections.values():
            self._introduce(connection)

    def apply_directive(self, directive: Signed) -> None:
        """End the connections whose tickets a mirror's directive revokes; relay it to all peers.

        Raises:
            MessageError: When it is not a directive of a mirror of this run.
        """
        if not self.handshake.revoke(directive):
            return
        for key, connection in list(self.connections.items()):
            if self.handshake.is_revoked(key, connection.hello.ticket.key):
                self.disconnect(key, "its ticket was revoked")
            else:
                connection.send_message(DirectiveRelay(directive=directive))

    def apply_own_directive(self, directive: Signed) -> None:
        """Apply the directive of this machine's own coordinator."""
        try:
            self.apply_directive(directive)
        except MessageError as error:
            log.warning("%s", error)

    def perform(self, action: LinkAction) -> None:
        """Perform what gossip decided about a link."""
        match action:
            case Dial(peer) if not self._is_offline:
                self.spawn(self._dial(peer))
            case RequestDial(via, target):
                self.hole_punching.request(via, target, self._loop.time())
            case CloseLink(key, reason):
                self.disconnect(key, reason)
            case SendGoodbye(key):
                self._send(key, Goodbye(reason="this machine has enough links"))
            case SendPeers(key, peers):
                self._send(key, PeerList(peers=list(peers)))

    def _send(self, key: str, message: Message) -> None:
        if key in self.connections:
            self.connections[key].send_message(message)

    def disconnect(self, key: str, reason: str) -> None:
        """Close the connection to a peer, if there is one."""
        connection = self.connections.get(key)
        if connection is not None:
            log.warning("dropped %s: %s", key[:8], reason)
            connection.channel.close(reason)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task that ends with the server; its error goes to the log."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ChannelClosedError):
            log.error("an error of ours in the exchange", exc_info=error)

    # ---- connections

    async def _accept_connections(self) -> None:
        while True:
            channel = await self.transport.accept()
            if self._is_offline:
                channel.close(LEAVING)
            elif self._greetings.admit(channel, self._loop.time()):
                self.spawn(self._serve(channel, dialled=False))

    async def _dial(self, peer: Peer) -> None:
        await self._dialler.dial(peer)
        self._user.wake()

    def _is_dial_wanted(self, key: str) -> bool:
        known = self._membership.passive.get(key)
        is_excluded = self._user.is_excluded(key, known.volunteer if known else "")
        return key not in self.connections and not is_excluded

    async def _serve(self, channel: Channel, dialled: bool) -> None:
        """Serve one connection from the handshake to its end."""
        try:
            connection = await self.handshake.greet(channel, dialled)
        except (MessageError, ChannelClosedError, TimeoutError) as error:
            timed_out = isinstance(error, TimeoutError)
            reason = "it did not introduce itself" if timed_out else str(error)
            network = network_of(channel.remote_address)
            self._repeats.warn(f"refused {network}", "refused %s: %s", channel.peer[:8], reason)
            channel.close(reason)
            self._on_refused(channel.peer, Meeting("", dialled, channel.remote_address))
            return
        finally:
            self._greetings.remove(channel)
        if self._add_connection(connection):
            await self._receive_messages(connection)
        else:
            self._on_refused(connection.key, connection.meeting)

    def _on_refused(self, key: str, meeting: Meeting) -> None:
        self._membership.on_refused(key, self._loop.time(), meeting)
        self._user.wake()

    def _add_connection(self, connection: Connection) -> bool:
        """Add a connection after the handshake.

        Returns:
            False when it was closed instead: there is a better one to the peer, or no room.
        """
        old = self.connections.get(connection.key)
        if self._is_offline:
            connection.channel.close(LEAVING)
            return False
        if old is not None:
            if self.handshake.is_preferred(old, connection):
                connection.channel.close("there is a connection already")
                return False
            old.channel.close("a newer connection took its place")
        elif len(self.connections) >= MAX_CONNECTIONS:
            connection.channel.close("too many peers")
            return False
        elif not self._membership.has_room_for(
            self._user.links, connection.key, connection.ticket.volunteer
        ):
            connection.channel.close("enough machines of your volunteer are connected")
            return False
        now = self._loop.time()
        self.connections[connection.key] = connection
        self._user.on_connected(connection.key, now, connection.meeting)
        if connection.meeting.address:
            self._store_peer(connection)
            if not connection.dialled:
                self.reachability.on_accepted(connection.meeting.address, now)
        self._record_observation(connection)
        for directive in self.handshake.current_directives():
            connection.send_message(DirectiveRelay(directive=directive))
        log.info("connected to %s", connection.key[:8])
        self._user.wake()
        return True

    def _introduce(self, connection: Connection) -> None:
        """Send a greeting: this machine's ticket or addresses, or what it sees, have changed."""
        connection.send_introduction(self.handshake.build_hello(connection.channel))

    def _on_moved(self, connection: Connection) -> None:
        """Record that a linked peer is at another address now, as QUIC has verified."""
        log.debug("%s is at another address now", connection.key[:8])
        self._membership.on_connected(connection.key, self._loop.time(), connection.meeting)
        self._store_peer(connection)

    def _record_observation(self, connection: Connection) -> None:
        """Record at which address a peer says that it sees this machine."""
        self.reachability.observed.on_report(
            connection.key, connection.ticket.volunteer, connection.hello.observed or ""
        )

    def _store_peer(self, connection: Connection) -> None:
        """Remember where a peer was met, so that this machine can rejoin through it."""
        met = Peer(key=connection.key, addresses=[connection.meeting.address])
        self.spawn(self._user.store_peer(met, connection.meeting.volunteer))

    async def _receive_messages(self, connection: Connection) -> None:
        """Receive messages until the connection ends; a writer task sends meanwhile."""
        key = connection.key
        writer = self.spawn(connection.run_writers(self._sources))
        writer.add_done_callback(partial(_close_when_failed, connection.channel))
        try:
            self.copied_keys.on_hello(connection)
            while True:
                frame = await connection.receive()
                arrived_at = self._loop.time()
                message, payload = unpack(frame)
                self._user.on_message(key, arrived_at)
                receive = self._message_handlers[type(message)]
                work = receive(Received(connection, message, payload, arrived_at))
                if work is not None:
                    await work
                delay = self._downlink.consume(len(frame), self._loop.time())
                if delay or self._loop.time() > arrived_at + MAX_MESSAGE_SECONDS:
                    # Meanwhile nothing more is read from this peer, which then sends no more; or
                    # the other links' messages go first.
                    await asyncio.sleep(delay)
        except ChannelClosedError as error:
            log.info("lost %s: %s", key[:8], error)
            if error.peer_left and self.connections.get(key) is connection:
                self._user.on_left(key)
        except MessageError as error:
            self._repeats.warn(f"dropped {key}", "dropped %s: %s", key[:8], error)
            connection.channel.close(str(error))
            if isinstance(error, FloodError):
                self._greetings.on_flood(key, self._loop.time())
        except Exception:
            log.exception("dropped %s: an error of ours", key[:8])
            connection.channel.close("an error on this side")
        finally:
            writer.cancel()
            self._remove_connection(connection)

    def _remove_connection(self, connection: Connection) -> None:
        """Record a connection's end, unless a newer one to the peer has replaced it."""
        key = connection.key
        self._closed_bytes_sent += connection.channel.bytes_sent
        self._closed_bytes_received += connection.channel.bytes_received
        if self.connections.get(key) is connection:
            del self.connections[key]
            self._user.on_disconnected(key, self._loop.time())
            self.reachability.observed.on_disconnected(key, self._loop.time())
            self._user.wake()

    # ---- messages about the connection itself

    def _on_hello(self, received: Received[Hello]) -> None:
        connection, hello = received.connection, received.message
        ticket = self.handshake.check_hello(connection.key, hello)
        if ticket.volunteer != connection.ticket.volunteer:
            # Limits and votes count by volunteer: one key must not be of several in turn.
            raise MessageError("it belongs to another volunteer than before: it may connect again")
        connection.renew_introduction(hello, ticket)
        self.copied_keys.on_hello(connection)
        self._record_observation(connection)
        self._membership.on_connected(connection.key, received.at, connection.meeting)
        self._user.wake()

    def _on_peers(self, received: Received[PeerList]) -> None:
        peers = received.message.peers
        volunteer = received.connection.ticket.volunteer
        self._membership.add_peers(peers, received.at, PeerSource.GOSSIP, volunteer)
        self._membership.rendezvous.on_peers(received.key, [peer.key for peer in peers])
        self._user.wake()

    def _on_directive(self, received: Received[DirectiveRelay]) -> None:
        self.apply_directive(received.message.directive)
        self._user.wake()

    def _on_goodbye(self, received: Received[Goodbye]) -> None:
        self._user.on_goodbye(received.key, received.at)
        raise ChannelClosedError(received.message.reason)

    def _on_mirrors_changed(self, mirrors: RunMirrors) -> None:
        self.handshake.set_mirrors(mirrors)
        self._user.on_mirrors_changed(mirrors)

    def _set_relays(self, relays: list[str]) -> None:
        self.spawn(self.transport.set_relays(relays))


async def run_optional(name: str, run: Task) -> None:
    """Run a part of a server that works without it; its error ends nothing else."""
    try:
        await run()
    except Exception:
        log.exception("this machine goes on without %s: an error of ours", name)


def _close_when_failed(channel: Channel, writer: asyncio.Task[Any]) -> None:
    """Close a connection whose writer has failed."""
    error = None if writer.cancelled() else writer.exception()
    if error is not None:
        is_closed = isinstance(error, ChannelClosedError)
        channel.close(str(error) if is_closed else "an error on this side")
