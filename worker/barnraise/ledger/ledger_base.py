"""The base: the snapshot at which a ledger begins, of a machine that joined late or fell behind."""

import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence

from barnraise.ledger.anchor import Retracted
from barnraise.ledger.ledger_rows import decompress, header_row
from barnraise.protocol.messages import Signed, Update

BASE_SCHEMA = """
CREATE TABLE IF NOT EXISTS base (author TEXT PRIMARY KEY, seq INTEGER, digest TEXT, total INTEGER,
                                 started_ms INTEGER, time_ms INTEGER, signed TEXT, checksum TEXT);
CREATE TABLE IF NOT EXISTS base_fragments (position INTEGER PRIMARY KEY, digest TEXT);
CREATE TABLE IF NOT EXISTS base_retracted (author TEXT, seq INTEGER, tokens INTEGER,
                                           PRIMARY KEY (author, seq));
"""


class LedgerBase:
    """Each author's last header in the snapshot, what is out of it, and its fragments."""

    def __init__(self, db: sqlite3.Connection, lock: threading.RLock) -> None:
        self._db = db
        self._lock = lock

    def heads(self) -> list[tuple[Signed, Update]]:
        """Return each author's last header in the base; none if the ledger has everything."""
        with self._lock:
            rows = self._db.execute("SELECT signed FROM base ORDER BY author").fetchall()
        heads = [decompress(row[0]) for row in rows]
        return [(signed, Update.model_validate_json(signed.body)) for signed in heads]

    def vector(self) -> dict[str, int]:
        """Return author → sequence number of its last update in the base."""
        with self._lock:
            return dict(self._db.execute("SELECT author, seq FROM base").fetchall())

    def snapshot(self) -> tuple[list[tuple[Signed, Update]], list[str]] | None:
        """Return the base's headers and the digests of its fragments.

        None if the ledger started at the run's start, or payloads after the base have been pruned.
        """
        with self._lock:
            rows = self._db.execute("SELECT digest FROM base_fragments ORDER BY position")
            fragments = [row[0] for row in rows]
        return (self.heads(), fragments) if fragments else None

    def retracted(self) -> dict[str, dict[int, int]]:
        """Return author → sequence number → tokens of single updates that were out of the base."""
        with self._lock:
            rows = self._db.execute("SELECT author, seq, tokens FROM base_retracted").fetchall()
        retracted: dict[str, dict[int, int]] = {}
        for author, seq, tokens in rows:
            retracted.setdefault(author, {})[seq] = tokens
        return retracted

    def replace(
        self,
        heads: Sequence[tuple[Signed, Update]],
        fragments: Iterable[str],
        retracted: Retracted | Mapping[str, Mapping[int, int]],
    ) -> None:
        """Begin at another snapshot, within a transaction of the caller."""
        self.drop_snapshot()
        self._db.execute("DELETE FROM base")
        self._db.execute("DELETE FROM base_retracted")
        rows = [header_row(signed, update) for signed, update in heads]
        self._db.executemany("INSERT INTO base VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
        self._db.executemany("INSERT INTO base_fragments VALUES (?, ?)", enumerate(fragments))
        self._db.executemany(
            "INSERT INTO base_retracted VALUES (?, ?, ?)",
            [
                (author, seq, tokens)
                for author, updates in retracted.items()
                for seq, tokens in updates.items()
            ],
        )

    def drop_snapshot(self) -> None:
        """Let the fragments be deleted: payloads after them are incomplete, or another one begins.

        It is called within a transaction.
        """
        self._db.execute("INSERT OR IGNORE INTO files_to_delete SELECT digest FROM base_fragments")
        self._db.execute("DELETE FROM base_fragments")
