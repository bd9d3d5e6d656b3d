"""Move the queue into Postgres, so that nothing is lost or counted twice.

Rows and high-water marks commit together.

An entry leaves the queue only after its transaction has committed. If the process dies in between,
the entry is read again and recognised by its reports' numbers. A machine's mark is the number up to
which Postgres holds every report; a report beyond a gap is stored at once and remembered by a
receipt. Machines post everything above a mark that does not move, which closes gaps. A gap that
stays open for ten minutes is given up: the machine has lost those reports itself.
"""

import json
import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from django.db import DataError, IntegrityError, connection, transaction
from django.db.models import Max
from django.dispatch import Signal
from django.utils import timezone
from pydantic import ValidationError

from barnraise.protocol.coordinator_messages import Attestation
from barnraise.protocol.enums import Activity
from barnraise.protocol.reports import Report
from coordinator.fleet.models import Membership
from coordinator.fleet.run_authors import count_incarnation_updates
from coordinator.lib import counters
from coordinator.lib.valkey import valkey_client
from coordinator.telemetry import checkpoints, events, machine_history, samples
from coordinator.telemetry.models import BUCKET_SECONDS, BUCKET_WIDTHS, LossPoint, ReportReceipt
from coordinator.telemetry.report_queue import PENDING_KEY, last_training_loss

log = logging.getLogger("coordinator.telemetry")

# Sent within the transaction that stores reports. `attestations`: each membership with its
# attestations.
attestations_received = Signal()

LOCK = 0x62726E72  # an arbitrary number for the advisory lock of the draining process
MAX_ENTRIES = 1000  # in one transaction
MAX_CHUNK = 100  # entries that are read from the queue at once
MAX_READ_CHARS = 16 << 20  # of the entries of one transaction, as far as a chunk allows
GAP_MINUTES = 10
MAX_BEYOND = 1000  # reports beyond gaps that are remembered of a machine; then a gap is given up
WAIT_SECONDS = 5.0
TOTALS = ("tokens", "updates_sent", "updates_received", "peer_bytes_sent", "peer_bytes_received")
GROWN = ("reports", "rate_sum", *TOTALS, "lag_sum")
MAX_LAG = 1_000_000  # updates that one report may state
MAX_GROWTH = 1 << 50  # of a total in one report, so that sums stay within 63 bits
MAX_SUM = (1 << 63) - 1  # that a column holds
Sums = dict[tuple, dict[str, float]]  # (membership, its finest bucket) → how much grew there
FIXED = ("id", "run", "machine", "mirror", "joined")
CHANGING = [f.name for f in Membership._meta.concrete_fields if f.name not in FIXED]


def drain_queue(*, wait: bool = False) -> int:
    """Move the queued reports into Postgres; return how many entries.

    With `wait`, wait a few seconds if another process drains the queue now, instead of returning 0.
    """
    moved = 0
    with _drain_lock(wait) as is_alone:
        while is_alone:
            raw = _read_entries()
            if not raw:
                break
            with transaction.atomic():
                _store_all(raw)
            with valkey_client().pipeline(transaction=False) as pipe:
                for text in raw:
                    pipe.lrem(
                        PENDING_KEY, 1, text
                    )  # by value: after a restart the queue may not begin where it did
                pipe.execute()
            moved += len(raw)
            counters.increment("barnraise_reports_total", by=len(raw))
    return moved


def _read_entries() -> list[str]:
    """Read the queue's first entries; each may be as large as a request."""
    raw: list[str] = []
    size = 0
    while len(raw) < MAX_ENTRIES and size < MAX_READ_CHARS:
        chunk: Any = valkey_client().lrange(PENDING_KEY, len(raw), len(raw) + MAX_CHUNK - 1)
        raw += chunk
        size += sum(map(len, chunk))
        if len(chunk) < MAX_CHUNK:
            break
    return raw


@contextmanager
def _drain_lock(wait: bool) -> Iterator[bool]:
    """Yield whether this process may drain the queue.

    The lock belongs to the database session: it outlives transactions, and is released when the
    process dies.
    """
    patience = time.monotonic() + (WAIT_SECONDS if wait else 0)
    is_alone = _try_lock()
    while not is_alone and time.monotonic() < patience:
        time.sleep(0.05)
        is_alone = _try_lock()
    try:
        yield is_alone
    finally:
        if is_alone:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_advisory_unlock(%s)", [LOCK])


