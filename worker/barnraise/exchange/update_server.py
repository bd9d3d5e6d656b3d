"""The exchange of updates between peers: it assembles the handlers and performs gossip's actions.

Everything here runs on the event loop of the peer server; other threads call only the methods that
say so.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from barnraise.exchange.blobs.blob_fetcher import BlobFetcher
from barnraise.exchange.blobs.blob_scrub import BlobScrub
from barnraise.exchange.blobs.pruner import Pruner
from barnraise.exchange.gossip.gossip import (
    Action,
    Gossip,
    ProbeAuthor,
    PushUpdate,
    RequestUpdates,
    SendState,
)
from barnraise.exchange.gossip.handler_context import HandlerContext
from barnraise.exchange.snapshots.resync import Resync
from barnraise.exchange.snapshots.snapshot_client import SnapshotClient
from barnraise.exchange.snapshots.snapshot_server import SnapshotServer
from barnraise.exchange.stats import ChecksumView, ExchangeStats, NeighbourView
from barnraise.exchange.trials.trial_receiver import ComparedTrial, TrialParts, TrialReceiver
from barnraise.exchange.trials.trial_sender import TrialSender
from barnraise.exchange.updates.payload_receiver import ReceiverParts
from barnraise.exchange.updates.update_receiver import UpdateReceiver
from barnraise.exchange.updates.update_sender import UpdateSender
from barnraise.exchange.verdicts.verdict_handler import VerdictHandler
from barnraise.ledger.anchor import Retraction
from barnraise.ledger.anchor_scrub import ScrubFindings
from barnraise.ledger.author_pace import AuthorPace, PaceLimits
from barnraise.ledger.ledger import Ledger
from barnraise.ledger.local_author import LocalAuthor
from barnraise.ledger.update_queue import UpdateQueue
from barnraise.ledger.validation import UpdateRules
from barnraise.ledger.verdict_set import VerdictSet
from barnraise.peering.limits.rate_limit import METER_STEP_SECONDS
from barnraise.peering.links.received import Received
from barnraise.peering.membership.membership import PeerSource
from barnraise.peering.peer_server import PeeringConfig, PeeringUser, PeerServer
from barnraise.peering.transports.transport import Transport
from barnraise.planning.round_schedule import RoundSchedule
from barnraise.planning.uplink_budget import UplinkUse
from barnraise.protocol.messages import PeerState, Signed, Ticket, Update, UpdateRequest
from barnraise.protocol.run_mirrors import RunMirrors
from barnraise.protocol.signing import open_signed

log = logging.getLogger("barnraise.exchange")

MIN_PUMP_SECONDS = 0.02  # between two timed rounds of gossip actions
MIN_WAKE_SECONDS = 0.005  # between two rounds, however many events a peer causes


@dataclass(frozen=True)
class UpdateConfig:
    """What the exchange of updates is configured with."""

    rules: UpdateRules  # what updates of the run are checked against
    pace: PaceLimits  # what one machine can honestly publish
    # Rounds for which all payloads are kept, if this machine is an archive.
    archive_rounds: int | None = None
    relays: bool = True  # whether others' updates are passed on before they are requested


@dataclass(frozen=True)
class LocalState:
    """What this machine itself publishes and has received."""

    ledger: Ledger
    author: LocalAuthor
    queue: UpdateQueue  # where received changes wait for the training loop
    # Returns the elements of a fragment's units by which an update is judged.
    sample: Callable[[int, torch.Tensor], torch.Tensor]
    on_trial_compared: Callable[[ComparedTrial], None]  # called with newcomers' trials


class UpdateServer:
    """Exchange updates, verdicts and snapshots with the peers.

    Attributes:
        peers: The connections.
        gossip: Decides which peer is sent what.
    """

    def __init__(
        self, peering: PeeringConfig, config: UpdateConfig, transport: Transport, local: LocalState
    ) -> None:
        """Assemble the handlers; `run` starts them."""
        ledger, author, queue = local.ledger, local.author, local.queue
        self.ledger = ledger
        self.queue = queue
        self._author = author
        self._key = transport.key
        volunteer = open_signed(peering.ticket, "ticket", Ticket).volunteer
        seed = int(transport.key[:12], 16)
        self.gossip = Gossip(transport.key, seed, volunteer, config.relays)
        self.gossip.restore(ledger.vector())
        self._disk_thread = ThreadPoolExecutor(1, "barnraise-disk")
        # Snapshots of large models take long, and must not delay updates.
        self._slow_thread = ThreadPoolExecutor(1, "barnraise-snapshots")
        run_on_disk = partial(_run_in_thread, self._disk_thread)
        run_slowly = partial(_run_in_thread, self._slow_thread)
        self.peers = PeerServer(
            peering,
            transport,
            PeeringUser(
                membership=self.gossip.membership,
                links=self.gossip.links,
                on_connected=self.gossip.on_connected,
                on_message=self.gossip.on_message,
                on_goodbye=self.gossip.on_goodbye,
                on_left=self.gossip.on_left,
                on_disconnected=self._on_disconnected,
                incarnation=lambda: author.incarnation,
                has_signed=author.has_signed,
                is_excluded=lambda key, volunteer: ledger.verdicts.excludes(key, volunteer),
                store_peer=partial(run_on_disk, ledger.peer_store.store_peer),
                on_mirrors_changed=self._on_mirrors_changed,
                wake=self.wake,
            ),
        )
        context = HandlerContext(
            **vars(self.peers.context), ledger=ledger, gossip=self.gossip, run_on_disk=run_on_disk
        )
        self.fetcher = BlobFetcher(context.connections, ledger.blobs, run_on_disk)
        self.verdicts = VerdictHandler(
            context, config.rules, queue, self.fetcher, self._on_verdicts_applied, peering.clock
        )
        self.updates = UpdateReceiver(
            context,
            config.rules,
            ReceiverParts(
                queue=queue,
                verdicts=self.verdicts,
                fetcher=self.fetcher,
                pace=AuthorPace(config.pace),
                clock=peering.clock,
                on_own_update=self._on_own_update,
                sample=local.sample,
            ),
        )
        parts = TrialParts(config.rules.sizes, local.sample, local.on_trial_compared)
        self._trial_receiver = TrialReceiver(context, self.fetcher, parts)
        self.trial_sender = TrialSender(context)
        self.snapshot_server = SnapshotServer(ledger, context.connections, run_slowly)
        self.snapshot_client = SnapshotClient(context, config.rules, self.fetcher)
        self.resync_handler = Resync(ledger, self.gossip, self.snapshot_client, run_on_disk)
        self.pruner = Pruner(ledger, self.gossip, run_on_disk, self._key, config.archive_rounds)
        self.scrub = BlobScrub(ledger, self.fetcher, run_slowly)
        uplink = self.peers.uplink
        sender = UpdateSender(ledger, self.gossip, self.snapshot_server, uplink, self.wake)
        self._traffic = sender.traffic
        self._measured_at = -math.inf
        self.peers.set_sources(self._compose_state, sender.open_update, sender.open_blob)
        self.peers.register({PeerState: self._on_state})
        for handler in (
            self.updates,
            self.updates.payloads,
            sender,
            self.verdicts,
            self._trial_receiver,
            self.snapshot_server,
            self.snapshot_client,
        ):
            self.peers.register(handler.message_handlers())

    # ---- life cycle

    async def run(self, ready: Callable[[], None]) -> None:
        """Serve until `stop`; call `ready` once the transport listens.

        Raises:
            OSError: When the transport cannot listen.
        """
        self._loop = asyncio.get_running_loop()
        self._wake_up = asyncio.Event()

        def start() -> None:
            self.peers.add_peers(self.ledger.peer_store.peers(), PeerSource.FRIEND)
            ready()

        try:
            await self.peers.run(
                start,
                (
                    self._pump,
                    self.verdicts.watch_folder,
                    self.scrub.run,
                    self.updates.drop_expired,
                ),
                {"deleting old snapshots": self.snapshot_server.delete_expired_often},
            )
        finally:
            self._disk_thread.shutdown()
            self._slow_thread.shutdown()

    def stop(self) -> None:
        """End `run`."""
        self.peers.stop()

    async def start_updates(self, changes: list[Retraction]) -> None:
        """Request missing updates and let received ones enter the ledger; retract what changed."""
        self.gossip.start(self.ledger.vector(), self.ledger.pruned(), self._loop.time())
        self.verdicts.on_verdicts_replaced()
        self.verdicts.retract(changes)
        await self.updates.start()
        await self.verdicts.apply_spoiling()
        self.wake()

    async def suspend_updates(self) -> None:
        """Let no update enter the ledger until `start_updates`; drop those in the queue."""
        self.gossip.pause_requests()
        self.verdicts.cancel_retractions()
        await self.queue.close()

    async def resync(self) -> bool:
        """Begin the ledger again at a fetched snapshot, or at the anchor before the last one.

        Updates wait until `start_updates`.

        Returns:
            Whether the ledger changed.
        """
        await self.suspend_updates()
        return await self.verdicts.revert_base() or await self.resync_handler.rebase()

    # ---- calls from the exchange

    def uplink_use(self) -> UplinkUse:
        """Return what the uplink carries, as measured. Safe from any thread."""
        uplink = self.peers.uplink
        capacity = min(uplink.measured_rate or math.inf, uplink.rate)
        return self._traffic.use(capacity, len(self.gossip.links), self.gossip.carrier_rate)

    @property
    def owes_update(self) -> bool:
        """Whether the line has no room for an update after the last one. Safe from any thread."""
        is_busy = time.monotonic() < self._traffic.free_at(self.uplink_use())
        return is_busy or self.gossip.carriers.owes_update

    def on_published(self, update: Update) -> None:
        """Spread an update of this machine."""
        self._trial_receiver.on_own_round(len(update.payload_parts) / len(update.fragments))
        if self.gossip.links:
            size = sum(part.size for part in update.fragments)
            self._traffic.on_published(size, self._loop.time(), self.gossip.has_carrier)
        self.gossip.on_local_update(update.author, update.seq)
        self.wake()

    def set_progress(self, rate: float, complete: bool) -> None:
        """Publish our tokens per second, and whether we publish no further update."""
        self.gossip.set_progress(rate, complete)
        self.wake()

    def renew_ticket(self, ticket: Signed) -> None:
        """Use a new ticket, and send it to every peer."""
        if self._author.should_keep_ticket(ticket):
            log.warning(
                "the coordinator %s issues tickets of the future: its clock is wrong, and the "
                "ticket before stays in use",
                ticket.key[:8],
            )
            return
        self._author.set_ticket(ticket)
        self.peers.set_ticket(ticket)

    def find_ticket(self, key: str) -> Signed | None:
        """Return the newest ticket that this machine has of a peer; None if it has none.

        It is that of the peer's connection, else the one that its last update names.
        """
        connection = self.peers.connections.get(key)
        if connection is not None:
            return connection.hello.ticket
        heads = [
            self.ledger.update(author, seq)
            for author, seq in self.ledger.vector().items()
            if author.startswith(f"{key}.")
        ]
        last = max(filter(None, heads), key=lambda update: update.time_ms, default=None)
        return self.ledger.tickets.get(last.ticket) if last else None

    def collect_stats(
        self, findings: ScrubFindings, schedule: RoundSchedule | None
    ) -> ExchangeStats:
        """Return the figures as they are now. Safe to call from any thread."""
        connections = list(self.peers.connections.values())
        links = dict(self.gossip.links)
        vector = self.ledger.vector()
        own_key = self._key
        own_updates = sum(seq for author, seq in vector.items() if author.startswith(own_key))
        neighbours = tuple(
            NeighbourView(
                key=connection.key,
                lag=_count_missing(vector, links[connection.key].vector),
                up=connection.sent_meter.rate,
                down=connection.received_meter.rate,
                agrees=links[connection.key].anchor_agrees,
                relayed=connection.channel.is_relayed,
            )
            for connection in connections
            if connection.key in links
        )
        return ExchangeStats(
            updates_sent=own_updates,
            updates_received=sum(vector.values()) - own_updates,
            bytes_sent=self.peers.bytes_sent,
            bytes_received=self.peers.bytes_received,
            peers=len(connections),
            updates_behind=self.gossip.updates_behind,
            sent_rate=sum(connection.sent_meter.rate for connection in connections),
            received_rate=sum(connection.received_meter.rate for connection in connections),
            uplink_rate=self.peers.uplink.measured_rate,
            round_schedule=schedule,
            neighbours=neighbours,
            checksum=ChecksumView(
                checked=findings.checked,
                corruptions=findings.corrupted + self.scrub.found,
                repaired=findings.repaired + self.scrub.repaired,
                damaged=findings.damaged,
            ),
            waiting_reason=self.snapshot_client.waiting_reason,
            is_reached=bool(self.peers.reachability.facts(time.monotonic()).is_reached),
            suspended=tuple(self.ledger.verdicts.undecided),
        )

    def wake(self) -> None:
        """Have gossip decide again: a fact has changed."""
        self._wake_up.set()

    # ---- what handlers report

    def _on_state(self, received: Received[PeerState]) -> None:
        key, state, now = received.key, received.message, received.at
        state = self.verdicts.without_retracted(state)
        is_news = self.gossip.on_state(key, state, now)
        has_other_verdicts = self.verdicts.on_state(key, state)
        self.peers.mirror_lists.on_state(key, state, now)
        if is_news or has_other_verdicts:
            self.wake()

    def _on_own_update(self, update: Update) -> None:
        self.peers.copied_keys.on_own_update(update)
        self._author.on_own_update(update)

    def _on_disconnected(self, key: str, now: float) -> None:
        self.gossip.on_disconnected(key, now)
        self.snapshot_client.on_disconnected(key)
        self.verdicts.on_disconnected(key)

    def _on_verdicts_applied(self, verdicts: VerdictSet) -> None:
        self.updates.drop_retracted()
        self._author.on_verdicts(verdicts)
        if self._author.probation is None:
            self.peers.spawn(self.trial_sender.drop_offered())

    def _on_mirrors_changed(self, mirrors: RunMirrors) -> None:
        rules = self.updates.rules.with_mirrors(mirrors)
        self.updates.set_rules(rules)
        self.verdicts.set_rules(rules)
        self.snapshot_client.set_rules(rules)

    # ---- gossip

    def _compose_state(self, key: str) -> PeerState | None:
        state = self.gossip.build_state(key, self._loop.time())
        if state is None:
            return None
        return state.model_copy(
            update={
                "verdicts_digest": self.verdicts.digest_for(key),
                # Under another vector than ours it would seem to prove a fork.
                "heads_digest": None
                if self.gossip.carriers.withheld(key)
                else self.ledger.heads_digest,
                "mirror_list_version": self.peers.mirror_lists.version,
            }
        )

    async def _pump(self) -> None:
        """Perform gossip's actions whenever a fact changes or their time comes."""
        while True:
            self._wake_up.clear()
            self._measure_line(self._loop.time())
            self.gossip.set_uplink(self.peers.uplink.rate, self.peers.uplink.measured_rate)
            for action in self.gossip.next_actions(self._loop.time()):
                self._perform(action)
            self.verdicts.send_due(self._loop.time())
            if self.resync_handler.is_due(self._loop.time()):
                self.peers.spawn(self.resync_handler.fetch())
            now = self._loop.time()
            delay = max(MIN_PUMP_SECONDS, self.gossip.next_wakeup(now) - self._loop.time())
            alarm = self._loop.call_later(delay, self.wake)
            await self._wake_up.wait()
            alarm.cancel()
            await asyncio.sleep(max(0.0, now + MIN_WAKE_SECONDS - self._loop.time()))

    def _measure_line(self, now: float) -> None:
        """Record what the connections have sent, but not at each wake: it asks iroh."""
        if now < self._measured_at + METER_STEP_SECONDS:
            return
        self._measured_at = now
        for connection in self.peers.connections.values():
            connection.update_meters(now)
            connection.count_packets(self.peers.uplink)
        self._traffic.on_line(self.peers.bytes_sent, now)

    def _perform(self, action: Action) -> None:
        if not isinstance(action, SendState | PushUpdate | ProbeAuthor | RequestUpdates):
            self.peers.perform(action)
            return
        connection = self.peers.connections.get(action.to)
        if connection is None:
            return
        match action:
            case SendState():
                connection.schedule_state()
            case PushUpdate(_, author, seq) if author == self._author.name:
                # A peer that reports none of them may only request again and again.
                is_late = author not in self.gossip.links[action.to].vector
                connection.send_own_update(author, seq, self.peers.uplink.next_rank(is_late))
            case PushUpdate(_, author, seq):
                connection.send_update(author, seq)
            case ProbeAuthor(_, author, seq):
                connection.send_message(
                    UpdateRequest(author=author, first=seq, last=seq, headers=True)
                )
            case RequestUpdates():
                for request in self.updates.build_requests(action):
                    connection.send_message(request)


async def _run_in_thread(
    thread: ThreadPoolExecutor, call: Callable[..., Any], *values: object
) -> Any:
    return await asyncio.get_running_loop().run_in_executor(thread, partial(call, *values))


def _count_missing(ours: dict[str, int], theirs: dict[str, int]) -> int:
    """Return how many updates the version vector `theirs` lacks."""
    return sum(max(0, seq - theirs.get(author, 0)) for author, seq in ours.items())
