"""Which updates are in: every signed header, in each author's order, durable before anybody hears of it.

SQLite (WAL, synchronous=FULL) holds headers, payloads are blobs beside it. `append` takes a header only when its
payloads are whole and fsynced and it is its author's next; what it has taken survives a crash. A machine that joined
late, or fell so far behind that nobody had what it lacked, starts from a `base`: each author's last header in the
snapshot it began with, the updates before which it never saw. Old payloads are let go (`retention`), their headers
stay. What verdicts and forks take out stays on disk, as others may need it, and is not in any more: `head`, `vector`,
`since` and `tokens` are what is left. One connection and one lock serve all threads.
"""

import sqlite3
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from barnraise.errors import StateError
from barnraise.exchange.ledger.anchor import Retracted
from barnraise.exchange.ledger.blob_store import BlobStore
from barnraise.exchange.ledger.peer_store import SCHEMA as MET
from barnraise.exchange.ledger.peer_store import PeerStore
from barnraise.exchange.ledger.retention import SCHEMA as RETENTION
from barnraise.exchange.ledger.retention import Retention
from barnraise.exchange.ledger.verdicts import Fork, VerdictSet
from barnraise.protocol.messages import Signed, Update
from barnraise.protocol.signing import digest
from barnraise.protocol.verdicts import SignedVerdict
from barnraise.sqlite import transaction

FORMAT = 3
GENESIS_DIGEST = digest("")  # what an author's first header calls its previous
_PAGE = 64  # headers read at a time
_KINDS = {"signed_verdict": SignedVerdict, "fork": Fork}
_SCHEMA = """
CREATE TABLE IF NOT EXISTS headers (author TEXT, seq INTEGER, digest TEXT, total INTEGER, signed TEXT, seal TEXT,
                                    PRIMARY KEY (author, seq)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS entered (author TEXT, seq INTEGER, tokens INTEGER, PRIMARY KEY (author, seq)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS base (author TEXT PRIMARY KEY, seq INTEGER, digest TEXT, total INTEGER, signed TEXT,
                                 seal TEXT);
CREATE TABLE IF NOT EXISTS base_fragments (position INTEGER PRIMARY KEY, digest TEXT);
CREATE TABLE IF NOT EXISTS base_holes (author TEXT, seq INTEGER, tokens INTEGER, PRIMARY KEY (author, seq));
CREATE TABLE IF NOT EXISTS proofs (name TEXT PRIMARY KEY, kind TEXT, text TEXT, seal TEXT);
"""


class Outcome(Enum):
    """What became of a header that was handed in."""

    ADDED = "added"
    DUPLICATE = "known"  # it, or the snapshot that covers it, is in already
    GAP = "gap"  # its author's updates before it are missing
    WRONG_TOTAL = "broken"  # it claims another total than its author's last and its own tokens make
    DIVERGENT = (
        "apart"  # it continues another update than its author's last here: half of a fork, or a lie
    )
    FORK = "fork"  # its author signed two updates with one identity, and the other one is here
    RETRACTED = "out"  # a verdict, or a fork, keeps it out


@dataclass(frozen=True)
class LedgerHead:
    """An author's last update."""

    seq: int = 0
    digest: str = GENESIS_DIGEST
    total: int = 0

    @classmethod
    def from_update(cls, signed: Signed, update: Update) -> "LedgerHead":
        return cls(update.seq, digest(signed.body), update.total)


def _sealed(*row: str | int) -> tuple[str | int, ...]:
    """With the row's digest behind it: SQLite itself does not notice when a disk changes a row."""
    return (*row, digest(repr(row)))


def _row(signed: Signed, update: Update) -> tuple[str | int, ...]:
    return _sealed(
        update.author, update.seq, digest(signed.body), update.total, signed.model_dump_json()
    )


