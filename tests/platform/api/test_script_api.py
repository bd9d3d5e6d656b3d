"""Test the API for scripts: tokens with scopes, permissions, limits and the OpenAPI document."""

import importlib.util
import json
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone
from helpers.site.pages import open_client
from helpers.site.script_client import ALL_SCOPES, problem

from barnraise.protocol import coordinator_messages
from coordinator.api import authentication
from coordinator.audit.models import AuditEntry
from coordinator.runs.invitations import RunInvitation
from coordinator.tokens.models import TOKEN_PREFIX, Token

pytestmark = pytest.mark.django_db
UNKNOWN_ID = "01890000-0000-7000-8000-0000000000aa"


# ---- tokens --------------------------------------------------------------------------------


def test_token_is_described_and_its_text_is_not_stored(script):
    ada = script(scopes=["runs:read"])
    about = ada.send_request("GET", "/me").json()
    assert about["scopes"] == ["runs:read"] and about["token"] == "script"
    rows = [*Token.objects.values(), *AuditEntry.objects.values()]
    assert ada.text.startswith(TOKEN_PREFIX) and len(ada.text) > 40
    assert ada.text not in json.dumps(rows, default=str)
    assert Token.objects.get().last_used


@pytest.mark.parametrize("text", ["", "brn_" + "x" * 43, "nonsense", "é", "brn_\0", "x" * 5000])
def test_wrong_token_is_refused(script, text):
    response = script().send_request("GET", "/me", text=text)
    assert response.status_code == 401 and response["WWW-Authenticate"]


def test_token_revoked_expired_or_of_inactive_user_is_refused(script, person):
    revoked, expired, banned = (script(person(f"{n}@example.org")) for n in range(3))
    revoked.token.revoke()
    Token.objects.filter(pk=expired.token.pk).update(expires=timezone.now() - timedelta(seconds=1))
    banned.token.user.is_active = False
    banned.token.user.save()
    for client in (revoked, expired, banned):
        assert client.send_request("GET", "/me").status_code == 401


def test_signature_and_token_do_not_replace_each_other(
    script, launched_run, person, numbered_report
):
    run, machine = launched_run(person("owner@example.org"))
    assert machine.send_request("GET", "/me").status_code == 401
    assert machine.send_request("POST", f"/runs/{run.slug}/actions/pause").status_code == 401
    reports = coordinator_messages.Reports(reports=[numbered_report(1)]).model_dump(mode="json")
    response = script(run.owner).send_request("POST", f"/runs/{run.slug}/reports", reports)
    assert response.status_code == 401


def test_wrong_tokens_are_rate_limited_without_blocking_valid_ones(script, monkeypatch):
    monkeypatch.setattr(authentication, "MAX_FAILURES", 3)
    ada = script()
    statuses = [ada.send_request("GET", "/me", text=f"brn_{n}").status_code for n in range(5)]
    assert statuses == [401, 401, 401, 429, 429]
    assert ada.send_request("GET", "/me").status_code == 200, "the same address, a valid token"


def test_token_with_too_many_requests_is_limited_alone(script, person, monkeypatch):
    monkeypatch.setattr(authentication, "MAX_TOKEN_REQUESTS", 3)
    ada = script()
    bob = script(person("bob@example.org"))
    statuses = [ada.send_request("GET", "/me").status_code for _ in range(5)]
    assert statuses == [200] * 3 + [429] * 2
    assert "this token" in problem(ada.send_request("GET", "/me")).error
    assert bob.send_request("GET", "/me").status_code == 200


# ---- route × role --------------------------------------------------------------------------

