"""Help with dials through routers: see `membership.hole_punching`.

A statement is signed, names its target and is fresh for half a minute, so nobody can make a machine
dial in another's name. It is passed on once, by a peer that is linked to its signer and its target.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from barnraise.errors import MessageError
from barnraise.peering.addresses.reachability import Reachability
from barnraise.peering.links.connection import Connection
from barnraise.peering.links.dialler import Dialler
from barnraise.peering.links.link_context import LinkContext
from barnraise.peering.links.received import MessageHandlers, Received
from barnraise.peering.membership.hole_punching import STATEMENT_SECONDS, order_candidates
from barnraise.protocol.messages import DialNow, DialNowRelay
from barnraise.protocol.signing import Identity, open_signed

log = logging.getLogger("barnraise.exchange")


@dataclass(frozen=True)
class StatementSigner:
    """Who signs statements, in which run.

    Attributes:
        identity: This machine's key.
        run: The run's id.
        clock: Returns seconds since 1970, by the coordinators' clock.
    """

    identity: Identity
    run: str
    clock: Callable[[], float]


class DialNowHandler:
    """Send, pass on and obey "dial now" statements."""

    def __init__(
        self,
        context: LinkContext,
        signer: StatementSigner,
        reachability: Reachability,
        dialler: Dialler,
    ) -> None:
        """Help one server's dials."""
        self._context = context
        self._signer = signer
        self._reachability = reachability
        self._dialler = dialler
        self.passed = 0  # statements that were passed on
        self.obeyed = 0

    def request(self, via: str, target: str, now: float) -> None:
        """Ask a linked peer to pass this machine's statement on to a target."""
        connection = self._context.connections.get(via)
        if connection is not None:
            self._send(connection, target, False, now)

    def _send(self, connection: Connection, target: str, is_answer: bool, now: float) -> None:
        signer = self._signer
        statement = DialNow(
            run=signer.run,
            peer=signer.identity.key,
            target=target,
            addresses=self._reachability.list_candidates(now),
            issued=signer.clock(),
            is_answer=is_answer,
        )
        connection.send_message(DialNowRelay(statement=signer.identity.sign("dial_now", statement)))

    def message_handlers(self) -> MessageHandlers:
        """Return what receives each type of message."""
        return {DialNowRelay: self.on_relay}

    def on_relay(self, received: Received[DialNowRelay]) -> None:
        """Obey a statement for this machine, or pass on one of the peer that sent it.

        Raises:
            MessageError: When it is not a statement of the key that signed it, or was passed on by
                a peer that is not part of it.
        """
        connection, relay, now = received.connection, received.message, received.at
        signed = relay.statement
        rendezvous = self._context.membership.rendezvous
        volunteer = connection.ticket.volunteer
        is_own = signed.key == connection.key
        statement = open_signed(signed, "dial_now", DialNow)
        if statement.peer != signed.key or statement.run != self._signer.run:
            raise MessageError("a dial-now statement names another key or run than its signer's")
        if statement.target != self._signer.identity.key:
            if not is_own:
                raise MessageError("a dial-now statement of another peer is for a third one")
            target = self._context.connections.get(statement.target)
            if target is not None and rendezvous.may_pass(volunteer, statement.target, now):
                self.passed += 1
                target.send_message(relay)
            return
        if abs(self._signer.clock() - statement.issued) > STATEMENT_SECONDS:
            log.debug("ignored an old dial-now statement of %s", signed.key[:8])
            return
        if rendezvous.may_obey(signed.key, volunteer, now):
            self._obey(connection, statement, now)

    def _obey(self, connection: Connection, statement: DialNow, now: float) -> None:
        addresses = order_candidates(statement.addresses, self._reachability.list_candidates(now))
        peer = self._context.membership.choose_punch(
            statement.peer, addresses, self._context.links, now
        )
        if peer is None:
            return
        self.obeyed += 1
        if not statement.is_answer:
            self._send(connection, statement.peer, True, now)
        self._context.spawn(self._dialler.punch(peer))
