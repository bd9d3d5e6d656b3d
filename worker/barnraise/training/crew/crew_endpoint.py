"""A machine's endpoint for the channels of a crew, without an exchange of updates.

A lead uses it until its crew is complete, every other machine for as long as it is a member.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable

from barnraise.peering.addresses.port_mapping import PortMapper
from barnraise.peering.addresses.reachability import Reachability
from barnraise.peering.links.announced_names import AnnouncedNames
from barnraise.peering.links.handshake import Handshake, OwnIntroduction
from barnraise.peering.peer_server import run_optional
from barnraise.peering.server_thread import ServerThread
from barnraise.peering.transports.transport import (
    Channel,
    ChannelClosedError,
    Transport,
)
from barnraise.planning.limits import Limits
from barnraise.protocol.messages import Peer, Signed, WorkerSession
from barnraise.protocol.mirror_list import parse_list
from barnraise.protocol.run_mirrors import RunMirrors
from barnraise.training.crew.crew_frames import pack_control
from barnraise.training.crew.crew_messages import Recall
from barnraise.training.crew.forming_messages import CrewRefusal, Seating
from barnraise.training.join import JoinedRun

PROTOCOL = "crew"
WATCH_SECONDS = 1.0  # between two looks at this machine's addresses
FAREWELL_SECONDS = 10.0  # in which a machine has received its seat, or why it has none


class CrewDoor:
    """Accept and dial the channels of a crew; each begins with the handshake of the run.

    Attributes:
        key: this machine's.
        thread: whose event loop serves the channels.
        addresses: returns those at which others may reach this machine.
    """

    def __init__(
        self,
        thread: ServerThread,
        transport: Transport,
        handshake: Handshake,
        addresses: Callable[[], list[str]],
    ) -> None:
        """Open channels of the crew's protocol to machines that the handshake admits."""
        self.key, self.thread, self.addresses = transport.key, thread, addresses
        self._channels = transport.add_protocol(PROTOCOL)
        self._handshake = handshake

    async def dial(self, peer: Peer) -> Channel:
        """Dial a machine.

        Raises:
            ChannelClosedError: It does not answer.
            MessageError: It may not exchange messages with this one.
            TimeoutError: It did not introduce itself in time.
        """
        channel = await self._channels.connect(peer)
        await self._greet(channel, dialled=True)
        return channel

    async def accept(self) -> Channel:
        """Return the next channel that another machine opened; `admit` greets it."""
        return await self._channels.accept()

    async def admit(self, channel: Channel) -> list[str]:
        """Greet a machine that has dialled; return the addresses that it states.

        The errors are those of `dial`.
        """
        return await self._greet(channel, dialled=False)

    async def _greet(self, channel: Channel, dialled: bool) -> list[str]:
        try:
            connection = await self._handshake.greet(channel, dialled)
        except BaseException as error:
            channel.close(str(error) or "it did not introduce itself in time")
            raise
        return list(connection.hello.addresses)


class CrewEndpoint:
    """Run a transport for a crew alone.

    Attributes:
        key: this machine's.
        thread: runs the endpoint.
        door: accepts and dials, while `thread` runs.
    """

    def __init__(
        self,
        joined: JoinedRun,
        transport: Transport,
        limits: Limits,
        on_addresses: Callable[[], object] = lambda: None,
    ) -> None:
        """Prepare the endpoint; `thread.open` starts it.

        Args:
            joined: this machine's part in the run.
            transport: carries the frames; it is not started yet.
            limits: what the owner announces, and whether the router is asked to forward a port.
            on_addresses: is called in the endpoint's thread once it has further addresses.
        """
        self.key = transport.key
        self._reachability = Reachability(transport.addresses)
        self._reachability.observed.on_site_report(joined.source_ip)
        self._names = AnnouncedNames(limits.announce, self._reachability)
        self._maps_port = limits.port_mapping
        self._on_addresses = on_addresses
        self.thread = ServerThread(self)
        self._transport = transport
        self._stopped: asyncio.Event | None = None
        self._joined = joined
        self._session = secrets.token_hex(8)
        mirrors = frozenset(joined.spec.roots)
        run_mirrors = RunMirrors(joined.run, mirrors, mirrors, joined.spec.threshold)
        lists = joined.coordinator.mirror_lists
        newest = parse_list(lists[-1]) if lists else None
        own = OwnIntroduction(
            self.key,
            joined.spec_digest,
            lambda: joined.folder.label.incarnation,
            self._list_addresses,
            self._sign_session,
        )
        handshake = Handshake(
            own,
            run_mirrors.with_list(newest) if newest else run_mirrors,
            joined.ticket,
            joined.coordinator.now,
            lambda key, volunteer: False,
        )
        self.door = CrewDoor(self.thread, transport, handshake, self._list_addresses)

    async def run(self, ready: Callable[[], None]) -> None:
        """Listen until `stop`; see `Server.run`."""
        self._stopped = asyncio.Event()
        await self._transport.start()
        ready()
        mapper = PortMapper(
            self._transport.mappable_port,
            self._maps_port,
            self._reachability.observed.site_view,
            self._reachability.set_mapped,
        )
        parts = {
            "a port that the router forwards": mapper.run,
            "looking up the announced names": self._names.resolve_often,
            "noticing further addresses": self._watch_addresses,
        }
        tasks = [asyncio.ensure_future(run_optional(name, run)) for name, run in parts.items()]
        try:
            await self._stopped.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await mapper.close()
            await self._transport.close()

    def stop(self) -> None:
        """End `run`."""
        if self._stopped is not None:
            self._stopped.set()

    def _list_addresses(self) -> list[str]:
        return self._reachability.list_addresses(time.monotonic())

    async def _watch_addresses(self) -> None:
        """Report further addresses, as of a resolved name or of a port that a router forwards."""
        known = set(self._list_addresses())
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            addresses = self._list_addresses()
            if not known.issuperset(addresses):
                known.update(addresses)
                self._on_addresses()

    def _sign_session(self) -> Signed:
        joined = self._joined
        now = joined.coordinator.now()
        statement = WorkerSession(
            run=joined.run, peer=self.key, session=self._session, started=now, issued=now
        )
        return joined.coordinator.identity.sign("session", statement)


async def send_farewell(channel: Channel, last: Recall | CrewRefusal | Seating) -> None:
    """Send the last message of a channel of the forming, and close it once it has arrived."""
    with contextlib.suppress(ChannelClosedError, TimeoutError):
        await channel.send(pack_control(last))
        async with asyncio.timeout(FAREWELL_SECONDS):
            await channel.receive()  # the other side closes the channel once it has this
    channel.close("the crew is formed")
