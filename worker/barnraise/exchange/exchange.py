"""The exchange as the loop sees it: a background thread that trades finished updates with the other workers.

    node = Node(spec, run, identity, incarnation, ledger, blobs, transport, ticket, mirrors)
    snapshot = node.join(timeout)        # late? begin at the others' anchor
    node.start(anchor.vector)
    …for arrival in node.arrived(): …    # between steps; never blocks
    node.offer(payloads, tokens)         # after a round; durable before anybody hears of it
    node.stop()

Everything public is called from the worker's own thread. The network runs from the first call that needs it.
"""

import asyncio
import contextlib
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import CancelledError, wait

import torch

from barnraise.errors import StateError
from barnraise.exchange.handlers import snapshot_client as snapshots
from barnraise.exchange.handlers.blob_fetcher import WantedBlob
from barnraise.exchange.handlers.snapshot_client import Snapshot
from barnraise.exchange.handlers.update_receiver import ReceivedUpdate
from barnraise.exchange.ledger.anchor import Anchor, Retracted, compute_sketch
from barnraise.exchange.ledger.anchor_scrub import AnchorScrub
from barnraise.exchange.ledger.blob_store import BlobStore
from barnraise.exchange.ledger.diff import anchor_entry, retractions
from barnraise.exchange.ledger.ledger import Ledger, Outcome
from barnraise.exchange.ledger.validation import EMPTY_PART, UpdateRules
from barnraise.exchange.network.transport import Transport
from barnraise.exchange.pacing.peer_estimates import PeerEstimates
from barnraise.exchange.pacing.round_schedule import RoundSchedule
from barnraise.exchange.pacing.weighting import weight_ramp
from barnraise.exchange.server import PeerServer
from barnraise.exchange.stats import ExchangeStats, collect_stats
from barnraise.protocol.enums import Role
from barnraise.protocol.messages import FragmentUpdate, Peer, Signed, Ticket, Update
from barnraise.protocol.mirror_list import SignedMirrorList, parse_list
from barnraise.protocol.signing import Identity, digest, open_signed
from barnraise.protocol.verdicts import SignedVerdict
from barnraise.spec import RunSpec

log = logging.getLogger("barnraise.exchange")

MAX_BLOB = 1 << 26  # bytes of a blob that is fetched by digest alone
REPAIR = 20.0  # seconds the others have for what is damaged here


