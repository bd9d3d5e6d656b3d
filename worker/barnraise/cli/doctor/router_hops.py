"""Find the first routers on the way to the internet, without privileges.

A packet that may pass only n routers is answered by the n-th one. Linux puts the answer into the
error queue of the socket that sent it (`IP_RECVERR`, ip(7)); other systems deliver it to privileged
programs only, so nothing is found there.
"""

import select
import socket
import struct
import sys

IP_RECVERR = 11  # from <linux/in.h>
TARGET = ("192.88.99.1", 33434)  # an address that no machine has; nothing answers from there
WAIT_SECONDS = 1.0
# In struct sock_extended_err: what sent the error, and where its address begins.
ORIGIN_ICMP = 2
TIME_EXCEEDED = 11  # the type of an ICMP message: the packet has passed as many routers as it may
ADDRESS_OFFSET = 16 + 4


def find_hops(count: int = 2, target: tuple[str, int] = TARGET) -> list[str]:
    """Return the addresses of the first routers, the nearest first.

    Returns:
        One address each, "" for a router that does not answer; nothing on other systems.
    """
    if sys.platform != "linux":
        return []
    return [_find_hop(distance, target) for distance in range(1, count + 1)]


def _find_hop(distance: int, target: tuple[str, int]) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, distance)
            probe.setsockopt(socket.IPPROTO_IP, IP_RECVERR, 1)
            probe.sendto(b"barnraise", target)
            poll = select.poll()
            poll.register(probe, select.POLLERR)
            if not poll.poll(1000 * WAIT_SECONDS):
                return ""
            _, ancillary, _, _ = probe.recvmsg(512, 512, socket.MSG_ERRQUEUE)
        except OSError:
            return ""
    for level, kind, data in ancillary:
        if level == socket.IPPROTO_IP and kind == IP_RECVERR:
            return parse_offender(data)
    return ""


def parse_offender(data: bytes) -> str:
    """Return the address of the router that let a packet go no further; "" if none did.

    Args:
        data: `struct sock_extended_err`, followed by the offender's `struct sockaddr_in`.
    """
    if len(data) < ADDRESS_OFFSET + 4:
        return ""
    _, origin, kind = struct.unpack_from("=IBB", data)
    if (origin, kind) != (ORIGIN_ICMP, TIME_EXCEEDED):
        return ""  # the packet has reached its target, or was refused here
    return socket.inet_ntoa(data[ADDRESS_OFFSET : ADDRESS_OFFSET + 4])
