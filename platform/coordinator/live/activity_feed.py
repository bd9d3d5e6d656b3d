"""The activity feed of a run's page.

Collects one short sentence per event from the tables where the site stores the events anyway: the
audit log, machine events, memberships, checkpoints and notifications.
"""

from collections.abc import Iterator
from typing import Any

from django.core.cache import cache

from barnraise.protocol.enums import Activity
from coordinator.audit.models import AuditEntry
from coordinator.fleet.models import Membership
from coordinator.notify.models import Notification
from coordinator.notify.notification_types import NotificationType
from coordinator.runs.models import Run
from coordinator.telemetry.models import Checkpoint, RunEvent

MAX_PER_SOURCE = 40  # events
CACHE_SECONDS = 2  # however many people watch, events are collected at most this often
WORKING = (
    Activity.PREPARING,
    Activity.JOINING,
    Activity.TRAINING,
    Activity.PAUSED,
    Activity.SUSPENDED,
    Activity.FINISHING,
)
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
    "run.arrange": "changed access or notes",
    "run.verdict": "removed updates",
    "run.exclude": "excluded a volunteer",
    "run.verdict_signed": "confirmed a verdict of another mirror",
}
WEIGHT_DECISIONS = ("run.verdict", "run.exclude")
MACHINES = {
    RunEvent.Kind.JOINED: "joined",
    RunEvent.Kind.PAUSED: "was paused by its owner",
    RunEvent.Kind.RESUMED: "resumed",
    RunEvent.Kind.FINISHED: "has the final weights",
    RunEvent.Kind.LEFT: "left",
}


def collect_activity(run: Run, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """List what happened in a run, the newest event first.

    Args:
        run: The run.
        rows: The rows of its machines, as `run_table.workers` returns them.

    Returns:
        Dicts with "id", "at" (seconds since 1970), "kind" ("run", "machine", "weights" or
        "checkpoint"), "who" and "what".
    """
    key = f"live:{run.pk}:events"
    stored = cache.get(key)
    if stored is None:
        stored = [
            *_decisions(run),
            *_machine_events(run),
            *_revocations(run),
            *_checkpoints(run),
            *_stalls(run),
        ]
        cache.set(key, stored, CACHE_SECONDS)
    return sorted(
        [*stored, *_silent_machines(rows)],
        key=lambda event: (event["at"], event["id"]),
        reverse=True,
    )


def _event(event_id: object, at: float, kind: str, who: str, text: str) -> dict[str, Any]:
    return {"id": str(event_id), "at": round(at, 1), "kind": kind, "who": who, "what": text}


def _decisions(run: Run) -> Iterator[dict[str, Any]]:
    entries = AuditEntry.objects.filter(
        subject_kind="run", subject_id=str(run.pk), action__in=DECISIONS
    )
    for entry in entries.select_related("actor", "machine")[:MAX_PER_SOURCE]:
        text = DECISIONS[entry.action].format_map({"tokens": 0} | entry.detail)
        if reason := entry.detail.get("reason"):
            text += f": {reason}"
        kind = "weights" if entry.action in WEIGHT_DECISIONS else "run"
        yield _event(entry.pk, entry.at.timestamp(), kind, _actor_name(run, entry), text)


def _actor_name(run: Run, entry: AuditEntry) -> str:
    """Name the machine or the owner behind an entry; staff act as the site and are not named."""
    if entry.machine:
        return entry.machine.name
    if entry.actor is not None and entry.actor == run.owner:
        return run.owner.shown_name
    return SITE


def _machine_events(run: Run) -> Iterator[dict[str, Any]]:
    for event in RunEvent.objects.filter(run=run).select_related("machine")[:MAX_PER_SOURCE]:
        text = MACHINES[RunEvent.Kind(event.kind)]
        yield _event(event.pk, event.at.timestamp(), "machine", event.machine.name, text)


def _revocations(run: Run) -> Iterator[dict[str, Any]]:
    memberships = Membership.objects.filter(run=run, machine__revoked__isnull=False)
    newest = memberships.select_related("machine").order_by("-machine__revoked")
    for membership in newest[:MAX_PER_SOURCE]:
        machine = membership.machine
        at = machine.revoked.timestamp()  # pyright: ignore[reportOptionalMemberAccess]  # see the filter
        yield _event(f"revoked-{machine.pk}", at, "machine", machine.name, "was revoked")


def _checkpoints(run: Run) -> Iterator[dict[str, Any]]:
    for checkpoint in Checkpoint.objects.filter(run=run).order_by("-tokens")[:MAX_PER_SOURCE]:
        at = checkpoint.announced.timestamp()
        text = f"at {checkpoint.tokens:,} tokens, {checkpoint.digest[:12]}"
        yield _event(checkpoint.pk, at, "checkpoint", "Checkpoint", text)


def _stalls(run: Run) -> Iterator[dict[str, Any]]:
    key = f"{NotificationType.RUN_STALLED.value}:{run.pk}"
    notifications = Notification.objects.filter(person=run.owner, key__startswith=key)
    for notification in notifications[:MAX_PER_SOURCE]:
        at = notification.created.timestamp()
        yield _event(notification.pk, at, "run", "The run", "stalled: no machine reports")


def _silent_machines(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield an event for each machine that stopped reporting without leaving."""
    silent = [row for row in rows if not row["alive"] and row["activity"] in WORKING]
    for row in sorted(silent, key=lambda row: row["last_seen"], reverse=True)[:MAX_PER_SOURCE]:
        event_id = f"silent-{row['id']}-{row['last_seen']:.0f}"
        yield _event(event_id, row["last_seen"], "machine", row["name"], "stopped reporting")
