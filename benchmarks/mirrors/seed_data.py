"""What `mirrors.py` has done inside one of its mirrors, by that mirror's own code (`manage.py shell`)."""

import json
import time
from datetime import date
from typing import Any
from uuid import UUID

from django.db import connection, transaction
from django.utils import timezone
from seed_site import identity, launched
from uuid6 import uuid7

from barnraise.protocol import messages
from barnraise.protocol.signing import digest
from coordinator.accounts.models import Machine
from coordinator.credit.models import Credit
from coordinator.credit.replicated import credits
from coordinator.eventlog import hlc, ingest, projection, writer
from coordinator.eventlog.event import NO_DIGEST, Event
from coordinator.eventlog.models import Aggregate, LogEvent, LogState, Origin, PrivateData
from coordinator.lib import site_identity
from coordinator.runs.models import Run

SHARES = {
    "machines": 2,
    "receipts": 8,
}  # of each person, and of each machine: 20 events a person with their addresses
PAGE = 1000
INCARNATION = "0123456789abcdef"
LIFE = "f" * 16  # of the worker whose day is looked at
TELLS = 48  # a day: every half hour


def work(what: str, *numbers: float) -> None:
    print(
        json.dumps(
            {"state": standing, "fill": fill, "change": change, "growth": growth}[what](*numbers)
        )
    )


def standing() -> dict[str, Any]:
    ours = Origin.objects.filter(ours=True).first()
    return {
        "state": projection.state_hash(), "events": LogEvent.objects.count(), "origin": ours.pk if ours else None,
        "waiting": Aggregate.objects.filter(projected=False).count(),
    }  # fmt: skip


class Writing:
    """Appends to this site's own log as it would, a thousand events at once, without a row: those are folded later."""

    def __init__(self) -> None:
        self.ours, self.hlc = Origin.objects.get(ours=True), LogState.objects.get().hlc
        self.events: list[LogEvent] = []
        self.kept: list[PrivateData] = []

    def store_private(self, subject: str, said: dict[str, Any]) -> str:
        body, salt = projection.canonical_json(said), uuid7().hex
        self.kept.append(
            PrivateData(digest=digest(salt + body), aggregate=subject, salt=salt, body=body)
        )
        return self.kept[-1].digest

    def append_event(self, type: str, which: object, said: dict[str, Any]) -> None:
        self.hlc = hlc.next_stamp(self.hlc, time.time())
        event = Event(
            id=str(uuid7()), origin=self.ours.pk, seq=self.ours.head_seq + 1, prev=self.ours.head_digest, hlc=self.hlc,
            type=type, aggregate=f"{type.partition('.')[0]}:{which}", payload=said,
        )  # fmt: skip
        made = LogEvent(
            **writer.build_row(event, site_identity.identity().sign("event", event), True)._asdict()
        )
        self.ours.head_seq, self.ours.head_digest, self.ours.head_hlc = (
            made.seq,
            made.digest,
            made.hlc,
        )
        self.events.append(made)
        if len(self.events) >= PAGE:
            self.flush()

    def flush(self) -> None:
        with transaction.atomic():
            PrivateData.objects.bulk_create(self.kept)
            LogEvent.objects.bulk_create(self.events)
            projection.mark_stale({event.subject for event in self.events})
            self.ours.save()
            LogState.objects.update(hlc=self.hlc)
        self.events, self.kept = [], []


