"""Test who may use the API of workers, and what others are answered."""

import json
import time
from dataclasses import dataclass
from typing import Any

import pytest
from helpers.site.pages import open_client
from helpers.site.script_client import problem

from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.errors import CoordinatorError
from barnraise.protocol import checkups, coordinator_messages, evaluation
from barnraise.protocol.signing import Identity, open_signed
from coordinator.api import authentication
from coordinator.lib import site_identity
from coordinator.lib.embedded import embedded_servers, postgres_server, valkey_server

pytestmark = pytest.mark.django_db


def test_signed_request_is_accepted_once(person, volunteer):
    ada = volunteer(person())
    token = ada.identity.sign_request(ada.mirror_key, "GET", "/api/v1/runs", b"", time.time())
    assert ada.send_request("GET", "/runs", token=token).status_code == 200
    replay = ada.send_request("GET", "/runs", token=token)
    assert replay.status_code == 401 and "made before" in problem(replay).error


def test_replayed_requests_do_not_use_up_the_machines_limit(person, volunteer, monkeypatch):
    monkeypatch.setattr(authentication, "MAX_MACHINE_REQUESTS", 3)
    ada = volunteer(person())
    token = ada.identity.sign_request(ada.mirror_key, "GET", "/api/v1/runs", b"", time.time())
    statuses = [ada.send_request("GET", "/runs", token=token).status_code for _ in range(8)]
    assert statuses == [200] + [401] * 7
    assert [ada.send_request("GET", "/runs").status_code for _ in range(3)] == [200, 200, 429]


@pytest.mark.parametrize(
    "changed",
    [
        {"method": "POST"},
        {"path": "/api/v1/runs/other"},
        {"path": "/api/v1/runs?after=1"},
        {"body": b"something else"},
        {"audience": "0" * 64},
        {"token": "nonsense"},
        {"token": "a.b.c"},
        {"token": "é" * 5},
        {"now": 0},
    ],
)
def test_wrong_signature_is_refused_with_the_servers_time(person, volunteer, changed):
    response = volunteer(person()).send_request("GET", "/runs", **changed)
    assert response.status_code == 401
    server_time = open_signed(
        problem(response).time,
        "time",
        coordinator_messages.ServerTime,
        key=site_identity.identity().key,
    )
    assert abs(server_time.time - time.time()) < 5


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("offset", [-7200.0, 90 * 86400.0])
def test_client_with_wrong_clock_adopts_the_servers_time(live_server, person, volunteer, offset):
    ada = volunteer(person())
    client = CoordinatorClient(
        live_server.url, ada.identity, ada.mirror_key, clock=lambda: time.time() + offset
    )
    assert client.fetch_runs().runs == []
    assert abs(client.now() - time.time()) < 5
    client.close()


@pytest.mark.django_db(transaction=True)
def test_client_ignores_time_with_another_mirrors_signature(live_server, person, volunteer):
    ada = volunteer(person())
    client = CoordinatorClient(
        live_server.url, ada.identity, Identity(bytes(32)).key, clock=lambda: time.time() + 7200
    )
    with pytest.raises(CoordinatorError):
        client.fetch_runs()
    assert client.now() > time.time() + 7000
    client.close()


def test_signature_of_unknown_or_revoked_key_is_refused_with_reason(person, volunteer):
    ada = volunteer(person())
    ada.identity = Identity(b"\x09" * 32)
    unknown = ada.send_request("GET", "/runs")
    assert unknown.status_code == 401 and "barnraise login" in problem(unknown).error
    bob = volunteer(person("bob@example.org"), 2)
    assert bob.machine.revoke() and not bob.machine.revoke()
    revoked = bob.send_request("GET", "/runs")
    assert revoked.status_code == 403 and "revoked" in problem(revoked).error


# ---- route × role --------------------------------------------------------------------------

