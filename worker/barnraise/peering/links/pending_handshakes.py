"""Bound the connections whose peers have not introduced themselves yet.

Anybody who knows this machine's address can open connections. Those that wait for a Hello are few:
by key, by address, by network and in all; the oldest makes room for the newest.
"""

from barnraise.peering.limits.back_off import BackOff
from barnraise.peering.limits.incoming_limits import PendingPool, groups_of
from barnraise.peering.limits.service_budget import ServiceBudget
from barnraise.peering.limits.service_limits import WAITING_LIMITS, Service
from barnraise.peering.transports.transport import Channel
from barnraise.protocol.table_sizes import MANY, store_newest

FLOODERS = BackOff(30.0, 3600.0)  # for which a key that flooded may not connect again


class IncomingGreetings:
    """The incoming channels whose peers have not introduced themselves."""

    def __init__(self) -> None:
        self._waiting: PendingPool[Channel] = PendingPool(WAITING_LIMITS[Service.INTRODUCTIONS])
        self._connects = ServiceBudget(Service.INTRODUCTIONS)
        self._flooders: dict[str, tuple[float, int]] = {}  # key → until when, and its floods so far

    def __len__(self) -> int:
        return len(self._waiting)

    def admit(self, channel: Channel, now: float) -> bool:
        """Let a channel wait for its peer's Hello, and close the oldest ones that exceed a limit.

        Returns:
            False when the channel was closed instead, because its key connects too often, or has
            flooded this machine.
        """
        until, _ = self._flooders.get(channel.peer, (0.0, 0))
        if now < until:
            channel.close(f"you flooded this machine: come back in {until - now:.0f} seconds")
            return False
        if not self._connects.try_consume({"key": channel.peer}, now):
            channel.close("you connect too often")
            return False
        groups = {"key": channel.peer, **groups_of(channel.remote_address)}
        for oldest in self._waiting.add(channel, groups):
            oldest.close("others connect: introduce yourself sooner")
        return True

    def on_flood(self, key: str, now: float) -> None:
        """Keep a key away that sent far more than it may; longer each time."""
        _, floods = self._flooders.get(key, (0.0, 0))
        until = now + FLOODERS.pause_seconds(floods)
        store_newest(self._flooders, key, (until, floods + 1), MANY)

    def remove(self, channel: Channel) -> None:
        """Record that a channel's peer has introduced itself, or that the channel has ended."""
        self._waiting.discard(channel)
