"""Pulling in the background: by the clock as the guarantee, and at once when another mirror says it has news."""

import logging

from celery import shared_task
from django.core.cache import cache
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from coordinator.replication import mirror_list
from coordinator.replication import pull as pull_module
from coordinator.replication.client import MirrorClient, PeerError
from coordinator.replication.models import PeerStatus

log = logging.getLogger("coordinator.replication")

QUIET = 0.5  # seconds that changes are gathered before others are nudged
PENDING = "mirrors:nudge"
ASKED = "mirrors:pull:"  # and whose key
LOST = 30  # seconds after which what was asked for and never begun may be asked for again


@shared_task(name="replication.pull", max_retries=0)
def pull_task(key: str | None = None) -> None:
    """From one mirror, by its key, or from all."""
    if key is None:
        pull_module.pull_from_all()
    else:
        cache.delete(ASKED + key)
        for each in mirror_list.other_mirrors():
            if each.key == key:
                pull_module.pull_from(each)


def schedule_pull(key: str) -> None:
    """By that mirror. One pull that has not begun is enough for whatever it says meanwhile: a Celery that was away
    would find a pull for each nudge, and come to nothing else."""
    if cache.add(ASKED + key, 1, LOST):
        pull_task.delay(key)


@shared_task(name="replication.notify_mirrors", max_retries=0)
def notify_mirrors() -> None:
    """Says to all others that there is something new here. Who does not hear it pulls by its own clock; who was silent
    the last time is not waited for, since other tasks wait behind this one."""
    cache.delete(PENDING)
    silent = set(PeerStatus.objects.filter(silent=True).values_list("key", flat=True))
    for each in (each for each in mirror_list.other_mirrors() if each.key not in silent):
        try:
            with MirrorClient.for_listed(each) as peer:
                peer.send_change_notice()
        except PeerError as error:
            log.debug("%s", error.sentence)


@shared_task(name="replication.send_used_codes")
def send_used_codes(marks: list[str]) -> None:
    """To all others, at once. Who does not hear it could accept the same code within its minute or two: not told again,
    for by then it works nowhere."""
    for each in mirror_list.other_mirrors():
        try:
            with MirrorClient.for_listed(each) as peer:
                peer.send_used_codes(marks)
        except PeerError as error:
            log.warning("what was used here may work there once more: %s", error.sentence)


def schedule_notification() -> None:
    """After a commit that added to our log."""
    try:
        if mirror_list.current_version()[0] and cache.add(PENDING, 1, LOST):
            notify_mirrors.apply_async(countdown=QUIET)
    except (OperationalError, RedisError) as error:
        log.debug("nobody is nudged (%s): others pull by the clock", error)
