"""Joining late: the anchor at a named cut V, fetched from peers.

A server copies its anchor between two steps and, when V lies behind it, takes the updates after V out again, and what a
verdict names: integer subtraction is exact, so every honest peer makes the same bytes for the same V and verdicts. The
joiner asks one peer for its cut, the others for the same one, and compares digests: when peers of two different
volunteers agree the snapshot is `confirmed`. The bytes then travel as blobs, checked by digest.
"""

import asyncio
import json
import logging
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from pydantic import Field, TypeAdapter, ValidationError

from barnraise.errors import MessageError
from barnraise.exchange.acceptance import Rules
from barnraise.exchange.anchor import Holes, fragment_bytes, fragment_from
from barnraise.exchange.blobs import Blobs
from barnraise.exchange.changes import path
from barnraise.exchange.codec import decode
from barnraise.exchange.ledger import Ledger
from barnraise.exchange.verdicts import RULINGS, Fork, Ruling, Verdicts, believed
from barnraise.identity import opened
from barnraise.wire import Cut, Message, Signed, Update

log = logging.getLogger("barnraise.exchange")

PATIENCE = 30.0  # seconds a question for a cut stays open at a server
REUSED = 30.0  # a cut this young answers whoever names none
KEPT = 600.0  # seconds the bytes of a cut are kept for
STAGGER = 2.0  # …after which a joiner asks another peer as well
ALL_FRESH = 2.0  # seconds for which all peers that spoke must be at the start to believe that the run is
WITNESS = 15.0  # seconds other peers have to name the same cut
HEARD_OF = 1.0  # seconds in which a peer tells a joiner of the others it knows
ACQUAINTED = 5.0  # …and in which those are connected to, if they are there
CUTS = 4  # …and how many cuts at most
HEADS_BYTES = 64 << 20  # the blobs of heads and of proofs are no larger
NO_PROOFS = b'{"rulings":[],"forks":[]}'
STILL = 10.0  # seconds a fragment has to come in, at least…
SLOW_LINE = 1 << 16  # …and one more for each so many bytes that have come
_headers = TypeAdapter(list[Signed])


class Proofs(Message):
    """What the blob `Cut.proofs` holds."""

    rulings: list[Ruling] = Field(max_length=RULINGS)
    forks: list[Fork] = Field(max_length=100_000)


@dataclass(frozen=True)
class Snapshot:
    """An anchor to start from: int32 fragments in order, each author's last header in it, what verdicts took out from
    among them, and whether peers of two different volunteers agree on it."""

    fragments: Sequence[torch.Tensor]
    heads: dict[str, Update]
    confirmed: bool
    holes: Holes = field(default_factory=dict)


class Fetched(Sequence[torch.Tensor]):
    """Fragments that lie as blobs, read one at a time: a model may be larger than memory."""

    def __init__(self, blobs: Blobs, digests: Sequence[str]):
        self._blobs, self._digests = blobs, digests

    def __len__(self) -> int:
        return len(self._digests)

    def __getitem__(self, index: int) -> torch.Tensor:
        return fragment_from(self._blobs.read(self._digests[index]))


@dataclass(frozen=True)
class Frozen:
    """A copy of the anchor, made between two steps."""

    vector: dict[str, int]
    holes: Holes
    fragments: Sequence[torch.Tensor]


@dataclass(frozen=True)
class Question:
    """Somebody's CutWant. `vector` None: any cut will do."""

    peer: str
    vector: dict[str, int] | None
    until: float


