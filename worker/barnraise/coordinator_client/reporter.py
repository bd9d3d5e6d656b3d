"""Reports to the coordinator: spooled on disk, sent when it answers, dropped once it says they are safe.

Training never waits for any of this. `Reporter` is a thread of its own; the loop leaves its latest numbers with
`note`, and reads `directive` when it likes.
"""

import logging
import random
import sqlite3
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path

from barnraise import __version__
from barnraise.coordinator_client.client import Coordinator
from barnraise.errors import CoordinatorError, CoordinatorGone, MessageError, StateError
from barnraise.protocol.coordinator_messages import Attestation, Directive, ReportReply
from barnraise.protocol.enums import Activity
from barnraise.protocol.messages import Peer, Signed
from barnraise.protocol.reports import CheckpointView, ExchangeView, LossPoint, PlanView, Report
from barnraise.protocol.signing import open_signed
from barnraise.protocol.verdicts import SignedVerdict
from barnraise.sqlite import transaction

log = logging.getLogger("barnraise.coordinator_client.reporter")

SPOOLED = 100_000  # reports kept while no coordinator answers; at one in ten seconds, eleven days
BATCH = 50
POINTS = 64  # of one report
SLOWEST = 60.0  # seconds between two tries at most, when nobody answers
UNCONFIRMED = 60.0  # seconds the mark may stand still before everything above it is posted again
FINAL = (403, 404, 409, 410)  # answers that mean this machine has no place in the run any more
ORPHANED = 3600.0  # seconds without any answer after which peers go easy on expired tickets
LISTEN = (
    30.0  # seconds between two looks at what the coordinator has decided, where reports are rarer
)
GOODBYE = 10.0  # seconds a leaving worker gives the coordinator to take what waits


@dataclass(frozen=True)
class Numbers:
    """What the loop knows of itself at one moment. Tokens per second; bytes and counts since the folder's birth.
    `step_seconds`: of one step as measured, to hold against what `plan` predicts."""

    activity: Activity = Activity.PREPARING
    incarnation: str = "0" * 16
    addresses: tuple[str, ...] = ()
    step: int = 0
    tokens: int = 0
    ledger_tokens: int = 0
    rate: float = 0.0
    updates_sent: int = 0
    updates_received: int = 0
    peers: int = 0
    peer_bytes_sent: int = 0
    peer_bytes_received: int = 0
    vector: str = "0" * 64
    anchor: str | None = None
    plan: PlanView | None = None
    step_seconds: float | None = None
    exchange: ExchangeView | None = None
    checkpoint: CheckpointView | None = None
    points: tuple[LossPoint, ...] = field(default=(), compare=False)  # new ones only


class Spool:
    """Reports that no coordinator has confirmed, in order, on disk. Numbers go on where they stopped."""

    def __init__(self, path: Path):
        """Raises StateError when the file is not one of ours."""
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS report (seq INTEGER PRIMARY KEY AUTOINCREMENT, body TEXT NOT NULL)"
            )
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise StateError(
                f"{path} cannot be used ({error}); remove it: only unsent reports are lost"
            ) from None

    def add(self, report: Report) -> None:
        """Gives the report its number: one more than any before it, dropped ones included."""
        with transaction(self._db):
            seq = self._db.execute(
                "INSERT INTO report (body) VALUES (?)", (report.model_dump_json(),)
            ).lastrowid
            self._db.execute("DELETE FROM report WHERE seq <= ?", (seq - SPOOLED,))

    def after(self, seq: int, limit: int = BATCH) -> list[Report]:
        """The oldest reports numbered above `seq`."""
        rows = self._db.execute(
            "SELECT seq, body FROM report WHERE seq > ? ORDER BY seq LIMIT ?", (seq, limit)
        )
        return [
            Report.model_validate_json(body).model_copy(update={"seq": seq})
            for seq, body in rows.fetchall()
        ]

    @property
    def last(self) -> int:
        """The highest number ever given."""
        row = self._db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'report'").fetchone()
        return row[0] if row else 0

    def begin_after(self, mark: int) -> None:
        """Numbers start past `mark`: in a new folder, the coordinator knows more reports than the spool does."""
        if mark > self.last:
            with transaction(self._db):
                self._db.execute("DELETE FROM sqlite_sequence WHERE name = 'report'")
                self._db.execute(
                    "INSERT INTO sqlite_sequence (name, seq) VALUES ('report', ?)", (mark,)
                )

    def drop(self, mark: int) -> None:
        self._db.execute("DELETE FROM report WHERE seq <= ?", (mark,))

    def __len__(self) -> int:
        return self._db.execute("SELECT count(*) FROM report").fetchone()[0]

    def close(self) -> None:
        self._db.close()


