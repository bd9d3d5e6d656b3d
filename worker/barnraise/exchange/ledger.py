"""Which updates are in: every signed header, in each author's order, durable before anybody hears of it.

SQLite (WAL, synchronous=FULL) holds headers, payloads are blobs beside it. `append` takes a header only when its
payloads are whole and fsynced and it is its author's next; what it has taken survives a crash. A machine that joined
late, or fell so far behind that nobody had what it lacked, starts from a `base`: each author's last header in the
snapshot it began with, the updates before which it never saw. Old payloads are let go (`retention`), their headers
stay. One connection and one lock serve all threads.
"""

import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from barnraise.errors import StateError
from barnraise.exchange.blobs import Blobs
from barnraise.exchange.retention import SCHEMA as RETENTION
from barnraise.exchange.retention import Retention
from barnraise.identity import digest
from barnraise.wire import Peer, Signed, Update

FORMAT = 2
NOTHING = digest("")  # what an author's first header calls its previous
_PAGE = 64  # headers read at a time
_PEERS = 200  # remembered
_SCHEMA = """
CREATE TABLE IF NOT EXISTS headers (author TEXT, seq INTEGER, digest TEXT, total INTEGER, signed TEXT,
                                    PRIMARY KEY (author, seq)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS base (author TEXT PRIMARY KEY, seq INTEGER, digest TEXT, total INTEGER, signed TEXT);
CREATE TABLE IF NOT EXISTS base_fragments (position INTEGER PRIMARY KEY, digest TEXT);
CREATE TABLE IF NOT EXISTS tickets (peer TEXT PRIMARY KEY, signed TEXT);
CREATE TABLE IF NOT EXISTS peers (place INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT UNIQUE, peer TEXT);
CREATE TABLE IF NOT EXISTS forks (author TEXT PRIMARY KEY, seq INTEGER, kept TEXT, other TEXT);
"""


class Outcome(Enum):
    """What became of a header that was handed in."""

    ADDED = "added"
    KNOWN = "known"  # it, or the snapshot that covers it, is in already
    GAP = "gap"  # its author's updates before it are missing
    BROKEN = "broken"  # it does not continue its author's last: wrong previous digest or wrong total
    FORK = "fork"  # its author signed two updates with one identity; both headers are kept as proof


@dataclass(frozen=True)
class Head:
    """An author's last update."""

    seq: int = 0
    digest: str = NOTHING
    total: int = 0


