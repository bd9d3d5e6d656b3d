"""Whose payloads are still here: all of them until they take more than their budget, then the oldest go.

Headers stay for ever; what goes are the files. First one transaction says that they are gone and which files are to
go, then these are unlinked, then they are forgotten; a crash between leaves files that the next start unlinks. So a
row says that all its files are here, and what is gone has none, but for bytes that another update shares. An archive
lets nothing go before the verdict horizon, whatever it takes.
"""

import sqlite3
import threading
from collections.abc import Mapping

from barnraise.exchange.ledger.blob_store import BlobStore
from barnraise.protocol.messages import Update

DISK_SHARE = 0.1  # of the disk's free bytes that payloads may take…
MIN_BUDGET_BYTES, MAX_BUDGET_BYTES = 256 << 20, 20 << 30  # …but at least, and at most, so many
SCHEMA = """
CREATE TABLE IF NOT EXISTS payloads (place INTEGER PRIMARY KEY AUTOINCREMENT, author TEXT, seq INTEGER, bytes INTEGER,
                                     tokens INTEGER);
CREATE UNIQUE INDEX IF NOT EXISTS payloads_of ON payloads (author, seq);
CREATE TABLE IF NOT EXISTS payload_files (digest TEXT, place INTEGER, PRIMARY KEY (digest, place)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS payload_files_at ON payload_files (place);
CREATE TABLE IF NOT EXISTS pruned (author TEXT PRIMARY KEY, seq INTEGER);
CREATE TABLE IF NOT EXISTS going (digest TEXT PRIMARY KEY);
"""
_NEEDED = (
    "SELECT 1 FROM payload_files WHERE digest=?1 UNION SELECT 1 FROM base_fragments WHERE digest=?1"
)


def payload_budget(free: int) -> int:
    """Bytes of payloads that a machine keeps on a disk with so many bytes free."""
    return min(MAX_BUDGET_BYTES, max(MIN_BUDGET_BYTES, int(DISK_SHARE * free)))


class Retention:
    """Works on the ledger's own database. What changes rows and says so is called within the ledger's transaction."""

    def __init__(
        self, db: sqlite3.Connection, lock: threading.RLock, blobs: BlobStore, sweep: bool
    ):
        self._db, self._lock, self._blobs = db, lock, blobs
        if sweep:
            self.delete_files()

    @property
    def payload_bytes(self) -> int:
        """That kept payloads take, shared ones counted again."""
        with self._lock:
            return self._db.execute("SELECT COALESCE(SUM(bytes), 0) FROM payloads").fetchone()[0]

    def pruned(self) -> dict[str, int]:
        """Author → up to where its payloads have been let go."""
        with self._lock:
            return dict(self._db.execute("SELECT author, seq FROM pruned").fetchall())

    # ---- within the ledger's transaction

    def add_update(self, update: Update, tokens: int) -> None:
        """An update whose payloads are here; the ledger has `tokens` with it."""
        size = sum(part.size for part in update.fragments)
        row = (update.author, update.seq, size, tokens)
        place = self._db.execute(
            "INSERT INTO payloads (author, seq, bytes, tokens) VALUES (?, ?, ?, ?)", row
        ).lastrowid
        files = {part.digest for part in update.fragments}
        self._db.executemany(
            "INSERT INTO payload_files VALUES (?, ?)", [(digest, place) for digest in files]
        )

    def mark_pruned(self, places: list[int]) -> None:
        """These rows' payloads are no longer said to be here. `sweep` removes the files."""
        for place in places:
            author, seq = self._db.execute(
                "SELECT author, seq FROM payloads WHERE place=?", (place,)
            ).fetchone()
            self._db.execute(
                "INSERT OR IGNORE INTO going SELECT digest FROM payload_files WHERE place=?",
                (place,),
            )
            self._db.execute("DELETE FROM payload_files WHERE place=?", (place,))
            self._db.execute("DELETE FROM payloads WHERE place=?", (place,))
            self._db.execute(
                "INSERT INTO pruned VALUES (?1, ?2) ON CONFLICT (author) DO UPDATE SET seq=MAX(seq, ?2)",
                (author, seq),
            )

    def rows_covered_by(self, vector: Mapping[str, int]) -> list[int]:
        """Rows that a snapshot at `vector` makes needless."""
        rows = self._db.execute("SELECT place, author, seq FROM payloads").fetchall()
        return [place for place, author, seq in rows if seq <= vector.get(author, 0)]

    def surplus_rows(self, most: int, safe: Mapping[str, int], before: int | None) -> list[int]:
        """The oldest rows beyond `most` bytes. Only such as are in a state on disk (`safe`: author → seq), as a restart
        needs the others, and, where `before` is given, only such as came in before the ledger had so many tokens."""
        over = self.payload_bytes - most
        chosen: list[int] = []
        stopped: set[str] = (
            set()
        )  # of an author they go in order: what is gone is always its first ones
        if over <= 0:
            return chosen
        rows = self._db.execute(
            "SELECT place, author, seq, bytes, tokens FROM payloads ORDER BY place"
        )
        for place, author, seq, size, tokens in rows:
            if over <= 0 or (before is not None and tokens > before):
                break
            if seq > safe.get(author, 0) or author in stopped:
                stopped.add(author)
                continue
            chosen.append(place)
            over -= size
        return chosen

    # ---- after it

    def delete_files(self) -> None:
        """Removes the files of what was let go, but for those that some update still needs, or is about to."""
        with self._lock:
            going = [row[0] for row in self._db.execute("SELECT digest FROM going")]
            for digest in going:
                needed = self._db.execute(_NEEDED, (digest,)).fetchone()
                if needed or self._blobs.remove_unless_pinned(digest):
                    self._db.execute("DELETE FROM going WHERE digest=?", (digest,))
