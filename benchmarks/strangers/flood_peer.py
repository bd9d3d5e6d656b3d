"""One process of `bench_floods.py`: a machine that is flooded, one that publishes, or a flood.

Usage: flood_peer.py ROLE FOLDER VICTIM_PORT HONEST_PORT. The roles `victim`, `honest` and `limited`
(an honest machine with a slow line) run a real exchange over iroh and print a line of JSON for each
update that arrives or is published. The other roles are floods. Each prints a line when it begins.
"""

import asyncio
import contextlib
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import iroh
import torch
from blake3 import blake3

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))

from joined_run import MIRROR, RUN, issue_ticket
from memory_anchor import MemoryAnchor

from barnraise.exchange.exchange import Exchange, ExchangeConfig
from barnraise.ledger.anchor import compute_sketch
from barnraise.ledger.codec import encode
from barnraise.ledger.ledger import GENESIS_DIGEST, Ledger
from barnraise.ledger.validation import EMPTY_PART
from barnraise.peering.transports.framing import pack, unpack
from barnraise.peering.transports.iroh_transport import ALPN, IrohTransport
from barnraise.peering.transports.transport import Channel, ChannelClosedError
from barnraise.protocol import messages
from barnraise.protocol.signing import Identity, digest
from barnraise.protocol.versions import SPOKEN_PROTOCOLS
from barnraise.spec import ModelSpec, Recipe, RunSpec

MODEL = ModelSpec(layers=4, width=128, heads=4, context=128, vocabulary=256)
RECIPE = Recipe(step_sequences=16, round_steps=10, codec="dense2")
SPEC = RunSpec(MODEL, recipe=RECIPE, seed=7, owner=MIRROR.key, roots=(MIRROR.key,))
RATE = 50_000  # tokens per second that each ticket permits: twice what such a machine trains
PUBLISH_INTERVAL = 0.5  # seconds between two honest updates
LIMITED_UPLINK = 1_000_000.0  # bytes per second
POLL_SECONDS = 0.005  # between two looks of the victim for updates
VICTIM = Identity(b"V" * 32)
HONEST = Identity(b"H" * 32)
LIAR = Identity(b"L" * 32)


def peer_at(port: int, identity: Identity = VICTIM) -> messages.Peer:
    """Return where a machine listens."""
    return messages.Peer(key=identity.key, addresses=[f"127.0.0.1:{port}"])


# ---- machines --------------------------------------------------------------------------------


def open_exchange(identity: Identity, folder: Path, port: int) -> tuple[Exchange, MemoryAnchor]:
    """Start a machine's exchange and load its anchor."""
    config = ExchangeConfig(
        spec=SPEC,
        run=RUN,
        identity=identity,
        incarnation=f"{1:016x}",
        ticket=issue_ticket(identity.key, identity.key, RUN, RATE),
        mirrors=frozenset([MIRROR.key]),
    )
    transport = IrohTransport(identity.secret, "127.0.0.1", port)
    exchange = Exchange(config, Ledger(folder), transport)
    anchor = MemoryAnchor.from_seed(MODEL, SPEC.seed)
    exchange.start(anchor.vector)
    return exchange, anchor


def run_victim(folder: Path, port: int) -> None:
    """Receive updates as a training loop does between two steps."""
    exchange, anchor = open_exchange(VICTIM, folder, port)
    print_line(ready=True)
    while True:
        for received in exchange.poll_updates():
            for index in range(len(anchor.fragments)):
                units = received.decode(index)
                if units is not None:
                    anchor.add_units(index, units)
            anchor.record(received.header)
            if isinstance(received.header, messages.Update):
                is_honest = received.header.peer == HONEST.key
                print_line(honest=is_honest, seq=received.header.seq, at=time.time())
        exchange.serve_snapshots(anchor)
        time.sleep(POLL_SECONDS)


def run_honest(folder: Path, victim_port: int, port: int, uplink: float, interval: float) -> None:
    """Publish an update of noise at intervals, over an uplink in bytes per second."""
    exchange, anchor = open_exchange(HONEST, folder, port)
    exchange.set_uplink_limit(uplink)
    exchange.add_peers([peer_at(victim_port)])
    while not exchange.stats.peers:
        time.sleep(0.05)
    print_line(ready=True)
    noise = torch.Generator().manual_seed(1)
    for seq in itertools.count(1):
        parts = [
            encode(
                torch.randint(-(1 << 20), 1 << 20, fragment.shape, generator=noise).int(), "dense2"
            )
            for fragment in anchor.fragments
        ]
        print_line(seq=seq, at=time.time())
        with exchange.new_update(10) as update:
            for index, part in enumerate(parts):
                update.add(index, *part)
        exchange.poll_updates()
        time.sleep(interval)


def print_line(**values: object) -> None:
    """Print values as a line of JSON for the benchmark to read."""
    print(json.dumps(values), flush=True)


# ---- floods ----------------------------------------------------------------------------------


