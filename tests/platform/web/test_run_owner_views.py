"""Test what an owner does with a run: text, access, notes, invitations, copies, budget."""

import re

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from helpers.site.machine_replies import read_directive, read_reply
from helpers.site.pages import field_error, open_client

from barnraise.cli.addresses import parse_run_address
from coordinator.accounts.models import Team
from coordinator.audit.models import AuditEntry
from coordinator.runs.invitations import Guest, RunInvitation
from coordinator.runs.join_policy import Access, JoinPolicy
from coordinator.runs.models import Run
from coordinator.web.forms import RunForm, TermsForm

pytestmark = pytest.mark.django_db
INVITED = JoinPolicy(access=Access.INVITATION)


# ---- the text ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "typed", "places"),
    [
        ("stdlib", "", ()),
        ("files", "", ()),
        ("huggingface", " roneneldan/TinyStories ", ("roneneldan/TinyStories",)),
        ("huggingface", "a/b@v1.0", ("a/b@v1.0",)),
        (
            "urls",
            "https://example.org/a.txt\r\nhttps://example.org/b.jsonl",
            ("https://example.org/a.txt", "https://example.org/b.jsonl"),
        ),
    ],
)
def test_run_form_stores_the_source_of_the_text(signed_in, source, typed, places):
    client, _ = signed_in()
    fields = {"name": "Text", "preset": "gpt-nano", "text.source": source, "text.places": typed}
    assert client.post("/runs/new/", fields).status_code == 302
    run = Run.objects.get()
    assert (run.spec.text.source, run.spec.text.places) == (source, places)
    assert run.spec.recipe.codec == "auto", "the form's default"
    page = client.get(f"/runs/{run.slug}/edit/").content.decode()
    assert all(place in page for place in places)
    assert client.get(f"/runs/{run.slug}/").status_code == 200


@pytest.mark.parametrize(
    ("source", "typed", "error"),
    [
        ("stdlib", "https://example.org/a.txt", "takes no addresses"),
        ("huggingface", "", "name one dataset as owner/name"),
        ("huggingface", "../../etc", "name one dataset as owner/name"),
        ("huggingface", "a/b c/d", "name one dataset as owner/name"),
        ("urls", "", "give 1 to 50 addresses"),
        ("urls", "file:///etc/passwd", "must begin with https:// or http://"),
        ("urls", "https://user:secret@example.org/", "holds a name or password"),
        ("urls", "https://example.org/a?X-Amz-Signature=secret", "has a token or signature"),
        ("urls", "http://127.0.0.1/", "inside a private network"),
        ("urls", "http://[::1]:80/", "inside a private network"),
        ("urls", "http://169.254.169.254/latest/meta-data/", "inside a private network"),
        ("urls", "http://localhost:8000/", "inside a private network"),
        ("urls", "http://printer/", "inside a private network"),
        ("urls", "https://[", "is not an address"),
        ("urls", "https://a..b.invalid/", "is not an address"),
        ("urls", f"https://{'a' * 64}.invalid/", "is not an address"),
        ("urls", "https://example.org:99999/", "is not an address"),
        (
            "urls",
            "\n".join(f"https://example.org/{i}" for i in range(51)),
            "give 1 to 50 addresses",
        ),
        ("urls", "https://example.org/" + "x" * 500, "must begin with"),
    ],
)
def test_run_form_with_invalid_text_source_shows_error_and_input(signed_in, source, typed, error):
    client, _ = signed_in()
    fields = {"name": "Text", "preset": "gpt-nano", "text.source": source, "text.places": typed}
    response = client.post("/runs/new/", fields)
    html = response.content.decode()
    assert response.status_code == 422 and not Run.objects.exists()
    assert error in field_error(html, "text.places").lower(), html
    assert (typed.split() or [""])[0][:40] in html


# ---- who can join --------------------------------------------------------------------------


def test_invitation_run_admits_machines_of_owner_and_accepted_guests(
    person, launched_run, volunteer, signed_in
):
    run, _ = launched_run(person("owner@example.org", name="Olga"), join_policy=INVITED)
    guest, bob = signed_in("bob@example.org")
    machine = volunteer(bob, 2)
    response = machine.request_join(run)
    assert response.status_code == 403 and "ask Olga to let you in" in response.json()["error"]
    invitation = RunInvitation.create(run, "the chess club", actor=run.owner)
    link = f"/runs/{run.slug}/invited/{invitation.token}/"
    assert Client().post(link).status_code == 302, "visitors must sign in to accept"
    page = guest.get(link).content.decode()
    assert "Olga</bdi> invites you" in page and not Guest.objects.exists()
    command = f"barnraise join http://testserver/runs/{run.slug}/?invite={invitation.token}"
    assert command in page, "one command enrols, accepts and trains"
    assert parse_run_address(command.split()[-1]).invitation == invitation.token
    assert guest.post(link).status_code == 302 and guest.post(link).status_code == 302
    assert Guest.objects.get().user == bob
    assert machine.request_join(run).status_code == 200
    entries = AuditEntry.objects.filter(action__contains="invit").order_by("id")
    assert [entry.action for entry in entries] == ["run.invite", "run.accept_invitation"]


