"""The exchange's event loop: connections in and out, each message to where it belongs, each action of gossip done.

Everything here runs on one asyncio loop in a thread of its own (`node.Node` starts it); only `frozen` and the plain
attributes named there are touched from elsewhere. A message that should not have been sent drops its connection, with
the reason in the log on both sides, and changes nothing.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from barnraise import __version__, wire
from barnraise.errors import MessageError, TicketError
from barnraise.exchange import gossip as g
from barnraise.exchange.acceptance import Rules
from barnraise.exchange.blobs import Growth
from barnraise.exchange.frames import pack, unpack
from barnraise.exchange.inbox import Inbox
from barnraise.exchange.ledger import Ledger
from barnraise.exchange.link import PIECE, Frames, Link
from barnraise.exchange.snapshot import PATIENCE, Desk, Frozen, Question
from barnraise.exchange.transport import Channel, ChannelClosed, Transport
from barnraise.identity import check_ticket, opened

log = logging.getLogger("barnraise.exchange")

HELLO = 10.0  # seconds a peer has to introduce itself
DIAL = 15.0  # …and to answer
TOGETHER = 5.0  # two connections of one pair this close were dialled at once: the smaller key's stays
RECHECK = 60.0  # seconds between looks at the tickets of those connected
MAX_LINKS = 128
STALL = 10.0  # seconds without progress after which a blob is asked of somebody else


class Hub:
    def __init__(
        self,
        *,
        rules: Rules,
        spec: str,
        incarnation: str,
        ledger: Ledger,
        transport: Transport,
        ticket: wire.Signed,
        clock: Callable[[], float],
        recognised: Callable[[wire.Update], None],
    ):
        """`spec`: its digest. `recognised` is told of new updates that this machine's own key signed."""
        self.rules, self.ledger, self.transport = rules, ledger, transport
        self.ticket, self.incarnation = ticket, incarnation
        self.revoked: frozenset[str] = frozenset()
        self.orphaned = False
        self.rate, self.complete = 0.0, False
        self.gossip = g.Gossip(transport.key, seed=int(transport.key[:12], 16))
        self.gossip.vector = ledger.vector()
        self.links: dict[str, Link] = {}
        self.desk = Desk(ledger)
        self.past_bytes = (0, 0)  # sent, received, over channels that are closed
        self._spec, self._clock, self._recognised = spec, clock, recognised
        self._disk = ThreadPoolExecutor(1, "barnraise-disk")
        self._slow = ThreadPoolExecutor(1, "barnraise-cuts")  # cuts of large models must not hold up updates
        self.inbox = Inbox(rules, ledger, self.gossip, partial(self._beside, self._disk), self._blame)
        self.inbox.met(transport.key, ticket)
        self._fetches: dict[str, _Fetch] = {}
        self._cuts: dict[str, asyncio.Future[wire.Cut]] = {}
        self._directive: wire.Signed | None = None
        self._tasks: set[asyncio.Task] = set()
        self._greeting = 0

    async def run(self, ready: Callable[[], None]) -> None:
        """Serves until `stop`. Raises OSError when the transport cannot listen."""
        self._loop = asyncio.get_running_loop()
        self._poked, self._stopping = asyncio.Event(), asyncio.Event()
        try:
            await self.transport.start()
            ready()
            for work in (self._accept(), self._pump(), self._recheck()):
                self._spawn(work).add_done_callback(lambda task: self.stop())
            await self._stopping.wait()
        finally:
            for link in self.links.values():
                link.channel.close("leaving")
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self.transport.close()
            self._disk.shutdown()
            self._slow.shutdown()

    def stop(self) -> None:
        self._stopping.set()

    # ---- from the node's thread, by call_soon_threadsafe or run_coroutine_threadsafe

    async def begin(self) -> None:
        """The anchor is settled: what we lack is wanted, and what comes enters the ledger."""
        self.gossip.vector = self.ledger.vector()
        self.gossip.asking = True
        await self.inbox.begin()
        self.poke()

    def published(self, update: wire.Update) -> None:
        self.gossip.holds(update.author, update.seq, own=True)
        self.poke()

    def introduce(self, peers: list[wire.Peer]) -> None:
        self.gossip.introduce(peers, self._loop.time())
        self.poke()

    def announce(self, rate: float, complete: bool) -> None:
        if (rate, complete) != (self.rate, self.complete):
            self.rate, self.complete = rate, complete
            self.gossip.changed()
            self.poke()

    def renew(self, ticket: wire.Signed) -> None:
        """Shows every peer our new ticket."""
        self.ticket = ticket
        self.inbox.met(self.transport.key, ticket)
        for link in self.links.values():
            link.post(self._hello())

    def revoke(self, keys: frozenset[str], directive: wire.Signed | None) -> None:
        """Drops these keys' connections and takes no new ones. A signed directive is passed on to all."""
        fresh = keys - self.revoked
        self.revoked |= keys
        for key in fresh & set(self.links):
            self._drop(key, "its ticket was revoked")
        if fresh and directive:
            self._directive = directive
            for link in self.links.values():
                link.post(wire.Directives(directive=directive))

    def frozen(self, frozen: Frozen, questions: list[Question]) -> None:
        """The loop copied its anchor for these questions."""
        self._spawn(self._answer(frozen, questions))

    def poke(self) -> None:
        self._poked.set()

    async def fetch(self, digest: str, timeout: float, size: int | None, at_most: int) -> bool:
        """Gets a blob from whoever has it, checked by digest; False when nobody gave it in time."""
        end = self._loop.time() + timeout
        fetch = self._fetches.setdefault(digest, _Fetch(size, at_most))
        fetch.users += 1
        try:
            while not self.ledger.blobs.has(digest) and self._loop.time() < end:
                links = [link for key, link in self.links.items() if fetch.shunned.get(key, 0) < self._loop.time()]
                if fetch.source not in self.links and links:
                    link = min(links, key=lambda one: sum(f.source == one.key for f in self._fetches.values()))
                    fetch.source, fetch.moved = link.key, self._loop.time()
                    link.post(wire.Want(digest=digest, offset=self.ledger.blobs.started(digest)))
                fetch.news.clear()
                try:
                    async with asyncio.timeout(max(0.01, min(1.0, end - self._loop.time()))):
                        await fetch.news.wait()
                except TimeoutError:
                    if fetch.source and self._loop.time() > fetch.moved + STALL:
                        fetch.shun(self._loop.time())
            return self.ledger.blobs.has(digest)
        finally:
            fetch.users -= 1
            if not fetch.users:
                self._fetches.pop(digest, None)

    async def ask_cut(self, key: str, vector: dict[str, int] | None, timeout: float) -> wire.Cut | None:
        """One peer's cut at `vector` (its own choice if None); None when it does not answer in time."""
        if key not in self.links or timeout <= 0:
            return None
        self._cuts[key] = answer = self._loop.create_future()
        self.links[key].post(wire.CutWant(vector=vector))
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except (TimeoutError, ChannelClosed):
            return None
        finally:
            self._cuts.pop(key, None)

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    # ---- connections

    async def _accept(self) -> None:
        while True:
            channel = await self.transport.accept()
            if self._greeting >= MAX_LINKS:
                channel.close("too many connections at once")
            else:
                self._spawn(self._serve(channel, dialled=False))

    async def _dial(self, peer: wire.Peer) -> None:
        try:
            async with asyncio.timeout(DIAL):
                channel = await self.transport.connect(peer)
        except (ChannelClosed, TimeoutError):
            self.gossip.dial_failed(peer.key, self._loop.time())
            self.poke()
            return
        await self._serve(channel, dialled=True)

    async def _serve(self, channel: Channel, dialled: bool) -> None:
        """A connection's whole life: introductions, then messages until it ends."""
        self._greeting += 1
        try:
            link = await self._greet(channel, dialled)
        except (MessageError, ChannelClosed, TimeoutError) as error:
            reason = "it did not introduce itself" if isinstance(error, TimeoutError) else str(error)
            log.warning("refused %s: %s", channel.peer[:8], reason)
            channel.close(reason)
            self.gossip.dial_failed(channel.peer, self._loop.time(), refused=True)
            return
        finally:
            self._greeting -= 1
        if self._adopt(link):
            await self._converse(link)
        else:
            self.gossip.dial_failed(channel.peer, self._loop.time(), refused=True)

    async def _greet(self, channel: Channel, dialled: bool) -> Link:
        async with asyncio.timeout(HELLO):
            await channel.send(pack(self._hello()))
            hello, _ = unpack(await channel.receive())
        if isinstance(hello, wire.Bye):
            raise ChannelClosed(hello.reason)
        if not isinstance(hello, wire.Hello):
            raise MessageError(f"it said {hello.type} before hello")
        ticket = self._checked(channel.peer, hello)
        return Link(channel, hello, ticket, dialled, self._loop.time())

    def _hello(self) -> wire.Hello:
        return wire.Hello(
            protocols=[wire.PROTOCOL],
            version=__version__,
            run=self.rules.run,
            spec=self._spec,
            incarnation=self.incarnation,
            ticket=self.ticket,
            addresses=self.transport.addresses(),
        )

    def _checked(self, peer: str, hello: wire.Hello) -> wire.Ticket:
        """The ticket of a peer that may speak with us. Raises MessageError."""
        if wire.PROTOCOL not in hello.protocols:
            raise MessageError(f"it speaks protocols {hello.protocols}, and this version {wire.PROTOCOL}")
        if hello.run != self.rules.run:
            raise MessageError(f"it works on run {hello.run}, not {self.rules.run}")
        if hello.spec != self._spec:
            raise MessageError(f"it has spec {hello.spec[:8]} of this run, not {self._spec[:8]}")
        return self._valid(peer, hello.ticket)

    def _valid(self, peer: str, ticket: wire.Signed) -> wire.Ticket:
        return check_ticket(
            ticket,
            run=self.rules.run,
            peer=peer,
            mirrors=self.rules.mirrors,
            revoked=self.revoked,
            now=self._clock(),
            orphaned=self.orphaned,
        )

    def _adopt(self, link: Link) -> bool:
        """One connection a peer: a newer one takes over, but of two dialled at once the smaller key's stays."""
        old = self.links.get(link.key)
        if old is not None:
            at_once = link.since - old.since < TOGETHER and old.dialled != link.dialled
            if at_once and old.dialled == (self.transport.key < link.key):
                self._count(link)
                link.channel.close("there is a connection already")
                return False
            old.channel.close("a newer connection took its place")
        elif len(self.links) >= MAX_LINKS:
            link.channel.close("too many peers")
            return False
        now = self._loop.time()
        self.links[link.key] = link
        self.inbox.met(link.key, link.hello.ticket)
        self.gossip.introduce([wire.Peer(key=link.key, addresses=link.hello.addresses)], now)
        self.gossip.linked(link.key, now)
        if self._directive:
            link.post(wire.Directives(directive=self._directive))
        log.info("connected to %s", link.key[:8])
        self.poke()
        return True

    async def _converse(self, link: Link) -> None:
        writer = self._spawn(link.write(partial(self._update_frames, link), self._blob_frames))
        writer.add_done_callback(lambda task: self._written(link, task))
        try:
            while True:
                message, payload = unpack(await link.channel.receive())
                self.gossip.heard(link.key, self._loop.time())
                await self._handle(link, message, payload)
        except ChannelClosed as error:
            log.info("lost %s: %s", link.key[:8], error)
        except MessageError as error:
            log.warning("dropped %s: %s", link.key[:8], error)
            link.channel.close(str(error))
        except Exception:
            log.exception("dropped %s: an error of ours", link.key[:8])
            link.channel.close("an error on this side")
        finally:
            writer.cancel()
            self._count(link)
            if self.links.get(link.key) is link:
                del self.links[link.key]
                self.gossip.unlinked(link.key, self._loop.time())
                if (answer := self._cuts.get(link.key)) and not answer.done():
                    answer.set_exception(ChannelClosed("it left"))
                self.poke()

    def _written(self, link: Link, task: asyncio.Task) -> None:
        if not task.cancelled() and (error := task.exception()):
            link.channel.close(str(error) if isinstance(error, ChannelClosed) else "an error on this side")

    def _drop(self, key: str, reason: str) -> None:
        if link := self.links.get(key):
            log.warning("dropped %s: %s", key[:8], reason)
            link.channel.close(reason)

    def _blame(self, key: str, reason: str) -> None:
        self._drop(key, reason)

    def _count(self, link: Link) -> None:
        sent, received = self.past_bytes
        self.past_bytes = (sent + link.channel.bytes_sent, received + link.channel.bytes_received)

    # ---- messages

    async def _handle(self, link: Link, message: wire.Message, payload: memoryview) -> None:
        now = self._loop.time()
        match message:
            case wire.State():
                self.gossip.told_state(link.key, message.vector, message.rate, message.complete, now)
            case wire.Push():
                update = await self.inbox.header(link.key, message, now)
                if update and update.peer == self.transport.key:
                    self._recognised(update)
            case wire.Part():
                await self._take(link, message, payload)
                return  # nothing to decide
            case wire.Ask():
                last = min(message.last, message.first + g.WINDOW - 1, self.ledger.head(message.author).seq)
                for seq in range(message.first, last + 1):
                    link.push(message.author, seq)
                return
            case wire.Want():
                if any(blobs.has(message.digest) for blobs in (self.ledger.blobs, self.desk.cuts)):
                    link.give(message.digest, message.offset)
                else:
                    link.post(wire.Missing(digest=message.digest))
                return
            case wire.Missing():
                for author, seq in self.inbox.needing(message.digest):
                    self.gossip.failed(link.key, author, seq, now)
                if (fetch := self._fetches.get(message.digest)) and fetch.source == link.key:
                    fetch.shun(now)
            case wire.CutWant():
                if cut := self.desk.ask(Question(link.key, message.vector, now + PATIENCE), now):
                    link.post(cut)
            case wire.Cut():
                if (answer := self._cuts.get(link.key)) and not answer.done():
                    answer.set_result(message)
            case wire.Peers():
                self.gossip.introduce(message.peers, now, vouched=False)
            case wire.Directives():
                self._direct(message.directive)
            case wire.Hello():
                link.ticket, link.hello = self._checked(link.key, message), message
                self.inbox.met(link.key, message.ticket)
            case wire.Bye():
                raise ChannelClosed(message.reason)
        self.poke()

    async def _take(self, link: Link, part: wire.Part, payload: memoryview) -> None:
        if fetch := self._fetches.get(part.digest):
            if part.total > fetch.at_most or fetch.size not in (None, part.total):
                raise MessageError(f"a blob of {part.total} bytes is not the one that was wanted")
            fetch.moved = self._loop.time()
            extend = self.ledger.blobs.extend
            growth = await self._beside(self._disk, extend, part.digest, part.offset, payload, part.total)
            if growth is Growth.DAMAGED:
                fetch.shun(self._loop.time())
                raise MessageError(f"the bytes of {part.digest[:8]} are not what their digest says")
            if growth is Growth.WHOLE:
                fetch.news.set()
        elif await self.inbox.part(link.key, part, payload, self._loop.time()):
            self.poke()

    def _direct(self, signed: wire.Signed) -> None:
        directive = opened(signed, "directive", wire.Directive)
        if signed.key not in self.rules.mirrors or directive.run != self.rules.run:
            raise MessageError("a directive is not by a mirror of this run")
        self.revoke(frozenset(directive.revoked), signed)

    async def _answer(self, frozen: Frozen, questions: list[Question]) -> None:
        for question in questions:
            now = self._loop.time()
            cut = await self._beside(self._slow, self.desk.answer, frozen, question.vector, now)
            if cut and (link := self.links.get(question.peer)):
                link.post(cut)

    def _update_frames(self, link: Link, author: str, seq: int) -> Frames:
        """An update's header and payloads, for a peer that lacks it, read as they are sent."""

        def lacks() -> bool:
            theirs = self.gossip.links.get(link.key)
            return theirs is not None and theirs.vector.get(author, 0) < seq

        signed = self.ledger.header(author, seq)
        update = next((update for _, update in self.ledger.headers(author, seq, seq)), None)
        if signed is None or update is None or not lacks():
            return
        ticket = None if update.peer == self.transport.key else self.inbox.ticket(update.peer)
        yield pack(wire.Push(header=signed, ticket=ticket))
        for part in update.fragments:
            for frame in self._blob_frames(part.digest, 0):
                if not lacks():
                    return
                yield frame

    def _blob_frames(self, digest: str, offset: int) -> Frames:
        for blobs in (self.ledger.blobs, self.desk.cuts):
            total = blobs.size(digest)
            while total is not None and offset < total:
                try:
                    data = blobs.read(digest, offset, PIECE)
                except FileNotFoundError:  # a cut that was let go of meanwhile
                    break
                yield pack(wire.Part(digest=digest, offset=offset, total=total), data)
                offset += len(data)
            if total is not None:
                return

    # ---- the clockwork

    async def _pump(self) -> None:
        """Does what gossip decides, when a fact came in or its time is up."""
        while True:
            self._poked.clear()
            for action in self.gossip.act(self._loop.time()):
                self._do(action)
            wait = max(0.02, self.gossip.next_at(self._loop.time()) - self._loop.time())
            try:
                async with asyncio.timeout(wait):
                    await self._poked.wait()
            except TimeoutError:
                continue

    def _do(self, action: g.Action) -> None:
        if isinstance(action, g.Dial):
            self._spawn(self._dial(action.peer))
            return
        if isinstance(action, g.Drop):
            self._drop(action.peer, action.reason)
            return
        if (link := self.links.get(action.to)) is None:
            return
        match action:
            case g.TellState():
                link.post(wire.State(vector=dict(self.gossip.vector), rate=self.rate, complete=self.complete))
            case g.TellPeers():
                link.post(wire.Peers(peers=list(action.peers)))
            case g.PushUpdate():
                link.push(action.author, action.seq)
            case g.AskFor():
                self._ask(link, action)

    def _ask(self, link: Link, ask: g.AskFor) -> None:
        """Whole updates, or what is still missing of those that were interrupted."""
        whole: list[int] = []
        for seq in range(ask.first, ask.last + 1):
            missing = self.inbox.missing(ask.author, seq)
            if missing is None:
                whole.append(seq)
            for digest in missing or ():
                link.post(wire.Want(digest=digest, offset=self.ledger.blobs.started(digest)))
        if whole:
            link.post(wire.Ask(author=ask.author, first=whole[0], last=whole[-1]))

    async def _recheck(self) -> None:
        """Tickets run out while connections stand."""
        while True:
            await asyncio.sleep(RECHECK)
            for link in list(self.links.values()):
                try:
                    self._valid(link.key, link.hello.ticket)
                except TicketError as error:
                    self._drop(link.key, str(error))

    def _spawn(self, work) -> asyncio.Task:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not isinstance(error, ChannelClosed):
            log.error("an error of ours in the exchange", exc_info=error)

    async def _beside(self, pool: ThreadPoolExecutor, call: Callable, *values):
        return await self._loop.run_in_executor(pool, partial(call, *values))


class _Fetch:
    """A blob that somebody here waits for."""

    def __init__(self, size: int | None, at_most: int):
        self.size, self.at_most = size, at_most
        self.users = 0
        self.source: str | None = None
        self.moved = 0.0  # loop time of the last progress
        self.shunned: dict[str, float] = {}
        self.news = asyncio.Event()

    def shun(self, now: float) -> None:
        """The one that was asked does not deliver; others first."""
        if self.source:
            self.shunned[self.source] = now + STALL
        self.source = None
        self.news.set()