class Desk:
    """Where peers' questions for cuts wait for the loop, and what was answered lately. Thread-safe."""

    def __init__(self, ledger: Ledger):
        self._ledger = ledger
        self.cuts = Blobs(ledger.blobs.folder.parent / "cuts", fresh=True)
        self._questions: list[Question] = []
        self._lately: list[tuple[float, Cut]] = []
        self._copy: weakref.ref[Frozen] | None = None  # the last that was taken, while it is being answered from
        self._lock = threading.Lock()

    def ask(self, question: Question, now: float) -> Cut | None:
        """The answer, when there is one already; else the question waits for `take`."""
        heeded = self._ledger.verdicts.digest
        with self._lock:
            self._questions = [q for q in self._questions if q.peer != question.peer]  # a peer's last word counts
            for at, cut in reversed(self._lately):
                fits = cut.vector == question.vector or (question.vector is None and now < at + REUSED)
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
        holes = {author: dict(gone) for author, gone in anchor.holes.items()}
        frozen = Frozen(vector, holes, anchor.frozen(self.cuts.folder))
        self._copy = weakref.ref(frozen)
        return frozen, ripe

    def answer(self, frozen: Frozen, vector: dict[str, int] | None, now: float) -> Cut | None:
        """Makes the cut at `vector` out of a copy, and its blobs. None when updates that must come out are not here,
        and when a verdict keeps out what it asks for."""
        verdicts = self._ledger.verdicts
        vector = verdicts.clamped(frozen.vector) if vector is None else vector
        with self._lock:
            known = (cut for _, cut in self._lately if cut.vector == vector and cut.verdicts == verdicts.digest)
            if made := next(known, None):
                return made
        heads = [self._ledger.header(author, seq) for author, seq in sorted(vector.items())]
        way = path(self._ledger, frozen.vector, frozen.holes, vector, verdicts.holes(vector))
        if None in heads or way is None or verdicts.clamped(vector) != vector or not self._has_payloads(way):
            log.info("a peer asked for a cut that this machine cannot make")
            return None
        digests = []
        for index, fragment in enumerate(frozen.fragments):
            units = fragment.clone() if way else fragment
            for update, times in way:
                if (payload := self._ledger.blobs.sound(update.fragments[index].digest)) is None:
                    return None  # damaged: it is being repaired, and whoever asks asks again
                units.add_(decode(payload, units.numel()), alpha=times)
            digests.append(self.cuts.put(fragment_bytes(units)))
        text = json.dumps([head.model_dump() for head in heads], separators=(",", ":"))
        rulings, forks = list(verdicts.rulings.values()), [fork for _, fork in verdicts.forks.values()]
        proofs = Proofs(rulings=rulings, forks=forks).model_dump_json()
        cut = Cut(
            vector=vector,
            fragments=digests,
            heads=self.cuts.put(text.encode()),
            verdicts=verdicts.digest,
            proofs=self.cuts.put(proofs.encode()) if verdicts.digest else None,
        )
        self._keep(cut, now)
        return cut

    def _has_payloads(self, way: list[tuple[Update, int]]) -> bool:
        blobs = self._ledger.blobs
        return all(blobs.has(part.digest) for update, _ in way for part in update.fragments)

    def _keep(self, cut: Cut, now: float) -> None:
        with self._lock:
            kept = [(at, old) for at, old in self._lately if now < at + KEPT][-(CUTS - 1) :]
            gone = [old for _, old in self._lately if all(old is not other for _, other in kept)]
            self._lately = [*kept, (now, cut)]
            alive = {blob for _, c in self._lately for blob in _blobs(c)}
        for blob in {blob for c in gone for blob in _blobs(c)} - alive:
            self.cuts.drop(blob)


def _blobs(cut: Cut) -> list[str]:
    return [blob for blob in (*cut.fragments, cut.heads, cut.proofs) if blob]


def _alike(one: Cut, other: Cut) -> bool:
    return (one.vector, one.verdicts) == (other.vector, other.verdicts)


def _within(inner: dict[str, int], outer: dict[str, int]) -> bool:
    return all(seq <= outer.get(author, 0) for author, seq in inner.items())


