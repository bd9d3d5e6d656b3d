"""What an organiser does with a run: its text, its terms, its notes, invitations, copies; and who may then join."""

import json
import re

import pytest
from django.test import Client
from helpers.pages import field_error

from barnraise.errors import SpecError
from barnraise.protocol import coordinator_messages
from coordinator.accounts.models import Team
from coordinator.accounts.site_settings import SiteSettings
from coordinator.audit.models import AuditEntry
from coordinator.lib.exceptions import UserError
from coordinator.runs.invitations import Guest, RunInvitation
from coordinator.runs.join_policy import Access, JoinPolicy
from coordinator.runs.models import NewRun, Run
from coordinator.runs.spec_form import spec_from_fields

pytestmark = pytest.mark.django_db
INVITED = JoinPolicy(access=Access.INVITATION)


def join(volunteer, run, **said):
    return volunteer.send_request(
        "POST",
        f"/runs/{run.slug}/join",
        coordinator_messages.JoinRequest(version="1", addresses=[], **said),
    )


def sentence(answer) -> str:
    return coordinator_messages.Problem.model_validate_json(answer.content).error


# ---- the text ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "places", "kept"),
    [
        ("stdlib", "", ()),
        ("files", "", ()),
        ("huggingface", " roneneldan/TinyStories ", ("roneneldan/TinyStories",)),
        ("huggingface", "a/b@v1.0", ("a/b@v1.0",)),
        ("urls", "https://example.org/a.txt\r\nhttps://example.org/b.jsonl", ("https://example.org/a.txt", "https://example.org/b.jsonl")),
    ],
)  # fmt: skip
def test_a_run_says_where_its_text_comes_from(signed_in, source, places, kept):
    client, _ = signed_in()
    sent = {"name": "Text", "preset": "gpt-nano", "text.source": source, "text.places": places}
    assert client.post("/runs/new/", sent).status_code == 302
    run = Run.objects.get()
    assert (run.spec.text.source, run.spec.text.places) == (source, kept)
    assert run.spec.recipe.codec == "auto", "what people are offered"
    page = client.get(f"/runs/{run.slug}/edit/").content.decode()
    assert all(place in page for place in kept), "as it was typed"
    assert client.get(f"/runs/{run.slug}/").status_code == 200


@pytest.mark.parametrize(
    ("source", "places", "said"),
    [
        ("stdlib", "https://example.org/a.txt", "takes no addresses"),
        ("huggingface", "", "name one dataset as owner/name"),
        ("huggingface", "../../etc", "name one dataset as owner/name"),
        ("huggingface", "a/b c/d", "name one dataset as owner/name"),
        ("urls", "", "give 1 to 50 addresses"),
        ("urls", "file:///etc/passwd", "must begin with https:// or http://"),
        ("urls", "https://user:secret@example.org/", "holds a name or password"),
        ("urls", "http://127.0.0.1/", "inside a private network"),
        ("urls", "http://[::1]:80/", "inside a private network"),
        ("urls", "http://169.254.169.254/latest/meta-data/", "inside a private network"),
        ("urls", "http://localhost:8000/", "inside a private network"),
        ("urls", "http://printer/", "inside a private network"),
        ("urls", "https://[", "is not an address"),
        ("urls", "https://example.org:99999/", "is not an address"),
        (
            "urls",
            "\n".join(f"https://example.org/{i}" for i in range(51)),
            "give 1 to 50 addresses",
        ),
        ("urls", "https://example.org/" + "x" * 500, "must begin with"),
    ],
)
def test_a_place_that_cannot_be_is_refused_at_its_field_and_stays_typed(
    signed_in, source, places, said
):
    client, _ = signed_in()
    sent = {"name": "Text", "preset": "gpt-nano", "text.source": source, "text.places": places}
    answer = client.post("/runs/new/", sent)
    html = answer.content.decode()
    assert answer.status_code == 422 and not Run.objects.exists()
    assert said in field_error(html, "text.places").lower(), html
    assert (places.split() or [""])[0][:40] in html


def test_another_text_needs_another_manifest(person, draft, manifest, volunteer):
    run = draft(person())
    assert run.accept_manifest(volunteer(run.owner).identity.sign("manifest", manifest(run)))
    other = {
        "recipe.token_budget": 100_000,
        "seed": 7,
        "text.source": "urls",
        "text.places": "https://example.org/a.txt",
    }
    assert run.edit(run.name, spec_from_fields(other)) and run.manifest is None


