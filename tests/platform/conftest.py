"""People, machines with real keys, runs with real manifests, another mirror: against a real Postgres and Valkey."""

import json
import time

import pytest
from django.conf import settings
from django.test import Client
from helpers.event_log_builder import LogBuilder, NotePayload
from helpers.fake_mirror import FakeMirror, local_entry
from helpers.mirror_lists import signed_list
from helpers.paths import GOLDEN
from helpers.remote_telemetry import EXCHANGE, report

from barnraise.protocol import coordinator_messages, enums, types
from barnraise.protocol import reports as reports_module
from barnraise.protocol.signing import Identity, digest
from coordinator.eventlog import registry
from coordinator.replication import mirror_list


class Volunteer:
    """An enrolled machine, its key, and a client that signs as it would."""

    def __init__(self, machine, identity: Identity, mirror_key: str):
        self.machine, self.identity, self.mirror_key = machine, identity, mirror_key
        self.client = Client()

    def ask(self, method: str, path: str, message: types.Message | None = None, /, **changed):
        """A signed request. `changed`: what is signed instead of the truth (method, path, body, audience, now), a raw
        `token`, or raw `sent` bytes."""
        path = "/api/v1" + path
        body = b"" if message is None else message.model_dump_json().encode()
        body = changed.get("sent", body)
        token = changed.get("token") or self.identity.sign_request(
            changed.get("audience", self.mirror_key),
            changed.get("method", method),
            changed.get("path", path),
            changed.get("body", body),
            changed.get("now", time.time()),
        )
        answer = self.client.generic(
            method,
            path,
            body,
            content_type="application/json",
            headers={"Authorization": f"Barnraise {token}"},
        )
        if answer.status_code >= 400:
            coordinator_messages.Problem.model_validate_json(
                answer.content
            )  # always, and never anything else
        return answer

    def join(self, run) -> coordinator_messages.JoinReply:
        asked = coordinator_messages.JoinRequest(version="0.1", addresses=["127.0.0.1:4000"])
        answer = self.ask("POST", f"/runs/{run.slug}/join", asked)
        assert answer.status_code == 200, answer.content
        return coordinator_messages.JoinReply.model_validate_json(answer.content)

    def report(self, run, *reports: reports_module.Report):
        return self.ask(
            "POST", f"/runs/{run.slug}/reports", coordinator_messages.Reports(reports=list(reports))
        )


@pytest.fixture(autouse=True)
def another_moment():
    """What one test looked up is not what the next one sees."""
    from coordinator.lib.ttl_cache import TtlCache

    TtlCache.clear_all()


@pytest.fixture
def valkey(state):
    """Empty this process's Valkey database; the live site uses another one."""
    from coordinator.lib.valkey import valkey_client

    valkey_client().flushdb()
    return valkey_client()


@pytest.fixture
def person(db, settings):
    """Passwords are hashed in no time: how slowly is Django's affair, not ours."""
    from coordinator.accounts.models import User

    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

    def make(email: str = "ada@example.org", **fields) -> User:
        return User.objects.create_user(email, "wooden-barn-9", **fields)

    return make


@pytest.fixture
def signed_in(person):
    """(a browser, the person who is signed in there)."""

    def make(email: str = "ada@example.org", **fields) -> tuple[Client, object]:
        client, user = Client(), person(email, **fields)
        client.force_login(user)
        return client, user

    return make


@pytest.fixture
def built():
    """Pages name the files of the frontend."""
    assert (settings.DIST / "manifest.json").exists(), "build the frontend first: make setup"


@pytest.fixture
def volunteer(db, valkey):
    from coordinator.accounts.models import Machine
    from coordinator.lib import site_identity

    def make(owner, seed: int = 1) -> Volunteer:
        identity = Identity(bytes([seed]) * 32)
        machine = Machine.objects.create(key=identity.key, owner=owner, hostname=f"pc-{seed}")
        return Volunteer(machine, identity, site_identity.identity().key)

    return make


@pytest.fixture
def draft(db):
    from coordinator.runs.models import Run
    from coordinator.runs.spec_form import spec_from_fields

    def make(owner, name: str = "A run", **fields) -> Run:
        spec = spec_from_fields({"recipe.token_budget": 100_000, "seed": 7})
        return Run.create(owner, name, spec, **{"report_every": 1.0, **fields})

    return make


@pytest.fixture
def manifest():
    """A manifest that fits a run, or would but for the fields given."""

    def make(run, /, **changed) -> coordinator_messages.TextManifest:
        shards = {
            "train": [coordinator_messages.Shard(digest=digest("a"), tokens=9_000)],
            "held_out": [coordinator_messages.Shard(digest=digest("b"), tokens=900)],
        }
        fields = {
            "run": str(run.pk),
            "vocabulary": run.spec.model.vocabulary,
            "tokenizer": digest("t"),
            **shards,
        }
        return coordinator_messages.TextManifest(**{**fields, **changed})

    return make


