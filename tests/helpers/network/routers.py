"""Routers on an address of this computer, which forward a port as RFC 6887 says."""

import random
import socket
import struct
import threading
from collections.abc import Callable

from barnraise.peering.addresses import nat_pmp


def pcp_answer(request: bytes, result: int = 0, ip: str = "5.9.1.1", port: int = 50_000) -> bytes:
    """Answer as RFC 6887 (sections 7.2 and 11.1) says, built independently of the module."""
    lifetime = request[4:8]
    head = bytes([2, 0x81, 0, result]) + lifetime + bytes(4) + bytes(12)
    mapped = bytes(10) + b"\xff\xff" + socket.inet_aton(ip)
    return head + request[24:42] + struct.pack("!H", port) + mapped


class Router:
    """A router on an address of this computer, which answers as a function says."""

    def __init__(self, answer: Callable[[bytes], bytes]) -> None:
        self.requests: list[bytes] = []
        self.ip = ".".join(["127", *(str(random.randint(1, 250)) for _ in range(3))])
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((self.ip, nat_pmp.CONTROL_PORT))
        self._answer = answer
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            request, sender = self._socket.recvfrom(100)
            self.requests.append(request)
            self._socket.sendto(self._answer(request), sender)


class PcpMappings:
    """The mappings of a router: each is changed by its own nonce alone (RFC 6887, 11.3)."""

    def __init__(self, ip: str = "5.9.1.1", lifetime: int = 3600) -> None:
        self.nonces: dict[int, bytes] = {}  # by internal port
        self.results: list[int] = []
        self.ended = 0
        self._ip = ip
        self._lifetime = lifetime

    def answer(self, request: bytes) -> bytes:
        nonce, port = request[24:36], int.from_bytes(request[40:42], "big")
        is_refused = self.nonces.setdefault(port, nonce) != nonce
        self.results.append(2 * is_refused)  # NOT_AUTHORIZED
        if request[4:8] == bytes(4) and not is_refused:
            del self.nonces[port]
            self.ended += 1
        answer = pcp_answer(request, self.results[-1], self._ip)
        return answer[:4] + struct.pack("!I", self._lifetime) + answer[8:]