def _try_lock() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(%s)", [LOCK])
        return bool(_first_row(cursor)[0])


class SentReports(NamedTuple):
    """What a machine has sent in a batch of entries."""

    reports: list[Report]
    attestations: list[Attestation]  # what it witnessed
    received: float  # when the last of them came, in seconds since 1970
    # Seconds from then to its next report, as it was answered; 0 if it was not.
    interval: float = 0.0


Sent = dict[UUID, SentReports]  # membership → what it has sent


def _first_row(cursor: Any) -> tuple[Any, ...]:
    """Return the first row of a statement that always returns one."""
    return cursor.fetchone()


def _store_all(raw: list[str]) -> None:
    reports: dict[UUID, list[Report]] = defaultdict(list)
    witnessed: dict[UUID, list[Attestation]] = defaultdict(list)
    received: dict[UUID, tuple[float, float]] = {}
    for text in raw:
        try:
            entry = json.loads(text)
            pk = UUID(entry["membership"])
            when = float(entry["received"]), float(entry.get("interval", 0.0))
            parsed = [Report.model_validate(r) for r in entry["reports"]]
            attested = [Attestation.model_validate(t) for t in entry.get("attestations", ())]
        except (ValueError, KeyError, TypeError, AttributeError, ValidationError) as error:
            log.error(
                "an entry of the queue is unreadable and was dropped: %.200s: %.200s", error, text
            )
            continue
        reports[pk] += parsed
        witnessed[pk] += attested
        received[pk] = when
    sent = {pk: SentReports(reports[pk], witnessed[pk], *received[pk]) for pk in sorted(reports)}
    if sent and not _try_store(sent):
        for pk, theirs in sent.items():
            if not _try_store({pk: theirs}):
                log.error("reports of membership %s were dropped: Postgres refuses them", pk)


def _try_store(sent: Sent) -> bool:
    try:
        with transaction.atomic():
            store_reports(sent)
    except (DataError, IntegrityError) as error:
        log.warning("Postgres refuses reports of %d machines: %s", len(sent), error)
        return False
    return True


def store_reports(sent: Sent) -> None:
    """Store machines' reports, in any order and duplication, within the caller's transaction.

    The number of statements does not depend on the number of machines: at hundreds of reports a
    second a dozen statements for each would keep two cores busy.
    """
    # In one order everywhere: row locks cannot meet head on.
    locked = Membership.objects.select_for_update().filter(pk__in=sent).order_by("pk")
    members = list(locked.prefetch_related("run", "machine"))
    if len(members) < len(sent):
        log.info(
            "reports of %d memberships came after these were deleted", len(sent) - len(members)
        )
    stored_beyond: dict[UUID, dict[int, datetime]] = defaultdict(dict)
    for pk, seq, received in ReportReceipt.objects.filter(membership__in=sent).values_list(
        "membership", "seq", "received"
    ):
        stored_beyond[pk][seq] = received
    here = {
        m.pk: {
            n
            for n in (*stored_beyond[m.pk], *(r.seq for r in sent[m.pk].reports))
            if n > m.high_water_mark
        }
        for m in members
    }
    safe_elsewhere = _safe_elsewhere(members, here)
    changed = next_change_stamp()
    points: list[LossPoint] = []
    sums: Sums = defaultdict(lambda: defaultdict(float))
    receipts: list[ReportReceipt] = []
    happened: list[events.RunEvent] = []
    announcements: list[tuple[Membership, list[Report]]] = []
    attestations: list[tuple[Membership, list[Attestation]]] = []
    readings: list[tuple[Membership, list[tuple[Report, float]]]] = []
    for member in members:
        reports, attested, received, member.report_interval = sent[member.pk]
        fresh = {
            r.seq: r
            for r in reports
            if r.seq > member.high_water_mark and r.seq not in stored_beyond[member.pk]
        }
        again = any(r.seq in stored_beyond[member.pk] for r in reports)
        ordered = [fresh[seq] for seq in sorted(fresh)]
        times = [_measured_at(member, r, received) for r in ordered]
        for report, at in zip(ordered, times, strict=True):
            points += _loss_points(member, report, at, changed)
        happened += events.detect_events(member, ordered, times, changed)
        readings.append((member, list(zip(ordered, times, strict=True))))
        _add_rollups(member, ordered, received, sums, changed)
        member.high_water_mark = max(member.high_water_mark, safe_elsewhere.get(member.pk, 0))
        receipts += _move_mark(member, stored_beyond[member.pk], set(fresh), again)
        when = datetime.fromtimestamp(received, UTC)
        member.last_seen = max(member.last_seen, when)
        member.last_report = max(member.last_report, when)
        member.changed = changed
        announcements.append((member, list(fresh.values())))
        attestations.append((member, attested))
    LossPoint.objects.bulk_create(points)
    ReportReceipt.objects.bulk_create(receipts)
    happened = events.drop_surplus(events.drop_mirror_moves(happened))
    events.RunEvent.objects.bulk_create(happened)
    _grow(sums, changed)
    # Each is there, and locked: what looks like an insertion is one UPDATE of all of them.
    Membership.objects.bulk_create(
        members, update_conflicts=True, unique_fields=["pk"], update_fields=CHANGING
    )
    checkpoints.record_announcements(announcements)
    samples.record_samples(announcements)
    machine_history.record_readings(readings)
    attestations_received.send(None, attestations=attestations, changed=changed)


