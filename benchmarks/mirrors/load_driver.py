"""Make changes and answer questions inside one mirror of a drill: a JSON line in, a JSON line out.

Runs and their settings go through the mirror's own web server, with a personal token; accounts and
bans through the methods that its pages call. Each reply names the events that this mirror has
signed since the last reply: they were accepted here, and must be at every mirror in the end. The
process ends with its input. It runs in `manage.py shell`.
"""

import io
import json
import secrets
import sys
import time
from typing import Any

import httpx
import redis.exceptions
from django.conf import settings
from django.core.exceptions import ObjectDoesNotExist
from django.core.management import CommandError, call_command
from django.db import DatabaseError, close_old_connections, connection
from django.db.models import Sum
from django.utils import timezone
from uuid6 import uuid7

from barnraise.errors import BarnraiseError
from barnraise.protocol.messages import Signed
from barnraise.protocol.signing import Identity, digest
from coordinator.accounts.models import Enrolment, Machine, User
from coordinator.celery import app as celery_app
from coordinator.credit.models import Credit
from coordinator.eventlog import hlc, ingest, writer
from coordinator.eventlog.event import NO_DIGEST, Event, open_event
from coordinator.eventlog.models import Aggregate, ForkProof, LogEvent, Origin
from coordinator.eventlog.projection import state_hash
from coordinator.fleet.models import Membership
from coordinator.lib import site_identity
from coordinator.lib.exceptions import UserError
from coordinator.replication import mirror_list
from coordinator.runs.drafts import NewRun
from coordinator.runs.models import Run
from coordinator.runs.spec_form import spec_from_fields
from coordinator.tokens.models import Token

EXPECTED_ERRORS = (
    UserError,
    DatabaseError,
    redis.exceptions.RedisError,
    httpx.HTTPError,
    CommandError,
    BarnraiseError,
    ObjectDoesNotExist,
    LookupError,
    ValueError,
)
DOMAIN = "drill.example.org"
OWNER = f"owner@{DOMAIN}"
SCOPES = ["runs:read", "runs:write"]
ANSWER_SECONDS = 60.0  # for the web server, which may be on a busy machine
Reply = dict[str, Any]