# ---- who may join --------------------------------------------------------------------------------------------------


def test_invitation_run_admits_machines_of_owner_and_accepted_guests(
    person, launched_run, volunteer, signed_in
):
    run, _ = launched_run(person("owner@example.org", name="Olga"), join_policy=INVITED)
    guest, bob = signed_in("bob@example.org")
    machine = volunteer(bob, 2)
    refused = join(machine, run)
    assert refused.status_code == 403 and "ask Olga to let you in" in sentence(refused)
    invitation = RunInvitation.create(run, "the chess club", actor=run.owner)
    link = f"/runs/{run.slug}/invited/{invitation.token}/"
    assert Client().get(link).status_code == 302, "signing in comes first"
    assert "Olga invites you" in guest.get(link).content.decode() and not Guest.objects.exists()
    assert guest.post(link).status_code == 302 and guest.post(link).status_code == 302
    assert Guest.objects.get().user == bob
    assert join(machine, run).status_code == 200
    assert [
        e.action for e in AuditEntry.objects.filter(action__contains="invit").order_by("id")
    ] == [
        "run.invite",
        "run.accept_invitation",
    ]


def test_invitation_link_revoked_expired_or_wrong_is_not_found(person, launched_run, signed_in):
    run, _ = launched_run(person("owner@example.org"), join_policy=INVITED)
    client, _ = signed_in()
    withdrawn, old, good = (RunInvitation.create(run) for _ in range(3))
    assert withdrawn.withdraw() and not withdrawn.withdraw()
    RunInvitation.objects.filter(pk=old.pk).update(expires=run.created)
    for token in (
        withdrawn.token,
        old.token,
        good.token[:-1] + "!",
        str(good.pk),
        "x" * 300,
        "0:0",
    ):
        assert client.get(f"/runs/{run.slug}/invited/{token}/").status_code == 404, token
    assert client.get(f"/runs/other/invited/{good.token}/").status_code == 404
    assert client.get(f"/runs/{run.slug}/invited/{good.token}/").status_code == 200


def test_who_is_in_stays_in_when_the_terms_change(person, launched_run, volunteer):
    run, _ = launched_run(person("owner@example.org"))
    machine = volunteer(person("bob@example.org"), 2)
    assert join(machine, run).status_code == 200
    assert run.update_join_policy(JoinPolicy(Access.INVITATION, 64 * 10**9), actor=run.owner)
    assert join(machine, run).status_code == 200
    assert join(volunteer(person("eve@example.org"), 3), run).status_code == 403


def test_a_machine_that_is_too_small_is_told_what_the_run_asks_for(
    person, launched_run, volunteer, golden_hardware
):
    run, _ = launched_run(
        person("owner@example.org"),
        join_policy=JoinPolicy(least_memory=16 * 10**9, least_device_memory=24 * 10**9),
    )
    bob = volunteer(person("bob@example.org"), 2)
    assert "asks for 16.0 GB of memory; this machine has 0.0 GB" in sentence(join(bob, run))
    small = golden_hardware.model_copy(update={"memory": 15 * 10**9})  # a PC sold with 16 GB
    assert "asks for 24.0 GB of GPU memory; this machine has 12.9 GB" in sentence(
        join(bob, run, hardware=small)
    )
    large = small.model_copy(update={"device_memory": 24 * 2**30})
    assert join(bob, run, hardware=large).status_code == 200


@pytest.mark.parametrize(
    ("typed", "field"),
    [
        ({"least_memory": "lots"}, "least_memory"),
        ({"least_memory": "-1"}, "least_memory"),
        ({"least_memory": "nan"}, "least_memory"),
        ({"least_device_memory": "1e300"}, "least_device_memory"),
        ({"access": "nobody"}, "access"),
        ({"notes": "x" * 20_001}, "notes"),
    ],
)
def test_terms_that_make_no_sense_are_refused_at_their_field(signed_in, draft, typed, field):
    client, ada = signed_in()
    run = draft(ada)
    good = {"access": "anyone", "least_memory": "8", "notes": "**hello**"}
    for path, more in (
        (f"/runs/{run.slug}/terms/", {}),
        ("/runs/new/", {"name": "New", "preset": "gpt-nano"}),
    ):
        answer = client.post(path, {**good, **more, **typed})
        assert answer.status_code == 422 and field_error(answer.content.decode(), field), path
    assert Run.objects.count() == 1 and run.least_memory == 0
    assert client.post(f"/runs/{run.slug}/terms/", good).status_code == 302
    run.refresh_from_db()
    assert run.join_policy == JoinPolicy("anyone", 8 * 10**9, 0, "**hello**")
    assert b'value="8"' in client.get(f"/runs/{run.slug}/terms/").content


