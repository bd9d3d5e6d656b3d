"""Store where this machine has reached peers. libp2p calls this a peerstore.

The table is in the ledger's database.
"""

import sqlite3
import threading

from barnraise.durable_io import transaction
from barnraise.protocol.messages import Peer

MAX_PEERS = 200  # peers whose addresses are stored
MAX_PEERS_OF_VOLUNTEER = 4  # of them, machines of one person
PEER_SCHEMA = """
CREATE TABLE IF NOT EXISTS peers (id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT UNIQUE, peer TEXT,
                                  volunteer TEXT);
"""


class PeerStore:
    """Addresses of peers."""

    def __init__(self, db: sqlite3.Connection, lock: threading.RLock) -> None:
        self._db = db
        self._lock = lock

    def store_peer(self, peer: Peer, volunteer: str) -> None:
        """Store where a peer was met: this machine can rejoin through any one peer.

        The machines of one person displace each other, not those of other people.
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
