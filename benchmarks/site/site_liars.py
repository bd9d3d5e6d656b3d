"""Lie to a real site over HTTP, among people who report the truth: keys without computers.

One account reports an enormous count with many keys, and two accounts witness updates of each
other's that do not exist. The run's count must stay that of the people who train, and the liars
must earn no credit.
"""

import time
from dataclasses import dataclass
from datetime import timedelta

import httpx
from django.contrib.auth.hashers import make_password
from django.db.models import Sum
from django.utils import timezone
from seed_site import create_training_run, derive_identity
from site_stack import Site

from barnraise.protocol import coordinator_messages, enums, messages, reports
from barnraise.protocol.signing import digest
from coordinator.accounts.models import Machine, User
from coordinator.credit.models import Credit
from coordinator.fleet.lifecycle_facts import advance_run
from coordinator.fleet.models import Membership
from coordinator.lib import site_identity
from coordinator.runs.models import Run
from coordinator.telemetry.rollup import drain_queue

HONEST_PEOPLE = 3
SYBIL_KEYS = 12  # of one account
HONEST_TOKENS = 200_000  # that each honest machine trained
UPDATES = 10  # of each honest machine
LIED_TOKENS = 10**15
LIED_UPDATES = 10**9
INCARNATION = "a" * 16
REPORT_EVERY = 60.0  # seconds: a report counts as fresh for a multiple of it
WAIT_SECONDS = 600.0  # at most, for the site to store what it has confirmed


@dataclass
class Witness:
    """A machine that reports, and whose updates others attest.

    Attributes:
        name: Of its owner.
        number: Of its key.
        machine: Its row.
        tokens: What it says that it trained.
        ledger_tokens: What it says that its ledger has.
        updates: How many updates it says that it published.
    """

    name: str
    number: int
    machine: Machine
    tokens: int
    ledger_tokens: int
    updates: int
    seq: int = 0
    head: messages.Signed | None = None

    def sign_head(self, run: str) -> messages.Signed:
        """Return the signed header of its last update: always the same one."""
        if self.head is None:
            self.head = self._sign_head(run)
        return self.head

    def _sign_head(self, run: str) -> messages.Signed:
        now = int(1000 * time.time())
        update = messages.Update(
            run=run,
            peer=self.machine.key,
            incarnation=INCARNATION,
            seq=self.updates,
            previous="0" * 64,
            tokens=self.tokens // self.updates,
            total=self.tokens,
            started_ms=now - 3_600_000,
            time_ms=now,
            ticket="0" * 64,
            fragments=[],
        )
        return derive_identity(self.name, self.number).sign("update", update)


