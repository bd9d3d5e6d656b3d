"""What a machine's owner sees of it: its load over a day, its limits, and its last log lines.

None of this leaves the site that the machine reports to, and nobody but the owner may see it.
"""

import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.db import connection, models

from barnraise.protocol.reports import LimitsView, Report, SystemView
from coordinator.accounts.models import Machine
from coordinator.fleet.models import Membership

READING_SECONDS = 60  # between two stored readings
HISTORY_SECONDS = 86_400  # that the machine's page shows
READINGS_KEPT = 2 * HISTORY_SECONDS
MAX_LINES = 40  # of a machine's log
GAUGES = tuple(SystemView.model_fields)


class MachineCondition(models.Model):
    """The newest of what a machine reports for its owner alone."""

    machine = models.OneToOneField(
        Machine, primary_key=True, on_delete=models.CASCADE, related_name="condition"
    )
    at = models.DateTimeField()
    version = models.CharField(max_length=40, blank=True)
    system: Any = models.JSONField(null=True)  # the last `reports.SystemView`
    limits: Any = models.JSONField(null=True)  # the last `reports.LimitsView`
    # Why it pauses, with details that others do not see; "" while it does not.
    pause_sentence = models.CharField(max_length=100, blank=True, default="", db_default="")
    lines: Any = models.JSONField(default=list)  # the newest `reports.LogLine`, the oldest first

    def __str__(self) -> str:
        return f"the condition of {self.machine}"


class SystemReading(models.Model):
    """How busy a machine was in one minute: the last `SystemView` that it sent in it."""

    if TYPE_CHECKING:
        machine_id: UUID

    machine = models.ForeignKey(Machine, on_delete=models.CASCADE, related_name="readings")
    minute = models.BigIntegerField()  # seconds since 1970, a multiple of `READING_SECONDS`
    system: Any = models.JSONField()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["machine", "minute"], name="one_reading_a_minute")
        ]
        indexes = [models.Index(fields=["minute"], name="readings_by_age")]

    def __str__(self) -> str:
        return f"{self.machine_id} at {self.minute}"


def record_readings(reported: Iterable[tuple[Membership, list[tuple[Report, float]]]]) -> None:
    """Store what machines report for their owners, within the caller's transaction.

    Args:
        reported: each membership with its new reports in ascending order, and when each was
            measured, in seconds since 1970.
    """
    readings: dict[tuple[UUID, int], SystemReading] = {}
    newest: dict[UUID, tuple[Report, float, list[dict[str, Any]]]] = {}
    for member, reports in reported:
        lines: list[dict[str, Any]] = []
        for report, at in reports:
            lines += [line.model_dump() for line in report.log]
            if report.system:
                minute = int(at) // READING_SECONDS * READING_SECONDS
                reading = SystemReading(
                    machine_id=member.machine_id,
                    minute=minute,
                    system=report.system.model_dump(exclude_none=True),
                )
                readings[member.machine_id, minute] = reading
        if reports and (lines or any(report.system for report, _ in reports)):
            report, at = reports[-1]
            if member.machine_id in newest:  # it reports for several runs
                other, other_at, other_lines = newest[member.machine_id]
                lines = sorted([*other_lines, *lines], key=lambda line: line["at"])
                if other_at > at:
                    report, at = other, other_at
            newest[member.machine_id] = (report, at, lines)
    SystemReading.objects.bulk_create(
        readings.values(),
        update_conflicts=True,
        unique_fields=["machine", "minute"],
        update_fields=["system"],
    )
    _record_conditions(newest)


def _record_conditions(newest: dict[UUID, tuple[Report, float, list[dict[str, Any]]]]) -> None:
    stored = MachineCondition.objects.in_bulk(newest)
    conditions = []
    for machine, (report, at, lines) in newest.items():
        known = stored.get(machine)
        when = datetime.fromtimestamp(at, UTC)
        if known and known.at > when:
            # A report that closes a gap is older than what is stored: only its lines are added.
            if lines:
                merged = sorted([*known.lines, *lines], key=lambda line: line["at"])
                known.lines = merged[-MAX_LINES:]
                conditions.append(known)
            continue
        condition = known or MachineCondition(machine_id=machine)
        condition.at = when
        condition.version = report.version
        condition.system = report.system.model_dump() if report.system else condition.system
        condition.limits = report.limits.model_dump() if report.limits else condition.limits
        condition.pause_sentence = report.pause_sentence
        condition.lines = [*condition.lines, *lines][-MAX_LINES:]
        conditions.append(condition)
    MachineCondition.objects.bulk_create(
        conditions,
        update_conflicts=True,
        unique_fields=["machine"],
        update_fields=["at", "version", "system", "limits", "pause_sentence", "lines"],
    )


def find_condition(machine: Machine) -> MachineCondition | None:
    """Return the newest of what a machine reports for its owner; None before its first report."""
    return MachineCondition.objects.filter(pk=machine.pk).first()


def parse_condition(
    condition: MachineCondition | None,
) -> tuple[SystemView | None, LimitsView | None]:
    """Return the last system view and limits of a machine."""
    if condition is None:
        return None, None
    system = SystemView.model_validate(condition.system) if condition.system else None
    limits = LimitsView.model_validate(condition.limits) if condition.limits else None
    return system, limits


def load_machine_history(machine: Machine, now: float | None = None) -> dict[str, Any]:
    """Load a machine's last day, in minutes.

    Returns:
        {"since", "until": seconds since 1970, "series": name → [[seconds since 1970, value], …]};
        "rate" (tokens/s), "sent" and "received" (bytes/s) are sums over its runs, and the other
        names are those of a `SystemView`.
    """
    now = time.time() if now is None else now
    since = int(now - HISTORY_SECONDS)
    series: dict[str, list[list[float]]] = {name: [] for name in ("rate", "sent", "received")}
    for minute, rate, sent, received in _load_traffic(machine, since):
        series["rate"].append([minute, round(rate, 2)])
        series["sent"].append([minute, round(float(sent) / READING_SECONDS)])
        series["received"].append([minute, round(float(received) / READING_SECONDS)])
    readings = SystemReading.objects.filter(machine=machine, minute__gte=since).order_by("minute")
    for minute, system in readings.values_list("minute", "system"):
        for name in GAUGES:
            if system.get(name) is not None:
                series.setdefault(name, []).append([minute, system[name]])
    return {"since": since, "until": round(now), "series": series}


def _load_traffic(machine: Machine, since: int) -> list[tuple[int, float, int, int]]:
    """Return (minute, tokens/s, bytes sent, bytes received), summed over the machine's runs."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT bucket, sum(rate), sum(sent), sum(received) FROM (
                SELECT bucket, m.run_id, sum(rate_sum) / sum(reports) AS rate,
                    sum(r.peer_bytes_sent) AS sent, sum(r.peer_bytes_received) AS received
                FROM telemetry_rollup r JOIN fleet_membership m ON m.id = membership_id
                WHERE m.machine_id = %s AND width = %s AND bucket >= %s GROUP BY bucket, m.run_id
            ) AS of_a_run GROUP BY bucket ORDER BY bucket
            """,
            [machine.pk, READING_SECONDS, since],
        )
        return cursor.fetchall()
