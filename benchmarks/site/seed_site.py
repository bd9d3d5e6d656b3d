"""Fill a site's database before a measurement: people, machines with keys, runs and their past."""

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
from coordinator.runs.drafts import NewRun
from coordinator.runs.models import Run
from coordinator.runs.spec_form import spec_from_fields

MACHINES_PER_PERSON = 5
BATCH_ROWS = 5_000  # of one INSERT statement
LAST_SEEN_AGE = timedelta(hours=7)  # of the machines of earlier runs
STARTED_AGE = timedelta(days=2)  # of earlier runs


@dataclass(frozen=True)
class EnrolledMachine:
    """A machine that has joined the run: its id and the key that it signs with."""

    identity: Identity
    id: str


def create_machines(name: str, count: int) -> list[Machine]:
    """Create machines, five for each person. Their keys are derived from `name`."""
    people = [
        User(email=f"{name}-{n}@example.org", name=f"{name} {n}", password=make_password(None))
        for n in range(-(-count // MACHINES_PER_PERSON))
    ]
    User.objects.bulk_create(people, batch_size=BATCH_ROWS)
    machines = [
        Machine(
            key=derive_identity(name, n).key,
            owner=people[n // MACHINES_PER_PERSON],
            hostname=f"{name}-pc-{n}",
            system="Linux",
            processor="Ryzen 7 5800X",
            cores=8,
            memory_bytes=32 * 10**9,
            accelerator="RTX 3060",
        )
        for n in range(count)
    ]
    return Machine.objects.bulk_create(machines, batch_size=BATCH_ROWS)


def derive_identity(name: str, number: int) -> Identity:
    """Return the key pair that belongs to a name and a number."""
    return Identity(sha256(f"{name} {number}".encode()).digest())


def create_training_run(name: str, report_every: float) -> Run:
    """Create a run in the usual way, and set it to training."""
    owner, _ = User.objects.get_or_create(
        email="owner@example.org", defaults={"name": "The owner", "organiser": True}
    )
    spec = spec_from_fields({"recipe.token_budget": 10**13, "seed": 7})
    run = Run.create(owner, NewRun(name, spec, report_every=report_every))
    manifest = coordinator_messages.TextManifest(
        run=str(run.pk),
        vocabulary=spec.model.vocabulary,
        tokenizer=digest("t"),
        train=[coordinator_messages.Shard(digest=digest("train"), tokens=10**6)],
        held_out=[coordinator_messages.Shard(digest=digest("held_out"), tokens=10**6)],
    )
    run.launch(actor=owner)
    assert run.accept_manifest(derive_identity("owner", 0).sign("manifest", manifest))
    advance_run(run)
    Run.objects.filter(pk=run.pk).update(status=enums.RunStatus.TRAINING, started=timezone.now())
    run.refresh_from_db()
    return run


def enrol_machines(run: Run, count: int) -> list[EnrolledMachine]:
    """Create machines that have just joined the run."""
    expires = timezone.now() + timedelta(hours=24)
    memberships = Membership.objects.bulk_create(
        [
            Membership(
                run=run,
                machine=machine,
                addresses=["192.0.2.7:41000"],
                ticket_expires=expires,
                activity="training",
            )
            for machine in create_machines("worker", count)
        ],
        batch_size=BATCH_ROWS,
    )
    return [
        EnrolledMachine(derive_identity("worker", n), str(membership.machine.pk))
        for n, membership in enumerate(memberships)
    ]


def create_past_runs(like: Run, count: int, machines: int) -> list[Run]:
    """Create runs with the configuration of `like`, and machines among them, with a past.

    A tenth of the runs are finished. All began two days ago, and their machines reported last some
    hours ago: recent changes would cause notifications, which are not what is measured.
    """
    fields = {field.attname: getattr(like, field.attname) for field in Run._meta.concrete_fields}
    runs = []
    for n in range(count):
        status = enums.RunStatus.FINISHED if n % 10 == 0 else enums.RunStatus.TRAINING
        changed = {
            "id": uuid7(),
            "slug": f"run-{n}",
            "name": f"Run {n}",
            "status": status,
            "ledger_tokens": 10**9 + n,
            "started": timezone.now() - STARTED_AGE,
        }
        runs.append(Run(**fields | changed))
    Run.objects.bulk_create(runs, batch_size=1000)
    last_seen = timezone.now() - LAST_SEEN_AGE
    Membership.objects.bulk_create(
        [
            Membership(
                run=runs[n % count],
                machine=machine,
                activity="training",
                tokens=n,
                rate=500.0,
                last_seen=last_seen,
            )
            for n, machine in enumerate(create_machines("volunteer", machines))
        ],
        batch_size=BATCH_ROWS,
    )
    _insert_history()
    return runs


def _insert_history() -> None:
    """Insert a rollup, four losses and a day's credit for each machine, and a notice each person.

    Each machine also gets an entry in the audit log.
    """
    now = int(time.time())
    hour = now // 3600 * 3600
    with connection.cursor() as cursor:
        for statement in (
            "INSERT INTO telemetry_rollup (membership_id, width, bucket, reports, rate_sum, tokens,"
            " updates_sent, updates_received, peer_bytes_sent, peer_bytes_received)"
            f" SELECT id, 3600, {hour}, 100, 50000, 1000, 1, 1, 1, 1 FROM fleet_membership",
            "INSERT INTO telemetry_losspoint"
            " (membership_id, seq, position, kind, tokens, loss, at)"
            f" SELECT id, s, 0, 'train', s * 1000000, 5.0 - s * 0.5, {now}"
            " FROM fleet_membership, generate_series(1, 4) s",
            "INSERT INTO credit_credit"
            " (id, run_id, machine_id, incarnation, day, first, last, tokens)"
            " SELECT uuidv7(), run_id, machine_id, '0123456789abcdef', current_date, 1, 9, 9000"
            " FROM fleet_membership",
            "INSERT INTO notify_notification"
            " (id, person_id, kind, key, title, text, url, created, shown, email_tries)"
            " SELECT uuidv7(), id, 'run.started', 'filled', 'A run started', '', '/', now(), true,"
            " 0 FROM accounts_user",
            "INSERT INTO audit_auditentry"
            " (id, at, action, subject_kind, subject_id, subject_name, detail, request_id)"
            " SELECT uuidv7(), now(), 'machine.enrol', 'machine', id::text, hostname, '{}', ''"
            " FROM accounts_machine",
            "VACUUM ANALYZE",
        ):
            cursor.execute(statement)
