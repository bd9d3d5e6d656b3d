"""Verdicts and forks on their way in: believed, made durable, and what they take out handed to the loop.

Whoever began at a snapshot may lack headers of what it has to take out, and whoever pruned, payloads: both are asked of
the others. Headers are known by the one that follows them, up to one of our own; payloads by their digests. A fork
whose halves already differ in what they follow began earlier: then the header before is asked for, until the first is
found.
Runs on the exchange's event loop.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from pydantic import ValidationError

from barnraise.errors import MessageError
from barnraise.exchange.gossip.gossip import Gossip
from barnraise.exchange.gossip.requests import AUTHOR_WINDOW
from barnraise.exchange.gossip.verdict_sync import SendHeads, SendVerdicts, VerdictSync
from barnraise.exchange.handlers.blob_fetcher import BlobFetcher, WantedBlob
from barnraise.exchange.handlers.update_receiver import UpdateReceiver
from barnraise.exchange.ledger.anchor import Retraction
from barnraise.exchange.ledger.diff import missing_headers, retractions
from barnraise.exchange.ledger.ledger import Ledger
from barnraise.exchange.ledger.validation import UpdateRules
from barnraise.exchange.ledger.verdicts import Fork, Proof, VerdictSet, verify_proof
from barnraise.exchange.network.connection import Connection
from barnraise.protocol import messages
from barnraise.protocol import verdicts as verdicts_module

log = logging.getLogger("barnraise.exchange")

PATIENCE = 30.0  # seconds in which a payload that is to come out has to come in, before the log says that it does not
LOOKED = (
    2.0  # seconds between two looks at the folder where `barnraise verdict` leaves what it signed
)
HEADS = 16  # authors whose last headers are shown at a time
HELD = 256  # proofs that wait for headers
VERDICT_FOLDER = "verdicts"  # that folder, beside the ledger


class VerdictHandler:
    def __init__(
        self,
        rules: UpdateRules,
        ledger: Ledger,
        gossip: Gossip,
        inbox: UpdateReceiver,
        fetcher: BlobFetcher,
        links: dict[str, Connection],
        disk: Callable[..., Awaitable],
        spawn: Callable[..., asyncio.Task],
        drop: Callable[[str, str], None],
        cut: Callable[[Iterable[str]], None],
    ):
        """`drop(peer, reason)` ends a connection; `cut` is told of authors that nothing more is taken of."""
        self.rules, self._ledger, self._gossip, self._inbox, self._fetcher = (
            rules,
            ledger,
            gossip,
            inbox,
            fetcher,
        )
        self._links, self._disk, self._spawn, self._drop, self._cut = links, disk, spawn, drop, cut
        self.accord = VerdictSync(ledger.verdicts.digest)
        self.waiting = 0  # updates that are to come out and whose payloads are not here
        self._held: dict[
            str, VerdictSet
        ] = {}  # by digest: what waits for headers from before our base
        self._lines: dict[str, asyncio.Lock] = {}  # of one author withdrawals keep their order
        self._under_way: set[asyncio.Task] = set()
        inbox.court = self

    async def take(self, proof: Proof, source: str | None = None) -> None:
        """A verdict or a fork, from a peer or from ourselves. Raises MessageError for what proves nothing."""
        found = await self._disk(verify_proof, proof, self.rules)
        if (
            self._inbox.open
        ):  # before that there is nothing to take out, and the snapshot brings its own
            await self._heed(found, source)

    async def recalled(self, signed: messages.Signed, update: messages.Update) -> None:
        """A header that is not news: it may be one from before our base that a verdict waits for."""
        if self._held and self._ledger.restore_header(signed, update):
            for found in list(self._held.values()):
                await self._heed(found, None, asks=False)

    def ask(self, peer: str | None, author: str, first: int, last: int) -> None:
        """Asks one peer, or all, for an author's signed headers, the last first."""
        question = messages.UpdateRequest(
            author=author, first=max(first, last - AUTHOR_WINDOW + 1), last=last, headers=True
        )
        for link in list(self._links.values()):
            if peer in (None, link.key):
                link.send_message(question)

    async def _heed(self, found: VerdictSet, source: str | None, asks: bool = True) -> None:
        name = found.digest or ""
        async with self._inbox.turn:  # nothing goes in meanwhile
            verdicts = self._ledger.verdicts
            if verdicts.covers(found) or not verdicts.has_room_for(found):
                self._held.pop(name, None)
                return
            lacks = await self._disk(missing_headers, self._ledger, found)
            if not lacks:
                self._held.pop(name, None)
                before = await self._disk(self._ledger.apply_verdicts, found)
                self._ruled(found, await self._disk(retractions, self._ledger, *before))
        if lacks and asks and len(self._held) < HELD:
            self._held[name] = found
            for author, first, last in lacks:
                self.ask(source, author, first, last)

    def _ruled(self, found: VerdictSet, gone: list[Retraction]) -> None:
        """What is heeded from now on, to everybody whom it concerns."""
        verdicts = self._ledger.verdicts
        for author, limit in found.limits.items():
            why = (
                "it signed two updates with one identity"
                if author in found.forks
                else "a verdict says so"
            )
            log.error(
                "of %s (%s) nothing after update %d is taken: %s",
                author[:8],
                author[-16:],
                limit,
                why,
            )
        for author, updates in found.singles.items():
            log.error(
                "of %s (%s) the updates %s come out: a verdict says so",
                author[:8],
                author[-16:],
                [*updates],
            )
        now = asyncio.get_running_loop().time()
        self._gossip.on_verdicts(self._ledger.vector(), verdicts.clamp, verdicts.is_retracted, now)
        self._inbox.ruled()
        self.accord.on_verdicts(verdicts.digest)
        self._cut(found.limits)
        for author, (seq, fork) in found.forks.items():
            self._expose(author, seq, fork)
        self.resume(gone)
        self.act(now)

    def _expose(self, author: str, seq: int, fork: Fork) -> None:
        one, other = (
            messages.Update.model_validate_json(signed.body) for signed in (fork.one, fork.other)
        )
        if one.previous != other.previous and seq > 1:
            self.ask(None, author, seq - 1, seq - 1)
        key, _, incarnation = author.partition(".")
        if (link := self._links.get(key)) and link.hello.incarnation == incarnation:
            self._drop(key, f"it signed two updates as number {seq}: nothing from there on counts")

    def resume(self, gone: list[Retraction]) -> None:
        """What the anchor holds though a verdict took it out: it comes out again as its payloads are here."""
        for author in dict.fromkeys(each.update.author for each in gone):
            task = self._spawn(
                self._withdraw(author, [each for each in gone if each.update.author == author])
            )
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    def pause(self) -> None:
        """What is to come out waits for the next `resume`, which names it anew."""
        for task in self._under_way:
            task.cancel()

    async def _withdraw(self, author: str, gone: list[Retraction]) -> None:
        async with self._lines.setdefault(author, asyncio.Lock()):
            for each in gone:
                for part in each.update.fragments if each.multiplier else ():
                    if not self._ledger.blobs.has(part.digest):
                        await self._payload(each.update, part)
                self._inbox.arrived.append(self._inbox.arrival(each))

    async def _payload(self, update: messages.Update, part: messages.FragmentUpdate) -> None:
        """Waits until somebody has given a payload that is to be taken out."""
        self.waiting += 1
        told = False
        try:
            while not await self._fetcher.fetch(
                [WantedBlob(part.digest, part.size, part.size)], PATIENCE
            ):
                if not told:
                    who = f"update {update.seq} of {update.peer[:8]}"
                    log.error(
                        "%s must come out, and nobody here has it: this machine's anchor is not the others'",
                        who,
                    )
                    told = True
        finally:
            self.waiting -= 1

    # ---- with the others

    def counting(self, state: messages.PeerState) -> messages.PeerState:
        """A peer's State, without what no longer counts in it."""
        verdicts = self._ledger.verdicts
        return (
            state.model_copy(update={"vector": verdicts.clamp(state.vector)})
            if verdicts.limits
            else state
        )

    def compare(self, key: str, state: messages.PeerState) -> None:
        """…and whether it takes out and holds what we do, once gossip knows its vector."""
        theirs = self._gossip.links.get(key)
        same = theirs is not None and theirs.vector == self._gossip.vector
        self.accord.on_state(key, state, same, self._ledger.heads_digest)

    def act(self, now: float) -> None:
        for action in self.accord.next_actions(now):
            if (link := self._links.get(action.to)) is None:
                continue
            match action:
                case SendVerdicts():
                    for proof in self._ledger.verdicts.proofs():
                        link.send_message(proof)
                case SendHeads():
                    for author, seq in self._gossip.sample_heads(HEADS):
                        link.send_update(author, seq, whole=False)

    @property
    def settled(self) -> bool:
        """Whether all who are linked take out what we do, and nothing waits to be taken out."""
        return not self.waiting and all(
            self.accord.has_same_verdicts(key) for key in list(self._links)
        )

    async def mail(self) -> None:
        """What `barnraise verdict` left for the worker of its machine."""
        folder = self._ledger.blobs.folder.parent / VERDICT_FOLDER
        while True:
            try:
                for path in sorted(folder.glob("*.json")) if self._inbox.open else ():
                    await self._open(path)
            except OSError as error:
                log.warning("%s cannot be read: %s", folder, error)
            await asyncio.sleep(LOOKED)

    async def _open(self, path: Path) -> None:
        try:
            ruling = verdicts_module.SignedVerdict.model_validate_json(path.read_bytes())
            await self.take(ruling)
        except (MessageError, ValidationError) as error:
            log.error("the verdict in %s is refused: %s", path, error)
            path.replace(path.with_suffix(".refused"))
            return
        if self._ledger.verdicts.covers(VerdictSet.from_proof(ruling)):
            path.unlink(missing_ok=True)
