"""The most recent errors of all processes, stored in Valkey for the dashboard."""

import json
import logging
import time
from typing import Any

import redis.exceptions

from coordinator.lib import request_id
from coordinator.lib.valkey import valkey_client

KEY = "errors:recent"  # a list in Valkey, the newest first
MAX_ERRORS = 200
MAX_TEXT = 500  # characters


class RecentErrorsHandler(logging.Handler):
    """Store logged errors in Valkey, without ever causing another error."""

    def emit(self, entry: logging.LogRecord) -> None:
        """Store one log entry."""
        try:
            row = {
                "at": time.time(),
                "logger": entry.name,
                "text": entry.getMessage()[:MAX_TEXT],
                "error": _exception_text(entry),
                "request_id": request_id.current(),
            }
            with valkey_client().pipeline(transaction=False) as pipe:
                pipe.lpush(KEY, json.dumps(row))
                pipe.ltrim(KEY, 0, MAX_ERRORS - 1)
                pipe.execute()
        except redis.exceptions.RedisError:
            return  # Valkey is unreachable; the console shows the entry in any case.
        except (ValueError, TypeError):  # The entry's arguments do not fit its format.
            self.handleError(entry)


def list_recent(max_errors: int = 10) -> list[dict[str, Any]]:
    """List the most recent errors, the newest first."""
    return [json.loads(text) for text in valkey_client().lrange(KEY, 0, max_errors - 1)]


def count_recent(seconds: float) -> int:
    """Count the errors of the last `seconds`, up to MAX_ERRORS."""
    since = time.time() - seconds
    return sum(row["at"] >= since for row in list_recent(MAX_ERRORS))


def _exception_text(entry: logging.LogRecord) -> str:
    """Return type and text of the logged exception; "" if none was logged."""
    if not entry.exc_info or not entry.exc_info[0]:
        return ""
    return f"{entry.exc_info[0].__name__}: {entry.exc_info[1]}"[:MAX_TEXT]