class Ledger:
    def __init__(self, folder: Path, sweep: bool = True):
        """Opens or makes `folder`/ledger.sqlite, with payloads in `folder`/blobs. Raises StateError, also if the file
        has changed by itself. `sweep` False: what another process is writing there stays, and it has looked."""
        folder.mkdir(parents=True, exist_ok=True)
        self.blobs = BlobStore(folder / "blobs", sweep=sweep)
        self._lock = threading.RLock()
        path = folder / "ledger.sqlite"
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, FORMAT):
                raise StateError(f"{path} is of format {version}; this version works with {FORMAT}")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_SCHEMA + RETENTION + MET)
            self._db.execute(f"PRAGMA user_version={FORMAT}")
            self.peer_store = PeerStore(self._db, self._lock)
            if sweep:
                self._check()
            rows = self._db.execute("SELECT author, seq, digest, total FROM base").fetchall()
            rows += self._db.execute(
                "SELECT author, MAX(seq), digest, total FROM headers GROUP BY author"
            ).fetchall()
            self.verdicts = VerdictSet()
            for kind, text in self._db.execute("SELECT kind, text FROM proofs").fetchall():
                self.verdicts |= VerdictSet.from_proof(_KINDS[kind].model_validate_json(text))
            self._retention = Retention(self._db, self._lock, self.blobs, sweep)
        except (sqlite3.DatabaseError, ValueError, LookupError, TypeError) as error:
            what_then = f"remove {folder} and join again, the others have what was published"
            raise StateError(f"{path} is damaged ({error}): {what_then}") from None
        self._last: dict[str, LedgerHead] = {}  # whether it stays or not
        for author, *head in sorted(rows, key=lambda row: row[1]):
            self._last[author] = LedgerHead(*head)
        self._heads = self._staying()

    def _check(self) -> None:
        """Raises ValueError, or what reading rows that no ledger writes raises. A header that a disk has changed would
        look like half of a fork, and its signature like a lie of ours."""
        if (found := self._db.execute("PRAGMA integrity_check(1)").fetchone()[0]) != "ok":
            raise ValueError(found)
        for table in ("headers", "base", "proofs"):
            for row in self._db.execute(f"SELECT * FROM {table}"):
                if row != _sealed(*row[:-1]):
                    raise ValueError(f"a row of its {table} has changed")
        self.peer_store.tickets(), self.peer_store.peers()  # they are read

    def append(self, signed: Signed, update: Update) -> Outcome:
        """Takes an accepted header whose payloads are whole. When it returns ADDED, the update is in for good, or until
        a verdict. One that a verdict names already needs no payloads: its author's later ones follow on it."""
        author = update.author
        hollow = self.verdicts.is_retracted(author, update.seq)
        assert hollow or all(self.blobs.has(part.digest) for part in update.fragments), (
            "payloads come before their header"
        )
        with self._lock:
            outcome = self.classify(signed, update)
            if outcome is Outcome.ADDED:
                with transaction(self._db):
                    self._db.execute(
                        "INSERT INTO headers VALUES (?, ?, ?, ?, ?, ?)", _row(signed, update)
                    )
                    self._db.execute(
                        "INSERT INTO entered VALUES (?, ?, ?)",
                        (author, update.seq, self.tokens + update.tokens),
                    )
                    if not hollow:
                        self._retention.add_update(update, self.tokens + update.tokens)
                self._last[author] = self._heads[author] = LedgerHead.from_update(signed, update)
            return outcome

    def classify(self, signed: Signed, update: Update) -> Outcome:
        """What `append` would say. The signature has been checked: a fork seen here is proof."""
        with self._lock:
            author, seq, head = update.author, update.seq, self.head(update.author)
            if seq > self.verdicts.limits.get(author, seq):
                return Outcome.RETRACTED
            if seq <= head.seq:
                kept = self.header(author, seq)
                return (
                    Outcome.DUPLICATE if kept is None or kept.body == signed.body else Outcome.FORK
                )
            if seq > head.seq + 1:
                return Outcome.GAP
            if update.previous != head.digest:
                return Outcome.DIVERGENT if seq > 1 else Outcome.WRONG_TOTAL
            return (
                Outcome.ADDED if update.total == head.total + update.tokens else Outcome.WRONG_TOTAL
            )

    def fork_proof(self, other: Signed, update: Update) -> Fork | None:
        """The proof that `other` is half of a fork whose other half is here."""
        with self._lock:
            kept, ticket = (
                self.header(update.author, update.seq),
                self.peer_store.tickets().get(update.peer),
            )
        return (
            Fork(one=kept, other=other, ticket=ticket)
            if kept and ticket and kept.body != other.body
            else None
        )

    # ---- what is in

    def head(self, author: str) -> LedgerHead:
        with self._lock:
            return self._heads.get(author, LedgerHead())

    def vector(self) -> dict[str, int]:
        with self._lock:
            return {author: head.seq for author, head in sorted(self._heads.items())}

    @property
    def heads_digest(self) -> str:
        """Of the headers behind the vector: different ones under one vector mean that somebody forked."""
        with self._lock:
            return digest(
                "\n".join(f"{author} {head.digest}" for author, head in sorted(self._heads.items()))
            )

    @property
    def tokens(self) -> int:
        """Tokens that everybody spent on what is in here."""
        with self._lock:
            holes = self.verdicts.retracted_within(self.vector())
            return sum(head.total for head in self._heads.values()) - sum(
                sum(gone.values()) for gone in holes.values()
            )

    def tokens_since(self, author: str, seq: int) -> int:
        """Tokens that have come in after an update; 0 where that is not known."""
        with self._lock:
            row = self._db.execute(
                "SELECT tokens FROM entered WHERE author=? AND seq=?", (author, seq)
            ).fetchone()
            return max(0, self.tokens - row[0]) if row else 0

    def last_updates(self) -> dict[str, Update]:
        """Each author's last update here."""
        with self._lock:
            kept = {author: self.update(author, seq) for author, seq in self.vector().items()}
        return {author: update for author, update in kept.items() if update}

    def header(self, author: str, seq: int) -> Signed | None:
        """One signed header, a base's and what was taken out included; None for what is not here."""
        with self._lock:
            row = self._db.execute(
                "SELECT signed FROM headers WHERE author=?1 AND seq=?2 "
                "UNION ALL SELECT signed FROM base WHERE author=?1 AND seq=?2",
                (author, seq),
            ).fetchone()
        return Signed.model_validate_json(row[0]) if row else None

    def update(self, author: str, seq: int) -> Update | None:
        signed = self.header(author, seq)
        return Update.model_validate_json(signed.body) if signed else None

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

    def updates_since(self, vector: Mapping[str, int]) -> Iterator[tuple[Signed, Update]]:
        """Every update in past `vector`, author by author, each in its order; single ones that are out among them."""
        for author, last in self.vector().items():
            yield from self.headers(author, vector.get(author, 0) + 1, last)

    # ---- what is out

    @property
    def forked_authors(self) -> frozenset[str]:
        """Authors proven to have signed two updates with one identity."""
        return frozenset(self.verdicts.forks)

    def apply_verdicts(self, found: VerdictSet) -> tuple[dict[str, int], Retracted]:
        """Makes verdicts and forks durable, and heeds them from now on. All headers that takes are here. Returns what
        was in until now: vector and holes."""
        with self._lock:
            before = self.vector()
            holes, merged = self.verdicts.retracted_within(before), self.verdicts | found
            with transaction(self._db):
                self._keep(merged)
            self.verdicts = merged
            self._heads = self._staying()
            return before, holes

    def restore_header(self, signed: Signed, update: Update) -> bool:
        """Takes a header from before the base, if it is the one that the header after it, which is here, names."""
        with self._lock:
            after = self.update(update.author, update.seq + 1)
            if (
                after is None
                or after.previous != digest(signed.body)
                or self.header(update.author, update.seq)
            ):
                return False
            self._db.execute("INSERT INTO headers VALUES (?, ?, ?, ?, ?, ?)", _row(signed, update))
            return True

    def _staying(self) -> dict[str, LedgerHead]:
        """Each author's last update that is not past a verdict."""
        heads = dict(self._last)
        for author, limit in self.verdicts.limits.items():
            if author in heads and limit < heads[author].seq:
                del heads[author]
                if limit:
                    signed = self.header(author, limit)
                    assert signed is not None, "a verdict is heeded once its headers are here"
                    heads[author] = LedgerHead.from_update(
                        signed, Update.model_validate_json(signed.body)
                    )
        return heads

    def _keep(self, verdicts: VerdictSet) -> None:
        self._db.execute("DELETE FROM proofs")
        names = [*verdicts.rulings, *verdicts.forks]
        named = zip(names, verdicts.proofs(), strict=True)
        rows = [_sealed(name, each.type, each.model_dump_json()) for name, each in named]
        self._db.executemany("INSERT INTO proofs VALUES (?, ?, ?, ?)", rows)

    # ---- where it began

    def can_rebase(self, vector: Mapping[str, int], verdicts: VerdictSet) -> bool:
        """Whether this ledger can begin, or begin again, at a snapshot of `vector` that heeds `verdicts`: what is here
        past it is here whole, and what we take out is out of it."""
        with self._lock:
            gone = self.pruned()
            return verdicts.covers(self.verdicts) and all(
                min(head.seq, verdicts.limits.get(author, head.seq)) <= vector.get(author, 0)
                or gone.get(author, 0) <= vector.get(author, 0)
                for author, head in self._last.items()
            )

    def rebase(
        self,
        heads: list[tuple[Signed, Update]],
        fragments: list[str],
        verdicts: VerdictSet | None = None,
    ) -> None:
        """Begins, or begins again, at a snapshot: its authors' last headers, its fragments' digests (blobs here), and
        the verdicts that are heeded in it. What is here past it stays."""
        verdicts = verdicts or VerdictSet()
        with self._lock:
            fresh = {
                update.author: LedgerHead.from_update(signed, update) for signed, update in heads
            }
            vector = {author: head.seq for author, head in fresh.items()}
            assert self.can_rebase(vector, verdicts), "what was let go is not in the snapshot"
            assert all(self.blobs.has(fragment) for fragment in fragments)
            rows = [_row(*each) for each in heads]
            holes = verdicts.retracted_within(vector)
            out = [
                (author, seq, tokens)
                for author, gone in holes.items()
                for seq, tokens in gone.items()
            ]
            with transaction(self._db):
                self._retention.mark_pruned(self._retention.rows_covered_by(vector))
                self._forget_base()
                self._db.execute("DELETE FROM base")
                self._db.execute("DELETE FROM base_holes")
                self._db.executemany("INSERT INTO base VALUES (?, ?, ?, ?, ?, ?)", rows)
                self._db.executemany(
                    "INSERT INTO base_fragments VALUES (?, ?)", enumerate(fragments)
                )
                self._db.executemany("INSERT INTO base_holes VALUES (?, ?, ?)", out)
                self._keep(verdicts)
            self.verdicts = verdicts
            self._last |= {
                who: head
                for who, head in fresh.items()
                if head.seq > self._last.get(who, LedgerHead()).seq
            }
            self._heads = self._staying()
            self._retention.delete_files()

    def base_heads(self) -> list[tuple[Signed, Update]]:
        """Each author's last header in the snapshot that this ledger began at; none if it began at the run's start."""
        with self._lock:
            rows = self._db.execute("SELECT signed FROM base ORDER BY author").fetchall()
        heads = [Signed.model_validate_json(row[0]) for row in rows]
        return [(signed, Update.model_validate_json(signed.body)) for signed in heads]

    def base_snapshot(self) -> tuple[list[tuple[Signed, Update]], list[str]] | None:
        """That snapshot, its fragments too; None when this ledger began at the run's start, and once what came after it
        is not whole any more."""
        with self._lock:
            fragments = [
                row[0]
                for row in self._db.execute("SELECT digest FROM base_fragments ORDER BY position")
            ]
        return (self.base_heads(), fragments) if fragments else None

    def base_retracted(self) -> dict[str, dict[int, int]]:
        """What was out of that snapshot already."""
        with self._lock:
            rows = self._db.execute("SELECT author, seq, tokens FROM base_holes").fetchall()
        return {
            author: {seq: tokens for who, seq, tokens in rows if who == author}
            for author, _, _ in rows
        }

    def has_payloads_after(self, vector: Mapping[str, int]) -> bool:
        """Whether nothing that an anchor at `vector` lacks is from before this ledger's beginning, or was let go."""
        with self._lock:
            gone, limits = self.pruned(), self.verdicts.limits
            return all(
                min(seq, limits.get(who, seq)) <= vector.get(who, 0) for who, seq in gone.items()
            )

    def has_received(self, vector: Mapping[str, int]) -> bool:
        """Whether every update of `vector` is, or was, here."""
        with self._lock:
            return all(
                seq <= self._last.get(author, LedgerHead()).seq for author, seq in vector.items()
            )

    def can_continue_from(self, vector: Mapping[str, int], holes: Retracted) -> bool:
        """Whether what is here leads on from an anchor at `vector` without `holes`: it begins no later than that, and
        reaches at least as far."""
        with self._lock:
            out = all(
                self.verdicts.is_retracted(author, seq)
                for author, gone in holes.items()
                for seq in gone
            )
            return out and self.has_payloads_after(vector) and self.has_received(vector)

    # ---- what goes

    def prune(
        self, most: int, safe: Mapping[str, int], before: int | None = None
    ) -> dict[str, int]:
        """Lets the oldest payloads beyond `most` bytes go (`Retention.surplus`). Author → up to where they are gone
        now, for those for whom that is news."""
        with self._lock:
            out = {
                who: limit
                for who, limit in self.verdicts.limits.items()
                if safe.get(who, 0) <= limit
            }
            safe = {**safe, **{who: self._last[who].seq for who in out.keys() & self._last.keys()}}
            if going := self._retention.surplus_rows(most, safe, before):
                old = self.pruned()
                with transaction(self._db):
                    self._retention.mark_pruned(going)
                    self._forget_base()  # what came after it is not whole any more
                self._retention.delete_files()
                return {
                    author: seq for author, seq in self.pruned().items() if seq > old.get(author, 0)
                }
            return {}

    def pruned(self) -> dict[str, int]:
        """Of each author, up to where the payloads of its updates are not here: from before this ledger's base, or let
        go since."""
        with self._lock:
            based = dict(self._db.execute("SELECT author, seq FROM base").fetchall())
            pruned = self._retention.pruned()
            return {
                author: max(based.get(author, 0), pruned.get(author, 0))
                for author in based | pruned
            }

    def horizon_tokens(self, rounds: int) -> int:
        """The ledger's tokens so many rounds ago: a round is each machine's last update."""
        last = {update.peer: update.tokens for update in self.last_updates().values()}
        return self.tokens - rounds * sum(last.values())

    def _forget_base(self) -> None:
        self._db.execute("INSERT OR IGNORE INTO going SELECT digest FROM base_fragments")
        self._db.execute("DELETE FROM base_fragments")

    def close(self) -> None:
        with self._lock:
            self._db.close()
