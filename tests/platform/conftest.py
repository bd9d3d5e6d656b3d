"""Provide people, machines with real keys, runs with real manifests, and another mirror.

The tests run against a real Postgres and a real Valkey.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from django.conf import settings
from django.db import transaction
from django.test import Client
from django.utils import timezone
from helpers.mirrors.event_log_builder import LogBuilder, NotePayload
from helpers.mirrors.fake_mirror import FakeMirror
from helpers.paths import GOLDEN
from helpers.site.pages import open_client
from helpers.site.remote_telemetry import EXCHANGE
from helpers.site.second_factor import add_authenticator_app

from barnraise.protocol import coordinator_messages, enums, types
from barnraise.protocol import reports as reports_module
from barnraise.protocol.signing import Identity, digest
from coordinator.eventlog import registry


class Volunteer:
    """Hold an enrolled machine and its key, and sign requests as the machine would."""

    def __init__(self, machine, identity: Identity, mirror_key: str):
        self.machine = machine
        self.identity = identity
        self.mirror_key = mirror_key
        self.client = Client()

    def send_request(
        self, method: str, path: str, message: types.Message | None = None, /, **changed
    ):
        """Send a signed request and return the response.

        Args:
            method: The HTTP method.
            path: The path below /api/v1.
            message: The body.
            changed: What to sign instead of the true values (`method`, `path`, `body`, `audience`,
                `now`), a raw `token` instead of the signature, or raw `sent` bytes as the body.
        """
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
            # Every refusal is a Problem.
            coordinator_messages.Problem.model_validate_json(answer.content)
        return answer

    def request_join(self, run, **changed):
        """Request to join the run, with `changed` fields, and return the response."""
        fields = {"version": "0.1", "addresses": ["127.0.0.1:4000"], **changed}
        request = coordinator_messages.JoinRequest(**fields)
        return self.send_request("POST", f"/runs/{run.slug}/join", request)

    def join(self, run) -> coordinator_messages.JoinReply:
        """Join the run and return the site's answer."""
        answer = self.request_join(run)
        assert answer.status_code == 200, answer.content
        return coordinator_messages.JoinReply.model_validate_json(answer.content)

    def post_manifest(self, run, document: coordinator_messages.TextManifest):
        """Sign and send the manifest of the run's text, and return the response."""
        signed = self.identity.sign("manifest", document)
        return self.send_request("POST", f"/runs/{run.slug}/manifest", signed)

    def report(self, run, *reports: reports_module.Report):
        """Send reports about the run and return the response."""
        return self.send_request(
            "POST", f"/runs/{run.slug}/reports", coordinator_messages.Reports(reports=list(reports))
        )

    def store_reports(self, run, *reports: reports_module.Report) -> None:
        """Send reports about the run, and let the site store them."""
        from coordinator.telemetry.rollup import drain_queue

        answer = self.report(run, *reports)
        assert answer.status_code == 200, answer.content
        drain_queue(wait=True)


@pytest.fixture(autouse=True)
def empty_ttl_caches():
    """Empty all in-process caches before each test."""
    from coordinator.lib import heartbeats
    from coordinator.lib.ttl_cache import TtlCache

    TtlCache.clear_all()
    heartbeats.forget()


@pytest.fixture
def valkey(state):
    """Empty this process's Valkey database; the live site uses another one.

    No Celery runs, so its heartbeats lie ahead: otherwise the pages of a slow test would say that
    figures are delayed.
    """
    return empty_valkey()


def empty_valkey():
    """Empty Valkey but for heartbeats, and return its client."""
    from coordinator.lib import heartbeats
    from coordinator.lib.valkey import valkey_client

    valkey_client().flushdb()
    valkey_client().hset(
        heartbeats.KEY, mapping={part.value: time.time() + 3600 for part in heartbeats.Part}
    )
    return valkey_client()


@pytest.fixture
def undo(db, valkey):
    """Return a function for `with`: what happens inside leaves no trace in databases and caches."""
    from coordinator.lib.ttl_cache import TtlCache

    @contextmanager
    def undo_all() -> Iterator[None]:
        with transaction.atomic():
            yield
            transaction.set_rollback(True)
        empty_valkey()
        TtlCache.clear_all()

    return undo_all


