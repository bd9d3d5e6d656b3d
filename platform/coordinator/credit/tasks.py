"""What Celery does for credit. The task is safe to run twice, late, or concurrently."""

from celery import shared_task

from coordinator.credit.attestations import extend_delayed_credit
from coordinator.credit.replicated import credits as replicated_credits
from coordinator.telemetry.replicated import checkpoints


@shared_task(name="credit.record_events", time_limit=300)
def record_events() -> int:
    """Record new checkpoints and new credit, also delayed credit, in the event log.

    Returns:
        The number of events: a few for each machine that trains, however often it reports.
    """
    extend_delayed_credit()
    return checkpoints.record_checkpoint_events() + replicated_credits.record_credit_events()