async def link(
    transport: IrohTransport, identity: Identity, peer: messages.Peer, volunteer: str = LIAR.key
) -> Channel:
    """Connect to a machine and introduce this key of a volunteer properly."""
    channel = await transport.connect(peer)
    hello = messages.Hello(
        protocols=list(SPOKEN_PROTOCOLS),
        version="1",
        run=RUN,
        spec=digest(SPEC.to_json()),
        incarnation=f"{2:016x}",
        ticket=issue_ticket(identity.key, volunteer, RUN, RATE),
        addresses=[],
    )
    await channel.send(pack(hello))
    return channel


async def send_for_ever(port: int, frames: Iterator[tuple[bytes, float]]) -> None:
    """Send frames, each after a pause, over a link that is opened again whenever it ends."""
    transport = IrohTransport(LIAR.secret, "127.0.0.1")
    await transport.start()
    while True:
        try:
            channel = await link(transport, LIAR, peer_at(port))
            reading = asyncio.create_task(discard_frames(channel))
            for frame, pause in frames:
                await channel.send(frame)
                await asyncio.sleep(pause)
            reading.cancel()
        except ChannelClosedError as error:
            print_line(closed=str(error))
            await asyncio.sleep(0.2)


async def discard_frames(channel: Channel) -> None:
    """Read what the victim sends, until the channel ends."""
    with contextlib.suppress(ChannelClosedError):
        while True:
            await channel.receive()


async def flood_states(port: int) -> None:
    """Name 50,000 authors that do not exist, 2,000 in each message, again and again."""

    def frames() -> Iterator[tuple[bytes, float]]:
        for batch in itertools.count():
            vector = {f"b{batch % 25:03x}{n:060x}.{1:016x}": 1 << 40 for n in range(1500)}
            yield pack(messages.PeerState(vector=vector, full=False, rate=1.0)), 0.0

    await send_for_ever(port, frames())


async def flood_hellos(port: int) -> None:
    """Keep 130 connections of 13 keys open that send a few bytes and no Hello."""
    transports = [IrohTransport(bytes([1, n]) * 16, "127.0.0.1") for n in range(13)]
    for transport in transports:
        await transport.start()

    async def greet(transport: IrohTransport) -> None:
        while True:
            with contextlib.suppress(ChannelClosedError):
                channel = await transport.connect(peer_at(port))
                await channel.send(b"")
                await discard_frames(channel)
            await asyncio.sleep(0.05)

    await asyncio.gather(*(greet(transport) for transport in transports for _ in range(10)))


async def flood_bare_connections(port: int) -> None:
    """Open 1,000 QUIC connections without a stream, from ten keys, and again as they end."""
    address = iroh.EndpointAddr(
        iroh.EndpointId.from_string(VICTIM.key), None, list(peer_at(port).addresses)
    )

    async def connect(endpoint: iroh.Endpoint) -> None:
        while True:
            with contextlib.suppress(iroh.IrohError):
                connection = await endpoint.connect(address, ALPN)
                await connection.closed()
            await asyncio.sleep(0.05)

    endpoints = []
    for _ in range(10):
        builder = iroh.EndpointBuilder()
        builder.apply_minimal()
        builder.relay_mode(iroh.RelayMode.disabled())
        builder.bind_addr("127.0.0.1:0")
        endpoints.append(await builder.bind())
    await asyncio.gather(*(connect(endpoint) for endpoint in endpoints for _ in range(100)))


async def flood_parts(port: int) -> None:
    """Send headers of new incarnations and all their payloads but one; and unwanted payloads."""

    def frames() -> Iterator[tuple[bytes, float]]:
        unwanted = pack(messages.BlobPart(digest="a" * 64, offset=0, total=1 << 30), bytes(1 << 19))
        for life in itertools.count(10):
            parts, payloads = _noise_parts(life)
            yield _pack_push(incarnation=f"{life:016x}", fragments=parts), 0.0
            for part, payload in list(zip(parts, payloads, strict=True))[1:]:
                piece = messages.BlobPart(digest=part.digest, offset=0, total=part.size)
                yield pack(piece, payload), 0.0
            yield unwanted, 0.02

    await send_for_ever(port, frames())


async def flood_empty_updates(port: int) -> None:
    """Publish 190 updates a second that change one weight by one unit, in one valid chain."""

    def frames() -> Iterator[tuple[bytes, float]]:
        size = min(fragment.size for fragment in MODEL.fragments())
        index = [fragment.size for fragment in MODEL.fragments()].index(size)
        values = torch.zeros(size, dtype=torch.int32)
        values[0] = 1
        payload, units = encode(values, "top64x2")
        part = messages.FragmentUpdate(
            digest=digest_bytes(payload), size=len(payload), sketch=compute_sketch(units)
        )
        fragments = [EMPTY_PART] * len(MODEL.fragments())
        fragments[index] = part
        # An author's time bounds its number.
        started_ms, previous = int(1000 * (time.time() - 3600)), GENESIS_DIGEST
        for seq in itertools.count(1):
            header = _sign_update(
                incarnation=f"{5:016x}",
                seq=seq,
                previous=previous,
                started_ms=started_ms,
                time_ms=max(started_ms + 3_600_000 + seq, int(1000 * time.time())),
                fragments=fragments,
            )
            previous = digest(header.body)
            yield pack(messages.UpdatePush(header=header, ticket=TICKET)), 0.0
            piece = messages.BlobPart(digest=part.digest, offset=0, total=part.size)
            yield pack(piece, payload), 1 / 190

    await send_for_ever(port, frames())


