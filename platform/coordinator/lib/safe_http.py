"""Call URLs that people typed, but never an address inside a private network.

A host name is resolved once, each of its addresses must be public, and the connection goes to the
very address that was checked: a name that resolves differently the second time gains nothing.
Redirects are not followed, proxies of the environment are not used, and bodies are not read.
"""

import asyncio
import socket
from dataclasses import dataclass
from urllib.parse import SplitResult

import httpx
from django.conf import settings

from barnraise.protocol.certificates import trusted_certificates
from barnraise.protocol.ip_addresses import is_public_ip, parse_ip
from barnraise.spec import split_address

PORTS = {443, 8443}
# For one call, from resolving the name to the response's status. A slower answer is a failure, so a
# webhook that is slow on purpose is soon disabled.
TIMEOUT_SECONDS = 5.0


class UnsafeUrlError(ValueError):
    """This site will not call the URL.

    The text says why, as a sentence without its capital and full stop.
    """


@dataclass(frozen=True)
class Target:
    """Hold what may be called: the parts of the URL, and the checked address of its host."""

    parts: SplitResult
    address: str

    @property
    def url(self) -> str:
        """Return the URL with the address in place of the host's name."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return self.parts._replace(netloc=f"{host}:{_port_of(self.parts)}").geturl()


def check_url(url: str) -> SplitResult:
    """Check what can be checked without the network; return the parts, with an ASCII host.

    Raises:
        UnsafeUrlError: The URL is malformed or not allowed.
    """
    try:
        parts = split_address(url.strip())  # it refuses what httpx does not
        ascii_netloc = httpx.URL(url.strip()).netloc.decode()
    except (ValueError, httpx.InvalidURL):  # a UnicodeError is a ValueError
        raise UnsafeUrlError("this is not a URL") from None
    allows_private = bool(settings.OUTSIDE_NETWORKS)
    if parts.scheme != "https" and not (allows_private and parts.scheme == "http"):
        raise UnsafeUrlError("the URL must begin with https://")
    if not parts.hostname or parts.username or parts.password:
        raise UnsafeUrlError("the URL must name a host, and no user or password")
    if _port_of(parts) not in PORTS and not allows_private:
        raise UnsafeUrlError("the URL must use port 443 or 8443")
    return parts._replace(netloc=ascii_netloc)


def resolve_target(url: str) -> Target:
    """Check a URL and resolve its host.

    Raises:
        UnsafeUrlError: The URL is not allowed, or its host has no address, or a private one.
    """
    parts = check_url(url)
    try:
        resolved = socket.getaddrinfo(parts.hostname, _port_of(parts), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise UnsafeUrlError(f"no address is known for {parts.hostname}") from None
    addresses = [str(info[4][0]).partition("%")[0] for info in resolved]
    private = [address for address in addresses if not is_public(address)]
    if private:
        at = "" if private[0] == parts.hostname else f"at {private[0]}, which is "
        raise UnsafeUrlError(f"{parts.hostname} is {at}not a public address")
    return Target(parts, addresses[0])


def is_public(address: str) -> bool:
    """Return whether everybody on the internet reaches it, or the settings allow it explicitly."""
    parsed = parse_ip(address)
    return is_public_ip(parsed) or any(parsed in network for network in settings.OUTSIDE_NETWORKS)


async def post(url: str, body: bytes, headers: dict[str, str]) -> int:
    """Post to a URL that a person typed; return the response's status.

    TIMEOUT_SECONDS bound the whole call, so a server that answers a byte at a time gains nothing.

    Raises:
        UnsafeUrlError: The URL is not allowed.
        httpx.HTTPError: The call failed.
        TimeoutError: It took too long.
    """
    async with asyncio.timeout(TIMEOUT_SECONDS):
        target = await asyncio.to_thread(resolve_target, url)
        async with httpx.AsyncClient(
            timeout=TIMEOUT_SECONDS,
            follow_redirects=False,
            trust_env=False,
            verify=trusted_certificates(),
        ) as client:
            request = client.build_request(
                "POST",
                target.url,
                content=body,
                headers={**headers, "Host": target.parts.netloc},
                extensions={"sni_hostname": target.parts.hostname},
            )
            response = await client.send(request, stream=True)
            await response.aclose()
            return response.status_code


def _port_of(parts: SplitResult) -> int:
    return parts.port or (443 if parts.scheme == "https" else 80)
