"""A stranger: a key with a valid ticket, as any account gets one, that is linked to its victims.

It is met, greeted and served as an honest peer is, over iroh, and counts what it does and how it is
answered. `stranger_attacks.py` says what the strangers of each attack do.
"""

import asyncio
import json
import math
import time
from collections import Counter
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from hostile_peer import INCARNATION, build_hello, build_update
from joined_run import issue_ticket

from barnraise.errors import MessageError
from barnraise.ledger.ledger import GENESIS_DIGEST
from barnraise.peering.transports.framing import pack, unpack
from barnraise.peering.transports.iroh_transport import IrohTransport
from barnraise.peering.transports.transport import Channel, ChannelClosedError
from barnraise.protocol import messages
from barnraise.protocol.enums import Standing
from barnraise.protocol.signing import Identity, digest
from barnraise.protocol.types import Message
from barnraise.spec import RunSpec

STATE_SECONDS = 1.0  # between two states
REDIAL_SECONDS = 1.0  # until a victim that closed the connection is dialled again
PIECE_BYTES = 1 << 16  # of a blob in one frame
ROGUE_MIRROR = Identity(b"r" * 32)  # of the run's three mirrors, one lies
EXPELLED_MIRROR = Identity(b"x" * 32)  # and another was expelled


@dataclass(frozen=True)
class AttackSetup:
    """What the process of an attack is started with.

    Attributes:
        attack: The attack's name.
        volunteer: Whose keys attack.
        spec: The run's spec.
        victims: The keys and ports of the machines to attack.
        max_tokens_per_second: Of the strangers' tickets.
        record: Where the process writes what it counts.
        extra: Messages of the attack, as JSON.
    """

    attack: str
    volunteer: str
    spec: str
    victims: tuple[tuple[str, int], ...]
    max_tokens_per_second: int
    record: Path
    extra: tuple[str, ...] = ()


class AttackRecord:
    """What an attack did and how it was answered; written to a file every second."""

    def __init__(self, path: Path) -> None:
        """Start with nothing."""
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self._path = path

    async def write_often(self) -> None:
        """Write the file every second, until cancelled."""
        while True:
            self.write()
            await asyncio.sleep(1.0)

    def write(self) -> None:
        """Write the file, without waiting for the disk, which the victims share."""
        content = {"counts": self.counts, "refusals": self.refusals}
        partial = self._path.with_suffix(".part")
        partial.write_text(json.dumps(content))
        partial.replace(self._path)


def stranger_identity(volunteer: str, attack: str, number: int = 0) -> Identity:
    """Return one of the keys with which a volunteer runs an attack."""
    return Identity(sha256(f"{volunteer} {attack} {number}".encode()).digest())