class Exchange:
    def __init__(
        self,
        spec: RunSpec,
        run: str,
        identity: Identity,
        incarnation: str,
        ledger: Ledger,
        blobs: BlobStore,
        transport: Transport,
        ticket: Signed,
        mirrors: frozenset[str],
        clock: Callable[[], float] = time.time,
        reincarnate: Callable[[], str] = lambda: secrets.token_hex(8),
    ):
        """`blobs` are the ledger's. `reincarnate` makes, and makes durable, a new incarnation of this state folder: it
        is called when a peer proves that updates of ours were lost here."""
        assert blobs.folder == ledger.blobs.folder and transport.key == identity.key
        self._ledger, self._blobs, self._identity = ledger, blobs, identity
        self._run, self._reincarnate = run, reincarnate
        self.author = f"{identity.key}.{incarnation}"
        self._naming = threading.Lock()  # an update is not signed while the author changes
        self._hub = PeerServer(
            rules=UpdateRules.from_spec(spec, run, mirrors),
            spec=digest(spec.to_json()),
            incarnation=incarnation,
            ledger=ledger,
            transport=transport,
            ticket=ticket,
            clock=clock,
            recognised=self.on_own_update,
            cut=self._cut,
            archive=spec.verdict_horizon
            if Role.ARCHIVE in open_signed(ticket, "ticket", Ticket).roles
            else None,
        )
        self._hub.inbox.refetch = lambda digest, size: self.fetch_blobs({digest: size}, REPAIR)
        self._audit = AnchorScrub(spec, ledger)
        self._saved: dict[str, int] = {}  # the version vector of the last state on disk
        self._replay: list[ReceivedUpdate] = []
        self._fellows = PeerEstimates(spec, self._hub.gossip)
        self._complete, self._clock = False, clock
        self._rhythm: RoundSchedule | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._failure: OSError | None = None

    # ---- life

    def open(self) -> None:
        """Begins to listen and to answer, if it has not yet. Raises OSError when it cannot."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, name="barnraise-exchange", daemon=True
            )
            self._thread.start()
            self._ready.wait()
        if self._failure:
            raise self._failure

    def start(self, applied: dict[str, int], holes: Retracted | None = None) -> None:
        """Updates flow from now on. `applied`, `holes`: the anchor's version vector, and what is out of it; what the
        ledger has past it arrives again, and what verdicts took out since comes out. Raises StateError when the ledger
        begins after it, OSError when the transport cannot listen."""
        self.open()
        ledger, inbox = self._ledger, self._hub.inbox
        if not ledger.has_payloads_after(applied):
            raise StateError(
                "the anchor lacks updates from before the snapshot at which this folder's ledger begins: join again "
                "from an empty folder"
            )
        self._replay = [
            inbox.arrival(anchor_entry(update, ledger.verdicts))
            for _, update in ledger.updates_since(applied)
        ]
        self._await(self._hub.begin(retractions(ledger, applied, holes or {})), None)

    def stop(self) -> None:
        """Says goodbye and ends every thread. The ledger stays open. Safe to call twice."""
        if self._thread is None:
            return
        self._tell(self._hub.stop)
        self._thread.join()

    def _serve(self) -> None:
        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            await self._hub.run(self._ready.set)

        try:
            asyncio.run(main())
        except Exception as error:
            if self._ready.is_set():  # it had been running: the loop must not fall with it
                log.critical(
                    "the exchange ended by an error; training goes on alone", exc_info=True
                )
            else:
                self._failure = (
                    error
                    if isinstance(error, OSError)
                    else OSError(f"the exchange cannot start: {error}")
                )
        finally:
            self._ready.set()

    # ---- the loop's side

    def poll_updates(self) -> list[ReceivedUpdate]:
        """Updates that came in since the last call, each author's in order. Already durable. Never blocks."""
        arrivals, self._replay = self._replay, []
        queue, now = self._hub.inbox.arrived, time.monotonic()
        while queue:
            arrival = queue.popleft()
            if isinstance(arrival.header, Update):
                self._fellows.on_update_received(arrival.header, now)
            arrivals.append(arrival)
        return arrivals

    def publish(self, payloads: Iterable[tuple[bytes, torch.Tensor] | None], tokens: int) -> Update:
        """Publishes a round, or a turn of it: (payload, the integers it decodes to) of each fragment in order, taken as
        they come; None for one of which nothing is said. Files first, fsynced; then the ledger's row; only then is
        anybody told. Raises OSError when the disk refuses; then nothing was published."""
        parts: list[FragmentUpdate] = []
        try:
            for said in payloads:
                parts.append(self._stored(said))
                del said  # before the next fragment's are made
            while (update := self._entered(parts, tokens)) is None:
                with self._naming:
                    self._rename("what this machine publishes under its old name no longer counts")
        finally:
            self._blobs.unpin(part.digest for part in parts if part.size)
        self._fellows.on_update_published(update, self._clock())
        self._tell(self._hub.published, update)
        return update

    def _stored(self, said: tuple[bytes, torch.Tensor] | None) -> FragmentUpdate:
        if said is None:
            return EMPTY_PART
        payload, units = said
        return FragmentUpdate(
            digest=self._blobs.store(payload, hold=True),
            size=len(payload),
            sketch=compute_sketch(units),
        )

    def _entered(self, parts: list[FragmentUpdate], tokens: int) -> Update | None:
        """The next update of this machine, in the ledger; None when verdicts keep this author out."""
        with self._naming:
            head = self._ledger.head(self.author)
            update = Update(
                run=self._run,
                peer=self._identity.key,
                incarnation=self.author.partition(".")[2],
                seq=head.seq + 1,
                previous=head.digest,
                tokens=tokens,
                total=head.total + tokens,
                fragments=parts,
            )
            if self._ledger.verdicts.is_retracted(self.author, update.seq):
                return None
            outcome = self._ledger.append(self._identity.sign("update", update), update)
        assert outcome in (Outcome.ADDED, Outcome.RETRACTED), outcome
        return update if outcome is Outcome.ADDED else None

    def on_state_saved(self, vector: dict[str, int]) -> None:
        """A state at `vector` is on disk. Payloads that no restart needs may go: not even one from the state before."""
        safe, self._saved = self._saved, dict(vector)
        if safe:
            self._tell(self._hub.kept, safe)

    def serve_snapshots(self, anchor) -> None:
        """Between two steps: copies the anchor if a joining peer waits for it. Costs nothing when nobody asks."""
        if (taken := self._hub.desk.take(anchor, time.monotonic())) is not None:
            self._tell(self._hub.frozen, *taken)

    def find_damaged_fragment(self, anchor: Anchor) -> int | None:
        """Between two steps: holds one fragment of the anchor against its ledger, now and then. The index of one that
        is damaged, until it is put right."""
        return self._audit.check_next(anchor)

    def rebuild_fragment(
        self, anchor: Anchor, index: int, given_up: Callable[[], bool] = lambda: False
    ) -> torch.Tensor | None:
        """int32 [n] that the damaged fragment must be; None when neither the ledger nor a peer at the same vector and
        verdicts gives it now. Blocks, and asks `given_up` now and then."""

        def ask() -> torch.Tensor | None:
            if anchor.retracted != self._ledger.verdicts.retracted_within(anchor.vector):
                return None  # something is still to come out: no peer is where this anchor is
            return self._await(
                snapshots.fragment(self._hub, index, anchor.vector, REPAIR), None, given_up
            )

        return self._audit.rebuild_fragment(anchor, index, ask)

    def compute_weight(self, rate: float) -> float:
        """This machine's share, at `rate` tokens/s, of all the training that goes on; 1 when alone, less for who joined
        late and is new."""
        rounds = self.last_published_seq // (self._rhythm.updates_per_round if self._rhythm else 1)
        return self._fellows.training_share(rate, time.monotonic()) * (
            weight_ramp(rounds) if self._ledger.base_heads() else 1.0
        )

    def predict_in_flight(self, rate: float) -> tuple[float, ...]:
        """By how many of its momenta each fragment of the replica of this machine, at `rate` tokens/s, is to be ahead
        of what it has: for updates whose headers have come and whose payloads have not."""
        return self._fellows.predict_in_flight(self._hub.inbox.under_way(), rate, time.monotonic())

    def plan_round(self, rate: float, turns: bool = True) -> RoundSchedule:
        """The next round at `rate` tokens/s, and the form of its update. `turns`: whether it may be said in turns."""
        line = min(self._hub.turns.measured_rate or math.inf, self._hub.turns.rate)
        self._rhythm = self._fellows.plan_round(rate, line, time.monotonic(), self._clock(), turns)
        return self._rhythm

    def announce_rate(self, rate: float) -> None:
        """Tells peers how many tokens/s this machine trains at; 0 while it does not."""
        if self._hub.gossip.progress_changed(
            rate, self._complete
        ):  # what is no news need not wake the exchange's thread
            self._tell(self._hub.announce, rate, self._complete)

    def report_anchor_digest(self, vector: str, anchor: str) -> None:
        """Our anchor's digest at a version vector (by its digest), for peers to compare theirs with."""
        if self._hub.gossip.anchor_digests.get(vector) != anchor:
            self._tell(self._hub.gossip.on_anchor_digest, vector, anchor)

    def announce_completion(self) -> None:
        """This machine publishes no more."""
        self._complete = True
        self._tell(self._hub.announce, self._hub.gossip.rate, True)

    def is_synchronized(self) -> bool:
        """Every connected peer is complete and has exactly the updates we have. True when nobody is connected."""
        return self._hub.gossip.is_converged and self._hub.court.settled

    def all_published_delivered(self) -> bool:
        """Some connected peer has everything this machine published. True when nobody is connected."""
        links, last = list(self._hub.gossip.links.values()), self.last_published_seq
        return not links or any(link.vector.get(self.author, 0) >= last for link in links)

    @property
    def last_published_seq(self) -> int:
        """The seq of this incarnation's last update in the ledger; 0 before the first."""
        return self._ledger.head(self.author).seq

    @property
    def stats(self) -> ExchangeStats:
        return collect_stats(self._hub, self._audit.findings, self._rhythm)

    def apply_verdict(self, ruling: SignedVerdict) -> None:
        """Heeds a verdict, and hands it to the peers. Raises MessageError for one that proves nothing."""
        self._await(self._hub.court.take(ruling), None)

    # ---- who may speak

    def set_uplink_limit(self, uplink: float) -> None:
        """Payloads leave at no more than `uplink` bytes/s, peers by turns. inf: as fast as the lines take them."""
        self._hub.turns.limit(uplink)

    def add_peers(self, peers: list[Peer]) -> None:
        """Peers a coordinator names."""
        self.open()
        self._tell(self._hub.introduce, peers)

    def addresses(self) -> list[str]:
        """Where others may reach this machine, to tell a coordinator."""
        self.open()
        return self._hub.transport.addresses()

    def renew_ticket(self, ticket: Signed) -> None:
        self._tell(self._hub.renew, ticket)

    def revoke_keys(self, keys: Iterable[str], directive: Signed | None = None) -> None:
        """These keys are out. `directive`: the signed proof, passed on to peers who cannot reach a coordinator."""
        self._tell(self._hub.revoke, frozenset(keys), directive)

    def set_mirror_lists(self, lists: list[SignedMirrorList]) -> list[SignedMirrorList]:
        """The mirror lists this machine holds, for the peers. Returns those of the peers, where they are newer."""
        register, version = self._hub.register, parse_list(lists[-1]).version if lists else 0
        if version > register.version:
            self._tell(register.know, lists)
        return register.chain if register.version > version else []

    @property
    def orphaned(self) -> bool:
        """Whether no coordinator has answered for an hour: tickets then count long past their expiry."""
        return self._hub.door.orphaned

    @orphaned.setter
    def orphaned(self, value: bool) -> None:
        self._hub.door.orphaned = value

    # ---- what is fetched

    def fetch_blobs(
        self,
        sizes: Mapping[str, int | None],
        timeout: float,
        given_up: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Blobs (digest → bytes, where known) from all peers that have any, at once, checked. False when not all came
        within `timeout` seconds, to which what comes adds, or soon after `given_up` says so. Blocks."""
        if all(self._blobs.has(each) for each in sizes):
            return True
        self.open()
        wanted = [WantedBlob(each, size, size or MAX_BLOB) for each, size in sizes.items()]
        return self._await(
            self._hub.fetcher.fetch(wanted, timeout, snapshots.SLOW_LINE), False, given_up
        )

    def fetch_snapshot(
        self, timeout: float, given_up: Callable[[], bool] = lambda: False
    ) -> Snapshot | None:
        """The anchor to start from, if the run is under way: from the peers, or what an earlier join fetched.

        None when the peers are at the start, when none answers within `timeout` seconds, and when this folder has
        updates from the start on: then the initial weights plus the ledger are right. None, too, soon after `given_up`
        says so. Blocks; call before `start`.
        """
        if self._ledger.vector() and (
            (base := snapshots.load_base_snapshot(self._ledger)) or not self._ledger.pruned()
        ):
            return base
        self.open()
        return self._await(snapshots.join(self._hub, timeout), None, given_up)

    @property
    def needs_resync(self) -> bool:
        """Whether nobody keeps what this machine lacks, and the others' anchor is here to `begin_again` from."""
        return self._hub.overtaken.found is not None

    def resync(self) -> bool:
        """Has the ledger begin again at that anchor, with what is here past it; then `start` with what was applied. Own
        updates stay own. False when nothing changed."""
        return self._await(self._hub.overtaken.begin_again(), False)

    # ---- between the threads

    def on_own_update(self, update: Update) -> None:
        """Our own key signed an update we do not know: this folder is older than what it says. On any thread."""
        with self._naming:
            if update.author == self.author and update.seq > self._ledger.head(self.author).seq:
                self._rename("peers know updates of ours that this folder lost")

    def _cut(self, authors: Iterable[str]) -> None:
        """Nothing more is taken of these."""
        with self._naming:
            if self.author in authors:
                self._rename(
                    "a verdict, or a fork, ended what this machine published under its old name"
                )

    def _rename(self, why: str) -> None:
        """A new incarnation. The caller holds `_naming`."""
        incarnation = self._reincarnate()
        log.warning("%s: it goes on as %s", why, incarnation)
        self.author = f"{self._identity.key}.{incarnation}"
        self._hub.door.incarnation = incarnation

    def _tell(self, call: Callable, *values) -> None:
        """Runs a call on the hub's thread; once the hub has ended there is nobody to tell."""
        if self._thread is None:
            self.open()
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                self._loop.call_soon_threadsafe(call, *values)

    def _await(self, work: Coroutine, otherwise, given_up: Callable[[], bool] = lambda: False):
        """The result of a coroutine on the hub's thread; `otherwise` when the hub ends first, or nobody waits on."""
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # its loop is closed
            work.close()
            return otherwise
        while not future.done() and not given_up():
            wait([future], 0.1)
        future.cancel()  # of no effect on one that is done
        try:
            return future.result()
        except CancelledError:
            return otherwise
