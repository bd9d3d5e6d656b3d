"""Somebody at one mirror of a drill who decides things there: a JSON line in, a JSON line out.

Runs and their settings go through the mirror's own web server, by a personal token; accounts and bans through the
methods that its pages call. Each answer names the events that this mirror has signed since the last one: what was
accepted here, and must be everywhere in the end. Ends with its input. Runs in `manage.py shell`.
"""

import io
import json
import secrets
import sys
import time

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
from coordinator.celery import app as tasks
from coordinator.credit.models import Credit
from coordinator.eventlog import hlc, ingest, writer
from coordinator.eventlog.event import NO_DIGEST, Event, open_event
from coordinator.eventlog.models import Aggregate, ForkProof, LogEvent, Origin
from coordinator.eventlog.projection import state_hash
from coordinator.fleet.models import Membership
from coordinator.lib import site_identity
from coordinator.lib.exceptions import UserError
from coordinator.replication import mirror_list
from coordinator.runs.models import Run
from coordinator.runs.spec_form import spec_from_fields
from coordinator.tokens.models import Token

EXPECTED = (UserError, DatabaseError, redis.exceptions.RedisError, httpx.HTTPError, CommandError, BarnraiseError,
            ObjectDoesNotExist, LookupError, ValueError)  # fmt: skip
OWNER = "owner@drill.example.org"
SCOPES = ["runs:read", "runs:write"]


class Clerk:
    def __init__(self) -> None:
        self.told: dict[str, int] = {}  # log of ours → the last number that was named
        self.http: httpx.Client | None = None

    # ---- people, runs, bans, settings

    def people(self, names: list[str]) -> dict:
        """The drill's organiser, staff, and volunteers that its machines will belong to."""
        made = {}
        for name in ("owner", *names):
            out = io.StringIO()
            call_command("prepare_owner", email=f"{name}@drill.example.org", password=secrets.token_hex(12),
                         name=name, staff=name == "owner", stdout=out)  # fmt: skip
            made[name] = out.getvalue().strip()
        return {"people": made}

    def token(self) -> dict:
        """The owner's, for what goes through the web server. Superuser is each site's own word."""
        owner = User.objects.get(email=OWNER)
        User.objects.filter(pk=owner.pk).update(is_superuser=True)
        _, text = Token.create(owner, "drill", SCOPES, 1)
        self.http = httpx.Client(
            base_url=f"{settings.SITE_URL}/api/v1",
            timeout=10,
            headers={"Authorization": f"Bearer {text}"},
        )
        return {}

    def account(self, name: str) -> dict:
        person = User.objects.create_user(f"{name}@drill.example.org", None, name=name)
        return {"person": str(person.pk)}

    def rename(self, person: str, name: str) -> dict:
        return {"changed": User.objects.get(pk=person).rename(name)}

    def ban(self, person: str) -> dict:
        return {
            "changed": User.objects.get(pk=person).ban(User.objects.get(email=OWNER), "a drill")
        }

    def unban(self, person: str) -> dict:
        return {"changed": User.objects.get(pk=person).unban(User.objects.get(email=OWNER))}

    def run(self, name: str) -> dict:
        return {"run": self._web("POST", "/runs", {"name": name})["id"]}

    def settings(self, run: str, gigabytes: float) -> dict:
        self._web("PATCH", f"/runs/{run}/terms", {"least_memory": int(gigabytes * 1e9)})
        return {}

    def act(self, run: str, action: str) -> dict:
        return {"status": self._web("POST", f"/runs/{run}/actions/{action}", None)["status"]}

    def _web(self, method: str, path: str, body: dict | None) -> dict:
        assert self.http is not None
        answer = self.http.request(method, path, json=body)
        if answer.status_code != 200:
            raise ValueError(f"{answer.status_code}: {answer.text[:300]}")
        return answer.json()

    # ---- the run that is trained

    def launch(self, name: str, fields: dict, owner: str) -> dict:
        run = Run.create(
            User.objects.get(pk=owner), name, spec_from_fields(fields), report_every=1.0
        )
        run.launch()
        return {"run": str(run.pk), "slug": run.slug}

    def approve(self, owners: dict[str, str]) -> dict:
        """Machines that wait for a person, by what they are called."""
        waiting = Enrolment.objects.filter(
            decision=Enrolment.Decision.PENDING, expires__gt=timezone.now()
        )
        for each in waiting:
            each.approve(User.objects.get(pk=owners[each.about["hostname"]]))
        return {}

    def members(self, run: str) -> dict:
        """Key → (seconds since its last report here, what it does), of those that reported here."""
        now = timezone.now()
        found = Membership.objects.filter(run=run, latest__gt=0).select_related("machine")
        return {
            "members": {
                m.machine.key: [(now - m.last_seen).total_seconds(), m.activity] for m in found
            }
        }

    def launched(self, run: str) -> dict:
        found = Run.objects.filter(pk=run).first()
        return {"status": found.status if found and found.spec_text else None}

    def credit(self, run: str) -> dict:
        """Key and life → [tokens, the last update]."""
        rows = Credit.objects.filter(run=run).values_list(
            "machine__key", "incarnation", "tokens", "last"
        )
        found: dict[str, list[int]] = {}
        for key, life, tokens, last in rows:
            sums = found.setdefault(f"{key}.{life}", [0, 0])
            sums[:] = sums[0] + tokens, max(sums[1], last)
        return {
            "credit": found,
            "sum": Credit.objects.filter(run=run).aggregate(sum=Sum("tokens"))["sum"] or 0,
        }

    # ---- the log

    def news(self) -> list[str]:
        """Digests of what this mirror's key signed since the last time."""
        fresh = []
        for origin in Origin.objects.filter(ours=True):
            found = LogEvent.objects.filter(
                origin=origin, seq__gt=self.told.get(origin.pk, 0)
            ).order_by("seq")
            for seq, name in found.values_list("seq", "digest"):
                self.told[origin.pk] = seq
                fresh.append(name)
        return fresh

    def lacks(self, digests: list[str]) -> dict:
        """Which of these are not here, accepted and worked out."""
        stale = Aggregate.objects.filter(stale=True)
        held = LogEvent.objects.filter(digest__in=digests, accepted=True, understood=True).exclude(
            subject__in=stale.values("name")
        )
        return {"lacks": sorted(set(digests) - set(held.values_list("digest", flat=True)))}

    def rows(self) -> dict:
        """What pages would show of all that was changed: one digest over people, machines, runs. Of somebody whom only
        a withdrawn event spoke of a shut row stays where that event was believed: those are nobody's."""
        people = User.objects.exclude(
            email__endswith="@elsewhere.invalid", is_active=False
        ).order_by("pk")
        told = [
            list(people.values_list("pk", "email", "name", "is_active", "organiser", "is_staff")),
            list(Machine.objects.order_by("pk").values_list("pk", "owner", "hostname", "revoked")),
            list(
                Run.objects.order_by("pk").values_list(
                    "pk", "slug", "name", "status", "least_memory", "owner"
                )
            ),
        ]
        return {
            "rows": digest(json.dumps(told, default=str)),
            "counts": [len(each) for each in told],
        }

    def state(self) -> dict:
        return {"state": state_hash(), "off": writer.clock_offset()}

    def stamped(self) -> dict:
        """Return by how many seconds this mirror's last stamp is ahead of `at` (seconds since 1970)."""
        origin = Origin.objects.get(ours=True)
        return {
            "hlc": hlc.to_seconds(origin.head_hlc),
            "clock": time.time(),
            "off": writer.clock_offset(),
        }

    def celery(self) -> dict:
        """Whether this mirror's Celery has come up, and answers."""
        return {"works": bool(tasks.control.ping(timeout=2.0))}

    # ---- what a mirror must not believe

    def sample(self) -> dict:
        """The newest event of another mirror's log."""
        found = (
            LogEvent.objects.filter(accepted=True)
            .exclude(key=site_identity.identity().key)
            .order_by("-hlc")
            .first()
        )
        return {"signed": found.signed.model_dump()}

    def receive(self, signed: list[dict]) -> dict:
        """As a pull hands over what came: checked against the mirrors of the list, whole or not at all."""
        events = [Signed.model_validate(each) for each in signed]
        keys = (
            mirror_list.trusted_keys(open_event(events[0]).origin) if len(signed) else frozenset()
        )
        told = ingest.ingest_events(events, keys=keys)
        return {
            "stored": told.stored,
            "refused": list(told.rejected.values()),
            "forked": told.forked,
        }

    def altered(self, signed: dict) -> dict:
        """Another word in it, under the same signature; never opened here."""
        told = ingest.ingest_events([Signed.model_validate(signed)])
        return {"stored": told.stored, "refused": list(told.rejected.values())}

    def forge(self) -> dict:
        """A log by a key that no list names."""
        return {
            "signed": [each.model_dump() for each in _log(Identity(secrets.token_bytes(32)), 2)]
        }

    def equivocate(self) -> dict:
        """Another log by this mirror's true key, with two second events."""
        key, origin = site_identity.identity(), secrets.token_hex(16)
        first = _log(key, 2, origin)
        second = _log(key, 2, origin, first[:1])
        return {
            "one": [e.model_dump() for e in first],
            "other": [e.model_dump() for e in second],
            "origin": origin,
        }

    def proofs(self) -> dict:
        return {"origins": list(ForkProof.objects.values_list("origin_id", flat=True))}


