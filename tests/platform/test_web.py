"""The pages as browsers ask for them: who may see what, what forms say, and what the HTML must never hold."""

import json
import re
import time

import pytest
from django.conf import settings
from django.contrib.staticfiles.finders import find
from django.test import Client
from django.urls import reverse

from barnraise import wire
from barnraise.identity import Identity
from coordinator import mirror
from coordinator.accounts.models import Enrolment, Machine, Team
from coordinator.runs.models import Run
from coordinator.web import drawing
from coordinator.web.forms import RunForm
from coordinator.web.templatetags import barnraise as tags

pytestmark = pytest.mark.django_db

GOOD = {"name": "Evening shift", "preset": "gpt-nano"}


@pytest.fixture(autouse=True)
def built():
    assert (settings.DIST / "manifest.json").exists(), "build the frontend first: make setup"


@pytest.fixture
def signed_in(person):
    def make(email: str = "ada@example.org", **fields) -> tuple[Client, object]:
        client, user = Client(), person(email, **fields)
        client.force_login(user)
        return client, user

    return make


@pytest.fixture
def waiting(db) -> Enrolment:
    """A machine that waits for its code to be approved."""
    key = Identity(b"w" * 32).key
    machine = wire.Machine(hostname="attic-pc", system="Linux", cores=4, memory_bytes=8 << 30)
    return Enrolment.open(
        wire.EnrolmentRequest(mirror=mirror.identity().key, key=key, machine=machine, issued=time.time())
    )


def text(answer) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", answer.content.decode()))


def field_error(html: str, name: str) -> str:
    """What the page says at this field, "" for nothing."""
    found = re.search(rf'<p class="error" id="id_{re.escape(name)}_error">(.*?)</p>', html)
    return found[1] if found else ""


# ---- who may see what ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/runs/", "/accounts/login/", "/accounts/signup/"])
def test_a_visitor_may_look_around(path, valkey):
    answer = Client().get(path)
    assert answer.status_code == 200
    assert b"Sign in" in answer.content


@pytest.mark.parametrize("path", ["/runs/new/", "/machines/", "/machines/enrol/", "/machines/enrol/BCDF-GHJK/"])
def test_what_is_a_persons_own_asks_a_visitor_to_sign_in(path):
    answer = Client().get(path)
    assert answer.status_code == 302
    assert answer["Location"].startswith(reverse("account_login")) and "next=" in answer["Location"]


def test_a_draft_is_its_owners_and_nobody_elses(signed_in, draft, valkey):
    owner, ada = signed_in()
    stranger, _ = signed_in("bob@example.org")
    run = draft(ada, name="Secret plans")
    for client in (Client(), stranger):
        assert client.get(f"/runs/{run.slug}/").status_code == 404
        assert "Secret plans" not in text(client.get("/runs/")) + text(client.get("/"))
    assert "Secret plans" in text(owner.get(f"/runs/{run.slug}/"))
    assert "Secret plans" in text(owner.get("/runs/"))


def test_a_launched_run_is_everybodys_to_see_and_its_owners_to_control(person, signed_in, launched):
    run, _ = launched(person("owner@example.org"))
    stranger, _ = signed_in()
    for client in (Client(), stranger):
        answer = client.get(f"/runs/{run.slug}/")
        assert answer.status_code == 200 and b"data-control" not in answer.content
    assert stranger.post(f"/runs/{run.slug}/pause/").status_code == 403
    assert Client().post(f"/runs/{run.slug}/pause/").status_code == 302
    run.refresh_from_db()
    assert run.state is wire.Status.TRAINING


def test_the_owner_launches_pauses_resumes_and_cancels(signed_in, launched, draft):
    client, ada = signed_in()
    started = draft(ada, name="Not yet")
    assert client.get(f"/runs/{started.slug}/launch/").status_code == 405, "a link must not launch"
    assert "Launched" in text(client.post(f"/runs/{started.slug}/launch/", follow=True))
    started.refresh_from_db()
    assert started.launch_requested

    run, _ = launched(ada)
    for action, state in (("pause", "paused"), ("resume", "training"), ("cancel", "cancelled")):
        assert client.post(f"/runs/{run.slug}/{action}/").status_code == 302
        run.refresh_from_db()
        assert run.status == state
    assert "cannot pause" in text(client.post(f"/runs/{run.slug}/pause/", follow=True))
    assert client.post(f"/runs/{run.slug}/finish/").status_code == 404, "finishing is an admin's"


def test_only_staff_is_shown_the_way_to_the_admin(signed_in, valkey):
    assert b"/admin/" not in signed_in()[0].get("/").content
    assert b"/admin/" in signed_in("staff@example.org", is_staff=True)[0].get("/").content


