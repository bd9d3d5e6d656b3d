"""Where peers ask for cuts of our anchor, and what they get: fragments at a version vector, with verdicts heeded."""

import json
import logging
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pydantic import Field

from barnraise.exchange.compression.codec import decode
from barnraise.exchange.ledger.anchor import Retracted, fragment_to_bytes
from barnraise.exchange.ledger.blob_store import BlobStore
from barnraise.exchange.ledger.diff import updates_between
from barnraise.exchange.ledger.ledger import Ledger
from barnraise.exchange.ledger.verdicts import Fork
from barnraise.protocol.messages import SnapshotManifest, Update
from barnraise.protocol.types import Message
from barnraise.protocol.verdicts import MAX_VERDICTS, SignedVerdict

log = logging.getLogger("barnraise.exchange")

PATIENCE = 30.0  # seconds a question for a cut stays open at a server
REUSED = 30.0  # a cut this young answers whoever names none
KEPT = 600.0  # seconds the bytes of a cut are kept for…
CUTS = 4  # …and how many cuts at most


class Proofs(Message):
    """What the blob `Cut.proofs` holds."""

    rulings: list[SignedVerdict] = Field(max_length=MAX_VERDICTS)
    forks: list[Fork] = Field(max_length=100_000)


@dataclass(frozen=True)
class Frozen:
    """A copy of the anchor, made between two steps."""

    vector: dict[str, int]
    holes: Retracted
    fragments: Sequence[torch.Tensor]


@dataclass(frozen=True)
class Question:
    """Somebody's CutWant. `vector` None: any cut will do."""

    peer: str
    vector: dict[str, int] | None
    until: float


class SnapshotServer:
    """Where peers' questions for cuts wait for the loop, and what was answered lately. Thread-safe."""

    def __init__(self, ledger: Ledger):
        self._ledger = ledger
        self.cuts = BlobStore(ledger.blobs.folder.parent / "cuts", fresh=True)
        self._questions: list[Question] = []
        self._lately: list[tuple[float, SnapshotManifest]] = []
        self._copy: weakref.ref[Frozen] | None = (
            None  # the last that was taken, while it is being answered from
        )
        self._lock = threading.Lock()

    def ask(self, question: Question, now: float) -> SnapshotManifest | None:
        """The answer, when there is one already; else the question waits for `take`."""
        heeded = self._ledger.verdicts.digest
        with self._lock:
            self._questions = [
                q for q in self._questions if q.peer != question.peer
            ]  # a peer's last word counts
            for at, cut in reversed(self._lately):
                fits = cut.vector == question.vector or (
                    question.vector is None and now < at + REUSED
                )
                if fits and cut.verdicts == heeded:
                    return cut
            if len(self._questions) < 64:
                self._questions.append(question)
            return None

    def take(self, anchor, now: float) -> tuple[Frozen, list[Question]] | None:
        """A copy of the anchor and the questions it answers; None, at no cost, when nobody asks."""
        if not self._questions or (self._copy is not None and self._copy() is not None):
            return None  # one copy at a time: whoever asks without end cannot fill the memory with them
        vector = anchor.vector
        with self._lock:
            open_ones = [q for q in self._questions if q.until > now]
            ripe = [q for q in open_ones if q.vector is None or _within(q.vector, vector)]
            self._questions = [q for q in open_ones if q not in ripe]
        if not ripe:
            return None
        holes = {author: dict(gone) for author, gone in anchor.retracted.items()}
        frozen = Frozen(vector, holes, anchor.copy_fragments(self.cuts.folder))
        self._copy = weakref.ref(frozen)
        return frozen, ripe

    def answer(
        self, frozen: Frozen, vector: dict[str, int] | None, now: float
    ) -> SnapshotManifest | None:
        """Makes the cut at `vector` out of a copy, and its blobs. None when updates that must come out are not here,
        and when a verdict keeps out what it asks for."""
        verdicts = self._ledger.verdicts
        vector = verdicts.clamp(frozen.vector) if vector is None else vector
        with self._lock:
            known = (
                cut
                for _, cut in self._lately
                if cut.vector == vector and cut.verdicts == verdicts.digest
            )
            if made := next(known, None):
                return made
        heads = [self._ledger.header(author, seq) for author, seq in sorted(vector.items())]
        way = updates_between(
            self._ledger, frozen.vector, frozen.holes, vector, verdicts.retracted_within(vector)
        )
        if (
            None in heads
            or way is None
            or verdicts.clamp(vector) != vector
            or not self._has_payloads(way)
        ):
            log.info("a peer asked for a cut that this machine cannot make")
            return None
        digests = []
        for index, fragment in enumerate(frozen.fragments):
            units = fragment.clone() if way else fragment
            for update, times in way:
                part = update.fragments[index]
                if not part.size:
                    continue
                if (payload := self._ledger.blobs.read_verified(part.digest)) is None:
                    return None  # damaged: it is being repaired, and whoever asks asks again
                units.add_(decode(payload, units.numel()), alpha=times)
            digests.append(self.cuts.store(fragment_to_bytes(units)))
        text = json.dumps([head.model_dump() for head in heads], separators=(",", ":"))
        rulings, forks = (
            list(verdicts.rulings.values()),
            [fork for _, fork in verdicts.forks.values()],
        )
        proofs = Proofs(rulings=rulings, forks=forks).model_dump_json()
        cut = SnapshotManifest(
            vector=vector,
            fragments=digests,
            heads=self.cuts.store(text.encode()),
            verdicts=verdicts.digest,
            proofs=self.cuts.store(proofs.encode()) if verdicts.digest else None,
        )
        self._keep(cut, now)
        return cut

    def _has_payloads(self, way: list[tuple[Update, int]]) -> bool:
        blobs = self._ledger.blobs
        return all(blobs.has(part.digest) for update, _ in way for part in update.fragments)

    def _keep(self, cut: SnapshotManifest, now: float) -> None:
        with self._lock:
            kept = [(at, old) for at, old in self._lately if now < at + KEPT][-(CUTS - 1) :]
            gone = [old for _, old in self._lately if all(old is not other for _, other in kept)]
            self._lately = [*kept, (now, cut)]
            alive = {blob for _, c in self._lately for blob in blobs_of(c)}
        for blob in {blob for c in gone for blob in blobs_of(c)} - alive:
            self.cuts.delete(blob)


def blobs_of(cut: SnapshotManifest) -> list[str]:
    return [blob for blob in (*cut.fragments, cut.heads, cut.proofs) if blob]


def _within(inner: dict[str, int], outer: dict[str, int]) -> bool:
    return all(seq <= outer.get(author, 0) for author, seq in inner.items())