def test_invitation_link_revoked_expired_or_wrong_is_not_found(person, launched_run, signed_in):
    run, _ = launched_run(person("owner@example.org"), join_policy=INVITED)
    client, _ = signed_in()
    revoked, expired, valid = (RunInvitation.create(run) for _ in range(3))
    assert revoked.withdraw() and not revoked.withdraw()
    RunInvitation.objects.filter(pk=expired.pk).update(expires=run.created)
    altered = valid.token[:-1] + "!"
    for token in (revoked.token, expired.token, altered, str(valid.pk), "x" * 300, "0:0"):
        assert client.get(f"/runs/{run.slug}/invited/{token}/").status_code == 404, token
    assert client.get(f"/runs/other/invited/{valid.token}/").status_code == 404
    assert client.get(f"/runs/{run.slug}/invited/{valid.token}/").status_code == 200


def test_joined_machine_stays_when_the_join_policy_changes(person, launched_run, volunteer):
    run, _ = launched_run(person("owner@example.org"))
    machine = volunteer(person("bob@example.org"), 2)
    assert machine.request_join(run).status_code == 200
    assert run.update_join_policy(JoinPolicy(Access.INVITATION, 64 * 10**9), actor=run.owner)
    assert machine.request_join(run).status_code == 200
    assert volunteer(person("eve@example.org"), 3).request_join(run).status_code == 403


def test_join_of_too_small_machine_is_refused_with_the_minimum(
    person, launched_run, volunteer, golden_hardware
):
    policy = JoinPolicy(min_memory=16 * 10**9, min_device_memory=24 * 10**9)
    run, _ = launched_run(person("owner@example.org"), join_policy=policy)
    bob = volunteer(person("bob@example.org"), 2)
    assert (
        "asks for 16 GB of memory; this machine has 0 kB" in bob.request_join(run).json()["error"]
    )
    # A PC sold with 16 GB reports slightly less.
    small_gpu = golden_hardware.model_copy(update={"memory": 15 * 10**9})
    response = bob.request_join(run, hardware=small_gpu)
    assert "asks for 24 GB of GPU memory; this machine has 12.9 GB" in response.json()["error"]
    large_gpu = small_gpu.model_copy(update={"device_memory": 24 * 2**30})
    assert bob.request_join(run, hardware=large_gpu).status_code == 200


@pytest.mark.parametrize(
    ("typed", "field"),
    [
        ({"min_memory": "lots"}, "min_memory"),
        ({"min_memory": "-1"}, "min_memory"),
        ({"min_memory": "nan"}, "min_memory"),
        ({"min_device_memory": "1e300"}, "min_device_memory"),
        ({"access": "nobody"}, "access"),
        ({"notes": "x" * 20_001}, "notes"),
    ],
)
def test_invalid_terms_are_refused_at_their_field(signed_in, draft, typed, field):
    client, ada = signed_in()
    run = draft(ada)
    valid = {"access": "anyone", "min_memory": "8", "notes": "**hello**"}
    for path, other_fields in (
        (f"/runs/{run.slug}/terms/", {}),
        ("/runs/new/", {"name": "New", "preset": "gpt-nano"}),
    ):
        response = client.post(path, {**valid, **other_fields, **typed})
        assert response.status_code == 422, path
        assert field_error(response.content.decode(), field), path
    assert Run.objects.count() == 1 and run.min_memory == 0
    assert client.post(f"/runs/{run.slug}/terms/", valid).status_code == 302
    run.refresh_from_db()
    assert run.join_policy == JoinPolicy("anyone", 8 * 10**9, 0, "**hello**")
    assert b'value="8"' in client.get(f"/runs/{run.slug}/terms/").content


