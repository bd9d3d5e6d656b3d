"""Workers as the site hears them: each posts one signed report an interval, over a connection of its own, and keeps
what was not confirmed for the next one."""

import asyncio
import math
import random
import time
from dataclasses import dataclass, field

from seed_site import Hand

from barnraise.protocol import coordinator_messages, enums, messages, reports
from barnraise.protocol.signing import digest
from coordinator.runs.models import Run

PATIENCE = 15.0  # seconds, as the worker's own
WITNESSES_EVERY = 60.0  # seconds, as the worker's own
FRAGMENT = messages.FragmentUpdate(digest=digest("payload"), size=1_800_000, sketch="0" * 16)
FRAGMENTS = 14  # of an update: those of a model of 124 M parameters
LATE = 60.0  # seconds in which what was refused is tried again, at the end
PLAN = reports.PlanView(
    device="NVIDIA GeForce RTX 3060", device_bytes=9 * 10**9, host_bytes=3 * 10**9, disk_bytes=0, groups=12,
    micro_batches=4, micro_tokens=1024, layers=12, resident=3, clipping="exact", crash_safety="exact",
    binding="compute", predicted_seconds=5.4, disk_written_per_day=0,
    sentence="12 layers on the device; its arithmetic is what limits.",
)  # fmt: skip
EXCHANGE = reports.ExchangeView(
    round_steps=20, scheme="top64x2", density=0.015625, bits_per_parameter=0.234375, sent_rate=105000.5, received_rate=210000.0,
    uplink_rate=1250000.0, lag=1,
)  # fmt: skip


@dataclass
class Posts:
    """What became of them. `sent`: (machine, seq) → the monotonic second at which its post began."""

    milliseconds: list[tuple[float, float]] = field(default_factory=list)  # (when, how long)
    sent: dict[tuple[str, int], float] = field(default_factory=dict)
    confirmed: int = 0  # reports
    ends: float = math.inf  # the monotonic second after which no new report starts
    failed: dict[str, int] = field(default_factory=dict)  # posts, by what came instead


class Worker:
    """`crew`: all of them, this one too."""

    def __init__(self, hand: Hand, crew: "list[Worker]", run: Run, mirror: str, port: int):
        self.hand, self.crew, self.run, self.mirror, self.port = hand, crew, run, mirror, port
        self.posts, self.seq = Posts(), 0
        self.kept: list[reports.Report] = []
        self.witnesses_at = time.monotonic() + random.random() * WITNESSES_EVERY
        self.head: messages.Signed | None = None  # of its last update

    async def work(self, every: float, posts: Posts) -> None:
        """One post an interval until `posts.ends`, from a random moment of the first on."""
        self.posts = posts
        due = time.monotonic() + random.random() * every
        while due < posts.ends:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self.kept.append(self.report())
            await self.post()
            due += every
        while self.kept and time.monotonic() < posts.ends + LATE:
            await asyncio.sleep(1.0)
            await self.post()

    def report(self) -> reports.Report:
        self.seq += 1
        told, self.head = 1000 * self.seq, None
        return reports.Report(
            seq=self.seq, at=time.time(), version="0.1", activity=enums.Activity.TRAINING, incarnation="a" * 16,
            addresses=["192.0.2.7:41000"], step=self.seq, tokens=told, ledger_tokens=told * 2000, rate=500.0 + self.seq,
            points=[reports.MeasuredLoss(kind="train", tokens=told * 2000, loss=5.0)], updates_sent=self.seq,
            updates_received=self.seq * 1999, peers=8, peer_bytes_sent=told, peer_bytes_received=told,
            vector=digest(f"{self.hand.machine} {self.seq}"), anchor=digest("a"), plan=PLAN, step_seconds=5.1,
            exchange=EXCHANGE,
        )  # fmt: skip

    def testimonies(self) -> list[coordinator_messages.Attestation]:
        """Of two others, now and then as workers do."""
        if time.monotonic() < self.witnesses_at:
            return []
        self.witnesses_at = time.monotonic() + WITNESSES_EVERY
        others = random.sample(self.crew, min(2, len(self.crew)))
        return [
            self.testimony(each.published()) for each in others if each.seq and each is not self
        ]

    def published(self) -> messages.Signed:
        """Its last update's header, signed once."""
        if self.head is None:
            said = messages.Update(
                run=str(self.run.pk), peer=self.hand.identity.key, incarnation="a" * 16, seq=self.seq,
                previous="0" * 64, tokens=1000, total=1000 * self.seq, fragments=[FRAGMENT] * FRAGMENTS,
            )  # fmt: skip
            self.head = self.hand.identity.sign("update", said)
        return self.head

    def testimony(self, head: messages.Signed) -> coordinator_messages.Attestation:
        author = f"{head.key}.{'a' * 16}"
        said = coordinator_messages.AttestationStatement(
            run=str(self.run.pk), author=author, head=digest(head.body)
        )
        word = self.hand.identity.sign("witness", said)
        return coordinator_messages.Attestation(
            head=coordinator_messages.SignedHeader(**head.model_dump()),
            statement=coordinator_messages.SignedStatement(**word.model_dump()),
        )

    async def post(self) -> None:
        path = f"/api/v1/runs/{self.run.slug}/reports"
        body = (
            coordinator_messages.Reports(reports=self.kept[:20], attestations=self.testimonies())
            .model_dump_json()
            .encode()
        )
        token = self.hand.identity.sign_request(self.mirror, "POST", path, body, time.time())
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nAuthorization: Barnraise {token}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        began = time.monotonic()
        for report in self.kept:
            self.posts.sent.setdefault((self.hand.machine, report.seq), began)
        status = await self._answer(head.encode() + body)
        self.posts.milliseconds.append((began, 1000 * (time.monotonic() - began)))
        if status == "200":
            self.posts.confirmed += len(self.kept[:20])
            del self.kept[:20]
        else:
            self.posts.failed[status] = self.posts.failed.get(status, 0) + 1

    async def _answer(self, request: bytes) -> str:
        """The status, or what went wrong."""
        try:
            async with asyncio.timeout(PATIENCE):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                try:
                    writer.write(request)
                    whole = await reader.read(-1)
                finally:
                    writer.close()
        except (OSError, TimeoutError) as error:
            return type(error).__name__
        return whole[9:12].decode() or "nothing"
