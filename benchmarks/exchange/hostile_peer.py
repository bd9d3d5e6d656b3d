"""A peer with a valid ticket that sends what nobody should, over iroh, and how each is answered.

Each attack is one connection: a proper hello, then the attack. It is refused when the other side ends the connection
with a reason; what it did to the others' ledgers is for the drill to look at.
"""

import asyncio
import json
import struct
import time
from collections.abc import Callable

from drill_worker import RUN, ticket

from barnraise.exchange.ledger.ledger import GENESIS_DIGEST
from barnraise.exchange.network.framing import pack
from barnraise.exchange.network.iroh_transport import IrohTransport
from barnraise.exchange.network.transport import Channel, ChannelClosedError
from barnraise.protocol import messages
from barnraise.protocol.signing import Identity, digest
from barnraise.spec import RunSpec

WAIT = 20.0  # seconds for the answer
OTHER = "0192f0c1-2d3e-7f40-8a5b-ffffffffffff"
Frames = Callable[["Attacker", messages.Signed], list[bytes]]


class Attacker:
    def __init__(self, spec: RunSpec, victim: messages.Peer, sample: messages.Signed):
        """`sample`: an honest update's signed header, to replay and alter."""
        self.spec, self.victim, self.sample = spec, victim, sample
        self.identity = Identity(b"h" * 32)
        self.sizes = [fragment.size for fragment in spec.model.fragments()]

    def update(self, **changed: object) -> messages.Update:
        parts = [
            messages.FragmentUpdate(digest="a" * 64, size=20, sketch="0" * 16) for _ in self.sizes
        ]
        fields = dict(
            run=RUN, peer=self.identity.key, incarnation="b" * 16, seq=1, previous=GENESIS_DIGEST, tokens=10, total=10,
            fragments=parts,
        )  # fmt: skip
        return messages.Update(**(fields | changed))

    def signed(self, **changed: object) -> bytes:
        return pack(
            messages.UpdatePush(header=self.identity.sign("update", self.update(**changed)))
        )

    def attacks(self) -> dict[str, list[bytes]]:
        honest = json.loads(self.sample.body)
        altered = self.sample.model_copy(
            update={"body": json.dumps({**honest, "tokens": honest["tokens"] + 1})}
        )
        unsigned = self.sample.model_copy(update={"signature": "0" * 128})
        nan = b'{"type":"state","vector":{},"rate":NaN}'
        bad = json.loads(self.identity.sign("update", self.update()).model_dump_json())
        part = pack(messages.BlobPart(digest="a" * 64, offset=0, total=20), b"x" * 20)
        return {
            "altered": [pack(messages.UpdatePush(header=altered))],
            "unsigned": [pack(messages.UpdatePush(header=unsigned))],
            "of another run": [self.signed(run=OTHER)],
            "of too many tokens": [
                self.signed(tokens=self.spec.max_tokens_per_update + 1, total=1 << 40)
            ],
            "with other bytes than its header says": [self.signed(), part],
            "enormous": [struct.pack(">I", 1 << 30) + b"{}"],
            "not a number": [len(nan).to_bytes(4, "big") + nan],
            "not a message": [b"\x00\x00\x00\x02no"],
            "of too many fragments": [
                _raw(
                    {
                        "type": "push",
                        "header": {**bad, "body": json.dumps({"fragments": [{}] * 10_000})},
                    }
                )
            ],
            "endless": [part] * 20_000,
        }

    async def run(self) -> dict[str, str]:
        """What each attack was answered with: the reason, or what it came to instead."""
        transport = IrohTransport(self.identity.secret, host="127.0.0.1")
        await transport.start()
        found = {}
        try:
            for name, frames in self.attacks().items():
                found[name] = await self._attack(transport, frames)
            found["replayed"] = await self._replay(transport)
        finally:
            await transport.close()
        return found

    async def _greeted(self, transport: IrohTransport) -> Channel:
        channel = await transport.connect(self.victim)
        hello = messages.Hello(
            protocols=[messages.PROTOCOL_VERSION], version="0.1.0", run=RUN, spec=digest(self.spec.to_json()),
            incarnation="b" * 16, ticket=ticket(self.identity.key, "hostile"), addresses=[],
        )  # fmt: skip
        await channel.send(pack(hello))
        return channel

    async def _attack(self, transport: IrohTransport, frames: list[bytes]) -> str:
        channel = await self._greeted(transport)
        try:
            async with asyncio.timeout(WAIT):
                sending = asyncio.create_task(_send(channel, frames))
                while True:
                    await channel.receive()
        except ChannelClosedError as error:
            return str(error)
        except TimeoutError:
            return ""
        finally:
            sending.cancel()
            channel.close("done")

    async def _replay(self, transport: IrohTransport) -> str:
        """An honest update again and again: nobody's fault, and of no effect. The connection stays."""
        channel = await self._greeted(transport)
        try:
            await _send(channel, [pack(messages.UpdatePush(header=self.sample))] * 200)
            end = time.monotonic() + 3
            while time.monotonic() < end:
                async with asyncio.timeout(WAIT):
                    await channel.receive()
            return "it changes nothing"
        except (ChannelClosedError, TimeoutError) as error:
            return str(error)
        finally:
            channel.close("done")


async def _send(channel: Channel, frames: list[bytes]) -> None:
    try:
        for frame in frames:
            await channel.send(frame)
    except ChannelClosedError:
        return


def _raw(message: dict) -> bytes:
    text = json.dumps(message).encode()
    return len(text).to_bytes(4, "big") + text
