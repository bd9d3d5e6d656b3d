"""Who may ask, and what the API says to those who may not."""

import json
import time

import pytest
from django.test import Client

from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.errors import CoordinatorError
from barnraise.protocol import coordinator_messages
from barnraise.protocol.signing import Identity, open_signed
from coordinator.api import authentication
from coordinator.lib import embedded_servers, site_identity

pytestmark = pytest.mark.django_db


def problem(answer) -> coordinator_messages.Problem:
    return coordinator_messages.Problem.model_validate_json(answer.content)


def test_a_signed_request_is_heard_once(person, volunteer):
    ada = volunteer(person())
    token = ada.identity.sign_request(ada.mirror_key, "GET", "/api/v1/runs", b"", time.time())
    assert ada.send_request("GET", "/runs", token=token).status_code == 200
    again = ada.send_request("GET", "/runs", token=token)
    assert again.status_code == 401 and "made before" in problem(again).error


def test_who_replays_a_machines_request_does_not_keep_the_machine_out(
    person, volunteer, monkeypatch
):
    monkeypatch.setattr(authentication, "MAX_MACHINE_REQUESTS", 3)
    ada = volunteer(person())
    token = ada.identity.sign_request(ada.mirror_key, "GET", "/api/v1/runs", b"", time.time())
    answers = [ada.send_request("GET", "/runs", token=token).status_code for _ in range(8)]
    assert answers == [200] + [401] * 7
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
def test_a_signature_for_anything_else_is_refused_and_told_the_time(person, volunteer, changed):
    answer = volunteer(person()).send_request("GET", "/runs", **changed)
    assert answer.status_code == 401
    told = open_signed(
        problem(answer).time,
        "time",
        coordinator_messages.ServerTime,
        key=site_identity.identity().key,
    )
    assert abs(told.time - time.time()) < 5


def test_a_body_changed_on_the_way_is_refused(person, launched_run, numbered_report):
    run, ada = launched_run(person())
    sent = coordinator_messages.Reports(reports=[numbered_report(1)])
    forged = (
        coordinator_messages.Reports(reports=[numbered_report(1, tokens=10**9)])
        .model_dump_json()
        .encode()
    )
    answer = ada.send_request(
        "POST", f"/runs/{run.slug}/reports", sent, sent=forged, body=sent.model_dump_json().encode()
    )
    assert answer.status_code == 401


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("off", [-7200.0, 90 * 86400.0])
def test_a_worker_with_a_wrong_clock_learns_the_servers_time(live_server, person, volunteer, off):
    ada = volunteer(person())
    client = CoordinatorClient(
        live_server.url, ada.identity, ada.mirror_key, clock=lambda: time.time() + off
    )
    assert client.fetch_runs().runs == []
    assert abs(client.now() - time.time()) < 5
    client.close()


@pytest.mark.django_db(transaction=True)
def test_a_time_that_is_not_the_mirrors_is_not_believed(live_server, person, volunteer):
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
    stranger = ada.send_request("GET", "/runs")
    assert stranger.status_code == 401 and "barnraise login" in problem(stranger).error
    bob = volunteer(person("bob@example.org"), 2)
    assert bob.machine.revoke() and not bob.machine.revoke()
    refused = bob.send_request("GET", "/runs")
    assert refused.status_code == 403 and "revoked" in problem(refused).error


# ---- route × role ----------------------------------------------------------------------------------------------

ROLES = ["nobody", "stranger", "revoked", "another", "owner"]
SEEN = [200] * 5
MACHINES = [401, 401, 403, 200, 200]
TABLE = [
    ("GET", "/mirror", None, SEEN),
    ("GET", "/enrolments/BCDF-GHJK", None, [404] * 5),
    ("GET", "/runs", None, MACHINES),
    ("GET", "/runs/launched", None, MACHINES),
    ("GET", "/runs/draft", None, [401, 401, 403, 404, 200]),
    ("GET", "/runs/none", None, [401, 401, 403, 404, 404]),
    ("POST", "/runs/launched/join", "join", MACHINES),
    ("POST", "/runs/draft/join", "join", [401, 401, 403, 404, 200]),
    ("GET", "/runs/launched/directive", None, [401, 401, 403, 403, 200]),
    ("GET", "/runs/draft/directive", None, [401, 401, 403, 404, 403]),
    ("POST", "/runs/launched/manifest", "manifest", [401, 401, 403, 403, 409]),
    ("POST", "/runs/draft/manifest", "manifest", [401, 401, 403, 404, 200]),
    ("POST", "/runs/launched/reports", "reports", [401, 401, 403, 403, 200]),
    ("POST", "/runs/draft/reports", "reports", [401, 401, 403, 404, 403]),
    ("GET", "/mirrors/list", None, [200] * 5),
    (
        "GET",
        "/mirrors/heads",
        None,
        [401, 403, 403, 403, 403],
    ),  # mirrors' alone: see test_answering
    ("GET", f"/mirrors/logs/{'0' * 32}", None, [401, 403, 403, 403, 403]),
    ("GET", "/mirrors/fork-evidence", None, [401, 403, 403, 403, 403]),
    ("POST", "/mirrors/private-data", None, [401, 403, 403, 403, 403]),
    ("POST", "/mirrors/change-notice", None, [401, 403, 403, 403, 403]),
    ("POST", "/mirrors/news", None, [401, 403, 403, 403, 403]),
    ("POST", "/mirrors/used-codes", None, [401, 403, 403, 403, 403]),
]


