"""A stranger's connection to a node, over which it says what a test tells it to."""

import asyncio
import threading
from contextlib import contextmanager

from barnraise.exchange.network.framing import pack
from barnraise.protocol import messages
from barnraise.protocol.signing import Identity, digest


@contextmanager
def stranger(world, machine, number=9, hello=None, reads=True, channels=None):
    """A connection to `machine` by somebody who says what the test tells it to. `say` sends a message or a frame."""
    identity, loop = Identity(bytes([number]) * 32), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(20)

    transport = world.network.transport(identity.key)
    run(transport.start())
    channel = run(
        transport.connect(messages.Peer(key=machine.identity.key, addresses=["memory:x"]))
    )
    reader = None
    if channels is not None:
        channels.append((channel, run))

    async def read():
        while True:
            await channel.receive()

    try:
        run(channel.send(pack(hello or greeting(world, identity))))
        if reads:
            reader = asyncio.run_coroutine_threadsafe(read(), loop)
        yield lambda message, payload=b"": run(
            channel.send(message if isinstance(message, bytes) else pack(message, payload))
        )
    finally:
        if reader:
            reader.cancel()
        run(transport.close())
        run(asyncio.sleep(0))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def greeting(world, identity, **changed):
    parts = dict(
        protocols=[1], version="1", run="01890000-0000-7000-8000-000000000001", spec=digest(world.spec.to_json()),
        incarnation="9" * 16, ticket=world.ticket(identity.key, 9), addresses=[],
    )  # fmt: skip
    return messages.Hello(**(parts | changed))
