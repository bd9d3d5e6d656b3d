"""Simulate workers as a site sees them.

Each posts one signed report an interval over a connection of its own. It obeys the interval of the
site's last answer, and sends a report that was not confirmed again with the next one.
"""

import asyncio
import math
import random
import re
import time
from dataclasses import dataclass, field

from seed_site import EnrolledMachine

from barnraise.coordinator_client.reporter import backoff
from barnraise.protocol import coordinator_messages, enums, messages, reports
from barnraise.protocol.signing import digest
from coordinator.runs.models import Run

TIMEOUT = 15.0  # seconds, as the worker's own
ATTESTATION_SECONDS = 60.0  # between two batches, as the worker's own
RETRY_SECONDS = 60.0  # at the end, for reports that are not confirmed yet
MAX_REPORTS = 20  # in one post
ANSWERED_INTERVAL = re.compile(rb'report_every\\":([0-9.]+)')  # in the signed directive's text
FRAGMENT = messages.FragmentUpdate(digest=digest("payload"), size=1_800_000, sketch="0" * 16)
FRAGMENTS = 14  # of an update, as for a model of 124 M parameters
INCARNATION = "a" * 16
PLAN = reports.PlanView(
    device="NVIDIA GeForce RTX 3060",
    device_bytes=9 * 10**9,
    host_bytes=3 * 10**9,
    disk_bytes=0,
    groups=12,
    micro_batches=4,
    micro_tokens=1024,
    layers=12,
    resident=3,
    clipping="exact",
    crash_safety="exact",
    binding="compute",
    predicted_seconds=5.4,
    disk_written_per_day=0,
    sentence="12 layers on the device; its arithmetic is what limits.",
)
EXCHANGE = reports.ExchangeView(
    round_steps=20,
    scheme="top64x2",
    density=0.015625,
    bits_per_parameter=0.234375,
    sent_rate=105000.5,
    received_rate=210000.0,
    uplink_rate=1250000.0,
    lag=1,
)


@dataclass
class PostResults:
    """What became of all workers' posts.

    Attributes:
        milliseconds: (monotonic second at which a post began, its duration).
        sent: (machine, report number) → monotonic second at which its first post began.
        confirmed: Number of reports that the site confirmed.
        ends: The monotonic second after which no new report starts.
        failed: Number of posts that failed, by status or exception.
    """

    milliseconds: list[tuple[float, float]] = field(default_factory=list)
    sent: dict[tuple[str, int], float] = field(default_factory=dict)
    confirmed: int = 0
    ends: float = math.inf
    failed: dict[str, int] = field(default_factory=dict)


