"""A SOCKS 5 proxy (RFC 1928) on this machine, which leads all names to this machine."""

import socket
import threading

from helpers.network.forward_proxy import pass_on


class SocksProxy:
    """A proxy on a thread.

    Attributes:
        targets: "host:port" of each request, in order.
        auth: "name:password" that it demands (RFC 1929); "" for none.
    """

    def __init__(self, auth: str = "") -> None:
        self.targets: list[str] = []
        self.auth = auth
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.place = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._listener.shutdown(socket.SHUT_RDWR)  # the thread that waits wakes up
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=[client], daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, client.makefile("rb") as received:
            _, methods = received.read(2)
            received.read(methods)
            client.sendall(b"\x05\x02" if self.auth else b"\x05\x00")
            if self.auth:
                name = received.read(received.read(2)[1]).decode()
                password = received.read(received.read(1)[0]).decode()
                client.sendall(b"\x01\x00" if f"{name}:{password}" == self.auth else b"\x01\x01")
                if f"{name}:{password}" != self.auth:
                    return
            kind = received.read(4)[3]  # 1 for an IPv4 address, 3 for a name
            host = received.read(received.read(1)[0] if kind == 3 else 4)
            port = int.from_bytes(received.read(2))
            shown = host.decode() if kind == 3 else socket.inet_ntoa(host)
            self.targets.append(f"{shown}:{port}")
            with socket.create_connection(("127.0.0.1", port)) as upstream:
                client.sendall(b"\x05\x00\x00\x01" + bytes(6))
                pass_on(client, upstream)