def test_the_run_page_shows_how_to_join_and_who_is_there(person, launched):
    run, volunteer = launched(person(name="Ada Lovelace"))
    page = Client().get(f"/runs/{run.slug}/")
    assert "barnraise login http://testserver" in text(page)
    assert f"barnraise join {run.slug}" in text(page)
    assert volunteer.machine.hostname in text(page) and "Ada Lovelace" in text(page)
    assert "ada@example.org" not in page.content.decode(), "an address is nobody else's business"


def test_a_name_full_of_markup_is_shown_as_typed(signed_in, draft, valkey):
    client, ada = signed_in()
    run = draft(ada, name="<script>alert(1)</script>")
    page = client.get(f"/runs/{run.slug}/").content.decode()
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page


# ---- the form of a run ---------------------------------------------------------------------------------------------


def test_a_preset_and_a_name_make_a_draft(signed_in):
    client, ada = signed_in()
    answer = client.post("/runs/new/", GOOD)
    run = Run.objects.get()
    assert answer.status_code == 302 and answer["Location"] == f"/runs/{run.slug}/"
    assert (run.owner, run.name, run.status) == (ada, "Evening shift", "draft")
    assert run.spec.model.layers == 4 and run.token_budget == 2_000_000


def test_a_run_named_like_a_page_gets_an_address_of_its_own(signed_in):
    client, _ = signed_in()
    for name in ("New", "Estimate"):
        answer = client.post("/runs/new/", {**GOOD, "name": name}, follow=True)
        assert f"<h1>{name}</h1>" in answer.content.decode()


def test_numbers_may_be_written_as_people_write_them(signed_in):
    client, _ = signed_in()
    client.post("/runs/new/", {**GOOD, "recipe.token_budget": "5e6", "recipe.evaluate_every": "50,000", "quorum": "2"})
    run = Run.objects.get()
    assert (run.token_budget, run.spec.recipe.evaluate_every, run.quorum) == (5_000_000, 50_000, 2)


@pytest.mark.parametrize(
    ("field", "typed", "said"),
    [
        ("name", "", "name of 1 to 80"),
        ("name", "x" * 81, "name of 1 to 80"),
        ("model.layers", "0", "between 1 and 256"),
        ("model.heads", "7", "try 8"),
        ("model.context", "99999", "between 8 and 16,384"),
        ("model.layers", "four", "must be a whole number, not 'four'"),
        ("text.source", "the-pile", "not one of the available choices"),
        ("recipe.token_budget", "-5", "token budget must be between"),
        ("recipe.learning_rate", "nan", "learning rate must be between"),
        ("recipe.round_steps", "10000", "over the"),
        ("text.held_out", "0.9", "between 0.001 and 0.5"),
        ("quorum", "0", "between 1 and 10,000"),
        ("quorum", "many", "must be a whole number"),
        ("report_every", "0.01", "between 0.2 and 3,600"),
        ("seed", "-1", "the seed must be between"),
    ],
)
def test_a_field_that_makes_no_sense_says_so_and_keeps_what_was_typed(signed_in, field, typed, said):
    client, _ = signed_in()
    sent = {**GOOD, "recipe.weight_decay": "0.25", field: typed}
    if field == "recipe.round_steps":
        sent |= {"model.context": "16384", "recipe.step_sequences": "65536"}
    answer = client.post("/runs/new/", sent)
    page = answer.content.decode()
    assert answer.status_code == 422
    assert said.lower() in field_error(page, field).lower().replace("&#x27;", "'")
    assert 'value="0.25"' in page, "the other fields keep what was typed"
    if typed and not field.startswith("text.source"):
        assert f'value="{typed}"' in page
        assert re.search(rf'name="{re.escape(field)}"[^>]*aria-invalid="true"', page)
    assert not Run.objects.exists()


def test_a_problem_in_a_folded_field_unfolds_it(signed_in):
    client, _ = signed_in()
    fold = r'<details class="card fold"( open)?>'
    assert not re.search(fold, client.get("/runs/new/").content.decode())[1]
    assert re.search(fold, client.post("/runs/new/", {**GOOD, "model.heads": "7"}).content.decode())[1]


def test_several_problems_are_all_said_at_once_each_with_a_way_to_its_field(signed_in):
    client, _ = signed_in()
    bad = {"preset": "gpt-nano", "recipe.token_budget": "-5", "model.heads": "7", "quorum": "x"}
    page = client.post("/runs/new/", bad).content.decode()
    for name in ("name", "recipe.token_budget", "model.heads", "quorum"):
        assert field_error(page, name) and f'href="#id_{name}"' in page


def test_an_unknown_preset_is_refused_at_its_field(signed_in):
    client, _ = signed_in()
    answer = client.post("/runs/new/", {**GOOD, "preset": "gpt-9"})
    assert answer.status_code == 422 and field_error(answer.content.decode(), "preset")


