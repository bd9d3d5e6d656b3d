"""Record when each background part of the site last advanced, and find those that have stopped.

Pages are served while Celery or beat is dead, and would show old figures as if they were current.
So each part records a heartbeat in Valkey whenever it has advanced. Pages state since when their
figures are delayed, /readyz fails after `STOPPED_SECONDS`, and /metrics has the ages.
"""

import logging
import time
from enum import StrEnum

import redis.exceptions

from coordinator.lib.ttl_cache import TtlCache
from coordinator.lib.valkey import valkey_client

log = logging.getLogger("coordinator.lib.heartbeats")

KEY = "heartbeats"  # Valkey's hash: part → seconds since 1970
# Beyond a part's interval, after which pages say that figures are delayed. With the time until
# watchers receive it, that is within five seconds of the first report that they do not see.
DELAYED_SECONDS = 1.5
STOPPED_SECONDS = 30.0  # after which the site is not ready


class Part(StrEnum):
    """A background part of the site that must advance."""

    SCHEDULE = "schedule"
    """Beat looks for tasks that are due."""
    REPORTS = "reports"
    """Celery moves the machines' reports into Postgres."""
    EVENTS = "events"
    """Celery pulls the other mirrors' events and applies them."""


INTERVALS = {Part.SCHEDULE: 1.0, Part.REPORTS: 2.0, Part.EVENTS: 5.0}  # seconds between advances
_READ_SECONDS = 0.5  # for which a process reuses what it has read
_recorded: TtlCache[None, dict[Part, float]] = TtlCache(_READ_SECONDS)
# Part → when it last advanced, in seconds since 1970, as far as this process knows. A part that has
# never advanced, or whose heartbeat Valkey lost, counts from when this process first missed it.
_latest: dict[Part, float] = {}


def record(part: Part) -> None:
    """Record that a part has advanced. A part goes on without Valkey, so this never fails."""
    try:
        valkey_client().hset(KEY, part.value, repr(time.time()))
    except redis.exceptions.RedisError as error:
        log.debug("the heartbeat of %s was not recorded: %s", part, error)


def read_ages() -> dict[Part, float]:
    """Return for each part how many seconds ago it advanced.

    Raises:
        RedisError: Valkey does not answer.
    """
    _latest.update(_recorded.get(None, _read_recorded))
    return _compute_ages()


def stopped_parts() -> dict[Part, float]:
    """Return the parts that have stopped, and for how many seconds.

    Raises:
        RedisError: Valkey does not answer.
    """
    return {part: age for part, age in read_ages().items() if age > STOPPED_SECONDS}


def delayed_since() -> float | None:
    """Return since when figures on pages are delayed, in seconds since 1970; None: they are not.

    While Valkey does not answer, this follows from what this process read before.
    """
    try:
        ages = read_ages()
    except redis.exceptions.RedisError:
        ages = _compute_ages()
    late = [part for part, age in ages.items() if age > INTERVALS[part] + DELAYED_SECONDS]
    return min((_latest[part] for part in late), default=None)


def forget() -> None:
    """Forget what this process knows: parts without a heartbeat count from the next call."""
    _recorded.invalidate(None)
    _latest.clear()


def _compute_ages() -> dict[Part, float]:
    now = time.time()
    return {part: max(0.0, now - _latest.setdefault(part, now)) for part in Part}


def _read_recorded() -> dict[Part, float]:
    texts: dict[str, str] = valkey_client().hgetall(KEY)  # pyright: ignore[reportAssignmentType] - the client is not asynchronous
    return {part: float(texts[part.value]) for part in Part if part.value in texts}
