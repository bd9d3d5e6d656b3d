"""Detect events that people are notified of, from the stored data.

An event may be detected many times: its key makes sure that each person is notified once.
"""

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta

from django.db.models import Max, Q, QuerySet
from django.urls import reverse
from django.utils import timezone

from barnraise.protocol.enums import Activity, RunStatus
from coordinator.accounts.models import Machine, User
from coordinator.fleet.doubts import find_suspended_people
from coordinator.fleet.marked_names import list_keys, mark_name
from coordinator.fleet.models import Membership, RunExclusion
from coordinator.fleet.suspension import is_suspended
from coordinator.notify.alerts import detect_alerts
from coordinator.notify.drafts import draft_for_run, machine_data, notification_key, run_data
from coordinator.notify.models import Notification
from coordinator.notify.notification_types import NotificationDraft, NotificationType
from coordinator.runs.models import Run

QUIET_AFTER = timedelta(minutes=15)  # without a report of a machine that did not leave
STALLED_AFTER = timedelta(minutes=5)  # without a report of any machine
LOOK_BACK = timedelta(hours=6)  # nobody is notified of older events
WORKING = [activity for activity in Activity if activity.is_working]
OVER = [RunStatus.FINISHED, RunStatus.CANCELLED]


def detect_all(since: datetime, now: datetime | None = None) -> Iterator[NotificationDraft]:
    """Detect all events.

    Args:
        since: When the site last began to receive reports without interruption. Silence before
            that is the site's own.
        now: The current time.
    """
    now = now or timezone.now()
    yield from detect_started(now)
    yield from detect_finished(now)
    yield from detect_stalled(now, since)
    yield from detect_suspended()
    yield from detect_suspended_people()
    yield from detect_quiet(now, since)
    yield from detect_excluded(now)
    yield from detect_alerts(now)


def detect_started(now: datetime) -> Iterator[NotificationDraft]:
    """Detect runs that started."""
    kind = NotificationType.RUN_STARTED
    for run in _not_yet_notified(Run.objects.filter(started__gt=now - LOOK_BACK), kind):
        for person in find_recipients(run):
            yield draft_for_run(
                run, person, kind, f"{run.name} started", "Its machines are training."
            )


def detect_finished(now: datetime) -> Iterator[NotificationDraft]:
    """Detect runs that finished or were cancelled after their launch."""
    kind = NotificationType.RUN_FINISHED
    runs = Run.objects.filter(finished__gt=now - LOOK_BACK, status__in=OVER).exclude(spec_text="")
    for run in _not_yet_notified(runs, kind):
        if run.state is RunStatus.FINISHED:
            title = f"{run.name} finished"
            text = "Every machine that trained has the model."
        else:
            title = f"{run.name} was cancelled"
            text = ""
        for person in find_recipients(run):
            yield draft_for_run(run, person, kind, title, text)


def detect_excluded(now: datetime) -> Iterator[NotificationDraft]:
    """Detect people whom verdicts excluded from a run, by their machines."""
    exclusions = RunExclusion.objects.filter(
        verdict__proven=True, verdict__given__gt=now - LOOK_BACK
    ).select_related("run", "verdict")
    parties = {exclusion.party: exclusion for exclusion in exclusions}
    if not parties:
        return
    for machine in Machine.objects.filter(key__in=parties).select_related("owner"):
        exclusion = parties[machine.key]
        yield draft_for_run(
            exclusion.run,
            machine.owner,
            NotificationType.TICKET_REFUSED,
            f"{exclusion.run.name} has excluded you",
            exclusion.verdict.message.reason,
            episode=str(exclusion.verdict.pk),
        )


def detect_stalled(now: datetime, since: datetime) -> Iterator[NotificationDraft]:
    """Detect runs in training whose machines have all stopped reporting."""
    if now - since <= STALLED_AFTER:
        return
    runs = Run.objects.filter(status=RunStatus.TRAINING).annotate(
        last_report=Max("memberships__last_seen")
    )
    silent = runs.filter(last_report__lt=now - STALLED_AFTER, last_report__gt=now - LOOK_BACK)
    for run in silent.select_related("owner"):
        if not Membership.everywhere.alive().filter(run=run).exists():
            # The stubs do not know annotations of a query.
            last_report: datetime = run.last_report  # pyright: ignore[reportAttributeAccessIssue]
            yield draft_for_run(
                run,
                run.owner,
                NotificationType.RUN_STALLED,
                f"{run.name} stalled",
                "No machine has reported for some minutes. Machines keep training on their own and "
                "will report when they can.",
                episode=f"{last_report.timestamp():.0f}",
            )


