"""Test what workers request: enrolment, joining, manifests, reports and directives."""

from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone
from helpers.site.enrolment_requests import ABOUT, enrolment_request
from helpers.site.machine_replies import read_directive, read_reply

from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.errors import CoordinatorError
from barnraise.protocol import coordinator_messages, enums
from barnraise.protocol.signing import Identity, digest
from barnraise.spec import RunSpec
from coordinator.accounts.models import Enrolment, Machine
from coordinator.api import worker_endpoints
from coordinator.audit.models import AuditEntry
from coordinator.eventlog.projection import current_state
from coordinator.lib import site_identity
from coordinator.lib.ttl_cache import TtlCache
from coordinator.runs.invitations import Guest, RunInvitation
from coordinator.runs.join_policy import JoinPolicy
from coordinator.runs.models import Run
from coordinator.runs.spec_form import spec_from_fields
from coordinator.telemetry.rollup import drain_queue

pytestmark = pytest.mark.django_db


@pytest.mark.django_db(transaction=True)
def test_machine_that_joins_again_and_again_is_put_off(adas_run, monkeypatch):
    """Each join reads the run's checkpoints and signs a ticket."""
    monkeypatch.setattr(worker_endpoints, "MAX_JOINS", 2)
    monkeypatch.setattr(worker_endpoints, "JOINS_SECONDS", 10**9)
    run, ada = adas_run
    statuses = [ada.request_join(run).status_code for _ in range(4)]
    assert 200 in statuses and statuses[-1] == 429


def test_machine_is_enrolled_by_a_code_that_a_person_approves(live_server, person, valkey):
    ada = person(name="Ada")
    identity = Identity(b"\x05" * 32)
    machine = CoordinatorClient(live_server.url, identity)
    assert machine.pin_mirror().key == site_identity.identity().key
    enrolment = machine.request_enrolment(ABOUT)
    assert Client().get(f"/machines/enrol/{enrolment.code}/").status_code == 302, "to the log-in"
    assert machine.fetch_enrolment(enrolment.code).status == "pending"
    with pytest.raises(CoordinatorError, match="not enrolled"):
        machine.fetch_runs()
    Enrolment.find(enrolment.code.lower().replace("-", "")).approve(ada)
    enrolled = machine.fetch_enrolment(enrolment.code)
    assert (enrolled.status, enrolled.person) == ("approved", "Ada")
    assert Machine.objects.get(pk=enrolled.machine).hostname == "barn-pc"
    assert machine.fetch_runs().runs == []
    machine.close()


@pytest.mark.parametrize(
    ("changed", "status"),
    [({"mirror": "a" * 64}, 422), ({"key": "1" * 64}, 422), ({"issued": 1.0}, 401)],
)
def test_enrolment_for_another_mirror_key_or_time_is_refused(client, valkey, changed, status):
    identity = Identity(b"\x05" * 32)
    signed = identity.sign("enrolment", enrolment_request(identity, **changed))
    answer = client.post(
        "/api/v1/enrolments", signed.model_dump_json(), content_type="application/json"
    )
    assert answer.status_code == status, answer.content
    assert not Enrolment.objects.exists()


def test_enrolment_with_a_forged_signature_is_refused(client, valkey):
    identity, thief = Identity(b"\x05" * 32), Identity(b"\x06" * 32)
    request = enrolment_request(identity)
    forged = thief.sign("enrolment", request).model_copy(update={"key": identity.key})
    answer = client.post(
        "/api/v1/enrolments", forged.model_dump_json(), content_type="application/json"
    )
    assert answer.status_code == 422


def test_enrolment_codes_per_address_are_limited(client, valkey):
    identity = Identity(b"\x05" * 32)
    body = identity.sign("enrolment", enrolment_request(identity)).model_dump_json()
    statuses = {
        client.post("/api/v1/enrolments", body, content_type="application/json").status_code
        for _ in range(61)
    }
    assert statuses == {200, 429}


def test_directive_asks_the_owners_machine_to_prepare_a_draft(person, draft, volunteer, manifest):
    run = draft(person())
    ada = volunteer(run.owner)
    reply = ada.join(run)
    directive = read_directive(reply)
    assert reply.ticket is None and directive.prepare and directive.status is enums.RunStatus.DRAFT
    run.launch()
    answer = ada.post_manifest(run, manifest(run))
    view = coordinator_messages.RunView.model_validate_json(answer.content)
    assert view.status is enums.RunStatus.RECRUITING
    reply = ada.join(run)
    directive = read_directive(reply)
    assert not directive.prepare and reply.ticket


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"vocabulary": 300}, "vocabulary"),
        ({"tokenizer": None}, "tokenizer"),
        ({"run": "01234567-89ab-7def-8123-456789abcdef"}, "run"),
        ({"held_out": [coordinator_messages.Shard(digest=digest("x"), tokens=3)]}, "held_out"),
        ({"prompts": [[1]]}, "prompts"),
    ],
)
def test_manifest_that_does_not_fit_is_refused_at_its_field(
    person, draft, volunteer, manifest, changed, field
):
    run = draft(person())
    ada = volunteer(run.owner)
    answer = ada.post_manifest(run, manifest(run, **changed))
    assert answer.status_code == 422
    assert field in coordinator_messages.Problem.model_validate_json(answer.content).fields
    run.refresh_from_db()
    assert run.manifest is None


