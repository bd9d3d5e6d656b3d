"""Choose ports of 127.0.0.1 for servers that start later."""

import secrets
import socket
from contextlib import closing

# Linux, macOS and Windows give higher ports to outgoing connections: one of these could have such a
# port by the time the server starts, or starts again.
FIRST_PORT, LAST_PORT = 20_000, 32_000
NEIGHBOURS = 200  # ports above the wanted one that are tried


def free_port(wanted: int) -> int:
    """Return the port `wanted`, or the next free one above it.

    Raises:
        RuntimeError: There is none among the next 200.
    """
    for port in range(wanted, wanted + NEIGHBOURS):
        if is_free(port):
            return port
    raise RuntimeError(f"no port from {wanted} to {wanted + NEIGHBOURS - 1} is free")


class ReservedPort:
    """A random free port that no other process gets before this one releases it.

    A socket that never listens is bound to it, so connections to the port are refused meanwhile.
    """

    def __init__(self) -> None:
        """Reserve a port.

        Raises:
            RuntimeError: None could be had.
        """
        for _ in range(NEIGHBOURS):
            self.number = random_free_port()
            self._socket = socket.socket()
            try:
                self._socket.bind(("127.0.0.1", self.number))
            except OSError:  # another process was faster, or ended a connection there just now
                self._socket.close()
            else:
                return
        raise RuntimeError("no free port could be reserved")

    def release(self) -> None:
        """Let a server have the port. A port that is released already stays so."""
        self._socket.close()


def random_free_port() -> int:
    """Return a free port. Another process may choose the same until a server listens there."""
    return free_port(FIRST_PORT + secrets.randbelow(LAST_PORT - FIRST_PORT))


def is_free(port: int) -> bool:
    """Return whether nothing listens on the port."""
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):  # taken, or no port number at all
            return False
    return True
