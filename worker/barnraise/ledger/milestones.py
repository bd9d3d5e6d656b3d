"""The anchors that this machine has announced: by their digests, what was in them.

A run may begin again from one of them, which the payloads since then lead back to.
"""

import json
import sqlite3
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from barnraise.durable_io import transaction
from barnraise.ledger.anchor import Retracted
from barnraise.protocol.table_sizes import FEW


@dataclass(frozen=True)
class Milestone:
    """What was in an anchor."""

    vector: Mapping[str, int]  # author → sequence number of its last update
    retracted: Retracted  # single updates that were out of it


class Milestones:
    """The newest announced anchors, in the ledger's database.

    Attributes:
        schema: Their table.
    """

    schema = "CREATE TABLE IF NOT EXISTS milestones (anchor TEXT PRIMARY KEY, content BLOB);"

    def __init__(self, db: sqlite3.Connection, lock: threading.RLock) -> None:
        self._db = db
        self._lock = lock

    def record(self, anchor: str, milestone: Milestone) -> None:
        """Remember what is in the anchor of this digest; the oldest one makes room."""
        text = json.dumps([dict(milestone.vector), milestone.retracted])
        with self._lock, transaction(self._db):
            row = anchor, zlib.compress(text.encode())
            self._db.execute("INSERT OR IGNORE INTO milestones VALUES (?, ?)", row)
            oldest = "SELECT rowid FROM milestones ORDER BY rowid DESC LIMIT -1 OFFSET ?"
            self._db.execute(f"DELETE FROM milestones WHERE rowid IN ({oldest})", (FEW,))

    def find(self, anchor: str) -> Milestone | None:
        """Return what was in the anchor of this digest; None if that is forgotten."""
        with self._lock:
            row = self._db.execute(
                "SELECT content FROM milestones WHERE anchor=?", (anchor,)
            ).fetchone()
        if row is None:
            return None
        vector, retracted = json.loads(zlib.decompress(row[0]))
        return Milestone(
            vector,
            {
                author: {int(seq): tokens for seq, tokens in updates.items()}
                for author, updates in retracted.items()
            },
        )
