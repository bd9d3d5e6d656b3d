"""Exchange finished updates with the other workers, as the training loop sees it.

    exchange = Exchange(config, ledger, transport)
    snapshot = exchange.fetch_snapshot(timeout)   # a late joiner starts at the peers' anchor
    exchange.start(anchor.vector)
    for received in exchange.poll_updates():      # between two steps; never blocks
        ...
    with exchange.new_update(tokens) as update:   # at the end of a round
        ...
    exchange.stop()

Public methods are called from the training loop's thread. The network runs in a thread of its own,
from the first call that needs it.
"""

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from barnraise.errors import StateError
from barnraise.exchange.blobs.blob_fetcher import WantedBlob
from barnraise.exchange.blobs.blob_scrub import REPAIR_SECONDS
from barnraise.exchange.snapshots.snapshot_client import (
    MIN_FETCH_RATE,
    Snapshot,
    load_base_snapshot,
)
from barnraise.exchange.stats import ExchangeStats
from barnraise.exchange.trials.trial_receiver import ComparedTrial
from barnraise.exchange.update_server import LocalState, UpdateConfig, UpdateServer
from barnraise.exchange.updates.update_writer import UpdateWriter
from barnraise.exchange.weights.contribution import ContributionMeter
from barnraise.exchange.weights.peer_estimates import PeerEstimates
from barnraise.exchange.weights.weighting import weight_ramp
from barnraise.ledger.anchor import (
    Anchor,
    Retracted,
    Retraction,
    Withdrawal,
    fragment_to_bytes,
)
from barnraise.ledger.anchor_diff import anchor_retractions
from barnraise.ledger.anchor_scrub import AnchorScrub
from barnraise.ledger.author_pace import GrowthMeter, PaceLimits
from barnraise.ledger.ledger import Ledger
from barnraise.ledger.local_author import AuthorConfig, LocalAuthor
from barnraise.ledger.update_queue import ReceivedUpdate, UpdateQueue, anchor_entry
from barnraise.ledger.validation import UpdateRules
from barnraise.mixing.mesh_links import MeshLinks
from barnraise.mixing.mesh_members import TicketedMembership
from barnraise.peering.addresses.nat_type import ReachFacts
from barnraise.peering.links.bandwidth_meter import LineRates
from barnraise.peering.peer_server import PeeringConfig
from barnraise.peering.server_thread import ServerThread
from barnraise.peering.transports.transport import Transport
from barnraise.planning.round_schedule import RoundSchedule
from barnraise.protocol.enums import Role
from barnraise.protocol.messages import Peer, Signed, Ticket, Update
from barnraise.protocol.mirror_list import SignedMirrorList, parse_list
from barnraise.protocol.opinions import Doubt
from barnraise.protocol.signing import digest, open_signed
from barnraise.spec import AUTO, MAX_TOKENIZER_BYTES

log = logging.getLogger("barnraise.exchange")


ShouldStop = Callable[[], bool]  # asked now and then by calls that block


@dataclass(frozen=True, kw_only=True)
class ExchangeConfig(AuthorConfig):
    """Who takes part in which run, and how."""

    mirrors: frozenset[str]  # keys of the run's mirrors
    # Host:port pairs that this machine's owner announces; a host may be a name.
    announced: tuple[str, ...] = ()
    port_mapping: bool = False  # whether the router may be asked to forward the port
    relays: bool = True  # whether it passes on others' updates before they are requested