def test_team_run_admits_machines_of_team_members_only(person, signed_in, volunteer, launched_run):
    client, ada = signed_in()
    stranger, eve = signed_in("eve@example.org")
    bob = person("bob@example.org")
    team = Team.create("Weavers", ada)
    team.add_member(bob, ada)
    run, _ = launched_run(ada)
    path = f"/runs/{run.slug}/terms/"
    response = client.post(path, {"access": "team", "team": ""})
    assert response.status_code == 422
    assert "Choose the team" in field_error(response.content.decode(), "team")
    assert client.post(path, {"access": "team", "team": str(team.pk)}).status_code == 302
    assert volunteer(bob, 2).request_join(run).status_code == 200
    assert (
        "takes the machines of the team Weavers"
        in volunteer(eve, 3).request_join(run).json()["error"]
    )
    page = stranger.get(f"/runs/{run.slug}/").content.decode()
    join_section = page.split("join-title")[1].split("</section>")[0]
    assert "ask " in page and "barnraise join" not in join_section
    team.remove_member(bob, bob)
    assert volunteer(bob, 4).request_join(run).status_code == 403
    foreign_team = Team.create("Elsewhere", eve)
    response = client.post(path, {"access": "team", "team": str(foreign_team.pk)})
    assert response.status_code == 422, "the owner is not a member of it"
    team.disband(ada)
    run.refresh_from_db()
    assert "a team that was deleted" in volunteer(eve, 5).request_join(run).json()["error"]
    assert client.get(f"/runs/{run.slug}/").status_code == 200
    assert client.get(path).status_code == 200


def test_saving_notes_never_opens_a_team_run(signed_in, person, draft):
    client, ada = signed_in()
    team = Team.create("Weavers", ada)
    team.add_member(person("bob@example.org"), ada)
    run = draft(ada, join_policy=JoinPolicy(access=Access.TEAM, team=team.pk))
    team.remove_member(ada, ada)

    def save_notes(**changed: str) -> str:
        """Save the pages of a draft and of its access as they are shown; return the last page."""
        run.refresh_from_db()
        for path, form in (("edit", RunForm(run=run)), ("terms", TermsForm(run=run))):
            typed = {field.name: field.value() or "" for field in form} | {"notes": "new"} | changed
            answer = client.post(f"/runs/{run.slug}/{path}/", typed)
        run.refresh_from_db()
        return answer.content.decode()

    save_notes()
    assert (run.access, run.team, run.notes) == (Access.TEAM, team, "new")
    assert "Choose who may join" in field_error(save_notes(access=""), "access")
    team.disband(ada)
    assert "Choose the team" in field_error(save_notes(), "team")
    assert run.access == Access.TEAM
    save_notes(access="anyone")
    assert run.access == Access.ANYONE, "the owner opened it"


@pytest.mark.usefixtures("long_caches")
def test_owner_page_lists_the_newest_links_with_as_many_queries(
    signed_in, draft, django_assert_max_num_queries
):
    client, ada = signed_in()
    run = draft(ada, join_policy=INVITED)
    links = [RunInvitation.create(run, f"link {n}") for n in range(2)]
    RunInvitation.objects.filter(pk=links[0].pk).update(expires=run.created)
    links[1].accept(ada)
    path = f"/runs/{run.slug}/"
    client.get(path)  # fills caches
    with CaptureQueriesContext(connection) as queries:
        page = client.get(path).content.decode()
    assert "Used 1 time;" in page and "Used 0 times; expired" in page and "Only the" not in page
    RunInvitation.objects.bulk_create(
        RunInvitation(run=run, note=f"more {n}", expires=links[1].expires) for n in range(60)
    )
    with django_assert_max_num_queries(len(queries)):
        page = client.get(path).content.decode()
    assert page.count("Revoke</button>") == 50 and "Only the newest 50 links" in page


def test_invitation_of_another_run_cannot_be_revoked(person, launched_run, draft):
    run, _ = launched_run(person("owner@example.org"))
    invitation = RunInvitation.create(draft(person("bob@example.org")))
    client = open_client(run.owner)
    assert client.post(f"/runs/{run.slug}/invitations/{invitation.pk}/").status_code == 404
    assert RunInvitation.objects.get(pk=invitation.pk).withdrawn is None


# ---- the strategy --------------------------------------------------------------------------


