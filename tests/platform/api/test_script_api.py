"""Test the API for scripts: tokens with scopes, runs, machines, cursors, limits and errors."""

import importlib.util
import json
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from barnraise.protocol import coordinator_messages
from coordinator.accounts.site_settings import SiteSettings
from coordinator.api import authentication, lookups
from coordinator.audit.models import AuditEntry
from coordinator.fleet.machine_state import HardwareMeasurement, MachinePause
from coordinator.runs.invitations import RunInvitation
from coordinator.runs.models import Run
from coordinator.telemetry.checkpoints import Checkpoint
from coordinator.tokens.models import SCOPES, TOKEN_PREFIX, Token

pytestmark = pytest.mark.django_db
ALL_SCOPES = list(SCOPES)
UNKNOWN_ID = "01890000-0000-7000-8000-0000000000aa"


class Script:
    """A script that sends requests with a new token of `user`."""

    def __init__(self, user, scopes=ALL_SCOPES, days: int = 30):
        self.token, self.text = Token.create(user, "script", scopes, days)
        self.client = Client(raise_request_exception=False)

    def send_request(self, method: str, path: str, body=None, text: str | None = None, **headers):
        """Send a request and return the response; every error response must be a problem.

        Args:
            method: The HTTP method.
            path: The path below /api/v1.
            body: The body: bytes, or what is sent as JSON.
            text: The token to send instead of this script's own.
            headers: Other headers.
        """
        content = b"" if body is None else body
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
        headers = {"Authorization": f"Bearer {self.text if text is None else text}", **headers}
        response = self.client.generic(
            method, f"/api/v1{path}", content, content_type="application/json", headers=headers
        )
        if response.status_code >= 400:
            problem(response)
        return response


@pytest.fixture
def script(person, valkey):
    """Return a function that creates a script of a person, by default a new one."""

    def create(user=None, scopes=ALL_SCOPES, **options) -> Script:
        return Script(user or person(), scopes, **options)

    return create


def problem(response) -> coordinator_messages.Problem:
    return coordinator_messages.Problem.model_validate_json(response.content)


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
    wrong = {}
    for method, path, body, scope, stranger_status, owner_status in ROUTES:
        address = path.format(**world.path_values)
        scopes = [WRONG_SCOPES[scope]] if scope else ALL_SCOPES
        expected = {
            "nobody": 401,
            "narrow": 403 if scope else 200,
            "stranger": stranger_status,
            "owner": owner_status,
        }
        with undo():
            anonymous = Client().generic(
                method, f"/api/v1{address}", json.dumps(body or {}), content_type="application/json"
            )
            narrow, stranger, owner = (
                script(person, allowed).send_request(method, address, body).status_code
                for person, allowed in (
                    (world.owner, scopes),
                    (world.stranger, ALL_SCOPES),
                    (world.owner, ALL_SCOPES),
                )
            )
        statuses = {
            "nobody": anonymous.status_code,
            "narrow": narrow,
            "stranger": stranger,
            "owner": owner,
        }
        if statuses != expected:
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


# ---- runs and machines ---------------------------------------------------------------------


def test_script_creates_launches_cancels_and_archives_a_run(script, launched_run):
    ada = script()
    body = {
        "name": "  Night\u202e shift ",
        "preset": "gpt2-124m",
        "fields": {
            "recipe.token_budget": 1e6,
            "recipe.learning_rate": "3e-4",
            "text.source": "urls",
            "text.places": ["https://example.org/a.txt"],
            "model.context": "256",
        },
        "terms": {"min_memory": 10**9},
        "launch": True,
    }
    created = ada.send_request("POST", "/runs", body).json()
    run = Run.objects.get(slug=created["slug"])
    assert created["name"] == "Night shift", "surrounding spaces and control characters are removed"
    assert created["status"] == "draft" and created["launch_requested"]
    assert created["spec"]["text"]["places"] == ["https://example.org/a.txt"]
    assert created["url"] == f"http://testserver/runs/{run.slug}/", "the address that was asked"
    assert run.spec.recipe.learning_rate == 3e-4 and run.spec.recipe.codec == "auto"
    assert run.spec.model.context == 256 and run.min_memory == 10**9
    actions = f"/runs/{run.slug}/actions"
    second_launch = ada.send_request("POST", f"{actions}/launch")
    assert second_launch.status_code == 409 and "cannot launch" in problem(second_launch).error
    assert ada.send_request("POST", f"{actions}/cancel").json()["status"] == "cancelled"
    assert ada.send_request("POST", f"{actions}/archive").json()["archived"]
    assert AuditEntry.objects.filter(subject_id=str(run.pk), actor=ada.token.user).count() == 4


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"name": ""}, "name"),
        ({"name": "\u202e"}, "name"),
        ({"name": "x", "preset": "gpt9"}, "model"),
        ({"name": "x", "fields": {"model.heads": 5}}, "model.heads"),
        ({"name": "x", "fields": {"model.colour": 5}}, "model.colour"),
        ({"name": "x", "fields": {"model.layers": []}}, "model.layers"),
        ({"name": "x", "fields": {"text.places": 5}}, "text.places"),
        ({"name": "x", "fields": {"recipe.strategy": "all-reduce"}}, "recipe.strategy"),
        ({"name": "x", "fields": {"recipe.token_budget": "1e400"}}, "recipe.token_budget"),
        (
            {"name": "x", "fields": {"text.source": "urls", "text.places": ["http://10.0.0.1/"]}},
            "text.places",
        ),
        ({"name": "x", "terms": {"min_memory": -1}}, "asked.terms.min_memory"),
        ({"name": "x", "terms": {"access": "nobody"}}, "asked.terms.access"),
        ({"name": "x", "terms": {"notes": "x" * 20_001}}, "asked.terms.notes"),
        ({"name": "x", "quorum": 0}, "asked.quorum"),
        ({"name": "x", "report_every": "NaN"}, "asked.report_every"),
    ],
)
def test_invalid_run_is_refused_at_its_field(script, body, field):
    response = script().send_request("POST", "/runs", body)
    assert response.status_code == 422, response.content
    fields = problem(response).fields
    assert field in fields or field.removeprefix("asked.") in fields, fields
    assert not Run.objects.exists()


