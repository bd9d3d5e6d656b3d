"""What another mirror tells of machines that report to it, as rows apart from what was reported here.

Each is keyed by the mirror that was asked, so that it is known whose word it is, and one that lies spoils its own rows
alone. Nothing of it is passed on, and nothing of it is an event of the log.
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from django.db import transaction
from django.utils import timezone

from coordinator.accounts.models import Machine
from coordinator.fleet.models import NEVER, Membership
from coordinator.runs.models import Run
from coordinator.telemetry import report_queue
from coordinator.telemetry.models import LossPoint, Rollup, RunEvent
from coordinator.telemetry.remote.cursor import RemoteCursor
from coordinator.telemetry.remote.protocol import (
    MEMBERSHIP_FIELDS,
    MachineRow,
    RollupRow,
    TelemetryPage,
    TelemetryPosition,
)

PATIENCE = timedelta(seconds=30)  # for the event that tells of a run or a machine
AHEAD = 60.0  # seconds that another's clock may be
EARLY = 3600.0  # …and that a sum may begin before its run
LATELY = 600.0  # what was measured in so many seconds is shown at once to who watches
UPDATED_FIELDS = (*MEMBERSHIP_FIELDS, "exchange", "anchor", "safe", "plan", "heard", "last_seen")
TOTALS = RollupRow._fields[3:]


class PageIngestResult(NamedTuple):
    """`left_out`: what was not, as the end of a sentence."""

    rows: int = 0
    left_out: str = ""
    more: bool = False


def store_page(key: str, after: TelemetryPosition, news: TelemetryPage) -> PageIngestResult:
    """What the mirror `key` told when it was asked past `after`, whole or not at all. Twice changes nothing.

    Where it names a machine or a run of which no event has told yet, the rest is taken and the same is asked for again,
    for a while."""
    now = timezone.now()
    with transaction.atomic():
        ear = RemoteCursor.objects.select_for_update().get(pk=key)
        if ear.position != after:
            return PageIngestResult()  # another process was here first
        members = _members(key, news)
        whole = {member.pk: member for member in members if member and member._state.adding}
        for frame in news.frames:
            if member := members[frame.of]:
                _note(member, frame, now)
                whole[member.pk] = member
        Membership.everywhere.bulk_create(
            whole.values(),
            update_conflicts=True,
            unique_fields=["pk"],
            update_fields=UPDATED_FIELDS,
        )
        sums, future = _sums(news, members, now.timestamp())
        Rollup.objects.bulk_create(
            sums,
            update_conflicts=True,
            unique_fields=["membership", "width", "bucket"],
            update_fields=TOTALS,
        )
        points = list(_points(news, members, now.timestamp()))
        LossPoint.objects.bulk_create(points, ignore_conflicts=True)
        RunEvent.objects.bulk_create(
            _comings(key, news, members, now.timestamp()), ignore_conflicts=True
        )
        waits = None in members and now < (ear.waits or now) + PATIENCE
        ear.waits = (ear.waits or now) if waits else None
        if not waits:
            ear.after = news.places.model_dump(mode="json")
            transaction.on_commit(lambda: _show(points, now.timestamp()))
        ear.save(update_fields=["after", "waits"])
    rows = len(whole) + len(sums) + len(points) + len(news.comings)
    return PageIngestResult(rows, _left_out(news, members, future, waits), news.more and not waits)


def _left_out(
    news: TelemetryPage, members: list[Membership | None], future: int, waits: bool
) -> str:
    if None in members and not waits:
        run, machine = news.machines[members.index(None)]
        return f"tells of the machine {machine[:8]} in the run {run}, and no event told of both"
    return (
        f"tells of {future} sums of times that are not the run's: is its clock right?"
        if future
        else ""
    )


def _members(key: str, news: TelemetryPage) -> list[Membership | None]:
    """The rows of the page's machines, in its order; those of this mirror that are new are not saved yet."""
    runs = Run.objects.in_bulk({run for run, _ in news.machines})
    runs = {str(pk): run for pk, run in runs.items()}
    machines = {
        each.key: each
        for each in Machine.objects.filter(key__in={machine for _, machine in news.machines})
    }
    known = Membership.everywhere.select_for_update().filter(
        mirror=key, run__in=runs, machine__in=machines.values()
    )
    there = {(member.run_id, member.machine_id): member for member in known}
    found: list[Membership | None] = []
    for run, machine in ((runs.get(run), machines.get(machine)) for run, machine in news.machines):
        if run is None or machine is None:
            found.append(None)
            continue
        place = run.pk, machine.pk
        if place not in there:
            there[place] = Membership(
                mirror=key, run=run, machine=machine, last_seen=NEVER, changed=None
            )
        there[place].run = run
        found.append(there[place])
    return found


def _note(member: Membership, frame: MachineRow, now: datetime) -> None:
    for name in MEMBERSHIP_FIELDS:
        setattr(member, name, getattr(frame, name))
    member.exchange = frame.exchange and frame.exchange.model_dump()
    member.plan = frame.plan.model_dump() if frame.plan else member.plan
    member.anchor = frame.anchor or ""
    member.safe = (member.safe or now) if frame.safe else None
    member.heard = member.last_seen = now - timedelta(seconds=frame.age)


def _sums(
    news: TelemetryPage, members: list[Membership | None], now: float
) -> tuple[list[Rollup], int]:
    """Rows, each once, and how many were of times that cannot be."""
    found: dict[tuple, Rollup] = {}
    future = 0
    for each in news.sums:
        if (member := members[each.of]) is None:
            continue
        if (
            each.bucket % each.width
            or not member.run.created.timestamp() - EARLY <= each.bucket <= now + AHEAD
        ):
            future += 1
            continue
        totals = {name: getattr(each, name) for name in TOTALS}
        found[member.pk, each.width, each.bucket] = Rollup(
            membership=member, width=each.width, bucket=each.bucket, changed=None, **totals
        )
    return list(found.values()), future


def _points(
    news: TelemetryPage, members: list[Membership | None], now: float
) -> Iterator[LossPoint]:
    for each in news.points:
        if (member := members[each.of]) and each.tokens <= member.run.max_plausible_tokens:
            yield LossPoint(
                membership=member, seq=each.seq, position=each.position, kind=each.kind, tokens=each.tokens,
                loss=each.loss, at=_when(member, each.at, now), changed=None,
            )  # fmt: skip


def _comings(
    key: str, news: TelemetryPage, members: list[Membership | None], now: float
) -> Iterator[RunEvent]:
    for each in news.comings:
        if member := members[each.of]:
            at = datetime.fromtimestamp(_when(member, each.at, now), UTC)
            yield RunEvent(
                id=each.id, run_id=member.run_id, machine_id=member.machine_id, kind=each.kind, at=at, mirror=key,
                changed=None,
            )  # fmt: skip


def _when(member: Membership, at: float, now: float) -> float:
    """As `rollup` bounds what machines say: while the run has been there."""
    return min(max(at, member.run.created.timestamp()), now)


def _show(points: list[LossPoint], now: float) -> None:
    for point in points:
        if point.at > now - LATELY:
            said = {name: getattr(point, name) for name in ("kind", "tokens", "loss", "at")}
            report_queue.publish_point(point.membership.run_id, point.membership.machine_id, said)
