"""Forward connections between processes, and cut them on command.

`python cutting_proxy.py LINKS` reads LINKS, a JSON object of name → {"listen": ADDRESS, "to":
ADDRESS}, where an address is a path of a socket or [host, port]. It prints "ready", and then obeys
lines "cut NAME", "reset NAME" and "heal NAME".
"""

import asyncio
import json
import sys
from pathlib import Path

CHUNK = 1 << 16  # bytes
Address = str | list
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Link:
    """One way from clients to a server."""

    def __init__(self, listen: Address, to: Address):
        self.listen = listen
        self.to = to
        self.is_passing = asyncio.Event()
        self.is_passing.set()
        self.is_refusing = False
        self.writers: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        """Accept connections from now on."""
        if isinstance(self.listen, str):
            Path(self.listen).unlink(missing_ok=True)
            await asyncio.start_unix_server(self.accept, self.listen)
        else:
            await asyncio.start_server(self.accept, *self.listen)

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection until either side closes it."""
        self.writers.add(writer)
        await self.is_passing.wait()
        if self.is_refusing:
            self.close(writer)
            return
        try:
            server_reader, server_writer = await self.connect()
        except OSError:
            self.close(writer)
            return
        self.writers.add(server_writer)
        await asyncio.gather(self.pump(reader, server_writer), self.pump(server_reader, writer))

    async def connect(self) -> Streams:
        """Connect to the server."""
        if isinstance(self.to, str):
            return await asyncio.open_unix_connection(self.to)
        return await asyncio.open_connection(*self.to)

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one direction; its end closes the writer."""
        try:
            while data := await reader.read(CHUNK):
                await self.is_passing.wait()
                writer.write(data)
                await writer.drain()
            await self.is_passing.wait()
        except OSError:
            pass  # one side is gone, which the other learns by the line below
        self.close(writer)

    def close(self, writer: asyncio.StreamWriter) -> None:
        """Close a connection's side."""
        self.writers.discard(writer)
        writer.close()

    def obey(self, command: str) -> None:
        """Cut, reset or heal the link."""
        if command == "cut":
            self.is_passing.clear()
        else:
            self.is_refusing = command == "reset"
            self.is_passing.set()
        if command == "reset":
            for writer in list(self.writers):
                writer.transport.abort()
                self.writers.discard(writer)


async def main() -> None:
    """Serve the links until the input ends."""
    links = {name: Link(**each) for name, each in json.loads(sys.argv[1]).items()}
    for link in links.values():
        await link.open()
    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command, name = line.split()
        links[name].obey(command)


if __name__ == "__main__":
    asyncio.run(main())
