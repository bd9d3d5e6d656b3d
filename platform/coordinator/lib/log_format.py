"""Format log records: lines for people or, with BARNRAISE_LOG_JSON=1, one JSON object a line."""

import json
import logging
from datetime import UTC, datetime

from coordinator.lib import request_id

STANDARD_ATTRIBUTES = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "request_id"}


class RequestIdFilter(logging.Filter):
    """Add the id of the current request to each record; "-" outside of a request."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the id and keep the record."""
        record.request_id = request_id.current() or "-"
        return True


class JsonFormatter(logging.Formatter):
    """Format a record as one JSON object, with its extra attributes and its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "text": record.getMessage(),
            "request_id": getattr(record, "request_id", "-"),
        }
        fields |= {
            name: value
            for name, value in vars(record).items()
            if name not in STANDARD_ATTRIBUTES and name not in fields
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str, ensure_ascii=False)