def read_heads(data: bytes, run: str, vector: dict[str, int]) -> list[tuple[Signed, Update]]:
    """The headers in a blob of heads, when they are signed and are exactly those of `vector`. Raises MessageError."""
    try:
        signed = _headers.validate_json(data)
    except ValidationError:
        raise MessageError("a snapshot's heads are not a list of signed headers") from None
    heads = [(header, opened(header, "update", Update, key=header.key)) for header in signed]
    if any(update.peer != header.key or update.run != run for header, update in heads):
        raise MessageError("a snapshot's heads are of another run, or not signed by their authors")
    if len(heads) != len(vector) or {update.author: update.seq for _, update in heads} != vector:
        raise MessageError("a snapshot's heads are not those of its version vector")
    return heads


def read_verdicts(data: bytes, rules: Rules, cut: Cut) -> Verdicts:
    """The verdicts that a blob of proofs proves, when they are those that the cut names. Raises MessageError."""
    verdicts = Verdicts()
    try:
        told = Proofs.model_validate_json(data)
    except ValidationError:
        raise MessageError("a snapshot's verdicts are not a list of proofs") from None
    for proof in (*told.rulings, *told.forks):
        verdicts |= believed(proof, rules)
    if verdicts.digest != cut.verdicts or verdicts.clamped(cut.vector) != cut.vector:
        raise MessageError("a snapshot's verdicts are not those that it says it heeds")
    return verdicts


def base_snapshot(ledger: Ledger) -> Snapshot | None:
    """The snapshot this ledger began at, read again from its blobs; None when it began at the run's start."""
    if (base := ledger.base()) is None:
        return None
    heads, digests = base
    heads = {update.author: update for _, update in heads}
    return Snapshot(Fetched(ledger.blobs, digests), heads, True, ledger.base_holes())


def chosen(answers: Iterable[tuple[str, Cut]]) -> tuple[Cut, int] | None:
    """(cut, volunteers behind it) of the answers to one vector: the one most volunteers agree on. `answers` are
    (volunteer, cut); one volunteer's machines count once."""
    votes: dict[tuple, tuple[Cut, set[str]]] = {}
    for volunteer, cut in answers:
        votes.setdefault((cut.heads, *cut.fragments), (cut, set()))[1].add(volunteer)
    if not votes:
        return None
    cut, volunteers = max(votes.values(), key=lambda vote: len(vote[1]))
    return cut, len(volunteers)


