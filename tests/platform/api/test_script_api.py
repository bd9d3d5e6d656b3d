"""The API for scripts: tokens with scopes that run out, the pages' own methods, cursors, limits, one error shape."""

import importlib.util
import json
from datetime import timedelta
from pathlib import Path

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
ALL = list(SCOPES)
NOBODY = "01890000-0000-7000-8000-0000000000aa"


class Script:
    """Asks with a token."""

    def __init__(self, user, scopes=ALL, days: int = 30):
        self.token, self.text = Token.create(user, "script", scopes, days)
        self.client = Client(raise_request_exception=False)

    def send_request(self, method: str, path: str, body=None, text: str | None = None, **headers):
        sent = (
            body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        )
        headers = {"Authorization": f"Bearer {self.text if text is None else text}", **headers}
        answer = self.client.generic(
            method, f"/api/v1{path}", sent, content_type="application/json", headers=headers
        )
        if answer.status_code >= 400:
            coordinator_messages.Problem.model_validate_json(
                answer.content
            )  # always, and never anything else
        return answer


@pytest.fixture
def script(person, valkey):
    def make(user=None, scopes=ALL, **more) -> Script:
        return Script(user or person(), scopes, **more)

    return make


def problem(answer) -> coordinator_messages.Problem:
    return coordinator_messages.Problem.model_validate_json(answer.content)


# ---- tokens --------------------------------------------------------------------------------------------------------


def test_a_token_says_whose_it_is_and_its_text_is_nowhere_in_the_database(script):
    ada = script(scopes=["runs:read"])
    told = ada.send_request("GET", "/me").json()
    assert told["scopes"] == ["runs:read"] and told["token"] == "script"
    kept = json.dumps(list(Token.objects.values()), default=str) + json.dumps(
        list(AuditEntry.objects.values()), default=str
    )
    assert ada.text.startswith(TOKEN_PREFIX) and len(ada.text) > 40 and ada.text not in kept
    assert Token.objects.get().last_used


@pytest.mark.parametrize("text", ["", "brn_" + "x" * 43, "nonsense", "é", "brn_\0", "x" * 5000])
def test_a_wrong_token_is_refused(script, text):
    answer = script().send_request("GET", "/me", text=text)
    assert answer.status_code == 401 and answer["WWW-Authenticate"]


def test_token_revoked_expired_or_of_inactive_user_is_refused(script, person):
    revoked, old, banned = (script(person(f"{n}@example.org")) for n in range(3))
    revoked.token.revoke()
    Token.objects.filter(pk=old.token.pk).update(expires=timezone.now() - timedelta(seconds=1))
    banned.token.user.is_active = False
    banned.token.user.save()
    for each in (revoked, old, banned):
        assert each.send_request("GET", "/me").status_code == 401


def test_a_machines_signature_opens_no_scripts_door_and_a_token_no_workers(
    script, launched_run, person, numbered_report
):
    run, machine = launched_run(person("owner@example.org"))
    assert machine.send_request("GET", "/me").status_code == 401
    assert machine.send_request("POST", f"/runs/{run.slug}/actions/pause").status_code == 401
    sent = coordinator_messages.Reports(reports=[numbered_report(1)]).model_dump(mode="json")
    assert (
        script(run.owner).send_request("POST", f"/runs/{run.slug}/reports", sent).status_code == 401
    )


def test_who_tries_token_after_token_is_told_to_wait_and_nobody_else_is(script, monkeypatch):
    monkeypatch.setattr(authentication, "MAX_FAILURES", 3)
    ada = script()
    found = [ada.send_request("GET", "/me", text=f"brn_{n}").status_code for n in range(5)]
    assert found == [401, 401, 401, 429, 429]
    assert ada.send_request("GET", "/me").status_code == 200, (
        "a good token from there is heard all the same"
    )


def test_a_token_that_asks_too_often_is_told_to_wait_and_another_is_not(
    script, person, monkeypatch
):
    monkeypatch.setattr(authentication, "MAX_TOKEN_REQUESTS", 3)
    loud, calm = script(), script(person("bob@example.org"))
    assert [loud.send_request("GET", "/me").status_code for _ in range(5)] == [200] * 3 + [429] * 2
    assert "this token" in problem(loud.send_request("GET", "/me")).error
    assert calm.send_request("GET", "/me").status_code == 200


# ---- what each may -------------------------------------------------------------------------------------------------