ROLES = ["nobody", "unknown", "revoked", "another", "owner"]
EVERYBODY = [200] * 5
MACHINES = [401, 401, 403, 200, 200]
MIRRORS = [401, 403, 403, 403, 403]  # test_answering tests these routes
TABLE = [  # method, path, name of the message, status for each role
    ("GET", "/mirror", None, EVERYBODY),
    ("GET", "/enrolments/BCDF-GHJK", None, [404] * 5),
    ("GET", "/worker", None, [404] * 5),  # the folder of its wheel is empty
    ("GET", "/runs/launched/summary", None, MACHINES),
    ("GET", "/runs/draft/summary", None, [401, 401, 403, 404, 200]),
    ("GET", "/runs/draft/history", None, [401, 401, 403, 404, 200]),
    ("GET", "/runs/draft/machines", None, [401, 401, 403, 404, 200]),
    ("GET", "/runs", None, MACHINES),
    ("GET", "/runs/launched", None, MACHINES),
    ("GET", "/runs/draft", None, [401, 401, 403, 404, 200]),
    ("GET", "/runs/none", None, [401, 401, 403, 404, 404]),
    ("POST", "/machine/checkup", "checkup", MACHINES),
    ("POST", "/invitations/accept", "invitation", [401, 401, 403, 404, 404]),
    ("POST", "/runs/launched/join", "join", MACHINES),
    ("POST", "/runs/draft/join", "join", [401, 401, 403, 404, 200]),
    ("GET", "/runs/launched/directive", None, [401, 401, 403, 403, 200]),
    ("GET", "/runs/draft/directive", None, [401, 401, 403, 404, 403]),
    ("POST", "/runs/launched/manifest", "manifest", [401, 401, 403, 403, 409]),
    ("POST", "/runs/draft/manifest", "manifest", [401, 401, 403, 404, 200]),
    ("DELETE", "/runs/launched/manifest", None, [401, 401, 403, 403, 409]),
    ("DELETE", "/runs/draft/manifest", None, [401, 401, 403, 404, 200]),
    ("GET", "/runs/launched/published", None, MACHINES),
    ("GET", "/runs/draft/published", None, [401, 401, 403, 404, 200]),
    ("POST", "/runs/launched/published", "texts", [401, 401, 403, 403, 200]),
    ("POST", "/runs/draft/published", "texts", [401, 401, 403, 404, 200]),
    ("POST", "/runs/launched/scores", "score", [401, 401, 403, 409, 409]),
    ("POST", "/runs/draft/scores", "score", [401, 401, 403, 404, 409]),
    ("POST", "/runs/launched/reports", "reports", [401, 401, 403, 403, 200]),
    ("POST", "/runs/draft/reports", "reports", [401, 401, 403, 404, 403]),
    ("GET", "/mirrors/list", None, EVERYBODY),
    ("GET", "/mirrors/heads", None, MIRRORS),
    ("GET", f"/mirrors/logs/{'0' * 32}", None, MIRRORS),
    ("GET", "/mirrors/fork-evidence", None, MIRRORS),
    ("POST", "/mirrors/private-data", None, MIRRORS),
    ("POST", "/mirrors/change-notice", None, MIRRORS),
    ("POST", "/mirrors/telemetry", None, MIRRORS),
    ("POST", "/mirrors/used-codes", None, MIRRORS),
]


@dataclass(frozen=True)
class World:
    """A launched run, a draft of the same owner, and a machine for each role but "nobody"."""

    run: Any
    draft: Any
    machines: dict[str, Any]


@pytest.fixture
def world(person, volunteer, draft, launched_run, settings, tmp_path) -> World:
    settings.WHEEL_DIR = tmp_path
    run, owner = launched_run(person(), name="launched")
    revoked = volunteer(person("bob@example.org"), 2)
    revoked.machine.revoke()
    another = volunteer(person("eve@example.org"), 3)
    unknown = volunteer(another.machine.owner, 4)
    unknown.machine.delete()
    machines = {"unknown": unknown, "revoked": revoked, "another": another, "owner": owner}
    return World(run, draft(run.owner, name="draft"), machines)


@pytest.fixture
def build_message(manifest, numbered_report):
    """Return a function that builds a message by its name in the table."""

    def build(name: str | None, signer: Identity, run):
        if name == "join":
            return coordinator_messages.JoinRequest(version="1", addresses=[])
        if name == "checkup":
            finding = checkups.CheckupFinding(subject="Python", level="ok", sentence="Python 3.11.")
            return checkups.Checkup(version="1", reach="direct", findings=[finding])
        if name == "invitation":
            return coordinator_messages.InvitationToken(token="a:b")
        if name == "reports":
            return coordinator_messages.Reports(reports=[numbered_report(1)])
        if name == "texts":
            return evaluation.PublishedTexts()
        if name == "score":
            return evaluation.TaskScore(tasks="a" * 64, tokens=1, correct=0, count=1)
        if name == "manifest":
            return signer.sign("manifest", manifest(run, vocabulary=2048))
        return None

    return build


def status_without_signature(method: str, path: str, message, owner) -> int:
    """Return the status for somebody who has no key but a session of the owner, on the pages."""
    body = message.model_dump_json() if message else b""
    client = open_client(owner)
    response = client.generic(method, f"/api/v1{path}", body, content_type="application/json")
    return response.status_code