def test_run_form_offers_auto_strategy_by_default(signed_in):
    client, _ = signed_in()
    page = client.get("/runs/new/").content.decode()
    assert re.search(r'<option value="auto"( selected)?>Auto: chosen', page)
    assert "Decentralized Adam pays on lines from about 1 Gb/s" in page
    fields = {"name": "Auto", "preset": "gpt-nano", "recipe.strategy": "auto"}
    assert client.post("/runs/new/", fields).status_code == 302
    recipe = Run.objects.get().spec.recipe
    assert (recipe.strategy, recipe.codec) == ("auto", "auto")
    page = client.get(f"/runs/{Run.objects.get().slug}/edit/").content.decode()
    assert '<option value="auto" selected>Auto: chosen' in page
    estimate = client.post("/runs/estimate/", {**fields, "volunteers": "25"}).content.decode()
    assert estimate.count("Auto: exchange every") >= 2
    assert "25 of these, 15 Mb/s up, 112 down" in estimate and "25 of these, 100 Mb/s" in estimate
    assert "What auto would choose now" in estimate and "Expected: 25 machines" in estimate


def test_run_form_refuses_a_removed_strategy_with_what_to_use(signed_in):
    client, _ = signed_in()
    fields = {"name": "Rack", "preset": "gpt-nano", "recipe.strategy": "all-reduce"}
    response = client.post("/runs/new/", fields)
    assert response.status_code == 422 and not Run.objects.exists()
    error = field_error(response.content.decode(), "recipe.strategy")
    assert "use updates, or decentralized-adam for machines in one network" in error


def test_pages_show_stored_runs_whose_strategy_was_removed(signed_in, launched_run, draft):
    client, owner = signed_in()
    launched, waiting = launched_run(owner)[0], draft(owner, name="Waiting")
    removed = launched.spec_text.replace('"strategy":"streams"', '"strategy":"all-reduce"')
    assert removed != launched.spec_text
    Run.objects.filter(pk=launched.pk).update(spec_text=removed)
    waiting.draft["recipe"]["strategy"] = "all-reduce"
    Run.objects.filter(pk=waiting.pk).update(draft=waiting.draft)
    for path in ("/", "/runs/", f"/runs/{launched.slug}/", f"/runs/{waiting.slug}/edit/"):
        assert client.get(path).status_code == 200, path
    page = client.get(f"/runs/{launched.slug}/").content.decode()
    assert "all-reduce (removed: no machine can join)" in page
    fields = {"name": "Waiting", "preset": "gpt-nano", "access": "anyone"}
    fields["recipe.strategy"] = "async"
    assert client.post(f"/runs/{waiting.slug}/edit/", fields).status_code == 302
    assert Run.objects.get(pk=waiting.pk).spec.recipe.strategy == "async"


def test_run_form_refuses_fixed_codec_with_auto_strategy_only(signed_in):
    client, _ = signed_in()
    fields = {
        "name": "Fixed",
        "preset": "gpt-nano",
        "recipe.strategy": "auto",
        "recipe.codec": "dense4",
    }
    response = client.post("/runs/new/", fields)
    assert response.status_code == 422
    assert "choose another strategy" in field_error(response.content.decode(), "recipe.codec")
    assert client.post("/runs/new/", fields | {"recipe.strategy": "async"}).status_code == 302
    assert Run.objects.get().spec.recipe.codec == "dense4"


# ---- the budget ----------------------------------------------------------------------------


def test_owner_extends_run_only_while_tokens_are_left(
    signed_in, launched_run, draft, numbered_report
):
    client, ada = signed_in()
    run, machine = launched_run(ada)
    budget = run.token_budget
    path = f"/runs/{run.slug}/extend/"
    assert path in client.get(f"/runs/{run.slug}/terms/").content.decode()
    for typed, error in (
        ("many", "a whole number"),
        ("0", "from 1 to"),
        ("10000000000000000", "from 1 to"),
    ):
        response = client.post(path, {"tokens": typed})
        html = response.content.decode()
        assert response.status_code == 422 and error in html and f'value="{typed}"' in html
    assert client.post(path, {"tokens": "5,000"}).status_code == 302
    run.refresh_from_db()
    assert run.token_budget == budget + 5000
    directive = read_directive(read_reply(machine.report(run, numbered_report(1))))
    assert directive.token_budget == budget + 5000
    run.record_ledger_tokens(run.token_budget)
    response = client.post(path, {"tokens": "5000"})
    assert response.status_code == 422 and "Its budget is spent" in response.content.decode()
    assert path not in client.get(f"/runs/{run.slug}/terms/").content.decode()
    run.finish()
    assert client.get(path).status_code == 302, "no form is shown that cannot be sent"
    html = client.post(path, {"tokens": "5000"}, follow=True).content.decode()
    assert "its budget cannot grow. Train on from its weights" in html
    assert Run.objects.get(pk=run.pk).token_budget == budget + 5000
    html = client.post(f"/runs/{draft(ada).slug}/extend/", {"tokens": "1"}).content.decode()
    assert "edit the draft" in html