def fill(events: int) -> dict[str, Any]:
    """A run, and people with their addresses, their machines and what those did, until the log has so many events."""
    run, now, n = launched("The first", 30.0), timezone.now().isoformat(), 0
    writing = Writing()
    while writing.ours.head_seq < events:
        person, email = str(uuid7()), f"person-{n}@example.org"
        subject = f"person:{person}"
        about = {
            "name": f"Person {n}",
            "email": email,
            "password": f"pbkdf2_sha256$1000000${n:022d}${'x' * 44}",
        }
        writing.append_event(
            "person.join", person, {"about": writing.store_private(subject, about), "joined": now}
        )
        addresses = {"addresses": [{"email": email, "verified": True, "primary": True}]}
        writing.append_event(
            "access.addresses",
            person,
            {"about": writing.store_private(f"access:{person}", addresses)},
        )
        for _ in range(SHARES["machines"]):
            _machine(writing, run.pk, person, n, now)
            n += 1
    writing.flush()
    began = time.monotonic()
    ingest.project_pending()
    return {"events": LogEvent.objects.count(), "seconds": time.monotonic() - began}


def _machine(writing: Writing, run: UUID, person: str, number: int, now: str) -> None:
    name = identity("worker", number).key
    what = {"hostname": f"pc-{number}", "system": "Linux 6.8", "processor": "Ryzen 7 5800X", "cores": 8,
            "memory_bytes": 32 * 10**9, "accelerator": "RTX 3060"}  # fmt: skip
    about = writing.store_private(f"machine:{name}", what)
    writing.append_event(
        "machine.enrol",
        name,
        {"about": about, "id": str(uuid7()), "owner": person, "enrolled": now},
    )
    for n in range(SHARES["receipts"]):
        said = {
            "day": date.today().isoformat(),
            "first": 10 * n + 1,
            "last": 10 * n + 10,
            "tokens": 600_000,
        }
        writing.append_event(
            "credit.receipt", f"{run}:{name}:{INCARNATION}", said | {"witness": None}
        )


def change(each: float, seconds: float, which: int) -> dict[str, Any]:
    """Of the `which`-th 200 machines one gets another name every `each` seconds. Number and commit of each event."""
    machines, commits = list(Machine.objects.order_by("pk")[200 * which : 200 * which + 200]), []
    ours = LogEvent.objects.filter(origin__ours=True, type="machine.about").order_by("seq")
    before, began = ours.count(), time.monotonic()
    for n in range(int(seconds / each)):
        time.sleep(max(0.0, began + n * each - time.monotonic()))
        machines[n % len(machines)].rename(f"machine {n}")
        commits.append(time.time())
    rate = len(commits) / (time.monotonic() - began)
    return {
        "changes": list(zip(ours.values_list("seq", flat=True)[before:], commits, strict=True)),
        "rate": rate,
    }


def growth() -> dict[str, Any]:
    """A day of one worker whose updates another's machine witnesses: receipts as `telemetry.tell` tells them, every
    half hour."""
    key, witness = identity("worker", 0), Machine.objects.get(key=identity("worker", 3).key)
    run, before, size = (
        Run.objects.get(owner__email="owner@example.org"),
        LogEvent.objects.count(),
        _size(),
    )
    row = Credit.objects.create(
        run=run, machine=Machine.objects.get(key=key.key), incarnation=LIFE, day=date.today(), first=1, last=0,
        tokens=0, witness=witness,
    )  # fmt: skip
    for n in range(1, TELLS + 1):
        head = messages.Update(run=str(run.pk), peer=key.key, incarnation=LIFE, seq=10 * n, previous=NO_DIGEST,
                           tokens=60_000, total=600_000 * n, fragments=[])  # fmt: skip
        said = key.sign("update", head).model_dump()
        Credit.objects.filter(pk=row.pk).update(last=10 * n, tokens=600_000 * n, head=said)
        credits.record_credit_events()
    fresh = LogEvent.objects.filter(aggregate=f"credit:{run.pk}:{key.key}:{LIFE}")
    text = sum(
        len(body) + len(signature) for body, signature in fresh.values_list("body", "signature")
    )
    return {
        "log_events_per_worker_day": fresh.count(),
        "log_bytes_per_worker_day": text,
        "disk_bytes_per_event": round(size / before),
    }


def _size() -> int:
    """Bytes on disk of all events, their indexes included."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_total_relation_size('eventlog_logevent')")
        return cursor.fetchone()[0]