WRONG_SCOPES = {  # scope of a route → another one, which does not suffice
    "runs:read": "machines:write",
    "runs:write": "runs:read",
    "machines:read": "runs:write",
    "machines:write": "machines:read",
}
ROUTES = [  # method, path, body, scope, status for a stranger, status for the owner
    ("GET", "/me", None, "", 200, 200),
    ("GET", "/runs", None, "runs:read", 200, 200),
    ("POST", "/runs", {"name": "New"}, "runs:write", 200, 200),
    ("GET", "/runs/{run}", None, "runs:read", 200, 200),
    ("GET", "/runs/{draft}", None, "runs:read", 404, 200),
    ("GET", "/runs/{run}/summary", None, "runs:read", 200, 200),
    ("GET", "/runs/{draft}/summary", None, "runs:read", 404, 200),
    ("GET", "/runs/{run}/machines", None, "runs:read", 200, 200),
    ("GET", "/runs/{run}/history", None, "runs:read", 200, 200),
    ("GET", "/runs/{draft}/history", None, "runs:read", 404, 200),
    ("GET", "/runs/{run}/checkpoints", None, "runs:read", 200, 200),
    ("GET", "/runs/{run}/verdicts", None, "runs:read", 200, 200),
    ("GET", "/runs/{draft}/verdicts", None, "runs:read", 404, 200),
    ("POST", "/runs/{run}/verdicts", {"author": "nobody", "first": 3}, "runs:write", 403, 422),
    ("POST", f"/runs/{{run}}/verdicts/{UNKNOWN_ID}/sign", None, "runs:write", 403, 404),
    ("GET", "/runs/{run}/credit", None, "runs:read", 200, 200),
    ("GET", "/runs/{draft}/credit", None, "runs:read", 404, 200),
    ("POST", "/runs/{run}/actions/pause", None, "runs:write", 403, 200),
    ("POST", "/runs/{run}/actions/resume", None, "runs:write", 403, 409),
    ("POST", "/runs/{draft}/actions/launch", None, "runs:write", 404, 200),
    ("POST", "/runs/{run}/actions/finish", None, "runs:write", 403, 200),
    ("POST", "/runs/{run}/copies", {}, "runs:write", 200, 200),
    ("POST", "/runs/{draft}/copies", {}, "runs:write", 404, 200),
    ("PATCH", "/runs/{run}/terms", {"notes": "x"}, "runs:write", 403, 200),
    ("GET", "/runs/{run}/invitations", None, "runs:read", 403, 200),
    ("POST", "/runs/{run}/invitations", {"note": "x"}, "runs:write", 403, 200),
    ("DELETE", "/runs/{run}/invitations/{invitation}", None, "runs:write", 403, 200),
    ("DELETE", "/runs/{run}/invitations/" + UNKNOWN_ID, None, "runs:write", 403, 404),
    ("POST", "/estimates", {}, "runs:read", 200, 200),
    ("GET", "/machines", None, "machines:read", 200, 200),
    ("GET", "/machines/{machine}", None, "machines:read", 404, 200),
    ("PATCH", "/machines/{machine}", {"name": "attic"}, "machines:write", 404, 200),
    ("POST", "/machines/{machine}/actions/pause", None, "machines:write", 404, 200),
    ("POST", "/machines/{machine}/actions/resume", None, "machines:write", 404, 409),
    ("POST", "/machines/{machine}/actions/revoke", None, "machines:write", 404, 200),
]


@dataclass(frozen=True)
class World:
    """The owner of a run, another person, and the values of the parameters in the table's paths."""

    owner: Any
    stranger: Any
    path_values: dict[str, Any]


@pytest.fixture
def world(person, launched_run, draft) -> World:
    run, volunteer = launched_run(person("owner@example.org"))
    path_values = {
        "run": run.slug,
        "draft": draft(run.owner, name="draft").slug,
        "machine": volunteer.machine.pk,
        "invitation": RunInvitation.create(run).pk,
    }
    return World(run.owner, person("eve@example.org"), path_values)


def test_script_route_status_depends_on_the_role(script, world, undo):
    """Compare the statuses for a session of the pages, a narrow token, a stranger and the owner."""
    wrong = {}
    for method, path, body, scope, stranger_status, owner_status in ROUTES:
        address = path.format(**world.path_values)
        narrow = [WRONG_SCOPES[scope]] if scope else ALL_SCOPES
        tokens = ((world.owner, narrow), (world.stranger, ALL_SCOPES), (world.owner, ALL_SCOPES))
        with undo():
            session = open_client(world.owner)
            no_token = session.generic(
                method, f"/api/v1{address}", json.dumps(body or {}), content_type="application/json"
            )
            statuses = [no_token.status_code]
            for person, scopes in tokens:
                answer = script(person, scopes).send_request(method, address, body)
                statuses.append(answer.status_code)
        if statuses != [401, 403 if scope else 200, stranger_status, owner_status]:
            wrong[method, path] = statuses
    assert not wrong


