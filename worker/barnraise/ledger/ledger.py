"""The ledger: the durable set of accepted updates.

SQLite (WAL, synchronous=FULL) holds the signed headers; payloads are blobs in a folder next to the
database. `append` accepts a header only if its payloads are complete and fsynced and it is its
author's next; an appended update survives a crash. A machine that joined late, or fell so far
behind that no peer had what it missed, starts from a `base`: each author's last header in the
snapshot that it loaded. It never receives the updates before those. Old payloads are pruned
(`retention`), but their headers are kept. Updates that verdicts and forks retract stay on disk,
because peers may need them, but no longer count: `head`, `vector`, `updates_since` and `tokens`
leave them out.

One connection and one lock serve all threads that write. Who writes waits for the disk, so what the
event loop reads needs neither: heads are in memory, and replaced rather than changed; headers are
read over a connection of their own, which sees what has been committed.
"""

import sqlite3
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from barnraise.durable_io import transaction
from barnraise.errors import StateError
from barnraise.ledger.anchor import Retracted, TokenClaim, count_tokens, count_tokens_by_key
from barnraise.ledger.blob_store import BlobStore
from barnraise.ledger.ledger_base import BASE_SCHEMA, LedgerBase
from barnraise.ledger.ledger_rows import (
    TicketRows,
    decompress,
    header_row,
    open_database,
    verify_rows,
    with_checksum,
)
from barnraise.ledger.milestones import Milestones
from barnraise.ledger.peer_store import PEER_SCHEMA, PeerStore
from barnraise.ledger.retention import RETENTION_SCHEMA, Retention
from barnraise.ledger.validation import GENESIS_DIGEST, UpdateRules
from barnraise.ledger.verdict_set import VerdictSet
from barnraise.protocol.fork_proof import Fork, Proof
from barnraise.protocol.messages import CrewShare, Signed, Update
from barnraise.protocol.opinions import SignedOpinions
from barnraise.protocol.signing import digest
from barnraise.protocol.verdicts import SignedVerdict

HORIZON_SECONDS = 3600.0  # since its arrival a verdict may retract any update
_PAGE = 64  # headers read at a time
_PROOF_TYPES: dict[str, type[Proof]] = {
    "signed_verdict": SignedVerdict,
    "fork": Fork,
    "signed_opinions": SignedOpinions,
}


class Outcome(Enum):
    """The result of appending a header."""

    ADDED = "added"
    DUPLICATE = "duplicate"  # it, or a snapshot that contains it, is here already
    GAP = "gap"  # earlier updates of its author are missing
    # Its total, crew, start, time or volunteer does not continue its predecessor's.
    INCONSISTENT = "inconsistent"
    DIVERGENT = "divergent"  # its predecessor is not the one here: half of a fork, or false
    FORK = "fork"  # its author signed two updates with one identity, and the other one is here
    RETRACTED = "retracted"  # a verdict, or a fork, cuts it off


@dataclass(frozen=True)
class VoterWork:
    """What a volunteer must have done to vote on snapshots."""

    updates: int = 3  # of its updates that count here
    seconds: float = 300.0  # for which they have been here


VOTER_WORK = VoterWork()


@dataclass(frozen=True)
class LedgerHead:
    """An author's last update; see `Update` for what it states."""

    seq: int = 0
    digest: str = GENESIS_DIGEST
    total: int = 0
    started_ms: int = 0
    time_ms: int = 0
    crew: tuple[CrewShare, ...] = ()

    @classmethod
    def from_update(cls, signed: Signed, update: Update) -> "LedgerHead":
        """Return the head that this update is."""
        return cls(
            update.seq,
            digest(signed.body),
            update.total,
            update.started_ms,
            update.time_ms,
            tuple(update.crew),
        )

    def is_continued_by(self, update: Update) -> bool:
        """Return whether the author's next update states what follows from this one."""
        has_right_times = (
            self.seq == 0 or update.started_ms == self.started_ms
        ) and update.time_ms > self.time_ms
        has_right_total = update.total == self.total + update.tokens
        return has_right_times and has_right_total and self.is_crew_continued_by(update)

    def is_crew_continued_by(self, update: Update) -> bool:
        """Return whether a later update states at least these tokens of each of these members."""
        later = update.tokens_by_member
        return all(later.get(share.key, 0) >= share.tokens for share in self.crew)


