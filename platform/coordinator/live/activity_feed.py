"""The activity feed of a run's page.

Collects one short sentence per event from the tables where the site stores the events anyway: the
audit log, machine events, memberships, checkpoints and notifications.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django.core.cache import cache
from django.db.models import QuerySet

from barnraise.protocol.enums import Activity, PauseReason
from coordinator.audit.models import AuditEntry
from coordinator.fleet.marked_names import twin_names_in
from coordinator.fleet.models import Membership
from coordinator.fleet.pause_texts import PAUSE_TEXTS
from coordinator.notify.models import Notification
from coordinator.notify.notification_types import NotificationType
from coordinator.runs.models import Run
from coordinator.telemetry.models import Checkpoint, RunEvent

MAX_PER_SOURCE = 40  # events
MAX_EVENTS = 200  # in all; older ones are on a page of their own
CACHE_SECONDS = 2  # however many people watch, events are collected at most this often
SITE = "The site"
# Audit log actions that everybody who can see the run may read; others are for owner and staff.
DECISIONS = {
    "run.create": "created the run",
    "run.launch": "launched the run",
    "run.accept_manifest": "prepared the text",
    "run.status_recruiting": "opened the run to machines",
    "run.status_training": "started the training",
    "run.status_finished": "finished the run; final checkpoint saved",
    "run.pause": "paused the run",
    "run.resume": "resumed the run",
    "run.cancel": "cancelled the run",
    "run.finish": "finished the run",
    "run.extend": "added {tokens:,} tokens to the budget",
    "run.set_join_policy": "changed access or notes",
    "run.verdict": "removed updates",
    "run.exclude": "excluded a volunteer",
    "run.verdict_signed": "confirmed a verdict of another mirror",
}
WEIGHT_DECISIONS = ("run.verdict", "run.exclude")
MACHINES = {
    RunEvent.Kind.JOINED: "joined",
    RunEvent.Kind.PAUSED: "paused",
    RunEvent.Kind.RESUMED: "resumed",
    RunEvent.Kind.FINISHED: "has the final weights",
    RunEvent.Kind.LEFT: "left",
}


@dataclass(frozen=True)
class RecentActivity:
    """The newest events of a run.

    Attributes:
        events: Dicts with "id", "at" (seconds since 1970), "kind" ("run", "machine", "weights" or
            "checkpoint"), "who" and "what", the newest first.
        total: Events in all.
    """

    events: list[dict[str, Any]]
    total: int


@dataclass(frozen=True)
class _Source:
    """Rows that are events, one each."""

    rows: QuerySet[Any]
    time: str  # the name of the field with the event's time
    describe: Callable[[Any], dict[str, Any]]


def collect_activity(run: Run, rows: list[dict[str, Any]]) -> RecentActivity:
    """List what happened in a run lately, also by the rows of its machines (`machine_rows`)."""
    key = f"live:{run.pk}:events"
    stored = cache.get(key)
    if stored is None:
        sources = _list_sources(run)
        stored = {
            "events": [
                event for source in sources for event in _read_newest(source, MAX_PER_SOURCE)
            ],
            "total": sum(source.rows.count() for source in sources),
        }
        cache.set(key, stored, CACHE_SECONDS)
    silent = list(_silent_machines(rows))
    newest = sorted([*stored["events"], *silent], key=_event_order, reverse=True)
    return RecentActivity(newest[:MAX_EVENTS], stored["total"] + len(silent))


def list_events(run: Run, before: datetime | None, count: int) -> list[dict[str, Any]]:
    """List the `count` newest events that are older than a moment; None: than now."""
    events = [
        event for source in _list_sources(run) for event in _read_newest(source, count, before)
    ]
    return sorted(events, key=_event_order, reverse=True)[:count]


def _read_newest(
    source: _Source, count: int, before: datetime | None = None
) -> list[dict[str, Any]]:
    rows = source.rows.order_by(f"-{source.time}", "-pk")
    if before is not None:
        rows = rows.filter(**{f"{source.time}__lt": before})
    return [source.describe(row) for row in rows[:count]]


def _event_order(event: dict[str, Any]) -> tuple[float, str]:
    return event["at"], event["id"]


def _list_sources(run: Run) -> list[_Source]:
    decisions = AuditEntry.objects.filter(
        subject_kind="run", subject_id=str(run.pk), action__in=DECISIONS
    )
    revoked = Membership.objects.filter(run=run, machine__revoked__isnull=False)
    names = twin_names_in(run)
    stalls = Notification.objects.filter(
        person=run.owner, key__startswith=f"{NotificationType.RUN_STALLED.value}:{run.pk}"
    )
    return [
        _Source(
            decisions.select_related("actor", "machine"),
            "at",
            lambda entry: _describe_decision(run, entry),
        ),
        _Source(
            RunEvent.objects.filter(run=run).select_related("machine"),
            "at",
            lambda event: _describe_machine_event(event, names),
        ),
        _Source(
            revoked.select_related("machine"),
            "machine__revoked",
            lambda membership: _describe_revocation(membership, names),
        ),
        _Source(Checkpoint.objects.filter(run=run), "announced", _describe_checkpoint),
        _Source(stalls, "created", _describe_stall),
    ]


def _build_event(event_id: object, at: float, kind: str, who: str, text: str) -> dict[str, Any]:
    return {"id": str(event_id), "at": round(at, 6), "kind": kind, "who": who, "what": text}


def _describe_decision(run: Run, entry: AuditEntry) -> dict[str, Any]:
    text = DECISIONS[entry.action].format_map({"tokens": 0} | entry.detail)
    if reason := entry.detail.get("reason"):
        text += f": {reason}"
    kind = "weights" if entry.action in WEIGHT_DECISIONS else "run"
    return _build_event(entry.pk, entry.at.timestamp(), kind, _actor_name(run, entry), text)


def _actor_name(run: Run, entry: AuditEntry) -> str:
    """Name the machine or the owner behind an entry; staff act as the site and are not named."""
    if entry.machine:
        return entry.machine.name
    if entry.actor is not None and entry.actor == run.owner:
        return run.owner.shown_name
    return SITE


def _describe_machine_event(event: RunEvent, names: dict[UUID, str]) -> dict[str, Any]:
    text = MACHINES[RunEvent.Kind(event.kind)]
    if event.reason in set(PauseReason):
        text = PAUSE_TEXTS[PauseReason(event.reason)]
    who = names.get(event.machine_id, event.machine.name)
    return _build_event(event.pk, event.at.timestamp(), "machine", who, text)


def _describe_revocation(membership: Membership, names: dict[UUID, str]) -> dict[str, Any]:
    machine = membership.machine
    who = names.get(machine.pk, machine.name)
    at = machine.revoked.timestamp()  # pyright: ignore[reportOptionalMemberAccess]  # see the filter
    return _build_event(f"revoked-{machine.pk}", at, "machine", who, "was revoked")


def _describe_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    text = f"at {checkpoint.tokens:,} tokens, {checkpoint.digest[:12]}"
    at = checkpoint.announced.timestamp()
    return _build_event(checkpoint.pk, at, "checkpoint", "Checkpoint", text)


def _describe_stall(notification: Notification) -> dict[str, Any]:
    at = notification.created.timestamp()
    return _build_event(notification.pk, at, "run", "The run", "stalled: no machine reports")


def _silent_machines(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield an event for each machine that stopped reporting without leaving."""
    silent = [row for row in rows if not row["alive"] and Activity(row["activity"]).is_working]
    for row in sorted(silent, key=lambda row: row["last_seen"], reverse=True)[:MAX_PER_SOURCE]:
        event_id = f"silent-{row['id']}-{row['last_seen']:.0f}"
        yield _build_event(event_id, row["last_seen"], "machine", row["name"], "stopped reporting")