def _loss_points(member: Membership, report: Report, at: float, changed: int) -> list[LossPoint]:
    """Return a report's plausible losses; its last training loss has its other figures, too."""
    last = last_training_loss(report)
    most = member.run.max_plausible_tokens
    return [
        LossPoint(
            membership=member,
            seq=report.seq,
            position=position,
            at=at,
            changed=changed,
            learning_rate=report.learning_rate if position == last else None,
            gradient_norm=report.gradient_norm if position == last else None,
            **point.model_dump(),
        )
        for position, point in enumerate(report.points)
        if point.tokens <= most
    ]


def next_change_stamp() -> int:
    """Return the stamp of the rows that this transaction changes, for the other mirrors.

    It is milliseconds since 1970 by this site's clock, but always greater than every earlier stamp.
    Unlike row numbers it keeps rising after a restore from a backup. Only the one process that
    drains the queue takes stamps, within its transactions, so these commit in the stamps' order:
    each of them changes a membership.
    """
    rows = Membership.everywhere.filter(changed__isnull=False)
    last = rows.aggregate(last=Max("changed"))["last"] or 0
    return max(int(time.time() * 1000), last + 1)


def _safe_elsewhere(members: list[Membership], here: dict[UUID, set[int]]) -> dict[UUID, int]:
    """Return, by membership, up to which number another mirror holds every report.

    A machine that reported to another mirror has dropped those reports and will not send them here.
    A mirror's statement counts only if this site's first new report follows right behind it, so no
    mirror can make this site skip a report that is still to come. `here` are the numbers of the
    reports above their marks that are here.
    """
    firsts = {
        m.pk: min(here[m.pk]) - 1
        for m in members
        if here[m.pk] and min(here[m.pk]) > m.high_water_mark + 1
    }
    behind = {
        (member.run_id, member.machine_id): member.pk for member in members if member.pk in firsts
    }
    if not behind:
        return {}
    elsewhere = Membership.everywhere.exclude(mirror="").filter(
        run__in={run for run, _ in behind}, machine__in={machine for _, machine in behind}
    )
    marks = elsewhere.values_list("run", "machine", "high_water_mark")
    known = [
        (behind[run, machine], mark) for run, machine, mark in marks if (run, machine) in behind
    ]
    return {pk: firsts[pk] for pk, mark in known if mark >= firsts[pk]}


def _measured_at(member: Membership, report: Report, received: float) -> float:
    """Return when a report was measured, in seconds since 1970.

    A machine's clock may be wrong, but a report is neither older than the run nor newer than its
    arrival.
    """
    return min(max(report.at, member.run.created.timestamp()), received)