def test_text_larger_than_the_disk_of_anybody_is_refused_by_the_site(
    person, draft, volunteer, manifest
):
    run = draft(person())
    ada = volunteer(run.owner)
    shard = coordinator_messages.Shard.model_construct(digest=digest("x"), tokens=10**15)
    signed = ada.identity.sign("manifest", manifest(run).model_copy(update={"train": [shard]}))
    assert ada.send_request("POST", f"/runs/{run.slug}/manifest", signed).status_code == 422
    run.refresh_from_db()
    assert run.manifest is None


def test_manifest_signed_by_another_key_is_refused(person, draft, volunteer, manifest):
    run = draft(person())
    ada = volunteer(run.owner)
    signed = Identity(b"\x09" * 32).sign("manifest", manifest(run))
    assert ada.send_request("POST", f"/runs/{run.slug}/manifest", signed).status_code == 422


def test_machine_of_a_phished_code_does_not_sign_for_a_run_unnoticed(
    draft, volunteer, manifest, signed_in
):
    client, ada = signed_in()
    run = draft(ada)
    run.launch()
    foreign = volunteer(ada, 9)
    Machine.objects.update(confirmed=None)
    reply = foreign.join(run)
    directive = read_directive(reply)
    assert not directive.prepare and reply.signing is enums.SigningRight.UNCONFIRMED
    signed = foreign.identity.sign("manifest", manifest(run))
    path = f"/runs/{run.slug}/manifest"
    answer = foreign.send_request("POST", path, signed)
    assert answer.status_code == 403 and b"confirm at" in answer.content
    shown = client.get(f"/runs/{run.slug}/").content.decode()
    assert foreign.identity.key in shown and "the owner to confirm the machine" in shown
    confirm = f"/machines/{foreign.machine.pk}/confirm/"
    stranger, _ = signed_in("eve@example.org")
    assert stranger.post(confirm).status_code == 404
    assert foreign.identity.key in client.get(f"/machines/{foreign.machine.pk}/").content.decode()
    client.post(confirm)
    assert AuditEntry.objects.filter(action="machine.confirm").count() == 1
    assert foreign.join(run).signing is enums.SigningRight.ALLOWED
    assert foreign.send_request("POST", path, signed).status_code == 200
    page = client.get(f"/machines/{foreign.machine.pk}/").content.decode()
    assert "sign for your runs?" not in page


def test_revoked_machine_is_refused_and_named_in_directives(shared_run, numbered_report):
    run, ada, bob = shared_run
    bob.machine.revoke()
    assert bob.report(run, numbered_report(1)).status_code == 403
    TtlCache.clear_all()  # the broadcast is cached for a second
    reply = read_reply(ada.report(run, numbered_report(1)))
    assert read_directive(reply).revoked == [bob.identity.key]
    assert reply.peers == []


def test_machine_learns_from_which_address_its_requests_come(
    person, adas_run, volunteer, numbered_report
):
    run, _ = adas_run
    bob = volunteer(person("bob@example.org"), 2)
    bob.client.defaults["REMOTE_ADDR"] = "::ffff:8.8.4.4"
    assert bob.join(run).source_ip == "8.8.4.4"
    assert bob.report(run, numbered_report(1)).json()["source_ip"] == "8.8.4.4"
    bob.client.defaults["REMOTE_ADDR"] = "unix:"
    assert bob.join(run).source_ip is None


def test_join_of_a_cancelled_run_is_refused(person, adas_run, volunteer):
    run, _ = adas_run
    run.cancel()
    bob = volunteer(person("bob@example.org"), 2)
    answer = bob.request_join(run)
    assert answer.status_code == 409 and b"cancelled" in answer.content


def test_join_during_the_launch_returns_one_consistent_run(adas_run, monkeypatch):
    """Read the run before its launch; a machine refuses a ticket that does not match the run."""
    run, ada = adas_run
    get_visible_run = worker_endpoints.get_visible_run

    def read_before_the_launch(*arguments):
        draft_run = get_visible_run(*arguments)
        draft_run.spec_text = ""
        draft_run.manifest = None
        draft_run.status = enums.RunStatus.DRAFT
        return draft_run

    monkeypatch.setattr(worker_endpoints, "get_visible_run", read_before_the_launch)
    answer = ada.request_join(run)
    reply = coordinator_messages.JoinReply.model_validate_json(answer.content)
    assert reply.ticket and reply.run.manifest
    assert digest(reply.run.manifest.body) == RunSpec.from_json(reply.run.spec).manifest


