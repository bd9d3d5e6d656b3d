"""Joining late: the anchor at a named cut V, fetched from peers.

A server copies its anchor between two steps and, when V lies behind it, takes the updates after V out again, and what a
verdict names: integer subtraction is exact, so every honest peer makes the same bytes for the same V and verdicts. The
joiner asks one peer for its cut, the others for the same one, and compares digests: when peers of two different
volunteers agree the snapshot is `confirmed`. The bytes then travel as blobs, checked by digest.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from pydantic import TypeAdapter, ValidationError

from barnraise.errors import MessageError
from barnraise.exchange.handlers.blob_fetcher import WantedBlob
from barnraise.exchange.handlers.snapshot_server import PATIENCE, Proofs, blobs_of
from barnraise.exchange.ledger.anchor import Retracted, fragment_from_bytes
from barnraise.exchange.ledger.blob_store import BlobStore
from barnraise.exchange.ledger.ledger import Ledger
from barnraise.exchange.ledger.validation import UpdateRules
from barnraise.exchange.ledger.verdicts import VerdictSet, verify_proof
from barnraise.protocol.messages import Signed, SnapshotManifest, Update
from barnraise.protocol.signing import open_signed

log = logging.getLogger("barnraise.exchange")

STAGGER = 2.0  # …after which a joiner asks another peer as well
ALL_FRESH = (
    2.0  # seconds for which all peers that spoke must be at the start to believe that the run is
)
WITNESS = 15.0  # seconds other peers have to name the same cut
HEARD_OF = 1.0  # seconds in which a peer tells a joiner of the others it knows
ACQUAINTED = 5.0  # …and in which those are connected to, if they are there
HEADS_BYTES = 64 << 20  # the blobs of heads and of proofs are no larger
NO_PROOFS = b'{"rulings":[],"forks":[]}'
STILL = 10.0  # seconds a fragment has to come in, at least…
SLOW_LINE = 1 << 16  # …and one more for each so many bytes that have come
_headers = TypeAdapter(list[Signed])


@dataclass(frozen=True)
class Snapshot:
    """An anchor to start from: int32 fragments in order, each author's last header in it, what verdicts took out from
    among them, and whether peers of two different volunteers agree on it."""

    fragments: Sequence[torch.Tensor]
    heads: dict[str, Update]
    confirmed: bool
    holes: Retracted = field(default_factory=dict)


class Fetched(Sequence[torch.Tensor]):
    """Fragments that lie as blobs, read one at a time: a model may be larger than memory."""

    def __init__(self, blobs: BlobStore, digests: Sequence[str]):
        self._blobs, self._digests = blobs, digests

    def __len__(self) -> int:
        return len(self._digests)

    def __getitem__(self, index: int) -> torch.Tensor:
        return fragment_from_bytes(self._blobs.read(self._digests[index]))


def _alike(one: SnapshotManifest, other: SnapshotManifest) -> bool:
    return (one.vector, one.verdicts) == (other.vector, other.verdicts)


def read_heads(data: bytes, run: str, vector: dict[str, int]) -> list[tuple[Signed, Update]]:
    """The headers in a blob of heads, when they are signed and are exactly those of `vector`. Raises MessageError."""
    try:
        signed = _headers.validate_json(data)
    except ValidationError:
        raise MessageError("a snapshot's heads are not a list of signed headers") from None
    heads = [(header, open_signed(header, "update", Update, key=header.key)) for header in signed]
    if any(update.peer != header.key or update.run != run for header, update in heads):
        raise MessageError("a snapshot's heads are of another run, or not signed by their authors")
    if len(heads) != len(vector) or {update.author: update.seq for _, update in heads} != vector:
        raise MessageError("a snapshot's heads are not those of its version vector")
    return heads


def read_verdicts(data: bytes, rules: UpdateRules, cut: SnapshotManifest) -> VerdictSet:
    """The verdicts that a blob of proofs proves, when they are those that the cut names. Raises MessageError."""
    verdicts = VerdictSet()
    try:
        told = Proofs.model_validate_json(data)
    except ValidationError:
        raise MessageError("a snapshot's verdicts are not a list of proofs") from None
    for proof in (*told.rulings, *told.forks):
        verdicts |= verify_proof(proof, rules)
    if verdicts.digest != cut.verdicts or verdicts.clamp(cut.vector) != cut.vector:
        raise MessageError("a snapshot's verdicts are not those that it says it heeds")
    return verdicts


def load_base_snapshot(ledger: Ledger) -> Snapshot | None:
    """The snapshot this ledger began at, read again from its blobs; None when it began at the run's start."""
    if (base := ledger.base_snapshot()) is None:
        return None
    heads, digests = base
    heads = {update.author: update for _, update in heads}
    return Snapshot(Fetched(ledger.blobs, digests), heads, True, ledger.base_retracted())


