"""What works once, for a minute or two: codes of authenticator apps. Used at one mirror, it is used at all that hear of
it; nothing is kept for longer than such a code could work, and no log tells when somebody signed in.

A mark is a digest that names the secret's id and the code's step, and so says nothing to who does not know them."""

import logging

from django.core.cache import cache
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from coordinator.replication import mirror_list
from coordinator.replication.tasks import send_used_codes

log = logging.getLogger("coordinator.replication")
KEPT = 300  # seconds: longer than any code works


def use_once(mark: str) -> bool:
    """False when it was used before, here or at a mirror that told us. Else nobody uses it after this."""
    if not mark_used(mark):
        return False
    try:
        if mirror_list.current_version()[0]:
            send_used_codes.delay([mark])
    except (OperationalError, RedisError) as error:
        log.warning("nobody is told what was used here: %s", error)
    return True


def mark_used(mark: str) -> bool:
    """Whether that is news."""
    return cache.add(f"spent:{mark}", 1, KEPT)
