"""The newest errors of all processes, where the dashboard finds them."""

import json
import logging
import time

import redis.exceptions

from coordinator.lib import request_id
from coordinator.lib.valkey import valkey_client

KEY = "errors:recent"
KEPT = 200
LONGEST = 500  # characters of one message


class RecentErrorsHandler(logging.Handler):
    """Keeps what is logged as an error in Valkey. Never the cause of another one."""

    def emit(self, entry: logging.LogRecord) -> None:
        try:
            said = {
                "at": time.time(),
                "logger": entry.name,
                "text": entry.getMessage()[:LONGEST],
                "error": f"{entry.exc_info[0].__name__}: {entry.exc_info[1]}"[:LONGEST]
                if _raised(entry)
                else "",
                "request_id": request_id.current(),
            }
            with valkey_client().pipeline(transaction=False) as pipe:
                pipe.lpush(KEY, json.dumps(said)).ltrim(KEY, 0, KEPT - 1).execute()
        except redis.exceptions.RedisError:
            return  # Valkey is gone, and the console has the entry all the same
        except (ValueError, TypeError):  # what was logged cannot be written out
            self.handleError(entry)


def list_recent(most: int = 10) -> list[dict]:
    """Newest first."""
    return [json.loads(text) for text in valkey_client().lrange(KEY, 0, most - 1)]


def count_recent(seconds: float) -> int:
    """How many there were in the last so many seconds, up to KEPT."""
    since = time.time() - seconds
    return sum(said["at"] >= since for said in list_recent(KEPT))


def _raised(entry: logging.LogRecord) -> bool:
    return bool(entry.exc_info and entry.exc_info[0])