def test_a_run_for_a_team_takes_the_machines_of_its_people_alone(
    person, signed_in, volunteer, launched_run
):
    client, ada = signed_in()
    stranger, eve = signed_in("eve@example.org")
    bob = person("bob@example.org")
    team = Team.create("Weavers", ada)
    team.add_member(bob, ada)
    run, _ = launched_run(ada)
    where = f"/runs/{run.slug}/terms/"
    answer = client.post(where, {"access": "team", "team": ""})
    assert answer.status_code == 422 and "Choose the team" in field_error(
        answer.content.decode(), "team"
    )
    assert client.post(where, {"access": "team", "team": str(team.pk)}).status_code == 302
    assert join(volunteer(bob, 2), run).status_code == 200
    assert "takes the machines of the team Weavers" in sentence(join(volunteer(eve, 3), run))
    page = stranger.get(f"/runs/{run.slug}/").content.decode()
    assert (
        "ask " in page
        and "barnraise join" not in page.split("join-title")[1].split("</section>")[0]
    )
    team.remove_member(bob, bob)
    assert join(volunteer(bob, 4), run).status_code == 403
    theirs = Team.create("Elsewhere", eve)
    assert client.post(where, {"access": "team", "team": str(theirs.pk)}).status_code == 422, (
        "not a team of hers"
    )
    team.disband(ada)
    run.refresh_from_db()
    assert "a team that is gone" in sentence(join(volunteer(eve, 5), run))
    assert (
        client.get(f"/runs/{run.slug}/").status_code == 200 and client.get(where).status_code == 200
    )


def test_who_may_not_create_runs_may_not_copy_them_either(person, launched_run, signed_in):
    run, _ = launched_run(person("owner@example.org"))
    SiteSettings.set_organisers("granted", run.owner)
    client, _ = signed_in("bob@example.org")
    assert client.post(f"/runs/{run.slug}/clone/").status_code == 403
    assert "Copy as a new run" not in client.get(f"/runs/{run.slug}/").content.decode()


# ---- who may do what -----------------------------------------------------------------------------------------------

ROLES = ("visitor", "stranger", "owner", "staff")
TABLE = [
    ("get", "/runs/{run}/terms/", (302, 403, 200, 200)),
    ("post", "/runs/{run}/terms/", (302, 403, 302, 302)),
    ("post", "/runs/{run}/invitations/", (302, 403, 302, 302)),
    ("post", "/runs/{run}/invitations/{invitation}/", (302, 403, 302, 302)),
    ("get", "/runs/{run}/invited/{token}/", (302, 200, 200, 200)),
    ("post", "/runs/{run}/clone/", (302, 302, 302, 302)),
    ("post", "/runs/{run}/archive/", (302, 403, 302, 302)),
    ("post", "/runs/{run}/unarchive/", (302, 403, 302, 302)),
    ("post", "/runs/estimate/", (302, 200, 200, 200)),
    ("get", "/runs/{run}/clone/", (302, 405, 405, 405)),
]


@pytest.mark.parametrize(
    ("method", "path", "expected"), TABLE, ids=[f"{m} {p}" for m, p, _ in TABLE]
)
def test_each_page_of_an_organiser_knows_who_may(person, launched_run, method, path, expected):
    run, _ = launched_run(person("owner@example.org"), join_policy=INVITED)
    invitation = RunInvitation.create(run)
    people = {
        "stranger": person("eve@example.org"), "owner": run.owner, "staff": person("root@example.org", is_staff=True),
    }  # fmt: skip
    found = []
    for role in ROLES:
        client = Client()
        if role in people:
            client.force_login(people[role])
        where = path.format(run=run.slug, invitation=invitation.pk, token=invitation.token)
        sent = {"access": "anyone"} if "terms" in path else {"name": "x", "preset": "gpt-nano"}
        found.append(getattr(client, method)(where, sent).status_code)
    assert dict(zip(ROLES, found, strict=True)) == dict(zip(ROLES, expected, strict=True))


