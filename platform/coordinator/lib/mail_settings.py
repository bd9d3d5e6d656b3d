"""Django's mail settings from one URL."""

from urllib.parse import parse_qs, unquote, urlsplit

BACKENDS = {"console": "console", "smtp": "smtp", "smtps": "smtp", "file": "filebased"}


def settings(url: str) -> dict:
    """`smtp://user:password@host:587` (STARTTLS; with ?starttls=0 in the clear, for a relay on this machine),
    `smtps://…` (TLS from the start, port 465), `file:///folder` (a file a letter) or `console:` (the log). Raises
    ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in BACKENDS:
        raise ValueError(f"EMAIL_URL must start with {', '.join(BACKENDS)}, not '{parts.scheme}'")
    found: dict = {
        "EMAIL_BACKEND": f"django.core.mail.backends.{BACKENDS[parts.scheme]}.EmailBackend"
    }
    if parts.scheme == "file":
        return {**found, "EMAIL_FILE_PATH": unquote(parts.path)}
    if parts.scheme == "console":
        return found
    tls = parts.scheme == "smtps"
    starttls = not tls and parse_qs(parts.query).get("starttls", ["1"])[-1] != "0"
    return {
        **found,
        "EMAIL_HOST": parts.hostname or "localhost",
        "EMAIL_PORT": parts.port or (465 if tls else 587),
        "EMAIL_HOST_USER": unquote(parts.username or ""),
        "EMAIL_HOST_PASSWORD": unquote(parts.password or ""),
        "EMAIL_USE_SSL": tls,
        "EMAIL_USE_TLS": starttls,
        "EMAIL_TIMEOUT": 20,
    }
