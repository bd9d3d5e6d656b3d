"""Store the tickets that updates name, and where this machine has reached peers.

The tables are in the ledger's database. libp2p calls this a peerstore.
"""

import sqlite3
import threading

from barnraise.durable_io import transaction
from barnraise.protocol.messages import Peer, Signed
from barnraise.protocol.signing import digest
from barnraise.protocol.table_sizes import FEW

MAX_PEERS = 200  # peers whose addresses are stored
MAX_PEERS_OF_VOLUNTEER = 4  # of them, machines of one person
PEER_SCHEMA = """
CREATE TABLE IF NOT EXISTS tickets (digest TEXT PRIMARY KEY, signed TEXT);
CREATE TABLE IF NOT EXISTS peers (id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT UNIQUE, peer TEXT,
                                  volunteer TEXT);
"""


class PeerStore:
    """Tickets, and addresses of peers.

    Args:
        db: The ledger's database.
        lock: The lock that guards it.
    """

    def __init__(self, db: sqlite3.Connection, lock: threading.RLock) -> None:
        self._db = db
        self._lock = lock
        self._recent: dict[str, Signed] = {}  # tickets that are stored, the last used at the end
        self._recent_lock = threading.Lock()  # apart: holders of the other wait for disk

    def store_ticket(self, ticket: Signed) -> None:
        """Store a ticket, which peers need to accept the updates that name it."""
        name = digest(ticket.body)
        if self.is_recent(name):
            return
        with self._lock:
            self._db.execute(
                "INSERT OR IGNORE INTO tickets VALUES (?, ?)", (name, ticket.model_dump_json())
            )
        self._remember(name, ticket)

    def is_recent(self, name: str) -> bool:
        """Return whether a ticket, named by its text's digest, is stored and in memory."""
        return name in self._recent

    def ticket(self, name: str) -> Signed | None:
        """Return the ticket whose text has the digest `name`; None if it is not here."""
        ticket = self._recent.get(name)
        if ticket is None:
            with self._lock:
                query = "SELECT signed FROM tickets WHERE digest=?"
                row = self._db.execute(query, (name,)).fetchone()
            if row is None:
                return None
            ticket = Signed.model_validate_json(row[0])
        self._remember(name, ticket)
        return ticket

    def _remember(self, name: str, ticket: Signed) -> None:
        with self._recent_lock:
            self._recent.pop(name, None)
            self._recent[name] = ticket
            if len(self._recent) > FEW:
                del self._recent[next(iter(self._recent))]

    def verify_rows(self) -> None:
        """Read every row.

        Raises:
            ValueError: A row has changed by itself.
        """
        with self._lock:
            rows = self._db.execute("SELECT digest, signed FROM tickets").fetchall()
        for name, text in rows:
            if digest(Signed.model_validate_json(text).body) != name:
                raise ValueError("a row of its tickets has changed")
        self.peers()

    def store_peer(self, peer: Peer, volunteer: str) -> None:
        """Store where a peer was met: this machine can rejoin through any one peer.

        The machines of one person displace each other, not those of other people.

        Args:
            peer: The peer, with the address at which it was met.
            volunteer: Digest of its volunteer.
        """
        with self._lock, transaction(self._db):
            row = (peer.key, peer.model_dump_json(), volunteer)
            self._db.execute(
                "INSERT OR REPLACE INTO peers (key, peer, volunteer) VALUES (?, ?, ?)", row
            )
            self._db.execute(
                "DELETE FROM peers WHERE volunteer=?1 AND id NOT IN"
                " (SELECT id FROM peers WHERE volunteer=?1 ORDER BY id DESC LIMIT ?2)",
                (volunteer, MAX_PEERS_OF_VOLUNTEER),
            )
            self._db.execute(
                "DELETE FROM peers WHERE id NOT IN (SELECT id FROM peers ORDER BY id DESC LIMIT ?)",
                (MAX_PEERS,),
            )

    def peers(self) -> list[Peer]:
        """Return the stored peers, the most recent first."""
        with self._lock:
            rows = self._db.execute("SELECT peer FROM peers ORDER BY id DESC").fetchall()
        return [Peer.model_validate_json(text) for (text,) in rows]
