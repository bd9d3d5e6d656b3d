"""Serve the figures of machines that report to this mirror, in pages of what changed."""

import json
import time
from collections.abc import Iterable
from typing import Any, TypeVar
from uuid import UUID

from django.db.models import BigAutoField, BooleanField, F, Func, Model, QuerySet, UUIDField, Value
from django.db.models.lookups import GreaterThan

from barnraise.protocol.coordinator_messages import SignedHeader, SignedStatement
from barnraise.protocol.signing import digest
from coordinator.fleet.models import Membership, UpdateWitness
from coordinator.lib import site_identity
from coordinator.telemetry.models import LossPoint, Rollup, RunEvent
from coordinator.telemetry.remote.protocol import (
    MAX_EVENTS,
    MAX_LOSSES,
    MAX_MACHINE_ROWS,
    MAX_ROLLUPS,
    MAX_WITNESS_ROWS,
    WITNESS_BYTES,
    EventRow,
    LossRow,
    MachineRow,
    PageSignature,
    RollupRow,
    RowPosition,
    SignedTelemetryPage,
    TelemetryPage,
    TelemetryPosition,
    TelemetryRequest,
    WitnessRow,
)

M = TypeVar("M", bound=Model)
MEMBERSHIP_COLUMNS = ("membership__run", "membership__machine__key")
ROLLUP_COLUMNS, POINT_COLUMNS = RollupRow._fields[1:], LossRow._fields[1:]
EVENT_COLUMNS = EventRow._fields[2:]  # after the machine and the id
FIRST = {UUIDField: str(UUID(int=0)), BigAutoField: "0"}  # what is before every id


class RowValue(Func):
    """A row value, which Postgres compares column by column, as an index is sorted."""

    function = "ROW"
    output_field: Any = BooleanField()


def build_signed_page(wanted: TelemetryRequest, to: str) -> SignedTelemetryPage:
    """Build a page for the mirror with the key `to`, and sign it."""
    text = build_page(wanted.after).model_dump_json()
    identity = site_identity.identity()
    signature = PageSignature(mirror=identity.key, to=to, nonce=wanted.nonce, digest=digest(text))
    return SignedTelemetryPage(signature=identity.sign("telemetry", signature), text=text)


def build_page(after: TelemetryPosition) -> TelemetryPage:
    """Build the page after a position, by five queries, each answered from an index."""
    machines: dict[tuple[str, str], int] = {}

    def index_of(run: UUID, key: str) -> int:
        return machines.setdefault((str(run), key), len(machines))

    members = _select_after(
        Membership.objects.filter(latest__gt=0).select_related("machine"),
        after.memberships,
        MAX_MACHINE_ROWS,
    )
    rollups = _select_after(
        Rollup.objects.all(), after.rollups, MAX_ROLLUPS, *MEMBERSHIP_COLUMNS, *ROLLUP_COLUMNS
    )
    points = _select_after(
        LossPoint.objects.all(), after.points, MAX_LOSSES, *MEMBERSHIP_COLUMNS, *POINT_COLUMNS
    )
    events = _select_after(
        RunEvent.objects.all(), after.events, MAX_EVENTS, "run", "machine__key", *EVENT_COLUMNS
    )
    witnesses, has_more_witnesses = _select_witnesses(after.witnesses)
    now = time.time()
    return TelemetryPage(
        memberships=[
            _build_machine_row(m, index_of(m.run_id, m.machine.key), now, after.memberships.changed)
            for m in members
        ],
        rollups=[RollupRow(index_of(run, key), *figures) for _, _, run, key, *figures in rollups],
        points=[LossRow(index_of(run, key), *figures) for _, _, run, key, *figures in points],
        events=[
            EventRow(index_of(run, key), str(pk), kind, at.timestamp(), reason)
            for _, pk, run, key, kind, at, reason in events
        ],
        witnesses=[
            WitnessRow(index_of(run, key), head, statement)
            for _, _, run, key, head, statement in witnesses
        ],
        position=TelemetryPosition(
            memberships=_position_after(((m.changed, m.pk) for m in members), after.memberships),
            rollups=_position_after(rollups, after.rollups),
            points=_position_after(points, after.points),
            events=_position_after(events, after.events),
            witnesses=_position_after(witnesses, after.witnesses),
        ),
        more=len(members) == MAX_MACHINE_ROWS
        or len(rollups) == MAX_ROLLUPS
        or len(points) == MAX_LOSSES
        or len(events) == MAX_EVENTS
        or has_more_witnesses,
        machines=list(machines),
    )


def _select_after(rows: QuerySet[M], after: RowPosition, most: int, *names: str) -> list[Any]:
    """Select the first rows after a position; with names, these columns after (changed, id)."""
    pk: Any = rows.model._meta.pk
    last = after.id or FIRST[type(pk)]
    beyond = GreaterThan(
        RowValue(F("changed"), F("id")),
        RowValue(Value(after.changed), Value(pk.to_python(last), type(pk)())),
    )
    selected = rows.filter(beyond, changed__isnull=False).order_by("changed", "id")[:most]
    return list(selected.values_list("changed", "id", *names) if names else selected)


def _select_witnesses(after: RowPosition) -> tuple[list[Any], bool]:
    """Select the next witness rows, about `WITNESS_BYTES` at most, and whether more may follow."""
    names = ("run", "witness__key", "header", "statement")
    known = UpdateWitness.objects.filter(witness__isnull=False)
    rows = []
    size = 0
    selected = _select_after(known, after, MAX_WITNESS_ROWS, *names)
    for changed, pk, run, key, header, statement in selected:
        size += len(json.dumps([header, statement]))
        if rows and size > WITNESS_BYTES:
            return rows, True
        signed = SignedHeader.model_validate(header), SignedStatement.model_validate(statement)
        rows.append((changed, pk, run, key, *signed))
    return rows, len(selected) == MAX_WITNESS_ROWS


def _position_after(rows: Iterable[Any], before: RowPosition) -> RowPosition:
    *_, last = before, *(RowPosition(row[0], str(row[1])) for row in rows)
    return last


def _build_machine_row(
    member: Membership, machine_index: int, now: float, known: int
) -> MachineRow:
    """Build a machine's row, with its plan if that changed after the stamp `known`."""
    figures = member.all_figures
    if member.planned < known:
        figures["plan"] = None
    return MachineRow(
        machine_index=machine_index,
        age=max(0.0, now - member.last_report.timestamp()),
        latest=member.latest,
        high_water_mark=member.high_water_mark,
        report_interval=member.report_interval,
        has_final_checkpoint=member.final_checkpoint_at is not None,
        **figures,
    )