def test_text_of_a_draft_can_be_prepared_again(person, draft, manifest, volunteer):
    run = draft(person())
    ada = volunteer(run.owner)
    first = ada.identity.sign("manifest", manifest(run))
    path = f"/runs/{run.slug}/manifest"
    assert ada.send_request("DELETE", path).status_code == 200, "nothing to discard is no error"
    assert ada.send_request("POST", path, first).status_code == 200
    another = ada.identity.sign("manifest", manifest(run, vocabulary=1024))
    assert ada.send_request("POST", path, another).status_code == 409
    assert ada.send_request("DELETE", path).status_code == 200
    assert ada.send_request("POST", path, another).status_code == 200
    run.refresh_from_db()
    assert run.manifest["body"] == another.body
    state = current_state(f"run:{run.pk}")
    assert state["manifest"]["body"] == another.body, "other mirrors see the newer one, too"


def test_queued_goodbye_does_not_override_a_later_join(adas_run, numbered_report):
    run, ada = adas_run
    # The report is queued when the worker starts again.
    ada.report(run, numbered_report(1, activity=enums.Activity.LEFT))
    ada.join(run)
    drain_queue()
    assert run.memberships.alive().count() == 1


def test_join_acknowledges_reports_that_are_being_stored(adas_run, numbered_report, monkeypatch):
    run, ada = adas_run
    ada.report(run, numbered_report(1), numbered_report(2), numbered_report(3))
    # Another process is draining the queue.
    monkeypatch.setattr("coordinator.api.worker_endpoints.drain_queue", lambda wait: 0)
    assert ada.join(run).acknowledged == 3


def test_machine_accepts_an_invitation_for_its_owner(person, launched_run, volunteer):
    """`barnraise join SITE/runs/NAME?invite=TOKEN` needs no browser on an enrolled machine."""
    run, _ = launched_run(person("owner@example.org"), join_policy=JoinPolicy("invitation"))
    bob = volunteer(person("bob@example.org"), 2)
    invitation = RunInvitation.create(run)
    token = coordinator_messages.InvitationToken(token=invitation.token)
    accepted = bob.send_request("POST", "/invitations/accept", token)
    summary = coordinator_messages.RunSummary.model_validate_json(accepted.content)
    assert (summary.slug, Guest.objects.get().user) == (run.slug, bob.machine.owner)
    assert bob.join(run).ticket
    entry = AuditEntry.objects.get(action="run.accept_invitation")
    assert entry.actor == bob.machine.owner
    invitation.withdraw()
    refused = bob.send_request("POST", "/invitations/accept", token)
    assert refused.status_code == 404 and b"ask the run's owner" in refused.content


def test_same_manifest_posted_twice_is_stored_once(person, draft, volunteer, manifest):
    run = draft(person())
    ada = volunteer(run.owner)
    signed = ada.identity.sign("manifest", manifest(run))
    for _ in range(2):
        answer = ada.send_request("POST", f"/runs/{run.slug}/manifest", signed)
        assert answer.status_code == 200
    assert AuditEntry.objects.filter(action="run.accept_manifest").count() == 1


def test_manifest_of_a_draft_that_was_edited_meanwhile_is_refused(
    person, draft, volunteer, manifest, monkeypatch
):
    run = draft(person())
    ada = volunteer(run.owner)
    check = worker_endpoints.check_manifest

    def edit_after_the_check(*arguments):
        check(*arguments)
        assert Run.objects.get().edit("A run", spec_from_fields({"text.tokenizer": "bytes"}))

    monkeypatch.setattr(worker_endpoints, "check_manifest", edit_after_the_check)
    answer = ada.post_manifest(run, manifest(run))
    assert answer.status_code == 409 and b"was edited meanwhile" in answer.content
    assert Run.objects.get().manifest is None


def test_machine_polls_what_was_decided_about_its_code(client, valkey, person):
    code = Enrolment.open(enrolment_request(Identity(b"\x05" * 32)))
    path = f"/api/v1/enrolments/{code.code}"
    pending = {"status": "pending", "machine": None, "name": "", "person": ""}
    assert client.get(path).json() == pending
    Enrolment.objects.update(expires=timezone.now())
    assert client.get(path).json() == pending | {"status": "expired"}
    Enrolment.objects.update(expires=timezone.now() + timedelta(minutes=1))
    code.refuse(person())
    assert client.get(path).json() == pending | {"status": "refused"}
    for wrong in ("BCDF-GHJK", "%00", "x" * 5000, "%F0%9F%9B%96", "AEIOU"):
        assert client.get(f"/api/v1/enrolments/{wrong}").status_code == 404, wrong


def test_directive_without_a_report_has_the_mark_and_the_status(adas_run, numbered_report):
    run, ada = adas_run
    ada.report(run, numbered_report(1), numbered_report(3))  # and not the second
    path = f"/runs/{run.slug}/directive"
    for acknowledged, status in ((0, "training"), (1, "paused")):
        reply = read_reply(ada.send_request("GET", path))
        directive = read_directive(reply)
        assert (reply.acknowledged, directive.status) == (acknowledged, status)
        drain_queue()
        run.pause()
        TtlCache.clear_all()
