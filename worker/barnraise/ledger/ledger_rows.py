"""The rows of the ledger's database: its tables and their format, headers, and tickets.

Each row of a header or a proof has its digest, because SQLite does not notice when a disk changes a
row.
"""

import sqlite3
import threading
import zlib
from pathlib import Path

from barnraise.errors import StateError
from barnraise.protocol.messages import Signed, Update
from barnraise.protocol.signing import digest
from barnraise.protocol.table_sizes import FEW, store_newest

FORMAT = 6  # of the database, in its user_version
READABLE_FORMATS = (5, FORMAT)  # 5 stores headers as text, and gets compressed ones from now on
SCHEMA = """
CREATE TABLE IF NOT EXISTS headers (author TEXT, seq INTEGER, digest TEXT, total INTEGER,
                                    started_ms INTEGER, time_ms INTEGER,
                                    signed BLOB, checksum TEXT,
                                    PRIMARY KEY (author, seq));
CREATE TABLE IF NOT EXISTS arrivals (author TEXT, seq INTEGER, tokens INTEGER,
                                     key_tokens INTEGER, received_at REAL,
                                     PRIMARY KEY (author, seq)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tickets (digest TEXT PRIMARY KEY, signed TEXT);
CREATE TABLE IF NOT EXISTS proofs (name TEXT PRIMARY KEY, kind TEXT, text TEXT, checksum TEXT);
"""
# Rows of a kilobyte leave most of each page of a WITHOUT ROWID table unused.
UPGRADE_HEADERS = """
BEGIN IMMEDIATE;
ALTER TABLE headers RENAME TO headers_of_format_5;
{schema}
INSERT INTO headers SELECT * FROM headers_of_format_5;
DROP TABLE headers_of_format_5;
PRAGMA user_version={format};
COMMIT;
"""
Cell = str | int | bytes  # of a row


def with_checksum(*row: Cell) -> tuple[Cell, ...]:
    """Return a row with its digest, because SQLite does not notice when a disk changes a row."""
    return (*row, digest(repr(row)))


def compress(signed: Signed) -> bytes:
    """Return the bytes that are stored of a header: hexadecimal digits, which zlib halves."""
    return zlib.compress(signed.model_dump_json().encode())


def decompress(stored: str | bytes) -> Signed:
    """Return the header that is stored."""
    text = stored if isinstance(stored, str) else zlib.decompress(stored)
    return Signed.model_validate_json(text)


def header_row(signed: Signed, update: Update) -> tuple[Cell, ...]:
    """Return the row of a header, in the tables `headers` and `base`."""
    return with_checksum(
        update.author,
        update.seq,
        digest(signed.body),
        update.total,
        update.started_ms,
        update.time_ms,
        compress(signed),
    )


def open_database(path: Path, schema: str) -> sqlite3.Connection:
    """Open or create a ledger's database with these tables, and upgrade one of an earlier format.

    Raises:
        StateError: If it is of another format.
    """
    db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, *READABLE_FORMATS):
        raise StateError(f"{path} is of format {version}; this version works with {FORMAT}")
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=FULL")
    db.execute("PRAGMA cache_size=-512")  # KiB
    if version == READABLE_FORMATS[0]:
        db.executescript(UPGRADE_HEADERS.format(schema=SCHEMA, format=FORMAT))
    db.executescript(SCHEMA + schema)
    db.execute(f"PRAGMA user_version={FORMAT}")
    return db


def verify_rows(db: sqlite3.Connection) -> None:
    """Raise ValueError if the database has changed by itself.

    A header that a disk has changed would look like half of a fork, and like a false signature of
    this machine.
    """
    result = db.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if result != "ok":
        raise ValueError(result)
    for table in ("headers", "base", "proofs"):
        for row in db.execute(f"SELECT * FROM {table}"):
            if row != with_checksum(*row[:-1]):
                raise ValueError(f"a row of its {table} has changed")
    for name, text in db.execute("SELECT digest, signed FROM tickets"):
        if digest(Signed.model_validate_json(text).body) != name:
            raise ValueError("a row of its tickets has changed")


class TicketRows:
    """The tickets that updates name, by the digests of their texts."""

    def __init__(self, db: sqlite3.Connection, lock: threading.RLock) -> None:
        self._db = db
        self._lock = lock
        self._recent: dict[str, Signed] = {}  # tickets that are stored, the last used at the end
        self._recent_lock = threading.Lock()  # apart: holders of the other wait for disk

    def store(self, ticket: Signed) -> None:
        """Store a ticket, which peers need to accept the updates that name it."""
        name = digest(ticket.body)
        if name in self._recent:
            return
        with self._lock:
            self._db.execute(
                "INSERT OR IGNORE INTO tickets VALUES (?, ?)", (name, ticket.model_dump_json())
            )
        self._remember(name, ticket)

    def get(self, name: str) -> Signed | None:
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
            store_newest(self._recent, name, ticket, FEW)