@dataclass(frozen=True)
class VerdictChange:
    """What was before the ledger's verdicts changed, and what counts again since."""

    vector: dict[str, int]
    retracted: Retracted  # single updates
    returned: list[Update]  # each author's in order


class Ledger:
    """The set of accepted updates, with the verdicts that apply and the peers that were met.

    Attributes:
        blobs: The payloads.
        base: The snapshot at which it begins, if it does not begin at the run's start.
        milestones: The anchors that this machine has announced.
        retention: Which payloads are kept.
        tickets: The tickets that its updates name.
        peer_store: Addresses of peers.
        verdicts: The verdicts and forks that apply.
        volunteers: Author → the volunteer that its updates name, for authors whose updates are
            here.
        newcomers: Those of them whose updates are a newcomer's.
    """

    def __init__(self, folder: Path, sweep: bool = True) -> None:
        """Open or create `folder`/ledger.sqlite, with payloads in `folder`/blobs.

        Args:
            folder: The folder.
            sweep: Whether to verify the database and to remove files that an interrupted process
                left. False if another process has it open, and has done so.

        Raises:
            StateError: If the database is damaged or of another format.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.blobs = BlobStore(folder / "blobs", sweep=sweep)
        self._lock = threading.RLock()
        path = folder / "ledger.sqlite"
        try:
            schema = BASE_SCHEMA + RETENTION_SCHEMA + PEER_SCHEMA + Milestones.schema
            self._db = open_database(path, schema)
            self._reader = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._reader.execute("PRAGMA query_only=1")
            self._reader.execute("PRAGMA cache_size=-512")
            self._read_lock = threading.Lock()
            self.peer_store = PeerStore(self._db, self._lock)
            self.tickets = TicketRows(self._db, self._lock)
            self.base = LedgerBase(self._db, self._lock)
            self.milestones = Milestones(self._db, self._lock)
            if sweep:
                verify_rows(self._db)
                self.peer_store.peers()  # each is validated
            verdicts = self._load_verdicts()
            self.retention = Retention(self._db, self._lock, self.blobs, sweep)
            self._last_heads = self._load_heads()  # of each author, retracted or not
            self.volunteers: dict[str, str] = {}
            self.newcomers: set[str] = set()
            self._load_authors()
            self.verdicts = verdicts.bind(self.volunteers, self.newcomers)
            self._set_heads(self._valid_heads())
        except (sqlite3.DatabaseError, zlib.error, ValueError, LookupError, TypeError) as error:
            remedy = f"remove {folder} and join again, the others have what was published"
            raise StateError(f"{path} is damaged ({error}): {remedy}") from None

    def _load_verdicts(self) -> VerdictSet:
        verdicts = VerdictSet()
        for kind, text in self._db.execute("SELECT kind, text FROM proofs").fetchall():
            verdicts |= VerdictSet.from_proof(_PROOF_TYPES[kind].model_validate_json(text))
        return verdicts

    def _load_heads(self) -> dict[str, LedgerHead]:
        rows = self._db.execute(
            "SELECT author, seq, digest, total, started_ms, time_ms FROM base"
        ).fetchall()
        rows += self._db.execute(
            "SELECT author, MAX(seq), digest, total, started_ms, time_ms FROM headers"
            " GROUP BY author"
        ).fetchall()
        heads: dict[str, LedgerHead] = {}
        for author, *head in sorted(rows, key=lambda row: row[1]):
            heads[author] = LedgerHead(*head)
        return heads

    def _load_authors(self) -> None:
        for author, head in self._last_heads.items():
            if update := self.update(author, head.seq):
                self._remember_author(update)
                self._last_heads[author] = replace(head, crew=tuple(update.crew))

    def _remember_author(self, update: Update) -> None:
        """Remember what all updates of an author state alike."""
        self.volunteers[update.author] = update.volunteer
        if update.newcomer:
            self.newcomers.add(update.author)

    def _origin(self, author: str) -> tuple[str, bool] | None:
        """Return an author's volunteer and whether that is a newcomer; None if it is unknown."""
        volunteer = self.volunteers.get(author)
        return None if volunteer is None else (volunteer, author in self.newcomers)

    def _bind(self, verdicts: VerdictSet) -> VerdictSet:
        return verdicts.bind(self.volunteers, self.newcomers)

    def append(self, signed: Signed, update: Update, ticket: Signed | None = None) -> Outcome:
        """Append one valid header with the ticket that it names; see `append_all`."""
        return self.append_all([(signed, update)], [ticket] if ticket else [])[0]

    def append_all(
        self, updates: Sequence[tuple[Signed, Update]], tickets: Iterable[Signed] = ()
    ) -> list[Outcome]:
        """Append valid headers of one author, in order, whose payloads are here.

        After ADDED, an update is durable. All that are added wait for the disk together. An update
        that a verdict retracts alone needs no payloads; its author's later updates continue from
        it.

        Args:
            updates: Signed headers and the updates in them; at least one.
            tickets: The tickets that they name, unless they are here. Only these are stored, for
                ever: a machine may have a new one as often as it asks.

        Returns:
            Their outcomes, up to the first that is not ADDED.
        """
        author = updates[0][1].author
        outcomes: list[Outcome] = []
        with self._lock:
            for ticket in tickets:
                self.tickets.store(ticket)
            head = self.head(author)
            origin = self._origin(author)
            for signed, update in updates:
                assert update.author == author and self._has_payloads(update), (
                    "payloads come before their header"
                )
                outcomes.append(self._classify(signed, update, head, origin))
                if outcomes[-1] is not Outcome.ADDED:
                    break
                head = LedgerHead.from_update(signed, update)
                origin = update.volunteer, update.newcomer
            added = updates[: outcomes.count(Outcome.ADDED)]
            if added:
                self._insert_updates(added)
                self._last_heads[author] = head
                self._heads = {**self._heads, author: head}
                key = added[-1][1].peer
                self._key_tokens = {**self._key_tokens, key: self._count_key(key)}
                self._remember_author(added[-1][1])
        return outcomes

    def _has_payloads(self, update: Update) -> bool:
        is_retracted = self.verdicts.is_retracted(update.author, update.seq)
        return is_retracted or all(self.blobs.has(part.digest) for part in update.fragments)

    def _insert_updates(self, updates: Sequence[tuple[Signed, Update]]) -> None:
        """Insert one author's next updates in one transaction. The caller holds the lock."""
        tokens = self.tokens
        key_tokens = self._key_tokens.get(updates[0][1].peer, 0)
        received_at = time.time()
        with transaction(self._db):
            for signed, update in updates:
                tokens += update.tokens
                key_tokens += update.tokens
                self._insert_header(signed, update)
                self._db.execute(
                    "INSERT INTO arrivals VALUES (?, ?, ?, ?, ?)",
                    (update.author, update.seq, tokens, key_tokens, received_at),
                )
                if not self.verdicts.is_retracted(update.author, update.seq):
                    self.retention.add_update(update)

    def classify(self, signed: Signed, update: Update) -> Outcome:
        """Return what `append` would return. It waits for no thread that writes.

        The signature must have been verified, because FORK is proof against the author.
        """
        author = update.author
        return self._classify(signed, update, self.head(author), self._origin(author))

    def _classify(
        self, signed: Signed, update: Update, head: LedgerHead, origin: tuple[str, bool] | None
    ) -> Outcome:
        """Return what becomes of an update after `head` of an author of this `_origin`."""
        author, seq = update.author, update.seq
        limit = self.verdicts.limit(author, update.volunteer, update.newcomer)
        if limit is not None and seq > limit:
            return Outcome.RETRACTED
        if seq == head.seq and digest(signed.body) == head.digest:
            return Outcome.DUPLICATE
        if seq <= head.seq:
            stored = self.header(author, seq)
            is_same = stored is None or stored.body == signed.body
            return Outcome.DUPLICATE if is_same else Outcome.FORK
        if seq > head.seq + 1:
            return Outcome.GAP
        if update.previous != head.digest:
            return Outcome.DIVERGENT if seq > 1 else Outcome.INCONSISTENT
        has_same_origin = origin in (None, (update.volunteer, update.newcomer))
        is_continuation = head.is_continued_by(update) and has_same_origin
        return Outcome.ADDED if is_continuation else Outcome.INCONSISTENT

    def fork_proof(self, other: Signed, update: Update) -> Fork | None:
        """Return the proof that `other` is half of a fork whose other half is here, or None."""
        stored = self.header(update.author, update.seq)
        if stored is None or stored.body == other.body:
            return None
        # The ticket of the header that is here: those of headers that do not count are not stored.
        ticket = self.tickets.get(Update.model_validate_json(stored.body).ticket)
        if ticket is None:
            return None
        return Fork(one=stored, other=other, ticket=ticket)

    # ---- updates that count

    def head(self, author: str) -> LedgerHead:
        """Return an author's last update that counts; sequence number 0 if there is none."""
        return self._heads.get(author, LedgerHead())

    def last_seq(self, author: str) -> int:
        """Return the number of an author's last update, retracted or not; 0 if there is none."""
        return self._last_heads.get(author, LedgerHead()).seq

    def vector(self) -> dict[str, int]:
        """Return the version vector: author → sequence number of its last update that counts."""
        return {author: head.seq for author, head in sorted(self._heads.items())}

    @property
    def heads_digest(self) -> str:
        """Return a digest of the authors' last headers. Two digests for one vector prove a fork."""
        return digest(
            "\n".join(f"{author} {head.digest}" for author, head in sorted(self._heads.items()))
        )

    @property
    def tokens(self) -> int:
        """Return the training tokens of all updates that count, see `count_tokens`."""
        return sum(self._key_tokens.values())

    def _set_heads(self, heads: dict[str, LedgerHead]) -> None:
        """Replace all heads, and count the tokens again. The caller holds the lock."""
        self._heads = heads
        self._key_tokens = count_tokens_by_key(self._collect_claims(heads))

    def _count_key(self, key: str) -> int:
        """Count the tokens of one key again. The caller holds the lock."""
        prefix = f"{key}."
        heads = {author: h for author, h in self._heads.items() if author.startswith(prefix)}
        return count_tokens(self._collect_claims(heads))

    def _collect_claims(self, heads: Mapping[str, LedgerHead]) -> dict[str, TokenClaim]:
        """Return what the updates that count state, of authors with these heads."""
        vector = {author: head.seq for author, head in heads.items()}
        retracted = self.verdicts.retracted_within(vector)
        return {
            author: TokenClaim(
                head.started_ms, head.time_ms, head.total - sum(retracted.get(author, {}).values())
            )
            for author, head in heads.items()
        }

    def last_time_ms(self, key: str) -> int:
        """Return the time of a key's last update here, in any incarnation; 0 if there is none."""
        with self._lock:
            times = [
                head.time_ms
                for author, head in self._last_heads.items()
                if author.partition(".")[0] == key
            ]
            return max(times, default=0)

    def work_of_volunteers(self) -> tuple[dict[str, int], set[str]]:
        """Return what volunteers have trained, by which their votes on a snapshot are weighed.

        Returns:
            Volunteer → tokens of its updates that count, and the volunteers that may vote: several
            of their updates have been here for a while. What came with a base gives no vote. Where
            volunteers are vouched for, only these vote: updates may be useless.
        """
        vouched = self.verdicts.vouched
        heads = self._heads
        counts: Counter[str] = Counter()
        with self._read_lock:
            rows = self._reader.execute(
                "SELECT author, COUNT(*) FROM arrivals WHERE received_at<=? GROUP BY author",
                (time.time() - VOTER_WORK.seconds,),
            ).fetchall()
        for author, count in rows:
            counts[self.volunteers.get(author, "")] += count if author in heads else 0
        work: Counter[str] = Counter()
        for author, head in heads.items():
            if not self.verdicts.excludes(author.partition(".")[0], self.volunteers[author]):
                work[self.volunteers[author]] += head.total
        voters = {name for name in work if counts[name] >= VOTER_WORK.updates}
        return dict(work), voters if vouched is None else voters & vouched

    def is_within_horizon(self, author: str, seq: int, rounds: int) -> bool:
        """Return whether an update is so recent that a verdict may retract it.

        The age of an update is reckoned in the tokens of other machines, which its author cannot
        inflate, and an hour is never too old. A round is the last update of each other machine.

        Returns:
            True also where it is unknown when the update arrived.
        """
        with self._lock:
            row = self._db.execute(
                "SELECT tokens, key_tokens, received_at FROM arrivals WHERE author=? AND seq=?",
                (author, seq),
            ).fetchone()
            if row is None:
                return True
            tokens_then, key_tokens_then, received_at = row
            if abs(time.time() - received_at) < HORIZON_SECONDS:
                return True
            key = author.partition(".")[0]
            others_then = tokens_then - key_tokens_then
            others_now = self.tokens - self._key_tokens.get(key, 0)
            return others_now - others_then <= rounds * self._round_tokens_without(key)

    def _round_tokens_without(self, key: str) -> int:
        """Return the tokens of the last updates of all keys but one."""
        round_tokens = {update.peer: update.tokens for update in self.last_updates().values()}
        return sum(tokens for peer, tokens in round_tokens.items() if peer != key)

    def last_updates(self) -> dict[str, Update]:
        """Return each author's last update."""
        with self._lock:
            updates = {author: self.update(author, seq) for author, seq in self.vector().items()}
        return {author: update for author, update in updates.items() if update}

    def header(self, author: str, seq: int) -> Signed | None:
        """Return a signed header, also of the base or retracted; None if it is not here."""
        with self._read_lock:
            row = self._reader.execute(
                "SELECT signed FROM headers WHERE author=?1 AND seq=?2 "
                "UNION ALL SELECT signed FROM base WHERE author=?1 AND seq=?2 LIMIT 1",
                (author, seq),
            ).fetchone()
        return decompress(row[0]) if row else None

    def header_with_ticket(self, author: str, seq: int) -> tuple[Signed, Update, Signed] | None:
        """Return a header, its update and the ticket that it names; None if one is not here."""
        signed = self.header(author, seq)
        if signed is None:
            return None
        update = Update.model_validate_json(signed.body)
        ticket = self.tickets.get(update.ticket)
        return (signed, update, ticket) if ticket else None

    def update(self, author: str, seq: int) -> Update | None:
        """Return the update of a header; None if it is not here."""
        signed = self.header(author, seq)
        return Update.model_validate_json(signed.body) if signed else None

    def headers(self, author: str, first: int, last: int) -> Iterator[tuple[Signed, Update]]:
        """Yield an author's updates `first` to `last` that are here, in order."""
        while first <= last:
            with self._read_lock:
                rows = self._reader.execute(
                    "SELECT signed FROM headers"
                    " WHERE author=? AND seq BETWEEN ? AND ? ORDER BY seq LIMIT ?",
                    (author, first, last, _PAGE),
                ).fetchall()
            if not rows:
                return
            for (stored,) in rows:
                signed = decompress(stored)
                update = Update.model_validate_json(signed.body)
                first = update.seq + 1
                yield signed, update

    def updates_since(self, vector: Mapping[str, int]) -> Iterator[tuple[Signed, Update]]:
        """Yield every update after `vector`, author by author, in order.

        Updates past a limit are left out; single retracted ones are not.
        """
        for author, last in self.vector().items():
            yield from self.headers(author, vector.get(author, 0) + 1, last)

    # ---- retractions

    def apply_verdicts(self, verdicts: VerdictSet) -> VerdictChange:
        """Store verified verdicts, forks and opinions durably and apply them from now on.

        All headers that this needs must be here, see `anchor_diff.missing_headers`.
        """
        with self._lock:
            return self._replace_verdicts(self._bind(self.verdicts | verdicts))

    def drop_powerless_verdicts(self, rules: UpdateRules) -> VerdictChange | None:
        """Drop the verdicts that lack signatures since a mirror list expelled their signers.

        Returns:
            What changed; None if all verdicts stay.
        """
        with self._lock:
            remaining = self.verdicts.with_force(rules)
            if remaining.rulings.keys() == self.verdicts.rulings.keys():
                return None
            return self._replace_verdicts(remaining)

    def returns_updates(self, verdicts: VerdictSet) -> bool:
        """Return whether updates count again if these verdicts replace those that apply."""
        return any(
            self.head(author).seq < verdicts.last_valid(author, last_head.seq)
            for author, last_head in self._last_heads.items()
        )

    def _replace_verdicts(self, verdicts: VerdictSet) -> VerdictChange:
        """Replace the verdicts that apply. The caller holds the lock.

        Updates that are not cut off any longer count again, as far as their payloads are here.
        Later ones are dropped: peers send them again.
        """
        vector_before = self.vector()
        retracted_before = self.verdicts.retracted_within(vector_before)
        last_heads = dict(self._last_heads)
        with transaction(self._db):
            for author, last_head in self._last_heads.items():
                last_counted = vector_before.get(author, 0)
                if last_counted < verdicts.last_valid(author, last_head.seq):
                    head = self._head_at(author, last_counted)
                    head = self._complete_head(author, head, verdicts)
                    self._drop_updates_after(author, head.seq)
                    last_heads[author] = head
            self._store_verdicts(verdicts)
        self.verdicts = verdicts
        self._last_heads = {author: head for author, head in last_heads.items() if head.seq}
        self._set_heads(self._valid_heads())
        self.retention.delete_files()
        returned = [
            update
            for author, last in self.vector().items()
            if vector_before.get(author, 0) < last
            for _, update in self.headers(author, vector_before.get(author, 0) + 1, last)
        ]
        return VerdictChange(vector_before, retracted_before, returned)

    def _head_at(self, author: str, seq: int) -> LedgerHead:
        """Return the update of this number, whose header is here; the head before any for 0."""
        signed = self.header(author, seq)
        assert signed is not None or not seq, "a verdict applies once its headers are here"
        if signed is None:
            return LedgerHead()
        return LedgerHead.from_update(signed, Update.model_validate_json(signed.body))

    def _complete_head(self, author: str, head: LedgerHead, verdicts: VerdictSet) -> LedgerHead:
        """Return the last update after `head` that is here with all payloads since."""
        last_seq = self.last_seq(author)
        for following, update in self.headers(author, head.seq + 1, last_seq):
            is_complete = verdicts.is_retracted(author, update.seq) or all(
                self.blobs.has(part.digest) for part in update.fragments
            )
            if update.seq != head.seq + 1 or not is_complete:
                break
            head = LedgerHead.from_update(following, update)
        return head

    def _drop_updates_after(self, author: str, seq: int) -> None:
        """Forget an author's updates after a sequence number, within a transaction."""
        for table in ("headers", "arrivals"):
            self._db.execute(f"DELETE FROM {table} WHERE author=? AND seq>?", (author, seq))
        self.retention.drop_after(author, seq)

    def restore_header(self, signed: Signed, update: Update) -> bool:
        """Store a header from before the base, if the header after it, which is here, names it.

        Returns:
            Whether it was stored.
        """
        with self._lock:
            successor = self.update(update.author, update.seq + 1)
            if successor is None or successor.previous != digest(signed.body):
                return False
            if self.header(update.author, update.seq):
                return False
            self._insert_header(signed, update)
            return True

    def _insert_header(self, signed: Signed, update: Update) -> None:
        self._db.execute(
            "INSERT INTO headers VALUES (?, ?, ?, ?, ?, ?, ?, ?)", header_row(signed, update)
        )

    def _valid_heads(self) -> dict[str, LedgerHead]:
        """Return each author's last update that no verdict cuts off."""
        heads = dict(self._last_heads)
        for author, last_head in self._last_heads.items():
            limit = self.verdicts.last_valid(author, last_head.seq)
            if limit < last_head.seq:
                del heads[author]
                if limit > 0:
                    heads[author] = self._head_at(author, limit)
        return heads

    def _store_verdicts(self, verdicts: VerdictSet) -> None:
        stored = {name for (name,) in self._db.execute("SELECT name FROM proofs").fetchall()}
        dropped = [(name,) for name in stored - verdicts.names.keys()]
        self._db.executemany("DELETE FROM proofs WHERE name=?", dropped)
        rows = [
            with_checksum(name, proof.type, proof.model_dump_json())
            for name, proof in verdicts.names.items()
            if name not in stored
        ]
        self._db.executemany("INSERT INTO proofs VALUES (?, ?, ?, ?)", rows)

    # ---- the base

    def can_rebase(self, vector: Mapping[str, int], verdicts: VerdictSet) -> bool:
        """Return whether this ledger can start, or start again, from a snapshot.

        The snapshot must apply all verdicts known here, and payloads after it must not have been
        pruned here.
        """
        with self._lock:
            pruned = self.pruned()
            bound = self._bind(verdicts)
            return verdicts.covers_decisions(self.verdicts) and all(
                bound.last_valid(author, head.seq) <= vector.get(author, 0)
                or pruned.get(author, 0) <= vector.get(author, 0)
                for author, head in self._last_heads.items()
            )

    def rebase(
        self,
        heads: list[tuple[Signed, Update]],
        fragments: list[str],
        verdicts: VerdictSet | None = None,
    ) -> None:
        """Start, or start again, from a snapshot. Updates after it that are here are kept.

        Args:
            heads: Each author's last header in the snapshot.
            fragments: Digests of its fragments, whose blobs are here.
            verdicts: The verdicts that it applies.
        """
        with self._lock:
            for _, update in heads:
                self._remember_author(update)
            verdicts = self._bind(verdicts or VerdictSet())
            base = {
                update.author: LedgerHead.from_update(signed, update) for signed, update in heads
            }
            vector = {author: head.seq for author, head in base.items()}
            assert self.can_rebase(vector, verdicts), "payloads that were pruned are not in it"
            assert all(self.blobs.has(fragment) for fragment in fragments)
            with transaction(self._db):
                self.retention.mark_pruned(self.retention.rows_covered_by(vector))
                self.base.replace(heads, fragments, verdicts.retracted_within(vector))
                self._store_verdicts(verdicts)
            self.verdicts = verdicts
            for author, head in base.items():
                if head.seq > self._last_heads.get(author, LedgerHead()).seq:
                    self._last_heads[author] = head
            self._set_heads(self._valid_heads())
            self.retention.delete_files()

    def retain_base(
        self, vector: Mapping[str, int], fragments: list[str], retracted: Retracted
    ) -> None:
        """Store an anchor to which `revert_base` returns from the base that comes next."""
        with self._lock, transaction(self._db):
            headers = [self.header(author, seq) for author, seq in vector.items()]
            heads = [header for header in headers if header is not None]
            assert len(heads) == len(vector), "headers stay for ever"
            self.base.retain(heads, fragments, retracted)

    def drop_former_base(self) -> None:
        """Forget the anchor before the base: a newer one than the base is confirmed."""
        with self._lock:
            with transaction(self._db):
                self.base.drop_former()
            self.retention.delete_files()

    def spoils_base(self, verdicts: VerdictSet) -> bool:
        """Return whether verdicts cut off what came with the base and was not in the one before."""
        with self._lock:
            former = self.base.former
            if former is None:
                return False
            vector = former.vector
            merged = self._bind(self.verdicts | verdicts)
            return any(
                vector.get(author, 0) < seq and merged.last_valid(author, seq) < seq
                for author, seq in self.base.vector().items()
            )

    def revert_base(self) -> None:
        """Begin again at the anchor before the base.

        Of what arrived since, the updates stay that continue it. Peers send the others again.
        """
        with self._lock:
            former = self.base.former
            assert former is not None, "`spoils_base` has found it"
            base = {
                update.author: LedgerHead.from_update(signed, update)
                for signed, update in former.heads
            }
            heads = {
                author: self._complete_head(author, base.get(author, LedgerHead()), self.verdicts)
                for author in self._last_heads
            }
            with transaction(self._db):
                self.base.replace(former.heads, former.fragments, former.retracted)
                self.base.drop_former()
                for author, head in heads.items():
                    self._drop_updates_after(author, head.seq)
            self._last_heads = {author: head for author, head in heads.items() if head.seq}
            self._set_heads(self._valid_heads())
            self.retention.delete_files()

    def has_payloads_after(self, vector: Mapping[str, int]) -> bool:
        """Return whether the payloads that an anchor at `vector` lacks have not been pruned."""
        with self._lock:
            return all(
                self.verdicts.last_valid(author, seq) <= vector.get(author, 0)
                for author, seq in self.pruned().items()
            )

    def has_received(self, vector: Mapping[str, int]) -> bool:
        """Return whether every update of `vector` is or was here."""
        with self._lock:
            return all(
                seq <= self._last_heads.get(author, LedgerHead()).seq
                for author, seq in vector.items()
            )

    def can_continue_from(self, vector: Mapping[str, int], retracted: Retracted) -> bool:
        """Return whether this ledger can bring an anchor up to date."""
        with self._lock:
            has_retracted = all(
                self.verdicts.is_retracted(author, seq) or self.header(author, seq) is not None
                for author, updates in retracted.items()
                for seq in updates
            )
            return has_retracted and self.has_payloads_after(vector) and self.has_received(vector)

    # ---- pruning

    def prune(
        self, max_bytes: int, saved: Mapping[str, int], archive_rounds: int | None = None
    ) -> dict[str, int]:
        """Prune the oldest payloads beyond a budget, see `Retention.surplus_rows`.

        An archive keeps all payloads within so many rounds, see `is_within_horizon`.

        Returns:
            Author → sequence number up to which payloads are pruned now, for authors for which that
            changed.
        """
        with self._lock:
            # No restart needs the payloads of updates that are cut off.
            cut_off = {
                author: head.seq
                for author, head in self._last_heads.items()
                if saved.get(author, 0) <= self.verdicts.last_valid(author, head.seq) < head.seq
            }

            def must_keep(author: str, seq: int) -> bool:
                return archive_rounds is not None and self.is_within_horizon(
                    author, seq, archive_rounds
                )

            surplus = self.retention.surplus_rows(max_bytes, {**saved, **cut_off}, must_keep)
            if not surplus:
                return {}
            pruned_before = self.pruned()
            with transaction(self._db):
                self.retention.mark_pruned(surplus)
                self.base.drop_snapshot()  # the payloads after it are incomplete from now on
            self.retention.delete_files()
            return {
                author: seq
                for author, seq in self.pruned().items()
                if seq > pruned_before.get(author, 0)
            }

    def pruned(self) -> dict[str, int]:
        """Return author → sequence number up to which payloads are not here.

        They have been pruned, or the updates are from before the base.
        """
        with self._lock:
            base = self.base.vector()
            pruned = self.retention.pruned()
            return {
                author: max(base.get(author, 0), pruned.get(author, 0)) for author in base | pruned
            }

    def close(self) -> None:
        """Close the database."""
        with self._lock, self._read_lock:
            self._reader.close()
            self._db.close()