def _add_rollups(
    member: Membership, reports: list[Report], received: float, sums: Sums, changed: int
) -> None:
    """Add reports to their buckets, and copy the newest one's figures into the membership."""
    for report in reports:
        into = sums[
            member.pk,
            int(_measured_at(member, report, received)) // BUCKET_SECONDS * BUCKET_SECONDS,
        ]
        into["reports"] += 1
        into["rate_sum"] += report.rate
        if report.exchange:
            into["lag_sum"] += min(report.exchange.lag, MAX_LAG)
        if report.activity is Activity.FINISHED:
            member.final_checkpoint_at = member.final_checkpoint_at or timezone.now()
        if (
            report.seq <= member.latest
        ):  # it fills a gap: the totals of a later one already hold its own
            continue
        for name in TOTALS:
            before, now = getattr(member, name), getattr(report, name)
            into[name] += min(
                now - before if now >= before else now, MAX_GROWTH
            )  # less than before: a new state folder
        plan_before = member.figures.get("plan")
        member.update_figures(report.dump_stated())
        if member.figures.get("plan") != plan_before:
            member.planned = changed
        member.updates_by_incarnation = count_incarnation_updates(
            member.updates_by_incarnation, report.incarnation, report.updates_sent
        )
        member.addresses = list(report.addresses)
        member.latest = report.seq


def _grow(sums: Sums, changed: int) -> None:
    """Add to the rollups of every width, in one statement."""
    wider: dict[tuple, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for (member, bucket), grown in sums.items():
        for width in BUCKET_WIDTHS:
            for name, value in grown.items():
                wider[member, width, bucket // width * width][name] += value
    if not wider:
        return
    rows = [
        (
            *place,
            changed,
            *(grown[name] if name == "rate_sum" else int(grown[name]) for name in GROWN),
        )
        for place, grown in sorted(wider.items())
    ]
    marks = ", ".join([f"({', '.join(['%s'] * (4 + len(GROWN)))})"] * len(rows))
    # A machine that states huge totals again and again must not make the batch fail for all.
    adding = ", ".join(
        f"{name} = telemetry_rollup.{name} + excluded.{name}"
        if name == "rate_sum"
        else f"{name} = least(telemetry_rollup.{name}::numeric + excluded.{name}, {MAX_SUM})"
        for name in GROWN
    )
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO telemetry_rollup "
            f"(membership_id, width, bucket, changed, {', '.join(GROWN)}) VALUES {marks} "
            "ON CONFLICT (membership_id, width, bucket) "
            f"DO UPDATE SET changed = excluded.changed, {adding}",
            [value for row in rows for value in row],
        )


def _move_mark(
    member: Membership, stored_beyond: dict[int, datetime], fresh: set[int], again: bool
) -> list[ReportReceipt]:
    """Move the mark over everything contiguous, and return receipts for the reports beyond it.

    Args:
        member: the membership.
        stored_beyond: reports beyond the mark that are stored already → when they arrived.
        fresh: the numbers of the new reports.
        again: the machine has posted a stored report once more, so it would have posted a missing
            one too.
    """
    beyond = fresh | set(stored_beyond)
    member.high_water_mark = _advance_mark(member.high_water_mark, beyond)
    waited = timezone.now() - min(stored_beyond.values(), default=timezone.now())
    left = [seq for seq in beyond if seq > member.high_water_mark]
    # A machine that leaves gaps on purpose would have the site read all that lies beyond them.
    if len(left) > MAX_BEYOND:
        member.high_water_mark = _advance_mark(sorted(left)[len(left) - MAX_BEYOND - 1], beyond)
    elif again and left and waited > timedelta(minutes=GAP_MINUTES):
        log.warning(
            "%s lost its reports %s to %s", member, member.high_water_mark + 1, min(left) - 1
        )
        member.high_water_mark = _advance_mark(min(left), beyond)
    if stored_beyond:
        member.receipts.filter(seq__lte=member.high_water_mark).delete()
    return [
        ReportReceipt(membership=member, seq=seq) for seq in fresh if seq > member.high_water_mark
    ]


def _advance_mark(mark: int, beyond: set[int]) -> int:
    while mark + 1 in beyond:
        mark += 1
    return mark