class Ledger:
    def __init__(self, folder: Path):
        """Opens or makes `folder`/ledger.sqlite, with the payloads in `folder`/blobs. Raises StateError."""
        folder.mkdir(parents=True, exist_ok=True)
        self.blobs = Blobs(folder / "blobs")
        self._lock = threading.RLock()
        path = folder / "ledger.sqlite"
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, 1, FORMAT):
                raise StateError(f"{path} is of format {version}; this version works with {FORMAT}")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_SCHEMA + RETENTION)
            rows = self._db.execute("SELECT author, seq, digest, total FROM base").fetchall()
            rows += self._db.execute("SELECT author, MAX(seq), digest, total FROM headers GROUP BY author").fetchall()
            self._retention = Retention(self._db, self._lock, self.blobs)
        except sqlite3.DatabaseError as error:
            what_then = f"remove {folder} and join again, the others have what was published"
            raise StateError(f"{path} is damaged ({error}): {what_then}") from None
        self._heads: dict[str, Head] = {}
        for author, seq, header, total in rows:
            if seq > self.head(author).seq:
                self._heads[author] = Head(seq, header, total)
        self._forked = {row[0] for row in self._db.execute("SELECT author FROM forks")}
        self._begin_retention(version)

    def append(self, signed: Signed, update: Update) -> Outcome:
        """Takes an accepted header whose payloads are whole. When it returns ADDED, the update is in for good."""
        assert all(self.blobs.has(part.digest) for part in update.fragments), "payloads come before their header"
        with self._lock:
            outcome = self.judge(signed, update)
            if outcome is Outcome.ADDED:
                head = Head(update.seq, digest(signed.body), update.total)
                with self._whole():
                    self._db.execute(
                        "INSERT INTO headers VALUES (?, ?, ?, ?, ?)",
                        (update.author, head.seq, head.digest, head.total, signed.model_dump_json()),
                    )
                    self._retention.add(update, self.tokens + update.tokens)
                self._heads[update.author] = head
            return outcome

    def judge(self, signed: Signed, update: Update) -> Outcome:
        """What `append` would say. The signature has been checked: a fork seen here is proof, and is kept."""
        with self._lock:
            author, head, mine = update.author, self.head(update.author), digest(signed.body)
            if update.seq <= head.seq:
                kept = self.header(author, update.seq)
                if kept is None or digest(kept.body) == mine:
                    return Outcome.KNOWN
                self._db.execute(
                    "INSERT OR IGNORE INTO forks VALUES (?, ?, ?, ?)",
                    (author, update.seq, kept.model_dump_json(), signed.model_dump_json()),
                )
                self._forked.add(author)
                return Outcome.FORK
            if author in self._forked:
                return Outcome.FORK
            if update.seq > head.seq + 1:
                return Outcome.GAP
            whole = update.previous == head.digest and update.total == head.total + update.tokens
            return Outcome.ADDED if whole else Outcome.BROKEN

    def head(self, author: str) -> Head:
        with self._lock:
            return self._heads.get(author, Head())

    def vector(self) -> dict[str, int]:
        with self._lock:
            return {author: head.seq for author, head in sorted(self._heads.items())}

    @property
    def tokens(self) -> int:
        """Tokens that everybody spent on what is in here."""
        with self._lock:
            return sum(head.total for head in self._heads.values())

    @property
    def forked(self) -> frozenset[str]:
        """Authors proven to have signed two updates with one identity: nothing more of theirs is taken."""
        with self._lock:
            return frozenset(self._forked)

    def header(self, author: str, seq: int) -> Signed | None:
        """One signed header, a base's included; None for what is not here."""
        with self._lock:
            row = self._db.execute(
                "SELECT signed FROM headers WHERE author=?1 AND seq=?2 "
                "UNION ALL SELECT signed FROM base WHERE author=?1 AND seq=?2",
                (author, seq),
            ).fetchone()
        return Signed.model_validate_json(row[0]) if row else None

    def headers(self, author: str, first: int, last: int) -> Iterator[tuple[Signed, Update]]:
        """An author's updates from `first` to `last`, as far as they are here, in order."""
        while first <= last:
            with self._lock:
                rows = self._db.execute(
                    "SELECT signed FROM headers WHERE author=? AND seq BETWEEN ? AND ? ORDER BY seq LIMIT ?",
                    (author, first, last, _PAGE),
                ).fetchall()
            if not rows:
                return
            for (text,) in rows:
                signed = Signed.model_validate_json(text)
                update = Update.model_validate_json(signed.body)
                first = update.seq + 1
                yield signed, update

    def since(self, vector: dict[str, int]) -> Iterator[tuple[Signed, Update]]:
        """Every update here past `vector`, author by author, each in its order."""
        for author, last in self.vector().items():
            yield from self.headers(author, vector.get(author, 0) + 1, last)

    def admits(self, vector: Mapping[str, int]) -> bool:
        """Whether this ledger can begin again at a snapshot of `vector`: what is here past it is here whole."""
        with self._lock:
            gone = self.gone()
            return all(
                head.seq <= vector.get(author, 0) or gone.get(author, 0) <= vector.get(author, 0)
                for author, head in self._heads.items()
            )

    def rebase(self, heads: list[tuple[Signed, Update]], fragments: list[str]) -> None:
        """Begins, or begins again, at a snapshot: its authors' last headers, its fragments' digests (blobs here). What
        is here past it stays."""
        with self._lock:
            fresh = {update.author: Head(update.seq, digest(signed.body), update.total) for signed, update in heads}
            vector = {author: head.seq for author, head in fresh.items()}
            assert self.admits(vector), "what was let go is not in the snapshot"
            assert all(self.blobs.has(fragment) for fragment in fragments)
            rows = [
                (update.author, head.seq, head.digest, head.total, signed.model_dump_json())
                for signed, update in heads
                if (head := fresh[update.author])
            ]
            with self._whole():
                self._retention.let_go(self._retention.covered(vector))
                self._forget_base()
                self._db.execute("DELETE FROM base")
                self._db.executemany("INSERT INTO base VALUES (?, ?, ?, ?, ?)", rows)
                self._db.executemany("INSERT INTO base_fragments VALUES (?, ?)", enumerate(fragments))
            self._heads |= {author: head for author, head in fresh.items() if head.seq > self.head(author).seq}
            self._retention.sweep()

    def prune(self, most: int, safe: Mapping[str, int], before: int | None = None) -> dict[str, int]:
        """Lets the oldest payloads beyond `most` bytes go (`Retention.surplus`). Author → up to where they are gone
        now, for those for whom that is news."""
        with self._lock:
            if going := self._retention.surplus(most, safe, before):
                old = self.gone()
                with self._whole():
                    self._retention.let_go(going)
                    self._forget_base()  # what came after it is not whole any more
                self._retention.sweep()
                return {author: seq for author, seq in self.gone().items() if seq > old.get(author, 0)}
            return {}

    def horizon(self, rounds: int) -> int:
        """The ledger's tokens so many rounds ago: a round is each machine's last update."""
        last = {update.peer: update.tokens for update in self.last().values()}
        return self.tokens - rounds * sum(last.values())

    def base(self) -> tuple[list[tuple[Signed, Update]], list[str]] | None:
        """The snapshot this ledger began at, if it did not begin at the run's start."""
        with self._lock:
            fragments = [row[0] for row in self._db.execute("SELECT digest FROM base_fragments ORDER BY position")]
            rows = self._db.execute("SELECT signed FROM base ORDER BY author").fetchall()
        if not fragments:
            return None
        heads = [Signed.model_validate_json(row[0]) for row in rows]
        return [(signed, Update.model_validate_json(signed.body)) for signed in heads], fragments

    def gone(self) -> dict[str, int]:
        """Of each author, up to where the payloads of its updates are not here: from before this ledger's base, or let
        go since."""
        with self._lock:
            based = dict(self._db.execute("SELECT author, seq FROM base").fetchall())
            pruned = self._retention.pruned()
            return {author: max(based.get(author, 0), pruned.get(author, 0)) for author in based | pruned}

    def reaches(self, vector: Mapping[str, int]) -> bool:
        """Whether every update of `vector` is, or was, here."""
        with self._lock:
            return all(seq <= self.head(author).seq for author, seq in vector.items())

    def continues(self, vector: Mapping[str, int]) -> bool:
        """Whether what is here past `vector` is all that an anchor at `vector` lacks: it begins no later than that, and
        reaches at least as far."""
        with self._lock:
            return self.reaches(vector) and all(seq <= vector.get(author, 0) for author, seq in self.gone().items())

    def last(self) -> dict[str, Update]:
        """Each author's last update here."""
        with self._lock:
            kept = {author: self.header(author, seq) for author, seq in self.vector().items()}
        return {author: Update.model_validate_json(signed.body) for author, signed in kept.items() if signed}

    def keep_ticket(self, peer: str, ticket: Signed) -> None:
        """Remembers an author's ticket: whoever gets its updates from here needs it to accept them."""
        with self._lock:
            self._db.execute("INSERT OR REPLACE INTO tickets VALUES (?, ?)", (peer, ticket.model_dump_json()))

    def tickets(self) -> dict[str, Signed]:
        with self._lock:
            rows = self._db.execute("SELECT peer, signed FROM tickets").fetchall()
        return {peer: Signed.model_validate_json(text) for peer, text in rows}

    def keep_peer(self, peer: Peer) -> None:
        """Remembers where a peer was reached: who holds a ticket comes back through any one, whoever else is gone."""
        with self._lock, self._whole():
            row = peer.key, peer.model_dump_json()
            self._db.execute("INSERT OR REPLACE INTO peers (key, peer) VALUES (?, ?)", row)
            self._db.execute(
                "DELETE FROM peers WHERE place NOT IN (SELECT place FROM peers ORDER BY place DESC LIMIT ?)", (_PEERS,)
            )

    def peers(self) -> list[Peer]:
        """Who was met, the latest first."""
        with self._lock:
            rows = self._db.execute("SELECT peer FROM peers ORDER BY place DESC").fetchall()
        return [Peer.model_validate_json(text) for (text,) in rows]

    @property
    def based(self) -> bool:
        """Whether this ledger began, or began again, at a snapshot."""
        with self._lock:
            return self._db.execute("SELECT 1 FROM base").fetchone() is not None

    def _begin_retention(self, version: int) -> None:
        """A folder of format 1 knew no payloads that go: all of them are here."""
        with self._lock, self._whole():
            if version == 1:
                for _, update in self.since({}):
                    self._retention.add(update, self.tokens)
            self._db.execute(f"PRAGMA user_version={FORMAT}")

    def _forget_base(self) -> None:
        self._db.execute("INSERT OR IGNORE INTO going SELECT digest FROM base_fragments")
        self._db.execute("DELETE FROM base_fragments")

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """One transaction: all of it or, when the disk is full, nothing."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def close(self) -> None:
        with self._lock:
            self._db.close()
