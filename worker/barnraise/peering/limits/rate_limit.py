"""Limit and measure rates: token buckets, a fairly shared uplink, and meters.

Times are arguments, in seconds on a monotonic clock, except where a class waits on the event loop.
"""

import asyncio
import itertools
import math
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from barnraise.peering.limits.service_limits import Rate
from barnraise.protocol.table_sizes import MANY, store_newest

METER_SECONDS = 10.0  # over which a meter averages
METER_STEP_SECONDS = 0.5  # between two samples of a meter
CAPACITY_MEMORY_SECONDS = 60.0  # of sending after which a capacity measurement has faded to 1/e
MIN_MEASURED_SECONDS = 0.05  # of sending before a capacity is reported
MIN_WAIT_SECONDS = 0.01  # that are waited for; the next frame waits for less in addition
PIECE_BYTES = 1 << 17  # payload bytes in one frame; a message waits behind at most one frame
TURN_SECONDS = 0.25  # of the uplink that a transfer may take before the next one's turn


@dataclass(frozen=True)
class PieceLimits:
    """The payload in one frame on a limited uplink, which a router's queue holds whole.

    Attributes:
        least: bytes, at any rate.
        seconds: of the uplink that one may take.
        queued: bytes that any router queues.
        queue_seconds: of the uplink that it queues, where that is more.
    """

    least: int = 1 << 10
    seconds: float = 1.0
    queued: int = 1 << 13
    queue_seconds: float = 0.125


PIECE_LIMITS = PieceLimits()


class TokenBucket:
    """Allow `rate` units per second on average and a burst at once."""

    def __init__(self, rate: Rate) -> None:
        """Start with a full bucket; an infinite rate per second never limits, 0 is no rate."""
        assert rate.per_second > 0, "a bucket that is never refilled would never be ready"
        self.rate, self._burst = rate
        self._level = self._burst
        self._filled_at = -math.inf

    def consume(self, amount: float, now: float) -> float:
        """Consume `amount` units, also when the bucket holds fewer.

        Returns:
            Seconds to wait before consuming again; 0 while the bucket is not overdrawn.
        """
        if math.isinf(self.rate):
            return 0.0
        self._level = self._refilled_tokens(now) - amount
        self._filled_at = now
        return max(0.0, -self._level / self.rate)

    def try_consume(self, amount: float, now: float) -> bool:
        """Consume `amount` units if the bucket holds them; return whether it did."""
        level = self._refilled_tokens(now)
        if level < amount:
            return False
        self._level = level - amount
        self._filled_at = now
        return True

    def ready_at(self, now: float) -> float:
        """Return when the bucket holds a whole unit, in seconds."""
        return now + max(0.0, 1.0 - self._refilled_tokens(now)) / self.rate

    def _refilled_tokens(self, now: float) -> float:
        if not math.isfinite(self._filled_at):
            return self._burst
        return min(self._burst, self._level + max(0.0, now - self._filled_at) * self.rate)


class TokenBuckets:
    """A bucket for each of many names; a bounded number of names is remembered.

    A name that is forgotten has a full bucket again.
    """

    def __init__(self, rate: Rate, max_names: int = MANY) -> None:
        """Give each name a bucket of this rate, see `TokenBucket`."""
        self._rate = rate
        self._max_names = max_names
        self._buckets: dict[str, TokenBucket] = {}

    def try_consume(self, name: str, amount: float, now: float) -> bool:
        """Consume `amount` units of a name's bucket if it holds them; return whether it did."""
        return self._bucket_of(name).try_consume(amount, now)

    def consume(self, name: str, amount: float, now: float) -> None:
        """Consume `amount` units of a name's bucket, also when it holds fewer."""
        self._bucket_of(name).consume(amount, now)

    def ready_at(self, name: str, now: float) -> float:
        """Return when a name's bucket holds a whole unit, in seconds."""
        bucket = self._buckets.get(name)
        return bucket.ready_at(now) if bucket else now

    def _bucket_of(self, name: str) -> TokenBucket:
        bucket = self._buckets.get(name) or TokenBucket(self._rate)
        store_newest(self._buckets, name, bucket, self._max_names)
        return bucket


