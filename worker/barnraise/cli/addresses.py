"""Read the addresses that people paste: of a site, or of a run's page."""

import ipaddress
from typing import Annotated
from urllib.parse import urlsplit

import typer

from barnraise.errors import StateError


def parse_site_address(text: str) -> str:
    """Return the site's address without a path, from any address of the site.

    Without a scheme, a name means HTTPS. This computer and private networks mean HTTP: a site
    there has no certificate.

    Raises:
        StateError: the text is not an address of a site.
    """
    address = text.strip()
    try:
        if "://" not in address:
            address = f"{_usual_scheme(address)}://{address}"
        parts = urlsplit(address)
        _ = parts.port  # raises when it is not a port
    except ValueError:
        raise StateError(f"'{text}' is not an address; write it as in the browser") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise StateError(f"'{text}' is not a site's address, like https://train.example.org")
    return f"{parts.scheme}://{parts.netloc}"


def parse_run(text: str) -> str:
    """Return the run's name in its address, from that name, its id or the address of its page."""
    path = urlsplit(text).path if "://" in text else text
    _, is_page, name = path.rpartition("/runs/")
    return name.strip("/").partition("/")[0] if is_page else text


def _usual_scheme(address: str) -> str:
    host = urlsplit(f"//{address}").hostname or ""
    if host == "localhost" or host.endswith((".localhost", ".local")):
        return "http"
    try:
        return "http" if ipaddress.ip_address(host).is_private else "https"
    except ValueError:
        return "https"  # a name


RunArgument = Annotated[
    str,
    typer.Argument(
        parser=parse_run, metavar="RUN", help="The run's name in its address, its page, or its id."
    ),
]
