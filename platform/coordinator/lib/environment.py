"""Read settings from environment variables.

Pure functions parse what people type; `read` ends the process with a sentence if it is not valid.
"""

import os
import re
import sys
import tempfile
from collections.abc import Callable, Collection
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

from barnraise.protocol import ip_addresses
from barnraise.spec import HOST_LENGTH, split_address
from coordinator.lib.exceptions import UserError

Value = TypeVar("Value")
STARTUP_FAILURE = 3  # the exit status with which uvicorn does not start a process again
SWITCHES = {"1 true yes on": True, "0 false no off": False}
HOST = re.compile(r"\*|\.?[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")
BRACKETED = re.compile(r"^\[([^][]*)\]$")
PORTS = {"https": 443, "http": 80}
OPEN_URL = re.compile(r"([\w.+-]+://)?[^@?#:]+(:\d{1,5})?(/[^@?#:]*)?")  # without a password
PASSWORD_PART = re.compile(r":[^/].*@|://.*@")
SITE_FORM = "https://barn.example.org"
NEEDS_HOST = f"cannot have a path; it needs a host name of its own, like {SITE_FORM}"
UNIX = "unix"  # among the proxies: whatever connects through a Unix socket


class SettingError(UserError):
    """A value is not valid; `expected` follows it in the sentence. "" stands for a secret."""

    def __init__(self, value: str, expected: str) -> None:
        is_secret = not value or PASSWORD_PART.search(value)
        super().__init__(f"{'its value' if is_secret else repr(value)} {expected}")


def read(variable: str, parse: Callable[..., Value], default: Value, **options: Any) -> Value:
    """Return the parsed value of a variable; the default if it is not set or empty."""
    # Some readers of env files leave quotes around a value.
    text = re.sub(r"""^\s*(['"])(.*)\1\s*$""", r"\2", os.environ.get(variable, "")).strip()
    try:
        return parse(text, **options) if text.strip(", '\"") else default
    except SettingError as error:
        end_process(f"{variable}: {error}")


def end_process(sentence: str) -> NoReturn:
    """End the process with a sentence, so that nothing starts it again at once."""
    print(sentence, file=sys.stderr)
    sys.exit(STARTUP_FAILURE)


def each(parse: Callable[[str], Value]) -> Callable[[str], list[Value]]:
    """Return a parser of lists, whose items are separated by commas or blanks."""
    return lambda text: [parse(item) for item in re.split(r"[\s,'\"]+", text) if item]


def parse_text(text: str, form: str, expected: str, *, secret: bool = False) -> str:
    """Check a text by a pattern."""
    if not re.fullmatch(form, text, re.IGNORECASE):
        raise SettingError("" if secret else text, expected)
    return text


def parse_switch(text: str) -> bool:
    """Read a switch, in any case."""
    for words, is_on in SWITCHES.items():
        if text.lower() in words.split():
            return is_on
    raise SettingError(text, "is no switch; write 1 or 0")


def parse_number(text: str, least: float = 0, most: float = 1e9, *, whole: bool = True) -> float:
    """Read a number within bounds."""
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not least <= number <= most or (whole and number != int(number)):
        raise SettingError(text, f"is no{' whole' * whole} number from {least:g} to {most:g}")
    return number


def parse_network(text: str, example: str = "a network, like 10.0.0.0/8") -> Any:
    """Read an address or a network."""
    try:
        return ip_addresses.parse_network(BRACKETED.sub(r"\1", text))
    except ValueError:
        raise SettingError(text, f"is no address or network; name {example}") from None


def parse_proxy(text: str) -> Any:
    """Read UNIX, or the address or network of a proxy."""
    is_unix = text.lower() == UNIX
    return UNIX if is_unix else parse_network(text, "the proxy's address, like 10.0.0.5, or unix")


def parse_host(text: str) -> str:
    """Read a host name as requests name it, or a domain as Django's ALLOWED_HOSTS has it."""
    host = re.sub(r"^\*\.", ".", text.lower().rstrip("/."))
    if HOST.fullmatch(host) and len(host) <= HOST_LENGTH:
        return host
    try:
        address = BRACKETED.sub(r"\1", host).partition("%")[0]
        return f"[{IPv6Address(address)}]"
    except ValueError:
        raise SettingError(text, "is no host name; name it without https:// and port") from None


def parse_url(
    text: str, schemes: Collection[str] = tuple(PORTS), form: str = SITE_FORM, path: str = ".*"
) -> str:
    """Check a URL: its scheme, its host and, by a pattern, its path."""
    is_web = set(schemes) <= set(PORTS)
    try:
        parts = split_address(text.replace("://*.", "://", 1))
        # A port alone is the beginning of a password that is not percent-encoded.
        has_host = parts.hostname or (not is_web and (parts.port is None or "@" in parts.netloc))
        is_url = has_host and parts.scheme in schemes and not parts.fragment
        is_valid = is_url and re.fullmatch(path, parts.path)
    except ValueError:  # also the UnicodeError of a host such as a..b
        is_valid = None
    if not is_valid:
        shown = text if is_web or OPEN_URL.fullmatch(text) else ""
        raise SettingError(shown, f"is no URL like {form}")
    return text


def parse_origin(text: str) -> str:
    """Return a site's own origin."""
    if "://*." in text:
        raise SettingError(text, f"names a whole domain; name one site, like {SITE_FORM}")
    return parse_trusted_origin(text)


def parse_trusted_origin(text: str) -> str:
    """Return an origin as browsers send it: lower case, no default port, no slash at its end.

    `https://*.example.org` stands for those of a whole domain.
    """
    parts = urlsplit(parse_url(text))
    if parts.path.strip("/") or parts.query or parts.username is not None:
        raise SettingError(text, f"is no site's address, which {NEEDS_HOST}")
    host = parts.netloc.lower().removesuffix(f":{PORTS[parts.scheme]}").rstrip(":")
    return f"{parts.scheme}://{host.encode('idna').decode()}"


def parse_relay(text: str) -> str:
    """Read a relay's URL, or one of the words that stand for several and for none."""
    is_word = text.lower() in ("none", "default")
    form = "https://relay.example.org"
    return text.lower() if is_word else parse_origin(parse_url(text, ("https",), form, "/?"))


def parse_folder(text: str) -> Path:
    """Return a folder, which is created if missing, to which this process can write.

    No shell expands `~` in an environment file.
    """
    try:
        folder = Path(text).expanduser().resolve()
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError) as error:  # the latter for a home folder of nobody
        reason = getattr(error, "strerror", error)
        raise SettingError(text, f"is no folder for the site ({reason})") from None
    return folder