class LoadDriver:
    """Run the actions that a drill requests by name."""

    def __init__(self) -> None:
        self._reported: dict[str, int] = {}  # own log → the last number that a reply named
        self._http: httpx.Client | None = None

    # ---- people, runs, bans, settings

    def people(self, names: list[str]) -> Reply:
        """Create the drill's owner as staff, and the volunteers that own its machines."""
        people = {}
        for name in ("owner", *names):
            output = io.StringIO()
            call_command(
                "prepare_owner",
                email=f"{name}@{DOMAIN}",
                password=secrets.token_hex(12),
                name=name,
                staff=name == "owner",
                stdout=output,
            )
            people[name] = output.getvalue().strip()
        return {"people": people}

    def token(self) -> Reply:
        """Create the owner's token for requests to the web server.

        Whether somebody is a superuser is not replicated: each site decides it.
        """
        owner = User.objects.get(email=OWNER)
        User.objects.filter(pk=owner.pk).update(is_superuser=True)
        self._http = _create_client(owner)
        return {}

    def account(self, name: str) -> Reply:
        """Create an account."""
        person = User.objects.create_user(f"{name}@{DOMAIN}", None, name=name)
        return {"person": str(person.pk)}

    def rename(self, person: str, name: str) -> Reply:
        """Rename a person."""
        return {"changed": User.objects.get(pk=person).rename(name)}

    def ban(self, person: str) -> Reply:
        """Ban a person."""
        owner = User.objects.get(email=OWNER)
        return {"changed": User.objects.get(pk=person).ban(owner, "a drill")}

    def unban(self, person: str) -> Reply:
        """Lift a person's ban."""
        return {"changed": User.objects.get(pk=person).unban(User.objects.get(email=OWNER))}

    def run(self, name: str) -> Reply:
        """Create a run through the API."""
        return {"run": self._request("POST", "/runs", {"name": name})["id"]}

    def settings(self, run: str, gigabytes: float) -> Reply:
        """Change a run's minimum RAM through the API."""
        self._request("PATCH", f"/runs/{run}/terms", {"min_memory": int(gigabytes * 1e9)})
        return {}

    def control_run(self, run: str, command: str) -> Reply:
        """Pause, resume or cancel a run through the API, as its owner."""
        owner = Run.objects.get(pk=run).owner
        with _create_client(owner) as client:
            answer = _send_request(client, "POST", f"/runs/{run}/actions/{command}", None)
        return {"status": answer["status"]}

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> Reply:
        assert self._http is not None, "request a token first"
        return _send_request(self._http, method, path, body)

    # ---- the run that is trained

    def launch(self, name: str, fields: dict[str, Any], owner: str) -> Reply:
        """Create and launch the run that the drill's machines train."""
        person = User.objects.get(pk=owner)
        run = Run.create(person, NewRun(name, spec_from_fields(fields), report_every=1.0))
        run.launch()
        return {"run": str(run.pk), "slug": run.slug}

    def approve_machines(self, owners: dict[str, str]) -> Reply:
        """Approve all machines that wait for their owners.

        Args:
            owners: Host name of a machine → id of its owner.
        """
        waiting = Enrolment.objects.filter(
            decision=Enrolment.Decision.PENDING, expires__gt=timezone.now()
        )
        for enrolment in waiting:
            owner = User.objects.get(pk=owners[enrolment.description["hostname"]])
            enrolment.approve(owner).confirm(actor=owner)
        return {}

    def members(self, run: str) -> Reply:
        """Return key → (seconds since its last report, activity) of machines that reported here."""
        now = timezone.now()
        found = Membership.objects.filter(run=run, latest__gt=0).select_related("machine")
        members = {
            member.machine.key: [(now - member.last_seen).total_seconds(), member.activity]
            for member in found
        }
        return {"members": members}

    def run_status(self, run: str) -> Reply:
        """Return the run's status; None before its spec is fixed here."""
        found = Run.objects.filter(pk=run).first()
        return {"status": found.status if found and found.spec_text else None}

    def credit(self, run: str) -> Reply:
        """Return the sum of all credited tokens, and key.incarnation → [tokens, last update]."""
        rows = Credit.objects.filter(run=run)
        authors: dict[str, list[int]] = {}
        columns = ("machine__key", "incarnation", "tokens", "last")
        for key, incarnation, tokens, last in rows.values_list(*columns):
            sums = authors.setdefault(f"{key}.{incarnation}", [0, 0])
            sums[0] += tokens
            sums[1] = max(sums[1], last)
        return {"credit": authors, "sum": rows.aggregate(sum=Sum("tokens"))["sum"] or 0}

    # ---- the event log

    def new_events(self) -> list[str]:
        """Return the digests of the events that this mirror signed since the last call."""
        fresh = []
        for origin in Origin.objects.filter(ours=True):
            after = self._reported.get(origin.pk, 0)
            events = LogEvent.objects.filter(origin=origin, seq__gt=after).order_by("seq")
            for seq, name in events.values_list("seq", "digest"):
                self._reported[origin.pk] = seq
                fresh.append(name)
        return fresh

    def missing_events(self, digests: list[str]) -> Reply:
        """Return which of these events are not here, or not accepted, understood and folded."""
        stale = Aggregate.objects.filter(stale=True)
        applied = LogEvent.objects.filter(
            digest__in=digests, accepted=True, understood=True
        ).exclude(aggregate__in=stale.values("name"))
        return {"missing": sorted(set(digests) - set(applied.values_list("digest", flat=True)))}

    def rows(self) -> Reply:
        """Return one digest of the rows of people, machines and runs that pages would show.

        Staff rights are each site's own, a ban binds the mirror that decided it until half of the
        mirrors agree, and a name is what the person confirmed at a mirror: none of these counts.
        A person whom only a withdrawn event names remains as a closed account at the mirrors that
        had accepted that event; such rows do not count.
        """
        people = User.objects.exclude(email__endswith="@elsewhere.invalid", is_active=False)
        people_columns = ("pk", "email", "organiser")
        run_columns = ("pk", "slug", "name", "status", "min_memory", "owner")
        tables = [
            list(people.order_by("pk").values_list(*people_columns)),
            list(Machine.objects.order_by("pk").values_list("pk", "owner", "hostname", "revoked")),
            list(Run.objects.order_by("pk").values_list(*run_columns)),
        ]
        return {
            "rows": digest(json.dumps(tables, default=str)),
            "counts": [len(table) for table in tables],
        }

    def state(self) -> Reply:
        """Return the state hash, and by how many seconds the clock is off the other mirrors'."""
        return {"state": state_hash(), "offset": writer.clock_offset()}

    def clock(self) -> Reply:
        """Return this mirror's time and its last event's timestamp, in seconds since 1970."""
        origin = Origin.objects.get(ours=True)
        return {"event_time": hlc.to_seconds(origin.head_hlc), "time": time.time()}

    def celery(self) -> Reply:
        """Return whether this mirror's Celery answers."""
        return {"works": bool(celery_app.control.ping(timeout=2.0))}

    # ---- attacks

    def sample(self) -> Reply:
        """Return the newest event of another mirror's log."""
        others = LogEvent.objects.filter(accepted=True).exclude(key=site_identity.identity().key)
        newest = others.order_by("-hlc").first()
        if newest is None:
            raise LookupError("no event of another mirror is here")
        return {"signed": newest.signed.model_dump()}

    def receive(self, signed: list[dict[str, Any]]) -> Reply:
        """Ingest events as a pull does: all are checked, and stored together or not at all."""
        events = [Signed.model_validate(event) for event in signed]
        keys = mirror_list.trusted_keys(open_event(events[0]).origin) if events else frozenset()
        result = ingest.ingest_events(events, keys=keys)
        return {
            "stored": result.stored,
            "refused": list(result.rejected.values()),
            "forked": result.forked,
        }

    def receive_altered(self, signed: dict[str, Any]) -> Reply:
        """Ingest an event whose text was altered under the same signature."""
        result = ingest.ingest_events([Signed.model_validate(signed)])
        return {"stored": result.stored, "refused": list(result.rejected.values())}

    def forge_log(self) -> Reply:
        """Return a log by a key that no mirror list names."""
        events = _build_log(Identity(secrets.token_bytes(32)))
        return {"signed": [event.model_dump() for event in events]}

    def equivocate(self) -> Reply:
        """Return two versions of a new log by this mirror's own key; their second events differ."""
        key = site_identity.identity()
        origin = secrets.token_hex(16)
        first = _build_log(key, origin)
        second = _build_log(key, origin, first[:1])
        return {
            "first": [event.model_dump() for event in first],
            "second": [event.model_dump() for event in second],
            "origin": origin,
        }

    def fork_proofs(self) -> Reply:
        """Return the logs that fork according to this mirror's proofs."""
        return {"origins": list(ForkProof.objects.values_list("origin_id", flat=True))}