def test_every_api_route_is_in_a_table_of_statuses(client, db):
    """The routes of workers are in the table of test_authentication."""
    spec = importlib.util.spec_from_file_location(
        "test_authentication", Path(__file__).with_name("test_authentication.py")
    )
    workers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(workers)

    parameter_values = {
        "0" * 32,
        "launched",
        "draft",
        "none",
        "BCDF-GHJK",
        UNKNOWN_ID,
        "pause",
        "resume",
        "launch",
        "finish",
        "revoke",
    }

    def pattern(path: str) -> str:
        parts = path.split("/")
        return "/".join(
            "*" if part.startswith("{") or part in parameter_values else part for part in parts
        )

    covered = {(method, pattern(path)) for method, path, *_ in [*workers.TABLE, *ROUTES]}
    covered.add(("POST", "/enrolments"))
    document = client.get("/api/v1/openapi.json").json()
    for path, operations in document["paths"].items():
        for method in operations:
            route = (method.upper(), pattern(path.removeprefix("/api/v1")))
            assert route in covered, f"{method} {path} has no row"


@pytest.mark.parametrize("after", ["1", "x" * 300, "%00"])
def test_machine_list_with_invalid_cursor_is_refused(script, after):
    assert script().send_request("GET", f"/machines?after={after}").status_code == 422


# ---- the OpenAPI document ------------------------------------------------------------------


def test_openapi_documents_errors_and_examples_of_all_operations(client, db):
    document = client.get("/api/v1/openapi.json").json()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            where = f"{method} {path}"
            assert operation.get("description") and operation.get("tags"), where
            assert {"200", "401", "404", "422", "429", "503"} <= set(operation["responses"]), where
    # `EstimateOut` has examples of the first two; `RunPage` is a message of the workers' protocol.
    without_example = ("NeedOut", "PaceOut", "RunPage")
    for name, schema in document["components"]["schemas"].items():
        if name.endswith(("In", "Out", "Page")) and name not in without_example:
            assert schema.get("examples"), f"{name} has no example"


# ---- the page of tokens --------------------------------------------------------------------


def test_token_page_shows_a_new_token_once_and_revokes_it(person, valkey):
    client = Client()
    assert client.get("/account/tokens/").status_code == 302
    client.force_login(person())
    response = client.post("/account/tokens/", {"name": "nightly", "days": "9999"})
    assert response.status_code == 422
    assert b"Choose at least one permission" in response.content
    assert b'value="9999"' in response.content, "the field retains its input"
    fields = {"name": "<b>nightly", "days": "30", "scopes": ["runs:read"]}
    page = client.post("/account/tokens/", fields)
    token = Token.objects.get()
    text = page.content.decode().split(f'<code tabindex="0">{TOKEN_PREFIX}')[1].split("<")[0]
    assert Token.find_by_text(TOKEN_PREFIX + text) == token and "no-store" in page["Cache-Control"]
    html = client.get("/account/tokens/").content.decode()
    assert text not in html and "&lt;b&gt;nightly" in html and token.begins in html
    stranger = open_client(person("eve@example.org"))
    assert stranger.post(f"/account/tokens/{token.pk}/").status_code == 404
    assert client.post(f"/account/tokens/{token.pk}/").status_code == 302
    token.refresh_from_db()
    assert token.revoked and not token.is_valid


def test_token_page_limits_the_tokens_of_a_person(person, monkeypatch, valkey):
    monkeypatch.setattr("coordinator.web.token_views.MAX_TOKENS", 1)
    client = open_client(person())
    fields = {"name": "one", "days": "30", "scopes": ["runs:read"]}
    assert client.post("/account/tokens/", fields).status_code == 200
    response = client.post("/account/tokens/", fields)
    assert response.status_code == 422 and b"revoke one first" in response.content
    assert Token.objects.count() == 1
