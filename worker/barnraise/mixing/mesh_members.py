"""Decide which machines take part in a mesh, and open the channels between them."""

import asyncio
from collections.abc import Callable, Sequence

from barnraise.errors import MessageError
from barnraise.peering.links.handshake import Handshake
from barnraise.peering.membership.membership import PartialView
from barnraise.peering.transports.transport import Channel, ChannelClosedError, ChannelSource
from barnraise.protocol.messages import Peer, Signed


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
        """Admit the machines of a run, over channels of the exchange's endpoint.

        `find_ticket` returns the newest ticket of a key that the exchange has, if it has one.
        """
        self.key = channels.key
        self._channels = channels
        self._view = view
        self._handshake = handshake
        self._find_ticket = find_ticket
        self._tickets: dict[str, Signed] = {}  # of the machines that were admitted, by key

    def list_members(self) -> Sequence[Peer]:
        """Return the machines that the exchange knows."""
        return self._view.list_peers()

    async def connect(self, peer: Peer) -> Channel:
        """Dial a machine within the exchange's limits.

        Raises:
            ChannelClosedError: It does not answer, or may not be dialled yet.
        """
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
        """Return the next channel that another machine opened."""
        return await self._channels.accept()

    async def admit(self, channel: Channel, dialled: bool) -> None:
        """Exchange introductions with tickets; see `Handshake.greet` for the errors."""
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
