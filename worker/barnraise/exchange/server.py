"""The exchange's event loop: connections in and out, each message to where it belongs, each action of gossip done.

Everything here runs on one asyncio loop in a thread of its own (`node.Node` starts it); only `frozen` and the plain
attributes named there are touched from elsewhere. A message that should not have been sent drops its connection, with
the reason in the log on both sides, and changes nothing.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from barnraise.errors import MessageError
from barnraise.exchange.gossip import gossip as g
from barnraise.exchange.handlers.blob_fetcher import BlobFetcher
from barnraise.exchange.handlers.blob_scrub import BlobScrub
from barnraise.exchange.handlers.handshake import Handshake
from barnraise.exchange.handlers.mirror_list_sync import MirrorListSync
from barnraise.exchange.handlers.pruner import Pruner
from barnraise.exchange.handlers.resync import Resync
from barnraise.exchange.handlers.snapshot_protocol import Cuts
from barnraise.exchange.handlers.snapshot_server import Frozen, Question, SnapshotServer
from barnraise.exchange.handlers.update_receiver import UpdateReceiver
from barnraise.exchange.handlers.update_sender import asked, blob_frames, update_frames
from barnraise.exchange.handlers.verdict_handler import VerdictHandler
from barnraise.exchange.ledger.anchor import Retraction
from barnraise.exchange.ledger.ledger import Ledger
from barnraise.exchange.ledger.validation import UpdateRules
from barnraise.exchange.ledger.verdicts import Fork
from barnraise.exchange.network.connection import Connection, Frames, FrameSources
from barnraise.exchange.network.framing import unpack
from barnraise.exchange.network.rate_limit import FairShare
from barnraise.exchange.network.transport import Channel, ChannelClosedError, Transport
from barnraise.protocol import messages, types, verdicts
from barnraise.protocol.mirror_list import MirrorLists

log = logging.getLogger("barnraise.exchange")

DIAL = 15.0  # seconds a dialled peer has to answer
MAX_LINKS = 128


class PeerServer:
    def __init__(
        self,
        *,
        rules: UpdateRules,
        spec: str,
        incarnation: str,
        ledger: Ledger,
        transport: Transport,
        ticket: messages.Signed,
        clock: Callable[[], float],
        recognised: Callable[[messages.Update], None],
        cut: Callable[[Iterable[str]], None],
        archive: int | None = None,
    ):
        """`spec`: its digest. `recognised` is told of new updates that this machine's own key signed, `cut` of authors
        that nothing more is taken of. `archive`: rounds for which all payloads are kept, where that is its role."""
        self.rules, self.ledger, self.transport = rules, ledger, transport
        self.door = Handshake(transport, rules, spec, incarnation, ticket, clock)
        self.gossip = g.Gossip(transport.key, seed=int(transport.key[:12], 16))
        self.gossip.vector = ledger.vector()
        self.links: dict[str, Connection] = {}
        self.desk = SnapshotServer(ledger)
        self.turns = FairShare()  # at this machine's line, for payloads
        self.past_bytes = (0, 0)  # sent, received, over channels that are closed
        self._recognised = recognised
        self._disk = ThreadPoolExecutor(1, "barnraise-disk")
        self._slow = ThreadPoolExecutor(
            1, "barnraise-cuts"
        )  # cuts of large models must not hold up updates
        self.disk = disk = partial(self._beside, self._disk)
        self.inbox = UpdateReceiver(rules, ledger, self.gossip, disk, self._drop)
        self.fetcher = BlobFetcher(self.links, ledger.blobs, disk)
        self.cuts = Cuts(self.links, self.desk, partial(self._beside, self._slow))
        self.keeper = Pruner(ledger, self.gossip, disk, transport.key, archive)
        self.overtaken = Resync(self)
        self.court = VerdictHandler(
            rules,
            ledger,
            self.gossip,
            self.inbox,
            self.fetcher,
            self.links,
            disk,
            self._spawn,
            self._drop,
            cut,
        )
        self.register = MirrorListSync(
            rules, self.links, clock, (self.door, self.inbox, self.court)
        )
        self.scrub = BlobScrub(ledger, self.fetcher, partial(self._beside, self._slow))
        self.inbox.met(transport.key, ticket)
        self._directive: messages.Signed | None = None  # the last that revoked somebody
        self._proven: frozenset[str] = frozenset()  # keys whose revocation was passed on
        self._tasks: set[asyncio.Task] = set()
        self._greeting = 0

    async def run(self, ready: Callable[[], None]) -> None:
        """Serves until `stop`. Raises OSError when the transport cannot listen."""
        self._loop = asyncio.get_running_loop()
        self._poked, self._stopping = asyncio.Event(), asyncio.Event()
        try:
            await self.transport.start()
            self.gossip.membership.add_peers(self.ledger.peer_store.peers(), self._loop.time())
            ready()
            recheck = self.door.recheck(self.links, self._drop)
            for work in (
                self._accept(),
                self._pump(),
                recheck,
                self.court.mail(),
                self.scrub.run(),
            ):
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

    async def begin(self, gone: list[Retraction]) -> None:
        """The anchor is settled: what we lack is wanted, what comes enters the ledger, and `gone` comes out of it."""
        self.gossip.start(self.ledger.vector(), self.ledger.pruned(), self._loop.time())
        self.court.accord.on_verdicts(self.ledger.verdicts.digest)
        self.court.resume(gone)
        await self.inbox.begin()
        self.poke()

    async def pause(self) -> None:
        """Until `begin`, nothing is asked for, and what comes waits."""
        self.gossip.wants_updates = False
        self.court.pause()
        await self.inbox.pause()

    def published(self, update: messages.Update) -> None:
        if not self.ledger.verdicts.is_retracted(
            update.author, update.seq
        ):  # which may have come in this moment
            self.gossip.on_local_update(update.author, update.seq)
        self.poke()

    def kept(self, safe: dict[str, int]) -> None:
        """A restart needs no payloads up to `safe`."""
        self._spawn(self.keeper.prune(safe))

    def introduce(self, peers: list[messages.Peer]) -> None:
        self.gossip.membership.add_peers(peers, self._loop.time())
        self.poke()

    def announce(self, rate: float, complete: bool) -> None:
        self.gossip.set_progress(rate, complete)
        self.poke()

    def renew(self, ticket: messages.Signed) -> None:
        """Shows every peer our new ticket."""
        self.door.ticket = ticket
        self.inbox.met(self.transport.key, ticket)
        for link in self.links.values():
            link.send_message(self.door.hello())

    def revoke(self, keys: frozenset[str], directive: messages.Signed | None) -> None:
        """Drops these keys' connections and takes no new ones. A signed directive is passed on to all."""
        fresh = keys - self.door.revoked
        self.door.revoked |= keys
        for key in fresh & set(self.links):
            self._drop(key, "its ticket was revoked")
        if directive and keys - self._proven:
            self._proven, self._directive = self._proven | keys, directive
            for link in self.links.values():
                link.send_message(messages.DirectiveRelay(directive=directive))

    def frozen(self, frozen: Frozen, questions: list[Question]) -> None:
        """The loop copied its anchor for these questions."""
        self._spawn(self.cuts.answer(frozen, questions))

    def poke(self) -> None:
        self._poked.set()

    # ---- connections

    async def _accept(self) -> None:
        while True:
            channel = await self.transport.accept()
            if self._greeting >= MAX_LINKS:
                channel.close("too many connections at once")
            else:
                self._spawn(self._serve(channel, dialled=False))

    async def _dial(self, peer: messages.Peer) -> None:
        try:
            async with asyncio.timeout(DIAL):
                channel = await self.transport.connect(peer)
        except (ChannelClosedError, TimeoutError):
            self.gossip.membership.on_dial_failed(peer.key, self._loop.time())
            self.poke()
            return
        await self._serve(channel, dialled=True)

    async def _serve(self, channel: Channel, dialled: bool) -> None:
        """A connection's whole life: introductions, then messages until it ends."""
        self._greeting += 1
        try:
            link = await self.door.greet(channel, dialled)
        except (MessageError, ChannelClosedError, TimeoutError) as error:
            reason = (
                "it did not introduce itself" if isinstance(error, TimeoutError) else str(error)
            )
            log.warning("refused %s: %s", channel.peer[:8], reason)
            channel.close(reason)
            self.gossip.membership.on_dial_failed(channel.peer, self._loop.time(), refused=True)
            return
        finally:
            self._greeting -= 1
        if self._adopt(link):
            await self._converse(link)
        else:
            self.gossip.membership.on_dial_failed(channel.peer, self._loop.time(), refused=True)

    def _adopt(self, link: Connection) -> bool:
        """Makes a greeted peer one of ours, unless there is a better connection to it or no room."""
        if (old := self.links.get(link.key)) is not None:
            if self.door.stays(old, link):
                link.channel.close("there is a connection already")
                return False
            old.channel.close("a newer connection took its place")
        elif len(self.links) >= MAX_LINKS:
            link.channel.close("too many peers")
            return False
        now = self._loop.time()
        self.links[link.key] = link
        self.inbox.met(link.key, link.hello.ticket)
        peer = messages.Peer(key=link.key, addresses=link.hello.addresses)
        self.gossip.membership.add_peers([peer], now)
        if peer.addresses:
            self._spawn(self.disk(self.ledger.peer_store.store_peer, peer))
        self.gossip.on_connected(link.key, now)
        if self._directive:
            link.send_message(messages.DirectiveRelay(directive=self._directive))
        log.info("connected to %s", link.key[:8])
        self.poke()
        return True

    async def _converse(self, link: Connection) -> None:
        blob = partial(blob_frames, [self.ledger.blobs, self.desk.cuts])
        writer = self._spawn(
            link.run_writers(
                FrameSources(
                    partial(self._state, link), partial(self._update, link), blob, self.turns
                )
            )
        )
        writer.add_done_callback(lambda task: self._written(link, task))
        try:
            while True:
                message, payload = unpack(await link.receive())
                self.gossip.on_message(link.key, self._loop.time())
                await self._handle(link, message, payload)
        except ChannelClosedError as error:
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
                self.gossip.on_disconnected(link.key, self._loop.time())
                self.cuts.left(link.key)
                self.court.accord.on_disconnected(link.key)
                self.poke()

    def _written(self, link: Connection, task: asyncio.Task) -> None:
        if not task.cancelled() and (error := task.exception()):
            link.channel.close(
                str(error) if isinstance(error, ChannelClosedError) else "an error on this side"
            )

    def _drop(self, key: str, reason: str) -> None:
        if link := self.links.get(key):
            log.warning("dropped %s: %s", key[:8], reason)
            link.channel.close(reason)

    def _count(self, link: Connection) -> None:
        sent, received = self.past_bytes
        self.past_bytes = (sent + link.channel.bytes_sent, received + link.channel.bytes_received)

    # ---- messages

    async def _handle(self, link: Connection, message: types.Message, payload: memoryview) -> None:
        now = self._loop.time()
        match message:
            case messages.PeerState():
                message = self.court.counting(message)
                self.gossip.on_state(link.key, message, now)
                self.court.compare(link.key, message)
                self.register.answer(link.key, message, now)
            case messages.UpdatePush():
                update = await self.inbox.header(link.key, message, now)
                if update and update.peer == self.transport.key:
                    self._recognised(update)
            case messages.BlobPart():
                await self._take(link, message, payload)
                return  # nothing to decide
            case messages.UpdateRequest():
                if not message.headers:
                    self.gossip.on_request(link.key, message.author)
                for seq in asked(self.ledger, message):
                    link.send_update(message.author, seq, not message.headers)
                return
            case messages.BlobRequest():
                if any(blobs.has(message.digest) for blobs in (self.ledger.blobs, self.desk.cuts)):
                    link.send_blob(message.digest, message.offset)
                else:
                    link.send_message(messages.BlobMissing(digest=message.digest))
                return
            case messages.BlobMissing():
                for author, seq in self.inbox.needing(message.digest):
                    self.gossip.on_request_failed(link.key, author, seq, now)
                self.fetcher.missing(link.key, message.digest, now)
            case messages.SnapshotRequest():
                self.cuts.wanted(link.key, message.vector, now)
            case messages.SnapshotManifest():
                self.cuts.came(link.key, message)
            case messages.PeerList():
                self.gossip.membership.add_peers(message.peers, now, vouched=False)
            case messages.DirectiveRelay():
                self.revoke(self.door.directed(message.directive), message.directive)
            case verdicts.SignedVerdict() | Fork():
                await self.court.take(message, link.key)
            case MirrorLists():
                self.register.heard(message)
            case messages.Hello():
                link.renew_introduction(message, self.door.checked(link.key, message))
                self.inbox.met(link.key, message.ticket)
            case messages.Disconnect():
                self.gossip.on_goodbye(link.key, now)
                raise ChannelClosedError(message.reason)
        self.poke()

    async def _take(self, link: Connection, part: messages.BlobPart, payload: memoryview) -> None:
        if self.fetcher.wants(part.digest):
            await self.fetcher.take(link.key, part, payload)
        elif await self.inbox.part(link.key, part, payload, self._loop.time()):
            self.poke()

    def _state(self, link: Connection) -> messages.PeerState | None:
        if (state := self.gossip.build_state(link.key, self._loop.time())) is None:
            return None
        said = {
            "verdicts_digest": self.ledger.verdicts.digest,
            "heads_digest": self.ledger.heads_digest,
            "mirror_list_version": self.register.version,
        }
        return state.model_copy(update=said)

    def _update(self, link: Connection, author: str, seq: int, whole: bool) -> Frames:
        def ticket(peer: str) -> messages.Signed | None:
            return (
                None if peer == self.transport.key else self.inbox.ticket(peer)
            )  # ours came with our hello

        lacks = partial(self.gossip.needs, link.key, author, seq)
        return update_frames(self.ledger, author, seq, whole, ticket, lacks)

    # ---- the clockwork

    async def _pump(self) -> None:
        """Does what gossip decides, when a fact came in or its time is up."""
        while True:
            self._poked.clear()
            for link in self.links.values():
                link.update_meters(self._loop.time())
            for action in self.gossip.next_actions(self._loop.time()):
                self._do(action)
            self.court.act(self._loop.time())
            if self.overtaken.due(self._loop.time()):
                self._spawn(self.overtaken.fetch())
            wait = max(0.02, self.gossip.next_wakeup(self._loop.time()) - self._loop.time())
            alarm = self._loop.call_later(wait, self.poke)
            await self._poked.wait()
            alarm.cancel()

    def _do(self, action: g.Action) -> None:
        if isinstance(action, g.Dial):
            self._spawn(self._dial(action.peer))
            return
        if isinstance(action, g.Disconnect):
            self._drop(action.peer, action.reason)
            return
        if (link := self.links.get(action.to)) is None:
            return
        match action:
            case g.SendState():
                link.schedule_state()
            case g.SendGoodbye():
                link.send_message(messages.Disconnect(reason="this machine has enough links"))
            case g.SendPeers():
                link.send_message(messages.PeerList(peers=list(action.peers)))
            case g.PushUpdate():
                link.send_update(action.author, action.seq)
            case g.RequestUpdates():
                for question in self.inbox.questions(action):
                    link.send_message(question)

    def _spawn(self, work) -> asyncio.Task:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if (
            not task.cancelled()
            and (error := task.exception())
            and not isinstance(error, ChannelClosedError)
        ):
            log.error("an error of ours in the exchange", exc_info=error)

    async def _beside(self, pool: ThreadPoolExecutor, call: Callable, *values):
        return await self._loop.run_in_executor(pool, partial(call, *values))
