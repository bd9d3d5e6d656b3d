"""Report the site's errors to Sentry, where a variable names it. The package is optional."""

from typing import Any

from barnraise import __version__
from coordinator.lib.environment import SettingError


def start(dsn: str, server_name: str) -> None:
    """Start reporting errors to `dsn`.

    Neither people, cookies, addresses nor the contents of requests are reported.

    Raises:
        SettingError: the package is not installed, or the address is not valid.
    """
    try:
        import sentry_sdk  # pyright: ignore[reportMissingImports] - optional
    except ImportError:
        raise SettingError("", "needs the package sentry-sdk; install it, or unset this") from None
    try:
        sentry_sdk.init(
            dsn=dsn,
            release=f"barnraise@{__version__}",
            server_name=server_name,
            send_default_pii=False,
            max_request_body_size="never",
            include_local_variables=False,
            before_send=remove_personal_data,
        )
    except ValueError:
        raise SettingError("", "is no URL that sentry-sdk can use") from None


def remove_personal_data(event: Any, hint: Any) -> Any:
    """Leave out who asked and from where: an error needs neither."""
    event.pop("user", None)
    request = event.get("request")
    if request:
        event["request"] = {name: request[name] for name in ("method",) if name in request}
    return event
