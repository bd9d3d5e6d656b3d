"""How much may pass, and how much does: token buckets, turns at a shared line, and meters. The time is an argument."""

import asyncio
import math
from collections import deque

WINDOW = 10.0  # seconds that a meter looks back
GRAIN = 0.5  # …in steps of


class Bucket:
    """`rate` a second on average, `burst` of them at once. Who takes more than there is waits until it is paid."""

    def __init__(self, rate: float, burst: float):
        self.rate, self.burst = rate, burst
        self._level, self._at = burst, -math.inf

    def take(self, amount: float, now: float) -> float:
        """Takes `amount` and says how many seconds to wait before the next; 0 while the bucket is not overdrawn."""
        if math.isinf(self.rate):
            return 0.0
        grown = self._level + max(0.0, now - self._at) * self.rate if math.isfinite(self._at) else self.burst
        self._level, self._at = min(self.burst, grown) - amount, now
        return max(0.0, -self._level / self.rate)


class Turns:
    """One line that many senders share, `rate` bytes/s at most: who waits is served in the order in which it came. A
    link waits once at a time, so that peers take turns and none starves another."""

    def __init__(self, rate: float = math.inf):
        self._bucket = Bucket(rate, 0.0)
        self._line = asyncio.Lock()  # first come, first served

    @property
    def rate(self) -> float:
        return self._bucket.rate

    @rate.setter
    def rate(self, rate: float) -> None:
        self._bucket.rate = rate

    async def take(self, size: int) -> None:
        """Returns when `size` bytes have had their time on the line."""
        if math.isinf(self.rate):
            return
        async with self._line:
            await asyncio.sleep(self._bucket.take(size, asyncio.get_running_loop().time()))


class Meter:
    """Bytes/s over the last WINDOW seconds, of a count that only grows."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def note(self, total: int, now: float) -> None:
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