def test_the_bytes_tokenizer_brings_its_vocabulary(signed_in):
    client, _ = signed_in()
    client.post("/runs/new/", {**GOOD, "text.tokenizer": "bytes"})
    assert Run.objects.get().spec.model.vocabulary == 256


def test_a_draft_can_be_edited_until_it_is_launched(signed_in):
    client, _ = signed_in()
    client.post(
        "/runs/new/", {**GOOD, "preset": "gpt-micro", "recipe.learning_rate": "0.002", "text.tokenizer": "bytes"}
    )
    run = Run.objects.get()
    seed = run.spec.seed
    page = client.get(f"/runs/{run.slug}/edit/").content.decode()
    assert 'value="0.002"' in page and re.search(r'value="gpt-micro"\s+checked', page)
    form = RunForm(run=run)
    sent = {field.name: field.value() or "" for field in form} | {"name": "Renamed", "recipe.token_budget": "9000"}
    assert client.post(f"/runs/{run.slug}/edit/", sent).status_code == 302
    run.refresh_from_db()
    assert (run.name, run.token_budget, run.spec.recipe.learning_rate, run.spec.seed) == ("Renamed", 9000, 0.002, seed)
    assert run.spec.model.layers == 6 and run.spec.model.vocabulary == 256

    run.launch()
    assert "never change" in text(client.post(f"/runs/{run.slug}/edit/", sent | {"name": "Again"}, follow=True))
    run.refresh_from_db()
    assert run.name == "Renamed"


def test_a_stranger_cannot_edit_a_draft(signed_in, draft):
    _, ada = signed_in()
    stranger, _ = signed_in("bob@example.org")
    assert stranger.get(f"/runs/{draft(ada).slug}/edit/").status_code == 404


def test_the_estimate_follows_the_form_as_it_is_typed(signed_in):
    client, _ = signed_in()
    answer = client.post("/runs/estimate/", {"preset": "gpt2-124m"})
    assert answer.status_code == 200 and "124 M" in text(answer), "no name is needed for an estimate"
    assert "1 field" in text(client.post("/runs/estimate/", {**GOOD, "model.heads": "7"}))


# ---- machines and their enrolment ----------------------------------------------------------------------------------


def test_a_person_approves_the_machine_whose_code_they_see(signed_in, waiting):
    client, ada = signed_in()
    page = client.get(f"/machines/enrol/{waiting.code}/")
    assert waiting.code in text(page) and "attic-pc" in text(page) and "8.0 GiB" in text(page)
    assert not Machine.objects.exists(), "looking approves nothing"
    answer = client.post(f"/machines/enrol/{waiting.code}/", {"answer": "approve"})
    assert "attic-pc is yours" in text(answer)
    assert Machine.objects.get().owner == ada
    assert "attic-pc" in text(client.get("/machines/"))


def test_a_machine_that_is_not_theirs_is_turned_away(signed_in, waiting):
    client, _ = signed_in()
    assert "Refused" in text(client.post(f"/machines/enrol/{waiting.code}/", {"answer": "refuse"}))
    assert not Machine.objects.exists()
    late = client.post(f"/machines/enrol/{waiting.code}/", {"answer": "approve"})
    assert late.status_code == 409 and "barnraise login" in text(late)
    assert not Machine.objects.exists()


def test_a_code_may_be_typed_small_and_without_its_hyphen(signed_in, waiting):
    client, _ = signed_in()
    answer = client.get("/machines/enrol/", {"code": waiting.code.lower().replace("-", "")})
    assert answer["Location"] == f"/machines/enrol/{waiting.code}/"
    wrong = client.get("/machines/enrol/", {"code": "nope"})
    assert wrong.status_code == 404 and 'value="nope"' in wrong.content.decode()


def test_approval_cannot_be_sent_from_another_site(waiting, person):
    client = Client(enforce_csrf_checks=True)
    client.force_login(person())
    assert client.post(f"/machines/enrol/{waiting.code}/", {"answer": "approve"}).status_code == 403
    assert not Machine.objects.exists()


def test_only_its_owner_revokes_a_machine(signed_in, volunteer):
    client, ada = signed_in()
    stranger, _ = signed_in("bob@example.org")
    machine = volunteer(ada).machine
    assert stranger.post(f"/machines/{machine.pk}/revoke/").status_code == 404
    machine.refresh_from_db()
    assert machine.revoked is None
    assert "is revoked" in text(client.post(f"/machines/{machine.pk}/revoke/", follow=True))
    machine.refresh_from_db()
    assert machine.revoked
    assert machine.name not in text(stranger.get("/machines/"))


# ---- what every page must be ---------------------------------------------------------------------------------------


