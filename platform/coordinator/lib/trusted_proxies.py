"""Believe headers about the client only if a configured proxy sent them.

`X-Forwarded-For` and its kin are text that any client can write. Limits, the audit log and the
addresses of machines depend on the client's address, so these headers count only in a request
whose connection came from one of `settings.PROXIES`. In other requests they are removed. uvicorn
runs with `--no-proxy-headers`, because it would believe every program on this machine.
"""

from collections.abc import Awaitable, Callable, Sequence
from ipaddress import IPv4Network, IPv6Network
from typing import Any

from barnraise.protocol.ip_addresses import IpAddress, parse_ip

UNKNOWN_CLIENT = (
    "The site does not see the addresses of its visitors, so nobody can sign in. For its staff: "
    "BARNRAISE_PROXIES must name the proxy (unix, if the site listens on a Unix socket), which "
    "must send X-Forwarded-For."
)
FORWARDING_HEADERS = {
    b"forwarded",
    b"x-forwarded-for",
    b"x-forwarded-host",
    b"x-forwarded-port",
    b"x-forwarded-proto",
    b"x-real-ip",
}
CLIENT_HEADER = "X-Client-Address"  # of an answer to the doctor, if the site sees no address
AsgiApplication = Callable[[Any, Any, Any], Awaitable[None]]


class TrustedProxies:
    """Replace the client's address by the one that trusted proxies name.

    Args:
        application: The ASGI application.
        networks: Networks of the proxies.
        unix: Whether a sender that connects through a Unix socket is a proxy.
    """

    def __init__(
        self,
        application: AsgiApplication,
        networks: Sequence[IPv4Network | IPv6Network],
        *,
        unix: bool = False,
    ) -> None:
        self._application = application
        self._networks = networks
        self._unix = unix

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection."""
        if scope["type"] in ("http", "websocket"):
            scope = self.resolve_client(scope)
        await self._application(scope, receive, send)

    def resolve_client(self, scope: dict[str, Any]) -> dict[str, Any]:
        """Return the scope with the client's own address, and without headers it must not set."""
        client = scope.get("client")
        sender = client[0] if client else ""
        if not self._is_proxy(sender):
            headers = [
                (name, value)
                for name, value in scope["headers"]
                if name.lower() not in FORWARDING_HEADERS
            ]
            return {**scope, "headers": headers}
        # Each proxy appends the address that it was called from: the last one that is no proxy's
        # is the client's. What stands before it was written by the client.
        for name, value in reversed(scope["headers"]):
            if name.lower() != b"x-forwarded-for":
                continue
            for entry in filter(str.strip, reversed(value.decode("latin-1").split(","))):
                address = parse_forwarded(entry)
                if address is None:
                    return scope
                if not self._is_proxy(str(address)):
                    return {**scope, "client": (str(address), 0)}
        return scope

    def _is_proxy(self, sender: str) -> bool:
        address = parse_forwarded(sender)
        if address is None:
            return self._unix and not sender
        return any(address in network for network in self._networks)


def parse_forwarded(entry: str) -> IpAddress | None:
    """Return the address in an entry of X-Forwarded-For; None for one such as "unknown"."""
    text = entry.strip(' \t"')
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        return parse_ip(text)
    except ValueError:
        return None
