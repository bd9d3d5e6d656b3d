"""Report to the coordinator: spool reports on disk, send them, drop them once they are safe there.

Training never waits for any of this. `Reporter` is a thread of its own; the training loop leaves
its latest figures with `update_figures` and reads `directive` whenever it likes.
"""

import logging
import random
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from barnraise import __version__
from barnraise.coordinator_client.failover import FailoverClient
from barnraise.coordinator_client.machine_monitor import MachineMonitor
from barnraise.durable_io import transaction
from barnraise.errors import (
    CoordinatorError,
    CoordinatorUnreachableError,
    MessageError,
    StateError,
)
from barnraise.protocol.clock import is_clock_wrong
from barnraise.protocol.coordinator_messages import Attestation, Directive, ReportReply
from barnraise.protocol.messages import Peer, Signed
from barnraise.protocol.reports import (
    MAX_POINTS,
    NO_FIGURES,
    MeasuredLoss,
    Report,
    SamplesView,
)
from barnraise.protocol.signing import open_signed
from barnraise.protocol.verdicts import SignedVerdict

log = logging.getLogger("barnraise.coordinator_client.reporter")

MAX_SPOOLED = 100_000  # reports, while no coordinator answers: eleven days at one in ten seconds
BATCH_REPORTS = 43  # of one request
QUEUED_POINTS = 4096  # that wait for the next reports
LONGEST_PAUSE = 60.0  # seconds between two tries when nobody answers
# Seconds the mark may stand still before everything above it is sent again.
UNCONFIRMED_SECONDS = 60.0
FINAL_STATUSES = (403, 404, 409, 410)  # this machine has no place in the run
ORPHANED_SECONDS = 3600.0  # without any answer; then peers accept tickets that expired recently
# Seconds between two looks at the directive, where reports are sent less often.
DIRECTIVE_SECONDS = 30.0
GOODBYE_SECONDS = 10.0  # that a finished worker gives the coordinator to accept what is spooled


@dataclass
class VerdictBatch:
    """Verdicts that a mirror sent, and its number of the last of them."""

    waiting: list[SignedVerdict] = field(default_factory=list)
    until: int = 0
    mirror: str = ""


class ReportSpool:
    """Reports that no coordinator has confirmed, in order, on disk.

    Sequence numbers continue where they stopped, also after a restart.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises StateError when it is not a spool."""
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA cache_size=-256")  # KiB: reports may wait for days
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS report "
                "(seq INTEGER PRIMARY KEY AUTOINCREMENT, body TEXT NOT NULL)"
            )
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise StateError(
                f"{path} cannot be used ({error}); remove it: only unsent reports are lost"
            ) from None

    def append(self, report: Report) -> None:
        """Store a report under the next number; dropped reports count, too."""
        with transaction(self._db):
            seq = self._db.execute(
                "INSERT INTO report (body) VALUES (?)", (report.model_dump_json(),)
            ).lastrowid
            assert seq is not None
            self._db.execute("DELETE FROM report WHERE seq <= ?", (seq - MAX_SPOOLED,))

    def read_after(self, seq: int, limit: int = BATCH_REPORTS) -> list[Report]:
        """Read the oldest reports with numbers above `seq`."""
        rows = self._db.execute(
            "SELECT seq, body FROM report WHERE seq > ? ORDER BY seq LIMIT ?", (seq, limit)
        )
        return [
            Report.model_validate_json(body).model_copy(update={"seq": seq})
            for seq, body in rows.fetchall()
        ]

    @property
    def last_seq(self) -> int:
        """Return the highest number that was ever used."""
        row = self._db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'report'").fetchone()
        return row[0] if row else 0

    def skip_to(self, mark: int) -> None:
        """Continue after number `mark`, if the coordinator knows more reports than a new spool."""
        if mark > self.last_seq:
            with transaction(self._db):
                self._db.execute("DELETE FROM sqlite_sequence WHERE name = 'report'")
                self._db.execute(
                    "INSERT INTO sqlite_sequence (name, seq) VALUES ('report', ?)", (mark,)
                )

    def drop_through(self, mark: int) -> None:
        """Delete the reports with numbers up to `mark`."""
        self._db.execute("DELETE FROM report WHERE seq <= ?", (mark,))

    def close(self) -> None:
        """Close the database."""
        self._db.close()