async def join(hub, timeout: float) -> Snapshot | None:
    """Fetches a snapshot through `hub` and begins its ledger there. None when the run is at its start as far as the
    peers say, when nobody answers in time, or when what they sent is no snapshot: then the initial weights are right.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout
    first = await _first_cut(hub, end)
    if first is None:
        return None
    answers = await _witnesses(hub, *first, end)
    cut, volunteers = chosen(answers)
    if len({(answer.heads, *answer.fragments) for _, answer in answers}) > 1:
        log.warning("peers disagree about the anchor at one version vector; %d agree on what is taken", volunteers)
    sizes = hub.rules.sizes
    wanted = [(blob, 4 * size) for blob, size in zip(cut.fragments, sizes, strict=False)]
    wanted += [(blob, None) for blob in (cut.heads, cut.proofs) if blob]
    if len(cut.fragments) != len(sizes):
        log.warning("a peer's snapshot has %d fragments; the model has %d", len(cut.fragments), len(sizes))
        return None
    for blob, size in wanted:
        patience = max(STILL, end - loop.time())  # and more for what comes, as models may be large
        if not await hub.fetcher.fetch(blob, patience, size, size or HEADS_BYTES, SLOW_LINE):
            log.warning("the snapshot did not come whole")
            return None
    blobs = hub.ledger.blobs
    try:
        heads = read_heads(blobs.read(cut.heads), hub.rules.run, cut.vector)
        verdicts = read_verdicts(blobs.read(cut.proofs) if cut.proofs else NO_PROOFS, hub.rules, cut)
    except MessageError as error:
        log.warning("a snapshot is refused: %s", error)
        return None
    if volunteers < 2:
        log.warning("the snapshot is unconfirmed: peers of only one volunteer vouch for it")
    hub.ledger.rebase(heads, cut.fragments, verdicts)
    last = {update.author: update for _, update in heads}
    return Snapshot(Fetched(blobs, cut.fragments), last, volunteers >= 2, verdicts.holes(cut.vector))


async def fragment(hub, index: int, vector: dict[str, int], timeout: float) -> torch.Tensor | None:
    """One fragment of the others' anchors at `vector`, with the verdicts we heed: the one that most volunteers name;
    None when nobody gives it in time."""
    asked = [(key, link.ticket.volunteer) for key, link in hub.links.items()]
    cuts = await asyncio.gather(*(hub.ask_cut(key, vector, timeout / 2) for key, _ in asked))
    heeded, count = hub.ledger.verdicts.digest, len(hub.rules.sizes)
    fit = [
        (volunteer, cut)
        for (_, volunteer), cut in zip(asked, cuts, strict=True)
        if cut and (cut.vector, cut.verdicts, len(cut.fragments)) == (vector, heeded, count)
    ]
    if (found := chosen(fit)) is None:
        return None
    size, name = 4 * hub.rules.sizes[index], found[0].fragments[index]
    blobs = hub.ledger.blobs
    if not await hub.fetcher.fetch(name, timeout, size, size, SLOW_LINE):
        return None
    units = fragment_from(blobs.read(name))
    blobs.drop(name)
    return units


async def _first_cut(hub, end: float):
    """(link, its cut) of whoever is first to answer, or None when all are at the start or time is up. Peers that have
    most are asked first; another joins them every few seconds, as one may be in the middle of a long step."""
    loop = asyncio.get_running_loop()
    asking: dict[str, asyncio.Task] = {}
    next_ask, fresh_since = 0.0, None
    try:
        while (now := loop.time()) < end:
            spoken = [peer for peer in hub.gossip.links.values() if peer.spoke]
            ahead = sorted((p for p in spoken if p.vector), key=lambda p: -sum(p.vector.values()))
            for key, question in list(asking.items()):
                if question.done():
                    cut = question.result()
                    if cut is not None and cut.vector and key in hub.links:
                        return hub.links[key], cut
                    del asking[key]  # it did not answer: it may be asked again
            if (unasked := [p.key for p in ahead if p.key not in asking]) and now >= next_ask:
                question = hub.ask_cut(unasked[0], None, min(PATIENCE, end - now))
                asking[unasked[0]], next_ask = loop.create_task(question), now + STAGGER
            fresh_since = (fresh_since or now) if spoken and not ahead else None
            if fresh_since and now > fresh_since + ALL_FRESH:
                return None
            await asyncio.sleep(0.05)
        return None
    finally:
        for question in asking.values():
            question.cancel()


async def _witnesses(hub, asked, cut: Cut, end: float) -> list[tuple[str, Cut]]:
    """(volunteer, cut) of everybody who names the same vector: until two volunteers agree, or nobody is left to ask."""
    loop = asyncio.get_running_loop()
    began, answers = loop.time(), [(asked.ticket.volunteer, cut)]
    asking: dict[str, tuple[str, asyncio.Task]] = {}
    try:
        while (now := loop.time()) < began + min(WITNESS, (end - began) / 3):  # time to fetch must be left
            for link in list(hub.links.values()):
                if link.key != asked.key and link.key not in asking:
                    question = loop.create_task(hub.ask_cut(link.key, cut.vector, min(PATIENCE, end - now)))
                    asking[link.key] = (link.ticket.volunteer, question)
            replies = [(who, question.result()) for who, question in asking.values() if question.done()]
            answers = [(asked.ticket.volunteer, cut)]
            answers += [(who, reply) for who, reply in replies if reply is not None and _alike(reply, cut)]
            if chosen(answers)[1] >= 2:
                break
            unmet = hub.gossip.known.keys() - hub.links.keys() - asking.keys()
            if len(replies) == len(asking) and now > began + (ACQUAINTED if unmet else HEARD_OF):
                break
            await asyncio.sleep(0.05)
    finally:
        for _, question in asking.values():
            question.cancel()
    return answers
