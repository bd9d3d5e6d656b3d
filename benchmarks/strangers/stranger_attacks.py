"""The attacks of strangers on a run: what each does over links that its tickets open.

Every attack runs in a process of its own until it is ended (`run_attack`).
"""

import asyncio
import json
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from hostile_peer import INCARNATION, OTHER_RUN, build_hello, build_update
from joined_run import MIRROR, issue_ticket
from stranger import (
    EXPELLED_MIRROR,
    AttackRecord,
    AttackSetup,
    StrangeAuthor,
    Stranger,
    stranger_identity,
)

from barnraise.exchange.gossip.requests import UPDATE_WINDOW
from barnraise.ledger.anchor import compute_sketch
from barnraise.ledger.codec import decode, encode, payload_size
from barnraise.ledger.suspension import MIN_JUDGES
from barnraise.ledger.validation import EMPTY_PART
from barnraise.peering.transports.framing import pack, unpack
from barnraise.peering.transports.transport import Channel, ChannelClosedError
from barnraise.protocol import messages
from barnraise.protocol.enums import Standing
from barnraise.protocol.mirror_list import MirrorLists
from barnraise.protocol.opinions import Opinions, SignedOpinions
from barnraise.protocol.signing import Identity, digest
from barnraise.protocol.trials import TrialUpdate
from barnraise.protocol.types import Message
from barnraise.protocol.verdicts import SignedVerdict, VerdictNames

POISON_UNITS = 5 << 26  # every poisoned weight is 5.0
PHANTOM_SEQ = 1 << 40
HUGE_RATE = 9e14
CLAIM_SECONDS = 0.5  # between two updates of the liar about tokens
COPY_SECONDS = 0.2  # between two looks for honest updates to copy
TRIAL_FACTOR = 0.9  # by which a sleeper multiplies honest updates while others compare its trials
ECLIPSE_KEYS = 12
SYBILS = 13  # more than a machine has links
FLOODED_STATES = 25
AUTHORS_PER_STATE = 2_000
HELLO_ENDPOINTS = 24
HELLOS_PER_ENDPOINT = 8  # open at a time
REQUESTING_KEYS = 6  # of three volunteers
REPLAYS = 200
REPLY_SECONDS = 10.0


class PhantomAuthor(Stranger):
    """Name authors who never published, and serve poisoned weights to everybody who asks.

    One phantom exists by name only. Of another, which is the stranger itself, there is a valid
    header, whose payload nobody has.
    """

    def __init__(self, setup: AttackSetup, record: AttackRecord, number: int = 0) -> None:
        """Prepare the poisoned weights and the phantoms' headers."""
        super().__init__(setup, record, number)
        sizes = [fragment.size for fragment in self.spec.model.fragments()]
        weights = [b"\x00\x00\x00\x14" * size for size in sizes]
        assert int.from_bytes(weights[0][:4], "little") == POISON_UNITS
        self._fragments = [self._store(weight) for weight in weights]
        now = int(1000 * time.time())
        own = build_update(
            self.spec,
            self.identity.key,
            self.ticket,
            seq=5000,
            previous="1" * 64,
            tokens=10,
            total=50_000,
            started_ms=now - 3_600_000,  # An author's time bounds its numbers.
            time_ms=now + 1000,
        )
        header = self.identity.sign("update", own)
        self._own = messages.UpdatePush(header=header, ticket=self.ticket)
        self._author_name = own.author
        nobody = stranger_identity(setup.volunteer, "nobody", number)
        self._phantoms = {f"{nobody.key}.{INCARNATION}": PHANTOM_SEQ, own.author: own.seq}

    def name_phantom_of(self, other: "PhantomAuthor") -> None:
        """Name the one phantom of another stranger whose header exists."""
        self._own, self._author_name = other._own, other._author_name
        self._phantoms = {self._author_name: other._phantoms[self._author_name]}

    def _store(self, blob: bytes) -> str:
        name = digest(blob)
        self.blobs[name] = blob
        return name

    def _known_vector(self) -> dict[str, int]:
        """Return what the victims have altogether."""
        vector: dict[str, int] = {}
        for known in self.vectors.values():
            vector |= {a: max(n, vector.get(a, 0)) for a, n in known.items()}
        return vector

    def build_state(self, victim: str) -> messages.PeerState | None:
        """Claim everything that the victims have, and the phantoms; nothing is there to be sent."""
        vector = self._known_vector() | self._phantoms
        return messages.PeerState(vector=vector, pruned=self._known_vector(), rate=100.0)

    async def on_message(self, channel: Channel, message: Message) -> None:
        """Answer requests for snapshots with poison, and for headers with those that exist."""
        await super().on_message(channel, message)
        match message:
            case messages.PeerState():
                await self._collect_headers(channel, message)
            case messages.SnapshotRequest():
                vector = message.vector or self._known_vector() | self._phantoms
                await channel.send(pack(self._build_manifest(vector)))
                self.record.counts["poisoned snapshots offered"] += 1
            case messages.UpdateRequest() if message.author == self._author_name:
                await channel.send(pack(self._own))
                self.record.counts["headers of phantoms"] += 1
            case _:
                return

    async def _collect_headers(self, channel: Channel, state: messages.PeerState) -> None:
        """Request the headers of what a victim has, which the heads of a snapshot must be."""
        for author, seq in list(state.vector.items())[:20]:
            if (author, seq) not in self.headers and seq < PHANTOM_SEQ:
                request = messages.UpdateRequest(author=author, first=seq, last=seq, headers=True)
                await channel.send(pack(request))

    def _build_manifest(self, vector: dict[str, int]) -> messages.SnapshotManifest:
        """Return a snapshot of poisoned weights at a version vector."""
        own = {(self._author_name, self._phantoms[self._author_name]): self._own}
        pushes = [
            push for at in vector.items() if (push := (self.headers | own).get(at)) is not None
        ]
        heads = self._store(_to_json_list(push.header for push in pushes))
        tickets = self._store(_to_json_list(push.ticket for push in pushes))
        fields = {
            "vector": vector,
            "fragments": self._fragments,
            "heads": heads,
            "tickets": tickets,
        }
        return messages.SnapshotManifest.model_validate(fields)


