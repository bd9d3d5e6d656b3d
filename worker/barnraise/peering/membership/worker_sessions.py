"""Recognise that two workers run with one key at a time, by what that key has signed. Pure.

Each worker draws a session when it starts, and signs with every greeting that it runs now. A peer
passes the newest statement of one session on to the others of the same key. A statement proves that
the key was copied if it was signed while the receiver ran, and not by the receiver. Nobody without
the key can make one, and one from before the receiver started, as a restart leaves, proves nothing.
Times are in seconds since 1970, by the coordinators' clock.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from barnraise.protocol.messages import Signed, WorkerSession
from barnraise.protocol.table_sizes import store_newest

CLOCK_SECONDS = 10.0  # by which the clocks of two machines may differ
SESSION_FRESH_SECONDS = 60.0  # for which a statement is passed on and believed
MAX_KEYS = 512  # whose sessions are remembered
MAX_SESSIONS = 4  # of each key, the newest


@dataclass(frozen=True)
class OwnSession:
    """The session of this worker.

    Attributes:
        session: Its name.
        started: When it began.
    """

    session: str
    started: float


def proves_copy(own: OwnSession, other: WorkerSession, now: float) -> bool:
    """Return whether a verified statement of this worker's key is of another that runs now."""
    is_fresh = abs(now - other.issued) <= SESSION_FRESH_SECONDS
    is_since_start = other.issued > own.started + CLOCK_SECONDS
    return other.session != own.session and is_fresh and is_since_start


def is_newer(own: OwnSession, other: WorkerSession) -> bool:
    """Return whether this worker started after another one, and is the one that has to stop."""
    return (own.started, own.session) > (other.started, other.session)


class SeenSessions:
    """The sessions in which peers have greeted this machine of late."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, tuple[float, Signed]]] = {}  # key → session → newest

    def record(self, statement: WorkerSession, signed: Signed) -> None:
        """Record a verified statement."""
        sessions = self._seen.get(statement.peer, {})
        newest = (statement.issued, signed)
        known = sessions.get(statement.session, newest)
        if known[0] >= statement.issued:
            newest = known
        store_newest(sessions, statement.session, newest, MAX_SESSIONS)
        store_newest(self._seen, statement.peer, sessions, MAX_KEYS)

    def others(self, key: str, session: str, now: float) -> Iterable[Signed]:
        """Return the fresh statements of a key's other sessions than `session`."""
        for name, (issued, signed) in self._seen.get(key, {}).items():
            if name != session and abs(now - issued) <= SESSION_FRESH_SECONDS:
                yield signed
