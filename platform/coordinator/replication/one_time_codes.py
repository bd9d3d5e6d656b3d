"""Accept each one-time code of an authenticator app once, at all mirrors together.

A code that is used at one mirror is used at all that receive the message. Nothing is stored for
longer than a code is valid, and no log records when somebody signed in. A mark is a digest of the
secret's id and the code's time step, and reveals nothing to anybody who does not know them.
"""

import logging

from django.core.cache import cache
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from coordinator.replication import mirror_list
from coordinator.replication.tasks import send_used_codes

log = logging.getLogger("coordinator.replication")
STORED_SECONDS = 300  # longer than any code is valid


def use_once(mark: str) -> bool:
    """Use a code; return False if it was used before, here or at a mirror that announced it."""
    if not mark_used(mark):
        return False
    try:
        if mirror_list.current_version()[0]:
            send_used_codes.delay([mark])  # pyright: ignore[reportCallIssue] - a Celery task
    except (OperationalError, RedisError) as error:
        log.warning("the other mirrors are not informed of a code that was used here: %s", error)
    return True


def mark_used(mark: str) -> bool:
    """Store that a code was used; return whether this was new."""
    return cache.add(f"used-code:{mark}", 1, STORED_SECONDS)