def _create_client(person: User) -> httpx.Client:
    """Return a client of this mirror's API with a new token of a person."""
    _, text = Token.create(person, "drill", SCOPES, 1)
    return httpx.Client(
        base_url=f"{settings.SITE_URL}/api/v1",
        timeout=ANSWER_SECONDS,
        headers={"Authorization": f"Bearer {text}"},
    )


def _send_request(
    client: httpx.Client, method: str, path: str, body: dict[str, Any] | None
) -> Reply:
    answer = client.request(method, path, json=body)
    if answer.status_code != 200:
        raise ValueError(f"{answer.status_code}: {answer.text[:300]}")
    return answer.json()


def _build_log(
    key: Identity, origin: str = "", start: list[Signed] | None = None, length: int = 2
) -> list[Signed]:
    """Sign the first events of a log: its beginning, then people who do not exist.

    Args:
        key: Signs the events.
        origin: Id of the log; "" for a random one.
        start: Events to continue.
        length: Number of events.
    """
    origin = origin or secrets.token_hex(16)
    events = list(start or [])
    while len(events) < length:
        person = str(uuid7())
        if events:
            event_type = "person.join"
            aggregate = f"person:{person}"
            payload = {
                "content_digest": digest(person),
                "joined": timezone.now().isoformat(),
                "organiser": False,
                "is_staff": True,
            }
        else:
            event_type = "origin.begin"
            aggregate = f"origin:{origin}"
            payload = {"name": "a drill's", "after": None}
        last_hlc = open_event(events[-1]).hlc if events else 0
        event = Event(
            id=str(uuid7()),
            origin=origin,
            seq=len(events) + 1,
            prev=digest(events[-1].body) if events else NO_DIGEST,
            hlc=hlc.next_stamp(last_hlc, time.time()),
            type=event_type,
            aggregate=aggregate,
            payload=payload,
        )
        events.append(key.sign("event", event))
    return events


def main() -> None:
    """Answer requests until the input ends."""
    output = sys.stdout
    sys.stdout = sys.stderr  # nothing else may be read as a reply
    driver = LoadDriver()
    for line in sys.stdin:
        request = json.loads(line)
        close_old_connections()
        try:
            reply = {"ok": True, **getattr(driver, request["action"])(**request["arguments"])}
            reply["events"] = driver.new_events()
        except EXPECTED_ERRORS as error:
            reply = {"ok": False, "error": f"{type(error).__name__}: {error}"[:300], "events": []}
            connection.close()
        print(json.dumps({"number": request["number"], **reply}), file=output, flush=True)