class Reporter:
    """Send a report every `directive.report_every` seconds, after all that was spooled before it.

    `directive` is the coordinator's latest, `signed_directive` the same as it was received: proof
    for peers that cannot reach a coordinator. `refused` is the coordinator's sentence once it
    denies this machine its place in the run; the training loop ends on it. `source_ip` is the IP
    address from which the coordinator receives the reports; "" if it is unknown.
    """

    def __init__(
        self,
        coordinator: FailoverClient,
        run: str,
        machine: str,
        directive: Directive,
        spool: ReportSpool,
        monitor: MachineMonitor | None = None,
    ) -> None:
        self.directive = directive
        self.signed_directive: Signed | None = None
        self.refused: str | None = None
        self._coordinator = coordinator
        self._run = run
        self._machine = machine
        self._spool = spool
        self._monitor = monitor
        self._lock = threading.Lock()
        values: dict[str, Any] = dict(NO_FIGURES) | {"version": __version__}
        self._newest = Report(seq=1, at=0.0, addresses=[], **values)
        self._points: deque[MeasuredLoss] = deque(maxlen=QUEUED_POINTS)
        self._verdicts_after = 0  # the mirror's number of the last verdict that is applied here
        self._attestations: tuple[Attestation, ...] = ()
        self._samples: SamplesView | None = None  # for the next report
        self._peers: list[Peer] = []
        self.source_ip = ""
        self._ticket: Signed | None = None
        self._verdicts: VerdictBatch | None = None
        self._sent_seq = 0  # the last number sent since this start; the mark lags behind it
        self._mark = 0  # the coordinator's database holds all reports up to this number
        self._reporting_to = coordinator.select_mirror()  # the mirror these two numbers are about
        self._directed_by = ""  # the mirror whose directive is obeyed
        self._answered_at = time.monotonic()
        self._mark_moved_at = self._answered_at
        self._clock_is_wrong = False
        self._wake = threading.Event()  # ends the wait for the next report
        self._has_points = False  # whether a loss was measured since the start
        self._give_up_at: float | None = None  # when to stop trying, once stopped
        self._thread = threading.Thread(target=self._run_thread, name="reporter", daemon=True)

    def start(self) -> None:
        """Start the thread that sends reports."""
        self._thread.start()

    def stop(self, seconds: float | None = None) -> None:
        """Spool one last report of the latest figures, and try to deliver the spool.

        It tries for so many seconds, or for GOODBYE_SECONDS.
        """
        seconds = GOODBYE_SECONDS if seconds is None else seconds
        self._give_up_at = time.monotonic() + seconds
        self._wake.set()
        if self._thread.ident is None:
            self._spool.close()
        else:
            # A thread that still waits for an answer is left behind: everything is on disk.
            self._thread.join(timeout=seconds + 1)

    def update_figures(self, report: Report) -> None:
        """Set the figures of the next report; their points are queued."""
        with self._lock:
            self._newest = report
            self._samples = report.samples or self._samples
            self._points.extend(report.points)
        if report.points and not self._has_points:
            # People wait for the first loss of a machine: it is sent at once.
            self._has_points = True
            self._wake.set()

    def confirm_verdicts(self, batch: VerdictBatch) -> None:
        """Record that a mirror's verdicts are applied: it sends the following ones."""
        with self._lock:
            if batch.mirror == self._reporting_to:
                self._verdicts_after = max(self._verdicts_after, batch.until)

    @property
    def has_attestations(self) -> bool:
        """Return whether attestations wait for the next report."""
        return bool(self._attestations)

    def set_attestations(self, attestations: Sequence[Attestation]) -> None:
        """Send these attestations with the next report, once."""
        self._attestations = tuple(attestations)

    def pop_ticket(self) -> Signed | None:
        """Return the ticket that came since the last call, if there is one."""
        with self._lock:
            ticket = self._ticket
            self._ticket = None
            return ticket

    def pop_peers(self) -> list[Peer]:
        """Return the peers that the latest answer named since the last call."""
        with self._lock:
            peers = self._peers
            self._peers = []
            return peers

    def pop_verdicts(self) -> VerdictBatch | None:
        """Return the verdicts since the last call; the caller checks who signed them."""
        with self._lock:
            batch = self._verdicts
            self._verdicts = None
            return batch

    def unsent_reports(self) -> list[Report]:
        """Return the oldest spooled reports, those included that are sent but not confirmed."""
        return self._spool.read_after(0)

    @property
    def is_orphaned(self) -> bool:
        """Return whether no coordinator has answered for an hour."""
        return time.monotonic() - self._answered_at > ORPHANED_SECONDS

    def _run_thread(self) -> None:
        with closing(self._spool):
            self._report_until_stopped()

    def _report_until_stopped(self) -> None:
        failures = 0
        while True:
            self._wake.clear()  # before the look at what may have set it
            stopping = self._give_up_at is not None
            self._spool_report(self._build_report())
            failures = 0 if self._try_to_deliver(failures) else failures + 1
            if stopping:
                return
            interval = self.directive.report_every
            pause = self._spool_while_unreachable(backoff(interval, failures))
            if failures and self._coordinator.is_reachable:
                # Another mirror takes over: report soon, but not all machines at once.
                failures = 0
                pause = interval * random.uniform(0.3, 1.0)
            self._wait_for_next_report(max(0.0, pause), fetch_directives=not failures)

    def _try_to_deliver(self, failures: int) -> bool:
        """Deliver the spool; return whether that succeeded. `failures`: in a row, so far."""
        try:
            self._deliver()
        except CoordinatorUnreachableError as error:
            if failures == 0:
                log.warning("%s; reports wait on disk", error)
        except CoordinatorError as error:
            self._handle_refusal(error)
        except sqlite3.Error as error:
            log.error("the spool of reports cannot be used: %s", error)
        else:
            return True
        return False

    def _handle_refusal(self, error: CoordinatorError) -> None:
        log.error("the coordinator refuses: %s", error)
        if error.status in FINAL_STATUSES:
            self.refused = str(error)

    def _spool_while_unreachable(self, pause: float) -> float:
        """Wait for most of `pause`, with a report each interval; return the rest of it.

        The chart then has no hole for the time in which nobody answered.
        """
        interval = self.directive.report_every
        while pause > interval and not self._coordinator.is_reachable:
            if self._wake.wait(interval):
                break
            pause -= interval
            self._spool_report(self._build_report())
        return pause

    def _wait_for_next_report(self, seconds: float, fetch_directives: bool) -> None:
        """Wait, but fetch the directive now and then: a revocation does not wait for a report."""
        while seconds > DIRECTIVE_SECONDS and not self._wake.wait(DIRECTIVE_SECONDS):
            seconds -= DIRECTIVE_SECONDS
            if not fetch_directives:
                continue
            started = time.monotonic()
            try:
                self._apply_reply(self._coordinator.fetch_directive(self._run), started)
                self._answered_at = time.monotonic()
            except CoordinatorUnreachableError as error:
                log.debug("%s; the next report warns about it", error)
            except CoordinatorError as error:
                self._handle_refusal(error)
        self._wake.wait(seconds)

    def _spool_report(self, report: Report) -> None:
        """Store a report. A full disk costs this report, and neither the thread nor training."""
        try:
            self._spool.append(report)
        except sqlite3.Error as error:
            log.error("a report could not be stored: %s", error)

    def _build_report(self) -> Report:
        with self._lock:
            count = min(MAX_POINTS, len(self._points))
            news = {
                "at": self._coordinator.now(),
                "points": [self._points.popleft() for _ in range(count)],
                "samples": self._samples,
            }
            self._samples = None
            return self._newest.model_copy(update=news | self._observe_machine())

    def _observe_machine(self) -> dict[str, Any]:
        """Return the fields of a report that describe the machine, for its owner alone."""
        if self._monitor is None:
            return {}
        return {
            "system": self._monitor.measure_system(),
            "limits": self._monitor.limits,
            "log": self._monitor.pop_lines(),
        }

    def _deliver(self) -> None:
        """Send what was not sent yet; after a restart, everything that is spooled.

        The mark follows the coordinator's database by seconds. If it stands still, what was sent
        got lost behind the API (for example when its queue was restarted) and is sent again: the
        database recognises each report by its number.
        """
        mirror = self._coordinator.select_mirror()
        if mirror != self._reporting_to:  # another mirror knows nothing of what the last one has
            self._reporting_to = mirror
            self._sent_seq = 0
            self._mark = 0
            self._verdicts_after = 0
            self._mark_moved_at = time.monotonic()
        if self._sent_seq and time.monotonic() - self._mark_moved_at > UNCONFIRMED_SECONDS:
            self._sent_seq = 0
            self._mark_moved_at = time.monotonic()
        while batch := self._spool.read_after(self._sent_seq):
            attestations = self._attestations
            self._attestations = ()
            started = time.monotonic()
            reply = self._coordinator.send_reports(
                self._run, batch, self._verdicts_after, attestations
            )
            self._answered_at = time.monotonic()
            self._apply_reply(reply, started)
            if reply.acknowledged > self._mark or reply.acknowledged == self._spool.last_seq:
                self._mark = reply.acknowledged
                self._mark_moved_at = self._answered_at
            self._spool.drop_through(reply.acknowledged)
            self._sent_seq = batch[-1].seq
            if self._give_up_at and time.monotonic() > self._give_up_at:
                return

    def _apply_reply(self, reply: ReportReply, started: float) -> None:
        """Adopt the directive if it is newer, and queue the ticket, peers and rulings.

        `started` is the monotonic time of the request.
        """
        try:
            directive = open_signed(
                reply.directive, "directive", Directive, self._coordinator.mirror
            )
        except MessageError as error:
            log.error("%s", error)
            return
        is_for_us = directive.run == self._run and directive.machine == self._machine
        # Mirrors' clocks differ: only the times of one mirror can be compared.
        is_newer = (
            directive.issued >= self.directive.issued or reply.directive.key != self._directed_by
        )
        if is_for_us and is_newer:
            self._check_clock(directive.issued, started)
            self._directed_by = reply.directive.key
            self.directive = directive
            self.signed_directive = reply.directive
        with self._lock:
            self._ticket = reply.ticket or self._ticket
            self._peers = reply.peers or self._peers
            self.source_ip = reply.source_ip or self.source_ip
            if reply.verdicts:
                self._verdicts = VerdictBatch(
                    list(reply.verdicts), reply.verdicts_until, self._reporting_to
                )

    def _check_clock(self, site_time: float, started: float) -> None:
        """Log it, once until it is right again, when this machine's clock is not the site's."""
        round_trip = time.monotonic() - started
        warning = clock_warning(self._coordinator.now() - site_time, round_trip)
        if warning and not self._clock_is_wrong:
            log.warning("%s", warning)
        self._clock_is_wrong = bool(warning)


def clock_warning(seconds_ahead: float, round_trip: float = 0.0) -> str:
    """Return what a difference of clocks may mean for this machine's updates; "" if none."""
    if not is_clock_wrong(seconds_ahead, round_trip):
        return ""
    if seconds_ahead > 0:
        difference = f"is {seconds_ahead:,.0f} seconds ahead of"
        effect = "peers hold its updates back for that time"
    else:
        difference = f"is {-seconds_ahead:,.0f} seconds behind"
        effect = "its updates may count with fewer tokens than it trained"
    return (
        f"this machine's clock {difference} the coordinator's. If this machine's is the wrong one, "
        f"{effect}: set it"
    )


def backoff(interval: float, failures: int) -> float:
    """Return the seconds until the next try.

    Each failure in a row doubles the interval, up to LONGEST_PAUSE, with a random spread.
    """
    if not failures:
        return interval
    return min(LONGEST_PAUSE, interval * 2 ** min(failures, 16)) * random.uniform(0.8, 1.2)
