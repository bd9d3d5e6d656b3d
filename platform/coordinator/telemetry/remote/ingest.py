"""Store other mirrors' figures, in rows apart from what was reported to this site.

Each row has the key of the mirror that sent it, so a mirror that lies spoils only its own rows. A
witness proves itself by two signatures and counts as if it had been reported here. Nothing of it
is passed on or recorded in the event log.
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from django.db import transaction
from django.utils import timezone

from barnraise.errors import MessageError
from barnraise.protocol.coordinator_messages import Attestation
from barnraise.protocol.signing import check_attestation
from coordinator.accounts.models import Machine
from coordinator.fleet.models import FIGURE_COLUMNS, NEVER, Membership
from coordinator.fleet.verdict_models import excluded_machines
from coordinator.runs.models import Run
from coordinator.telemetry import report_queue
from coordinator.telemetry.models import LossPoint, RemoteCursor, Rollup, RunEvent
from coordinator.telemetry.remote.protocol import (
    MachineRow,
    RollupRow,
    TelemetryPage,
    TelemetryPosition,
)
from coordinator.telemetry.rollup import attestations_received

EVENT_PATIENCE = timedelta(seconds=30)  # to wait for the event of a run or machine
MAX_AHEAD = 60.0  # seconds that another mirror's clock may be ahead
MAX_EARLY = 3600.0  # seconds that a rollup may begin before its run
RECENT_SECONDS = 600.0  # seconds; newer losses are shown to watchers at once
UPDATED_FIELDS = (
    *FIGURE_COLUMNS,
    "figures",
    "latest",
    "high_water_mark",
    "report_interval",
    "final_checkpoint_at",
    "last_report",
    "last_seen",
)
TOTALS = RollupRow._fields[3:]


class PageIngestResult(NamedTuple):
    """What became of a page."""

    rows: int = 0  # how many were stored
    left_out: str = ""  # what was not stored, as the end of a sentence
    more: bool = False  # the mirror has more rows


class ProvenWitness(NamedTuple):
    """A valid attestation: the index of its machine in the page, and the author's key."""

    machine_index: int
    author: str
    attestation: Attestation


def store_page(key: str, after: TelemetryPosition, page: TelemetryPage) -> PageIngestResult:
    """Store a page of the mirror `key`, all or nothing; a page that arrives twice changes nothing.

    If the page names a machine or run whose event has not arrived yet, the rest is stored and the
    same page is requested again, for a while. `after` is the position that it was requested for.
    """
    now = timezone.now()
    proven = _prove_witnesses(page)  # costs time: before any lock
    with transaction.atomic():
        cursor = RemoteCursor.objects.select_for_update().get(pk=key)
        if cursor.position != after:
            return PageIngestResult()  # another process has stored it
        members = _find_members(key, page)
        changed_members = {
            member.pk: member for member in members if member and member._state.adding
        }
        for row in page.memberships:
            if member := members[row.machine_index]:
                _copy_figures(member, row, now)
                changed_members[member.pk] = member
        Membership.everywhere.bulk_create(
            changed_members.values(),
            update_conflicts=True,
            unique_fields=["pk"],
            update_fields=UPDATED_FIELDS,
        )
        rollups, future = _build_rollups(page, members, now.timestamp())
        Rollup.objects.bulk_create(
            rollups,
            update_conflicts=True,
            unique_fields=["membership", "width", "bucket"],
            update_fields=TOTALS,
        )
        points = list(_build_loss_points(page, members, now.timestamp()))
        LossPoint.objects.bulk_create(points, ignore_conflicts=True)
        RunEvent.objects.bulk_create(
            _build_events(key, page, members, now.timestamp()), ignore_conflicts=True
        )
        unknown = _first_unknown(page, members, proven)
        waits = bool(unknown) and now < (cursor.waits or now) + EVENT_PATIENCE
        cursor.waits = (cursor.waits or now) if waits else None
        if not waits:
            cursor.after = page.position.model_dump(mode="json")
            transaction.on_commit(lambda: _publish_recent_points(points, now.timestamp()))
        cursor.save(update_fields=["after", "waits"])
        witnesses = _select_witnesses(members, proven)
        attestations_received.send(None, attestations=witnesses, changed=None)
    rows = len(changed_members) + len(rollups) + len(points) + len(page.events) + len(witnesses)
    unproven = len(page.witnesses) - len(proven)
    left_out = "" if waits or not unknown else unknown
    return PageIngestResult(
        rows, left_out or _describe_invalid(future, unproven), page.more and not waits
    )


def _describe_invalid(future: int, unproven: int) -> str:
    if unproven:
        return f"sent {unproven} attestations whose signatures prove nothing"
    return f"sent {future} sums of times outside the run: is its clock right?" if future else ""


def _first_unknown(
    page: TelemetryPage, members: list[Membership | None], proven: list[ProvenWitness]
) -> str:
    """Describe a machine or run of the page that no event describes yet; "" if there is none."""
    if None in members:
        run, machine = page.machines[members.index(None)]
        return f"names the machine {machine[:8]} in the run {run}, and no event of both has arrived"
    authors = {witness.author for witness in proven}
    if authors:
        authors -= set(Machine.objects.filter(key__in=authors).values_list("key", flat=True))
    return f"names the author {min(authors)[:8]}, and no event of it has arrived" if authors else ""


