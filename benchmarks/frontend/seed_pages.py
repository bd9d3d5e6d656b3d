"""Fill a site with a run of 200 machines and 50,000 measured losses, and report on their behalf."""

import math
import random
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "site"))

from django.db import connection
from django.test import Client
from django.utils import timezone
from seed_site import create_training_run, enrol_machines
from site_workers import PLAN

from barnraise.protocol import reports
from barnraise.protocol.enums import Activity
from coordinator.accounts.models import Machine, User
from coordinator.fleet.models import Membership
from coordinator.lib.valkey import valkey_client
from coordinator.live.run_snapshot import sequence_key
from coordinator.runs.models import Run
from coordinator.telemetry import report_queue, rollup
from coordinator.telemetry.machine_history import SystemReading

DAY_SECONDS = 86_400
REPORT_SECONDS = 10.0
TOKENS_PER_POINT = 4096
random_numbers = random.Random(7)


def measure_loss(share: float) -> float:
    """Return a plausible training loss after a share of the run."""
    return 2.8 + 8 * math.exp(-12 * share) + random_numbers.gauss(0, 0.05)


class BusyRun:
    """A run with many machines that have trained for a day, and that go on reporting."""

    def __init__(self, machines: int, points: int) -> None:
        """Create the run, its machines and their past; `points` losses in all."""
        self.run = create_training_run("Two hundred machines", REPORT_SECONDS)
        self.machines = enrol_machines(self.run, machines)
        self.members = list(Membership.objects.filter(run=self.run).select_related("run"))
        self.tokens = points * TOKENS_PER_POINT
        self._seq = 10**6
        self._next = 0
        self._insert_past(points)
        Run.objects.filter(pk=self.run.pk).update(
            started=timezone.now() - timedelta(days=1), ledger_tokens=self.tokens
        )
        for member in self.members:
            self._send_report(member)
        rollup.drain_queue()

    @property
    def owner(self) -> User:
        """The run's owner."""
        return self.run.owner

    @property
    def path(self) -> str:
        """The address of the run's page."""
        return self.run.get_absolute_url()

    def read_number(self) -> int:
        """Return the number of the last delta that the site has sent."""
        return int(cast(str, valkey_client().get(sequence_key(self.run.pk)) or 0))

    def report_some(self, count: int) -> None:
        """Report on behalf of the next `count` machines."""
        for _ in range(count):
            self._send_report(self.members[self._next % len(self.members)])
            self._next += 1

    def _send_report(self, member: Membership) -> None:
        self._seq += 1
        self.tokens += TOKENS_PER_POINT
        exchange = reports.ExchangeView(
            round_steps=20,
            scheme="dense2",
            density=1.0,
            bits_per_parameter=2.0,
            sent_rate=random_numbers.uniform(8e4, 9e5),
            received_rate=random_numbers.uniform(8e5, 9e6),
            uplink_rate=1.9e6,
            lag=random_numbers.randrange(3),
        )
        report = reports.Report(
            seq=self._seq,
            at=time.time(),
            version="0.1.0",
            activity=Activity.TRAINING,
            incarnation="a" * 16,
            addresses=["192.0.2.7:41000"],
            step=self._seq - 10**6,
            tokens=self.tokens // len(self.members),
            ledger_tokens=self.tokens,
            rate=random_numbers.uniform(900, 1100),
            points=[reports.MeasuredLoss(kind="train", tokens=self.tokens, loss=measure_loss(1.0))],
            updates_sent=self._seq - 10**6,
            updates_received=self._seq,
            peers=8,
            peer_bytes_sent=10**8,
            peer_bytes_received=10**9,
            vector=f"{self._seq:064x}",
            plan=PLAN,
            step_seconds=random_numbers.uniform(1.4, 2.9),
            exchange=exchange,
            learning_rate=6e-4,
            gradient_norm=random_numbers.uniform(0.4, 0.9),
        )
        report_queue.queue_reports(member, [report])

    def _insert_past(self, points: int) -> None:
        """Insert a day of losses and rollups of all machines."""
        now = time.time()
        each = points // len(self.members)
        rows = [
            (
                member.pk,
                number + 1,
                (number * len(self.members) + index) * TOKENS_PER_POINT,
                measure_loss(number / each),
                now - DAY_SECONDS * (1 - number / each),
                "validation" if index == 0 and number % 10 == 0 else "train",
            )
            for index, member in enumerate(self.members)
            for number in range(each)
        ]
        with connection.cursor() as cursor:
            cursor.execute(
                "INSERT INTO telemetry_losspoint (membership_id, seq, position, kind, tokens, "
                "loss, at, learning_rate, gradient_norm) "
                "SELECT m, s, 0, k, t, l, a, 0.0006, 0.7 FROM unnest(%s::uuid[], %s::bigint[], "
                "%s::bigint[], %s::float8[], %s::float8[], %s::text[]) AS row (m, s, t, l, a, k)",
                [list(column) for column in zip(*rows, strict=True)],
            )
            cursor.execute(
                "INSERT INTO telemetry_rollup (membership_id, width, bucket, reports, rate_sum, "
                "tokens, updates_sent, updates_received, peer_bytes_sent, peer_bytes_received, "
                "lag_sum) SELECT m.id, 3600, bucket, 360, 360000, 1000, 1, 1, 900000000, "
                "900000000, 300 FROM fleet_membership m, "
                "generate_series(%s::bigint, %s::bigint, 3600) AS bucket WHERE m.run_id = %s",
                [int(now - DAY_SECONDS) // 3600 * 3600, int(now), self.run.pk],
            )


def create_machine_with_history(owner: User) -> Machine:
    """Create a machine of the owner that has reported its load each minute of a day."""
    machine = Machine.objects.create(key="c" * 64, owner=owner, hostname="loft", cores=16)
    minute = int(time.time()) // 60 * 60
    SystemReading.objects.bulk_create(
        SystemReading(
            machine=machine,
            minute=minute - 60 * age,
            system={"cpu": random_numbers.random(), "worker_cpu": 0.4, "memory_used": age << 20},
        )
        for age in range(1, DAY_SECONDS // 60)
    )
    return machine


def create_session(person: User) -> str:
    """Sign a person in, and return the session's cookie."""
    client = Client()
    client.force_login(person)
    return client.cookies["sessionid"].value