def _log(
    key: Identity, length: int, origin: str = "", begun: list[Signed] | None = None
) -> list[Signed]:
    """The first events of a log: it begins, and makes up people."""
    origin, made = origin or secrets.token_hex(16), list(begun or [])
    while len(made) < length:
        who = str(uuid7())
        about = {
            "about": digest(who),
            "joined": timezone.now().isoformat(),
            "organiser": False,
            "is_staff": True,
        }
        said = ("person.join", f"person:{who}", about)
        if not made:
            said = ("origin.begin", f"origin:{origin}", {"name": "a drill's", "after": None})
        event = Event(
            id=str(uuid7()), origin=origin, seq=len(made) + 1, prev=digest(made[-1].body) if made else NO_DIGEST,
            hlc=hlc.next_stamp(open_event(made[-1]).hlc if made else 0, time.time()), type=said[0], aggregate=said[1],
            payload=said[2],
        )  # fmt: skip
        made.append(key.sign("event", event))
    return made


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # nothing else is to be read as an answer
    clerk = Clerk()
    for line in sys.stdin:
        asked = json.loads(line)
        number, do = asked.pop("number"), asked.pop("do")
        close_old_connections()
        try:
            said = {"ok": True, **getattr(clerk, do)(**asked)}
            said["events"] = clerk.news()
        except EXPECTED as error:
            said = {"ok": False, "error": f"{type(error).__name__}: {error}"[:300]}
            connection.close()
        print(json.dumps({"number": number, **said}), file=answers, flush=True)