def _prove_witnesses(page: TelemetryPage) -> list[ProvenWitness]:
    """Return the witness rows whose two signatures are valid and belong together."""
    proven = []
    for row in page.witnesses:
        run, machine = page.machines[row.machine_index]
        attestation = Attestation(head=row.head, statement=row.statement)
        try:
            header = check_attestation(attestation, run, machine)
        except MessageError:
            continue
        proven.append(ProvenWitness(row.machine_index, header.peer, attestation))
    return proven


def _select_witnesses(
    members: list[Membership | None], proven: list[ProvenWitness]
) -> list[tuple[Membership, list[Attestation]]]:
    """Group the attestations of machines that may report here themselves by machine."""
    witnesses: dict[int, tuple[Membership, list[Attestation]]] = {}
    for witness in proven:
        member = members[witness.machine_index]
        if member and not member.machine.revoked and member.machine.owner.is_active:
            witnesses.setdefault(witness.machine_index, (member, []))[1].append(witness.attestation)
    excluded = excluded_machines([member for member, _ in witnesses.values()])
    return [
        (member, attestations)
        for member, attestations in witnesses.values()
        if (member.run_id, member.machine_id) not in excluded
    ]


def _find_members(key: str, page: TelemetryPage) -> list[Membership | None]:
    """Return the memberships of the page's machines, in its order; new ones are not saved yet.

    None stands for a machine or run that this site does not know.
    """
    runs = Run.objects.in_bulk({run for run, _ in page.machines})
    runs = {str(pk): run for pk, run in runs.items()}
    machines = {
        machine.key: machine
        for machine in Machine.objects.select_related("owner").filter(
            key__in={machine for _, machine in page.machines}
        )
    }
    rows = Membership.everywhere.select_for_update(of=("self",)).filter(
        mirror=key, run__in=runs, machine__in=machines.values()
    )
    memberships = {(member.run_id, member.machine_id): member for member in rows}
    members: list[Membership | None] = []
    for run, machine in ((runs.get(run), machines.get(machine)) for run, machine in page.machines):
        if run is None or machine is None:
            members.append(None)
            continue
        pair = run.pk, machine.pk
        if pair not in memberships:
            memberships[pair] = Membership(
                mirror=key, run=run, machine=machine, last_seen=NEVER, changed=None
            )
        memberships[pair].run = run
        memberships[pair].machine = machine
        members.append(memberships[pair])
    return members


def _copy_figures(member: Membership, row: MachineRow, now: datetime) -> None:
    # A plan that did not change is not sent, but the duration of a step under it is.
    member.update_figures(row.dump_stated() | {"step_seconds": row.step_seconds})
    member.latest = row.latest
    member.high_water_mark = row.high_water_mark
    member.report_interval = row.report_interval
    member.final_checkpoint_at = (
        (member.final_checkpoint_at or now) if row.has_final_checkpoint else None
    )
    member.last_report = member.last_seen = now - timedelta(seconds=row.age)


def _build_rollups(
    page: TelemetryPage, members: list[Membership | None], now: float
) -> tuple[list[Rollup], int]:
    """Return rollups, each once, and how many had impossible times."""
    rollups: dict[tuple, Rollup] = {}
    future = 0
    for row in page.rollups:
        if (member := members[row.machine_index]) is None:
            continue
        if (
            row.bucket % row.width
            or not member.run.created.timestamp() - MAX_EARLY <= row.bucket <= now + MAX_AHEAD
        ):
            future += 1
            continue
        totals = {name: getattr(row, name) for name in TOTALS}
        rollups[member.pk, row.width, row.bucket] = Rollup(
            membership=member, width=row.width, bucket=row.bucket, changed=None, **totals
        )
    return list(rollups.values()), future


def _build_loss_points(
    page: TelemetryPage, members: list[Membership | None], now: float
) -> Iterator[LossPoint]:
    for row in page.points:
        if (member := members[row.machine_index]) and row.tokens <= member.run.max_plausible_tokens:
            yield LossPoint(
                membership=member,
                seq=row.seq,
                position=row.position,
                kind=row.kind,
                tokens=row.tokens,
                loss=row.loss,
                at=_clamp_time(member, row.at, now),
                learning_rate=row.learning_rate,
                gradient_norm=row.gradient_norm,
                changed=None,
            )


def _build_events(
    key: str, page: TelemetryPage, members: list[Membership | None], now: float
) -> Iterator[RunEvent]:
    for row in page.events:
        if member := members[row.machine_index]:
            at = datetime.fromtimestamp(_clamp_time(member, row.at, now), UTC)
            yield RunEvent(
                id=row.id,
                run_id=member.run_id,
                machine_id=member.machine_id,
                kind=row.kind,
                reason=row.reason,
                at=at,
                mirror=key,
                changed=None,
            )


def _clamp_time(member: Membership, at: float, now: float) -> float:
    """Limit a time to the age of the run, as `rollup` does with reports."""
    return min(max(at, member.run.created.timestamp()), now)


def _publish_recent_points(points: list[LossPoint], now: float) -> None:
    for point in points:
        if point.at > now - RECENT_SECONDS:
            point_fields = {name: getattr(point, name) for name in ("kind", "tokens", "loss", "at")}
            report_queue.publish_point(
                point.membership.run_id, point.membership.machine_id, point_fields
            )