class Stranger:
    """One key of an attack, which stays linked to all victims as far as they let it.

    Attributes:
        vectors: Victim → what its last full state and the changes since say that it has.
        headers: (author, sequence number) → the header and ticket that a victim sent.
        blobs: Digest → bytes, which the stranger serves.
    """

    # Of its ticket. A stranger's is of a time when nobody could vouch for newcomers.
    standing = Standing.STRANGER

    def __init__(self, setup: AttackSetup, record: AttackRecord, number: int = 0) -> None:
        """Create the key and its ticket.

        Args:
            setup: Of the attack.
            record: Where to count.
            number: Tells apart the keys of the attack; each has an address of its own.
        """
        self.setup = setup
        self.record = record
        self.spec = RunSpec.from_json(setup.spec)
        self.identity = stranger_identity(setup.volunteer, setup.attack, number)
        self.ticket = issue_ticket(
            self.identity.key,
            setup.volunteer,
            max_tokens_per_second=setup.max_tokens_per_second,
            standing=self.standing,
        )
        self.victims = [
            messages.Peer(key=key, addresses=[f"127.0.0.1:{port}"]) for key, port in setup.victims
        ]
        first_byte = self.identity.secret[0] % 200 + 1
        self.transport = IrohTransport(
            self.identity.secret, host=f"127.{first_byte}.{number % 250}.2"
        )
        self.channels: dict[str, Channel] = {}  # by victim
        self.vectors: dict[str, dict[str, int]] = {}
        self.headers: dict[tuple[str, int], messages.UpdatePush] = {}
        self.blobs: dict[str, bytes] = {}

    async def run(self) -> None:
        """Attack until cancelled."""
        await self.transport.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                for victim in self.victims:
                    tasks.create_task(self._stay_linked(victim))
                tasks.create_task(self._send_states())
                tasks.create_task(self.attack())
        finally:
            await self.transport.close()

    # ---- what the attacks override

    async def attack(self) -> None:
        """Do what the attack does at its own pace, in addition to its answers."""

    def build_state(self, victim: str) -> messages.PeerState | None:
        """Return the state to send to a victim: by default that of a peer with no update."""
        return messages.PeerState(vector={}, rate=0.0)

    async def on_message(self, channel: Channel, message: Message) -> None:
        """Answer a message of a victim, after it was recorded."""
        match message:
            case messages.BlobRequest():
                await self._serve_blob(channel, message)
            case _:
                return

    def on_part(self, part: messages.BlobPart, data: bytes) -> None:
        """Receive a piece of a payload that a victim sends."""

    # ---- the links

    async def connect(self, victim: messages.Peer) -> Channel:
        """Dial a victim and introduce oneself properly."""
        channel = await self.transport.connect(victim)
        await channel.send(pack(build_hello(self.spec, self.ticket)))
        return channel

    async def send_to_all(self, frames: list[bytes], name: str) -> None:
        """Send frames to every linked victim, and count them."""
        for channel in list(self.channels.values()):
            try:
                for frame in frames:
                    await channel.send(frame)
                self.record.counts[name] += 1
            except ChannelClosedError:
                continue

    async def _stay_linked(self, victim: messages.Peer) -> None:
        """Be linked to a victim; dial again after each end of the link."""
        while True:
            try:
                channel = await self.connect(victim)
            except ChannelClosedError:
                self.record.counts["dials without an answer"] += 1
                await asyncio.sleep(REDIAL_SECONDS)
                continue
            self.record.counts["links"] += 1
            try:
                while True:
                    message, payload = unpack(await channel.receive())
                    if isinstance(message, messages.PeerState):
                        self.channels[victim.key] = channel
                    self._record_message(victim.key, message)
                    if isinstance(message, messages.BlobPart):
                        self.on_part(message, bytes(payload))
                    await self.on_message(channel, message)
            except (ChannelClosedError, MessageError) as error:
                self.record.refusals[_without_keys(str(error))] += 1
            finally:
                self.channels.pop(victim.key, None)
                channel.close("done")
            await asyncio.sleep(REDIAL_SECONDS)

    def _record_message(self, victim: str, message: Message) -> None:
        match message:
            case messages.PeerState():
                known = {} if message.full else self.vectors.get(victim, {})
                self.vectors[victim] = known | message.vector
            case messages.UpdatePush():
                update = messages.Update.model_validate_json(message.header.body)
                self.headers[update.author, update.seq] = message
            case messages.Goodbye():
                self.record.refusals[_without_keys(message.reason)] += 1
            case _:
                return

    async def _send_states(self) -> None:
        while True:
            for victim, channel in list(self.channels.items()):
                state = self.build_state(victim)
                if state is None:
                    continue
                try:
                    await channel.send(pack(state))
                    self.record.counts["states"] += 1
                except ChannelClosedError:
                    continue
            await asyncio.sleep(STATE_SECONDS)

    async def _serve_blob(self, channel: Channel, request: messages.BlobRequest) -> None:
        blob = self.blobs.get(request.digest)
        if blob is None:
            await channel.send(pack(messages.BlobMissing(digest=request.digest)))
            return
        self.record.counts["blobs served"] += 1
        for offset in range(request.offset, len(blob), PIECE_BYTES):
            part = messages.BlobPart(digest=request.digest, offset=offset, total=len(blob))
            await channel.send(pack(part, blob[offset : offset + PIECE_BYTES]))


class StrangeAuthor:
    """The chain of updates of one stranger: valid as far as signatures and numbers go."""

    def __init__(self, spec: RunSpec, identity: Identity, ticket: messages.Signed) -> None:
        """Begin an hour before the ticket was issued: the time bounds how much is published."""
        self._spec = spec
        self._identity = identity
        self._ticket = ticket
        self._previous = GENESIS_DIGEST
        issued = messages.Ticket.model_validate_json(ticket.body).issued
        self.last_ms = math.ceil(1000 * issued)  # time before does not count
        self._started_ms = self.last_ms - 3_600_000
        self.seq = 0
        self.total = 0
        self.updates: list[list[bytes]] = []  # the frames of each update

    @property
    def name(self) -> str:
        """Return the author's name."""
        return f"{self._identity.key}.{INCARNATION}"

    def append(
        self, tokens: int, parts: list[messages.FragmentUpdate], payloads: dict[str, bytes]
    ) -> list[bytes]:
        """Sign the next update and return its frames.

        Args:
            tokens: What it states.
            parts: One for each fragment of the model.
            payloads: Digest → as much of the payload as is sent.
        """
        self.seq += 1
        self.total += tokens
        self.last_ms = max(self.last_ms + 1, int(1000 * time.time()))
        update = build_update(
            self._spec,
            self._identity.key,
            self._ticket,
            seq=self.seq,
            previous=self._previous,
            tokens=tokens,
            total=self.total,
            started_ms=self._started_ms,
            time_ms=self.last_ms,
            fragments=parts,
        )
        signed = self._identity.sign("update", update)
        self._previous = digest(signed.body)
        frames = [pack(messages.UpdatePush(header=signed, ticket=self._ticket))]
        sizes = {part.digest: part.size for part in parts}
        for name, payload in payloads.items():
            part = messages.BlobPart(digest=name, offset=0, total=sizes[name])
            frames.append(pack(part, payload))
        self.updates.append(frames)
        return frames


def _without_keys(reason: str) -> str:
    """Return a refusal's reason without digits, so that equal ones are counted together."""
    return "".join(letter for letter in reason if not letter.isdigit())[:120]