class Exchange:
    """Publish this machine's updates, and receive those of its peers.

    Attributes:
        author: Signs this machine's updates.
        server: The network side. Only its event loop changes it.
        thread: Runs the server.
    """

    def __init__(self, config: ExchangeConfig, ledger: Ledger, transport: Transport) -> None:
        """Prepare the exchange; `open` or the first call that needs the network starts it."""
        assert transport.key == config.identity.key
        spec = config.spec
        self._fragment_count = len(spec.model.fragments())
        self._evaluate_every = spec.recipe.evaluate_every
        self._most_steps = spec.max_round_steps if spec.recipe.codec == AUTO else 0
        self._owner = spec.owner
        rules = UpdateRules.from_spec(spec, config.run, config.mirrors)
        self._ledger = ledger
        self.author = LocalAuthor(config, ledger)
        ticket = open_signed(config.ticket, "ticket", Ticket)
        self._volunteer = ticket.volunteer
        self._contribution = ContributionMeter(rules.sizes, secrets.randbits(63))
        self._queue = UpdateQueue(rules.sizes, ledger.blobs, self._refetch_payload)
        peering = PeeringConfig(
            identity=config.identity,
            mirrors=rules.mirrors,
            spec_digest=digest(spec.to_json()),
            ticket=config.ticket,
            clock=config.clock,
            announced=config.announced,
            port_mapping=config.port_mapping,
        )
        archive_rounds = spec.verdict_horizon if Role.ARCHIVE in ticket.roles else None
        update_config = UpdateConfig(
            rules, PaceLimits.from_spec(spec), archive_rounds, config.relays
        )
        # Newcomers' trials that wait for the training loop.
        self._trials: deque[ComparedTrial] = deque()
        local = LocalState(
            ledger, self.author, self._queue, self._contribution.sample, self._trials.append
        )
        mixes_weights = spec.recipe.mixes_weights
        self._mesh_channels = transport.add_protocol("mixing") if mixes_weights else None
        self._mesh: MeshLinks | None = None
        self.server = UpdateServer(peering, update_config, transport, local)
        self.thread = ServerThread(self.server)
        self._anchor_scrub = AnchorScrub(spec, ledger)
        self._growth = GrowthMeter(config.clock())
        self._estimates = PeerEstimates(
            spec,
            self.server.gossip,
            self._contribution,
            self._volunteer,
            lambda: ledger.verdicts,
        )
        self._clock = config.clock
        self._saved_vector: dict[str, int] = {}  # of the last training state on disk
        self._replayed: list[ReceivedUpdate] = []  # what the ledger has past the anchor
        self._is_complete = False
        self._round_schedule: RoundSchedule | None = None
        self._has_logged_low_share = False
        self._source_ip = ""
        self._withdrawn_rounds = 0.0  # that this newcomer has trained and not published

    # ---- life cycle

    def open(self) -> None:
        """Listen and answer peers, if that has not begun.

        Raises:
            OSError: When the transport cannot listen.
        """
        self.thread.open()

    def start(self, vector: dict[str, int], retracted: Retracted | None = None) -> None:
        """Let updates flow from now on.

        What the ledger has past the anchor is received again, and what verdicts retracted since is
        retracted.

        Args:
            vector: The anchor's version vector.
            retracted: What is not in the anchor though the vector covers it.

        Raises:
            StateError: When the ledger lacks updates between the anchor and its own beginning.
            OSError: When the transport cannot listen.
        """
        self.open()
        ledger = self._ledger
        if not ledger.has_payloads_after(vector):
            raise StateError(
                "the anchor lacks updates from before the snapshot at which this folder's ledger "
                "begins: join again from an empty folder"
            )
        self._replayed = [
            self._queue.wrap(anchor_entry(update, ledger.verdicts))
            for _, update in ledger.updates_since(vector)
        ]
        changes = anchor_retractions(ledger, vector, retracted or {})
        self.thread.run(self.server.start_updates(changes), None)

    def open_mesh(self, payload_bytes: int, state_bytes: int) -> MeshLinks:
        """Connect this machine to every other one of the run, to average weights with them.

        The caller stops the mesh before this exchange stops.

        Args:
            payload_bytes: of the weights as sent in a step.
            state_bytes: of the weights in 32 bits.
        """
        assert self._mesh_channels is not None, "the recipe does not average weights"
        self.open()
        peers = self.server.peers
        membership = TicketedMembership(
            self._mesh_channels, peers.context.membership, peers.handshake, self.server.find_ticket
        )
        self._mesh = MeshLinks(membership, payload_bytes, state_bytes, self.thread, peers.uplink)
        self._mesh.start()
        return self._mesh

    def stop(self) -> None:
        """End every connection and thread. The ledger stays open. Safe to call twice."""
        self.thread.close()

    # ---- publishing and receiving

    @property
    def rounds_published(self) -> int:
        """The rounds that this incarnation has published, if all had as many parts as this one.

        Those of a newcomer's trials count, too: its optimizers are as warm.
        """
        schedule = self._round_schedule
        published = self.author.last_seq // (schedule.updates_per_round if schedule else 1)
        return published + int(self._withdrawn_rounds)

    @property
    def rules(self) -> UpdateRules:
        """What updates and verdicts are checked against, by the newest mirror list."""
        return self.server.updates.rules

    @property
    def copied_key(self) -> str | None:
        """Why this machine has to stop because of another one with its key; None if it has not."""
        return self.server.peers.copied_keys.refusal

    def new_update(self, tokens: int) -> UpdateWriter:
        """Return a writer for this machine's next update, which has trained on `tokens`."""
        return UpdateWriter(
            self.author,
            self._ledger.blobs,
            self._fragment_count,
            tokens,
            self._on_published,
            self._contribution.record_own_part,
        )

    def withdraw(self, withdrawal: Withdrawal) -> ReceivedUpdate:
        """Return what takes an update out of the anchor again that would not count.

        Once it is out, call `on_withdrawn`.
        """
        return self._queue.wrap(withdrawal)

    def on_withdrawn(self, withdrawal: Withdrawal) -> None:
        """Have peers compare an update that is out of the anchor; delete it where none should."""
        changed = sum(part.size > 0 for part in withdrawal.fragments) / self._fragment_count
        self._withdrawn_rounds += changed
        self._estimates.on_update_published(withdrawal, self._clock())
        is_trial = self.author.probation is not None and not self.author.suspension
        trials = self.server.trial_sender
        self._spawn(trials.offer if is_trial else trials.drop, withdrawal)

    def _spawn(self, work: Callable[..., Coroutine[Any, Any, None]], *values: object) -> None:
        """Start a task that ends with the server, without waiting."""
        self.thread.call(lambda: self.server.peers.spawn(work(*values)))

    def _on_published(self, update: Update) -> None:
        self._record_growth(update)
        self._estimates.on_update_published(update, self._clock())
        self.thread.call(self.server.on_published, update)
        verdicts, vector = self._ledger.verdicts, self._ledger.vector()
        now_ms = int(1000 * self._clock())
        opinions = self._estimates.opinions.form(self.author.key, verdicts, vector, now_ms)
        if opinions is not None:
            self.publish_opinions(opinions.doubted, opinions.agreeing, opinions.attested)

    def publish_opinions(
        self, doubted: dict[str, Doubt], agreeing: list[str], attested: Sequence[str] = ()
    ) -> None:
        """Publish whom this machine doubts, who agrees with it and whom it attests."""
        signed = self.author.sign_opinions(doubted, agreeing, [*attested])
        self._spawn(self.server.verdicts.on_proof, signed)

    def poll_updates(self) -> list[ReceivedUpdate]:
        """Return the changes since the last call, each author's in order. Never blocks.

        They are durable in the ledger, and to be added to the anchor.
        """
        received = self._queue.drain()
        while self._trials:
            trial = self._trials.popleft()
            self._contribution.record_update(trial.volunteer, trial.samples, trial.tokens)
            self._estimates.opinions.record_trial(trial.volunteer)
        now = time.monotonic()
        for update in received:
            if isinstance(update.header, Update):
                self._estimates.on_update_received(update.header, now)
                self._record_growth(update.header)
                if update.samples and update.header.volunteer != self._volunteer:
                    self._contribution.record_update(
                        update.header.volunteer, update.samples, update.header.tokens
                    )
                    self._estimates.opinions.record_update(update.header)
            elif isinstance(update.header, Retraction) and update.retracts:
                retracted = update.header.update
                self._growth.on_retraction(
                    retracted.tokens, retracted.time_ms / 1000, self._clock()
                )
        replayed = self._replayed
        self._replayed = []
        return [*replayed, *received]

    def _record_growth(self, update: Update) -> None:
        ticket = self._ledger.tickets.get(update.ticket)
        assert ticket is not None, "tickets are stored before the updates that name them"
        rate = Ticket.model_validate_json(ticket.body).max_tokens_per_second
        self._growth.on_update(
            update.peer, rate, update.tokens, update.time_ms / 1000, self._clock()
        )

    @property
    def grows_too_fast(self) -> bool:
        """Whether the ledger grew faster than its tickets allow, see `GrowthMeter`."""
        return self._growth.grows_too_fast(self._clock())

    def on_state_saved(self, vector: dict[str, int]) -> None:
        """Record that the training state at `vector` is on disk.

        Payloads that no restart needs may be deleted: not even one from the state before.
        """
        safe = self._saved_vector
        self._saved_vector = dict(vector)
        if safe:
            self._spawn(self.server.pruner.prune, safe)

    def all_published_delivered(self) -> bool:
        """Return whether some peer has everything that this machine published.

        True when no peer is connected.
        """
        links = list(self.server.gossip.links.values())
        author, last_seq = self.author.name, self.author.last_seq
        return not links or any(link.vector.get(author, 0) >= last_seq for link in links)

    def is_synchronized(self) -> bool:
        """Return whether every connected peer is complete and has exactly our updates.

        True when no peer is connected.
        """
        return self.server.gossip.is_converged and self.server.verdicts.is_converged

    # ---- the anchor

    def serve_snapshots(self, anchor: Anchor) -> None:
        """Copy the anchor, between two steps, if a joining peer waits for it."""
        copied = self.server.snapshot_server.copy_anchor(anchor, time.monotonic())
        if copied is not None:
            self._spawn(self.server.snapshot_server.answer, *copied)

    def find_damaged_fragment(self, anchor: Anchor) -> int | None:
        """Check one fragment of the anchor against the ledger, now and then, between two steps.

        Returns:
            The index of a damaged fragment, until it is rebuilt.
        """
        return self._anchor_scrub.check_next(anchor)

    def rebuild_fragment(
        self, anchor: Anchor, index: int, should_stop: ShouldStop = lambda: False
    ) -> torch.Tensor | None:
        """Compute a damaged fragment again from the ledger, or fetch it from peers. Blocks.

        Returns:
            int32 [size]; None when neither the ledger nor a peer at the same vector and verdicts
            provides it now.
        """

        def fetch() -> torch.Tensor | None:
            if anchor.retracted != self._ledger.verdicts.retracted_within(anchor.vector):
                return None  # a retraction is pending: no peer has an anchor like this one
            work = self.server.snapshot_client.fetch_fragment(index, anchor.vector, REPAIR_SECONDS)
            return self.thread.run(work, None, should_stop)

        return self._anchor_scrub.rebuild_fragment(anchor, index, fetch)

    def report_anchor_digest(self, vector: str, anchor: str) -> None:
        """Publish our anchor's digest at a version vector, which is named by its digest."""
        gossip = self.server.gossip
        if gossip.anchor_digests.get(vector) != anchor:
            self.thread.call(gossip.on_anchor_digest, vector, anchor)

    def remember_vector(self, anchor: Anchor) -> None:
        """Remember the anchor's version vector: a coordinator may confirm the anchor there."""
        milestone = anchor.tokens // self._evaluate_every
        self.server.snapshot_server.remember_vector(
            anchor.vector_digest(), anchor.vector, milestone
        )

    # ---- pacing

    def compute_weight(self, rate: float) -> float:
        """Return the weight of this machine's update: its share of all training that goes on.

        It is 1 for a machine alone, and grows over the first rounds of one that joined late. `rate`
        is this machine's tokens per second, here and below.
        """
        now = time.monotonic()
        share = self._estimates.training_share(rate, now)
        reason = (
            None if self._has_logged_low_share else self._estimates.describe_low_share(rate, now)
        )
        if reason is not None:
            self._has_logged_low_share = True
            log.warning("%s", reason)
        for finding in self._estimates.describe_new_doubts():
            log.warning("%s", finding)
        if not self._ledger.base.heads():
            return share
        return share * weight_ramp(self.rounds_published)

    def predict_in_flight(self, rate: float) -> tuple[float, ...]:
        """Predict the updates whose headers have arrived and whose payloads have not.

        Returns:
            For each fragment, the predicted change of the anchor in multiples of this machine's
            own momentum.
        """
        in_flight = self.server.updates.updates_in_flight()
        return self._estimates.predict_in_flight(in_flight, rate, time.monotonic())

    def plan_round(self, rate: float, streaming: bool = True) -> RoundSchedule:
        """Plan the next round: its length, and how its update is compressed.

        Args:
            rate: This machine's tokens per second.
            streaming: Whether fragments may be published one after the other during the round.
        """
        use = self.server.uplink_use()
        self._round_schedule = self._estimates.plan_round(
            rate, use, time.monotonic(), self._clock(), streaming
        )
        self._contribution.set_dense(self._round_schedule.scheme.dense)
        return self._round_schedule

    def is_round_over(self, schedule: RoundSchedule, steps: int, now: float) -> bool:
        """Return whether to publish after `steps` steps, at `now` in seconds since 1970.

        A round that fits the uplink goes on until there is room for its update: none pile up.
        """
        if not schedule.is_over(steps, now):
            return False
        return steps >= self._most_steps or not self.server.owes_update

    def announce_rate(self, rate: float) -> None:
        """Publish how many tokens per second this machine trains at; 0 while it does not."""
        # The server's thread is woken only for a change that peers should know soon.
        if self.server.gossip.progress_changed(rate, self._is_complete):
            self.thread.call(self.server.set_progress, rate, self._is_complete)
        else:
            self.server.gossip.update_rate(rate)

    def announce_completion(self) -> None:
        """Publish that this machine will publish no further update."""
        self._is_complete = True
        self.thread.call(self.server.set_progress, self.server.gossip.rate, True)

    @property
    def stats(self) -> ExchangeStats:
        """The figures for status and reports."""
        stats = self.server.collect_stats(self._anchor_scrub.findings, self._round_schedule)
        mesh = self._mesh
        if mesh is None:
            return stats
        return replace(
            stats,
            bytes_sent=stats.bytes_sent + mesh.bytes_sent,
            bytes_received=stats.bytes_received + mesh.bytes_received,
            sent_rate=stats.sent_rate + mesh.sent_rate,
            received_rate=stats.received_rate + mesh.received_rate,
        )

    # ---- peers, tickets, verdicts, mirror lists

    def set_uplink_limit(self, bytes_per_second: float) -> None:
        """Limit the rate of what is sent, shared fairly among peers; inf sets no limit."""
        self.server.peers.uplink.limit(bytes_per_second)

    def set_offline(self, is_offline: bool) -> None:
        """Leave all peers, or return to them."""
        self.thread.call(self.server.peers.set_offline, is_offline)

    def set_download_limit(self, bytes_per_second: float) -> None:
        """Limit the rate of what is received from all peers together."""
        self.server.peers.limit_download(bytes_per_second)

    def add_peers(self, peers: list[Peer]) -> None:
        """Add peers that a coordinator names."""
        self.open()
        self.thread.call(self.server.peers.add_peers, peers)

    def addresses(self) -> list[str]:
        """Return the addresses at which others may reach this machine."""
        self.open()
        return self.server.peers.addresses()

    def set_source_ip(self, source_ip: str) -> None:
        """Record from which IP address the coordinator receives this machine's requests."""
        if source_ip and source_ip != self._source_ip:
            self._source_ip = source_ip
            self.thread.call(self.server.peers.reachability.observed.on_site_report, source_ip)

    @property
    def reach_facts(self) -> ReachFacts:
        """What is known of how others reach this machine."""
        return self.server.peers.reachability.facts(time.monotonic())

    def test_reachability(self) -> int:
        """Have linked peers dial this machine, for `reach_facts`. Blocks for some seconds.

        Returns:
            How many peers tried.
        """
        return self.thread.run(self.server.peers.dial_back.test(), 0)

    def measure_line(self) -> LineRates:
        """Measure the line to a linked peer with at most 2 MB each way. Blocks for some seconds."""
        return self.thread.run(self.server.peers.line_test.measure(), LineRates())

    def renew_ticket(self, ticket: Signed) -> None:
        """Replace this machine's ticket."""
        self.thread.call(self.server.renew_ticket, ticket)

    def apply_directive(self, directive: Signed) -> None:
        """Refuse the tickets that a mirror's verified directive revokes, and relay it."""
        self.thread.call(self.server.peers.apply_own_directive, directive)

    def set_mirror_lists(self, lists: list[SignedMirrorList]) -> list[SignedMirrorList]:
        """Give the peers the mirror lists that this machine has.

        Returns:
            The peers' lists, if they are newer.
        """
        mirror_lists = self.server.peers.mirror_lists
        version = parse_list(lists[-1]).version if lists else 0
        if version > mirror_lists.version:
            self.thread.call(mirror_lists.set_lists, lists)
        return mirror_lists.chain if mirror_lists.version > version else []

    def set_orphaned(self, orphaned: bool) -> None:
        """Set whether no coordinator has answered for an hour.

        Tickets are then valid for long past their expiry.
        """
        self.server.peers.handshake.set_orphaned(orphaned)

    # ---- blobs and snapshots

    def fetch_blobs(
        self,
        sizes: Mapping[str, int | None],
        timeout: float,
        should_stop: ShouldStop = lambda: False,
    ) -> bool:
        """Fetch blobs from all peers that have any. Blocks.

        Args:
            sizes: Digest → bytes; None for a tokenizer's file, whose size nobody states.
            timeout: Seconds; bytes that arrive extend it.
            should_stop: Ends the call early.

        Returns:
            Whether all are here.
        """
        if all(self._ledger.blobs.has(digest) for digest in sizes):
            return True
        self.open()
        wanted = [
            WantedBlob(digest, size, size or MAX_TOKENIZER_BYTES) for digest, size in sizes.items()
        ]
        work = self.server.fetcher.fetch(wanted, timeout, MIN_FETCH_RATE)
        return self.thread.run(work, False, should_stop)

    def _refetch_payload(self, digest: str, size: int) -> bool:
        return self.fetch_blobs({digest: size}, REPAIR_SECONDS)

    def fetch_snapshot(
        self,
        timeout: float,
        should_stop: ShouldStop = lambda: False,
        trust_all: bool = False,
    ) -> Snapshot | None:
        """Return the anchor to start from, if the run is under way. Blocks; call before `start`.

        It comes from the peers, or from an earlier call.

        Args:
            timeout: Seconds for peers to answer; bytes that arrive extend it.
            should_stop: Ends the call early.
            trust_all: Whether each linked volunteer has a vote, and a single one suffices. Without
                it a ledger that has no updates takes only what coordinators list.

        Returns:
            None when the peers are at the run's start, when nothing is confirmed within
            `timeout` seconds or before `should_stop` says so, and when the ledger has all updates
            from the start: then the initial weights plus the ledger are right.
        """
        if self._ledger.vector():
            base = load_base_snapshot(self._ledger)
            if base is not None or not self._ledger.pruned():
                return base
        self.open()
        work = self.server.snapshot_client.join(timeout, trust_all)
        return self.thread.run(work, None, should_stop)

    def set_listed_anchors(self, anchors: Mapping[str, str]) -> None:
        """Record the anchors that coordinators list as confirmed.

        If this machine's is among them, or is that of the run owner's machine, its base is right,
        and the anchor before it need not stay on disk.

        Args:
            anchors: Digest of a version vector → digest of the anchor there, the newest first.
        """
        gossip = self.server.gossip
        self.server.snapshot_client.set_listed(anchors)
        own = dict(gossip.anchor_digests)
        owner = gossip.links.get(self._owner)
        is_confirmed = any(own.get(vector) == anchor for vector, anchor in anchors.items())
        if (is_confirmed or (owner and owner.anchor_agrees)) and self._ledger.base.has_former:
            self._ledger.drop_former_base()

    @property
    def agreed_vector(self) -> dict[str, int]:
        """The version vector that most linked volunteers have."""
        return self.server.gossip.agreed_vector()

    @property
    def needs_snapshot(self) -> bool:
        """Whether the peers have updates that this machine cannot receive one by one."""
        return self.server.snapshot_client.needs_snapshot

    @property
    def waiting_reason(self) -> str | None:
        """Why no snapshot is taken although this machine needs one; None if it needs none."""
        return self.server.snapshot_client.waiting_reason

    @property
    def needs_resync(self) -> bool:
        """Whether `resync` should be called.

        No peer has what this machine lacks, and a snapshot is here; or a verdict cuts off what came
        with the last one.
        """
        return self.server.resync_handler.is_ready or self.server.verdicts.has_spoiled_base

    @property
    def needs_listed_anchors(self) -> bool:
        """Whether this machine waits for an anchor that coordinators list as confirmed."""
        return self.waiting_reason is not None or self._ledger.base.has_former

    def retain_anchor(self, anchor: Anchor) -> None:
        """Store the anchor, to which a verdict returns as long as the next base is unconfirmed."""
        if not self._ledger.base.has_former:
            blobs = self._ledger.blobs
            fragments = [blobs.store(fragment_to_bytes(units)) for units in anchor.fragments]
            self._ledger.retain_base(anchor.vector, fragments, anchor.retracted)

    def suspend_updates(self) -> None:
        """Let no update enter the ledger until the next `start`, which gives all past an anchor.

        Blocks. What waits for `poll_updates` is dropped: `start` finds it in the ledger.
        """
        self.thread.run(self.server.suspend_updates(), None)

    def resync(self) -> bool:
        """Begin the ledger again at the fetched snapshot; then call `start`. Blocks.

        Our own updates stay in the ledger. Where a verdict cuts off what came with the last
        snapshot, begin again at the anchor before.

        Returns:
            Whether the ledger changed.
        """
        return self.thread.run(self.server.resync(), False)