def detect_suspended() -> Iterator[NotificationDraft]:
    """Detect runs whose machines have suspended themselves."""
    kind = NotificationType.RUN_SUSPENDED
    runs = Run.objects.filter(
        status=RunStatus.TRAINING, memberships__activity=Activity.SUSPENDED
    ).select_related("owner")
    for run in _not_yet_notified(runs.distinct(), kind):
        if is_suspended(run):
            yield draft_for_run(
                run,
                run.owner,
                kind,
                f"{run.name} is suspended",
                "Its tokens grew faster than machines can train, and its machines wait. Exclude "
                "the volunteer who stated too many, or end the run.",
            )


def detect_suspended_people() -> Iterator[NotificationDraft]:
    """Detect people whose updates are withheld, for the owners of their runs."""
    runs = Run.objects.filter(
        status=RunStatus.TRAINING, memberships__exchange__suspended__0__isnull=False
    )
    for run in runs.distinct().select_related("owner"):
        for person in find_suspended_people(run):
            name = mark_name(person, list_keys(run))
            draft = draft_for_run(
                run,
                run.owner,
                NotificationType.RUN_DOUBTED,
                f"{name} is suspended in {run.name}"[:160],
                "Their updates do not agree with those of the people whom you let in. The machines "
                "of the run withhold them until you exclude the volunteer, or clear them on the "
                "run's page.",
                episode=str(person.pk),
            )
            url = f"{reverse('run_exclude', args=[run.slug])}?person={person.pk}"
            yield replace(draft, url=url)


def detect_quiet(now: datetime, since: datetime) -> Iterator[NotificationDraft]:
    """Detect machines that stopped reporting without leaving, in all of their runs."""
    if now - since <= QUIET_AFTER:
        return
    silent = Q(last_seen__lt=now - QUIET_AFTER, last_seen__gt=now - LOOK_BACK, activity__in=WORKING)
    memberships = Membership.objects.filter(
        silent, run__status__in=[RunStatus.TRAINING, RunStatus.RECRUITING], machine__revoked=None
    )
    machines = (
        Machine.objects.filter(pk__in=memberships.values("machine"))
        .annotate(last_report=Max("memberships__last_seen"))
        .filter(last_report__lt=now - QUIET_AFTER)
        .select_related("owner")
    )
    minutes = QUIET_AFTER.seconds // 60
    for machine in machines:
        # The stubs do not know annotations of a query.
        last_report: datetime = machine.last_report  # pyright: ignore[reportAttributeAccessIssue]
        yield NotificationDraft(
            person=machine.owner,
            kind=NotificationType.MACHINE_QUIET,
            key=f"quiet:{machine.pk}:{last_report.timestamp():.0f}",
            title=f"{machine.name} stopped reporting",
            text=f"It has not reported for {minutes} minutes and did not leave the run. It may be "
            "off, asleep or offline.",
            url="/machines/",
            data={"machine": machine_data(machine), "last_seen": last_report.isoformat()},
        )


def draft_refusal(machine: Machine, run: Run, why: str) -> NotificationDraft:
    """Draft a notification that a run refused a machine: at most one a day for both."""
    return NotificationDraft(
        person=machine.owner,
        kind=NotificationType.TICKET_REFUSED,
        key=f"refused:{machine.pk}:{run.pk}:{timezone.now():%Y%m%d}",
        title=f"{run.name} refused {machine.name}",
        text=f"{why[:1].upper()}{why[1:]}.",
        url=run.get_absolute_url(),
        data={"machine": machine_data(machine), "run": run_data(run), "why": why},
    )


def find_recipients(run: Run) -> list[User]:
    """List the owner and everybody with a machine in the run.

    The owner comes last: `_not_yet_notified` takes the owner's notification as the sign that all
    others have theirs.
    """
    others = (
        User.objects.filter(machines__memberships__run=run, is_active=True)
        .exclude(pk=run.owner.pk)
        .distinct()
    )
    return [*others, run.owner] if run.owner.is_active else list(others)


def _not_yet_notified(runs: QuerySet[Run], kind: NotificationType) -> list[Run]:
    """Return the runs whose owner has no notification yet.

    The thousands of other recipients are not queried every minute.
    """
    by_key = {notification_key(kind, run): run for run in runs.select_related("owner")}
    notified = set(Notification.objects.filter(key__in=by_key).values_list("key", "person"))
    return [run for key, run in by_key.items() if (key, run.owner.pk) not in notified]