class SybilAccount(PhantomAuthor):
    """One of many accounts that all name the same phantom, and serve the same weights."""

    def __init__(
        self, setup: AttackSetup, record: AttackRecord, number: int, first: PhantomAuthor
    ) -> None:
        """Create an account of its own that names the phantom of the first one."""
        own = replace(setup, volunteer=f"{setup.volunteer} {number}")
        super().__init__(own, record, number)
        self.name_phantom_of(first)

    def build_state(self, victim: str) -> messages.PeerState | None:
        """Claim everything as pruned, so that only a snapshot seems to help."""
        vector = self._known_vector() | self._phantoms
        return messages.PeerState(vector=vector, pruned=vector, rate=100.0)


def create_sybils(setup: AttackSetup, record: AttackRecord) -> list["Runnable"]:
    """Create accounts of as many volunteers. None of them publishes an update."""
    first = PhantomAuthor(setup, record)
    return [SybilAccount(setup, record, number, first) for number in range(SYBILS)]


class Liar(Stranger):
    """Announce an enormous speed, publish nothing."""

    def build_state(self, victim: str) -> messages.PeerState | None:
        """Claim to have what the victim has, and a rate that takes everybody's weight."""
        return messages.PeerState(vector=self.vectors.get(victim, {}), rate=HUGE_RATE)


class TokenLiar(Stranger):
    """Publish updates that change nothing and state the most tokens that the ticket allows."""

    def __init__(self, setup: AttackSetup, record: AttackRecord, number: int = 0) -> None:
        """Begin a chain of updates."""
        super().__init__(setup, record, number)
        self.author = StrangeAuthor(self.spec, self.identity, self.ticket)
        self.parts, self.payloads = self.make_payload(0)

    def make_payload(self, units: int) -> tuple[list[messages.FragmentUpdate], dict[str, bytes]]:
        """Return the parts of an update that adds `units` to weights of the first fragment.

        Up to one unit, a single weight changes; otherwise all do.
        """
        fragments = self.spec.model.fragments()
        values = torch.zeros(fragments[0].size, dtype=torch.int32)
        values[: 1 if units < 2 else None] = units
        payload, sent = encode(values, "top64x2" if units < 2 else "dense8")
        part = messages.FragmentUpdate(
            digest=digest(payload), size=len(payload), sketch=compute_sketch(sent)
        )
        parts = [part, *[EMPTY_PART] * (len(fragments) - 1)]
        return parts, {part.digest: payload}

    def build_state(self, victim: str) -> messages.PeerState | None:
        """Announce the updates, and the rate that they state."""
        vector = self.vectors.get(victim, {}) | {self.author.name: self.author.seq}
        vector = {author: seq for author, seq in vector.items() if seq}
        rate = float(self.setup.max_tokens_per_second)
        return messages.PeerState(vector=vector, rate=rate)

    async def on_message(self, channel: Channel, message: Message) -> None:
        """Send the updates that a victim requests."""
        await super().on_message(channel, message)
        if isinstance(message, messages.UpdateRequest) and message.author == self.author.name:
            for frames in self.author.updates[message.first - 1 : message.last]:
                for frame in frames[:1] if message.headers else frames:
                    await channel.send(frame)

    async def attack(self) -> None:
        """State the tokens of all the time that has passed, again and again."""
        while True:
            await asyncio.sleep(CLAIM_SECONDS)
            elapsed_ms = int(1000 * time.time()) - self.author.last_ms
            tokens = self.setup.max_tokens_per_second * max(0, elapsed_ms - 1) // 1000
            await self.publish(tokens)

    async def publish(self, tokens: int) -> None:
        """Publish one update."""
        frames = self.author.append(tokens, self.parts, self.payloads)
        await self.send_to_all(frames, "updates")
        self.record.counts["published"] = self.author.seq


