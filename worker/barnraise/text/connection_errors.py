"""Distinguish errors of a connection, which may pass, from errors of what was fetched. Pure."""

from barnraise.errors import list_causes

BUSY_STATUSES = (408, 425, 429, 500, 502, 503, 504)
# The libraries through which the hub is asked.
_LIBRARIES = ("httpx", "httpx2", "httpcore", "huggingface_hub", "requests", "urllib3", "aiohttp")


def is_busy(error: BaseException) -> bool:
    """Return whether an answer, or an error that caused this one, was that of a busy server."""
    return any(
        getattr(getattr(cause, "response", None), "status_code", 0) in BUSY_STATUSES
        for cause in list_causes(error)
    )


def is_connection_error(error: BaseException) -> bool:
    """Return whether an error, or one that caused it, is that of a connection or a server."""
    return any(
        isinstance(cause, ConnectionError | TimeoutError)
        or type(cause).__module__.partition(".")[0] in _LIBRARIES
        for cause in list_causes(error)
    )