WHO = ("nobody", "narrow", "stranger", "owner")
NARROW = {
    "runs:read": "machines:write",
    "runs:write": "runs:read",
    "machines:read": "runs:write",
    "machines:write": "machines:read",
}
ROUTES = [  # method, path, body, scope, what a stranger gets, what the owner gets
    ("GET", "/me", None, "", 200, 200),
    ("GET", "/runs", None, "runs:read", 200, 200),
    ("POST", "/runs", {"name": "New"}, "runs:write", 200, 200),
    ("GET", "/runs/{run}", None, "runs:read", 200, 200),
    ("GET", "/runs/{draft}", None, "runs:read", 404, 200),
    ("GET", "/runs/{run}/summary", None, "runs:read", 200, 200),
    ("GET", "/runs/{draft}/summary", None, "runs:read", 404, 200),
    ("GET", "/runs/{run}/machines", None, "runs:read", 200, 200),
    ("GET", "/runs/{run}/checkpoints", None, "runs:read", 200, 200),
    ("GET", "/runs/{run}/verdicts", None, "runs:read", 200, 200),
    ("GET", "/runs/{draft}/verdicts", None, "runs:read", 404, 200),
    ("POST", "/runs/{run}/verdicts", {"author": "nobody", "first": 3}, "runs:write", 403, 422),
    ("GET", "/runs/{run}/credit", None, "runs:read", 200, 200),
    ("GET", "/runs/{draft}/credit", None, "runs:read", 404, 200),
    ("POST", "/runs/{run}/actions/pause", None, "runs:write", 403, 200),
    ("POST", "/runs/{run}/actions/resume", None, "runs:write", 403, 409),
    ("POST", "/runs/{draft}/actions/launch", None, "runs:write", 404, 200),
    ("POST", "/runs/{run}/actions/finish", None, "runs:write", 422, 422),
    ("POST", "/runs/{run}/copies", {}, "runs:write", 200, 200),
    ("POST", "/runs/{draft}/copies", {}, "runs:write", 404, 200),
    ("PATCH", "/runs/{run}/terms", {"notes": "x"}, "runs:write", 403, 200),
    ("GET", "/runs/{run}/invitations", None, "runs:read", 403, 200),
    ("POST", "/runs/{run}/invitations", {"note": "x"}, "runs:write", 403, 200),
    ("DELETE", "/runs/{run}/invitations/{invitation}", None, "runs:write", 403, 200),
    ("DELETE", "/runs/{run}/invitations/" + NOBODY, None, "runs:write", 403, 404),
    ("POST", "/estimates", {}, "runs:read", 200, 200),
    ("GET", "/machines", None, "machines:read", 200, 200),
    ("GET", "/machines/{machine}", None, "machines:read", 404, 200),
    ("PATCH", "/machines/{machine}", {"name": "attic"}, "machines:write", 404, 200),
    ("POST", "/machines/{machine}/actions/pause", None, "machines:write", 404, 200),
    ("POST", "/machines/{machine}/actions/resume", None, "machines:write", 404, 409),
    ("POST", "/machines/{machine}/actions/revoke", None, "machines:write", 404, 200),
]


@pytest.mark.parametrize(
    ("method", "path", "body", "scope", "stranger", "owner"), ROUTES, ids=lambda v: str(v)[:40]
)
def test_each_route_knows_who_may(
    script, person, launched_run, draft, method, path, body, scope, stranger, owner
):
    run, machine = launched_run(person("owner@example.org"))
    invitation = RunInvitation.create(run)
    where = path.format(
        run=run.slug,
        draft=draft(run.owner, name="draft").slug,
        machine=machine.machine.pk,
        invitation=invitation.pk,
    )
    found = []
    for who in WHO:
        if who == "nobody":
            answer = Client().generic(
                method, f"/api/v1{where}", json.dumps(body or {}), content_type="application/json"
            )
        else:
            scopes = [NARROW[scope]] if who == "narrow" and scope else ALL
            user = person("eve@example.org") if who == "stranger" else run.owner
            answer = script(user, scopes).send_request(method, where, body)
        found.append(answer.status_code)
    assert dict(zip(WHO, found, strict=True)) == {
        "nobody": 401, "narrow": 403 if scope else 200, "stranger": stranger, "owner": owner
    }  # fmt: skip


def test_every_route_of_the_api_is_in_a_table_of_who_may(client, db):
    """Here, or for workers in test_authentication."""
    spec = importlib.util.spec_from_file_location(
        "test_authentication", Path(__file__).with_name("test_authentication.py")
    )
    workers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(workers)

    def shape(path: str) -> str:
        return "/".join(
            "*" if part.startswith("{") or part in KNOWN else part for part in path.split("/")
        )

    KNOWN = {
        "0" * 32,
        "launched",
        "draft",
        "none",
        "BCDF-GHJK",
        NOBODY,
        "pause",
        "resume",
        "launch",
        "finish",
        "revoke",
    }
    covered = (
        {(m, shape(p)) for m, p, *_ in workers.TABLE}
        | {(m, shape(p)) for m, p, *_ in ROUTES}
        | {("POST", "/enrolments")}
    )
    document = client.get("/api/v1/openapi.json").json()
    for path, operations in document["paths"].items():
        for method in operations:
            assert (method.upper(), shape(path.removeprefix("/api/v1"))) in covered, (
                f"{method} {path} has no row"
            )


