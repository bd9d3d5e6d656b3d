"""What has happened that people should hear of, found in what the site holds: found twice, it is told once."""

from collections.abc import Iterator
from datetime import datetime, timedelta

from django.db.models import Max, Q, QuerySet
from django.utils import timezone

from barnraise.protocol.enums import Activity, RunStatus
from coordinator.accounts.models import Machine, User
from coordinator.fleet.models import Membership
from coordinator.notify.models import Notification
from coordinator.notify.notification_types import NotificationDraft, NotificationType
from coordinator.runs.models import Run

QUIET_AFTER = timedelta(minutes=15)  # without a report, and without a goodbye
STALLED_AFTER = timedelta(minutes=5)  # without any machine
LOOK_BACK = timedelta(hours=6)  # an older event is no news any more
WORKING = [
    Activity.PREPARING,
    Activity.JOINING,
    Activity.TRAINING,
    Activity.PAUSED,
    Activity.FINISHING,
]
OVER = [RunStatus.FINISHED, RunStatus.CANCELLED]


def detect_all(since: datetime, now: datetime | None = None) -> Iterator[NotificationDraft]:
    """`since`: the site has heard reports without a break from then on; silence before that is its own."""
    now = now or timezone.now()
    yield from detect_started(now)
    yield from detect_finished(now)
    yield from detect_stalled(now, since)
    yield from detect_quiet(now, since)


def detect_started(now: datetime) -> Iterator[NotificationDraft]:
    for run in _not_yet_notified(
        Run.objects.filter(started__gt=now - LOOK_BACK), NotificationType.RUN_STARTED
    ):
        for person in find_recipients(run):
            yield draft_for_run(
                run,
                person,
                NotificationType.RUN_STARTED,
                f"{run.name} started",
                "Its machines are training.",
            )


def detect_finished(now: datetime) -> Iterator[NotificationDraft]:
    runs = Run.objects.filter(finished__gt=now - LOOK_BACK, status__in=OVER).exclude(spec_text="")
    for run in _not_yet_notified(runs, NotificationType.RUN_FINISHED):
        word = "is finished" if run.state is RunStatus.FINISHED else "was cancelled"
        text = "The model is on every machine that trained it: `barnraise export` writes it out."
        for person in find_recipients(run):
            yield draft_for_run(
                run,
                person,
                NotificationType.RUN_FINISHED,
                f"{run.name} {word}",
                text if run.state is RunStatus.FINISHED else "",
            )


def detect_stalled(now: datetime, since: datetime) -> Iterator[NotificationDraft]:
    runs = Run.objects.filter(status=RunStatus.TRAINING).annotate(
        heard=Max("memberships__last_seen")
    )
    for run in runs.filter(heard__lt=now - STALLED_AFTER, heard__gt=now - LOOK_BACK).select_related(
        "owner"
    ):
        if (
            now - since > STALLED_AFTER
            and not Membership.everywhere.alive().filter(run=run).exists()
        ):
            text = "No machine has reported for some minutes. Those that hold a ticket may be going on by themselves."
            episode = f"{run.heard.timestamp():.0f}"
            yield draft_for_run(
                run, run.owner, NotificationType.RUN_STALLED, f"{run.name} stalled", text, episode
            )


def detect_quiet(now: datetime, since: datetime) -> Iterator[NotificationDraft]:
    """Of a machine in several runs only one: it is quiet when it is in all of them."""
    if now - since <= QUIET_AFTER:
        return
    silent = Q(last_seen__lt=now - QUIET_AFTER, last_seen__gt=now - LOOK_BACK, activity__in=WORKING)
    here = Membership.objects.filter(
        run__status__in=[RunStatus.TRAINING, RunStatus.RECRUITING], machine__revoked=None
    )
    machines = here.filter(silent).values("machine")
    for machine in (
        Machine.objects.filter(pk__in=machines)
        .annotate(heard=Max("memberships__last_seen"))
        .filter(heard__lt=now - QUIET_AFTER)
        .select_related("owner")
    ):
        minutes = QUIET_AFTER.seconds // 60
        yield NotificationDraft(
            person=machine.owner,
            kind=NotificationType.MACHINE_QUIET,
            key=f"quiet:{machine.pk}:{machine.heard.timestamp():.0f}",
            title=f"{machine.name} went quiet",
            text=f"It has not reported for {minutes} minutes and said no goodbye. It may be off, asleep or offline.",
            url="/machines/",
            data={
                "machine": {"id": str(machine.pk), "name": machine.name},
                "last_seen": machine.heard.isoformat(),
            },
        )


def draft_refusal(machine: Machine, run: Run, why: str) -> NotificationDraft:
    """For whoever turns a machine away. One a day for each machine and run."""
    return NotificationDraft(
        person=machine.owner,
        kind=NotificationType.TICKET_REFUSED,
        key=f"refused:{machine.pk}:{run.pk}:{timezone.now():%Y%m%d}",
        title=f"{machine.name} was refused a place in {run.name}",
        text=f"{why[:1].upper()}{why[1:]}.",
        url=run.get_absolute_url(),
        data={
            "machine": {"id": str(machine.pk), "name": machine.name},
            "run": _run_data(run),
            "why": why,
        },
    )


def find_recipients(run: Run) -> list[User]:
    """Everybody with a machine in it, and its owner: the last, because by what they were told it is known that the
    others were (`_untold`)."""
    theirs = (
        User.objects.filter(machines__memberships__run=run, is_active=True)
        .exclude(pk=run.owner_id)
        .distinct()
    )
    return [*theirs, run.owner] if run.owner.is_active else list(theirs)


def _not_yet_notified(runs: QuerySet[Run], kind: NotificationType) -> list[Run]:
    """Those whose owner has not been told yet: the others' people are thousands, and not looked for every minute."""
    found = {_key(kind, run): run for run in runs.select_related("owner")}
    told = set(Notification.objects.filter(key__in=found).values_list("key", "person"))
    return [run for key, run in found.items() if (key, run.owner_id) not in told]


def draft_for_run(
    run: Run, person: User, kind: NotificationType, title: str, text: str = "", episode: str = ""
) -> NotificationDraft:
    return NotificationDraft(
        person,
        kind,
        _key(kind, run, episode),
        title,
        text,
        run.get_absolute_url(),
        {"run": _run_data(run)},
    )


def _key(kind: NotificationType, run: Run, episode: str = "") -> str:
    return ":".join(filter(None, (kind.value, str(run.pk), episode)))


def _run_data(run: Run) -> dict[str, str]:
    return {"id": str(run.pk), "slug": run.slug, "name": run.name, "status": run.status}