class GreedyLiar(TokenLiar):
    """State a thousand times the tokens that the ticket allows."""

    async def attack(self) -> None:
        """Publish one such update a second; each begins another chain, as it is never valid."""
        while True:
            await asyncio.sleep(1.0)
            self.author = StrangeAuthor(self.spec, self.identity, self.ticket)
            await self.publish(
                min(1000 * self.setup.max_tokens_per_second, self.spec.max_tokens_per_update)
            )


class EmptyUpdates(TokenLiar):
    """Publish updates that change one weight by one unit and state nothing, as many as it can.

    One that changes nothing at all would be refused.
    """

    def __init__(self, setup: AttackSetup, record: AttackRecord, number: int = 0) -> None:
        """Prepare the smallest update that counts."""
        super().__init__(setup, record, number)
        self.parts, self.payloads = self.make_payload(1)

    async def attack(self) -> None:
        """Publish without a pause."""
        while True:
            if not self.channels:
                await asyncio.sleep(0.1)
                continue
            await self.publish(0)
            await asyncio.sleep(0)


class Poisoner(TokenLiar):
    """Publish loud noise in valid updates, which only a verdict can undo."""

    def __init__(self, setup: AttackSetup, record: AttackRecord, number: int = 0) -> None:
        """Prepare the noise."""
        super().__init__(setup, record, number)
        self.parts, self.payloads = self.make_payload(1 << 22)


class HarmfulCopies(TokenLiar):
    """Publish a multiple of each honest update that arrives, with its tokens.

    `setup.extra` has the factor.
    """

    def __init__(self, setup: AttackSetup, record: AttackRecord, number: int = 0) -> None:
        """Begin without any honest update."""
        super().__init__(setup, record, number)
        self._factor = float(setup.extra[0])
        self._pieces: dict[str, bytearray] = {}  # by digest of the payload
        self._copied: set[tuple[str, int]] = set()

    def on_part(self, part: messages.BlobPart, data: bytes) -> None:
        """Assemble the payloads of honest updates."""
        pieces = self._pieces.setdefault(part.digest, bytearray())
        if part.offset == len(pieces):
            pieces += data

    async def on_message(self, channel: Channel, message: Message) -> None:
        """Request the newest updates that a victim has."""
        await super().on_message(channel, message)
        if isinstance(message, messages.PeerState):
            for author, seq in message.vector.items():
                is_own = author == self.author.name
                if not is_own and (author, seq) not in self.headers:
                    request = messages.UpdateRequest(author=author, first=seq, last=seq)
                    await channel.send(pack(request))

    async def attack(self) -> None:
        """Copy what has arrived, several times a second."""
        while True:
            await asyncio.sleep(COPY_SECONDS)
            for author, seq in [*self.headers.keys() - self._copied]:
                header = self.headers[author, seq].header
                update = messages.Update.model_validate_json(header.body)
                if update.peer == self.identity.key or not await self._has_payloads(update):
                    continue
                self._copied.add((author, seq))
                elapsed_ms = int(1000 * time.time()) - self.author.last_ms
                most = self.setup.max_tokens_per_second * max(0, elapsed_ms - 1) // 1000
                self.parts, self.payloads = self._multiply(update)
                await self.publish(min(update.tokens, most))

    async def _has_payloads(self, update: messages.Update) -> bool:
        """Return whether an update's payloads are here; request those that are not."""
        missing = [
            part
            for part in update.payload_parts
            if len(self._pieces.get(part.digest, b"")) < part.size
        ]
        for channel in [*self.channels.values()][:1]:
            for part in missing:
                offset = len(self._pieces.get(part.digest, b""))
                await channel.send(pack(messages.BlobRequest(digest=part.digest, offset=offset)))
        return not missing

    def _multiply(
        self, update: messages.Update
    ) -> tuple[list[messages.FragmentUpdate], dict[str, bytes]]:
        """Return the parts of an update that changes the weights by a multiple of this one."""
        parts: list[messages.FragmentUpdate] = []
        payloads: dict[str, bytes] = {}
        for fragment, part in zip(self.spec.model.fragments(), update.fragments, strict=True):
            if not part.size:
                parts.append(EMPTY_PART)
                continue
            units = decode(bytes(self._pieces.pop(part.digest)), fragment.size)
            payload, sent = encode((units * self._factor).to(torch.int32), "dense8")
            name = digest(payload)
            payloads[name] = payload
            sketch = compute_sketch(sent)
            parts.append(messages.FragmentUpdate(digest=name, size=len(payload), sketch=sketch))
        return parts, payloads


