"""What Celery does every few seconds.

Each task is safe to run twice, late, or at the same time as itself.
"""

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
from coordinator.lib import heartbeats
from coordinator.runs.models import Run
from coordinator.telemetry import retention
from coordinator.telemetry.remote import pull
from coordinator.telemetry.rollup import drain_queue

log = logging.getLogger("coordinator.telemetry")
# A run may change if a machine reported within `RECENT`. Every `LONG_LOOK_SECONDS` seconds runs
# with reports within `LONG_AGO` are looked at as well: a last report may have been in the queue for
# long, and a machine that a run waited for may have been revoked.
RECENT = timedelta(minutes=2)
LONG_AGO = timedelta(hours=1)
LONG_LOOK_SECONDS = 300


@shared_task(name="telemetry.drain_reports", max_retries=0)
def drain_reports() -> int:
    """Move the queue of reports into Postgres; return the number of entries."""
    moved = drain_queue()
    heartbeats.record(heartbeats.Part.REPORTS)
    return moved


@shared_task(name="telemetry.pull_remote_telemetry", max_retries=0)
def pull_remote_telemetry() -> int:
    """Pull figures of machines that report to other mirrors; return the number of rows."""
    return pull.pull_all()


@shared_task(name="telemetry.advance_runs", max_retries=0)
def advance_runs() -> int:
    """Advance every run that can change by itself by one status; return how many changed.

    What is known of a run changes with its machines' reports and when its owner leaves. Thousands
    of other runs may exist, so they are left out most of the time.
    """
    changed = 0
    since = timezone.now() - (
        LONG_AGO if cache.add("telemetry:looked", 1, LONG_LOOK_SECONDS) else RECENT
    )
    # Other drafts wait for people.
    complete = Q(status=RunStatus.DRAFT, launch_requested=True, manifest__isnull=False)
    recent = Membership.everywhere.filter(run=OuterRef("pk"), last_seen__gt=since)
    may_change = Q(Exists(recent)) | Q(owner__is_active=False)
    active = Q(status__in=[RunStatus.RECRUITING, RunStatus.TRAINING, RunStatus.PAUSED])
    for run in Run.objects.filter(complete | active & may_change).select_related("owner"):
        before = run.status
        if advance_run(run):
            changed += 1
            log.info("run %s: %s → %s", run.slug, before, run.status)
    return changed


@shared_task(name="telemetry.delete_old_telemetry")
def delete_old_telemetry() -> int:
    """Delete old rows, finer ones sooner; return how many."""
    return retention.delete_old_rows()


@shared_task(name="telemetry.delete_expired_rows")
def delete_expired_rows() -> int:
    """Delete expired enrolments and team invitations, and addresses of revoked machines.

    A report that was on its way when a machine was revoked may have stored its addresses again.

    Returns:
        How many enrolments and invitations were deleted.
    """
    old = Enrolment.objects.filter(
        decision=Enrolment.Decision.PENDING, expires__lt=timezone.now() - timedelta(days=1)
    )
    late = TeamInvitation.objects.filter(expires__lt=timezone.now())
    Membership.objects.filter(machine__revoked__isnull=False).exclude(addresses=[]).update(
        addresses=[], source_address=""
    )
    return old.delete()[0] + late.delete()[0]
