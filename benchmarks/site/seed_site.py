"""What the site's database holds before anybody measures: people, machines with keys, runs, and their past."""

import time
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256

from django.contrib.auth.hashers import make_password
from django.db import connection
from django.utils import timezone
from uuid6 import uuid7

from barnraise.protocol import coordinator_messages, enums
from barnraise.protocol.signing import Identity, digest
from coordinator.accounts.models import Machine, User
from coordinator.fleet.lifecycle_facts import advance_run
from coordinator.fleet.models import Membership
from coordinator.runs.models import Run
from coordinator.runs.spec_form import spec_from_fields

MACHINES_A_PERSON = 5
AT_ONCE = 5_000  # rows a statement


@dataclass(frozen=True)
class Hand:
    """A machine in the run, and the key it signs with."""

    identity: Identity
    machine: str  # id
    membership: object  # primary key


def crowd(name: str, many: int) -> list[Machine]:
    """So many machines, five a person. Their keys follow from their names."""
    people = [
        User(email=f"{name}-{n}@example.org", name=f"{name} {n}", password=make_password(None))
        for n in range(-(-many // MACHINES_A_PERSON))
    ]
    User.objects.bulk_create(people, batch_size=AT_ONCE)
    machines = [
        Machine(
            key=identity(name, n).key, owner=people[n // MACHINES_A_PERSON], hostname=f"{name}-pc-{n}", system="Linux",
            processor="Ryzen 7 5800X", cores=8, memory_bytes=32 * 10**9, accelerator="RTX 3060",
        )
        for n in range(many)
    ]  # fmt: skip
    return Machine.objects.bulk_create(machines, batch_size=AT_ONCE)


def identity(name: str, number: int) -> Identity:
    return Identity(sha256(f"{name} {number}".encode()).digest())


def launched(name: str, report_every: float) -> Run:
    """A run that trains, by the way every run goes."""
    owner, _ = User.objects.get_or_create(
        email="owner@example.org", defaults={"name": "The owner", "organiser": True}
    )
    spec = spec_from_fields({"recipe.token_budget": 10**13, "seed": 7})
    run = Run.create(owner, name, spec, report_every=report_every)
    shards = {
        part: [coordinator_messages.Shard(digest=digest(part), tokens=10**6)]
        for part in ("train", "held_out")
    }
    told = coordinator_messages.TextManifest(
        run=str(run.pk), vocabulary=spec.model.vocabulary, tokenizer=digest("t"), **shards
    )
    run.launch(actor=owner)
    assert run.accept_manifest(identity("owner", 0).sign("manifest", told))
    advance_run(run)
    Run.objects.filter(pk=run.pk).update(status=enums.RunStatus.TRAINING, started=timezone.now())
    run.refresh_from_db()
    return run


def hands(run: Run, many: int) -> list[Hand]:
    """Machines that joined it just now."""
    machines = crowd("worker", many)
    expires = timezone.now() + timezone.timedelta(hours=24)
    made = Membership.objects.bulk_create(
        [
            Membership(
                run=run,
                machine=m,
                addresses=["192.0.2.7:41000"],
                ticket_expires=expires,
                activity="training",
            )
            for m in machines
        ],
        batch_size=AT_ONCE,
    )
    return [Hand(identity("worker", n), str(m.machine_id), m.pk) for n, m in enumerate(made)]


def runs(like: Run, many: int, machines: int) -> list[Run]:
    """So many runs with the rules of one, a tenth of them over, with so many machines among them, and a past: they
    began two days ago, and their machines were heard of some hours ago. What is new is told to people and looked at,
    which is not what is measured."""
    fields = {f.attname: getattr(like, f.attname) for f in Run._meta.concrete_fields}
    made = []
    for n in range(many):
        status = enums.RunStatus.FINISHED if n % 10 == 0 else enums.RunStatus.TRAINING
        own = {"id": uuid7(), "slug": f"run-{n}", "name": f"Run {n}", "status": status, "ledger_tokens": 10**9 + n,
               "started": timezone.now() - timedelta(days=2)}  # fmt: skip
        made.append(Run(**fields | own))
    Run.objects.bulk_create(made, batch_size=1000)
    everybody, heard = crowd("volunteer", machines), timezone.now() - timedelta(hours=7)
    Membership.objects.bulk_create(
        [
            Membership(
                run=made[n % many],
                machine=m,
                activity="training",
                tokens=n,
                rate=500.0,
                last_seen=heard,
            )
            for n, m in enumerate(everybody)
        ],
        batch_size=AT_ONCE,
    )
    _past()
    return made


def _past() -> None:
    """An hour's sum, four losses and a day's credit of each machine; a notice for each person."""
    now = int(time.time())
    with connection.cursor() as cursor:
        for statement in (
            "INSERT INTO telemetry_rollup (membership_id, width, bucket, reports, rate_sum, tokens, updates_sent,"
            " updates_received, peer_bytes_sent, peer_bytes_received)"
            f" SELECT id, 3600, {now // 3600 * 3600}, 100, 50000, 1000, 1, 1, 1, 1 FROM fleet_membership",
            "INSERT INTO telemetry_losspoint (membership_id, seq, position, kind, tokens, loss, at)"
            f" SELECT id, s, 0, 'train', s * 1000000, 5.0 - s * 0.5, {now}"
            " FROM fleet_membership, generate_series(1, 4) s",
            "INSERT INTO credit_credit (id, run_id, machine_id, incarnation, day, first, last, tokens)"
            " SELECT uuidv7(), run_id, machine_id, '0123456789abcdef', current_date, 1, 9, 9000 FROM fleet_membership",
            "INSERT INTO notify_notification (id, person_id, kind, key, title, text, url, created, shown, email_tries)"
            " SELECT uuidv7(), id, 'run.started', 'filled', 'A run started', '', '/', now(), true, 0"
            " FROM accounts_user",
            "INSERT INTO audit_auditentry (id, at, action, subject_kind, subject_id, subject_name, detail, request_id)"
            " SELECT uuidv7(), now(), 'machine.enrol', 'machine', id::text, hostname, '{}', ''"
            " FROM accounts_machine",
            "VACUUM ANALYZE",
        ):
            cursor.execute(statement)
