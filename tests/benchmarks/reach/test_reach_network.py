"""A machine gets another address while its links last: real transports in network namespaces."""

import json
import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from typing import Any

import pytest
from helpers.paths import ROOT
from helpers.wait_for import wait_until

sys.path.append(str(ROOT / "benchmarks" / "reach"))

from reach_network import Home, Place, ReachNetwork, missing_tools

LINK_SECONDS = 30.0  # in which a link must be there again
PORT = 45555
# A listener echoes frames; a dialler sends one after the other. Both print what they see.
PROGRAM = """
import asyncio, json, sys, time
from barnraise.peering.transports.iroh_transport import IrohTransport
from barnraise.peering.transports.transport import ChannelClosedError
from barnraise.protocol.messages import Peer

async def talk(transport, channel, is_first):
    links = 1
    while True:
        try:
            if is_first:
                await channel.send(b"x")
            await channel.receive()
            if not is_first:
                await channel.send(b"x")
        except ChannelClosedError:
            if not is_first:
                return
            channel, links = await dial(transport), links + 1
            continue
        channel.refresh_remote_address()
        print(json.dumps({"seen": channel.remote_address, "addresses": transport.addresses(),
                          "links": links, "at": time.time()}), flush=True)
        await asyncio.sleep(0.2)

async def dial(transport):
    listener = IrohTransport(b"1" * 32).key
    while True:
        try:
            return await transport.connect(Peer(key=listener, addresses=[sys.argv[2]]))
        except ChannelClosedError:
            await asyncio.sleep(0.5)

async def main():
    transport = IrohTransport(sys.argv[1].encode() * 32, port=45555)
    await transport.start()
    print("{}", flush=True)
    if len(sys.argv) > 2:
        await talk(transport, await dial(transport), True)
    while True:
        asyncio.create_task(talk(transport, await transport.accept(), False))

asyncio.run(main())
"""


class Program:
    """The program in a namespace, and what it printed last."""

    def __init__(self, place: Place, *arguments: str) -> None:
        command = ["ip", "netns", "exec", place.namespace, sys.executable, "-c", PROGRAM]
        environment = os.environ | {"PYTHONPATH": str(ROOT / "worker")}
        self.process = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, text=True, env=environment
        )
        self.state: dict[str, Any] | None = None
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.state = json.loads(line)

    def sees(self, name: str) -> Any:
        """Return what it printed last under a name; None if it has printed nothing."""
        return (self.state or {}).get(name)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.mark.slow  # because a machine's addresses are read again only after ten seconds
@pytest.mark.parametrize("home", [None, Home()])
def test_machine_with_another_address_stays_linked_and_announces_it(home):
    missing = missing_tools()
    if missing:
        assert "namespaces" in missing or "lack" in missing
        return
    with ExitStack() as cleanup:
        network = ReachNetwork("moved")
        cleanup.enter_context(network.running())
        common = network.add_public()
        place = network.add_home(home) if home else network.add_public()
        listener = Program(common, "1")
        cleanup.callback(listener.kill)
        wait_until(lambda: listener.state is not None, 60)
        mover = Program(place, "2", f"{common.ipv4}:{PORT}")
        cleanup.callback(mover.kill)
        wait_until(lambda: listener.sees("seen") and mover.sees("seen"), 60)
        before = listener.sees("seen")
        assert mover.sees("addresses") == [f"{place.ipv4}:{PORT}"]
        moved = network.change_address(place)
        wait_until(lambda: listener.sees("seen") != before, LINK_SECONDS)
        assert listener.sees("seen").startswith(f"{moved.public_ipv4}:")
        wait_until(lambda: mover.sees("addresses") == [f"{moved.ipv4}:{PORT}"], LINK_SECONDS)
        after = mover.sees("at")
        wait_until(lambda: mover.sees("at") > after, LINK_SECONDS)
        assert mover.process.poll() is None
