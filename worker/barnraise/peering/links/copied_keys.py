"""Notice that another machine runs with this machine's key, or with a peer's: `worker_sessions`."""

import logging
import secrets
import time
from collections.abc import Callable

from barnraise.errors import MessageError
from barnraise.peering.limits.repeated_warnings import RepeatedWarnings
from barnraise.peering.limits.service_budget import ServiceBudget
from barnraise.peering.limits.service_limits import Service
from barnraise.peering.links.connection import Connection
from barnraise.peering.links.hole_punch_handler import StatementSigner
from barnraise.peering.links.received import MessageHandlers, Received
from barnraise.peering.membership.worker_sessions import (
    SESSION_FRESH_SECONDS,
    OwnSession,
    SeenSessions,
    is_newer,
    proves_copy,
)
from barnraise.protocol.messages import (
    COPIED_KEY,
    CopiedKeyNotice,
    Signed,
    Update,
    WorkerSession,
)
from barnraise.protocol.signing import open_signed

log = logging.getLogger("barnraise.exchange")


class CopiedKeys:
    """Sign this worker's session, and compare those of others.

    Attributes:
        refusal: The sentence with which this worker has to stop, because it started after another
            one with the same key; None if it may train.
    """

    def __init__(self, signer: StatementSigner, has_signed: Callable[[Update], bool]) -> None:
        """Begin this worker's session; `has_signed` returns whether it has signed an update."""
        self._signer = signer
        self._has_signed = has_signed
        self._session = secrets.token_hex(8)
        self._started_at = time.monotonic()
        self._seen = SeenSessions()
        self._limit = ServiceBudget(Service.COPY_NOTICES)
        self._repeats = RepeatedWarnings(log)
        self.refusal: str | None = None

    def _own_session(self) -> OwnSession:
        """Return this worker's session; its start follows a clock that is corrected later."""
        uptime = time.monotonic() - self._started_at
        return OwnSession(self._session, self._signer.clock() - uptime)

    def sign_session(self) -> Signed:
        """Return a statement that this worker runs now."""
        own = self._own_session()
        statement = WorkerSession(
            run=self._signer.run,
            peer=self._signer.identity.key,
            session=own.session,
            started=max(0.0, own.started),
            issued=self._signer.clock(),
        )
        return self._signer.identity.sign("session", statement)

    def on_hello(self, connection: Connection) -> None:
        """Pass the statements of a key's other sessions on to a peer that has greeted with it.

        Raises:
            MessageError: When the peer's statement is not its own.
        """
        signed = connection.hello.session
        if signed is None:
            return
        statement = self._open(signed, connection.key)
        now = self._signer.clock()
        if abs(now - statement.issued) <= SESSION_FRESH_SECONDS:
            self._seen.record(statement, signed)
        for other in self._seen.others(connection.key, statement.session, now):
            connection.send_message(CopiedKeyNotice(statement=other))

    def message_handlers(self) -> MessageHandlers:
        """Return what receives each type of message."""
        return {CopiedKeyNotice: self.on_notice}

    def on_notice(self, received: Received[CopiedKeyNotice]) -> None:
        """Check whether another machine runs with this machine's key.

        Raises:
            MessageError: When the notice is not by this machine's key.
        """
        if not self._limit.try_consume({}, time.monotonic()):
            return
        other = self._open(received.message.statement, self._signer.identity.key)
        own = self._own_session()
        if not proves_copy(own, other, self._signer.clock()):
            return
        self._repeats.warn("copied", "%s", COPIED_KEY)
        if is_newer(own, other):
            self.refusal = COPIED_KEY

    def on_own_update(self, update: Update) -> None:
        """Warn if this machine's key has signed an update elsewhere since this worker started."""
        if self._has_signed(update):
            return
        statement = WorkerSession(
            run=update.run,
            peer=update.peer,
            session=update.incarnation,
            started=0.0,
            issued=update.time_ms / 1000,
        )
        if proves_copy(self._own_session(), statement, self._signer.clock()):
            self._repeats.warn("copied", "%s", COPIED_KEY)

    def _open(self, signed: Signed, key: str) -> WorkerSession:
        statement = open_signed(signed, "session", WorkerSession)
        if signed.key != key or statement.peer != key or statement.run != self._signer.run:
            raise MessageError("a statement of a session names another key or run than its own")
        return statement
