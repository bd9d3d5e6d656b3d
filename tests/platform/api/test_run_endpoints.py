"""Test what scripts and workers do with runs over the API."""

import json

import pytest
from helpers.site.script_client import problem

from barnraise.protocol import coordinator_messages
from coordinator.accounts.site_settings import SiteSettings
from coordinator.api import lookups
from coordinator.audit.models import AuditEntry
from coordinator.fleet.machine_state import HardwareMeasurement, MachinePause
from coordinator.runs.invitations import RunInvitation
from coordinator.runs.join_policy import JoinPolicy
from coordinator.runs.models import Run
from coordinator.telemetry.checkpoints import Checkpoint

pytestmark = pytest.mark.django_db


def test_runs_are_listed_five_a_page_newest_first(person, draft, volunteer):
    owner = person()
    created = [draft(owner, f"run {i}") for i in range(12)]
    ada = volunteer(owner)
    listed_ids = []
    after = None
    for _ in range(3):
        page = coordinator_messages.RunPage.model_validate_json(
            ada.send_request("GET", "/runs" + (f"?after={after}" if after else "")).content
        )
        listed_ids += [run.id for run in page.runs]
        after = page.next
    assert after is None and listed_ids == [str(run.pk) for run in reversed(created)]


@pytest.mark.parametrize("after", ["1", "x" * 300, "00000000-0000-0000-0000-00000000000g", "%00"])
def test_run_list_with_invalid_cursor_is_refused(person, volunteer, after):
    response = volunteer(person()).send_request("GET", f"/runs?after={after}")
    assert response.status_code == 422 and "after" in problem(response).fields


def test_script_creates_launches_cancels_and_archives_a_run(script):
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
    assert (created["report_every"], created["machines_per_host"]) == (5.0, 1_000)
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


def test_terms_update_changes_only_the_given_fields(script, adas_run):
    run, _ = adas_run
    ada = script(run.owner)
    path = f"/runs/{run.slug}/terms"
    ada.send_request("PATCH", path, {"access": "invitation", "min_memory": 5})
    terms = ada.send_request("PATCH", path, {"notes": "*hi*"}).json()
    assert (terms["access"], terms["min_memory"], terms["notes"]) == ("invitation", 5, "*hi*")


def test_script_creates_and_revokes_an_invitation(script, adas_run):
    run, _ = adas_run
    ada = script(run.owner)
    path = f"/runs/{run.slug}/invitations"
    invitation = ada.send_request("POST", path, {"note": "chess"}).json()
    token = invitation["url"].rstrip("/").rsplit("/", 1)[1]
    assert RunInvitation.find_by_token(token).run == run
    assert ada.send_request("DELETE", f"{path}/{invitation['id']}").status_code == 200
    assert ada.send_request("GET", path).json() == []


def test_pages_of_a_list_contain_every_row_exactly_once(script, adas_run, volunteer, monkeypatch):
    monkeypatch.setattr(lookups, "PAGE", 2)
    run, first = adas_run
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


def test_script_reads_machines_checkpoints_and_an_estimate(script, adas_run, golden_hardware):
    run, machine = adas_run
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
    fields = {"recipe.codec": "auto", "recipe.token_budget": 2_400_000_000}
    body = {"preset": "gpt2-124m", "volunteers": 4, "fields": fields}
    for need in ada.send_request("POST", "/estimates", body).json()["needs"]:
        for pace in need["paces"]:
            assert 1.0 < pace["speedup"] <= 4.0 and pace["rounds"] > 1 and pace["speedup_basis"]
    for wrong in ({"fields": {"model.heads": 5}}, {"volunteers": 0}):
        assert ada.send_request("POST", "/estimates", wrong).status_code == 422
    assert ada.send_request("POST", f"{path}/actions/pause").json()["paused"]
    assert MachinePause.objects.get().by == run.owner


def test_run_is_found_by_id_and_slug_and_by_no_other_name(script, launched_run, person):
    run, _ = launched_run(person("owner@example.org"))
    ada = script()
    by_slug, by_id = (
        ada.send_request("GET", f"/runs/{name}/summary").json() for name in (run.slug, run.pk)
    )
    assert by_slug == by_id and by_slug["id"] == str(run.pk)
    for name in ("%00", "x" * 500, "a%20run", "%F0%9F%9B%96", "..", str(run.pk)[:-1]):
        assert ada.send_request("GET", f"/runs/{name}/summary").status_code == 404, name


def test_hidden_run_is_not_found_by_strangers(script, launched_run, person):
    run, _ = launched_run(person("owner@example.org"))
    run.update_join_policy(JoinPolicy("invitation", visibility="invited"))
    stranger, owner = script(), script(run.owner)
    parts = ("machines", "history", "checkpoints", "credit", "verdicts", "summary")
    for path in (f"/runs/{run.slug}", *(f"/runs/{run.pk}/{part}" for part in parts)):
        statuses = [by.send_request("GET", path).status_code for by in (stranger, owner)]
        assert statuses == [404, 200], path
    assert stranger.send_request("POST", f"/runs/{run.slug}/copies", {}).status_code == 404
    assert stranger.send_request("GET", "/runs").json()["runs"] == []


def test_script_excludes_a_volunteer_by_a_machines_name(script, shared_run, numbered_report):
    run, _, bob = shared_run
    bob.store_reports(run, numbered_report(1))
    ada = script(run.owner)
    path = f"/runs/{run.slug}/verdicts"
    for nobody in ({"exclude": "nobody"}, {"author": "nobody", "first": 1}, {}):
        assert ada.send_request("POST", path, nobody).status_code == 422
    assert ada.send_request("GET", path).json() == []
    issued = ada.send_request("POST", path, {"exclude": bob.machine.name, "reason": "spam"}).json()
    assert json.loads(issued["body"])["volunteers"] and issued["proven"]
    assert ada.send_request("GET", path).json() == [issued]
    assert ada.send_request("POST", f"{path}/{issued['id']}/sign").json()["id"] == issued["id"]
    assert bob.request_join(run).status_code == 403