def test_worker_route_status_depends_on_the_role(world, build_message, undo):
    wrong = {}
    for method, path, message_name, expected in TABLE:
        run = world.draft if "draft" in path else world.run
        statuses = []
        with undo():
            for role in ROLES:
                machine = world.machines.get(role)
                signer = (machine or world.machines["owner"]).identity
                message = build_message(message_name, signer, run)
                if machine:
                    statuses.append(machine.send_request(method, path, message).status_code)
                else:
                    statuses.append(status_without_signature(method, path, message, run.owner))
        if message_name == "manifest" and run is world.run:
            # The manifest that the run has already changes nothing and is no error.
            assert statuses[-1] in (200, 409)
            statuses[-1] = expected[-1]
        if statuses != list(expected):
            wrong[method, path] = dict(zip(ROLES, statuses, strict=True))
    assert not wrong


def test_machine_of_staff_cannot_see_drafts_of_others(person, volunteer, draft):
    draft(person(), name="draft")
    root = volunteer(person("root@example.org", is_staff=True), 2)
    assert root.send_request("GET", "/runs/draft").status_code == 404


# ---- invalid requests ----------------------------------------------------------------------


def test_every_error_response_of_the_api_is_a_problem(client, db):
    for method, path, status in [
        ("GET", "/api/v1/nowhere", 404),
        ("GET", "/api/v2/runs", 404),
        ("DELETE", "/api/v1/mirror", 405),
        ("POST", "/api/v1/enrolments", 400),
        ("GET", "/api/v1/runs", 401),
    ]:
        response = client.generic(method, path, b"{", content_type="application/json")
        assert response.status_code == status, path
        assert problem(response).error
    response = client.get("/api/v1/mirror", headers={"Host": "evil.example"})
    assert response.status_code == 400 and problem(response).error


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"seq": 0}, "reports.0.seq"),
        ({"seq": "one"}, "reports.0.seq"),
        ({"rate": -1}, "reports.0.rate"),
        ({"rate": "NaN"}, "reports.0.rate"),
        ({"at": 1e300}, "reports.0.at"),
        ({"tokens": 1 << 64}, "reports.0.tokens"),
        ({"activity": "sleeping"}, "reports.0.activity"),
        ({"points": [{"kind": "train", "tokens": 1, "loss": -1}]}, "reports.0.points.0.loss"),
        ({"addresses": ["<script>"]}, "reports.0.addresses.0"),
        ({"incarnation": "x"}, "reports.0.incarnation"),
        ({"vector": None}, "reports.0.vector"),
    ],
)
def test_invalid_report_is_refused_at_its_field(adas_run, numbered_report, valkey, changed, field):
    run, ada = adas_run
    report = numbered_report(1).model_dump(mode="json") | changed
    body = json.dumps({"reports": [report]}).encode()
    response = ada.send_request("POST", f"/runs/{run.slug}/reports", sent=body, body=body)
    assert response.status_code == 422
    assert field in problem(response).fields, problem(response)
    assert not valkey.exists("reports:pending")


def test_reports_out_of_order_too_many_or_too_long_are_refused(adas_run, numbered_report):
    run, ada = adas_run
    assert ada.report(run, numbered_report(2), numbered_report(1)).status_code == 422
    path = f"/runs/{run.slug}/reports"
    reports = ",".join(numbered_report(seq).model_dump_json() for seq in range(1, 52))
    too_many = f'{{"reports":[{reports}]}}'.encode()
    too_long = b" " * (1 << 21)
    empty = b'{"reports":[]}'
    for body, status in ((too_many, 422), (too_long, 413), (empty, 422)):
        assert ada.send_request("POST", path, sent=body, body=body).status_code == status


# ---- outages -------------------------------------------------------------------------------


def test_api_without_valkey_answers_503_until_it_is_back(adas_run, numbered_report, state):
    run, ada = adas_run
    valkey_server.stop_valkey(state)
    try:
        response = ada.report(run, numbered_report(1))
        assert response.status_code == 503
        assert "try again" in problem(response).error
        assert response["Retry-After"]
    finally:
        embedded_servers.start(state, durable=False)
    assert ada.report(run, numbered_report(1)).status_code == 200


@pytest.mark.integration
@pytest.mark.django_db(transaction=True)
def test_api_without_postgres_answers_503_until_it_is_back(person, volunteer, state):
    from django.db import connection

    ada = volunteer(person())
    connection.close()
    postgres_server.stop_postgres(state)
    try:
        response = ada.send_request("GET", "/runs")
        assert response.status_code == 503
        assert "try again" in problem(response).error
    finally:
        embedded_servers.start(state, durable=False)
        connection.close()
    assert ada.send_request("GET", "/runs").status_code == 200


def test_error_page_is_503_for_database_errors_else_500(rf):
    from django.db import OperationalError

    from coordinator.ops.error_pages import server_error

    try:
        raise OperationalError("the connection was closed")
    except OperationalError:
        assert server_error(rf.get("/runs/")).status_code == 503
    try:
        raise KeyError("another error")
    except KeyError:
        assert server_error(rf.get("/runs/")).status_code == 500
