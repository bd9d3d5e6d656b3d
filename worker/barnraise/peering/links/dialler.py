"""Dial peers: once as gossip chooses, three times where both sides dial at one time."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from barnraise.peering.addresses.reachability import Reachability
from barnraise.peering.limits.timeouts import TIMEOUTS
from barnraise.peering.membership.hole_punching import PUNCH_SECONDS
from barnraise.peering.membership.membership import PartialView
from barnraise.peering.transports.transport import Channel, ChannelClosedError, Transport
from barnraise.protocol.messages import Peer


class Dialler:
    """Open channels to peers; one dial of a peer at a time."""

    def __init__(
        self,
        transport: Transport,
        membership: PartialView,
        reachability: Reachability,
        is_wanted: Callable[[str], bool],
        serve: Callable[[Channel], Awaitable[None]],
    ) -> None:
        """Dial peers that are wanted, by key, and serve each channel until it ends."""
        self._transport = transport
        self._membership = membership
        self._reachability = reachability
        self._is_wanted = is_wanted
        self._serve = serve
        self._connecting: dict[str, asyncio.Task[Channel | None]] = {}

    async def dial(self, peer: Peer) -> None:
        """Dial a peer, and serve the channel to it until it ends."""
        await self._dial(peer, (TIMEOUTS.dial_seconds,))

    async def punch(self, peer: Peer) -> None:
        """Dial a peer that dials this machine now; this replaces a dial that is under way."""
        running = self._connecting.pop(peer.key, None)
        if running is not None:
            running.cancel()
        await self._dial(peer, PUNCH_SECONDS)

    async def _dial(self, peer: Peer, timeouts: Sequence[float]) -> None:
        connecting = asyncio.ensure_future(self._connect(peer, timeouts))
        self._connecting[peer.key] = connecting
        try:
            channel = await connecting
        except asyncio.CancelledError:
            if self._connecting.get(peer.key) is connecting:
                raise  # the server ends
            return  # another dial of the peer replaces this one
        finally:
            if self._connecting.get(peer.key) is connecting:
                del self._connecting[peer.key]
        if channel is not None:
            await self._serve(channel)

    async def _connect(self, peer: Peer, timeouts: Sequence[float]) -> Channel | None:
        """Dial a peer as often as there are timeouts, each in seconds; None if none succeeds."""
        clock = asyncio.get_running_loop().time
        for attempt, timeout in enumerate(timeouts):
            if not self._is_wanted(peer.key):
                if attempt:
                    self._membership.on_dial_needless(peer.key)
                else:
                    self._membership.on_dial_failed(peer.key, clock())
                return None
            self._reachability.on_dial(peer.addresses, clock())
            began_at = clock()
            try:
                async with asyncio.timeout(timeout):
                    return await self._transport.connect(peer)
            except (ChannelClosedError, TimeoutError):
                # A dial that is refused at once must not use up the others.
                is_last = attempt == len(timeouts) - 1
                if not is_last:
                    await asyncio.sleep(max(0.0, began_at + timeout - clock()))
        self._membership.on_dial_failed(peer.key, clock())
        return None
