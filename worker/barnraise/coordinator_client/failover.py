"""Call all mirrors of a site as if they were one coordinator, failing over between them.

The preferred mirror follows from both keys (`mirror_list.ranked`). When it does not answer, the
next takes its place. A background thread retries it, each time later, and once it answers the
machine goes back to it. The mirror list lies on disk, is requested from every mirror, and is
exchanged with the peers of a run (`peering/links/mirror_list_sync.py`).
"""

import logging
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from barnraise import __version__
from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.durable_io import write_atomically
from barnraise.errors import (
    CoordinatorError,
    CoordinatorUnreachableError,
    MessageError,
    MirrorListError,
)
from barnraise.protocol.checkups import Checkup
from barnraise.protocol.clock import REQUEST_CLOCK_SECONDS, median_clock_offset
from barnraise.protocol.coordinator_messages import (
    Attestation,
    Directive,
    JoinReply,
    JoinRequest,
    ReportReply,
    RunView,
    TextManifest,
)
from barnraise.protocol.enums import JoinPurpose
from barnraise.protocol.messages import Peer, Signed
from barnraise.protocol.mirror_list import (
    MAX_LISTS_PER_MESSAGE,
    MirrorEntry,
    MirrorList,
    MirrorLists,
    SignedMirrorList,
    merge_chain,
    parse_list,
    quorum,
    rank_mirrors,
)
from barnraise.protocol.reports import HardwareView, Report
from barnraise.protocol.signing import Identity, open_signed
from barnraise.protocol.types import Address
from barnraise.state_dir import SiteMembership, StateDir

log = logging.getLogger("barnraise.coordinator_client.failover")

MIRROR_LIST_FILE = "mirrors.json"  # in the machine's state directory
FIRST_WAIT = 5.0  # seconds until a mirror that did not answer is tried again
LONGEST_WAIT = 300.0  # seconds between two tries, at most
ANNOUNCE_SECONDS = 300.0  # between two announcements of this machine's addresses to all mirrors
# A mirror that lags behind may answer so about something that the others have.
REFUSED_STATUSES = (401, 403, 404, 409, 410)
MAX_PEERS = 64  # of one answer

Answer = TypeVar("Answer")


class MirrorSelector:
    """Select the mirror for the next call. Pure but for its random spread; times are arguments.

    A mirror that failed is away until a retry (`due_for_retry`) marks it reachable again.
    """

    def __init__(self, machine: str) -> None:
        self._machine = machine
        self.order: list[str] = []  # keys, the preferred one first
        self._failures: dict[str, int] = {}  # in a row
        self._retry_at: dict[str, float] = {}  # of the mirrors that are away

    def set_mirrors(self, mirrors: Sequence[MirrorEntry]) -> None:
        """Rank these mirrors for this machine."""
        self.order = [mirror.key for mirror in rank_mirrors(self._machine, mirrors)]

    def pick(self) -> str:
        """Return the first mirror that is not away or, if all are, the one to retry first."""
        for key in self.order:
            if not self.is_away(key):
                return key
        return min(self.order, key=lambda key: self._retry_at[key])

    def is_away(self, key: str) -> bool:
        """Return whether a mirror failed and no retry has succeeded since."""
        return key in self._retry_at

    def due_for_retry(self, now: float) -> list[str]:
        """Return the mirrors that are away and should be tried now."""
        return [key for key in self.order if self._retry_at.get(key, math.inf) <= now]

    def next_retry_at(self) -> float:
        """Return when the next retry is due; infinity if no mirror is away."""
        times = (self._retry_at[key] for key in self.order if self.is_away(key))
        return min(times, default=math.inf)

    def mark_failed(self, key: str, now: float) -> None:
        """Count a failure and double the wait until the next retry."""
        failures = min(16, self._failures.get(key, 0) + 1)
        self._failures[key] = failures
        wait = min(LONGEST_WAIT, FIRST_WAIT * 2 ** (failures - 1))
        self._retry_at[key] = now + wait * random.uniform(0.5, 1.5)

    def mark_reachable(self, key: str) -> None:
        """Use a mirror again, because it seems to answer; its failures still count."""
        self._retry_at.pop(key, None)

    def mark_success(self, key: str) -> None:
        """Forget a mirror's failures, because it did what it was asked."""
        self._retry_at.pop(key, None)
        self._failures.pop(key, None)


