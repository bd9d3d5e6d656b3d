"""The pages as browsers ask for them: who may see what, and what the HTML must never hold."""

import json
import re
import time

import pytest
from django.conf import settings
from django.contrib.staticfiles.finders import find
from django.test import Client
from django.urls import reverse
from helpers.pages import field_error, text

from barnraise.protocol import coordinator_messages, enums
from barnraise.protocol.signing import Identity
from coordinator.accounts.models import Enrolment, Machine, Team
from coordinator.lib import site_identity
from coordinator.web import svg_art
from coordinator.web.templatetags import barnraise as tags

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("built_frontend")]


@pytest.fixture
def waiting(db) -> Enrolment:
    """A machine that waits for its code to be approved."""
    key = Identity(b"w" * 32).key
    machine = coordinator_messages.MachineDescription(
        hostname="attic-pc", system="Linux", cores=4, memory_bytes=8 << 30
    )
    return Enrolment.open(
        coordinator_messages.EnrolmentRequest(
            mirror=site_identity.identity().key, key=key, machine=machine, issued=time.time()
        )
    )


# ---- who may see what ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/runs/", "/accounts/login/", "/accounts/signup/"])
def test_a_visitor_may_look_around(path, valkey):
    answer = Client().get(path)
    assert answer.status_code == 200
    assert b"Sign in" in answer.content


@pytest.mark.parametrize(
    "path", ["/runs/new/", "/machines/", "/machines/enrol/", "/machines/enrol/BCDF-GHJK/"]
)
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


def test_a_launched_run_is_everybodys_to_see_and_its_owners_to_control(
    person, signed_in, launched_run
):
    run, _ = launched_run(person("owner@example.org"))
    stranger, _ = signed_in()
    for client in (Client(), stranger):
        answer = client.get(f"/runs/{run.slug}/")
        assert answer.status_code == 200 and b"data-control" not in answer.content
    assert stranger.post(f"/runs/{run.slug}/pause/").status_code == 403
    assert Client().post(f"/runs/{run.slug}/pause/").status_code == 302
    run.refresh_from_db()
    assert run.state is enums.RunStatus.TRAINING


def test_the_owner_launches_pauses_resumes_and_cancels(signed_in, launched_run, draft):
    client, ada = signed_in()
    started = draft(ada, name="Not yet")
    assert client.get(f"/runs/{started.slug}/launch/").status_code == 405, "a link must not launch"
    assert "Launched" in text(client.post(f"/runs/{started.slug}/launch/", follow=True))
    started.refresh_from_db()
    assert started.launch_requested

    run, _ = launched_run(ada)
    for action, state in (("pause", "paused"), ("resume", "training"), ("cancel", "cancelled")):
        assert client.post(f"/runs/{run.slug}/{action}/").status_code == 302
        run.refresh_from_db()
        assert run.status == state
    assert "cannot pause" in text(client.post(f"/runs/{run.slug}/pause/", follow=True))
    assert client.post(f"/runs/{run.slug}/finish/").status_code == 404, "finishing is an admin's"


def test_only_staff_is_shown_the_way_to_the_admin(signed_in, valkey):
    assert b"/admin/" not in signed_in()[0].get("/").content
    assert b"/admin/" in signed_in("staff@example.org", is_staff=True)[0].get("/").content


def test_the_run_page_shows_how_to_join_and_who_is_there(person, launched_run):
    run, volunteer = launched_run(person(name="Ada Lovelace"))
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


def test_no_page_carries_a_script_or_a_style_of_its_own(
    signed_in, launched_run, draft, waiting, volunteer
):
    client, ada = signed_in(is_staff=True)
    run, _ = launched_run(ada)
    unfinished, team = draft(ada, name="Draft"), Team.create("Weavers", ada)
    paths = ["/", "/runs/", "/runs/new/", f"/runs/{run.slug}/", f"/runs/{unfinished.slug}/", "/machines/", "/nowhere/",
             f"/runs/{unfinished.slug}/edit/", f"/machines/enrol/{waiting.code}/", "/machines/enrol/",
             "/accounts/email/", "/accounts/password/change/", "/accounts/logout/", "/accounts/2fa/", "/account/",
             "/accounts/sessions/", "/accounts/reauthenticate/", "/teams/", "/teams/new/", f"/teams/{team.slug}/",
             "/teams/invitations/none/", "/notifications/", "/notifications/settings/",
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
    assert answer.status_code == 404 and "Page not found" in text(answer)


def test_the_chosen_theme_is_there_from_the_first_byte(valkey):
    client = Client()
    assert "data-theme" not in client.get("/").content.decode().split(">", 2)[1]
    client.cookies["theme"] = "dark"
    assert '<html lang="en" data-theme="dark">' in client.get("/").content.decode()
    client.cookies["theme"] = '"><script>'
    assert '<html lang="en">' in client.get("/").content.decode()


def test_signup_creates_named_user_and_shows_errors_at_fields(valkey):
    client = Client()
    sent = {"email": "eve@example.org", "password1": "short", "name": "Eve"}
    answer = client.post("/accounts/signup/", sent)
    page = answer.content.decode()
    assert field_error(page, "password1") and 'value="Eve"' in page
    answer = client.post(
        "/accounts/signup/",
        {"email": "eve@example.org", "password1": "oak-and-spruce-7", "name": "Eve"},
    )
    assert answer.status_code == 302, "the rest is in test_accounts"


def test_built_files_are_named_by_the_manifest_and_are_there():
    page = Client().get("/accounts/login/").content.decode()
    names = re.findall(r'(?:src|href)="/static/([^"]+)"', page)
    assert any(name.endswith(".js") for name in names) and any(
        name.endswith(".css") for name in names
    )
    assert all(find(name) for name in names)
    assert json.loads((settings.DIST / "manifest.json").read_text())["src/main.ts"]["isEntry"]


# ---- drawings and numbers ------------------------------------------------------------------------------------------


def test_the_frame_is_raised_timber_by_timber_and_done_only_at_the_end():
    members = len(svg_art.timber_frame().members)
    assert sorted(member.order for member in svg_art.timber_frame().members) == list(range(members))
    steps = [svg_art.count_raised(share / 1000, members) for share in range(1001)]
    assert steps == sorted(steps) and steps[0] == 0 and steps[1] == 1
    assert steps[999] == members - 1 and steps[1000] == members


def test_a_quilt_is_a_runs_own_for_ever_and_turns_onto_itself():
    one, two = svg_art.quilt("0199aaaa"), svg_art.quilt("0199aaab")
    assert one == svg_art.quilt("0199aaaa") != two
    assert len(one) % 4 == 0

    def places(patches):
        return {(tint, frozenset(points.split())) for tint, points in patches}

    def turn(points):
        return " ".join(
            f"{6 - float(y):g},{float(x):g}" for x, y in (p.split(",") for p in points.split())
        )

    assert places((tint, turn(points)) for tint, points in one) == places(one)


def test_the_server_writes_numbers_as_the_page_goes_on_to():
    numbers = (0, 7, 999, 999.6, 1000, 12_345, 999_499, 999_600, 1_234_567, 10**15)
    assert [tags.count(n) for n in numbers] == [
        "0", "7", "999", "1.00 K", "1.00 K", "12.3 K", "999 K", "1.00 M", "1.23 M", "1.00 P",
    ]  # fmt: skip
    assert [tags.percent(s) for s in (0, 0.001, 0.0994, 0.5, 0.9999, 1, 1.2)] == [
        "0 %", "0.1 %", "9.9 %", "50 %", "99 %", "100 %", "100 %",
    ]  # fmt: skip
