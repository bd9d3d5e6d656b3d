"""Fetch blobs by digest (text shards, fragments of a snapshot) from all peers that have them.

Blobs arrive in pieces and an interrupted fetch continues where it ended. Each blob is requested
from one peer: the one expected to have sent it soonest, by the goodput measured so far. A peer is
asked some way ahead, so that its uplink never idles, and for what it will have sent by the time
all blobs are here. When a peer stalls, or would delay the end, its blob continues from another
peer where it stopped. Everything runs on the exchange's event loop.
"""

import asyncio
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from barnraise.errors import MessageError
from barnraise.exchange.blobs.piece_sources import PieceSources
from barnraise.exchange.gossip.handler_context import RunInThread
from barnraise.exchange.gossip.requests import STALL_SECONDS
from barnraise.ledger.blob_store import AppendResult, BlobStore
from barnraise.peering.limits.rate_limit import PIECE_BYTES
from barnraise.peering.links.connection import Connection
from barnraise.protocol.messages import BlobPart, BlobRequest

MIN_STALL_SECONDS = 2.0  # the least of that, for peers that have been fast
ASKED_AHEAD_SECONDS = 1.0  # of its uplink that a peer is asked ahead
MIN_AHEAD_BLOBS = 2  # blobs that a peer is asked ahead at least
CHECK_SECONDS = 0.25  # between two checks for stalled peers
GOODPUT_MEMORY_SECONDS = 5.0  # after which a goodput measurement has faded to 1/e


@dataclass(frozen=True)
class WantedBlob:
    """A blob of `size` bytes, where that is known, and of at most `max_size` bytes."""

    digest: str
    size: int | None
    max_size: int


@dataclass
class BlobSource:
    """A peer that blobs are requested from."""

    # What it was asked for and has not sent, in order, by digest.
    requested: dict[str, "BlobDownload"] = field(default_factory=dict)
    # When it last sent something new, or was asked after having sent everything.
    progress_at: float = 0.0
    skipped_until: float = -math.inf  # when it may be asked again after a stall
    _bytes: float = 0.0
    _seconds: float = 0.0

    @property
    def goodput(self) -> float:
        """Bytes per second while something was requested; 0 before any arrived."""
        return self._bytes / self._seconds if self._seconds else 0.0

    @property
    def requested_bytes(self) -> int:
        """Bytes that were requested and have not arrived."""
        return sum(download.remaining for download in self.requested.values())

    def record_bytes(self, size: int, now: float) -> None:
        """Record that `size` new bytes arrived."""
        seconds = max(now - self.progress_at, 1e-6)
        fade = math.exp(-seconds / GOODPUT_MEMORY_SECONDS)
        self._bytes = self._bytes * fade + size
        self._seconds = self._seconds * fade + seconds
        self.progress_at = now

    def is_stalled(self, now: float) -> bool:
        """Return whether it has sent nothing for too long."""
        timeout = STALL_SECONDS
        if self.goodput:
            timeout = min(timeout, max(MIN_STALL_SECONDS, 4 * PIECE_BYTES / self.goodput))
        return bool(self.requested) and now > self.progress_at + timeout

    def has_room(self) -> bool:
        """Return whether it may be asked for another blob."""
        return (
            len(self.requested) < MIN_AHEAD_BLOBS
            or self.requested_bytes < self.goodput * ASKED_AHEAD_SECONDS
        )


class BlobDownload:
    """A blob that some `fetch` waits for."""

    def __init__(self, wanted: WantedBlob, present: int) -> None:
        """Continue after the `present` bytes that are on disk."""
        self.wanted = wanted
        self.present = present
        self.received = 0  # bytes that arrived since
        self.waiters = 0
        self.holders: Container[str] | None = None  # keys of peers that have it; None: any peer may
        self.source: str | None = None  # the peer it is requested from
        self.missing_until: dict[str, float] = {}  # peers that do not have it → when to ask again
        self.is_complete = False

    @property
    def remaining(self) -> int:
        """Bytes that are missing; a guess where the size is unknown."""
        return max(1, (self.wanted.size or PIECE_BYTES) - self.present)

    def may_come_from(self, key: str, now: float) -> bool:
        """Return whether a peer may have the blob."""
        is_missing = self.missing_until.get(key, 0.0) >= now
        return not is_missing and (self.holders is None or key in self.holders)