@pytest.fixture
def long_caches(valkey, monkeypatch):
    """Cache until the end of the test what is cached for seconds.

    A busy machine may need longer than that to serve a page twice, and the second page would have
    the queries of the first.
    """
    from django.core.cache import cache

    from coordinator.lib import ttl_cache

    stopped_clock = SimpleNamespace(monotonic=lambda: 0.0)
    ttl_cache.TtlCache.clear_all()
    monkeypatch.setattr(ttl_cache, "time", stopped_clock)
    monkeypatch.setattr(cache, "get_backend_timeout", lambda _timeout: 3600)
    yield
    ttl_cache.TtlCache.clear_all()
    valkey.flushdb()


@pytest.fixture
def person(db):
    """Return a function that creates a person."""
    from coordinator.accounts.models import User

    def create(email: str = "ada@example.org", **fields) -> User:
        user = User.objects.create_user(email, "wooden-barn-9", **fields)
        if user.is_staff:
            add_authenticator_app(user)
        return user

    return create


@pytest.fixture
def signed_in(person):
    """Return a function that creates a person and returns (a signed-in client, the person)."""

    def create(email: str = "ada@example.org", **fields) -> tuple[Client, object]:
        user = person(email, **fields)
        return open_client(user), user

    return create


@pytest.fixture
def built_frontend():
    """Require a built frontend, because pages name its files."""
    assert (settings.DIST / "manifest.json").exists(), "build the frontend first: make setup"


@pytest.fixture
def volunteer(db, valkey):
    """Return a function that enrols a machine of a person."""
    from coordinator.accounts.models import Machine
    from coordinator.lib import site_identity

    def enrol(owner, seed: int = 1) -> Volunteer:
        identity = Identity(bytes([seed]) * 32)
        machine = Machine.objects.create(
            key=identity.key, owner=owner, hostname=f"pc-{seed}", confirmed=timezone.now()
        )
        return Volunteer(machine, identity, site_identity.identity().key)

    return enrol


@pytest.fixture
def machine_requests() -> type[Volunteer]:
    """Return the class that signs requests as a machine that is enrolled already would."""
    return Volunteer


@pytest.fixture
def draft(db):
    """Return a function that creates a draft run of a person."""
    from coordinator.runs.drafts import NewRun
    from coordinator.runs.models import Run
    from coordinator.runs.spec_form import spec_from_fields

    def create(owner, name: str = "A run", spec=None, **fields) -> Run:
        spec = spec or spec_from_fields({"recipe.token_budget": 100_000, "seed": 7})
        return Run.create(owner, NewRun(name, spec, **{"report_every": 1.0, **fields}))

    return create


@pytest.fixture
def manifest():
    """Return a function that builds a manifest for a run; fields given replace the right ones."""

    def build(run, /, **changed) -> coordinator_messages.TextManifest:
        shards = {
            "train": [coordinator_messages.Shard(digest=digest("a"), tokens=9_000)],
            "held_out": [coordinator_messages.Shard(digest=digest("b"), tokens=900)],
        }
        fields = {
            "run": str(run.pk),
            "vocabulary": run.spec.model.vocabulary,
            "tokenizer": digest("t"),
            "prompts": [[1] for _ in run.spec.prompts],
            **shards,
        }
        return coordinator_messages.TextManifest(**{**fields, **changed})

    return build


@pytest.fixture
def launched_run(draft, manifest, volunteer):
    """Return a function that launches a run with its text, as requests of a machine would.

    It returns the run, which is training, and its owner's volunteer.
    """
    from coordinator.fleet.directives import renew_ticket
    from coordinator.fleet.join import admit_machine
    from coordinator.fleet.lifecycle_facts import advance_run

    def launch(owner, seed: int = 1, **fields):
        run = draft(owner, **fields)
        first = volunteer(owner, seed)
        run.launch()
        signed = first.identity.sign("manifest", manifest(run))
        assert run.accept_manifest(signed, machine=first.machine)
        advance_run(run)
        request = coordinator_messages.JoinRequest(version="0.1", addresses=["127.0.0.1:4000"])
        renew_ticket(admit_machine(run, first.machine, request, "127.0.0.1"), always=True)
        advance_run(run)
        assert run.state is enums.RunStatus.TRAINING
        return run, first

    return launch


