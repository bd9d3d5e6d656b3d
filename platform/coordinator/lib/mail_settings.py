"""Derive Django's mail settings from one URL."""

from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from coordinator.lib.environment import parse_switch, parse_url

BACKENDS = {"console": "console", "smtp": "smtp", "smtps": "smtp", "file": "filebased"}
SMTPS_PORT = 465
SUBMISSION_PORT = 587


def settings(url: str) -> dict[str, Any]:
    """Return the settings for one of these URLs.

    * `smtp://user:password@host:587`: STARTTLS, or unencrypted with `?starttls=0`, for a relay on
      this machine.
    * `smtps://…`: TLS from the start, port 465.
    * `file:///folder`: one file a mail.
    * `console:`: the log.

    Raises:
        SettingError: It is none of them.
    """
    path = "/.+" if url.startswith("file:") else "/?"
    form = "smtp://user:password@host:587, smtps://… or file:///folder"
    parts = urlsplit(parse_url(url, BACKENDS, form, path=path))
    backend = f"django.core.mail.backends.{BACKENDS[parts.scheme]}.EmailBackend"
    if parts.scheme == "file":
        return {"EMAIL_BACKEND": backend, "EMAIL_FILE_PATH": unquote(parts.path)}
    if parts.scheme == "console":
        return {"EMAIL_BACKEND": backend}
    tls = parts.scheme == "smtps"
    starttls = not tls and parse_switch(parse_qs(parts.query).get("starttls", ["1"])[-1])
    return {
        "EMAIL_BACKEND": backend,
        "EMAIL_HOST": parts.hostname or "localhost",
        "EMAIL_PORT": parts.port or (SMTPS_PORT if tls else SUBMISSION_PORT),
        "EMAIL_HOST_USER": unquote(parts.username or ""),
        "EMAIL_HOST_PASSWORD": unquote(parts.password or ""),
        "EMAIL_USE_SSL": tls,
        "EMAIL_USE_TLS": starttls,
        "EMAIL_TIMEOUT": 20,
    }