def chosen(answers: Iterable[tuple[str, SnapshotManifest]]) -> tuple[SnapshotManifest, int] | None:
    """(cut, volunteers behind each part of it) of the answers to one vector: the heads that most volunteers name, and
    each fragment as most of those have it, so that one damaged fragment costs its owner only that. `answers` are
    (volunteer, cut), as many fragments in each; one volunteer's machines count once."""
    answers = list(answers)
    if not answers:
        return None
    heads, behind = _most((volunteer, cut.heads) for volunteer, cut in answers)
    answers = [(volunteer, cut) for volunteer, cut in answers if cut.heads == heads]
    fragments = []
    for place in range(len(answers[0][1].fragments)):
        fragment, volunteers = _most(
            (volunteer, cut.fragments[place]) for volunteer, cut in answers
        )
        fragments.append(fragment)
        behind = min(behind, volunteers)
    return answers[0][1].model_copy(update={"fragments": fragments}), behind


def _most(named: Iterable[tuple[str, str]]) -> tuple[str, int]:
    """The digest that most volunteers name, and how many do."""
    votes: dict[str, set[str]] = {}
    for volunteer, name in named:
        votes.setdefault(name, set()).add(volunteer)
    best = max(votes, key=lambda name: len(votes[name]))
    return best, len(votes[best])


@dataclass(frozen=True)
class Found:
    """A snapshot whose bytes are all here, with its authors' last headers and the verdicts it heeds; `confirmed` as in
    `Snapshot`."""

    cut: SnapshotManifest
    heads: list[tuple[Signed, Update]]
    verdicts: VerdictSet
    confirmed: bool


async def join(hub, timeout: float) -> Snapshot | None:
    """Fetches a snapshot through `hub` and begins its ledger there; None when there is none to be had."""
    found = await fetch(hub, timeout)
    if found is None or not hub.ledger.can_rebase(found.cut.vector, found.verdicts):
        return None
    hub.ledger.rebase(found.heads, found.cut.fragments, found.verdicts)
    fragments = Fetched(hub.ledger.blobs, found.cut.fragments)
    last = {update.author: update for _, update in found.heads}
    return Snapshot(
        fragments, last, found.confirmed, found.verdicts.retracted_within(found.cut.vector)
    )


async def fetch(hub, timeout: float) -> Found | None:
    """Fetches a snapshot through `hub`, from all who have it at once. None when the run is at its start as far as the
    peers say, when nobody answers in time, or when what they sent is no snapshot."""
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout
    first = await _first_cut(hub, end)
    if first is None:
        return None
    async with Witnesses(hub, *first) as witnesses:
        cut, volunteers = await witnesses.agreed(end)
        if witnesses.disagree:
            log.warning(
                "peers disagree about the anchor at one version vector; %d agree on what is taken",
                volunteers,
            )
        sizes = hub.rules.sizes
        wanted = {
            blob: WantedBlob(blob, 4 * size, 4 * size)
            for blob, size in zip(cut.fragments, sizes, strict=True)
        }
        wanted |= {
            blob: WantedBlob(blob, None, HEADS_BYTES) for blob in (cut.heads, cut.proofs) if blob
        }
        patience = max(STILL, end - loop.time())  # and more for what comes, as models may be large
        began = loop.time()
        if not await hub.fetcher.fetch([*wanted.values()], patience, SLOW_LINE, witnesses.holders):
            log.warning("the snapshot did not come whole")
            return None
    seconds, blobs = loop.time() - began, hub.ledger.blobs
    log.info(
        "fetched %.1f MB of a snapshot in %.1f s", sum(4 * size for size in sizes) / 1e6, seconds
    )
    try:
        heads = read_heads(blobs.read(cut.heads), hub.rules.run, cut.vector)
        verdicts = read_verdicts(
            blobs.read(cut.proofs) if cut.proofs else NO_PROOFS, hub.rules, cut
        )
    except MessageError as error:
        log.warning("a snapshot is refused: %s", error)
        return None
    if volunteers < 2:
        log.warning("the snapshot is unconfirmed: peers of only one volunteer vouch for it")
    return Found(cut, heads, verdicts, volunteers >= 2)


