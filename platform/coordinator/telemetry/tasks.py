"""What Celery does every few seconds. Each is safe to run twice, late, or at the same time as itself."""

import logging
from datetime import timedelta

from celery import shared_task
from django.core.cache import cache
from django.db.models import Exists, OuterRef, Q
from django.utils import timezone

from barnraise.protocol.enums import RunStatus
from coordinator.accounts.models import Enrolment, TeamInvitation
from coordinator.fleet.lifecycle_facts import advance_run
from coordinator.fleet.models import Membership
from coordinator.runs.models import Run
from coordinator.telemetry import retention
from coordinator.telemetry.remote import pull
from coordinator.telemetry.rollup import drain_queue

log = logging.getLogger("coordinator.telemetry")
LATELY = timedelta(minutes=2)  # ago, at most, somebody reported in a run that may change
LONGER = timedelta(
    hours=1
)  # the same, where nothing waits for it: a last report may have been long in the queue,
LONGER_EVERY = 300  # seconds, and whom a run waited for may have been revoked since


@shared_task(name="telemetry.drain_reports", max_retries=0)
def drain_reports() -> int:
    """The queue of reports into Postgres."""
    return drain_queue()


@shared_task(name="telemetry.pull_remote_telemetry", max_retries=0)
def pull_remote_telemetry() -> int:
    """What is new of machines that report to other mirrors. How many rows."""
    return pull.pull_all()


@shared_task(name="telemetry.advance_runs", max_retries=0)
def advance_runs() -> int:
    """Every run that can change by itself, one step on. How many did. What is known of a run changes with what its
    machines say, and when its owner leaves: the others, thousands perhaps, are not looked at, or now and then."""
    changed = 0
    since = timezone.now() - (LONGER if cache.add("telemetry:looked", 1, LONGER_EVERY) else LATELY)
    complete = Q(
        status=RunStatus.DRAFT, launch_requested=True, manifest__isnull=False
    )  # other drafts wait for people
    lately = Membership.everywhere.filter(run=OuterRef("pk"), last_seen__gt=since)
    heard = Q(Exists(lately)) | Q(owner__is_active=False)
    under_way = Q(status__in=[RunStatus.RECRUITING, RunStatus.TRAINING, RunStatus.PAUSED])
    for run in Run.objects.filter(complete | under_way & heard).select_related("owner"):
        before = run.status
        if advance_run(run):
            changed += 1
            log.info("run %s: %s → %s", run.slug, before, run.status)
    return changed


@shared_task(name="telemetry.delete_old_telemetry")
def delete_old_telemetry() -> int:
    """Old rows go, finer ones sooner. How many."""
    return retention.delete_old_rows()


@shared_task(name="telemetry.delete_expired_rows")
def delete_expired_rows() -> int:
    """Forgets enrolments that nobody decided on, invitations that nobody answered, and where revoked machines were (a
    report that was still on its way may have said it again)."""
    old = Enrolment.objects.filter(
        decision=Enrolment.Decision.PENDING, expires__lt=timezone.now() - timedelta(days=1)
    )
    late = TeamInvitation.objects.filter(expires__lt=timezone.now())
    Membership.objects.filter(machine__revoked__isnull=False).exclude(addresses=[]).update(
        addresses=[]
    )
    return old.delete()[0] + late.delete()[0]