class Reporter:
    """Sends a report every `directive.report_every` seconds, and whatever was spooled before it.

    `directive` is the coordinator's latest. `refused` is its sentence when it will not have this machine in the run any
    more: the loop ends on it. `heeds` are the digests of the verdicts this machine takes out, `witnessed`
    what goes with the next post alone: the loop's to set.
    """

    def __init__(
        self, coordinator: Coordinator, run: str, machine: str, directive: Directive, spool: Spool
    ):
        self.directive = directive
        self.refused: str | None = None
        self.heeds: tuple[str, ...] = ()
        self.witnessed: tuple[Attestation, ...] = ()
        self._coordinator, self._run, self._machine, self._spool = coordinator, run, machine, spool
        self._lock = threading.Lock()
        self._numbers = Numbers()
        self._points: deque[LossPoint] = deque(maxlen=4096)
        self.signed_directive: Signed | None = (
            None  # as it came: proof, for peers that cannot reach a coordinator
        )
        self._peers: list[Peer] = []
        self._ticket: Signed | None = None
        self._rulings: list[SignedVerdict] = []
        self._posted = 0  # the last seq posted since this start; the mark lags behind it
        self._mark = 0
        self._told = coordinator.turn()  # the mirror that these two are about
        self._directed_by = ""  # …and the one whose directive is heeded
        self._heard = self._moved = time.monotonic()
        self._wake = threading.Event()
        self._until: float | None = None  # when to stop trying, once stopped
        self._thread = threading.Thread(target=self._work, name="reporter", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Spools one last report of what was last noted, and tries for GOODBYE seconds to deliver what waits."""
        self._until = time.monotonic() + GOODBYE
        self._wake.set()
        if self._thread.ident is None:
            self._spool.close()
        else:
            self._thread.join(
                timeout=GOODBYE + 1
            )  # one that waits for an answer is left behind: all is on disk

    def note(self, numbers: Numbers) -> None:
        with self._lock:
            self._numbers = replace(numbers, points=())
            self._points.extend(numbers.points)

    def taken_ticket(self) -> Signed | None:
        with self._lock:
            taken, self._ticket = self._ticket, None
            return taken

    def taken_peers(self) -> list[Peer]:
        with self._lock:
            taken, self._peers = self._peers, []
            return taken

    def taken_rulings(self) -> list[SignedVerdict]:
        """As they came: whoever heeds them looks at who signed them."""
        with self._lock:
            taken, self._rulings = self._rulings, []
            return taken

    @property
    def orphaned(self) -> bool:
        return time.monotonic() - self._heard > ORPHANED

    def _work(self) -> None:
        try:
            self._report_on()
        finally:
            self._spool.close()

    def _report_on(self) -> None:
        failures = 0
        while True:
            stopping = self._wake.is_set()
            self._keep(self._report())
            try:
                self._deliver()
                failures = 0
            except CoordinatorGone as error:
                failures += 1
                if failures == 1:
                    log.warning("%s; reports wait on disk", error)
            except CoordinatorError as error:
                log.error("the coordinator refuses: %s", error)
                failures += 1
                if error.status in FINAL:
                    self.refused = str(error)
            except sqlite3.Error as error:
                log.error("the spool of reports cannot be used: %s", error)
                failures += 1
            if stopping:
                return
            every = self.directive.report_every
            pause = backoff(every, failures)
            # A report is written every interval even while nobody answers, so that the chart has no hole afterwards.
            while pause > every and not self._coordinator.ready and not self._wake.wait(every):
                pause -= every
                self._keep(self._report())
            if (
                failures and self._coordinator.ready
            ):  # another mirror: soon, and not all machines at once
                failures, pause = 0, every * random.uniform(0.3, 1.0)
            self._listen_for(max(0.0, pause), listens=not failures)

    def _listen_for(self, seconds: float, listens: bool) -> None:
        """Until the next report is due. A revocation does not wait for that, however rare reports are."""
        while seconds > LISTEN and not self._wake.wait(LISTEN):
            seconds -= LISTEN
            if not listens:
                continue
            try:
                self._take(self._coordinator.listen(self._run))
                self._heard = time.monotonic()
            except CoordinatorGone as error:
                log.debug("%s; the next report says so aloud", error)
            except CoordinatorError as error:
                log.error("the coordinator refuses: %s", error)
                if error.status in FINAL:
                    self.refused = str(error)
        self._wake.wait(seconds)

    def _keep(self, report: Report) -> None:
        """A full disk costs this report, and neither the thread nor the training."""
        try:
            self._spool.add(report)
        except sqlite3.Error as error:
            log.error("a report could not be kept: %s", error)

    def _report(self) -> Report:
        with self._lock:
            n = self._numbers
            points = [self._points.popleft() for _ in range(min(POINTS, len(self._points)))]
        return Report(
            seq=1,  # the spool numbers it
            at=self._coordinator.now(),
            version=__version__,
            points=points,
            **{name: getattr(n, name) for name in Numbers.__dataclass_fields__ if name != "points"},
        )

    def _deliver(self) -> None:
        """Posts what was not posted yet; after a restart, or when nothing was confirmed for long, all that waits.

        The mark follows the coordinator's database by seconds. If it stands still, what was posted got lost behind the
        API (its queue was restarted, say), and is posted again: the database knows each report by its number.
        """
        if (
            mirror := self._coordinator.turn()
        ) != self._told:  # it knows of nothing that only the last one was told
            self._told, self._posted, self._mark, self._moved = mirror, 0, 0, time.monotonic()
        if self._posted and time.monotonic() - self._moved > UNCONFIRMED:
            self._posted, self._moved = 0, time.monotonic()
        while batch := self._spool.after(self._posted):
            witnessed, self.witnessed = self.witnessed, ()
            reply = self._coordinator.report(self._run, batch, self.heeds, witnessed)
            self._heard = time.monotonic()
            self._take(reply)
            if reply.acknowledged > self._mark or reply.acknowledged == self._spool.last:
                self._mark, self._moved = reply.acknowledged, self._heard
            self._spool.drop(reply.acknowledged)
            self._posted = batch[-1].seq
            if self._until and time.monotonic() > self._until:
                return

    def _take(self, reply: ReportReply) -> None:
        try:
            directive = open_signed(
                reply.directive, "directive", Directive, self._coordinator.mirror
            )
        except MessageError as error:
            log.error("%s", error)
            return
        if (
            directive.run == self._run
            and directive.machine == self._machine
            and (
                directive.issued >= self.directive.issued
                or reply.directive.key != self._directed_by
            )
        ):
            self._directed_by = (
                reply.directive.key
            )  # mirrors' clocks differ: only one's own times can be compared
            self.directive, self.signed_directive = directive, reply.directive
        with self._lock:
            self._ticket = reply.ticket or self._ticket
            self._peers = reply.peers or self._peers
            self._rulings = reply.verdicts or self._rulings


def backoff(every: float, failures: int) -> float:
    """Seconds until the next try: the interval, doubled by each failure in a row up to SLOWEST, spread a little."""
    if not failures:
        return every
    return min(SLOWEST, every * 2 ** min(failures, 16)) * random.uniform(0.8, 1.2)
