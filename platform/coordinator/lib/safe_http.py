"""Addresses that people type and this site then calls: never one within.

A name is resolved once, every address it has must be public, and the connection goes to the very address that was
looked at: a name that answers differently the second time gains nothing. Redirects are not followed, proxies of the
environment are not used, and an answer's body is not read.
"""

import asyncio
import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

import httpx
from django.conf import settings

PORTS = {443, 8443}
SECONDS = 8.0  # for one call, from the name to the answer's first line
EMBEDDED = (  # networks whose addresses carry an IPv4 address that somebody else delivers to
    ipaddress.ip_network("64:ff9b::/96"),
    ipaddress.ip_network("64:ff9b:1::/48"),
    ipaddress.ip_network("2002::/16"),
    ipaddress.ip_network("2001::/32"),
)


class UnsafeUrlError(ValueError):
    """This site will not call that; the text says why, as a sentence without its capital and full stop."""


@dataclass(frozen=True)
class Target:
    """What may be called: the parts of the URL, and the address that its host had when it was looked at."""

    parts: SplitResult
    address: str

    @property
    def url(self) -> str:
        """With the address in place of the name."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return self.parts._replace(netloc=f"{host}:{port(self.parts)}").geturl()


def check_url(url: str) -> SplitResult:
    """What can be said of a URL without asking anybody. Raises UnsafeUrlError."""
    try:
        parts = urlsplit(url.strip())
        parts.port  # noqa: B018  (it raises here or nowhere)
    except ValueError:
        raise UnsafeUrlError("this is not a URL") from None
    within = bool(settings.OUTSIDE_NETWORKS)
    if parts.scheme != "https" and not (within and parts.scheme == "http"):
        raise UnsafeUrlError("the URL must begin with https://")
    if not parts.hostname or parts.username or parts.password:
        raise UnsafeUrlError("the URL must name a host, and no user or password")
    if port(parts) not in PORTS and not within:
        raise UnsafeUrlError("the URL must use port 443 or 8443")
    return parts


def resolve_target(url: str) -> Target:
    """Raises UnsafeUrlError when any address of its host is private, or there is none."""
    parts = check_url(url)
    try:
        found = socket.getaddrinfo(parts.hostname, port(parts), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise UnsafeUrlError(f"no address is known for {parts.hostname}") from None
    addresses = [str(info[4][0]).partition("%")[0] for info in found]
    if inside := [address for address in addresses if not is_public(address)]:
        at = "" if inside[0] == parts.hostname else f"at {inside[0]}, which is "
        raise UnsafeUrlError(f"{parts.hostname} is {at}not a public address")
    return Target(parts, addresses[0])


def is_public(address: str) -> bool:
    """Whether anybody on the internet reaches it, or the settings say that it may be called all the same."""
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped:
        found = found.ipv4_mapped
    if any(
        found.version == network.version and found in network
        for network in settings.OUTSIDE_NETWORKS
    ):
        return True
    if isinstance(found, ipaddress.IPv6Address) and any(found in network for network in EMBEDDED):
        return False
    return found.is_global and not found.is_multicast


async def post(url: str, body: bytes, headers: dict[str, str]) -> int:
    """The answer's status. Raises UnsafeUrlError, httpx.HTTPError or TimeoutError; in any case within SECONDS."""
    async with asyncio.timeout(
        SECONDS
    ):  # of all of it: a server that answers a byte at a time gains nothing
        target = await asyncio.to_thread(resolve_target, url)
        named = {**headers, "Host": target.parts.netloc}
        async with httpx.AsyncClient(
            timeout=SECONDS, follow_redirects=False, trust_env=False
        ) as client:
            asked = client.build_request(
                "POST",
                target.url,
                content=body,
                headers=named,
                extensions={"sni_hostname": target.parts.hostname},
            )
            answer = await client.send(asked, stream=True)
            await answer.aclose()
            return answer.status_code


def port(parts: SplitResult) -> int:
    return parts.port or (443 if parts.scheme == "https" else 80)