def test_script_of_person_who_may_not_create_runs_is_refused(script, person, launched_run):
    run, _ = launched_run(person("owner@example.org"))
    SiteSettings.set_organisers("granted", run.owner)
    ada = script()
    for path, body in (("/runs", {"name": "x"}), (f"/runs/{run.slug}/copies", {})):
        response = ada.send_request("POST", path, body)
        assert response.status_code == 403 and "organisers" in problem(response).error


def test_terms_update_changes_only_the_given_fields(script, launched_run, person):
    run, _ = launched_run(person())
    ada = script(run.owner)
    path = f"/runs/{run.slug}/terms"
    ada.send_request("PATCH", path, {"access": "invitation", "min_memory": 5})
    terms = ada.send_request("PATCH", path, {"notes": "*hi*"}).json()
    assert (terms["access"], terms["min_memory"], terms["notes"]) == ("invitation", 5, "*hi*")


def test_script_creates_and_revokes_an_invitation(script, launched_run, person):
    run, _ = launched_run(person())
    ada = script(run.owner)
    path = f"/runs/{run.slug}/invitations"
    invitation = ada.send_request("POST", path, {"note": "chess"}).json()
    token = invitation["url"].rstrip("/").rsplit("/", 1)[1]
    assert RunInvitation.find_by_token(token).run == run
    assert ada.send_request("DELETE", f"{path}/{invitation['id']}").status_code == 200
    assert ada.send_request("GET", path).json() == []


def test_pages_of_a_list_contain_every_row_exactly_once(
    script, launched_run, volunteer, person, monkeypatch
):
    monkeypatch.setattr(lookups, "PAGE", 2)
    run, first = launched_run(person())
    machines = [first, *(volunteer(run.owner, seed) for seed in range(2, 7))]
    for machine in machines[1:]:
        machine.join(run)
    ada = script(run.owner)
    for path in (f"/runs/{run.slug}/machines", "/machines"):
        ids = []
        cursor = ""
        for _ in range(3):
            page = ada.send_request("GET", path + cursor).json()
            ids += [item["id"] for item in page["items"]]
            cursor = f"?after={page['next']}"
        assert page["next"] is None
        assert sorted(ids) == sorted(str(machine.machine.pk) for machine in machines)


@pytest.mark.parametrize("after", ["1", "x" * 300, "%00"])
def test_machine_list_with_invalid_cursor_is_refused(script, after):
    assert script().send_request("GET", f"/machines?after={after}").status_code == 422


def test_script_reads_machines_checkpoints_and_an_estimate(
    script, launched_run, person, golden_hardware
):
    run, machine = launched_run(person())
    HardwareMeasurement.record(machine.machine, golden_hardware)
    Checkpoint.objects.create(
        run=run, tokens=9, vector="a" * 64, digest="b" * 64, checksum="c" * 16, size=4
    )
    ada = script(run.owner)
    (checkpoint,) = ada.send_request("GET", f"/runs/{run.slug}/checkpoints").json()
    assert checkpoint["digest"] == "b" * 64
    assert not checkpoint["confirmed"] and checkpoint["machines"] == 0
    (member,) = ada.send_request("GET", f"/runs/{run.slug}/machines").json()["items"]
    assert member["alive"] and member["name"] == "pc-1"
    path = f"/machines/{machine.machine.pk}"
    assert ada.send_request("GET", path).json()["hardware"]["device_memory"] == 12 << 30
    body = {"preset": "gpt3-175b", "volunteers": 100}
    estimate = ada.send_request("POST", "/estimates", body).json()
    assert "does not fit" in estimate["needs"][0]["refusal"] and estimate["parameters"] > 170e9
    assert ada.send_request("POST", "/estimates", {"fields": {"model.heads": 5}}).status_code == 422
    assert ada.send_request("POST", f"{path}/actions/pause").json()["paused"]
    assert MachinePause.objects.get().by == run.owner


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
    stranger = Client()
    stranger.force_login(person("eve@example.org"))
    assert stranger.post(f"/account/tokens/{token.pk}/").status_code == 404
    assert client.post(f"/account/tokens/{token.pk}/").status_code == 302
    token.refresh_from_db()
    assert token.revoked and not token.is_valid


def test_token_page_limits_the_tokens_of_a_person(person, monkeypatch, valkey):
    monkeypatch.setattr("coordinator.web.token_views.MAX_TOKENS", 1)
    client = Client()
    client.force_login(person())
    fields = {"name": "one", "days": "30", "scopes": ["runs:read"]}
    assert client.post("/account/tokens/", fields).status_code == 200
    response = client.post("/account/tokens/", fields)
    assert response.status_code == 422 and b"revoke one first" in response.content
    assert Token.objects.count() == 1
