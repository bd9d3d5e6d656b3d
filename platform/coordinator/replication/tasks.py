"""Replicate in the background: by schedule as the guarantee, and at once after a notice.

A mirror that has recorded events sends the others a change notice, which makes them pull.
"""

import logging
from typing import Any

from celery import shared_task
from django.core.cache import cache
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from coordinator.lib import heartbeats
from coordinator.replication import mirror_list, slow_mirrors
from coordinator.replication import pull as pull_module
from coordinator.replication.client import (
    NOTICE_SECONDS,
    PULL_SECONDS,
    MirrorClient,
    PeerError,
)
from coordinator.replication.models import PeerStatus

log = logging.getLogger("coordinator.replication")

COLLECT_SECONDS = 0.5  # for which changes are collected before the other mirrors are notified
NOTICE_SCHEDULED = "replication:notice"  # cache key
PULL_SCHEDULED = "replication:pull:"  # cache key, followed by the mirror's public key
LOST_SECONDS = 30  # after which a task that was scheduled and never started is scheduled again


@shared_task(name="replication.pull", max_retries=0)
def pull_task(key: str | None = None) -> None:
    """Pull from the mirror with this key, or from all mirrors."""
    if key is None:
        pull_module.pull_from_all()
        heartbeats.record(heartbeats.Part.EVENTS)
        return
    cache.delete(PULL_SCHEDULED + key)
    for entry in mirror_list.other_mirrors():
        if entry.key == key and not slow_mirrors.is_resting(key):
            pull_module.pull_from(entry, PULL_SECONDS)


def schedule_pull(key: str) -> None:
    """Schedule a pull from a mirror that sent a change notice.

    One pull that has not started covers all notices that arrive meanwhile. Otherwise a Celery that
    was down would find one pull for each notice, and would do nothing else.
    """
    if cache.add(PULL_SCHEDULED + key, 1, LOST_SECONDS):
        pull_task.delay(key)  # pyright: ignore[reportCallIssue] - a Celery task


@shared_task(name="replication.notify_mirrors", max_retries=0)
def notify_mirrors() -> None:
    """Send all other mirrors a change notice; one that misses it pulls by its own schedule.

    Mirrors that were unreachable last time, and slow ones, are skipped, because other tasks wait
    behind this one.
    """
    cache.delete(NOTICE_SCHEDULED)
    unreachable = PeerStatus.objects.filter(unreachable=True).values_list("key", flat=True)
    skipped = set(unreachable)
    for entry in mirror_list.other_mirrors():
        if entry.key in skipped or slow_mirrors.is_resting(entry.key):
            continue
        client = MirrorClient.for_listed(entry, NOTICE_SECONDS)
        try:
            with client:
                client.send_change_notice()
        except PeerError as error:
            log.debug("%s", error.sentence)
        slow_mirrors.record_wait(entry.key, client.wasted_seconds)


@shared_task(name="replication.send_used_codes")
def send_used_codes(marks: list[str]) -> None:
    """Send marks of used one-time codes to all other mirrors, at once.

    A mirror that misses them could accept the same code within its minute or two. The message is
    not repeated, because by then the code has expired everywhere.
    """
    for entry in mirror_list.other_mirrors():
        try:
            with MirrorClient.for_listed(entry, NOTICE_SECONDS) as client:
                client.send_used_codes(marks)
        except PeerError as error:
            log.warning("a code that was used here may work there once more: %s", error.sentence)


def on_event_recorded(sender: type, **kwargs: Any) -> None:
    """Schedule a notice after a commit that added to our log."""
    try:
        if mirror_list.current_version()[0] and cache.add(NOTICE_SCHEDULED, 1, LOST_SECONDS):
            notify_mirrors.apply_async(countdown=COLLECT_SECONDS)  # pyright: ignore[reportCallIssue] - a Celery task
    except (OperationalError, RedisError) as error:
        log.debug("no mirror is notified (%s): they pull by their schedule", error)
