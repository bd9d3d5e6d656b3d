"""Choose the proxy that HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY name for an address.

Small letters go first. Where no variable is set, the settings of macOS and Windows count.
"""

import logging
import os
import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from barnraise.errors import StateError
from barnraise.protocol.ip_addresses import parse_ip, parse_network
from barnraise.spec import split_address

log = logging.getLogger("barnraise")

SYSTEM = "the system's settings"
PORTS = {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080}  # where none is named
_HOST = re.compile(r"[a-z0-9_*-][a-z0-9_.*-]*")
# An entry of NO_PROXY: a network, or a name that may hold `*`; and a port if only that one counts.
DirectHost = tuple[IPv4Network | IPv6Network | str, int | None]


@dataclass(frozen=True)
class NamedProxy:
    """A proxy and the variable that names it; it is shown without the name and password for it."""

    url: str
    source: str
    auth: tuple[str, str] | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"the proxy {self.url} of {self.source}"


def choose_proxy(url: str) -> NamedProxy | None:
    """Return the proxy for an address, or None.

    Raises:
        StateError: what is named for it is no proxy.
    """
    parts, named = urlsplit(url), getproxies()
    scheme = parts.scheme if parts.scheme in named else "all"
    host, port = (parts.hostname or "").rstrip("."), parts.port or PORTS.get(parts.scheme)
    direct_hosts = parse_direct_hosts(_find_source("no"), named.get("no", ""))
    source = _find_source(scheme)
    if scheme not in named or any(_matches(direct, host, port) for direct in direct_hosts):
        return None
    if source == SYSTEM and proxy_bypass(host):
        return None
    return parse_proxy(source, named[scheme])


def _find_source(scheme: str) -> str:
    """Return the variable that counts, as it is spelled in the environment."""
    spellings = f"{scheme}_proxy", f"{scheme}_proxy".upper()
    return next((spelling for spelling in spellings if spelling in os.environ), SYSTEM)


def parse_proxy(source: str, value: str) -> NamedProxy | None:
    """Parse a proxy's address; without a scheme it is one of HTTP. None if it is empty.

    Raises:
        StateError: it is none. The text shows nothing of a name or password.
    """
    value = value.strip(" \t\r\n\"'")
    scheme, separator, rest = value.partition("://")
    credentials, _, place = (rest if separator else value).rpartition("@")
    scheme = {"socks": "socks5"}.get(scheme.lower(), scheme.lower()) if separator else "http"
    name, _, password = credentials.partition(":")
    try:
        parts, port = split_address(f"//{place}"), PORTS[scheme]
        host = parts.hostname or ""
        if not host or host in PORTS:  # as in "http:/proxy.example"
            raise ValueError("it names no host")
        shown = f"[{host}]" if ":" in host else host
        url = f"{scheme}://{shown}:{parts.port or port}"
    except (ValueError, LookupError):
        if not value:
            return None
        place = re.sub(r":(?!\d*$)[^:]*$", ":…", place)  # it may be a password without a host
        shown = f"{scheme}://{place}" if scheme.isalnum() else place
        raise StateError(
            f"{source} names '{shown}', which is no proxy: write it as http://HOST:PORT or "
            "socks5://HOST:PORT"
        ) from None
    return NamedProxy(url, source, (unquote(name), unquote(password)) if credentials else None)


@lru_cache(maxsize=8)
def parse_direct_hosts(source: str, value: str) -> tuple[DirectHost, ...]:
    """Parse NO_PROXY; log what cannot be understood, and leave it out."""
    hosts: list[DirectHost] = []
    for entry in filter(None, re.split(r"[\s,;\"']+", value)):
        shown = entry.rpartition("@")[2]  # without a password
        try:
            hosts.append(_parse_direct_host(shown.rpartition("://")[2].rstrip("/.").lower()))
        except ValueError:
            log.warning("%s: '%s' is no host or network and is left out", source, shown)
    return tuple(hosts)


def _parse_direct_host(text: str) -> DirectHost:
    if text.count(":") > 1 and "[" not in text:
        return parse_network(text, strict=False), None
    parts = urlsplit(f"//{text}")
    host = f"{parts.hostname or ''}{parts.path}"  # a network has a path: "/8"
    if ":" in host or re.fullmatch(r"[\d.]+(/.*)?", host):
        return parse_network(host, strict=False), parts.port
    name = host.removeprefix("*.").removeprefix(".").encode("idna").decode()
    if not _HOST.fullmatch(name):
        raise ValueError("it is no host")
    return name, parts.port


def _matches(direct: DirectHost, host: str, port: int | None) -> bool:
    """Return whether a host is named, or in a network, or below a name."""
    named, named_port = direct
    if named_port not in (None, port):
        return False
    if isinstance(named, str):
        return fnmatchcase(host, named) or fnmatchcase(host, f"*.{named}")
    try:
        return parse_ip(host) in named
    except ValueError:
        return False
