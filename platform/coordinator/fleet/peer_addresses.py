"""Which addresses of a machine other machines receive. Pure.

A machine may report any address as its own. If the site passed it on, thousands of machines would
dial it, and a stranger's computer would be flooded. So an address is passed on only if the machine
has proven it: the machine's own requests come from there. An address of a private network cannot
be proven in this way. It goes only to machines behind the same public address, which are the only
ones for which it means the same computer. A relay's URL is passed on if the mirror list names it.
"""

from collections.abc import Sequence

from barnraise.protocol.ip_addresses import is_public_ip, parse_ip
from barnraise.protocol.mirror_list import is_allowed_relay, is_relay_url
from coordinator.lib.subscriber_network import subscriber_network

INSIDE = "inside"  # where requests come from that reach the site through its own private networks
MAX_PORT = 65_535


def realm(source: str) -> str:
    """Return an address's subscriber network, or INSIDE the site's own; "" if it is unknown."""
    try:
        address = parse_ip(source)
    except ValueError:
        return ""
    return subscriber_network(source) if is_public_ip(address) else INSIDE


def shareable_addresses(
    addresses: Sequence[str], source: str, receiver: str, relays: Sequence[str] = ()
) -> list[str]:
    """Choose the addresses of one machine that another machine may dial.

    Args:
        addresses: "host:port" as the machine reports them.
        source: The address that the machine's requests come from.
        receiver: The address that the receiver's requests come from.
        relays: Those that the mirror list names.
    """
    own_realm = realm(source)
    chosen: list[str] = []
    for address in addresses:
        if is_relay_url(address):
            if is_allowed_relay(address, relays):
                chosen.append(address)
            continue
        host, _, port = address.rpartition(":")
        try:
            ip = parse_ip(host.removeprefix("[").removesuffix("]"))
        except ValueError:
            continue  # a name, whose address its owner could change
        if not (port.isascii() and port.isdigit() and 0 < int(port) <= MAX_PORT):
            continue
        if is_public_ip(ip):
            is_shared = subscriber_network(str(ip)) == own_realm
        else:
            is_shared = own_realm != "" and own_realm == realm(receiver)
        if is_shared and not (ip.is_multicast or ip.is_unspecified):
            chosen.append(address)
    return chosen