@pytest.fixture
def launched(draft, manifest, volunteer):
    """(run, the owner's volunteer): launched, with its text, and training."""

    def make(owner, seed: int = 1, **fields):
        run, first = draft(owner, **fields), volunteer(owner, seed)
        run.launch()
        answer = first.ask(
            "POST", f"/runs/{run.slug}/manifest", first.identity.sign("manifest", manifest(run))
        )
        assert answer.status_code == 200, answer.content
        first.join(run)
        from coordinator.fleet.lifecycle_facts import advance_run

        run.refresh_from_db()
        advance_run(run)
        assert run.state is enums.RunStatus.TRAINING
        return run, first

    return make


@pytest.fixture
def plan() -> reports_module.PlanView:
    """What a machine may decide, as the golden report tells it."""
    return (
        coordinator_messages.Reports.model_validate_json((GOLDEN / "reports.json").read_text())
        .reports[0]
        .plan
    )


@pytest.fixture
def numbers():
    """A report with plausible numbers: everything grows with `seq`."""

    def make(seq: int, **changed) -> reports_module.Report:
        fields = {
            "seq": seq,
            "at": time.time(),
            "version": "0.1",
            "activity": enums.Activity.TRAINING,
            "incarnation": "a" * 16,
            "addresses": ["127.0.0.1:4000"],
            "step": seq * 10,
            "tokens": seq * 1000,
            "ledger_tokens": seq * 1000,
            "rate": 500.0,
            "updates_sent": seq,
            "updates_received": 0,
            "peers": 0,
            "peer_bytes_sent": seq * 100,
            "peer_bytes_received": 0,
            "vector": digest(json.dumps(seq)),
            "points": [reports_module.MeasuredLoss(kind="train", tokens=seq * 1000, loss=5.0)],
        }
        return reports_module.Report(**{**fields, **changed})

    return make


@pytest.fixture
def golden_hardware() -> reports_module.HardwareView:
    """A PC with a 12 GB GPU, as the golden request to join tells it."""
    return coordinator_messages.JoinRequest.model_validate_json(
        (GOLDEN / "join_request.json").read_text()
    ).hardware


@pytest.fixture
def post(valkey):
    """Works off what was handed to Celery so far, in this process: the real queue, the real tasks."""
    from queue import Empty

    from coordinator.celery import app

    def work() -> int:
        done = 0
        with app.connection_for_read() as broker, broker.SimpleQueue("celery") as queue:
            while True:
                try:
                    message = queue.get_nowait()
                except Empty:
                    return done
                args, kwargs, _ = message.payload
                app.tasks[message.headers["task"]].apply(args, kwargs, throw=True)
                message.ack()
                done += 1

    return work


@pytest.fixture
def log() -> LogBuilder:
    """Ten events of another mirror."""
    made = LogBuilder()
    for n in range(9):
        made.append("weather.seen", n, {"rain": n})
    return made


@pytest.fixture
def shelf(monkeypatch):
    """A kind "note" whose rows are a dictionary; the last text counts, "wait" is never to be had."""
    rows: dict[str, str] = {}
    monkeypatch.setattr(registry, "_aggregate_types", dict(registry.aggregate_types()))

    def fold(facts):
        return {"text": facts[-1].payload.text}

    def store(which, known):
        if known and known["text"] == "wait" and "other" not in rows:
            raise registry.DependencyMissingError("note:other")
        rows.pop(which, None)
        if known:
            rows[which] = known["text"]

    registry.register(registry.AggregateType("note", {"say": NotePayload}, fold, store))
    return rows


@pytest.fixture
def small(log):
    """The mirror that keeps this log, over HTTP; the list in force names it and us."""
    made = FakeMirror(log)
    first = signed_list(1, local_entry(), made.list_entry)
    mirror_list.ingest_lists([first], vouched=first.digest)
    yield made
    made.close()


@pytest.fixture
def busy(person, launched, volunteer, numbers, plan):
    """(run, two volunteers), each of whom told a few reports."""
    run, ada = launched(person())
    bob = volunteer(person("bob@example.org", name="Bob"), seed=2)
    bob.join(run)
    same = {"vector": digest("vector"), "anchor": digest("weights")}
    for seq in (1, 2, 3):
        point = reports_module.MeasuredLoss(kind="validation", tokens=seq * 1000, loss=4.0)
        report(
            ada,
            run,
            numbers(seq, plan=plan, step_seconds=5.0, exchange=EXCHANGE, points=[point], **same),
        )
        report(bob, run, numbers(seq, rate=300.0, ledger_tokens=seq * 1000, **same))
    return run, ada, bob
