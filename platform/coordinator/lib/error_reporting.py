"""Report the site's errors to Sentry, where a variable names it. The package is optional."""

from typing import Any

from barnraise import __version__


class SentryMissingError(Exception):
    """SENTRY_DSN is set, and sentry-sdk is not installed."""


def start(dsn: str, server_name: str) -> bool:
    """Start reporting errors to `dsn`; return False if it is "".

    Neither people, cookies, addresses nor the contents of requests are reported.

    Raises:
        SentryMissingError: the package is not installed.
    """
    if not dsn:
        return False
    try:
        import sentry_sdk  # pyright: ignore[reportMissingImports] - optional
    except ImportError:
        raise SentryMissingError(
            "SENTRY_DSN is set: install the package sentry-sdk, or remove the variable"
        ) from None
    sentry_sdk.init(
        dsn=dsn,
        release=f"barnraise@{__version__}",
        server_name=server_name,
        send_default_pii=False,
        max_request_body_size="never",
        include_local_variables=False,
        before_send=remove_personal_data,
    )
    return True


def remove_personal_data(event: Any, hint: Any) -> Any:
    """Leave out who asked and from where: an error needs neither."""
    event.pop("user", None)
    request = event.get("request")
    if request:
        event["request"] = {name: request[name] for name in ("method",) if name in request}
    return event
