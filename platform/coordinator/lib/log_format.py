"""How the site logs: lines for people or, with BARNRAISE_LOG_JSON=1, one JSON object a line; each names its request."""

import json
import logging
from datetime import UTC, datetime

from coordinator.lib import request_id

USUAL = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "request_id"}


class Named(logging.Filter):
    """Adds the name of the request at hand; "-" outside of any."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id.current() or "-"
        return True


class Json(logging.Formatter):
    """One object a line: at, level, logger, text, request_id, whatever else was said of it, and the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        said = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "text": record.getMessage(),
            "request_id": getattr(record, "request_id", "-"),
        }
        said |= {
            name: value
            for name, value in vars(record).items()
            if name not in USUAL and name not in said
        }
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str, ensure_ascii=False)
