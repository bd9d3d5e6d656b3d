"""Doors of a crew's machines on a network in memory, on the test's event loop."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, cast

from helpers.network.handshakes import create_handshake
from helpers.network.memory_transport import MemoryNetwork

from barnraise import __version__
from barnraise.peering.server_thread import ServerThread
from barnraise.peering.transports.transport import Channel
from barnraise.protocol.messages import Peer
from barnraise.protocol.signing import Identity
from barnraise.training.crew.crew_code import CrewCode
from barnraise.training.crew.crew_endpoint import CrewDoor
from barnraise.training.crew.crew_frames import pack_control
from barnraise.training.crew.forming_messages import CrewApplication


@dataclass
class _LoopThread:
    """What a door's owner needs of its thread: the event loop of the test."""

    loop: asyncio.AbstractEventLoop

    def run(self, work: Coroutine[Any, Any, Any], default: object) -> object:
        """Run a coroutine on the event loop, and wait in another thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()


async def open_door(network: MemoryNetwork, identity: Identity) -> CrewDoor:
    """Return the door of a machine that listens."""
    transport = network.transport(identity.key)
    thread = cast(ServerThread, _LoopThread(asyncio.get_running_loop()))
    door = CrewDoor(thread, transport, create_handshake(identity), transport.addresses)
    await transport.start()
    return door


async def dial_lead(door: CrewDoor, lead: str) -> Channel:
    """Dial the lead with this key."""
    return await door.dial(Peer(key=lead, addresses=[]))


async def send_application(channel: Channel, code: CrewCode, identity: Identity, name: str) -> None:
    """Apply for a seat in the crew of a code."""
    proof = code.prove(identity.key)
    application = CrewApplication(version=__version__, name=name, proof=proof)
    await channel.send(pack_control(application))
