"""The most recent errors of all processes, stored in Valkey for the dashboard."""

import json
import logging
import time
from typing import Any

import redis.exceptions

from coordinator.lib import request_id
from coordinator.lib.valkey import valkey_client

KEY = "errors:recent"
MAX_ERRORS = 200
MAX_TEXT = 500  # characters


class RecentErrorsHandler(logging.Handler):
    """Store logged errors in Valkey, without ever causing another error."""

    def emit(self, entry: logging.LogRecord) -> None:
        """Store one log entry."""
        try:
            said = {
                "at": time.time(),
                "logger": entry.name,
                "text": entry.getMessage()[:MAX_TEXT],
                "error": f"{entry.exc_info[0].__name__}: {entry.exc_info[1]}"[:MAX_TEXT]
                if _raised(entry)
                else "",
                "request_id": request_id.current(),
            }
            with valkey_client().pipeline(transaction=False) as pipe:
                pipe.lpush(KEY, json.dumps(said)).ltrim(KEY, 0, MAX_ERRORS - 1).execute()
        except redis.exceptions.RedisError:
            return  # Valkey is gone, and the console has the entry all the same
        except (ValueError, TypeError):  # what was logged cannot be written out
            self.handleError(entry)


def list_recent(most: int = 10) -> list[dict[str, Any]]:
    """List the most recent errors, the newest first."""
    return [json.loads(text) for text in valkey_client().lrange(KEY, 0, most - 1)]


def count_recent(seconds: float) -> int:
    """Count the errors of the last so many seconds, up to MAX_ERRORS."""
    since = time.time() - seconds
    return sum(said["at"] >= since for said in list_recent(MAX_ERRORS))


def _raised(entry: logging.LogRecord) -> bool:
    return bool(entry.exc_info and entry.exc_info[0])
