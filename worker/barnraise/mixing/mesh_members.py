"""Decide which machines take part in a mesh, and open the channels between them."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from barnraise.errors import MessageError
from barnraise.mixing.step_inbox import ROSTER_BYTES, FrameKind, MixingFrame
from barnraise.peering.links.handshake import Handshake
from barnraise.peering.membership.membership import PartialView
from barnraise.peering.transports.transport import (
    Channel,
    ChannelClosedError,
    ChannelSource,
    Transport,
)
from barnraise.protocol.messages import Peer, Signed


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
            MessageError: The other machine is not a member.
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
        self._channels = transport.add_protocol("mixing")
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
        return await self._channels.connect(peer)

    async def accept(self) -> Channel:
        """Return the next channel; see `MeshMembership.accept`."""
        return await self._channels.accept()

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
        find_ticket: Callable[[str], Signed | None],
    ) -> None:
        """Admit the machines of a run.

        Args:
            channels: opens the mesh's channels over the exchange's endpoint.
            view: the peers that the exchange knows.
            handshake: checks them.
            find_ticket: returns the newest ticket of a key that the exchange has, if it has one.
        """
        self.key = channels.key
        self._channels = channels
        self._view = view
        self._handshake = handshake
        self._find_ticket = find_ticket
        self._tickets: dict[str, Signed] = {}  # of the machines that were admitted, by key

    async def open(self) -> None:
        """Do nothing: the exchange has started the endpoint."""

    async def close(self) -> None:
        """Do nothing: the exchange closes the endpoint."""

    def list_members(self) -> Sequence[Peer]:
        """Return the machines that the exchange knows."""
        return self._view.list_peers()

    async def connect(self, peer: Peer) -> Channel:
        """Dial a machine within the exchange's limits; see `MeshMembership.connect`."""
        clock = asyncio.get_running_loop().time
        dialled = self._view.choose_mesh_dial(peer, clock())
        if dialled is None:
            raise ChannelClosedError("its addresses have not answered lately")
        answered = ""
        try:
            channel = await self._channels.connect(dialled)
            answered = channel.remote_address
            return channel
        finally:
            self._view.on_mesh_dial_ended(dialled, answered, clock())

    async def accept(self) -> Channel:
        """Return the next channel; see `MeshMembership.accept`."""
        return await self._channels.accept()

    async def admit(self, channel: Channel, dialled: bool) -> None:
        """Exchange introductions with tickets; see `MeshMembership.admit`."""
        connection = await self._handshake.greet(channel, dialled)
        self._tickets[channel.peer] = connection.hello.ticket

    def find_problem(self, key: str) -> str:
        """Return why a machine's ticket is valid no longer, or "".

        Machines show their renewed tickets to the exchange of updates, not to the mesh.
        """
        ticket = self._tickets.get(key)
        problem = self._check_ticket(key, ticket) if ticket else ""
        renewed = self._find_ticket(key) if problem else None
        if renewed is None or renewed == ticket:
            return problem
        problem = self._check_ticket(key, renewed)
        if not problem:
            self._tickets[key] = renewed
        return problem

    def _check_ticket(self, key: str, ticket: Signed) -> str:
        """Return why a ticket is not valid, or ""."""
        try:
            self._handshake.check_ticket(key, ticket)
        except MessageError as error:
            return str(error)
        return ""
