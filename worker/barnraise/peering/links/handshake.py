"""Introduce peers to each other: check their tickets, and decide which of two connections stays."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from barnraise import __version__
from barnraise.errors import MessageError, TicketError
from barnraise.peering.addresses.addresses import parse_address
from barnraise.peering.limits.timeouts import TIMEOUTS
from barnraise.peering.links.connection import Connection
from barnraise.peering.transports.framing import pack, unpack
from barnraise.peering.transports.transport import Channel, ChannelClosedError
from barnraise.protocol import messages
from barnraise.protocol.coordinator_messages import Directive
from barnraise.protocol.run_mirrors import RunMirrors
from barnraise.protocol.signing import (
    ORPHANED_TICKET_GRACE_SECONDS,
    TicketPolicy,
    check_ticket,
    open_signed,
)
from barnraise.protocol.versions import (
    SPOKEN_PROTOCOLS,
    describe_other_versions,
    find_common_version,
)

# Seconds for which a revocation holds: the longest that peers accept a ticket after its issue.
REVOCATION_SECONDS = 86_400 + ORPHANED_TICKET_GRACE_SECONDS
RECHECK_SECONDS = 60.0  # between two checks of the connected peers' tickets
SIMULTANEOUS_SECONDS = 5.0  # two connections of one pair this close were dialled by both sides


@dataclass(frozen=True)
class OwnIntroduction:
    """What this machine's introduction to a peer states, besides its ticket.

    Attributes:
        key: This machine's key.
        spec_digest: The digest of the run's spec.
        incarnation: Returns the incarnation under which this machine publishes now.
        addresses: Returns the addresses at which others may reach this machine.
        sign_session: Returns a statement that this worker runs now.
    """

    key: str
    spec_digest: str
    incarnation: Callable[[], str]
    addresses: Callable[[], list[str]]
    sign_session: Callable[[], messages.Signed]


class Handshake:
    """Decide which peers this machine exchanges messages with.

    Attributes:
        ticket: Our own ticket.
        directives: The newest directive of each mirror.
        orphaned: Whether no coordinator has answered for an hour; expired tickets then count for
            longer.
    """

    def __init__(
        self,
        own: OwnIntroduction,
        mirrors: RunMirrors,
        ticket: messages.Signed,
        clock: Callable[[], float],
        is_excluded: Callable[[str, str], bool],
    ) -> None:
        """Accept peers of one run.

        `clock` returns seconds since 1970 by the coordinators' clock, and `is_excluded` whether a
        key, or the volunteer in its ticket, is excluded.
        """
        self._own = own
        self._mirrors = mirrors
        self._clock = clock
        self.ticket = ticket
        self.directives: dict[str, messages.Signed] = {}
        self._revocations: dict[str, Directive] = {}  # the same directives, by mirror
        self.orphaned = False
        self._is_excluded = is_excluded

    def set_mirrors(self, mirrors: RunMirrors) -> None:
        """Replace the mirrors that count, which change with the mirror list."""
        self._mirrors = mirrors

    def set_ticket(self, ticket: messages.Signed) -> None:
        """Replace our own ticket."""
        self.ticket = ticket

    def set_orphaned(self, orphaned: bool) -> None:
        """Set whether no coordinator has answered for an hour. Safe to call from any thread."""
        self.orphaned = orphaned

    def revoke(self, signed: messages.Signed) -> bool:
        """Refuse the tickets that a mirror's directive revokes, for `REVOCATION_SECONDS`.

        A mirror revokes only its own tickets; its newest directive replaces earlier ones. By the
        end of the time all tickets that it signed before have expired.

        Returns:
            Whether anything changed. An expelled mirror changes nothing. A peer that relays
            its directive is not dishonest: it may not have learned of the expulsion yet.

        Raises:
            MessageError: When it is not a directive of a mirror of this run.
        """
        directive = open_signed(signed, "directive", Directive)
        if signed.key not in self._mirrors.keys or directive.run != self._mirrors.run:
            raise MessageError("a directive is not by a mirror of this run")
        if signed.key in self._mirrors.expelled:
            return False
        known = self._revocations.get(signed.key)
        if known is not None and directive.issued <= known.issued:
            return False
        if directive.issued + REVOCATION_SECONDS < self._clock():
            return False
        # Recorded also where nothing changes: an older one may still be relayed.
        self._revocations[signed.key] = directive
        self.directives[signed.key] = signed
        return directive.revoked != (known.revoked if known else [])

    def current_directives(self) -> list[messages.Signed]:
        """Return the newest directive of each mirror that is not expelled."""
        expelled = self._mirrors.expelled
        return [signed for mirror, signed in self.directives.items() if mirror not in expelled]

    def is_revoked(self, peer: str, mirror: str) -> bool:
        """Return whether a mirror revokes the tickets that it signed for a peer."""
        directive = self._revocations.get(mirror)
        if directive is None or mirror in self._mirrors.expelled:
            return False
        revoked_at = min(directive.issued, self._clock())
        return peer in directive.revoked and self._clock() < revoked_at + REVOCATION_SECONDS

    def build_hello(self, channel: Channel) -> messages.Hello:
        """Return our introduction to the peer at the other end of a channel."""
        return messages.Hello(
            protocols=list(SPOKEN_PROTOCOLS),
            version=__version__,
            run=self._mirrors.run,
            spec=self._own.spec_digest,
            incarnation=self._own.incarnation(),
            ticket=self.ticket,
            addresses=self._own.addresses(),
            observed=parse_address(channel.remote_address),
            session=self._own.sign_session(),
        )

    async def greet(self, channel: Channel, dialled: bool) -> Connection:
        """Exchange introductions over a new channel, which this machine has dialled or not.

        Raises:
            MessageError: When the peer may not exchange messages with us.
            ChannelClosedError: When the channel ended.
            TimeoutError: When the peer did not introduce itself in time.
        """
        async with asyncio.timeout(
            TIMEOUTS.dialled_hello_seconds if dialled else TIMEOUTS.hello_seconds
        ):
            own_hello = self.build_hello(channel)
            await channel.send(pack(own_hello))
            hello, _ = unpack(await channel.receive())
        if isinstance(hello, messages.Goodbye):
            raise ChannelClosedError(hello.reason)
        if not isinstance(hello, messages.Hello):
            raise MessageError(f"it said {hello.type} before hello")
        ticket = self.check_hello(channel.peer, hello)
        now = asyncio.get_running_loop().time()
        return Connection(channel, hello, ticket, dialled, now, own_hello.addresses)

    def check_hello(self, peer: str, hello: messages.Hello) -> messages.Ticket:
        """Return the ticket of a peer that may exchange messages with us.

        Raises:
            MessageError: When it may not.
        """
        if find_common_version(hello.protocols) is None:
            raise MessageError(describe_other_versions(hello.protocols))
        if hello.run != self._mirrors.run:
            raise MessageError(f"it works on run {hello.run}, not {self._mirrors.run}")
        if hello.spec != self._own.spec_digest:
            raise MessageError(
                f"it has spec {hello.spec[:8]} of this run, not {self._own.spec_digest[:8]}"
            )
        return self.check_ticket(peer, hello.ticket)

    def check_ticket(self, peer: str, ticket: messages.Signed) -> messages.Ticket:
        """Return a peer's ticket if it is valid now.

        Raises:
            TicketError: When it is not.
        """
        policy = TicketPolicy(
            run=self._mirrors.run,
            mirrors=self._mirrors.admitting,
            revoked=frozenset([peer] if self.is_revoked(peer, ticket.key) else ()),
            orphaned=self.orphaned,
        )
        checked = check_ticket(ticket, peer, policy, self._clock())
        if self._is_excluded(peer, checked.volunteer):
            raise TicketError(f"peer {peer[:8]} is excluded from the run by a verdict")
        return checked

    async def recheck_tickets(
        self, connections: Mapping[str, Connection], disconnect: Callable[[str, str], None]
    ) -> None:
        """Disconnect peers whose tickets have expired, until cancelled."""
        while True:
            await asyncio.sleep(RECHECK_SECONDS)
            for connection in list(connections.values()):
                try:
                    self.check_ticket(connection.key, connection.hello.ticket)
                except TicketError as error:
                    disconnect(connection.key, str(error))

    def is_preferred(self, old: Connection, new: Connection) -> bool:
        """Return whether `old` stays and `new`, to the same peer, is closed.

        A newer connection takes over, as its peer may have restarted. If both sides dialled at
        once, both keep the connection that the smaller key dialled.
        """
        at_once = (
            new.connected_at - old.connected_at < SIMULTANEOUS_SECONDS
            and old.dialled != new.dialled
        )
        return at_once and old.dialled == (self._own.key < new.key)