class BlobFetcher:
    """Distribute requests for blobs among the connected peers."""

    def __init__(
        self,
        connections: Mapping[str, Connection],
        blobs: BlobStore,
        run_on_disk: RunInThread,
    ) -> None:
        """Fetch into `blobs` from `connections`, the server's table by key."""
        self._connections = connections
        self._blobs = blobs
        self._run_on_disk = run_on_disk
        self._downloads: dict[str, BlobDownload] = {}
        self._sources: dict[str, BlobSource] = {}
        self._pieces = PieceSources()
        self._changed = asyncio.Event()

    async def fetch(
        self,
        wanted: Sequence[WantedBlob],
        timeout: float,
        min_rate: float = math.inf,
        holders: Mapping[str, Container[str]] | None = None,
    ) -> bool:
        """Fetch blobs into the store.

        Args:
            wanted: The blobs.
            timeout: Seconds in which they must arrive.
            min_rate: Bytes per second: each so many that arrive extend the timeout by a second.
            holders: Digest → keys of peers that have the blob; it may grow meanwhile.

        Returns:
            Whether all arrived in time.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        downloads = [
            self._start_download(blob, holders)
            for blob in wanted
            if not self._blobs.has(blob.digest)
        ]
        received_before = sum(download.received for download in downloads)
        try:
            while not all(download.is_complete for download in downloads):
                now = loop.time()
                received = sum(download.received for download in downloads) - received_before
                extended_end = end + received / min_rate
                if now >= extended_end:
                    return False
                self._assign_sources(now)
                self._changed.clear()
                try:
                    async with asyncio.timeout(max(0.01, min(CHECK_SECONDS, extended_end - now))):
                        await self._changed.wait()
                except TimeoutError:
                    continue
            return True
        finally:
            for download in downloads:
                download.waiters -= 1
                if not download.waiters:
                    self._end_download(download)

    def wants(self, digest: str) -> bool:
        """Return whether a `fetch` waits for this blob."""
        return digest in self._downloads

    async def on_part(self, source: str, part: BlobPart, payload: memoryview) -> None:
        """Receive a piece of a wanted blob.

        Raises:
            MessageError: When it is not a piece of that blob.
        """
        download = self._downloads[part.digest]
        wanted = download.wanted
        if part.total > wanted.max_size or wanted.size not in (None, part.total):
            raise MessageError(f"a blob of {part.total} bytes is not the one that was wanted")
        if not self._pieces.accepts(part.digest, source):
            return
        attempt = self._pieces.attempt(part.digest)

        def append() -> AppendResult:
            if self._pieces.attempt(part.digest) != attempt:
                return AppendResult.INCOMPLETE  # the blob has begun again meanwhile
            present = self._blobs.partial_size(part.digest)
            if part.offset <= present < part.offset + len(payload):
                self._pieces.add(part.digest, source, present)
            return self._blobs.append_piece(part.digest, part.offset, payload, part.total)

        result = await self._run_on_disk(append)
        new_bytes = 0
        if part.offset <= download.present:
            new_bytes = part.offset + len(payload) - download.present
        if new_bytes > 0:
            download.present += new_bytes
            download.received += new_bytes
            known = self._sources.get(source)
            if known is not None:
                known.record_bytes(len(payload), asyncio.get_running_loop().time())
        if result is AppendResult.CORRUPT:
            download.present = 0
            if not self._pieces.on_corrupt(part.digest, source):
                self._release_source(download)
                return
            self.on_missing(source, part.digest, asyncio.get_running_loop().time())
            raise MessageError(f"the bytes of {part.digest[:8]} are not what their digest says")
        if result is AppendResult.COMPLETE:
            download.is_complete = True
            self._end_download(download)

    def on_missing(self, source: str, digest: str, now: float) -> None:
        """Record that a peer does not have this blob."""
        download = self._downloads.get(digest)
        if download is None:
            return
        download.missing_until[source] = now + STALL_SECONDS
        if download.source == source:
            self._release_source(download)

    # ---- downloads

    def _start_download(
        self, wanted: WantedBlob, holders: Mapping[str, Container[str]] | None
    ) -> BlobDownload:
        present = self._blobs.partial_size(wanted.digest)
        download = self._downloads.setdefault(wanted.digest, BlobDownload(wanted, present))
        download.waiters += 1
        download.holders = None if holders is None else holders[wanted.digest]
        return download

    def _end_download(self, download: BlobDownload) -> None:
        self._release_source(download)
        self._downloads.pop(download.wanted.digest, None)
        self._pieces.forget(download.wanted.digest)

    def _release_source(self, download: BlobDownload) -> None:
        """Expect the blob from its peer no longer."""
        source = self._sources.get(download.source) if download.source else None
        if source is not None:
            source.requested.pop(download.wanted.digest, None)
        download.source = None
        self._changed.set()

    # ---- which peer to ask

    def _assign_sources(self, now: float) -> None:
        """Skip peers that are gone or stalled, and request what is requested from nobody."""
        self._update_sources(now)
        waiting = sorted(
            (download for download in self._downloads.values() if download.source is None),
            key=lambda download: -download.remaining,
        )
        usable = {
            key: source for key, source in self._sources.items() if source.skipped_until < now
        }
        goodput = sum(source.goodput for source in usable.values()) or 1.0
        remaining = sum(download.remaining for download in self._downloads.values())
        seconds_left = remaining / goodput  # until everything is here, at best
        while True:
            choice = self._choose_next(waiting, usable, seconds_left, now)
            if choice is None:
                break
            download, key = choice
            waiting.remove(download)
            self._request(download, key, now)
        if not waiting:
            self._reassign_last(usable, now)

    def _update_sources(self, now: float) -> None:
        for key, source in list(self._sources.items()):
            is_gone = key not in self._connections
            if is_gone or source.is_stalled(now):
                source.skipped_until = now + STALL_SECONDS
                for download in list(source.requested.values()):
                    self._release_source(download)
            if is_gone:
                del self._sources[key]
        for key in self._connections:
            self._sources.setdefault(key, BlobSource())

    def _choose_next(
        self,
        waiting: list[BlobDownload],
        usable: dict[str, BlobSource],
        seconds_left: float,
        now: float,
    ) -> tuple[BlobDownload, str] | None:
        """Return the blob and the peer to request next; None when nothing should be requested.

        It is the largest blob that a peer with room may have, from the peer that will have sent it
        soonest. A peer that would finish late is passed over if another, busy one would be sooner.
        """
        with_room = [key for key, source in usable.items() if source.has_room()]
        for download in waiting:
            seconds = {
                key: _seconds_until_sent(usable[key], download, usable)
                for key in with_room
                if download.may_come_from(key, now)
            }
            if not seconds:
                continue
            key = min(seconds, key=seconds.__getitem__)
            is_late = seconds[key] > seconds_left + CHECK_SECONDS
            if is_late and any(
                download.may_come_from(other_key, now)
                and _seconds_until_sent(other, download, usable) < seconds[key]
                for other_key, other in usable.items()
            ):
                continue
            return download, key
        return None

    def _request(self, download: BlobDownload, key: str, now: float) -> None:
        source = self._sources[key]
        if not source.requested:
            source.progress_at = now
        download.source = key
        source.requested[download.wanted.digest] = download
        if self._pieces.request_from(download.wanted.digest, key):
            self._blobs.discard_partial(download.wanted.digest)
        download.present = self._blobs.partial_size(download.wanted.digest)
        self._connections[key].send_message(
            BlobRequest(digest=download.wanted.digest, offset=download.present)
        )

    def _reassign_last(self, usable: dict[str, BlobSource], now: float) -> None:
        """Let peers that have sent everything take over what would arrive last."""
        for key, idle in usable.items():
            if idle.requested or not idle.goodput:
                continue
            candidates = [
                (download, source)
                for source in usable.values()
                for download in source.requested.values()
                if download.may_come_from(key, now) and source.goodput
            ]
            if not candidates:
                continue
            download, source = max(
                candidates, key=lambda pair: pair[1].requested_bytes / pair[1].goodput
            )
            seconds_saved_at = 0.5 * source.requested_bytes / source.goodput
            if download.remaining / idle.goodput + CHECK_SECONDS < seconds_saved_at:
                last = list(source.requested.values())[-1]  # one that it has not begun, if any
                if not last.may_come_from(key, now):
                    last = download
                self._release_source(last)
                self._request(last, key, now)


def _seconds_until_sent(
    source: BlobSource, download: BlobDownload, usable: Mapping[str, BlobSource]
) -> float:
    """Return the seconds until a peer would have sent a blob after what is requested from it.

    A peer that has sent nothing yet is assumed to be as fast as the others on average.
    """
    goodputs = [other.goodput for other in usable.values() if other.goodput]
    mean = sum(goodputs) / len(goodputs) if goodputs else 1.0
    return (source.requested_bytes + download.remaining) / (source.goodput or mean)