# ---- runs ----------------------------------------------------------------------------------------------------------


def test_a_script_creates_launches_pauses_and_archives_a_run(script, launched_run):
    ada = script()
    fields = {"recipe.token_budget": 1e6, "recipe.learning_rate": "3e-4", "text.source": "urls",
              "text.places": ["https://example.org/a.txt"], "model.context": "256"}  # fmt: skip
    asked = {
        "name": "  Night‮ shift ",
        "preset": "gpt2-124m",
        "fields": fields,
        "terms": {"least_memory": 10**9},
    }
    made = ada.send_request("POST", "/runs", {**asked, "launch": True}).json()
    run = Run.objects.get(slug=made["slug"])
    assert (made["name"], made["status"], made["launch_requested"]) == (
        "Night shift",
        "draft",
        True,
    )
    assert (
        run.spec.recipe.learning_rate == 3e-4
        and run.spec.recipe.codec == "auto"
        and run.spec.model.context == 256
    )
    assert run.least_memory == 10**9 and made["spec"]["text"]["places"] == [
        "https://example.org/a.txt"
    ]
    assert made["url"].endswith(f"/runs/{run.slug}/")
    again = ada.send_request("POST", f"/runs/{run.slug}/actions/launch")
    assert again.status_code == 409 and "cannot launch" in problem(again).error
    assert (
        ada.send_request("POST", f"/runs/{run.slug}/actions/cancel").json()["status"] == "cancelled"
    )
    assert ada.send_request("POST", f"/runs/{run.slug}/actions/archive").json()["archived"]
    assert AuditEntry.objects.filter(subject_id=str(run.pk), actor=ada.token.user).count() == 4


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"name": ""}, "name"),
        ({"name": "\u202e"}, "name"),
        ({"name": "x", "preset": "gpt9"}, "model"),
        ({"name": "x", "fields": {"model.heads": 5}}, "model.heads"),
        ({"name": "x", "fields": {"model.colour": 5}}, "model.colour"),
        ({"name": "x", "fields": {"model.layers": []}}, "model.layers"),
        ({"name": "x", "fields": {"text.places": 5}}, "text.places"),
        ({"name": "x", "fields": {"recipe.token_budget": "1e400"}}, "recipe.token_budget"),
        (
            {"name": "x", "fields": {"text.source": "urls", "text.places": ["http://10.0.0.1/"]}},
            "text.places",
        ),
        ({"name": "x", "terms": {"least_memory": -1}}, "asked.terms.least_memory"),
        ({"name": "x", "terms": {"access": "nobody"}}, "asked.terms.access"),
        ({"name": "x", "terms": {"notes": "x" * 20_001}}, "asked.terms.notes"),
        ({"name": "x", "quorum": 0}, "asked.quorum"),
        ({"name": "x", "report_every": "NaN"}, "asked.report_every"),
    ],
)
def test_what_makes_no_sense_is_refused_at_its_field(script, asked, field):
    answer = script().send_request("POST", "/runs", asked)
    assert answer.status_code == 422, answer.content
    found = problem(answer).fields
    assert field in found or field.removeprefix("asked.") in found, found
    assert not Run.objects.exists()


def test_only_organisers_create_runs_by_script_too(script, person, launched_run):
    run, _ = launched_run(person("owner@example.org"))
    SiteSettings.set_organisers("granted", run.owner)
    ada = script()
    for path, body in (("/runs", {"name": "x"}), (f"/runs/{run.slug}/copies", {})):
        answer = ada.send_request("POST", path, body)
        assert answer.status_code == 403 and "organisers" in problem(answer).error


def test_terms_change_as_far_as_they_are_named(script, launched_run, person):
    run, _ = launched_run(person())
    ada = script(run.owner)
    ada.send_request(
        "PATCH", f"/runs/{run.slug}/terms", {"access": "invitation", "least_memory": 5}
    )
    told = ada.send_request("PATCH", f"/runs/{run.slug}/terms", {"notes": "*hi*"}).json()
    assert (told["access"], told["least_memory"], told["notes"]) == ("invitation", 5, "*hi*")
    link = ada.send_request("POST", f"/runs/{run.slug}/invitations", {"note": "chess"}).json()
    assert RunInvitation.find_by_token(link["url"].rstrip("/").rsplit("/", 1)[1]).run == run
    assert (
        ada.send_request("DELETE", f"/runs/{run.slug}/invitations/{link['id']}").status_code == 200
    )
    assert ada.send_request("GET", f"/runs/{run.slug}/invitations").json() == []


