"""A peer with a valid ticket that attacks over iroh, and records how each attack is answered.

Each attack is one connection: a proper hello, then the attack. An attack is refused when the other
side closes the connection with a reason. The drill itself checks that no ledger has changed.
"""

import asyncio
import json
import struct
import time

from joined_run import RUN, issue_ticket

from barnraise.ledger.ledger import GENESIS_DIGEST
from barnraise.peering.transports.framing import pack
from barnraise.peering.transports.iroh_transport import IrohTransport
from barnraise.peering.transports.transport import Channel, ChannelClosedError
from barnraise.protocol import messages
from barnraise.protocol.enums import Standing
from barnraise.protocol.signing import Identity, digest
from barnraise.protocol.versions import SPOKEN_PROTOCOLS
from barnraise.spec import RunSpec

REPLY_SECONDS = 20.0
REPLAY_SECONDS = 3.0  # how long a replay must leave the connection open
OTHER_RUN = "0192f0c1-2d3e-7f40-8a5b-ffffffffffff"
INCARNATION = "b" * 16


def build_hello(spec: RunSpec, ticket: messages.Signed) -> messages.Hello:
    """Return the hello of a peer with this ticket."""
    return messages.Hello(
        protocols=list(SPOKEN_PROTOCOLS),
        version="0.1.0",
        run=RUN,
        spec=digest(spec.to_json()),
        incarnation=INCARNATION,
        ticket=ticket,
        addresses=[],
    )


def build_update(
    spec: RunSpec, key: str, ticket: messages.Signed, **changes: object
) -> messages.Update:
    """Return the header of a key's first update under a ticket, with changes."""
    part = messages.FragmentUpdate(digest="a" * 64, size=20, sketch="0" * 16)
    permission = messages.Ticket.model_validate_json(ticket.body)
    fields: dict[str, object] = {
        "run": RUN,
        "peer": key,
        "incarnation": INCARNATION,
        "seq": 1,
        "previous": GENESIS_DIGEST,
        "tokens": 10,
        "total": 10,
        "started_ms": int(1000 * time.time()) - 1000,
        "time_ms": int(1000 * time.time()),
        "ticket": digest(ticket.body),
        "volunteer": permission.volunteer,
        "newcomer": permission.standing is Standing.NEWCOMER,
        "fragments": [part] * len(spec.model.fragments()),
    }
    return messages.Update.model_validate(fields | changes)


class Attacker:
    """Attacks one machine."""

    def __init__(self, spec: RunSpec, victim: messages.Peer, sample: messages.UpdatePush) -> None:
        """Prepare the attacks.

        Args:
            spec: the run's.
            victim: the machine to attack.
            sample: an honest update, to replay and alter.
        """
        self.spec = spec
        self.victim = victim
        self.sample = sample
        self.identity = Identity(b"h" * 32)
        self.ticket = issue_ticket(self.identity.key, "hostile")

    def make_update(self, **changes: object) -> messages.Update:
        """Return the header of an update that could be valid but for `changes`."""
        return build_update(self.spec, self.identity.key, self.ticket, **changes)

    def pack_update(self, **changes: object) -> bytes:
        """Return a frame that pushes such a header, properly signed."""
        header = self.identity.sign("update", self.make_update(**changes))
        return pack(messages.UpdatePush(header=header, ticket=self.ticket))

    def make_attacks(self) -> dict[str, list[bytes]]:
        """Return the frames of each attack, by a name that completes "an update"."""
        honest = json.loads(self.sample.header.body)
        altered_body = json.dumps({**honest, "tokens": honest["tokens"] + 1})
        altered = self.sample.header.model_copy(update={"body": altered_body})
        unsigned = self.sample.header.model_copy(update={"signature": "0" * 128})
        # The types come from the models, so that no attack is refused for an unknown type instead.
        push_type = messages.UpdatePush.model_fields["type"].default
        state_type = messages.PeerState.model_fields["type"].default
        nan_state = f'{{"type":"{state_type}","vector":{{}},"rate":NaN}}'.encode()
        header = json.loads(self.identity.sign("update", self.make_update()).model_dump_json())
        header["body"] = json.dumps({"fragments": [{}] * 10_000})
        part = pack(messages.BlobPart(digest="a" * 64, offset=0, total=20), b"x" * 20)
        too_many_tokens = self.spec.max_tokens_per_update + 1
        return {
            "altered": [pack(messages.UpdatePush(header=altered, ticket=self.sample.ticket))],
            "unsigned": [pack(messages.UpdatePush(header=unsigned, ticket=self.sample.ticket))],
            "of another run": [self.pack_update(run=OTHER_RUN)],
            "of too many tokens": [self.pack_update(tokens=too_many_tokens, total=1 << 40)],
            "with other bytes than its header says": [self.pack_update(), part],
            "enormous": [struct.pack(">I", 1 << 30) + b"{}"],
            "not a number": [len(nan_state).to_bytes(4, "big") + nan_state],
            "not a message": [b"\x00\x00\x00\x02no"],
            "of too many fragments": [
                _pack_raw({"type": push_type, "header": header, "ticket": self.ticket.model_dump()})
            ],
            "endless": [part] * 20_000,
        }

    async def run(self) -> dict[str, str]:
        """Run all attacks.

        Returns:
            {attack: the reason with which it was refused}; "" if it was not refused.
        """
        transport = IrohTransport(self.identity.secret, host="127.0.0.1")
        await transport.start()
        answers = {}
        try:
            for name, frames in self.make_attacks().items():
                answers[name] = await self._attack(transport, frames)
            answers["replayed"] = await self._replay(transport)
        finally:
            await transport.close()
        return answers

    async def _connect(self, transport: IrohTransport) -> Channel:
        """Connect and introduce oneself properly."""
        channel = await transport.connect(self.victim)
        await channel.send(pack(build_hello(self.spec, self.ticket)))
        return channel

    async def _attack(self, transport: IrohTransport, frames: list[bytes]) -> str:
        channel = await self._connect(transport)
        sending = asyncio.create_task(_send_frames(channel, frames))
        try:
            async with asyncio.timeout(REPLY_SECONDS):
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
        """Send an honest update many times, which has no effect and leaves the connection open."""
        channel = await self._connect(transport)
        try:
            await _send_frames(channel, [pack(self.sample)] * 200)
            end = time.monotonic() + REPLAY_SECONDS
            while time.monotonic() < end:
                async with asyncio.timeout(REPLY_SECONDS):
                    await channel.receive()
            return "it changes nothing"
        except (ChannelClosedError, TimeoutError) as error:
            return str(error)
        finally:
            channel.close("done")


async def _send_frames(channel: Channel, frames: list[bytes]) -> None:
    try:
        for frame in frames:
            await channel.send(frame)
    except ChannelClosedError:
        return


def _pack_raw(message: dict[str, object]) -> bytes:
    """Return a frame of a message that no model validates."""
    text = json.dumps(message).encode()
    return len(text).to_bytes(4, "big") + text
