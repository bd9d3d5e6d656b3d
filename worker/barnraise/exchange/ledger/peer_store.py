"""Whom this machine has met: the tickets of authors, and where peers were reached. In the ledger's own database."""

import sqlite3
import threading

from barnraise.protocol.messages import Peer, Signed
from barnraise.sqlite import transaction

MAX_PEERS = 200  # remembered
SCHEMA = """
CREATE TABLE IF NOT EXISTS tickets (peer TEXT PRIMARY KEY, signed TEXT);
CREATE TABLE IF NOT EXISTS peers (place INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT UNIQUE, peer TEXT);
"""


class PeerStore:
    def __init__(self, db: sqlite3.Connection, lock: threading.RLock):
        self._db, self._lock = db, lock

    def store_ticket(self, peer: str, ticket: Signed) -> None:
        """Remembers an author's ticket: whoever gets its updates from here needs it to accept them."""
        with self._lock:
            self._db.execute(
                "INSERT OR REPLACE INTO tickets VALUES (?, ?)", (peer, ticket.model_dump_json())
            )

    def tickets(self) -> dict[str, Signed]:
        with self._lock:
            rows = self._db.execute("SELECT peer, signed FROM tickets").fetchall()
        return {peer: Signed.model_validate_json(text) for peer, text in rows}

    def store_peer(self, peer: Peer) -> None:
        """Remembers where a peer was reached: who holds a ticket comes back through any one, whoever else is gone."""
        with self._lock, transaction(self._db):
            row = peer.key, peer.model_dump_json()
            self._db.execute("INSERT OR REPLACE INTO peers (key, peer) VALUES (?, ?)", row)
            self._db.execute(
                "DELETE FROM peers WHERE place NOT IN (SELECT place FROM peers ORDER BY place DESC LIMIT ?)",
                (MAX_PEERS,),
            )

    def peers(self) -> list[Peer]:
        """The latest first."""
        with self._lock:
            rows = self._db.execute("SELECT peer FROM peers ORDER BY place DESC").fetchall()
        return [Peer.model_validate_json(text) for (text,) in rows]