class HarmfulNewcomer(HarmfulCopies):
    """Publish the same, although nobody has found that a newcomer's updates agree."""

    standing = Standing.NEWCOMER


class SleepingCopies(HarmfulNewcomer):
    """Let others compare nearly what honest machines publish; harm once one's updates count."""

    def __init__(self, setup: AttackSetup, record: AttackRecord, number: int = 0) -> None:
        """Begin as a newcomer that nobody knows."""
        super().__init__(setup, record, number)
        self._harm, self._factor = self._factor, TRIAL_FACTOR
        self._volunteer = messages.Ticket.model_validate_json(self.ticket.body).volunteer
        self._attested_by: set[str] = set()

    async def publish(self, tokens: int) -> None:
        """Offer a trial until it is attested."""
        if len(self._attested_by) >= MIN_JUDGES:
            self._factor = self._harm
            await super().publish(tokens)
            return
        self.blobs |= self.payloads
        trial = TrialUpdate(tokens=tokens, fragments=self.parts)
        await self.send_to_all([pack(trial)], "trials")

    async def on_message(self, channel: Channel, message: Message) -> None:
        """Ask for all opinions, and read who attests this newcomer."""
        await super().on_message(channel, message)
        if isinstance(message, VerdictNames) and not message.is_answer:
            names = VerdictNames(prefix=message.prefix, names=[], is_answer=True)
            await channel.send(pack(names))
        if isinstance(message, SignedOpinions):
            opinions = Opinions.model_validate_json(message.opinions.body)
            if self._volunteer in opinions.attested:
                self._attested_by.add(opinions.peer)


class StateFlood(Stranger):
    """Name 50,000 authors who do not exist, again and again, others each time."""

    def build_state(self, victim: str) -> messages.PeerState | None:
        """Send no other state."""
        return None

    async def attack(self) -> None:
        """Flood."""
        while True:
            await asyncio.sleep(0.1)
            for _ in range(FLOODED_STATES):
                vector = {
                    f"{secrets.token_hex(32)}.{INCARNATION}": 64 for _ in range(AUTHORS_PER_STATE)
                }
                state = pack(messages.PeerState(vector=vector, full=False, rate=1.0))
                await self.send_to_all([state], "states of phantoms")


