"""Count events in the current minute, hour or day, for limits that all processes share.

The counters are in Valkey.
"""

import time
from typing import Any, cast

from coordinator.lib.valkey import valkey_client


def counter_key(name: str, seconds: int) -> str:
    """Return Valkey's key of a counter for the current period of so many seconds."""
    return f"limit:{name}:{int(time.time()) // seconds}"


def count_in_period(name: str, seconds: int, amount: int = 1) -> int:
    """Count one more event in the current period, or several; return the count.

    Args:
        name: What is counted, and of whom.
        seconds: The length of a period; periods of one name have one length.
        amount: What to add.

    Raises:
        redis.exceptions.RedisError: Valkey does not answer.
    """
    counter = counter_key(name, seconds)
    with valkey_client().pipeline() as pipe:
        pipe.incrby(counter, amount)
        pipe.expire(counter, seconds)
        count, _ = cast(list[Any], pipe.execute())
    return int(count)


def read_count(name: str, seconds: int) -> int:
    """Return the count in the current period.

    Raises:
        redis.exceptions.RedisError: Valkey does not answer.
    """
    return int(str(valkey_client().get(counter_key(name, seconds)) or 0))
