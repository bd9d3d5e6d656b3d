"""Decide which update payloads are kept on disk: all within a budget, beyond that the newest.

Headers are kept for ever; only payload files are removed. One transaction first records that
payloads are pruned and which files to delete; then the files are deleted; then their records. After
a crash in between, the next start deletes the files. The payloads of an update that is on its way
are among the files to delete until it is complete, so that what never becomes an update does not
stay, whatever happens. So a row in `payloads` guarantees that all its
files are here, and a pruned update has none, except for blobs that another update shares. An
archive prunes nothing within the verdict horizon, whatever the size.
"""

import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping

from barnraise.durable_io import transaction
from barnraise.ledger.blob_store import BlobStore
from barnraise.protocol.messages import Update

DISK_SHARE = 0.1  # of the disk's free bytes that payloads may take
MIN_BUDGET_BYTES = 256 << 20
MAX_BUDGET_BYTES = 20 << 30
RETENTION_SCHEMA = """
CREATE TABLE IF NOT EXISTS payloads (id INTEGER PRIMARY KEY AUTOINCREMENT, author TEXT, seq INTEGER,
                                     bytes INTEGER);
CREATE UNIQUE INDEX IF NOT EXISTS payloads_of ON payloads (author, seq);
CREATE TABLE IF NOT EXISTS payload_files (digest TEXT, payload INTEGER,
                                          PRIMARY KEY (digest, payload)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS payload_files_of ON payload_files (payload);
CREATE TABLE IF NOT EXISTS pruned (author TEXT PRIMARY KEY, seq INTEGER);
CREATE TABLE IF NOT EXISTS files_to_delete (digest TEXT PRIMARY KEY);
"""
_IS_NEEDED = (
    "SELECT 1 FROM payload_files WHERE digest=?1"
    " UNION SELECT 1 FROM base_fragments WHERE digest=?1"
    " UNION SELECT 1 FROM former_base, json_each(former_base.fragments) WHERE value=?1"
)


def payload_budget(free_bytes: int) -> int:
    """Return how many bytes of payloads a machine keeps, given its disk's free bytes."""
    return min(MAX_BUDGET_BYTES, max(MIN_BUDGET_BYTES, int(DISK_SHARE * free_bytes)))


