"""Define what the exchange needs of a network: channels of frames between peers.

A channel carries whole frames of at most `MAX_FRAME_BYTES` bytes, in order, to a peer whose key the
transport's handshake has proven. `iroh_transport.IrohTransport` implements this over QUIC, and over
TLS for the protocols that are added, `memory_transport.MemoryTransport` for tests.
"""

from collections.abc import Sequence
from typing import Protocol

from barnraise.protocol.messages import Peer
from barnraise.protocol.types import replace_unprintable

MAX_REASON = 200  # characters of why a channel ended, which the other side may have written


LEAVING = "leaving"  # the reason with which a program that ends closes its channels


class ChannelClosedError(ConnectionError):
    """The other side is gone; the message says why, as far as that is known."""

    def __init__(self, reason: str = "") -> None:
        """Store the reason, in one line and without control characters: a stranger wrote it."""
        super().__init__(replace_unprintable(reason[:MAX_REASON]))

    @property
    def peer_left(self) -> bool:
        """Whether the other side closed the channel because its program ends."""
        return str(self).startswith(f"closed by peer: {LEAVING}")


class Channel(Protocol):
    """Carry frames to and from one peer."""

    peer: str  # the other side's key, proven
    remote_address: str  # the host:port at which this machine sees it; empty if it is unknown

    @property
    def bytes_sent(self) -> int:
        """The bytes that this machine has put on its line, with the protocol's own where known."""
        ...

    @property
    def bytes_received(self) -> int:
        """The same of what has arrived."""
        ...

    def refresh_remote_address(self) -> bool:
        """Look up `remote_address`, which is another one once the peer changed networks.

        Returns:
            Whether it has changed.
        """
        ...

    @property
    def is_relayed(self) -> bool:
        """Whether the frames go through a relay now, because no direct path works."""
        ...

    async def send(self, frame: bytes) -> None:
        """Return once the frame is on its way; wait while the other side does not drain.

        Raises:
            ChannelClosedError: When the channel has ended.
        """

    async def receive(self) -> bytes:
        """Return the next frame.

        Raises:
            ChannelClosedError: When the channel has ended.
        """
        ...

    def close(self, reason: str) -> None:
        """End the channel; the other side is given the reason. Safe to call twice."""
        ...


class ChannelSource(Protocol):
    """Open channels of one protocol to peers and accept theirs."""

    key: str  # this machine's own

    async def connect(self, peer: Peer) -> Channel:
        """Dial a peer, at host:port addresses and through a relay if its URL is among them.

        Raises:
            ChannelClosedError: When no peer with that key answers.
        """
        ...

    async def accept(self) -> Channel:
        """Return the next channel that another peer opened."""
        ...


class Transport(ChannelSource, Protocol):
    """A machine's endpoint: the source of channels that its owner starts and closes."""

    @property
    def mappable_port(self) -> int:
        """The UDP port that a router could forward to this machine; 0 if there is none."""
        ...

    async def start(self) -> None:
        """Listen. All later calls come from the event loop of this one.

        Raises:
            OSError: When the transport cannot listen.
        """

    def addresses(self) -> list[str]:
        """Return the host:port pairs at which others may reach this machine."""
        ...

    async def set_relays(self, relays: Sequence[str]) -> None:
        """Use these relays, and no others, where no direct path works.

        Args:
            relays: URLs; "default" stands for the public ones of iroh's makers.
        """

    def add_protocol(self, name: str) -> ChannelSource:
        """Return a source of channels for another protocol over the same endpoint.

        Call it before `start`. Channels of one protocol only meet those of the same protocol.
        """
        ...

    @property
    def probes_received(self) -> int:
        """How many probes of other machines have reached this one."""
        ...

    async def probe(self, peer: Peer) -> bool:
        """Dial a peer as a stranger does: from another port and with another key than this peer's.

        Returns:
            Whether a machine with the peer's key answered at one of its addresses.
        """
        ...

    async def close(self) -> None:
        """Stop listening and close every channel."""
        ...
