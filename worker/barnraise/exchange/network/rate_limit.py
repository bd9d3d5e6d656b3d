"""How much may pass, and how much does: token buckets, turns at a shared line, and meters. The time is an argument."""

import asyncio
import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

WINDOW = 10.0  # seconds that a meter looks back
GRAIN = 0.5  # …in steps of
MEMORY = 60.0  # seconds of sending over which a line's measure fades
LEAST = 0.05  # …and how many make one


class TokenBucket:
    """`rate` a second on average, `burst` of them at once. Who takes more than there is waits until it is paid."""

    def __init__(self, rate: float, burst: float):
        self.rate, self.burst = rate, burst
        self._level, self._at = burst, -math.inf

    def consume(self, amount: float, now: float) -> float:
        """Takes `amount` and says how many seconds to wait before the next; 0 while the bucket is not overdrawn."""
        if math.isinf(self.rate):
            return 0.0
        grown = (
            self._level + max(0.0, now - self._at) * self.rate
            if math.isfinite(self._at)
            else self.burst
        )
        self._level, self._at = min(self.burst, grown) - amount, now
        return max(0.0, -self._level / self.rate)


class FairShare:
    """One line that many senders share, `rate` bytes/s at most: who waits is served in the order in which it came. A
    link waits once at a time, so that peers take turns and none starves another. What the line carries while somebody
    has something to send is measured."""

    def __init__(self, rate: float = math.inf):
        self._bucket = TokenBucket(rate, 0.0)
        self._line = asyncio.Lock()  # first come, first served
        self._sending, self._marked = 0, 0.0  # how many; until when that has been counted
        self._bytes = self._seconds = 0.0  # while somebody was, fading

    @property
    def rate(self) -> float:
        return self._bucket.rate

    @rate.setter
    def rate(self, rate: float) -> None:
        self._bucket.rate = rate

    @property
    def measured_rate(self) -> float:
        """Bytes/s that the line has carried when there was something to carry; 0 before there was enough of it."""
        return self._bytes / self._seconds if self._seconds > LEAST else 0.0

    async def wait_for_turn(self, size: int) -> None:
        """Returns when `size` bytes have had their time on the line."""
        if math.isinf(self.rate):
            return
        async with self._line:
            await asyncio.sleep(self._bucket.consume(size, asyncio.get_running_loop().time()))

    @contextmanager
    def measure_sending(self, size: int) -> Iterator[None]:
        """Around the sending of so many bytes."""
        clock = asyncio.get_running_loop().time
        if not self._sending:
            self._marked = clock()
        self._sending += 1
        try:
            yield
        finally:
            self._sending -= 1
            now = clock()
            passed, self._marked = now - self._marked, now
            fade = math.exp(-passed / MEMORY)
            self._bytes, self._seconds = self._bytes * fade + size, self._seconds * fade + passed


class Meter:
    """Bytes/s over the last WINDOW seconds, of a count that only grows."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def update(self, total: int, now: float) -> None:
        if self._seen and now < self._seen[-1][0] + GRAIN:
            return
        self._seen.append((now, total))
        while len(self._seen) > 2 and self._seen[1][0] <= now - WINDOW:
            self._seen.popleft()

    @property
    def rate(self) -> float:
        if len(self._seen) < 2:
            return 0.0
        (first, then), (last, now) = self._seen[0], self._seen[-1]
        return (now - then) / (last - first)