class FailoverClient:
    """Offer a `CoordinatorClient`'s methods over all mirrors of a site.

    Calls from the reporter's thread and from the thread that joins a run must not overlap. A thread
    of its own visits the other mirrors from the first report until `close`.
    """

    def __init__(
        self,
        membership: SiteMembership,
        identity: Identity,
        path: Path,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Load the mirror list that is stored at `path`, if it belongs to this membership."""
        self.identity = identity
        self._path = path
        self._clock = clock
        mirror = membership.mirror
        self._home_mirror = MirrorEntry.model_construct(
            key=mirror.key, url=membership.url, name=mirror.name, admitted=0.0
        )
        self._lock = threading.RLock()
        self._clients: dict[str, CoordinatorClient] = {}
        self._selector = MirrorSelector(identity.key)
        self._vouched = ""  # the digest of the list that our own mirror named
        self._refusals: dict[str, str] = {}  # by mirror, since the last success
        self._announcements: dict[str, JoinRequest] = {}  # by run
        self._joined: set[tuple[str, str]] = set()  # (mirror, run)
        self._new_peers: list[Peer] = []  # that mirrors named and no report has returned yet
        # (mirror, run) → digest of a version vector → digest of the anchor there
        self._anchors: dict[tuple[str, str], dict[str, str]] = {}
        self._wants_anchors = False  # whether the next visits ask our own mirror, too
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._next_announcement_at = 0.0  # monotonic
        self._thread: threading.Thread | None = None
        self.mirror_lists = self._load_mirror_lists()
        self._apply_mirror_list()
        self._current = self._selector.pick()

    @classmethod
    def from_state_dir(cls, state_dir: StateDir) -> "FailoverClient":
        """Return the client of the site where this machine is enrolled."""
        path = state_dir.path / MIRROR_LIST_FILE
        return cls(state_dir.membership, state_dir.identity, path)

    # ---- the methods of a CoordinatorClient

    @property
    def mirror(self) -> str:
        """Return the key of the mirror that the last call went to."""
        return self._current

    @property
    def keys(self) -> frozenset[str]:
        """Return the keys of all mirrors that may direct this machine."""
        return frozenset(self._selector.order) | {self._home_mirror.key}

    @property
    def url(self) -> str:
        """Return the address of the mirror that the last call went to."""
        return self._clients[self._current].url

    @property
    def body_bytes(self) -> int:
        """Return the bytes of all bodies that were sent and received."""
        return sum(client.body_bytes for client in list(self._clients.values()))

    def now(self) -> float:
        """Return seconds since 1970 by the clocks of all mirrors whose time is known.

        Each mirror gets requests that are signed with its own time. What this machine publishes is
        of this time: one mirror's wrong clock would make all peers hold its updates back.
        """
        with self._lock:
            clients = [self._clients[key] for key in self._selector.order]
        offsets = [client.clock_offset for client in clients]
        known = [offset for offset in offsets if offset is not None]
        return self._clock() + median_clock_offset(known)

    def select_mirror(self) -> str:
        """Decide which mirror the next calls go to; return its key."""
        with self._lock:
            self._current = self._selector.pick()
            return self._current

    @property
    def is_reachable(self) -> bool:
        """Return whether the mirror that would be selected now is not known to be away."""
        return not self._selector.is_away(self._selector.pick())

    def fetch_run(self, run: str) -> RunView:
        """Fetch a run by its id or slug."""
        return self._call_any(lambda client: client.fetch_run(run))

    def join_run(
        self,
        run: str,
        addresses: list[Address],
        hardware: HardwareView | None = None,
        purpose: JoinPurpose = JoinPurpose.TRAIN,
    ) -> JoinReply:
        """Join a run at the first mirror that answers."""
        self._announcements[run] = JoinRequest(
            version=__version__, addresses=addresses, hardware=hardware, purpose=purpose
        )
        reply = self._call_any(lambda client: self._announce(client, run))
        self._joined.add((self._current, run))
        self._read_directive(reply.directive)
        return reply

    def submit_checkup(self, checkup: Checkup) -> Checkup:
        """Submit what `barnraise doctor` found on this machine."""
        return self._call_any(lambda client: client.submit_checkup(checkup))

    def submit_manifest(self, run: str, manifest: TextManifest) -> RunView:
        """Sign and submit the manifest of a run's text."""
        return self._call_any(lambda client: client.submit_manifest(run, manifest))

    def discard_manifest(self, run: str) -> RunView:
        """Discard the prepared text of a draft."""
        return self._call_any(lambda client: client.discard_manifest(run))

    def send_reports(
        self,
        run: str,
        reports: list[Report],
        verdicts_after: int = 0,
        attestations: Sequence[Attestation] = (),
    ) -> ReportReply:
        """Send reports to the current mirror, joining the run there first if necessary."""
        announcement = self._announcements.get(run, JoinRequest(version=__version__, addresses=[]))
        self._announcements[run] = announcement.model_copy(
            update={"addresses": reports[-1].addresses}
        )
        self._start_visits()
        joined = self._join_current(run)
        reply = self._call_current(
            lambda client: client.send_reports(run, reports, verdicts_after, attestations)
        )
        self._read_directive(reply.directive)
        with self._lock:
            peers = [*reply.peers, *self._new_peers]
            self._new_peers = []
        if joined:
            peers += joined.peers
        ticket = reply.ticket or (joined and joined.ticket)
        return reply.model_copy(update={"ticket": ticket, "peers": peers[:MAX_PEERS]})

    def fetch_directive(self, run: str) -> ReportReply:
        """Fetch what a report would be answered, without sending one."""
        self._join_current(run)
        reply = self._call_current(lambda client: client.fetch_directive(run))
        self._read_directive(reply.directive)
        return reply

    def close(self) -> None:
        """Stop visiting mirrors and close the connections."""
        self._closed.set()
        self._wake.set()
        for client in list(self._clients.values()):
            client.close()

    # ---- confirmed anchors

    def confirmed_anchors(self, run: str) -> dict[str, str]:
        """Return the anchors that enough mirrors list as confirmed by two people.

        As with all that binds machines, half of the mirrors must: one of them alone could name
        weights of its choice. Mirrors answer one after the other, from the first report on.

        Returns:
            Digest of a version vector → digest of the anchor there, the newest first.
        """
        with self._lock:
            keys = [mirror.key for mirror in self._live_mirrors()]
            lists = [self._anchors.get((key, run), {}) for key in keys]
        votes = Counter(anchor for anchors in lists for anchor in anchors.items())
        needed = quorum(len(keys))
        return dict(anchor for anchor, count in votes.items() if count >= needed)

    def request_anchors(self) -> None:
        """Ask all mirrors again, in the background, which anchors are confirmed."""
        self._wants_anchors = True
        self.visit_mirrors_now()

    def _announce(self, client: CoordinatorClient, run: str) -> JoinReply:
        """Join a run at a mirror with what was announced last, and store its anchors."""
        reply = client.join_run(run, self._announcements[run])
        anchors = {anchor.vector: anchor.digest for anchor in reply.confirmed_anchors}
        with self._lock:
            self._anchors[client.mirror, run] = anchors
        return reply

    # ---- the mirror list

    @property
    def newest_list(self) -> MirrorList | None:
        """Return the newest mirror list, or None while there is none."""
        return parse_list(self.mirror_lists[-1]) if self.mirror_lists else None

    def receive_mirror_lists(self, lists: Sequence[SignedMirrorList]) -> None:
        """Adopt mirror lists from a mirror or a peer if they are newer and valid; else log why."""
        with self._lock:
            try:
                chain = merge_chain(self.mirror_lists, lists, self.now(), self._vouched)[
                    -MAX_LISTS_PER_MESSAGE:
                ]
            except MirrorListError as error:
                log.warning("%s", error)
                return
            if chain == self.mirror_lists:
                return
            self.mirror_lists = chain
            self._apply_mirror_list()
            self.visit_mirrors_now()
        log.info("the mirrors are now %s", ", ".join(mirror.url for mirror in self._live_mirrors()))
        try:
            write_atomically(
                self._path, MirrorLists(lists=chain).model_dump_json(indent=1).encode()
            )
        except OSError as error:
            log.error("the mirror list could not be stored: %s", error)

    def _load_mirror_lists(self) -> list[SignedMirrorList]:
        """Load the stored lists, if the mirror where this machine is enrolled is in them."""
        try:
            chain = MirrorLists.model_validate_json(self._path.read_bytes()).lists
            return chain if chain and self._home_mirror.key in parse_list(chain[-1]).keys else []
        except FileNotFoundError:
            return []
        except (ValidationError, MirrorListError, OSError) as error:
            log.warning(
                "%s cannot be used: the mirrors will be asked for it (%s)", self._path, error
            )
            return []

    def _live_mirrors(self) -> list[MirrorEntry]:
        newest = self.newest_list
        return newest.active if newest else [self._home_mirror]

    def _apply_mirror_list(self) -> None:
        """Rank the mirrors of the newest list and open a client for each that is new or moved."""
        mirrors = self._live_mirrors()
        self._selector.set_mirrors(mirrors)
        for mirror in mirrors:
            client = self._clients.get(mirror.key)
            if client is None or client.url != mirror.url.rstrip("/"):
                self._clients[mirror.key] = CoordinatorClient(
                    mirror.url, self.identity, mirror.key, self._clock
                )

    def _read_directive(self, signed: Signed) -> None:
        """Look for a newer mirror list if a directive names one."""
        try:
            directive = open_signed(signed, "directive", Directive, self._current)
        except MessageError:
            return  # the code that obeys the directive reports the error
        newest = self.newest_list
        if directive.mirror_list_version > (newest.version if newest else 0):
            if newest is None and directive.mirror_list_digest:
                self._vouched = directive.mirror_list_digest
            self.visit_mirrors_now()

    # ---- calls

    def _call_current(self, call: Callable[[CoordinatorClient], Answer]) -> Answer:
        """Call the current mirror.

        A refusal counts as no answer unless most mirrors refuse: one alone may lag behind.
        """
        key = self._current
        client = self._clients[key]
        try:
            answer = self._call_with_clock(client, call)
        except CoordinatorUnreachableError:
            self._mark_failed(key)
            raise
        except CoordinatorError as error:
            order = self._selector.order
            if error.status not in REFUSED_STATUSES:
                raise
            self._refusals[key] = str(error)
            self._joined = {pair for pair in self._joined if pair[0] != key}
            if 2 * len(self._refusals.keys() & set(order)) > len(order):
                raise
            self._mark_failed(key)
            raise CoordinatorUnreachableError(
                f"{client.url} refuses, and other mirrors may know better: {error}"
            ) from None
        self._selector.mark_success(key)
        self._refusals.clear()
        return answer

    def _call_with_clock(
        self, client: CoordinatorClient, call: Callable[[CoordinatorClient], Answer]
    ) -> Answer:
        """Call a mirror; ask the others at once if its clock differs from what was known."""
        before = client.clock_offset or 0.0
        try:
            return call(client)
        finally:
            if abs((client.clock_offset or 0.0) - before) > REQUEST_CLOCK_SECONDS:
                self.visit_mirrors_now()

    def _call_any(self, call: Callable[[CoordinatorClient], Answer]) -> Answer:
        """Call one mirror after the other until one answers.

        Raises:
            CoordinatorError: the first refusal or, if there was none, the first failure.
        """
        refusal: CoordinatorError | None = None
        for _ in range(len(self._selector.order)):
            self.select_mirror()
            try:
                answer = self._call_with_clock(self._clients[self._current], call)
            except CoordinatorUnreachableError as error:
                refusal = refusal or error
            except CoordinatorError as error:
                if refusal is None or isinstance(refusal, CoordinatorUnreachableError):
                    refusal = error
                if error.status not in REFUSED_STATUSES:
                    raise
            else:
                self._selector.mark_success(self._current)
                return answer
            self._mark_failed(self._current)
        assert refusal is not None
        raise refusal

    def _join_current(self, run: str) -> JoinReply | None:
        """Join the run at the current mirror, if this machine comes to it for the first time."""
        is_joined = (self._current, run) in self._joined
        is_only_mirror = len(self._selector.order) < 2
        if is_joined or is_only_mirror or run not in self._announcements:
            return None
        reply = self._call_current(lambda client: self._announce(client, run))
        self._joined.add((self._current, run))
        return reply

    # ---- visits to the other mirrors

    def visit_mirrors_now(self) -> None:
        """Visit all mirrors at once instead of at the next interval."""
        self._next_announcement_at = 0.0
        self._wake.set()

    def _start_visits(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._visit_mirrors, name="mirrors", daemon=True)
            self._thread.start()

    def _visit_mirrors(self) -> None:
        """Announce this machine to all mirrors now and then, and retry those that are away."""
        while not self._closed.is_set():
            self._wake.clear()
            now = time.monotonic()
            keys = self._selector.due_for_retry(now)
            wants_anchors, self._wants_anchors = self._wants_anchors, False
            if now >= self._next_announcement_at:
                keys = list(self._selector.order)
                self._next_announcement_at = now + ANNOUNCE_SECONDS * random.uniform(0.8, 1.2)
            for key in keys:
                if not self._closed.is_set():
                    self._visit_mirror(self._clients[key], wants_anchors)
            next_visit_at = min(self._next_announcement_at, self._selector.next_retry_at())
            self._wake.wait(max(0.0, next_visit_at - time.monotonic()))

    def _mark_failed(self, key: str) -> None:
        self._selector.mark_failed(key, time.monotonic())
        self._wake.set()  # the visiting thread has to plan a retry

    def _visit_mirror(self, client: CoordinatorClient, wants_anchors: bool) -> None:
        """Ask a mirror for a newer list, and announce this machine to it."""
        newest = self.newest_list
        key = client.mirror
        try:
            lists = client.fetch_mirror_lists(newest.version if newest else 0).lists
            if lists:
                self.receive_mirror_lists(lists)
            for run in list(self._announcements):
                if wants_anchors or key != self._current or self._selector.is_away(key):
                    reply = self._announce(client, run)
                    with self._lock:
                        self._new_peers = [*reply.peers, *self._new_peers][:MAX_PEERS]
            self._selector.mark_reachable(key)
        except CoordinatorError as error:
            self._selector.mark_failed(key, time.monotonic())
            log.debug("%s", error)
