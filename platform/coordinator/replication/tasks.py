"""Pulling in the background: by the clock as the guarantee, and at once when another mirror says it has news."""

import logging

from celery import shared_task
from django.core.cache import cache
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from coordinator.replication import mirror_list
from coordinator.replication import pull as pull_module
from coordinator.replication.client import Peer, Unheard
from coordinator.replication.models import Standing

log = logging.getLogger("coordinator.replication")

QUIET = 0.5  # seconds that changes are gathered before others are nudged
PENDING = "mirrors:nudge"
ASKED = "mirrors:pull:"  # and whose key
LOST = 30  # seconds after which what was asked for and never begun may be asked for again


@shared_task(name="mirrors.pull", max_retries=0)
def pull(key: str | None = None) -> None:
    """From one mirror, by its key, or from all."""
    if key is None:
        pull_module.pull_all()
    else:
        cache.delete(ASKED + key)
        for each in mirror_list.others():
            if each.key == key:
                pull_module.pull(each)


def nudged(key: str) -> None:
    """By that mirror. One pull that has not begun is enough for whatever it says meanwhile: a Celery that was away
    would find a pull for each nudge, and come to nothing else."""
    if cache.add(ASKED + key, 1, LOST):
        pull.delay(key)


@shared_task(name="mirrors.nudge", max_retries=0)
def nudge() -> None:
    """Says to all others that there is something new here. Who does not hear it pulls by its own clock; who was silent
    the last time is not waited for, since other tasks wait behind this one."""
    cache.delete(PENDING)
    silent = set(Standing.objects.filter(silent=True).values_list("key", flat=True))
    for each in (each for each in mirror_list.others() if each.key not in silent):
        try:
            with Peer.of(each) as peer:
                peer.nudge()
        except Unheard as error:
            log.debug("%s", error.sentence)


@shared_task(name="mirrors.tell_spent")
def tell_spent(marks: list[str]) -> None:
    """To all others, at once. Who does not hear it could accept the same code within its minute or two: not told again,
    for by then it works nowhere."""
    for each in mirror_list.others():
        try:
            with Peer.of(each) as peer:
                peer.spent(marks)
        except Unheard as error:
            log.warning("what was used here may work there once more: %s", error.sentence)


def changed() -> None:
    """After a commit that added to our log."""
    try:
        if mirror_list.named()[0] and cache.add(PENDING, 1, LOST):
            nudge.apply_async(countdown=QUIET)
    except (OperationalError, RedisError) as error:
        log.debug("nobody is nudged (%s): others pull by the clock", error)