class LiedSite:
    """One run of a site, its honest people and its liars."""

    def __init__(self, site: Site) -> None:
        """Create the run and everybody's machines."""
        self.site = site
        self.run = create_training_run("Strangers", REPORT_EVERY)
        self.mirror = site_identity.identity().key
        count = HONEST_PEOPLE * HONEST_TOKENS
        self.honest = [
            self._enrol(f"honest-{n}", 0, HONEST_TOKENS, count, UPDATES)
            for n in range(HONEST_PEOPLE)
        ]
        self.sybils = [self._enrol("sybil", n, 1, LIED_TOKENS, 1) for n in range(SYBIL_KEYS)]
        self.pair = [
            self._enrol(f"pair-{n}", 0, LIED_TOKENS, LIED_TOKENS, LIED_UPDATES) for n in range(2)
        ]

    @property
    def honest_count(self) -> int:
        """The tokens that honest machines trained altogether."""
        return HONEST_PEOPLE * HONEST_TOKENS

    def _enrol(self, name: str, number: int, tokens: int, ledger: int, updates: int) -> Witness:
        owner, _ = User.objects.get_or_create(
            email=f"{name}@example.org",
            defaults={"name": name, "password": make_password(None)},
        )
        machine = Machine.objects.create(
            key=derive_identity(name, number).key,
            owner=owner,
            hostname=f"{name}-{number}",
            system="Linux",
            cores=8,
            memory_bytes=32 * 10**9,
        )
        Membership.objects.create(
            run=self.run,
            machine=machine,
            addresses=["127.0.0.1:41000"],
            ticket_expires=timezone.now() + timedelta(hours=24),
            activity="training",
        )
        return Witness(name, number, machine, tokens, ledger, updates)

    def post_report(self, witness: Witness, attested: list[Witness]) -> None:
        """Post a machine's report with its attestations of at most two others, over HTTP."""
        witness.seq += 1
        identity = derive_identity(witness.name, witness.number)
        report = reports.Report(
            seq=witness.seq,
            at=time.time(),
            version="0.1",
            activity=enums.Activity.TRAINING,
            incarnation=INCARNATION,
            addresses=["127.0.0.1:41000"],
            step=witness.updates,
            tokens=witness.tokens,
            ledger_tokens=witness.ledger_tokens,
            rate=500.0,
            updates_sent=witness.updates,
            updates_received=0,
            peers=8,
            peer_bytes_sent=0,
            peer_bytes_received=0,
            vector=digest(f"{witness.name} {witness.seq}"),
        )
        attestations = []
        for other in attested:
            head = other.sign_head(str(self.run.pk))
            statement = coordinator_messages.AttestationStatement(
                run=str(self.run.pk),
                author=f"{other.machine.key}.{INCARNATION}",
                head=digest(head.body),
            )
            signed = identity.sign("attestation", statement)
            attestations.append(
                coordinator_messages.Attestation(
                    head=coordinator_messages.SignedHeader(**head.model_dump()),
                    statement=coordinator_messages.SignedStatement(**signed.model_dump()),
                )
            )
        path = f"/api/v1/runs/{self.run.slug}/reports"
        message = coordinator_messages.Reports(reports=[report], attestations=attestations)
        body = message.model_dump_json().encode()
        token = identity.sign_request(self.mirror, "POST", path, body, time.time())
        answer = httpx.post(
            f"{self.site.url}{path}",
            content=body,
            headers={"Authorization": f"Barnraise {token}", "Content-Type": "application/json"},
            timeout=60,
        )
        assert answer.status_code == 200, f"{answer.status_code}: {answer.text[:300]}"

    def post_truth(self) -> None:
        """Let the honest machines report, each attesting the two others."""
        for witness in self.honest:
            self.post_report(witness, [other for other in self.honest if other is not witness])

    def post_lies(self) -> None:
        """Let the liars report: the pair witnesses each other, and so do the keys of one person."""
        one, other = self.pair
        self.post_report(one, [other])
        self.post_report(other, [one])
        for number, sybil in enumerate(self.sybils):
            self.post_report(sybil, [self.sybils[number - 1]])

    def count_after_reports(self) -> int:
        """Wait until the site has stored all confirmed reports; return the run's count.

        Raises:
            OverdueError: If the site does not store them in time.
        """
        witnesses = [*self.honest, *self.sybils, *self.pair]
        posted = {w.machine.pk: w.seq for w in witnesses if w.seq}

        def are_stored() -> bool:
            drain_queue()  # as the site's own task does, which may be late on a busy machine
            rows = Membership.objects.filter(run=self.run, machine__in=posted)
            stored = dict(rows.values_list("machine", "high_water_mark"))
            return all(stored.get(pk, 0) >= seq for pk, seq in posted.items())

        self.site.children.wait_until(are_stored, "all confirmed reports", WAIT_SECONDS)
        run = Run.objects.get(pk=self.run.pk)
        advance_run(run)
        run.refresh_from_db()
        return run.ledger_tokens

    def credit_of(self, witnesses: list[Witness]) -> int:
        """Return the tokens credited to machines."""
        rows = Credit.objects.filter(machine__in=[w.machine.pk for w in witnesses])
        return rows.aggregate(sum=Sum("tokens"))["sum"] or 0


def lie_to_site(site: Site) -> dict[str, int]:
    """Let honest people and liars report to a site that runs.

    Returns:
        The run's true count, its count before and after the lies, and the credit of both sides.
    """
    lied = LiedSite(site)
    lied.post_truth()
    count_before = lied.count_after_reports()
    for _ in range(3):
        lied.post_lies()
        lied.post_truth()
    count_after = lied.count_after_reports()
    return {
        "site_honest_count": lied.honest_count,
        "site_count_before_lies": count_before,
        "site_count_after_lies": count_after,
        "site_honest_credit": lied.credit_of(lied.honest),
        "site_liars_credit": lied.credit_of([*lied.sybils, *lied.pair]),
    }
