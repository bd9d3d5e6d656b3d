"""Classify IP addresses: public, private, and which network one belongs to. Pure.

The site (webhooks, limits, addresses of machines) and the worker (the text of a run) use the same
rules, so that no spelling of a private address passes one of them.
"""

import ipaddress
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

IpAddress = IPv4Address | IPv6Address
MAPPED_BITS = 96  # before an IPv4 address that is mapped into IPv6

# The only IPv6 block from which public addresses are assigned. Outside of it lie mapped,
# compatible and translated IPv4 addresses (::/96, ::ffff:0:0/96, ::ffff:0:0:0/96, NAT64's
# 64:ff9b::/96 and 64:ff9b:1::/48), site-local and unique local ones.
GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
# Blocks inside it whose addresses contain an IPv4 address, to which a gateway forwards (Teredo and
# 6to4), or that are not public although `ipaddress` counts them as global.
SPECIAL_IPV6_BLOCKS = (
    ipaddress.ip_network("2001::/23"),
    ipaddress.ip_network("2002::/16"),
    ipaddress.ip_network("3fff::/20"),
)
SPECIAL_IPV4_BLOCKS = (ipaddress.ip_network("192.88.99.0/24"),)  # gateways of 6to4


def parse_ip(text: str) -> IpAddress:
    """Parse an address, without a zone; an IPv4 address mapped into IPv6 becomes IPv4.

    Raises:
        ValueError: It is not an address.
    """
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, IPv6Address) and address.ipv4_mapped:
        return address.ipv4_mapped
    return address


def parse_network(text: str, strict: bool = True) -> IPv4Network | IPv6Network:
    """Parse an address or a network; what is mapped into IPv6 becomes IPv4.

    A network is named by its first address, or by any of its addresses if that is not strict.

    Raises:
        ValueError: It is neither.
    """
    host, slash, prefix = text.partition("/")
    address = parse_ip(host)
    if slash and address.version == 4 and ":" in host:
        prefix = str(int(prefix) - MAPPED_BITS)
    return ipaddress.ip_network(f"{address}{slash}{prefix}", strict)


def is_public_ip(address: IpAddress) -> bool:
    """Return whether everybody on the internet reaches this very address.

    An address through which a gateway reaches an IPv4 address is not public, whatever it contains.
    """
    if isinstance(address, IPv6Address):
        if address not in GLOBAL_UNICAST or any(address in block for block in SPECIAL_IPV6_BLOCKS):
            return False
    elif any(address in block for block in SPECIAL_IPV4_BLOCKS):
        return False
    return address.is_global and not address.is_multicast


def is_public_host(host: str) -> bool:
    """Return whether a text is the address of a host that everybody on the internet reaches."""
    try:
        return is_public_ip(parse_ip(host))
    except ValueError:
        return False


def is_inner_host(host: str) -> bool:
    """Return whether a text is an address in a home, a company or a provider's inner network."""
    try:
        return not is_public_ip(parse_ip(host))
    except ValueError:
        return False
