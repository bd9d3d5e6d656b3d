"""Fill and change a mirror's event log for bench_mirrors.py.

These functions run inside that mirror, in `manage.py shell`.
"""

import json
import time
from datetime import date
from typing import Any
from uuid import UUID

from django.db import connection, transaction
from django.utils import timezone
from seed_site import (  # pyright: ignore[reportMissingImports]  # it is in benchmarks/site
    create_training_run,
    derive_identity,
)
from uuid6 import uuid7

from barnraise.protocol import messages
from barnraise.protocol.signing import digest
from coordinator.accounts.models import Machine
from coordinator.credit.models import Credit
from coordinator.credit.replicated import credits as replicated_credits
from coordinator.eventlog import hlc, ingest, projection, writer
from coordinator.eventlog.event import NO_DIGEST, Event
from coordinator.eventlog.models import Aggregate, LogEvent, LogState, Origin, PrivateData
from coordinator.lib import site_identity
from coordinator.runs.models import Run

# A person and their address, two machines and their receipts make 20 events.
MACHINES_PER_PERSON = 2
RECEIPTS_PER_MACHINE = 8
BATCH_EVENTS = 1000
INCARNATION = "0123456789abcdef"
DAY_INCARNATION = "f" * 16  # of the worker whose day is measured
CREDIT_EVENTS_PER_DAY = 48  # a mirror records credit every half hour
CHANGED_MACHINES = 200  # that one mirror renames
Numbers = dict[str, Any]


def run_task(name: str, *arguments: float) -> None:
    """Run a task by its name and print its result as one JSON line."""
    tasks = {
        "state": describe_state,
        "fill": fill_log,
        "change": rename_machines,
        "growth": measure_growth,
    }
    print(json.dumps(tasks[name](*arguments)))


def describe_state() -> Numbers:
    """Return the state hash, the number of events and of unwritten rows, and the own log's id."""
    own_log = Origin.objects.filter(ours=True).first()
    return {
        "state": projection.state_hash(),
        "events": LogEvent.objects.count(),
        "origin": own_log.pk if own_log else None,
        "waiting": Aggregate.objects.filter(projected=False).count(),
    }


class LogFiller:
    """Append events to this site's own log, a thousand at once, without writing their rows.

    The events are folded and their rows written later.
    """

    def __init__(self) -> None:
        self.origin = Origin.objects.get(ours=True)
        self.hlc = LogState.objects.get().hlc
        self.events: list[LogEvent] = []
        self.private_data: list[PrivateData] = []

    def store_private(self, aggregate: str, content: Numbers) -> str:
        """Store private data and return its digest."""
        body = projection.canonical_json(content)
        salt = uuid7().hex
        data = PrivateData(digest=digest(salt + body), aggregate=aggregate, salt=salt, body=body)
        self.private_data.append(data)
        return data.digest

    def append_event(self, event_type: str, name: object, payload: Numbers) -> None:
        """Append an event about the aggregate `name`."""
        self.hlc = hlc.next_stamp(self.hlc, time.time())
        event = Event(
            id=str(uuid7()),
            origin=self.origin.pk,
            seq=self.origin.head_seq + 1,
            prev=self.origin.head_digest,
            hlc=self.hlc,
            type=event_type,
            aggregate=f"{event_type.partition('.')[0]}:{name}",
            payload=payload,
        )
        signed = site_identity.identity().sign("event", event)
        row = LogEvent(**writer.build_row(event, signed, True)._asdict())
        self.origin.head_seq = row.seq
        self.origin.head_digest = row.digest
        self.origin.head_hlc = row.hlc
        self.events.append(row)
        if len(self.events) >= BATCH_EVENTS:
            self.flush()

    def flush(self) -> None:
        """Write the events that were appended since the last call."""
        with transaction.atomic():
            PrivateData.objects.bulk_create(self.private_data)
            LogEvent.objects.bulk_create(self.events)
            projection.mark_stale({event.aggregate for event in self.events})
            self.origin.save()
            LogState.objects.update(hlc=self.hlc)
        self.events = []
        self.private_data = []


