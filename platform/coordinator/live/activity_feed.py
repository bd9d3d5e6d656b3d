"""What happened in a run, for its page: gathered from where the site notes it anyway, each a short sentence."""

from collections.abc import Iterator
from typing import Any

from django.core.cache import cache

from barnraise.protocol.enums import Activity
from coordinator.audit.models import AuditEntry
from coordinator.fleet.models import Membership
from coordinator.notify.models import Notification
from coordinator.notify.notification_types import NotificationType
from coordinator.runs.models import Run
from coordinator.telemetry.models import Checkpoint, Event

SHOWN = 40  # of one source
KEPT_SECONDS = 2  # a run's events are gathered at most this often, however many look
WORKING = (
    Activity.PREPARING,
    Activity.JOINING,
    Activity.TRAINING,
    Activity.PAUSED,
    Activity.FINISHING,
)
SITE = "The site"
# Of the audit log what concerns who looks at a run, as "who did …"; the rest is between its owner and the staff.
DECISIONS = {
    "run.create": "made the run",
    "run.launch": "launched it",
    "run.accept_manifest": "prepared the text",
    "run.becomes_recruiting": "opened it to machines",
    "run.becomes_training": "started the training",
    "run.becomes_finished": "ended it: the final checkpoint is safe",
    "run.pause": "paused the run",
    "run.resume": "let it go on",
    "run.cancel": "cancelled it",
    "run.finish": "ended it",
    "run.extend": "gave it {tokens:,} tokens more",
    "run.arrange": "changed its terms",
    "run.verdict": "took updates out again",
}
MACHINES = {
    Event.Kind.JOINED: "joined",
    Event.Kind.PAUSED: "was paused by its owner",
    Event.Kind.RESUMED: "goes on",
    Event.Kind.FINISHED: "holds the final weights",
    Event.Kind.LEFT: "left",
}


def collect_activity(run: Run, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """{"id", "at" (seconds since 1970), "kind" ("run", "machine" or "weights"), "who", "what"}, the newest first.
    `rows` as `board.workers` gave them."""
    key = f"live:{run.pk}:events"
    noted = cache.get(key)
    if noted is None:
        noted = [*_decided(run), *_moved(run), *_revoked(run), *_announced(run), *_stalled(run)]
        cache.set(key, noted, KEPT_SECONDS)
    return sorted(
        [*noted, *_silent(rows)], key=lambda event: (event["at"], event["id"]), reverse=True
    )


def _event(name: object, at: float, kind: str, who: str, what: str) -> dict[str, Any]:
    return {"id": str(name), "at": round(at, 1), "kind": kind, "who": who, "what": what}


def _decided(run: Run) -> Iterator[dict[str, Any]]:
    found = AuditEntry.objects.filter(
        subject_kind="run", subject_id=str(run.pk), action__in=DECISIONS
    )
    for entry in found.select_related("actor", "machine")[:SHOWN]:
        what = DECISIONS[entry.action].format_map({"tokens": 0} | entry.detail)
        if reason := entry.detail.get("reason"):
            what += f": {reason}"
        kind = "weights" if entry.action == "run.verdict" else "run"
        yield _event(entry.pk, entry.at.timestamp(), kind, _who(run, entry), what)


def _who(run: Run, entry: AuditEntry) -> str:
    """Staff decide as the site, and are not named."""
    if entry.machine:
        return entry.machine.name
    if entry.actor_id == run.owner_id:
        return run.owner.shown_name
    return SITE


def _moved(run: Run) -> Iterator[dict[str, Any]]:
    for event in Event.objects.filter(run=run).select_related("machine")[:SHOWN]:
        yield _event(
            event.pk,
            event.at.timestamp(),
            "machine",
            event.machine.name,
            MACHINES[Event.Kind(event.kind)],
        )


def _revoked(run: Run) -> Iterator[dict[str, Any]]:
    found = Membership.objects.filter(run=run, machine__revoked__isnull=False).select_related(
        "machine"
    )
    for member in found.order_by("-machine__revoked")[:SHOWN]:
        machine = member.machine
        yield _event(
            f"revoked-{machine.pk}",
            machine.revoked.timestamp(),
            "machine",
            machine.name,
            "was revoked",
        )


def _announced(run: Run) -> Iterator[dict[str, Any]]:
    for each in Checkpoint.objects.filter(run=run).order_by("-tokens")[:SHOWN]:
        what = f"at {each.tokens:,} tokens, {each.digest[:12]}"
        yield _event(each.pk, each.announced.timestamp(), "weights", "A checkpoint", what)


def _stalled(run: Run) -> Iterator[dict[str, Any]]:
    key = f"{NotificationType.RUN_STALLED.value}:{run.pk}"
    for notice in Notification.objects.filter(person=run.owner_id, key__startswith=key)[:SHOWN]:
        yield _event(
            notice.pk, notice.created.timestamp(), "run", "It", "stalled: no machine reports"
        )


def _silent(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Machines that are gone and said no goodbye."""
    gone = [row for row in rows if not row["alive"] and row["activity"] in WORKING]
    for row in sorted(gone, key=lambda row: row["last_seen"], reverse=True)[:SHOWN]:
        name = f"silent-{row['id']}-{row['last_seen']:.0f}"
        yield _event(
            name, row["last_seen"], "machine", row["name"], "was heard for the last time, so far"
        )