async def fragment(hub, index: int, vector: dict[str, int], timeout: float) -> torch.Tensor | None:
    """One fragment of the others' anchors at `vector`, with the verdicts we heed: the one that most volunteers name;
    None when nobody gives it in time."""
    asked = [(key, link.ticket.volunteer) for key, link in hub.links.items()]
    cuts = await asyncio.gather(*(hub.cuts.ask(key, vector, timeout / 2) for key, _ in asked))
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
    if not await hub.fetcher.fetch([WantedBlob(name, size, size)], timeout, SLOW_LINE):
        return None
    units = fragment_from_bytes(blobs.read(name))
    blobs.delete(name)
    return units


async def _first_cut(hub, end: float):
    """(link, its cut) of whoever is first to answer, or None when all are at the start or time is up. Peers that have
    most are asked first; another joins them every few seconds, as one may be in the middle of a long step."""
    loop = asyncio.get_running_loop()
    asking: dict[str, asyncio.Task] = {}
    next_ask, fresh_since = 0.0, None
    try:
        while (now := loop.time()) < end:
            spoken = [peer for peer in hub.gossip.links.values() if peer.has_state]
            ahead = sorted((p for p in spoken if p.vector), key=lambda p: -sum(p.vector.values()))
            for key, question in list(asking.items()):
                if question.done():
                    cut = question.result()
                    fits = (
                        cut is not None
                        and cut.vector
                        and len(cut.fragments) == len(hub.rules.sizes)
                    )
                    if fits and key in hub.links:
                        return hub.links[key], cut
                    del asking[key]  # it did not answer: it may be asked again
            if (unasked := [p.key for p in ahead if p.key not in asking]) and now >= next_ask:
                question = hub.cuts.ask(unasked[0], None, min(PATIENCE, end - now))
                asking[unasked[0]], next_ask = loop.create_task(question), now + STAGGER
            fresh_since = (fresh_since or now) if spoken and not ahead else None
            if fresh_since and now > fresh_since + ALL_FRESH:
                return None
            await asyncio.sleep(0.05)
        return None
    finally:
        for question in asking.values():
            question.cancel()


class Witnesses:
    """Everybody we are linked to is asked for the cut that one peer named first, for as long as this is open: to
    compare what they say, and to fetch from all who have it. `holders`: who has which digest; it grows."""

    def __init__(self, hub, asked, cut: SnapshotManifest):
        self._hub, self._first = hub, cut
        self._answers: dict[str, tuple[str, SnapshotManifest]] = {}  # peer → (volunteer, its cut)
        self.holders: dict[str, set[str]] = {}
        self._asking: dict[str, asyncio.Task] = {}
        self._began = asyncio.get_running_loop().time()
        self._answered(asked.key, asked.ticket.volunteer, cut)

    async def __aenter__(self) -> "Witnesses":
        self._task = asyncio.get_running_loop().create_task(self._ask_all())
        return self

    async def __aexit__(self, *exc) -> None:
        for task in (self._task, *self._asking.values()):
            task.cancel()

    @property
    def disagree(self) -> bool:
        return len({(cut.heads, *cut.fragments) for _, cut in self._answers.values()}) > 1

    async def agreed(self, end: float) -> tuple[SnapshotManifest, int]:
        """What is to be taken, and how many volunteers vouch for it: until two do, or nobody is left to ask."""
        loop = asyncio.get_running_loop()
        last = self._began + min(WITNESS, (end - self._began) / 3)  # time to fetch must be left
        while (now := loop.time()) < last and chosen(self._answers.values())[1] < 2:
            unmet = (
                self._hub.gossip.membership.passive.keys()
                - self._hub.links.keys()
                - self._asking.keys()
            )
            quiet = all(task.done() for task in self._asking.values())
            if quiet and now > self._began + (ACQUAINTED if unmet else HEARD_OF):
                break
            await asyncio.sleep(0.05)
        return chosen(self._answers.values())

    async def _ask_all(self) -> None:
        while True:
            for link in list(self._hub.links.values()):
                if link.key not in self._answers and link.key not in self._asking:
                    self._asking[link.key] = asyncio.get_running_loop().create_task(self._ask(link))
            await asyncio.sleep(0.05)

    async def _ask(self, link) -> None:
        cut = await self._hub.cuts.ask(link.key, self._first.vector, PATIENCE)
        if cut is not None and _alike(cut, self._first):
            self._answered(link.key, link.ticket.volunteer, cut)

    def _answered(self, key: str, volunteer: str, cut: SnapshotManifest) -> None:
        if len(cut.fragments) != len(self._hub.rules.sizes):
            log.warning(
                "a peer's snapshot has %d fragments, not %d",
                len(cut.fragments),
                len(self._hub.rules.sizes),
            )
            return
        self._answers[key] = volunteer, cut
        for name in blobs_of(cut):
            self.holders.setdefault(name, set()).add(key)
