"""Read the addresses that people paste: of a site, of a run's page, or of an invitation."""

import ipaddress
import unicodedata
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import parse_qs, unquote, urlsplit

import typer

from barnraise.errors import StateError
from barnraise.spec import split_address

SCHEMES = ("http", "https")
INVITED = "invited"  # /runs/NAME/invited/TOKEN/ is an invitation's page
MAX_INVITATION = 200  # characters of a token, far more than any has


@dataclass(frozen=True)
class RunAddress:
    """A run as a person names it."""

    name: str  # in its address, or its id
    site: str = ""  # the site's address without a path; "" if the person named the run alone
    invitation: str = ""  # the token of an invitation


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
        parts = split_address(address)
    except ValueError:
        raise StateError(f"'{text}' is not an address; write it as in the browser") from None
    is_host = parts.hostname not in (None, *SCHEMES)  # as in "https:/train.example.org"
    if parts.scheme not in SCHEMES or "@" in parts.netloc or not is_host:
        raise StateError(f"'{text}' is not a site's address, like https://train.example.org")
    return f"{parts.scheme}://{parts.netloc}"


def parse_run_address(text: str) -> RunAddress:
    """Return a run, from its name in its address, its id, its page or an invitation to it.

    Raises:
        StateError: the text is an address without a run, or not an address.
    """
    address = unicodedata.normalize("NFKC", unquote(text.strip()))  # as sites store names
    if not address.isprintable():
        raise StateError(f"{text!r} is not an address; copy it from the browser")
    before, is_page, below = address.partition("/runs/")
    if not is_page:
        if "/" in address:
            raise StateError(f"'{text}' names no run; a run's address is like SITE/runs/NAME")
        return RunAddress(address)
    parts = urlsplit(f"//x/{below}")
    name, *path = parts.path.strip("/").split("/")
    if not name:
        raise StateError(f"'{text}' is the list of runs: open a run and copy its address")
    invitation = parse_qs(parts.query).get("invite", [""])[0]
    if len(path) > 1 and path[0] == INVITED:
        invitation = path[1]
    site = parse_site_address(before) if before else ""
    return RunAddress(name, site, invitation[:MAX_INVITATION])


def _usual_scheme(address: str) -> str:
    host = urlsplit(f"//{address}").hostname or ""
    if host == "localhost" or host.endswith((".localhost", ".local")):
        return "http"
    try:
        return "http" if ipaddress.ip_address(host).is_private else "https"
    except ValueError:
        return "https"  # a name


def run_argument(help_text: str) -> Any:
    """Return an argument that names a run."""
    return typer.Argument(parser=parse_run_address, metavar="RUN", help=help_text)


RunArgument = Annotated[
    RunAddress,
    run_argument("The run's address in the browser, its name in that address, or its id."),
]