class UplinkSender:
    """One of those that share an uplink, for instance a connection.

    A sender is compared by identity.
    """

    def __init__(self, share: "FairShare") -> None:
        """Join those that share an uplink."""
        self._share = share
        self.rank = math.inf  # of the transfer in progress; inf if it is not urgent
        self.keeps_turn = True  # False from a missed turn on until the transfer ends

    async def wait_for_turn(self, size: int) -> None:
        """Wait until `size` bytes may go out."""
        await self._share.wait_for_turn(self, size)

    def start_transfer(self, rank: float) -> None:
        """Start a transfer: an urgent one goes before those of higher ranks; inf: it is not."""
        self.rank = rank

    def end_transfer(self) -> None:
        """Leave the uplink to the others: the last frame of a transfer is sent."""
        self.keeps_turn = True
        self._share.end_turn(self)


class FairShare:
    """Share one uplink among many senders and measure its capacity.

    Senders have turns in the order in which they began to wait. A turn ends with a transfer, or
    after TURN_SECONDS. So peers get small updates whole and one after the other: were they sent to
    all at once, all of them would have the update only when the last one has it. A sender whose
    peer reads too slowly to use its turn loses it. An urgent transfer goes out whole in one turn,
    also where there is no limit, and waits for none of a higher rank. Messages do not wait; what
    they take is missing for what waits.
    """

    def __init__(self, rate: float = math.inf) -> None:
        """Limit the uplink to `rate` bytes per second; inf sets no limit."""
        self._bucket = TokenBucket(Rate(rate, 0.0))
        self._waiting: dict[UplinkSender, tuple[asyncio.Future[None], int]] = {}
        self._turn: UplinkSender | None = None
        self._turn_bytes = 0.0  # that the sender whose turn it is may still send
        self._alarm: asyncio.TimerHandle | None = None
        self._senders = 0
        self._ranks = itertools.count()
        self._measured_until = 0.0  # event loop time up to which the seconds of sending are counted
        self._bytes = 0.0  # sent while somebody was sending, fading
        self._seconds = 0.0  # of those bytes, fading

    def next_rank(self, is_late: bool = False) -> float:
        """Return the rank of an urgent transfer after those before it, a late one after all others.

        No machine publishes 2⁵⁰ updates.
        """
        return next(self._ranks) + (2.0**50 if is_late else 0)

    @property
    def rate(self) -> float:
        """The limit, in bytes per second."""
        return self._bucket.rate

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit."""
        return not math.isinf(self.rate)

    @property
    def piece_bytes(self) -> int:
        """The payload bytes in one frame: a message can wait for them, and a router queue them."""
        if not self.is_limited:
            return PIECE_BYTES
        limits = PIECE_LIMITS
        queued = max(limits.queued, limits.queue_seconds * self.rate)
        waited = max(limits.least, limits.seconds * self.rate)
        return int(min(PIECE_BYTES, queued, waited))

    def limit(self, rate: float) -> None:
        """Set the limit, in bytes per second. Safe to call from another thread."""
        assert rate > 0, "nothing could ever be sent"
        self._bucket.rate = rate

    def record_message(self, size: int) -> None:
        """Record `size` bytes of a message, or of packets, that went out without waiting."""
        self._bucket.consume(size, asyncio.get_running_loop().time())

    @property
    def measured_rate(self) -> float:
        """The capacity: bytes per second while somebody was sending; 0 before enough was sent."""
        return self._bytes / self._seconds if self._seconds > MIN_MEASURED_SECONDS else 0.0

    async def wait_for_turn(self, sender: UplinkSender, size: int) -> None:
        """Wait until a sender's `size` bytes may go out."""
        if not self.is_limited and math.isinf(sender.rank):
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[sender] = (granted, size)
        self._serve()
        try:
            await granted
        finally:
            if self._waiting.get(sender, (None,))[0] is granted:
                del self._waiting[sender]

    def end_turn(self, sender: UplinkSender) -> None:
        """End a sender's turn, if it has one."""
        if self._turn is sender:
            self._turn = None
            self._serve()

    def _serve(self) -> None:
        """Let those send that may now; set an alarm for the others."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        loop = asyncio.get_running_loop()
        while self._waiting:
            first = min(self._waiting, key=lambda sender: sender.rank)
            if self._turn is not None and first.rank < self._turn.rank:
                self._turn = None
            delay = self._bucket.consume(0.0, loop.time())
            if self._turn is not None and self._turn not in self._waiting:
                # Its next frame usually follows at once.
                patience = self._patience if self._turn.keeps_turn else 0.0
                self._alarm = loop.call_later(max(delay, patience), self._pass_turn)
                return
            # A header goes out with the payload after it, without a timer of its own.
            if delay >= MIN_WAIT_SECONDS:
                self._alarm = loop.call_later(delay, self._serve)
                return
            self._grant(self._turn or first, loop.time())

    @property
    def _patience(self) -> float:
        """Seconds that a turn waits for its sender's next frame.

        Without a limit a frame returns once the line has taken most of it.
        """
        if self.is_limited:
            return MIN_WAIT_SECONDS
        seconds = 2 * PIECE_BYTES / self.measured_rate if self.measured_rate else TURN_SECONDS
        return max(MIN_WAIT_SECONDS, seconds)

    def _pass_turn(self) -> None:
        """Let the next one send: the sender whose turn it was has nothing to send."""
        if self._turn is not None and self._turn not in self._waiting:
            self._turn.keeps_turn = False
            self._turn = None
        self._serve()

    def _grant(self, sender: UplinkSender, now: float) -> None:
        """Let a sender send its next frame."""
        if self._turn is not sender:
            self._turn = sender
            self._turn_bytes = self.rate * TURN_SECONDS if math.isinf(sender.rank) else math.inf
        granted, size = self._waiting.pop(sender)
        self._bucket.consume(size, now)
        self._turn_bytes -= size
        if self._turn_bytes <= 0:
            self._turn = None
        if not granted.done():
            granted.set_result(None)

    @contextmanager
    def measure_sending(self, size: int) -> Generator[None]:
        """Count the time inside the block as time in which `size` bytes were sent."""
        clock = asyncio.get_running_loop().time
        if not self._senders:
            self._measured_until = clock()
        self._senders += 1
        try:
            yield
        finally:
            self._senders -= 1
            now = clock()
            seconds = now - self._measured_until
            fade = math.exp(-seconds / CAPACITY_MEMORY_SECONDS)
            self._measured_until = now
            self._bytes = self._bytes * fade + size
            self._seconds = self._seconds * fade + seconds


class Meter:
    """Measure the rate at which a count of bytes grows, over a window of the last seconds."""

    def __init__(self, window: float = METER_SECONDS) -> None:
        self._window = window
        self._samples: deque[tuple[float, int]] = deque()

    def update(self, total: int, now: float) -> None:
        """Record that the count was `total` at time `now`."""
        if self._samples and now < self._samples[-1][0] + METER_STEP_SECONDS:
            return
        self._samples.append((now, total))
        while len(self._samples) > 2 and self._samples[1][0] <= now - self._window:
            self._samples.popleft()

    @property
    def rate(self) -> float:
        """Bytes per second between the samples."""
        return self._growth / self._seconds if self._seconds else 0.0

    @property
    def window_rate(self) -> float:
        """Bytes per second over the whole window, also before it has passed."""
        return self._growth / max(self._window, self._seconds)

    @property
    def _growth(self) -> int:
        return self._samples[-1][1] - self._samples[0][1] if self._samples else 0

    @property
    def _seconds(self) -> float:
        return self._samples[-1][0] - self._samples[0][0] if self._samples else 0.0
