"""Decide which machines take part in a mesh, and open the channels between them."""

from collections.abc import Sequence
from typing import Protocol

from barnraise.errors import MessageError
from barnraise.exchange.gossip.membership import PartialView
from barnraise.exchange.handlers.handshake import Handshake
from barnraise.exchange.mixing.step_inbox import ROSTER_BYTES, FrameKind, MixingFrame
from barnraise.exchange.network.connection import Connection
from barnraise.exchange.network.transport import Channel, ChannelSource, Transport
from barnraise.protocol.messages import Peer


class MeshMembership(Protocol):
    """The machines of one mesh. Its methods are called on the event loop of the channels."""

    key: str  # this machine's own

    async def open(self) -> None:
        """Prepare to open and accept channels.

        Raises:
            OSError: The transport cannot listen.
        """

    async def close(self) -> None:
        """Stop opening and accepting channels."""

    def list_members(self) -> Sequence[Peer]:
        """Return the other machines that are known, with their addresses."""
        ...

    async def connect(self, peer: Peer) -> Channel:
        """Dial a machine.

        Raises:
            ChannelClosedError: It does not answer.
        """
        ...

    async def accept(self) -> Channel:
        """Return the next channel that another machine opened."""
        ...

    async def admit(self, channel: Channel, dialled: bool) -> None:
        """Introduce this machine over a new channel, and check the other one.

        Raises:
            MessageError: The other machine is no member.
            ChannelClosedError: The channel ended.
            TimeoutError: The other machine did not introduce itself in time.
        """

    def find_problem(self, key: str) -> str:
        """Return why a machine that was admitted is a member no longer, or ""."""
        ...


class FixedMembership:
    """The machines of a list, for benchmarks and tests: a channel's proven key is enough."""

    def __init__(self, transport: Transport, members: Sequence[Peer]) -> None:
        """Admit the machines of a list.

        Args:
            transport: of this machine; the mesh starts and closes it.
            members: all machines; this one may be among them.
        """
        self.key = transport.key
        self._transport = transport
        self._members = {peer.key: peer for peer in members if peer.key != transport.key}

    async def open(self) -> None:
        """Start the transport."""
        await self._transport.start()

    async def close(self) -> None:
        """Close the transport."""
        await self._transport.close()

    def list_members(self) -> Sequence[Peer]:
        """Return the machines of the list."""
        return list(self._members.values())

    async def connect(self, peer: Peer) -> Channel:
        """Dial a machine; see `MeshMembership.connect`."""
        return await self._transport.connect(peer)

    async def accept(self) -> Channel:
        """Return the next channel; see `MeshMembership.accept`."""
        return await self._transport.accept()

    async def admit(self, channel: Channel, dialled: bool) -> None:
        """Admit the machines of the list; see `MeshMembership.admit`."""
        if channel.peer not in self._members:
            raise MessageError("it is not a member of this run")
        if dialled:  # the other side learns of a channel by its first frame
            await channel.send(MixingFrame(FrameKind.HELLO, 0, bytes(ROSTER_BYTES)).pack())

    def find_problem(self, key: str) -> str:
        """Return "": the list does not change."""
        return ""


class TicketedMembership:
    """The machines of a run that the exchange of updates knows, each with a valid ticket.

    Machines are introduced by the site and by each other, as for the exchange of updates. A channel
    begins with the same handshake: run, spec, ticket, revocations and verdicts are checked.
    """

    def __init__(
        self,
        channels: ChannelSource,
        view: PartialView,
        handshake: Handshake,
    ) -> None:
        """Admit the machines of a run.

        Args:
            channels: opens the mesh's channels over the exchange's endpoint.
            view: the peers that the exchange knows.
            handshake: checks them.
        """
        self.key = channels.key
        self._channels = channels
        self._view = view
        self._handshake = handshake
        self._admitted: dict[str, Connection] = {}

    async def open(self) -> None:
        """Do nothing: the exchange has started the endpoint."""

    async def close(self) -> None:
        """Do nothing: the exchange closes the endpoint."""

    def list_members(self) -> Sequence[Peer]:
        """Return the machines that the exchange knows."""
        return self._view.list_peers()

    async def connect(self, peer: Peer) -> Channel:
        """Dial a machine; see `MeshMembership.connect`."""
        return await self._channels.connect(peer)

    async def accept(self) -> Channel:
        """Return the next channel; see `MeshMembership.accept`."""
        return await self._channels.accept()

    async def admit(self, channel: Channel, dialled: bool) -> None:
        """Exchange introductions with tickets; see `MeshMembership.admit`."""
        self._admitted[channel.peer] = await self._handshake.greet(channel, dialled)

    def find_problem(self, key: str) -> str:
        """Return why a machine's ticket is valid no longer, or ""."""
        connection = self._admitted.get(key)
        if connection is None:
            return ""
        try:
            self._handshake.check_ticket(key, connection.hello.ticket)
        except MessageError as error:
            return str(error)
        return ""