class SimulatedWorker:
    """Post the reports of one machine.

    Args:
        machine: The machine and its key.
        workers: All workers, this one included.
        run: The run.
        mirror: The site's key, which is the audience of signed requests.
        port: The site's port.
    """

    def __init__(
        self,
        machine: EnrolledMachine,
        workers: "list[SimulatedWorker]",
        run: Run,
        mirror: str,
        port: int,
    ) -> None:
        self.machine = machine
        self.workers = workers
        self.run = run
        self.mirror = mirror
        self.port = port
        self.results = PostResults()
        self.seq = 0
        self.unconfirmed: list[reports.Report] = []
        self.interval = 0.0  # seconds from a report to the next one
        self.failures = 0  # of posts in a row
        self.next_attestation = time.monotonic() + random.random() * ATTESTATION_SECONDS
        self.head: messages.Signed | None = None  # of its last update

    async def work(self, every: float, results: PostResults) -> None:
        """Post reports until `results.ends`, from a random moment of the first interval on.

        Args:
            every: seconds to the next report until the site has answered one.
            results: what became of the posts.
        """
        self.results = results
        self.interval = every
        due = time.monotonic() + random.random() * every
        while due < results.ends:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self.unconfirmed.append(self._next_report())
            await self._post_report()
            due = time.monotonic() + backoff(self.interval, self.failures)
        while self.unconfirmed and time.monotonic() < results.ends + RETRY_SECONDS:
            await asyncio.sleep(1.0)
            await self._post_report()

    def _next_report(self) -> reports.Report:
        self.seq += 1
        self.head = None
        tokens = 1000 * self.seq
        return reports.Report(
            seq=self.seq,
            at=time.time(),
            version="0.1",
            activity=enums.Activity.TRAINING,
            incarnation=INCARNATION,
            addresses=["127.0.0.1:41000"],
            step=self.seq,
            tokens=tokens,
            ledger_tokens=tokens * 2000,
            rate=500.0 + self.seq,
            points=[reports.MeasuredLoss(kind="train", tokens=tokens * 2000, loss=5.0)],
            updates_sent=self.seq,
            updates_received=self.seq * 1999,
            peers=8,
            peer_bytes_sent=tokens,
            peer_bytes_received=tokens,
            vector=digest(f"{self.machine.id} {self.seq}"),
            anchor=digest("a"),
            plan=PLAN,
            step_seconds=5.1,
            exchange=EXCHANGE,
        )

    def _next_attestations(self) -> list[coordinator_messages.Attestation]:
        """Attest the updates of two others, if it is time for that."""
        if time.monotonic() < self.next_attestation:
            return []
        self.next_attestation = time.monotonic() + ATTESTATION_SECONDS
        others = random.sample(self.workers, min(2, len(self.workers)))
        return [
            self._attest(other.signed_head()) for other in others if other.seq and other is not self
        ]

    def signed_head(self) -> messages.Signed:
        """Return the header of this worker's last update, which is signed once."""
        if self.head is None:
            header = messages.Update(
                run=str(self.run.pk),
                peer=self.machine.identity.key,
                incarnation=INCARNATION,
                seq=self.seq,
                started_ms=0,
                time_ms=1000 * self.seq,
                ticket="0" * 64,
                previous="0" * 64,
                tokens=1000,
                total=1000 * self.seq,
                fragments=[FRAGMENT] * FRAGMENTS,
            )
            self.head = self.machine.identity.sign("update", header)
        return self.head

    def _attest(self, head: messages.Signed) -> coordinator_messages.Attestation:
        statement = coordinator_messages.AttestationStatement(
            run=str(self.run.pk), author=f"{head.key}.{INCARNATION}", head=digest(head.body)
        )
        signed = self.machine.identity.sign("attestation", statement)
        return coordinator_messages.Attestation(
            head=coordinator_messages.SignedHeader(**head.model_dump()),
            statement=coordinator_messages.SignedStatement(**signed.model_dump()),
        )

    async def _post_report(self) -> None:
        path = f"/api/v1/runs/{self.run.slug}/reports"
        message = coordinator_messages.Reports(
            reports=self.unconfirmed[:MAX_REPORTS], attestations=self._next_attestations()
        )
        body = message.model_dump_json().encode()
        token = self.machine.identity.sign_request(self.mirror, "POST", path, body, time.time())
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n"
            f"Authorization: Barnraise {token}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        start = time.monotonic()
        for report in self.unconfirmed:
            self.results.sent.setdefault((self.machine.id, report.seq), start)
        status = await self._request(head.encode() + body)
        self.results.milliseconds.append((start, 1000 * (time.monotonic() - start)))
        self.failures = 0 if status == "200" else self.failures + 1
        if status == "200":
            self.results.confirmed += len(self.unconfirmed[:MAX_REPORTS])
            del self.unconfirmed[:MAX_REPORTS]
        else:
            self.results.failed[status] = self.results.failed.get(status, 0) + 1

    async def _request(self, request: bytes) -> str:
        """Send a request; return the answer's status, or the name of the exception."""
        try:
            async with asyncio.timeout(TIMEOUT):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                try:
                    writer.write(request)
                    answer = await reader.read(-1)
                finally:
                    writer.close()
        except (OSError, TimeoutError) as error:
            return type(error).__name__
        if answered := ANSWERED_INTERVAL.search(answer):
            self.interval = float(answered[1])
        return answer[9:12].decode() or "nothing"
