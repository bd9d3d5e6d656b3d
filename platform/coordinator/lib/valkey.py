"""Provide this process's one client of Valkey."""

from functools import lru_cache

import redis
from django.conf import settings
from redis.backoff import NoBackoff
from redis.retry import Retry


@lru_cache(maxsize=1)
def valkey_client() -> redis.Redis:
    """Return the shared client; it decodes answers to text.

    It retries a command once, because a restart of Valkey cuts idle connections. Callers should
    not wait for more than that.
    """
    return redis.Redis.from_url(
        settings.REDIS_URL,
        decode_responses=True,
        socket_timeout=5,
        socket_connect_timeout=2,
        retry=Retry(NoBackoff(), 1),
    )
