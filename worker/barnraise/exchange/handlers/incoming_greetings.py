"""Bound the connections whose peers have not introduced themselves yet.

Anybody who knows this machine's address can open connections. Those that wait for a Hello are few:
by key, by address, by network and in all; the oldest makes room for the newest.
"""

from barnraise.exchange.network.addresses import network_of
from barnraise.exchange.network.pending_pool import PendingPool
from barnraise.exchange.network.rate_limit import TokenBuckets
from barnraise.exchange.network.transport import Channel

MAX_WAITING = {"key": 2, "address": 4, "network": 16, "all": 64}
CONNECTS_PER_SECOND = 0.5  # of one key, on average
CONNECTS_BURST = 16.0


class IncomingGreetings:
    """The incoming channels whose peers have not introduced themselves."""

    def __init__(self) -> None:
        """Start without any."""
        self._waiting: PendingPool[Channel] = PendingPool(MAX_WAITING)
        self._connects = TokenBuckets(CONNECTS_PER_SECOND, CONNECTS_BURST)

    def __len__(self) -> int:
        return len(self._waiting)

    def admit(self, channel: Channel, now: float) -> bool:
        """Let a channel wait for its peer's Hello, and close the oldest ones that exceed a limit.

        Returns:
            False when the channel was closed instead, because its key connects too often.
        """
        if not self._connects.try_consume(channel.peer, 1, now):
            channel.close("you connect too often")
            return False
        address = channel.remote_address
        groups = {"key": channel.peer, "address": address, "network": network_of(address)}
        for oldest in self._waiting.add(channel, groups):
            oldest.close("others connect: introduce yourself sooner")
        return True

    def remove(self, channel: Channel) -> None:
        """Record that a channel's peer has introduced itself, or that the channel has ended."""
        self._waiting.discard(channel)
