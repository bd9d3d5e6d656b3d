"""Define what the exchange needs of a network: channels of frames between peers that know each other by key.

A channel carries whole frames of at most `MAX_FRAME` bytes, in order, to a peer whose key the transport's handshake has
proven. `iroh_transport.IrohTransport` implements it over QUIC, `memory_transport.MemoryTransport` for tests.
"""

from typing import Protocol

from barnraise.protocol.messages import Peer


class ChannelClosedError(ConnectionError):
    """The other side is gone; the message says why, as far as it is known."""


class Channel(Protocol):
    peer: str  # the other side's key, proven
    bytes_sent: int
    bytes_received: int

    async def send(self, frame: bytes) -> None:
        """Returns once the frame is on its way; waits while the other side does not drain. Raises ChannelClosed."""

    async def receive(self) -> bytes:
        """The next frame. Raises ChannelClosed."""

    def close(self, reason: str) -> None: ...


class Transport(Protocol):
    key: str

    async def start(self) -> None:
        """Begins to listen, on the event loop that all later calls come from. Raises OSError."""

    def addresses(self) -> list[str]:
        """host:port at which others may reach this machine."""

    async def connect(self, peer: Peer) -> Channel:
        """Dials. Raises ChannelClosed when nobody with that key answers."""

    async def accept(self) -> Channel:
        """The next channel that somebody else opened."""

    async def close(self) -> None: ...