class Retention:
    """The payloads that are kept, in the ledger's database."""

    def __init__(
        self, db: sqlite3.Connection, lock: threading.RLock, blobs: BlobStore, sweep: bool
    ) -> None:
        self._db = db
        self._lock = lock
        self._blobs = blobs
        if sweep:
            self.delete_files()

    @property
    def payload_bytes(self) -> int:
        """Return the bytes of the kept payloads; a shared blob counts for each of its updates."""
        with self._lock:
            return self._db.execute("SELECT COALESCE(SUM(bytes), 0) FROM payloads").fetchone()[0]

    def pruned(self) -> dict[str, int]:
        """Return author → sequence number up to which payloads have been pruned."""
        with self._lock:
            return dict(self._db.execute("SELECT author, seq FROM pruned").fetchall())

    # ---- within the ledger's transaction

    def add_update(self, update: Update) -> None:
        """Record an update whose payloads are here. Call it within the ledger's transaction."""
        size = sum(part.size for part in update.fragments)
        row = (update.author, update.seq, size)
        payload = self._db.execute(
            "INSERT INTO payloads (author, seq, bytes) VALUES (?, ?, ?)", row
        ).lastrowid
        files = {part.digest for part in update.fragments}
        self._db.executemany(
            "INSERT INTO payload_files VALUES (?, ?)", [(digest, payload) for digest in files]
        )
        self._db.executemany(
            "DELETE FROM files_to_delete WHERE digest=?", [(digest,) for digest in files]
        )

    def expect_files(self, digests: Iterable[str]) -> None:
        """Record that payloads of an update are on their way; they are pinned already.

        `delete_files` deletes them once they are unpinned, unless the update was added. The record
        survives the end of this process. It does not wait for the disk, because it protects no
        update: after a power failure the files that were on their way may stay as useless bytes.
        """
        with self._lock:
            self._db.execute("PRAGMA synchronous=NORMAL")
            try:
                with transaction(self._db):
                    self._db.executemany(
                        "INSERT OR IGNORE INTO files_to_delete VALUES (?)",
                        [(name,) for name in digests],
                    )
            finally:
                self._db.execute("PRAGMA synchronous=FULL")

    def mark_pruned(self, payloads: list[int]) -> None:
        """Record that these payloads are pruned. Call it within the ledger's transaction.

        `delete_files` then deletes the files.
        """
        for payload in payloads:
            author, seq = self._db.execute(
                "SELECT author, seq FROM payloads WHERE id=?", (payload,)
            ).fetchone()
            self._db.execute(
                "INSERT OR IGNORE INTO files_to_delete"
                " SELECT digest FROM payload_files WHERE payload=?",
                (payload,),
            )
            self._db.execute("DELETE FROM payload_files WHERE payload=?", (payload,))
            self._db.execute("DELETE FROM payloads WHERE id=?", (payload,))
            self._db.execute(
                "INSERT INTO pruned VALUES (?1, ?2)"
                " ON CONFLICT (author) DO UPDATE SET seq=MAX(seq, ?2)",
                (author, seq),
            )

    def drop_after(self, author: str, seq: int) -> None:
        """Forget an author's payloads after a sequence number, within the ledger's transaction.

        They count as never received; `delete_files` then deletes the files.
        """
        payloads = "SELECT id FROM payloads WHERE author=? AND seq>?"
        self._db.execute(
            "INSERT OR IGNORE INTO files_to_delete"
            f" SELECT digest FROM payload_files WHERE payload IN ({payloads})",
            (author, seq),
        )
        self._db.execute(f"DELETE FROM payload_files WHERE payload IN ({payloads})", (author, seq))
        self._db.execute("DELETE FROM payloads WHERE author=? AND seq>?", (author, seq))
        self._db.execute("UPDATE pruned SET seq=MIN(seq, ?) WHERE author=?", (seq, author))

    def rows_covered_by(self, vector: Mapping[str, int]) -> list[int]:
        """Return the payloads that a snapshot at version vector `vector` makes redundant, by id."""
        rows = self._db.execute("SELECT id, author, seq FROM payloads").fetchall()
        return [payload for payload, author, seq in rows if seq <= vector.get(author, 0)]

    def surplus_rows(
        self,
        max_bytes: int,
        saved: Mapping[str, int],
        must_keep: Callable[[str, int], bool],
    ) -> list[int]:
        """Return the oldest payloads beyond a budget, by id.

        An author's payloads are chosen in order, so that the pruned ones are always its first.

        Args:
            max_bytes: The budget.
            saved: Author → sequence number contained in a saved state; a restart needs later
                payloads.
            must_keep: Whether the payloads of an author's update, by its number, must be kept.
        """
        surplus = self.payload_bytes - max_bytes
        chosen: list[int] = []
        stopped: set[str] = set()  # authors without a further payload to choose
        if surplus <= 0:
            return chosen
        rows = self._db.execute(
            "SELECT id, author, seq, bytes FROM payloads ORDER BY id"
        ).fetchall()
        for payload, author, seq, size in rows:
            if surplus <= 0:
                break
            if author in stopped or seq > saved.get(author, 0) or must_keep(author, seq):
                stopped.add(author)
                continue
            chosen.append(payload)
            surplus -= size
        return chosen

    # ---- after it

    def delete_files(self) -> None:
        """Delete the files of updates that were pruned or never became complete.

        Files that another update or the base needs stay, and so do pinned ones.
        """
        with self._lock:
            digests = [row[0] for row in self._db.execute("SELECT digest FROM files_to_delete")]
            deleted = [
                (digest,)
                for digest in digests
                if self._db.execute(_IS_NEEDED, (digest,)).fetchone()
                or self._blobs.remove_unless_pinned(digest)
            ]
            if deleted:
                with transaction(self._db):  # one write to the disk, however many they are
                    self._db.executemany("DELETE FROM files_to_delete WHERE digest=?", deleted)
