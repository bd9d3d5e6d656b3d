"""Format log records: lines for people or, with BARNRAISE_LOG_JSON=1, one JSON object a line.

What a client sends cannot forge a line, and paths are logged without what they name, because the
paths of invitations and unsubscribe links are secrets.
"""

import json
import logging
import re
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from django.http import HttpRequest

from coordinator.lib import request_id

STANDARD_ATTRIBUTES = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "request_id"}
# Characters that a terminal or a reader of logs takes for something else than text.
CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
PLACEHOLDER = re.compile(r"<(?:[^:>]+:)?([^>]+)>")  # in a route: <uuid:pk>
UNKNOWN_PATH_CHARS = 40


def describe_path(request: HttpRequest) -> str:
    """Return a request's path for a log: its route, such as /runs/<name>/, without any value.

    Of an address without a view only the first part is returned, quoted: a mistyped invitation is a
    secret as well.
    """
    if request.resolver_match and request.resolver_match.route:
        return "/" + PLACEHOLDER.sub(r"<\1>", request.resolver_match.route)
    first, slash, rest = request.path.lstrip("/").partition("/")
    return "/" + quote(first[:UNKNOWN_PATH_CHARS], safe="") + slash + ("…" if rest else "")


def escape(text: str) -> str:
    """Replace control characters, among them line ends, by their escapes."""
    return CONTROL_CHARACTERS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


class PathFilter(logging.Filter):
    """Replace the path in Django's own records about a request, and remove the request itself."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record and keep it."""
        request = getattr(record, "request", None)
        if isinstance(request, HttpRequest):
            secrets = {request.path, request.path_info, request.get_full_path()}
            # Django escapes what it logs.
            secrets |= {path.encode("unicode_escape").decode() for path in secrets}
            if isinstance(record.args, tuple):
                record.args = tuple(
                    describe_path(request) if argument in secrets else argument
                    for argument in (
                        str(argument) if isinstance(argument, HttpRequest) else argument
                        for argument in record.args
                    )
                )
            vars(record).pop("request")
        return True


class RequestIdFilter(logging.Filter):
    """Add the id of the current request to each record; "-" outside of a request."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the id and keep the record."""
        record.request_id = request_id.current() or "-"
        return True


class LineFormatter(logging.Formatter):
    """Format a record as one line; the lines of its traceback are indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line, in which only printable characters remain."""
        return escape(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        """Return the traceback, whose indentation tells its lines from records."""
        lines = super().formatException(ei).splitlines()
        return "\n".join(f"    {escape(line)}" for line in lines)


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