@pytest.fixture
def adas_run(person, launched_run):
    """Return a run in training and its owner's machine."""
    return launched_run(person())


@pytest.fixture
def strangers(person, volunteer):
    """Return a function that enrols machines of as many people and lets them join a run."""

    def join(run, *seeds: int) -> list[Volunteer]:
        machines = [volunteer(person(f"{seed}@example.org"), seed) for seed in seeds]
        for machine in machines:
            machine.join(run)
        return machines

    return join


@pytest.fixture
def shared_run(adas_run, person, volunteer):
    """Return a run in training, its owner's machine and the machine of Bob, which joined it."""
    run, ada = adas_run
    bob = volunteer(person("bob@example.org"), 2)
    bob.join(run)
    return run, ada, bob


@pytest.fixture
def plan() -> reports_module.PlanView:
    """Return the plan of the golden report."""
    return (
        coordinator_messages.Reports.model_validate_json((GOLDEN / "reports.json").read_text())
        .reports[0]
        .plan
    )


@pytest.fixture
def numbered_report():
    """Return a function that builds a plausible report; every count grows with `seq`."""

    def build(seq: int, **changed) -> reports_module.Report:
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

    return build


@pytest.fixture
def golden_hardware() -> reports_module.HardwareView:
    """Return the hardware of the golden request to join: a PC with a 12 GB GPU."""
    return coordinator_messages.JoinRequest.model_validate_json(
        (GOLDEN / "join_request.json").read_text()
    ).hardware


@pytest.fixture
def run_queued_tasks(valkey):
    """Return a function that runs all queued Celery tasks in this process, and counts them."""
    from queue import Empty

    from coordinator.celery import app

    def run_all() -> int:
        count = 0
        with app.connection_for_read() as broker, broker.SimpleQueue("celery") as queue:
            while True:
                try:
                    message = queue.get_nowait()
                except Empty:
                    return count
                args, kwargs, _ = message.payload
                app.tasks[message.headers["task"]].apply(args, kwargs, throw=True)
                message.ack()
                count += 1

    return run_all


@pytest.fixture
def log() -> LogBuilder:
    """Return the log of another mirror, with ten events."""
    builder = LogBuilder()
    for n in range(9):
        builder.append("weather.seen", n, {"rain": n})
    return builder


@pytest.fixture
def note_rows():
    """Register the aggregate type "note" and yield its rows, a dictionary.

    A note's newest text counts. A note with the text "wait" cannot be stored before the note
    "other".
    """
    rows: dict[str, str] = {}

    def fold(facts):
        return {"text": facts[-1].payload.text}

    def store(name, state):
        if state and state["text"] == "wait" and "other" not in rows:
            raise registry.DependencyMissingError("note:other")
        rows.pop(name, None)
        if state:
            rows[name] = state["text"]

    note_type = registry.AggregateType("note", {"write": NotePayload}, fold, store)
    with registry.registered_temporarily(note_type):
        yield rows


@pytest.fixture
def fake_mirror(log):
    """Yield a mirror that serves this log over HTTP; the current list names it and this site."""
    mirror = FakeMirror(log)
    mirror.publish_list()
    yield mirror
    mirror.close()


@pytest.fixture
def training_run(person, launched_run, volunteer, numbered_report, plan):
    """Return (run, two volunteers), both of whom have sent three reports."""
    run, ada = launched_run(person())
    bob = volunteer(person("bob@example.org", name="Bob"), seed=2)
    bob.join(run)
    same = {"vector": digest("vector"), "anchor": digest("weights")}
    for seq in (1, 2, 3):
        point = reports_module.MeasuredLoss(kind="validation", tokens=seq * 1000, loss=4.0)
        ada.store_reports(
            run,
            numbered_report(
                seq, plan=plan, step_seconds=5.0, exchange=EXCHANGE, points=[point], **same
            ),
        )
        bob.store_reports(run, numbered_report(seq, rate=300.0, ledger_tokens=seq * 1000, **same))
    return run, ada, bob
