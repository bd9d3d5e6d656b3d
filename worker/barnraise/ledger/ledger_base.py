"""The base: the snapshot at which a ledger begins, of a machine that joined late or fell behind.

A machine that fell behind keeps the anchor that it had before, until a newer one is confirmed.
"""

import json
import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from barnraise.ledger.anchor import Retracted
from barnraise.ledger.ledger_rows import decompress, header_row
from barnraise.protocol.messages import Signed, Update

BASE_SCHEMA = """
CREATE TABLE IF NOT EXISTS base (author TEXT PRIMARY KEY, seq INTEGER, digest TEXT, total INTEGER,
                                 started_ms INTEGER, time_ms INTEGER, signed TEXT, checksum TEXT);
CREATE TABLE IF NOT EXISTS base_fragments (position INTEGER PRIMARY KEY, digest TEXT);
CREATE TABLE IF NOT EXISTS base_retracted (author TEXT, seq INTEGER, tokens INTEGER,
                                           PRIMARY KEY (author, seq));
CREATE TABLE IF NOT EXISTS former_base (heads TEXT, fragments TEXT, retracted TEXT);
"""


@dataclass(frozen=True)
class FormerBase:
    """The anchor that a machine had before its base."""

    heads: list[tuple[Signed, Update]]
    fragments: list[str]  # digests
    retracted: dict[str, dict[int, int]]  # author → sequence number → tokens

    @property
    def vector(self) -> dict[str, int]:
        """Return author → sequence number of its last update in it."""
        return {update.author: update.seq for _, update in self.heads}


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

    # ---- the anchor before the base

    @property
    def former(self) -> FormerBase | None:
        """The anchor before the base; None if there is none, or a newer one is confirmed."""
        with self._lock:
            row = self._db.execute("SELECT heads, fragments, retracted FROM former_base").fetchone()
        if row is None:
            return None
        signed = [Signed.model_validate(header) for header in json.loads(row[0])]
        heads = [(header, Update.model_validate_json(header.body)) for header in signed]
        retracted = {
            author: {int(seq): tokens for seq, tokens in updates.items()}
            for author, updates in json.loads(row[2]).items()
        }
        return FormerBase(heads, json.loads(row[1]), retracted)

    @property
    def has_former(self) -> bool:
        """Whether the anchor before the base is here."""
        with self._lock:
            return bool(self._db.execute("SELECT 1 FROM former_base").fetchone())

    def retain(
        self, heads: Iterable[Signed], fragments: Sequence[str], retracted: Retracted
    ) -> None:
        """Store an anchor before the base that comes next, within a transaction of the caller."""
        self.drop_former()
        texts = ([header.model_dump() for header in heads], fragments, retracted)
        self._db.execute("INSERT INTO former_base VALUES (?, ?, ?)", [*map(json.dumps, texts)])

    def drop_former(self) -> None:
        """Let the fragments of the anchor before be deleted, within a transaction."""
        self._db.execute(
            "INSERT OR IGNORE INTO files_to_delete"
            " SELECT value FROM former_base, json_each(former_base.fragments)"
        )
        self._db.execute("DELETE FROM former_base")