def test_no_page_carries_a_script_or_a_style_of_its_own(signed_in, launched, draft, waiting, volunteer):
    client, ada = signed_in(is_staff=True)
    run, _ = launched(ada)
    unfinished, team = draft(ada, name="Draft"), Team.found("Weavers", ada)
    paths = ["/", "/runs/", "/runs/new/", f"/runs/{run.slug}/", f"/runs/{unfinished.slug}/", "/machines/", "/nowhere/",
             f"/runs/{unfinished.slug}/edit/", f"/machines/enrol/{waiting.code}/", "/machines/enrol/",
             "/accounts/email/", "/accounts/password/change/", "/accounts/logout/", "/accounts/2fa/", "/account/",
             "/accounts/sessions/", "/accounts/reauthenticate/", "/teams/", "/teams/new/", f"/teams/{team.slug}/",
             "/teams/invitations/none/", "/notifications/", "/notifications/choices/",
             "/notifications/webhooks/"]  # fmt: skip
    for path in paths:
        answer = client.get(path)
        page = answer.content.decode()
        assert answer["Content-Security-Policy"].count("unsafe") == 0, path
        assert not re.search(r"\sstyle=|\son[a-z]+=|<style", page), path
        for script in re.findall(r"<script\b[^>]*>", page):
            assert "src=" in script or 'type="application/json"' in script, (path, script)
        assert page.count("<h1") == 1 and "<title>" in page and 'lang="en"' in page, path


def test_what_is_not_there_says_so_in_the_sites_own_words():
    answer = Client().get("/nowhere/")
    assert answer.status_code == 404 and "Nothing stands here" in text(answer)


def test_the_chosen_theme_is_there_from_the_first_byte(valkey):
    client = Client()
    assert "data-theme" not in client.get("/").content.decode().split(">", 2)[1]
    client.cookies["theme"] = "dark"
    assert '<html lang="en" data-theme="dark">' in client.get("/").content.decode()
    client.cookies["theme"] = '"><script>'
    assert '<html lang="en">' in client.get("/").content.decode()


def test_signing_up_makes_a_person_with_a_name_and_says_what_is_wrong_at_the_field(valkey):
    client = Client()
    sent = {"email": "eve@example.org", "password1": "short", "name": "Eve"}
    answer = client.post("/accounts/signup/", sent)
    page = answer.content.decode()
    assert field_error(page, "password1") and 'value="Eve"' in page
    answer = client.post(
        "/accounts/signup/", {"email": "eve@example.org", "password1": "oak-and-spruce-7", "name": "Eve"}
    )
    assert answer.status_code == 302, "the rest is in test_accounts"


def test_built_files_are_named_by_the_manifest_and_are_there():
    page = Client().get("/accounts/login/").content.decode()
    names = re.findall(r'(?:src|href)="/static/([^"]+)"', page)
    assert any(name.endswith(".js") for name in names) and any(name.endswith(".css") for name in names)
    assert all(find(name) for name in names)
    assert json.loads((settings.DIST / "manifest.json").read_text())["src/main.ts"]["isEntry"]


# ---- drawings and numbers ------------------------------------------------------------------------------------------


def test_the_frame_is_raised_timber_by_timber_and_done_only_at_the_end():
    members = len(drawing.frame().members)
    assert sorted(member.order for member in drawing.frame().members) == list(range(members))
    steps = [drawing.raised(share / 1000, members) for share in range(1001)]
    assert steps == sorted(steps) and steps[0] == 0 and steps[1] == 1
    assert steps[999] == members - 1 and steps[1000] == members


def test_a_quilt_is_a_runs_own_for_ever_and_turns_onto_itself():
    one, two = drawing.quilt("0199aaaa"), drawing.quilt("0199aaab")
    assert one == drawing.quilt("0199aaaa") != two
    assert len(one) % 4 == 0

    def places(patches):
        return {(tint, frozenset(points.split())) for tint, points in patches}

    def turn(points):
        return " ".join(f"{6 - float(y):g},{float(x):g}" for x, y in (p.split(",") for p in points.split()))

    assert places((tint, turn(points)) for tint, points in one) == places(one)


def test_the_server_writes_numbers_as_the_page_goes_on_to():
    numbers = (0, 7, 999, 999.6, 1000, 12_345, 999_499, 999_600, 1_234_567, 10**15)
    assert [tags.count(n) for n in numbers] == [
        "0", "7", "999", "1.00 K", "1.00 K", "12.3 K", "999 K", "1.00 M", "1.23 M", "1.00 P",
    ]  # fmt: skip
    assert [tags.percent(s) for s in (0, 0.001, 0.0994, 0.5, 0.9999, 1, 1.2)] == [
        "0 %", "0.1 %", "9.9 %", "50 %", "99 %", "100 %", "100 %",
    ]  # fmt: skip