async def flood_requests(port: int) -> None:
    """Request the honest machine's updates and payloads again and again: six keys, three people."""

    async def request_for_ever(number: int) -> None:
        identity = Identity(bytes([2, number]) * 16)
        transport = IrohTransport(identity.secret, "127.0.0.1")
        await transport.start()
        while True:
            with contextlib.suppress(ChannelClosedError):
                volunteer = f"requester {number % 3}"
                channel = await link(transport, identity, peer_at(port, HONEST), volunteer)
                await channel.send(pack(messages.PeerState(vector={}, rate=1.0)))
                await request_again(channel)
            await asyncio.sleep(0.2)

    await asyncio.gather(*(request_for_ever(number) for number in range(6)))


async def request_again(channel: Channel) -> None:
    """Request what a peer announces and all payloads that it names, whenever something arrives."""
    payloads: dict[str, None] = {}
    vector: dict[str, int] = {}
    while True:
        message, _ = unpack(await channel.receive())
        match message:
            case messages.PeerState():
                vector |= message.vector
                await channel.send(pack(messages.PeerState(vector={}, rate=1.0)))
                for author, seq in vector.items():
                    request = messages.UpdateRequest(author=author, first=1, last=seq)
                    await channel.send(pack(request))
                for digest in payloads:
                    await channel.send(pack(messages.BlobRequest(digest=digest)))
            case messages.UpdatePush():
                update = messages.Update.model_validate_json(message.header.body)
                payloads |= {part.digest: None for part in update.payload_parts}
            case messages.BlobPart() if message.digest in payloads:
                await channel.send(pack(messages.BlobRequest(digest=message.digest)))
            case _:
                continue


TICKET = issue_ticket(LIAR.key, LIAR.key, RUN, RATE)
VOLUNTEER = digest(LIAR.key)  # as in its ticket


def digest_bytes(data: bytes) -> str:
    """Return the digest of bytes."""
    return blake3(data).hexdigest()


def _noise_parts(seed: int) -> tuple[list[messages.FragmentUpdate], list[bytes]]:
    noise = torch.Generator().manual_seed(seed)
    parts: list[messages.FragmentUpdate] = []
    payloads: list[bytes] = []
    for fragment in MODEL.fragments():
        values = torch.randint(-(1 << 20), 1 << 20, (fragment.size,), generator=noise).int()
        payload, units = encode(values, "dense2")
        payloads.append(payload)
        parts.append(
            messages.FragmentUpdate(
                digest=digest_bytes(payload), size=len(payload), sketch=compute_sketch(units)
            )
        )
    return parts, payloads


def _sign_update(**changes: object) -> messages.Signed:
    now = int(1000 * time.time())
    fields: dict[str, object] = {
        "run": RUN,
        "peer": LIAR.key,
        "seq": 1,
        "previous": GENESIS_DIGEST,
        "tokens": 0,
        "total": 0,
        "started_ms": now - 1000,
        "time_ms": now,
        "ticket": digest(TICKET.body),
        "volunteer": VOLUNTEER,
    }
    return LIAR.sign("update", messages.Update.model_validate(fields | changes))


def _pack_push(**changes: object) -> bytes:
    return pack(messages.UpdatePush(header=_sign_update(**changes), ticket=TICKET))


FLOODS: dict[str, Callable[[int], Awaitable[None]]] = {
    "states": flood_states,
    "hellos": flood_hellos,
    "bare connections": flood_bare_connections,
    "parts": flood_parts,
    "empty updates": flood_empty_updates,
    "requests": flood_requests,
}


def main() -> None:
    """Run one role until it is killed."""
    role, folder = sys.argv[1], Path(sys.argv[2])
    victim_port, honest_port = map(int, sys.argv[3:])
    torch.set_num_threads(1)
    match role:
        case "victim":
            run_victim(folder, victim_port)
        case "honest":
            run_honest(folder, victim_port, honest_port, math.inf, PUBLISH_INTERVAL)
        case "limited":
            run_honest(folder, victim_port, honest_port, LIMITED_UPLINK, 2 * PUBLISH_INTERVAL)
        case _:
            os.nice(10)  # the attackers' computers are not the victim's
            asyncio.run(_run_flood(role, honest_port if role == "requests" else victim_port))


async def _run_flood(role: str, port: int) -> None:
    print_line(ready=True)
    await FLOODS[role](port)


if __name__ == "__main__":
    main()