class PartFlood(Stranger):
    """Send headers of large updates, and the first half of each payload."""

    async def attack(self) -> None:
        """Flood. The headers are valid, so that the parts are expected."""
        author = StrangeAuthor(self.spec, self.identity, self.ticket)
        sizes = [payload_size(fragment.size) for fragment in self.spec.model.fragments()]
        while True:
            if not self.channels:
                await asyncio.sleep(0.1)
                continue
            parts = [
                messages.FragmentUpdate(digest=secrets.token_hex(32), size=size, sketch="0" * 16)
                for size in sizes
            ]
            halves = {part.digest: secrets.token_bytes(part.size // 2) for part in parts}
            frames = author.append(0, parts, halves)
            author.updates.clear()
            await self.send_to_all(frames, "half-sent updates")
            self.record.counts["half-sent bytes"] += sum(map(len, halves.values()))


class Requester(Stranger):
    """Request the updates of a victim and their payloads again and again."""

    async def on_message(self, channel: Channel, message: Message) -> None:
        """Request an author's last updates with each state, and the payloads with each header."""
        await super().on_message(channel, message)
        requests: list[Message] = []
        match message:
            case messages.PeerState():
                requests += [
                    messages.UpdateRequest(
                        author=author, first=max(1, seq - UPDATE_WINDOW + 1), last=seq
                    )
                    for author, seq in self.vectors[channel.peer].items()
                ]
            case messages.UpdatePush():
                update = messages.Update.model_validate_json(message.header.body)
                requests += [messages.BlobRequest(digest=p.digest) for p in update.payload_parts]
            case _:
                return
        for request in requests:
            await channel.send(pack(request))
        self.record.counts["requests"] += len(requests)


class HelloFlood:
    """Open connections that send two bytes of a hello, from many keys and addresses."""

    def __init__(self, setup: AttackSetup, record: AttackRecord) -> None:
        """Prepare the endpoints."""
        self._endpoints = [Stranger(setup, record, number) for number in range(HELLO_ENDPOINTS)]
        self._record = record

    async def run(self) -> None:
        """Flood until cancelled."""
        for endpoint in self._endpoints:
            await endpoint.transport.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                for number, endpoint in enumerate(self._endpoints):
                    for _ in range(HELLOS_PER_ENDPOINT):
                        tasks.create_task(self._open_connections(endpoint, number))
        finally:
            for endpoint in self._endpoints:
                await endpoint.transport.close()

    async def _open_connections(self, endpoint: Stranger, number: int) -> None:
        while True:
            victim = endpoint.victims[number % len(endpoint.victims)]
            number += 1
            try:
                channel = await endpoint.transport.connect(victim)
                await channel.send(b"\x00\x00")
                self._record.counts["connections"] += 1
                await channel.receive()
            except ChannelClosedError as error:
                self._record.refusals[str(error)[:60].rstrip("0123456789abcdef")] += 1
                await asyncio.sleep(0.05)


class Replays:
    """Connect with tickets that are another key's, of another run or expired; replay updates."""

    def __init__(self, setup: AttackSetup, record: AttackRecord) -> None:
        """Prepare the tickets. `setup.extra` has an honest update to replay."""
        self._setup = setup
        self._record = record
        self._peer = Stranger(setup, record)
        self._sample = messages.UpdatePush.model_validate_json(setup.extra[0])

    async def run(self) -> None:
        """Try everything once at every victim; then wait to be ended."""
        key = self._peer.identity.key
        old = json.loads(issue_ticket(key, self._setup.volunteer).body)
        expired = messages.Ticket.model_validate(
            old | {"issued": time.time() - 9 * 86400, "expires": time.time() - 8 * 86400}
        )
        forger = stranger_identity(self._setup.volunteer, "forger")
        tickets = {
            "another key's": self._sample.ticket,
            "another run's": issue_ticket(key, self._setup.volunteer, OTHER_RUN),
            "expired": MIRROR.sign("ticket", expired),
            "forged": _sign_fresh(forger, expired),
            "an expelled mirror's": _sign_fresh(EXPELLED_MIRROR, expired),
        }
        await self._peer.transport.start()
        try:
            for victim in self._peer.victims:
                for name, ticket in tickets.items():
                    if not await self._is_admitted(victim, ticket):
                        self._record.refusals[name] += 1
                    self._record.counts["tickets tried"] += 1
                await self._replay(victim)
            self._record.counts["done"] = 1
            await asyncio.Event().wait()
        finally:
            await self._peer.transport.close()

    async def _is_admitted(self, victim: messages.Peer, ticket: messages.Signed) -> bool:
        """Return whether a victim greets the bearer of a ticket and goes on talking."""
        try:
            async with asyncio.timeout(REPLY_SECONDS):
                channel = await self._peer.transport.connect(victim)
                await channel.send(pack(build_hello(self._peer.spec, ticket)))
                while True:
                    message, _ = unpack(await channel.receive())
                    if isinstance(message, messages.PeerState):
                        return True
        except ChannelClosedError:
            return False
        except TimeoutError:
            return True

    async def _replay(self, victim: messages.Peer) -> None:
        """Send an honest update many times over a proper link."""
        try:
            channel = await self._peer.connect(victim)
            async with asyncio.timeout(REPLY_SECONDS):
                for _ in range(REPLAYS):
                    await channel.send(pack(self._sample))
                    self._record.counts["replayed updates"] += 1
            channel.close("done")
        except (ChannelClosedError, TimeoutError):
            self._record.refusals["replay"] += 1


def _sign_fresh(mirror: Identity, ticket: messages.Ticket) -> messages.Signed:
    """Return a ticket that is valid from now on, signed by a mirror of the bearer's choice."""
    fields = {"issued": time.time(), "expires": time.time() + 86400, "mirror": mirror.key}
    return mirror.sign("ticket", ticket.model_copy(update=fields))


class RogueMirror(Stranger):
    """Send verdicts of mirrors that may not decide, and the mirror lists, to all victims.

    `setup.extra` has the messages.
    """

    async def attack(self) -> None:
        """Send everything every two seconds."""
        frames = []
        for text in self.setup.extra:
            kind = MirrorLists if '"mirror_lists"' in text[:40] else SignedVerdict
            frames.append(pack(kind.model_validate_json(text)))
        while True:
            await asyncio.sleep(2.0)
            for frame in frames:
                await self.send_to_all([frame], "rulings")


Runnable = Stranger | HelloFlood | Replays
ATTACKS: dict[str, Callable[[AttackSetup, AttackRecord], list[Runnable]]] = {
    "phantom author": lambda s, r: [PhantomAuthor(s, r, number) for number in range(2)],
    "sybil snapshot": create_sybils,
    "inflated rate and tokens": lambda s, r: [
        Liar(replace(s, attack="inflated rate"), r),
        TokenLiar(s, r),
    ],
    "useless updates": lambda s, r: [TokenLiar(s, r)],
    "tokens beyond the ticket": lambda s, r: [GreedyLiar(s, r)],
    "eclipse": lambda s, r: [Liar(s, r, number) for number in range(ECLIPSE_KEYS)],
    "state flood": lambda s, r: [StateFlood(s, r)],
    "part flood": lambda s, r: [PartFlood(s, r)],
    "empty updates": lambda s, r: [EmptyUpdates(s, r)],
    "hello flood": lambda s, r: [HelloFlood(s, r)],
    "requests": lambda s, r: [
        Requester(replace(s, volunteer=f"{s.volunteer} {number % 3}"), r, number)
        for number in range(REQUESTING_KEYS)
    ],
    "replayed and foreign tickets": lambda s, r: [Replays(s, r)],
    "rogue and expelled mirror": lambda s, r: [RogueMirror(s, r)],
    "poison": lambda s, r: [Poisoner(s, r)],
    "idle accounts": lambda s, r: [TokenLiar(s, r)],
    "harmful copies": lambda s, r: [HarmfulCopies(s, r)],
    "harmful newcomers": lambda s, r: [HarmfulNewcomer(s, r)],
    "sleeping copies": lambda s, r: [SleepingCopies(s, r)],
}


# Attacks that use little processor time. They run at normal priority, as on another computer.
LIGHT_ATTACKS = {
    "useless updates",
    "idle accounts",
    "harmful copies",
    "harmful newcomers",
    "sleeping copies",
}


def attack_keys(volunteer: str, attack: str) -> list[str]:
    """Return the keys with which an attack may publish updates."""
    names = [attack, "inflated rate"]
    return [
        stranger_identity(volunteer, name, number).key
        for name in names
        for number in range(ECLIPSE_KEYS)
    ]


def yield_processor() -> None:
    """Let this process run only while no victim wants the processor.

    Real strangers bring their own computers, so what they spend must not slow their victims.
    """
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)


def run_attack(setup: AttackSetup) -> None:
    """Run an attack in this process until SIGTERM."""
    if setup.attack not in LIGHT_ATTACKS:
        yield_processor()
    torch.set_num_threads(1)
    logging.basicConfig(
        filename=setup.record.with_suffix(".log"), level=logging.WARNING, force=True
    )
    record = AttackRecord(setup.record)
    try:
        asyncio.run(_run_attack(setup, record))
    except asyncio.CancelledError:
        return
    except Exception:
        logging.exception("the attack %s failed", setup.attack)
        raise
    finally:
        record.write()


async def _run_attack(setup: AttackSetup, record: AttackRecord) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    strangers = ATTACKS[setup.attack](setup, record)
    await asyncio.gather(record.write_often(), *(stranger.run() for stranger in strangers))


def _to_json_list(documents: Iterable[messages.Signed]) -> bytes:
    texts = dict.fromkeys(document.model_dump_json() for document in documents)
    return f"[{','.join(texts)}]".encode()
