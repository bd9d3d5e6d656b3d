"""Who may speak with us: introductions on both sides, tickets, and which of two connections to one peer stays."""

import asyncio
from collections.abc import Callable

from barnraise import __version__
from barnraise.errors import MessageError, TicketError
from barnraise.exchange.ledger.validation import UpdateRules
from barnraise.exchange.network.connection import Connection
from barnraise.exchange.network.framing import pack, unpack
from barnraise.exchange.network.transport import Channel, ChannelClosedError, Transport
from barnraise.protocol import coordinator_messages, messages
from barnraise.protocol.signing import check_ticket, open_signed

HELLO = 10.0  # seconds a peer has to introduce itself
RECHECK = 60.0  # seconds between looks at the tickets of those connected
TOGETHER = (
    5.0  # two connections of one pair this close were dialled at once: the smaller key's stays
)


class Handshake:
    def __init__(
        self,
        transport: Transport,
        rules: UpdateRules,
        spec: str,
        incarnation: str,
        ticket: messages.Signed,
        clock: Callable[[], float],
    ):
        """`spec`: the spec's digest. `clock`: seconds since 1970, as the coordinators have it."""
        self._transport, self.rules, self._spec, self._clock = transport, rules, spec, clock
        self.incarnation, self.ticket = incarnation, ticket
        self.revoked: frozenset[str] = frozenset()
        self.orphaned = (
            False  # no coordinator has answered for an hour: expired tickets count for longer
        )

    def hello(self) -> messages.Hello:
        return messages.Hello(
            protocols=[messages.PROTOCOL_VERSION],
            version=__version__,
            run=self.rules.run,
            spec=self._spec,
            incarnation=self.incarnation,
            ticket=self.ticket,
            addresses=self._transport.addresses(),
        )

    async def greet(self, channel: Channel, dialled: bool) -> Connection:
        """Both sides say who they are. Raises MessageError, ChannelClosed or TimeoutError when it comes to nothing."""
        async with asyncio.timeout(HELLO):
            await channel.send(pack(self.hello()))
            hello, _ = unpack(await channel.receive())
        if isinstance(hello, messages.Disconnect):
            raise ChannelClosedError(hello.reason)
        if not isinstance(hello, messages.Hello):
            raise MessageError(f"it said {hello.type} before hello")
        ticket = self.checked(channel.peer, hello)
        return Connection(channel, hello, ticket, dialled, asyncio.get_running_loop().time())

    def checked(self, peer: str, hello: messages.Hello) -> messages.Ticket:
        """The ticket of a peer that may speak with us. Raises MessageError."""
        if messages.PROTOCOL_VERSION not in hello.protocols:
            raise MessageError(
                f"it speaks protocols {hello.protocols}, and this version {messages.PROTOCOL_VERSION}"
            )
        if hello.run != self.rules.run:
            raise MessageError(f"it works on run {hello.run}, not {self.rules.run}")
        if hello.spec != self._spec:
            raise MessageError(f"it has spec {hello.spec[:8]} of this run, not {self._spec[:8]}")
        return self.valid(peer, hello.ticket)

    def valid(self, peer: str, ticket: messages.Signed) -> messages.Ticket:
        """The ticket, if it holds now. Raises TicketError."""
        return check_ticket(
            ticket,
            run=self.rules.run,
            peer=peer,
            mirrors=self.rules.mirrors - self.rules.expelled_mirrors,
            revoked=self.revoked,
            now=self._clock(),
            orphaned=self.orphaned,
        )

    async def recheck(self, links: dict[str, Connection], drop: Callable[[str, str], None]) -> None:
        """For ever: tickets run out while connections stand."""
        while True:
            await asyncio.sleep(RECHECK)
            for link in list(links.values()):
                try:
                    self.valid(link.key, link.hello.ticket)
                except TicketError as error:
                    drop(link.key, str(error))

    def directed(self, signed: messages.Signed) -> frozenset[str]:
        """Whom a mirror's directive revokes. Raises MessageError."""
        directive = open_signed(signed, "directive", coordinator_messages.Directive)
        if (
            signed.key not in self.rules.mirrors - self.rules.expelled_mirrors
            or directive.run != self.rules.run
        ):
            raise MessageError("a directive is not by a mirror of this run")
        return frozenset(directive.revoked)

    def stays(self, old: Connection, new: Connection) -> bool:
        """Whether `old` stays and `new` goes. A newer connection takes over, as its peer may have restarted; of two
        that were dialled from both sides at once both sides keep the one of the smaller key."""
        at_once = new.connected_at - old.connected_at < TOGETHER and old.dialled != new.dialled
        return at_once and old.dialled == (self._transport.key < new.key)