def test_another_runs_invitation_is_not_the_owners_to_withdraw(person, launched_run, draft):
    run, _ = launched_run(person("owner@example.org"))
    theirs = RunInvitation.create(draft(person("bob@example.org")))
    client = Client()
    client.force_login(run.owner)
    assert client.post(f"/runs/{run.slug}/invitations/{theirs.pk}/").status_code == 404
    assert RunInvitation.objects.get(pk=theirs.pk).withdrawn is None


def test_a_run_made_with_senseless_terms_is_refused_whoever_makes_it(person):
    with pytest.raises(SpecError) as refused:
        policy = JoinPolicy("nobody", -1, 1 << 60, "x" * 30_000)
        Run.create(person(), NewRun("x", spec_from_fields({}), join_policy=policy))
    assert set(refused.value.problems) == {"access", "least_memory", "least_device_memory", "notes"}
    assert json.dumps(refused.value.problems)


# ---- the strategy --------------------------------------------------------------------------------------------------


def test_run_form_offers_auto_strategy_by_default(signed_in):
    client, _ = signed_in()
    page = client.get("/runs/new/").content.decode()
    assert re.search(r'<option value="auto"( selected)?>Auto: adapted', page)
    sent = {"name": "Auto", "preset": "gpt-nano", "recipe.strategy": "auto"}
    assert client.post("/runs/new/", sent).status_code == 302
    recipe = Run.objects.get().spec.recipe
    assert (recipe.strategy, recipe.codec) == ("streams", "auto")
    page = client.get(f"/runs/{Run.objects.get().slug}/edit/").content.decode()
    assert '<option value="auto" selected>Auto: adapted' in page
    said = client.post("/runs/estimate/", {**sent, "volunteers": "25"}).content.decode()
    assert (
        said.count("Auto: exchange every") >= 2
        and "25 of these, 20 Mb/s" in said
        and "25 of these, 100 Mb/s" in said
    )


def test_fixed_rounds_are_refused_with_auto_and_accepted_otherwise(signed_in):
    client, _ = signed_in()
    sent = {
        "name": "Fixed",
        "preset": "gpt-nano",
        "recipe.strategy": "auto",
        "recipe.codec": "dense4",
    }
    answer = client.post("/runs/new/", sent)
    assert answer.status_code == 422 and "choose another strategy" in field_error(
        answer.content.decode(), "recipe.codec"
    )
    assert client.post("/runs/new/", sent | {"recipe.strategy": "async"}).status_code == 302
    assert Run.objects.get().spec.recipe.codec == "dense4"


# ---- the budget ----------------------------------------------------------------------------------------------------


def test_owner_extends_run_only_while_tokens_are_left(
    signed_in, launched_run, draft, numbered_report
):
    client, ada = signed_in()
    run, machine = launched_run(ada)
    before, at = run.token_budget, f"/runs/{run.slug}/extend/"
    assert at in client.get(f"/runs/{run.slug}/terms/").content.decode()
    for typed, told in (
        ("many", "a whole number"),
        ("0", "from 1 to"),
        ("10000000000000000", "from 1 to"),
    ):
        page = client.post(at, {"tokens": typed})
        text = page.content.decode()
        assert page.status_code == 422 and told in text and f'value="{typed}"' in text
    assert client.post(at, {"tokens": "5,000"}).status_code == 302
    run.refresh_from_db()
    assert run.token_budget == before + 5000
    reply = coordinator_messages.ReportReply.model_validate_json(
        machine.report(run, numbered_report(1)).content
    )
    assert (
        coordinator_messages.Directive.model_validate_json(reply.directive.body).token_budget
        == before + 5000
    )
    run.record_ledger_tokens(run.token_budget)
    spent = client.post(at, {"tokens": "5000"})
    assert spent.status_code == 422 and "Its budget is spent" in spent.content.decode()
    assert at not in client.get(f"/runs/{run.slug}/terms/").content.decode()
    run.finish()
    assert (
        "what is over is never opened again" in client.post(at, {"tokens": "5000"}).content.decode()
    )
    assert Run.objects.get(pk=run.pk).token_budget == before + 5000
    assert (
        "edit the draft"
        in client.post(f"/runs/{draft(ada).slug}/extend/", {"tokens": "1"}).content.decode()
    )


def test_two_that_extend_a_run_at_the_same_moment_do_not_undo_each_other(person, launched_run):
    run, _ = launched_run(person())
    other = Run.objects.get(pk=run.pk)
    run.extend(1000)
    with pytest.raises(UserError, match="look again"):
        other.extend(500)
    other.extend(500)
    assert Run.objects.get(pk=run.pk).extra_tokens == 1500