def test_lists_come_in_pages_that_miss_nothing_and_repeat_nothing(
    script, launched_run, volunteer, person, monkeypatch
):
    monkeypatch.setattr(lookups, "PAGE", 2)
    run, first = launched_run(person())
    machines = [first, *(volunteer(run.owner, seed) for seed in range(2, 7))]
    for machine in machines[1:]:
        machine.join(run)
    ada = script(run.owner)
    for path in (f"/runs/{run.slug}/machines", "/machines"):
        seen, after = [], ""
        for _ in range(3):
            page = ada.send_request("GET", path + after).json()
            seen += [item["id"] for item in page["items"]]
            after = f"?after={page['next']}"
        assert page["next"] is None and sorted(seen) == sorted(str(m.machine.pk) for m in machines)


@pytest.mark.parametrize("after", ["1", "x" * 300, "%00"])
def test_a_senseless_page_is_refused(script, after):
    assert script().send_request("GET", f"/machines?after={after}").status_code == 422


def test_a_script_reads_machines_checkpoints_and_an_estimate(
    script, launched_run, person, numbered_report, golden_hardware
):
    run, machine = launched_run(person())
    HardwareMeasurement.record(machine.machine, golden_hardware)
    Checkpoint.objects.create(
        run=run, tokens=9, vector="a" * 64, digest="b" * 64, checksum="c" * 16, size=4
    )
    ada = script(run.owner)
    (line,) = ada.send_request("GET", f"/runs/{run.slug}/checkpoints").json()
    assert line["digest"] == "b" * 64 and not line["confirmed"] and line["machines"] == 0
    (member,) = ada.send_request("GET", f"/runs/{run.slug}/machines").json()["items"]
    assert member["alive"] and member["name"] == "pc-1"
    assert (
        ada.send_request("GET", f"/machines/{machine.machine.pk}").json()["hardware"][
            "device_memory"
        ]
        == 12 << 30
    )
    told = ada.send_request("POST", "/estimates", {"preset": "gpt3-175b", "volunteers": 100}).json()
    assert "does not fit" in told["needs"][0]["refusal"] and told["parameters"] > 170e9
    assert ada.send_request("POST", "/estimates", {"fields": {"model.heads": 5}}).status_code == 422
    assert ada.send_request("POST", f"/machines/{machine.machine.pk}/actions/pause").json()[
        "paused"
    ]
    assert MachinePause.objects.get().by == run.owner


# ---- the document --------------------------------------------------------------------------------------------------


def test_openapi_documents_errors_and_examples_of_all_operations(client, db):
    document = client.get("/api/v1/openapi.json").json()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            where = f"{method} {path}"
            assert operation.get("description") and operation.get("tags"), where
            assert {"200", "401", "404", "422", "429", "503"} <= set(operation["responses"]), where
    for name, schema in document["components"]["schemas"].items():
        ours = name.endswith(("In", "Out", "Page")) and name not in (
            "PaceOut",
            "NeedOut",
            "RunPage",
            "SignedTelemetryPage",
        )
        assert not ours or schema.get("examples"), f"{name} has no example"


# ---- the page ------------------------------------------------------------------------------------------------------


def test_a_person_makes_a_token_sees_it_once_and_revokes_it(person, valkey):
    ada, client = person(), Client()
    assert client.get("/account/tokens/").status_code == 302
    client.force_login(ada)
    wrong = client.post("/account/tokens/", {"name": "nightly", "days": "9999"})
    assert (
        wrong.status_code == 422
        and b"Choose at least one permission" in wrong.content
        and b'value="9999"' in wrong.content
    )
    page = client.post(
        "/account/tokens/", {"name": "<b>nightly", "days": "30", "scopes": ["runs:read"]}
    )
    token = Token.objects.get()
    text = page.content.decode().split(f'<code tabindex="0">{TOKEN_PREFIX}')[1].split("<")[0]
    assert Token.find_by_text(TOKEN_PREFIX + text) == token and "no-store" in page["Cache-Control"]
    again = client.get("/account/tokens/").content.decode()
    assert text not in again and "&lt;b&gt;nightly" in again and token.begins in again
    stranger = Client()
    stranger.force_login(person("eve@example.org"))
    assert stranger.post(f"/account/tokens/{token.pk}/").status_code == 404
    assert client.post(f"/account/tokens/{token.pk}/").status_code == 302
    token.refresh_from_db()
    assert token.revoked and not token.is_valid


def test_nobody_hoards_tokens(person, monkeypatch, valkey):
    monkeypatch.setattr("coordinator.web.token_views.MAX_TOKENS", 1)
    client = Client()
    client.force_login(person())
    good = {"name": "one", "days": "30", "scopes": ["runs:read"]}
    assert client.post("/account/tokens/", good).status_code == 200
    refused = client.post("/account/tokens/", good)
    assert (
        refused.status_code == 422
        and b"revoke one first" in refused.content
        and Token.objects.count() == 1
    )