@pytest.mark.parametrize(
    ("method", "path", "body", "expected"), TABLE, ids=[f"{m} {p}" for m, p, _, _ in TABLE]
)
def test_each_route_knows_who_may(
    person, volunteer, draft, launched_run, manifest, numbered_report, method, path, body, expected
):
    run, owner = launched_run(person(), name="launched")
    unlaunched = draft(run.owner, name="draft")
    about = unlaunched if "draft" in path else run
    revoked = volunteer(person("bob@example.org"), 2)
    revoked.machine.revoke()
    another = volunteer(person("eve@example.org"), 3)
    stranger = volunteer(another.machine.owner, 4)
    stranger.machine.delete()
    found = []
    for who in (None, stranger, revoked, another, owner):
        message = {
            None: None,
            "join": coordinator_messages.JoinRequest(version="1", addresses=[]),
            "reports": coordinator_messages.Reports(reports=[numbered_report(1)]),
            "manifest": (who or owner).identity.sign("manifest", manifest(about, vocabulary=2048)),
        }[body]
        if who:
            found.append(who.send_request(method, path, message).status_code)
        else:
            content = message.model_dump_json() if message else b""
            answer = Client().generic(
                method, "/api/v1" + path, content, content_type="application/json"
            )
            found.append(answer.status_code)
    if body == "manifest" and about is run:  # the very text the run has is no news, and no error
        assert found[-1] in (200, 409)
        found[-1] = expected[-1]
    assert dict(zip(ROLES, found, strict=True)) == dict(zip(ROLES, expected, strict=True))


def test_staff_who_enrol_a_machine_do_not_lend_it_their_eyes(person, volunteer, draft):
    draft(person(), name="draft")
    root = volunteer(person("root@example.org", is_staff=True), 2)
    assert root.send_request("GET", "/runs/draft").status_code == 404


# ---- nonsense --------------------------------------------------------------------------------------------------


def test_every_refusal_of_the_api_is_a_problem(client, db):
    for method, path, status in [
        ("GET", "/api/v1/nowhere", 404),
        ("GET", "/api/v2/runs", 404),
        ("DELETE", "/api/v1/mirror", 405),
        ("POST", "/api/v1/enrolments", 400),
        ("GET", "/api/v1/runs", 401),
    ]:
        answer = client.generic(method, path, b"{", content_type="application/json")
        assert answer.status_code == status, path
        assert problem(answer).error
    answer = client.get("/api/v1/mirror", headers={"Host": "evil.example"})
    assert answer.status_code == 400 and problem(answer).error


@pytest.mark.parametrize(
    ("report", "field"),
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
def test_a_senseless_report_is_refused_at_its_field(
    person, launched_run, numbered_report, valkey, report, field
):
    run, ada = launched_run(person())
    body = json.dumps({"reports": [numbered_report(1).model_dump(mode="json") | report]}).encode()
    answer = ada.send_request("POST", f"/runs/{run.slug}/reports", sent=body, body=body)
    assert answer.status_code == 422
    assert field in problem(answer).fields, problem(answer)
    assert not valkey.exists("reports:pending")


def test_reports_out_of_order_too_many_or_too_long_are_refused(
    person, launched_run, numbered_report
):
    run, ada = launched_run(person())
    assert ada.report(run, numbered_report(2), numbered_report(1)).status_code == 422
    path = f"/runs/{run.slug}/reports"
    many = (
        b'{"reports":['
        + b",".join(numbered_report(i + 1).model_dump_json().encode() for i in range(51))
        + b"]}"
    )
    assert ada.send_request("POST", path, sent=many, body=many).status_code == 422
    long = b" " * (1 << 21)
    assert ada.send_request("POST", path, sent=long, body=long).status_code == 413
    empty = b'{"reports":[]}'
    assert ada.send_request("POST", path, sent=empty, body=empty).status_code == 422


@pytest.mark.parametrize("after", ["1", "x" * 300, "00000000-0000-0000-0000-00000000000g", "%00"])
def test_a_senseless_page_is_refused(person, volunteer, after):
    answer = volunteer(person()).send_request("GET", f"/runs?after={after}")
    assert answer.status_code == 422 and "after" in problem(answer).fields


# ---- outages ---------------------------------------------------------------------------------------------------


def test_without_valkey_the_api_says_so_and_then_goes_on(
    person, launched_run, numbered_report, state
):
    run, ada = launched_run(person())
    embedded_servers.stop_valkey(state)
    try:
        answer = ada.report(run, numbered_report(1))
        assert answer.status_code == 503
        assert "try again" in problem(answer).error
        assert answer["Retry-After"]
    finally:
        embedded_servers.start(state, durable=False)
    assert ada.report(run, numbered_report(1)).status_code == 200


@pytest.mark.django_db(transaction=True)
def test_without_postgres_the_api_says_so_and_then_goes_on(person, volunteer, state):
    from django.db import connection

    ada = volunteer(person())
    connection.close()
    embedded_servers.stop_postgres(state)
    try:
        answer = ada.send_request("GET", "/runs")
        assert answer.status_code == 503
        assert "try again" in problem(answer).error
    finally:
        embedded_servers.start(state, durable=False)
        connection.close()
    assert ada.send_request("GET", "/runs").status_code == 200


def test_pages_say_503_too_when_the_database_is_gone(rf):
    from django.db import OperationalError

    from coordinator.ops.error_pages import server_error

    try:
        raise OperationalError("the connection was closed")
    except OperationalError:
        assert server_error(rf.get("/runs/")).status_code == 503
    try:
        raise KeyError("ours")
    except KeyError:
        assert server_error(rf.get("/runs/")).status_code == 500
