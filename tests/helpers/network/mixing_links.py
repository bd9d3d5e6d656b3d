"""Links of machines that mix, each on an event loop of its own, without the exchange of updates."""

import asyncio
from collections.abc import Callable, Sequence

from barnraise.errors import MessageError
from barnraise.mixing.mesh_links import MeshLinks
from barnraise.mixing.mesh_members import TicketedMembership
from barnraise.mixing.step_inbox import ROSTER_BYTES, FrameKind, MixingFrame
from barnraise.peering.limits.rate_limit import FairShare
from barnraise.peering.server_thread import ServerThread
from barnraise.peering.transports.transport import Channel, ChannelSource, Transport
from barnraise.protocol.messages import Peer


class FixedMembership(TicketedMembership):
    """The machines of a list: a channel's proven key is enough."""

    def __init__(self, channels: ChannelSource, members: Sequence[Peer]) -> None:
        """Admit the machines of a list; this one may be among them."""
        self.key = channels.key
        self._channels = channels
        self._members = {peer.key: peer for peer in members if peer.key != self.key}

    def list_members(self) -> Sequence[Peer]:
        """Return the machines of the list."""
        return list(self._members.values())

    async def connect(self, peer: Peer) -> Channel:
        """Dial a machine."""
        return await self._channels.connect(peer)

    async def admit(self, channel: Channel, dialled: bool) -> None:
        """Admit the machines of the list."""
        if channel.peer not in self._members:
            raise MessageError("it is not a member of this run")
        if dialled:  # the other side learns of a channel by its first frame
            await channel.send(MixingFrame(FrameKind.HELLO, 0, bytes(ROSTER_BYTES)).pack())

    def find_problem(self, key: str) -> str:
        """Return "": the list does not change."""
        return ""


class _TransportServer:
    """Run a transport until it is stopped."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def run(self, ready: Callable[[], None]) -> None:
        self._stopping = asyncio.Event()
        await self._transport.start()
        ready()
        await self._stopping.wait()
        await self._transport.close()

    def stop(self) -> None:
        self._stopping.set()


class ThreadedLinks(MeshLinks):
    """Links over a transport that they start and close, in a thread of their own."""

    def __init__(
        self,
        transport: Transport,
        members: Sequence[Peer],
        payload_bytes: int,
        state_bytes: int,
        uplink: FairShare | None = None,
    ) -> None:
        """Prepare links to the machines of a list; without `uplink` nothing limits them."""
        membership = FixedMembership(transport.add_protocol("mixing"), members)
        self._server = ServerThread(_TransportServer(transport))
        super().__init__(
            membership, payload_bytes, state_bytes, self._server, uplink or FairShare()
        )

    def start(self) -> None:
        """Start the transport and the links."""
        self._server.open()
        super().start()

    def stop(self) -> None:
        """Close all channels and the transport."""
        super().stop()
        self._server.close()
