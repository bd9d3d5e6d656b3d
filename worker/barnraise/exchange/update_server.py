"""The network side of the exchange: connections, and the dispatch of messages and gossip actions.

Everything here runs on one asyncio event loop, in a thread that `ServerThread` starts; other
threads call only the methods that say so. A message that should not have been sent ends its
connection, with the reason in the log on both sides, and changes nothing.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from barnraise.errors import FloodError, MessageError
from barnraise.exchange.blobs.blob_fetcher import BlobFetcher
from barnraise.exchange.blobs.blob_scrub import BlobScrub
from barnraise.exchange.blobs.pruner import Pruner
from barnraise.exchange.gossip import gossip as gossip_module
from barnraise.exchange.gossip.gossip import MAX_ANCHOR_DIGESTS, Gossip
from barnraise.exchange.gossip.handler_context import HandlerContext
from barnraise.exchange.snapshots.resync import Resync
from barnraise.exchange.snapshots.snapshot_client import SnapshotClient
from barnraise.exchange.snapshots.snapshot_server import AnchorCopy, PendingRequest, SnapshotServer
from barnraise.exchange.stats import ExchangeStats, NeighbourStats
from barnraise.exchange.updates.author_pace import AuthorPace, PaceLimits
from barnraise.exchange.updates.local_author import LocalAuthor
from barnraise.exchange.updates.update_receiver import PartOutcome, UpdateReceiver
from barnraise.exchange.updates.update_sender import (
    UpdateToSend,
    blob_frames,
    requested_seqs,
    update_frames,
)
from barnraise.exchange.verdicts.verdict_handler import VerdictHandler
from barnraise.ledger.anchor import Retraction
from barnraise.ledger.anchor_scrub import ScrubFindings
from barnraise.ledger.ledger import Ledger
from barnraise.ledger.update_queue import UpdateQueue
from barnraise.ledger.validation import UpdateRules
from barnraise.ledger.verdict_set import VerdictSet
from barnraise.peering.addresses.addresses import network_of
from barnraise.peering.addresses.port_mapping import PortMapper
from barnraise.peering.addresses.reachability import Reachability
from barnraise.peering.limits.rate_limit import FairShare
from barnraise.peering.limits.repeated_warnings import RepeatedWarnings
from barnraise.peering.links.address_watch import AddressWatch
from barnraise.peering.links.announced_names import AnnouncedNames
from barnraise.peering.links.bandwidth_probe import LineTest, line_test_frames
from barnraise.peering.links.connection import Connection, Frames, FrameSources
from barnraise.peering.links.copied_keys import CopiedKeys
from barnraise.peering.links.dial_back_handler import DialBackHandler
from barnraise.peering.links.dialler import Dialler
from barnraise.peering.links.handshake import Handshake, OwnIntroduction
from barnraise.peering.links.hole_punch_handler import DialNowHandler, StatementSigner
from barnraise.peering.links.mirror_list_sync import MirrorListSync
from barnraise.peering.links.pending_handshakes import IncomingGreetings
from barnraise.peering.membership.membership import Meeting, PeerSource
from barnraise.peering.transports.framing import unpack
from barnraise.peering.transports.transport import (
    LEAVING,
    Channel,
    ChannelClosedError,
    Transport,
)
from barnraise.planning.round_schedule import RoundSchedule
from barnraise.protocol import messages
from barnraise.protocol.fork_proof import Fork
from barnraise.protocol.mirror_list import MirrorLists
from barnraise.protocol.run_mirrors import RunMirrors
from barnraise.protocol.signing import Identity, open_signed
from barnraise.protocol.types import Message
from barnraise.protocol.verdicts import SignedVerdict, VerdictNames, VerdictSummary

log = logging.getLogger("barnraise.exchange")

MAX_CONNECTIONS = 128
MAX_MESSAGE_SECONDS = 0.001  # of work for one peer's message, until others have their turn
MIN_PUMP_INTERVAL = 0.02  # seconds between two timed rounds of gossip actions
MIN_WAKE_INTERVAL = 0.005  # seconds between two rounds, however many events a peer causes

MessageHandler = Callable[[Connection, Any, memoryview], Awaitable[None]]


@dataclass(frozen=True)
class ServerConfig:
    """What a peer server is told once.

    Attributes:
        rules: What updates of the run are checked against.
        spec_digest: The digest of the run's spec.
        ticket: This machine's ticket.
        clock: Returns seconds since 1970, by the coordinators' clock.
        pace: What one machine can honestly publish.
        archive_rounds: Rounds for which all payloads are kept, if this machine is an archive.
        identity: This machine's key.
        announced: host:port pairs that its owner announces; a host may be a name.
        port_mapping: Whether the router may be asked to forward the port.
    """

    identity: Identity
    rules: UpdateRules
    spec_digest: str
    ticket: messages.Signed
    clock: Callable[[], float]
    pace: PaceLimits
    archive_rounds: int | None = None
    announced: tuple[str, ...] = ()
    port_mapping: bool = False


class PeerServer:
    """Serve the peers: accept and dial connections, receive their messages, send ours."""

    def __init__(
        self,
        config: ServerConfig,
        ledger: Ledger,
        transport: Transport,
        author: LocalAuthor,
        queue: UpdateQueue,
    ) -> None:
        """Assemble the handlers; `run` starts them.

        Args:
            config: See `ServerConfig`.
            ledger: The run's ledger.
            transport: Opens and accepts channels.
            author: This machine's own author.
            queue: Where received changes wait for the training loop.
        """
        rules = config.rules
        self.ledger = ledger
        self.transport = transport
        self.queue = queue
        volunteer = open_signed(config.ticket, "ticket", messages.Ticket).volunteer
        self.gossip = Gossip(transport.key, int(transport.key[:12], 16), volunteer)
        self.gossip.restore(ledger.vector())
        self.connections: dict[str, Connection] = {}
        self.uplink = FairShare()
        self.closed_bytes_sent = 0  # over connections that have ended
        self.closed_bytes_received = 0
        self._author = author
        self._disk_thread = ThreadPoolExecutor(1, "barnraise-disk")
        # Snapshots of large models take long, and must not delay updates.
        self._slow_thread = ThreadPoolExecutor(1, "barnraise-snapshots")
        run_on_disk = partial(self._run_in_thread, self._disk_thread)
        run_slowly = partial(self._run_in_thread, self._slow_thread)
        context = HandlerContext(
            connections=self.connections,
            membership=self.gossip.membership,
            links=self.gossip.links,
            spawn=self._spawn,
            disconnect=self._disconnect,
            ledger=ledger,
            gossip=self.gossip,
            run_on_disk=run_on_disk,
        )
        self.reachability = Reachability(transport.addresses)
        own = OwnIntroduction(
            transport.key, config.spec_digest, lambda: author.incarnation, self.addresses
        )
        self.handshake = Handshake(own, rules.mirrors, config.ticket, config.clock)
        self.fetcher = BlobFetcher(self.connections, ledger.blobs, run_on_disk)
        self.verdicts = VerdictHandler(
            context, rules, queue, self.fetcher, self._on_verdicts_applied
        )
        self.handshake.set_exclusions(self.verdicts.excludes)
        self.updates = UpdateReceiver(
            context, rules, queue, self.verdicts, config.clock, AuthorPace(config.pace)
        )
        self._dialler = Dialler(
            transport,
            self.gossip.membership,
            self.reachability,
            self._is_dial_wanted,
            partial(self._serve, dialled=True),
        )
        signer = StatementSigner(config.identity, rules.run, config.clock)
        self.dial_now = DialNowHandler(context, signer, self.reachability, self._dialler)
        self.dial_back = DialBackHandler(context, transport, self.reachability)
        self.copied_keys = CopiedKeys(signer, author.has_signed)
        self.handshake.set_session_signer(self.copied_keys.sign_session)
        self._address_watch = AddressWatch(
            self.connections, self.addresses, self._introduce, self._on_moved
        )
        self.line_test = LineTest(self.connections)
        self._port_mapping = config.port_mapping
        self._announced_names = AnnouncedNames(config.announced, self.reachability)
        self.snapshot_server = SnapshotServer(ledger, self.connections, run_slowly)
        self.snapshot_client = SnapshotClient(context, rules, self.fetcher)
        self.resync_handler = Resync(ledger, self.gossip, self.snapshot_client, run_on_disk)
        self.pruner = Pruner(ledger, self.gossip, run_on_disk, transport.key, config.archive_rounds)
        self.mirror_lists = MirrorListSync(
            rules.mirrors,
            self.connections,
            config.clock,
            self._on_mirrors_changed,
            self._on_relays_changed,
        )
        self.scrub = BlobScrub(ledger, self.fetcher, run_slowly)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._greetings = IncomingGreetings()
        # Version vector and anchor, by their digests, that gossip has not received yet.
        self._anchor_digests: deque[tuple[str, str]] = deque(maxlen=MAX_ANCHOR_DIGESTS)
        self._repeats = RepeatedWarnings(log)
        self._message_handlers: dict[type[Message], MessageHandler] = {
            messages.Hello: self._on_hello,
            messages.PeerState: self._on_state,
            messages.UpdatePush: self._on_update,
            messages.UpdateRequest: self._on_update_request,
            messages.BlobPart: self._on_part,
            messages.BlobRequest: self._on_blob_request,
            messages.BlobMissing: self._on_blob_missing,
            messages.SnapshotRequest: self._on_snapshot_request,
            messages.SnapshotManifest: self._on_snapshot_manifest,
            messages.PeerList: self._on_peers,
            messages.DirectiveRelay: self._on_directive,
            messages.DialNowRelay: self._on_dial_now,
            messages.DialBackRequest: self._on_dial_back_request,
            messages.DialBackErrand: self._on_dial_back_errand,
            messages.DialBackResult: self._on_dial_back_result,
            messages.CopiedKeyNotice: self._on_copied_key,
            messages.LineTestRequest: self._on_line_test_request,
            messages.LineTestPart: self._on_line_test_part,
            messages.LineTestReceipt: self._on_line_test_receipt,
            SignedVerdict: self._on_proof,
            Fork: self._on_proof,
            VerdictSummary: self._on_verdict_summary,
            VerdictNames: self._on_verdict_names,
            MirrorLists: self._on_mirror_lists,
            messages.Goodbye: self._on_disconnect,
        }

    # ---- life cycle

    async def run(self, ready: Callable[[], None]) -> None:
        """Serve until `stop`.

        Args:
            ready: Called once the transport listens.

        Raises:
            OSError: When the transport cannot listen.
        """
        self._loop = asyncio.get_running_loop()
        self._wake_up = asyncio.Event()
        self._stopping = asyncio.Event()
        mapper: PortMapper | None = None
        try:
            await self.transport.start()
            friends = self.ledger.peer_store.peers()
            self.gossip.membership.add_peers(friends, self._loop.time(), PeerSource.FRIEND)
            ready()
            mapper = PortMapper(
                self.transport.mappable_port,
                self._port_mapping,
                self.reachability.observed.site_view,
                self.reachability.set_mapped,
            )
            for work in (
                self._accept_connections(),
                self._pump(),
                self.handshake.recheck_tickets(self.connections, self._disconnect),
                self.verdicts.watch_folder(),
                self.scrub.run(),
                self.updates.drop_expired(),
            ):
                self._spawn(work).add_done_callback(lambda task: self.stop())
            for name, work in (
                ("a port that the router forwards", mapper.run()),
                ("looking up the announced names", self._announced_names.resolve_often()),
                ("tests of whether others reach this machine", self.dial_back.run()),
                ("noticing that addresses change", self._address_watch.run()),
                ("deleting old snapshots", self.snapshot_server.delete_expired_often()),
            ):
                self._spawn(_run_optional(name, work))
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
            self._disk_thread.shutdown()
            self._slow_thread.shutdown()

    def stop(self) -> None:
        """End `run`."""
        self._stopping.set()

    async def start_updates(self, changes: list[Retraction]) -> None:
        """Request missing updates and let received ones enter the ledger from now on.

        Args:
            changes: What is in the anchor and must be retracted.
        """
        self.gossip.start(self.ledger.vector(), self.ledger.pruned(), self._loop.time())
        self.verdicts.on_verdicts_replaced()
        self.verdicts.retract(changes)
        await self.updates.start()
        self.wake()

    async def resync(self) -> bool:
        """Begin the ledger again at a fetched snapshot; updates wait until `start_updates`.

        Returns:
            Whether the ledger changed.
        """
        self.gossip.pause_requests()
        self.verdicts.cancel_retractions()
        await self.queue.close()
        return await self.resync_handler.rebase()

    # ---- calls from the exchange

    def addresses(self) -> list[str]:
        """Return the addresses at which others may reach this machine. Safe from any thread."""
        return self.reachability.list_addresses(self._loop.time())

    def on_published(self, update: messages.Update) -> None:
        """Spread an update of ours that is durable in the ledger."""
        # A verdict may have retracted it since.
        if not self.ledger.verdicts.is_retracted(update.author, update.seq):
            self.gossip.on_local_update(update.author, update.seq)
        self.wake()

    def prune(self, safe: dict[str, int]) -> None:
        """Delete surplus payloads up to the vector `safe`, which no restart needs."""
        self._spawn(self.pruner.prune(safe))

    def add_peers(self, peers: list[messages.Peer]) -> None:
        """Add peers that a coordinator names."""
        self.gossip.membership.add_peers(peers, self._loop.time())
        self.wake()

    def set_uplink_limit(self, bytes_per_second: float) -> None:
        """Limit what is sent; inf sets no limit. Safe from any thread."""
        self.uplink.limit(bytes_per_second)
        self.gossip.set_uplink(bytes_per_second)

    def set_progress(self, rate: float, complete: bool) -> None:
        """Publish our tokens per second, and whether we publish no further update."""
        self.gossip.set_progress(rate, complete)
        self.wake()

    def report_anchor_digest(self, vector: str, anchor: str) -> None:
        """Have the next State contain our anchor's digest at a version vector.

        Safe to call from another thread, whose call wakes nobody: a State is due in a few seconds.
        """
        self._anchor_digests.append((vector, anchor))

    def renew_ticket(self, ticket: messages.Signed) -> None:
        """Use a new ticket, and send it to every peer."""
        if self._author.should_keep_ticket(ticket):
            log.warning(
                "the coordinator %s issues tickets of the future: its clock is wrong, and the "
                "ticket before stays in use",
                ticket.key[:8],
            )
            return
        self.handshake.set_ticket(ticket)
        self._author.set_ticket(ticket)
        for connection in self.connections.values():
            self._introduce(connection)

    def find_ticket(self, key: str) -> messages.Signed | None:
        """Return the newest ticket that this machine has of a peer; None if it has none.

        It is that of the peer's connection, else the one that its last update names.
        """
        connection = self.connections.get(key)
        if connection is not None:
            return connection.hello.ticket
        heads = [
            self.ledger.update(author, seq)
            for author, seq in self.ledger.vector().items()
            if author.startswith(f"{key}.")
        ]
        last = max(filter(None, heads), key=lambda update: update.time_ms, default=None)
        return self.ledger.peer_store.ticket(last.ticket) if last else None

    def apply_directive(self, directive: messages.Signed) -> None:
        """End the connections whose tickets a mirror's directive revokes; relay it to all peers.

        Raises:
            MessageError: When it is not a directive of a mirror of this run.
        """
        if not self.handshake.revoke(directive):
            return
        for key, connection in list(self.connections.items()):
            if self.handshake.is_revoked(key, connection.hello.ticket.key):
                self._disconnect(key, "its ticket was revoked")
            else:
                connection.send_message(messages.DirectiveRelay(directive=directive))

    def apply_own_directive(self, directive: messages.Signed) -> None:
        """Apply the directive of this machine's own coordinator."""
        try:
            self.apply_directive(directive)
        except MessageError as error:
            log.warning("%s", error)

    def collect_stats(
        self, findings: ScrubFindings, schedule: RoundSchedule | None, doubted: tuple[str, ...]
    ) -> ExchangeStats:
        """Return the figures as they are now. Safe to call from any thread.

        Args:
            findings: Of the anchor's scrub.
            schedule: Of this machine's rounds; None before its first.
            doubted: Digests of the volunteers that count for nothing.
        """
        connections = list(self.connections.values())
        channels = [connection.channel for connection in connections]
        links = dict(self.gossip.links)
        vector = self.ledger.vector()
        own_key = self.transport.key
        own_updates = sum(seq for author, seq in vector.items() if author.startswith(own_key))
        neighbours = tuple(
            NeighbourStats(
                connection.key,
                _count_missing(vector, links[connection.key].vector),
                connection.sent_meter.rate,
                connection.received_meter.rate,
                links[connection.key].anchor_agrees,
                connection.channel.is_relayed,
            )
            for connection in connections
            if connection.key in links
        )
        return ExchangeStats(
            updates_sent=own_updates,
            updates_received=sum(vector.values()) - own_updates,
            bytes_sent=self.closed_bytes_sent + sum(channel.bytes_sent for channel in channels),
            bytes_received=self.closed_bytes_received
            + sum(channel.bytes_received for channel in channels),
            peers=len(connections),
            updates_behind=self.gossip.updates_behind,
            sent_rate=sum(connection.sent_meter.rate for connection in connections),
            received_rate=sum(connection.received_meter.rate for connection in connections),
            uplink_rate=self.uplink.measured_rate,
            round_schedule=schedule,
            neighbours=neighbours,
            fragments_checked=findings.checked,
            corruptions=findings.corrupted + self.scrub.found,
            repaired=findings.repaired + self.scrub.repaired,
            damaged_fragment=findings.damaged,
            waiting_reason=self.snapshot_client.waiting_reason,
            is_reached=bool(self.reachability.facts(time.monotonic()).is_reached),
            doubted=doubted,
        )

    def answer_snapshot_requests(self, copy: AnchorCopy, requests: list[PendingRequest]) -> None:
        """Answer requests for snapshots from a copy of the anchor."""
        self._spawn(self.snapshot_server.answer(copy, requests))

    def wake(self) -> None:
        """Have gossip decide again: a fact has changed."""
        self._wake_up.set()

    # ---- connections

    async def _accept_connections(self) -> None:
        while True:
            channel = await self.transport.accept()
            if self._greetings.admit(channel, self._loop.time()):
                self._spawn(self._serve(channel, dialled=False))

    async def _dial(self, peer: messages.Peer) -> None:
        await self._dialler.dial(peer)
        self.wake()

    def _is_dial_wanted(self, key: str) -> bool:
        known = self.gossip.membership.passive.get(key)
        is_excluded = self.verdicts.excludes(key, known.volunteer if known else "")
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
        self.gossip.membership.on_refused(key, self._loop.time(), meeting)
        self.wake()

    def _add_connection(self, connection: Connection) -> bool:
        """Add a connection after the handshake.

        Returns:
            False when it was closed instead: there is a better one to the peer, or no room.
        """
        old = self.connections.get(connection.key)
        if old is not None:
            if self.handshake.is_preferred(old, connection):
                connection.channel.close("there is a connection already")
                return False
            old.channel.close("a newer connection took its place")
        elif len(self.connections) >= MAX_CONNECTIONS:
            connection.channel.close("too many peers")
            return False
        elif not self.gossip.membership.has_room_for(
            self.gossip.links, connection.key, connection.ticket.volunteer
        ):
            connection.channel.close("enough machines of your volunteer are connected")
            return False
        now = self._loop.time()
        self.connections[connection.key] = connection
        self.gossip.on_connected(
            connection.key, now, connection.meeting, connection.hello.addresses
        )
        if connection.meeting.address:
            self._store_peer(connection)
            if not connection.dialled:
                self.reachability.on_accepted(connection.meeting.address, now)
        self._record_observation(connection)
        for directive in self.handshake.current_directives():
            connection.send_message(messages.DirectiveRelay(directive=directive))
        log.info("connected to %s", connection.key[:8])
        self.wake()
        return True

    def _introduce(self, connection: Connection) -> None:
        """Send a greeting: this machine's ticket or addresses, or what it sees, have changed."""
        connection.send_introduction(self.handshake.build_hello(connection.channel))

    def _on_moved(self, connection: Connection) -> None:
        """Record that a linked peer is at another address now, as QUIC has verified."""
        log.debug("%s is at another address now", connection.key[:8])
        now = self._loop.time()
        self.gossip.membership.on_connected(
            connection.key, now, connection.meeting, connection.hello.addresses
        )
        self._store_peer(connection)

    def _record_observation(self, connection: Connection) -> None:
        """Record at which address a peer says that it sees this machine."""
        self.reachability.observed.on_report(
            connection.key, connection.ticket.volunteer, connection.hello.observed or ""
        )

    def _store_peer(self, connection: Connection) -> None:
        """Remember where a peer was met, so that this machine can rejoin through it."""
        met = messages.Peer(key=connection.key, addresses=[connection.meeting.address])
        store_peer = self.ledger.peer_store.store_peer
        volunteer = connection.meeting.volunteer
        self._spawn(self._run_in_thread(self._disk_thread, store_peer, met, volunteer))

    async def _receive_messages(self, connection: Connection) -> None:
        """Receive messages until the connection ends; a writer task sends meanwhile."""
        sources = FrameSources(
            compose_state=partial(self._build_state, connection.key),
            open_update=partial(self._open_update, connection.key),
            open_blob=self._open_blob,
            open_line_test=line_test_frames,
            uplink=self.uplink,
        )
        writer = self._spawn(connection.run_writers(sources))
        writer.add_done_callback(partial(_close_when_failed, connection.channel))
        key = connection.key
        try:
            self.copied_keys.on_hello(connection)
            while True:
                frame = await connection.receive()
                started_at = self._loop.time()
                message, payload = unpack(frame)
                self.gossip.on_message(key, started_at)
                await self._message_handlers[type(message)](connection, message, payload)
                if self._loop.time() > started_at + MAX_MESSAGE_SECONDS:
                    await asyncio.sleep(0)  # the other links' messages first
        except ChannelClosedError as error:
            log.info("lost %s: %s", key[:8], error)
            if error.peer_left and self.connections.get(key) is connection:
                self.gossip.on_left(key)
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
        self.closed_bytes_sent += connection.channel.bytes_sent
        self.closed_bytes_received += connection.channel.bytes_received
        if self.connections.get(key) is connection:
            del self.connections[key]
            self.gossip.on_disconnected(key, self._loop.time())
            self.reachability.observed.on_disconnected(key, self._loop.time())
            self.snapshot_client.on_disconnected(key)
            self.verdicts.on_disconnected(key)
            self.wake()

    def _disconnect(self, key: str, reason: str) -> None:
        connection = self.connections.get(key)
        if connection is not None:
            log.warning("dropped %s: %s", key[:8], reason)
            connection.channel.close(reason)

    # ---- messages from peers: one handler for each type

    async def _on_hello(
        self, connection: Connection, hello: messages.Hello, payload: memoryview
    ) -> None:
        ticket = self.handshake.check_hello(connection.key, hello)
        if ticket.volunteer != connection.ticket.volunteer:
            # Limits and votes count by volunteer: one key must not be of several in turn.
            raise MessageError("it belongs to another volunteer than before: it may connect again")
        connection.renew_introduction(hello, ticket)
        self.copied_keys.on_hello(connection)
        self._record_observation(connection)
        self.gossip.membership.on_connected(
            connection.key, self._loop.time(), connection.meeting, hello.addresses
        )
        self.wake()

    async def _on_state(
        self, connection: Connection, state: messages.PeerState, payload: memoryview
    ) -> None:
        now = self._loop.time()
        self._receive_anchor_digests()
        state = self.verdicts.without_retracted(state)
        is_news = self.gossip.on_state(connection.key, state, now)
        has_other_verdicts = self.verdicts.on_state(connection.key, state)
        self.mirror_lists.on_state(connection.key, state, now)
        if is_news or has_other_verdicts:
            self.wake()

    async def _on_update(
        self, connection: Connection, push: messages.UpdatePush, payload: memoryview
    ) -> None:
        await connection.wait_for_update()
        update = await self.updates.on_header(connection.key, push, self._loop.time())
        if update is not None and update.peer == self.transport.key:
            self.copied_keys.on_own_update(update)
            self._author.on_own_update(update)
        # Usually its payload follows at once, and gossip decides when that is here.
        if update is None or not self.updates.is_waiting_for_payloads(update):
            self.wake()

    async def _on_part(
        self, connection: Connection, part: messages.BlobPart, payload: memoryview
    ) -> None:
        if self.fetcher.wants(part.digest):
            await self.fetcher.on_part(connection.key, part, payload)
            return
        match await self.updates.on_part(connection.key, part, payload, self._loop.time()):
            case PartOutcome.UNWANTED:
                connection.record_unwanted(len(payload))
            case PartOutcome.STORED:
                self.wake()

    async def _on_update_request(
        self, connection: Connection, request: messages.UpdateRequest, payload: memoryview
    ) -> None:
        if not request.headers:
            self.gossip.on_request(connection.key, request.author)
        seqs = requested_seqs(self.ledger, request)
        await connection.wait_for_requests(len(seqs))
        for seq in seqs:
            connection.send_update(request.author, seq, not request.headers)

    async def _on_blob_request(
        self, connection: Connection, request: messages.BlobRequest, payload: memoryview
    ) -> None:
        stores = (self.ledger.blobs, self.snapshot_server.blobs)
        if any(blobs.has(request.digest) for blobs in stores):
            connection.send_blob(request.digest, request.offset)
        else:
            connection.send_message(messages.BlobMissing(digest=request.digest))

    async def _on_blob_missing(
        self, connection: Connection, missing: messages.BlobMissing, payload: memoryview
    ) -> None:
        now = self._loop.time()
        for author, seq in self.updates.updates_waiting_for(missing.digest):
            self.gossip.on_request_failed(connection.key, author, seq, now)
        self.fetcher.on_missing(connection.key, missing.digest, now)
        self.wake()

    async def _on_snapshot_request(
        self, connection: Connection, request: messages.SnapshotRequest, payload: memoryview
    ) -> None:
        self.snapshot_server.on_request(connection.key, request, self._loop.time())
        self.wake()

    async def _on_snapshot_manifest(
        self, connection: Connection, manifest: messages.SnapshotManifest, payload: memoryview
    ) -> None:
        self.snapshot_client.on_manifest(connection.key, manifest)
        self.wake()

    async def _on_peers(
        self, connection: Connection, peers: messages.PeerList, payload: memoryview
    ) -> None:
        self.gossip.membership.add_peers(
            peers.peers, self._loop.time(), PeerSource.GOSSIP, connection.ticket.volunteer
        )
        keys = [peer.key for peer in peers.peers]
        self.gossip.membership.rendezvous.on_peers(connection.key, keys)
        self.wake()

    async def _on_directive(
        self, connection: Connection, relay: messages.DirectiveRelay, payload: memoryview
    ) -> None:
        self.apply_directive(relay.directive)
        self.wake()

    async def _on_dial_now(
        self, connection: Connection, relay: messages.DialNowRelay, payload: memoryview
    ) -> None:
        self.dial_now.on_relay(connection, relay, self._loop.time())

    async def _on_dial_back_request(
        self, connection: Connection, request: messages.DialBackRequest, payload: memoryview
    ) -> None:
        self.dial_back.on_request(connection, request, self._loop.time())

    async def _on_dial_back_errand(
        self, connection: Connection, errand: messages.DialBackErrand, payload: memoryview
    ) -> None:
        self.dial_back.on_errand(connection, errand, self._loop.time())

    async def _on_dial_back_result(
        self, connection: Connection, result: messages.DialBackResult, payload: memoryview
    ) -> None:
        self.dial_back.on_result(connection, result)

    async def _on_copied_key(
        self, connection: Connection, notice: messages.CopiedKeyNotice, payload: memoryview
    ) -> None:
        self.copied_keys.on_notice(notice)

    async def _on_line_test_request(
        self, connection: Connection, request: messages.LineTestRequest, payload: memoryview
    ) -> None:
        self.line_test.on_request(connection, request, self._loop.time())

    async def _on_line_test_part(
        self, connection: Connection, part: messages.LineTestPart, payload: memoryview
    ) -> None:
        self.line_test.on_part(connection, part, len(payload), self._loop.time())

    async def _on_line_test_receipt(
        self, connection: Connection, receipt: messages.LineTestReceipt, payload: memoryview
    ) -> None:
        self.line_test.on_receipt(connection, receipt)

    async def _on_proof(
        self, connection: Connection, proof: SignedVerdict | Fork, payload: memoryview
    ) -> None:
        await self.verdicts.on_proof(proof, connection.key)
        self.wake()

    async def _on_verdict_summary(
        self, connection: Connection, summary: VerdictSummary, payload: memoryview
    ) -> None:
        self.verdicts.on_summary(connection.key, summary, self._loop.time())

    async def _on_verdict_names(
        self, connection: Connection, names: VerdictNames, payload: memoryview
    ) -> None:
        self.verdicts.on_names(connection.key, names, self._loop.time())

    async def _on_mirror_lists(
        self, connection: Connection, lists: MirrorLists, payload: memoryview
    ) -> None:
        self.mirror_lists.on_lists(lists)
        self.wake()

    async def _on_disconnect(
        self, connection: Connection, message: messages.Goodbye, payload: memoryview
    ) -> None:
        self.gossip.on_goodbye(connection.key, self._loop.time())
        raise ChannelClosedError(message.reason)

    # ---- what handlers report

    def _on_verdicts_applied(self, verdicts: VerdictSet) -> None:
        self.updates.drop_retracted()
        self._author.on_verdicts(verdicts)

    def _on_relays_changed(self, relays: list[str]) -> None:
        self._spawn(self.transport.set_relays(relays))

    def _on_mirrors_changed(self, mirrors: RunMirrors) -> None:
        rules = self.updates.rules.with_mirrors(mirrors)
        self.handshake.set_mirrors(mirrors)
        self.updates.set_rules(rules)
        self.verdicts.set_rules(rules)
        self.snapshot_client.set_rules(rules)

    # ---- what connections send

    def _receive_anchor_digests(self) -> None:
        while self._anchor_digests:
            self.gossip.on_anchor_digest(*self._anchor_digests.popleft())

    def _build_state(self, key: str) -> messages.PeerState | None:
        self._receive_anchor_digests()
        state = self.gossip.build_state(key, self._loop.time())
        if state is None:
            return None
        return state.model_copy(
            update={
                "verdicts_digest": self.ledger.verdicts.digest,
                "heads_digest": self.ledger.heads_digest,
                "mirror_list_version": self.mirror_lists.version,
            }
        )

    def _open_update(self, key: str, author: str, seq: int, whole: bool) -> Frames:
        is_needed = partial(self.gossip.needs, key, author, seq)
        sending = UpdateToSend(author, seq, whole, is_needed, self.uplink.piece_bytes)
        return update_frames(self.ledger, sending)

    def _open_blob(self, digest: str, offset: int) -> Frames:
        stores = [self.ledger.blobs, self.snapshot_server.blobs]
        for frame in blob_frames(stores, digest, offset, self.uplink.piece_bytes):
            self.snapshot_server.record_use(digest, self._loop.time())
            yield frame

    # ---- gossip actions

    async def _pump(self) -> None:
        """Perform gossip's actions whenever a fact changes or their time comes."""
        while True:
            self._wake_up.clear()
            for connection in self.connections.values():
                connection.update_meters(self._loop.time())
            for action in self.gossip.next_actions(self._loop.time()):
                self._perform(action)
            self.verdicts.send_due(self._loop.time())
            if self.resync_handler.is_due(self._loop.time()):
                self._spawn(self.resync_handler.fetch())
            now = self._loop.time()
            delay = max(MIN_PUMP_INTERVAL, self.gossip.next_wakeup(now) - self._loop.time())
            alarm = self._loop.call_later(delay, self.wake)
            await self._wake_up.wait()
            alarm.cancel()
            await asyncio.sleep(max(0.0, now + MIN_WAKE_INTERVAL - self._loop.time()))

    def _perform(self, action: gossip_module.Action) -> None:
        if isinstance(action, gossip_module.Dial):
            self._spawn(self._dial(action.peer))
            return
        if isinstance(action, gossip_module.RequestDial):
            self.dial_now.request(action.to, action.target, self._loop.time())
            return
        if isinstance(action, gossip_module.CloseLink):
            self._disconnect(action.peer, action.reason)
            return
        connection = self.connections.get(action.to)
        if connection is None:
            return
        match action:
            case gossip_module.SendState():
                connection.schedule_state()
            case gossip_module.SendGoodbye():
                connection.send_message(messages.Goodbye(reason="this machine has enough links"))
            case gossip_module.SendPeers():
                connection.send_message(messages.PeerList(peers=list(action.peers)))
            case gossip_module.PushUpdate():
                connection.send_update(action.author, action.seq)
            case gossip_module.ProbeAuthor():
                connection.send_message(
                    messages.UpdateRequest(
                        author=action.author, first=action.seq, last=action.seq, headers=True
                    )
                )
            case gossip_module.RequestUpdates():
                for request in self.updates.build_requests(action):
                    connection.send_message(request)

    # ---- tasks and threads

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ChannelClosedError):
            log.error("an error of ours in the exchange", exc_info=error)

    async def _run_in_thread(
        self, thread: ThreadPoolExecutor, call: Callable[..., Any], *values: object
    ) -> Any:
        return await self._loop.run_in_executor(thread, partial(call, *values))


async def _run_optional(name: str, work: Coroutine[Any, Any, None]) -> None:
    """Run a part without which the exchange still works; its error ends nothing else."""
    try:
        await work
    except Exception:
        log.exception("the exchange goes on without %s: an error of ours", name)


def _close_when_failed(channel: Channel, writer: asyncio.Task[Any]) -> None:
    """Close a connection whose writer has failed."""
    error = None if writer.cancelled() else writer.exception()
    if error is not None:
        is_closed = isinstance(error, ChannelClosedError)
        channel.close(str(error) if is_closed else "an error on this side")


def _count_missing(ours: dict[str, int], theirs: dict[str, int]) -> int:
    """Return how many updates the version vector `theirs` lacks."""
    return sum(max(0, seq - theirs.get(author, 0)) for author, seq in ours.items())
