"""Choose UDP ports of 127.0.0.1 for machines that start later, and again."""

import secrets
import socket
from contextlib import closing

# Systems give higher ports to unbound sockets: one of these could have the port of a machine that
# was killed by the time it starts again.
FIRST_PORT, LAST_PORT = 20_000, 32_000


def free_udp_port() -> int:
    """Return a UDP port that nothing has now."""
    while True:
        port = FIRST_PORT + secrets.randbelow(LAST_PORT - FIRST_PORT)
        with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