def fill_log(events: int) -> Numbers:
    """Fill the log with `events` events: a run, people, their addresses, machines and receipts.

    Returns:
        The number of events, and the seconds in which they were folded and their rows written.
    """
    run = create_training_run("The first", 30.0)
    now = timezone.now().isoformat()
    filler = LogFiller()
    machines = 0
    while filler.origin.head_seq < events:
        person = str(uuid7())
        email = f"person-{machines}@example.org"
        profile = {
            "name": f"Person {machines}",
            "email": email,
            "password": f"pbkdf2_sha256$1000000${machines:022d}${'x' * 44}",
        }
        content_digest = filler.store_private(f"person:{person}", profile)
        filler.append_event(
            "person.join", person, {"content_digest": content_digest, "joined": now}
        )
        addresses = {"addresses": [{"email": email, "verified": True, "primary": True}]}
        content_digest = filler.store_private(f"access:{person}", addresses)
        filler.append_event("access.set_addresses", person, {"content_digest": content_digest})
        for _ in range(MACHINES_PER_PERSON):
            _append_machine(filler, run.pk, person, machines)
            machines += 1
    filler.flush()
    start = time.monotonic()
    ingest.project_pending()
    return {"events": LogEvent.objects.count(), "seconds": time.monotonic() - start}


def _append_machine(filler: LogFiller, run: UUID, person: str, number: int) -> None:
    """Append a machine's enrolment and its receipts."""
    key = derive_identity("worker", number).key
    description = {
        "hostname": f"pc-{number}",
        "system": "Linux 6.8",
        "processor": "Ryzen 7 5800X",
        "cores": 8,
        "memory_bytes": 32 * 10**9,
        "accelerator": "RTX 3060",
    }
    enrolment = {
        "content_digest": filler.store_private(f"machine:{key}", description),
        "id": str(uuid7()),
        "owner": person,
        "enrolled": timezone.now().isoformat(),
    }
    filler.append_event("machine.enrol", key, enrolment)
    for n in range(RECEIPTS_PER_MACHINE):
        receipt = {
            "day": date.today().isoformat(),
            "first": 10 * n + 1,
            "last": 10 * n + 10,
            "tokens": 600_000,
            "witness": None,
        }
        filler.append_event("credit.receipt", f"{run}:{key}:{INCARNATION}", receipt)


def rename_machines(interval: float, seconds: float, mirror: int) -> Numbers:
    """Rename a machine every `interval` seconds; each mirror renames 200 machines of its own.

    Returns:
        (number, commit in seconds since 1970) of each event, and the rate of changes.
    """
    first = CHANGED_MACHINES * mirror
    machines = list(Machine.objects.order_by("pk")[first : first + CHANGED_MACHINES])
    events = LogEvent.objects.filter(origin__ours=True, type="machine.describe").order_by("seq")
    before = events.count()
    commits = []
    start = time.monotonic()
    for n in range(int(seconds / interval)):
        time.sleep(max(0.0, start + n * interval - time.monotonic()))
        machines[n % len(machines)].rename(f"machine {n}")
        commits.append(time.time())
    rate = len(commits) / (time.monotonic() - start)
    numbers = events.values_list("seq", flat=True)[before:]
    return {"changes": list(zip(numbers, commits, strict=True)), "rate": rate}


def measure_growth() -> Numbers:
    """Measure what a day of one worker adds to the log.

    Another person's machine attests its updates, and the mirror records its credit every half hour,
    as the task `credit.record_events` does.
    """
    identity = derive_identity("worker", 0)
    witness = Machine.objects.get(key=derive_identity("worker", 3).key)
    run = Run.objects.get(owner__email="owner@example.org")
    events_before = LogEvent.objects.count()
    log_bytes = _log_table_bytes()
    credit = Credit.objects.create(
        run=run,
        machine=Machine.objects.get(key=identity.key),
        incarnation=DAY_INCARNATION,
        day=date.today(),
        first=1,
        last=0,
        tokens=0,
        witness=witness,
    )
    for n in range(1, CREDIT_EVENTS_PER_DAY + 1):
        header = messages.Update(
            run=str(run.pk),
            peer=identity.key,
            incarnation=DAY_INCARNATION,
            seq=10 * n,
            started_ms=0,
            time_ms=1000 * (10 * n),
            ticket="0" * 64,
            previous=NO_DIGEST,
            tokens=60_000,
            total=600_000 * n,
            fragments=[],
        )
        signed = identity.sign("update", header).model_dump()
        Credit.objects.filter(pk=credit.pk).update(
            last=10 * n, tokens=600_000 * n, author_header=signed
        )
        replicated_credits.record_credit_events()
    aggregate = f"credit:{run.pk}:{identity.key}:{DAY_INCARNATION}"
    fresh = LogEvent.objects.filter(aggregate=aggregate)
    texts = fresh.values_list("body", "signature")
    return {
        "log_events_per_worker_day": fresh.count(),
        "log_bytes_per_worker_day": sum(len(body) + len(signature) for body, signature in texts),
        "disk_bytes_per_event": round(log_bytes / events_before),
    }


def _log_table_bytes() -> int:
    """Return the bytes on disk of all events, including their indexes."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_total_relation_size('eventlog_logevent')")
        row = cursor.fetchone()
    assert row is not None
    return row[0]
