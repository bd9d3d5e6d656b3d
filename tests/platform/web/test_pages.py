"""Test the pages as browsers request them: who may see what, and what no page may contain."""

import json
import re

import pytest
from django.conf import settings
from django.contrib.staticfiles.finders import find
from django.test import Client
from helpers.paths import ROOT
from helpers.site.enrolment_requests import enrolment_request
from helpers.site.pages import field_error, text

from barnraise.protocol import coordinator_messages
from barnraise.protocol.signing import Identity
from coordinator.accounts.models import Enrolment, Machine, Team
from coordinator.web import svg_art

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("built_frontend")]


@pytest.fixture
def enrolment(db) -> Enrolment:
    """Return the enrolment of a machine whose code is not approved yet."""
    machine = coordinator_messages.MachineDescription(
        hostname="attic-pc", system="Linux", cores=4, memory_bytes=8 << 30
    )
    return Enrolment.open(enrolment_request(Identity(b"w" * 32), machine=machine))


# ---- who may see what ----------------------------------------------------------------------


def test_link_to_admin_is_shown_to_staff_only(signed_in, valkey):
    assert b"/admin/" not in signed_in()[0].get("/").content
    assert b"/admin/" in signed_in("staff@example.org", is_staff=True)[0].get("/").content


# ---- machines and their enrolment ----------------------------------------------------------


def test_approved_enrolment_adds_machine_to_the_person(signed_in, enrolment):
    client, ada = signed_in()
    page = client.get(f"/machines/enrol/{enrolment.code}/")
    assert enrolment.code in text(page) and "attic-pc" in text(page) and "8.6 GB" in text(page)
    assert not Machine.objects.exists(), "viewing the page approves nothing"
    response = client.post(f"/machines/enrol/{enrolment.code}/", {"answer": "approve"})
    assert "attic-pc is yours" in text(response)
    assert Machine.objects.get().owner == ada
    assert "attic-pc" in text(client.get("/machines/"))


def test_refused_enrolment_cannot_be_approved_later(signed_in, enrolment):
    client, _ = signed_in()
    path = f"/machines/enrol/{enrolment.code}/"
    assert "Refused" in text(client.post(path, {"answer": "refuse"}))
    assert not Machine.objects.exists()
    response = client.post(path, {"answer": "approve"})
    assert response.status_code == 409 and "barnraise login" in text(response)
    assert not Machine.objects.exists()


def test_enrolment_code_without_hyphen_in_lower_case_is_found(signed_in, enrolment):
    client, _ = signed_in()
    code = enrolment.code.lower().replace("-", "")
    response = client.get("/machines/enrol/", {"code": code})
    assert response["Location"] == f"/machines/enrol/{enrolment.code}/"
    response = client.get("/machines/enrol/", {"code": "nope"})
    assert response.status_code == 404 and 'value="nope"' in response.content.decode()


# ---- all pages -----------------------------------------------------------------------------


def test_no_page_has_inline_scripts_or_styles(signed_in, launched_run, draft, enrolment):
    client, ada = signed_in(is_staff=True)
    run, _ = launched_run(ada)
    draft_run = draft(ada, name="Draft")
    team = Team.create("Weavers", ada)
    paths = [
        "/",
        "/nowhere/",
        "/runs/",
        "/runs/new/",
        f"/runs/{run.slug}/",
        f"/runs/{draft_run.slug}/",
        f"/runs/{draft_run.slug}/edit/",
        "/machines/",
        "/machines/enrol/",
        f"/machines/enrol/{enrolment.code}/",
        "/account/",
        "/accounts/email/",
        "/accounts/password/change/",
        "/accounts/logout/",
        "/accounts/2fa/",
        "/accounts/sessions/",
        "/accounts/reauthenticate/",
        "/teams/",
        "/teams/new/",
        f"/teams/{team.slug}/",
        "/teams/invitations/none/",
        "/notifications/",
        "/notifications/settings/",
        "/notifications/webhooks/",
    ]
    for path in paths:
        response = client.get(path)
        page = response.content.decode()
        assert "unsafe" not in response["Content-Security-Policy"], path
        assert not re.search(r"\sstyle=|\son[a-z]+=|<style", page), path
        for script in re.findall(r"<script\b[^>]*>", page):
            assert "src=" in script or 'type="application/json"' in script, (path, script)
        assert page.count("<h1") == 1 and "<title>" in page and 'lang="en"' in page, path


def test_unknown_address_shows_the_sites_own_error_page():
    response = Client().get("/nowhere/")
    assert response.status_code == 404 and "Page not found" in text(response)


def test_chosen_theme_is_set_on_the_html_element(valkey):
    client = Client()
    assert "data-theme" not in client.get("/").content.decode().split(">", 2)[1]
    client.cookies["theme"] = "dark"
    assert '<html lang="en" data-theme="dark">' in client.get("/").content.decode()
    client.cookies["theme"] = '"><script>'
    assert '<html lang="en">' in client.get("/").content.decode()


def test_signup_creates_named_user_and_shows_errors_at_fields(valkey):
    client = Client()
    fields = {"email": "eve@example.org", "password1": "short", "name": "Eve"}
    page = client.post("/accounts/signup/", fields).content.decode()
    assert field_error(page, "password1") and 'value="Eve"' in page
    response = client.post("/accounts/signup/", fields | {"password1": "oak-and-spruce-7"})
    assert response.status_code == 302, "test_accounts covers the rest"


def test_every_table_can_be_scrolled_or_becomes_blocks_on_a_phone():
    tables = 0
    for template in (ROOT / "frontend" / "templates").rglob("*.html"):
        markup = template.read_text()
        boxes = re.findall(r'<div class="(?:table|dashboard)-scroll"[^>]*>\s*<table', markup)
        assert len(boxes) == markup.count("<table"), template
        tables += len(boxes)
    assert tables > 10


def test_pages_link_built_files_that_exist():
    page = Client().get("/accounts/login/").content.decode()
    names = re.findall(r'(?:src|href)="/static/([^"]+)"', page)
    assert any(name.endswith(".js") for name in names)
    assert any(name.endswith(".css") for name in names)
    assert all(find(name) for name in names)
    assert json.loads((settings.DIST / "manifest.json").read_text())["src/main.ts"]["isEntry"]


# ---- drawings and numbers ------------------------------------------------------------------


def test_timber_frame_is_complete_only_at_the_full_share():
    members = len(svg_art.timber_frame().members)
    assert sorted(member.order for member in svg_art.timber_frame().members) == list(range(members))
    raised = [svg_art.count_raised(share / 1000, members) for share in range(1001)]
    assert raised == sorted(raised) and raised[0] == 0 and raised[1] == 1
    assert raised[999] == members - 1 and raised[1000] == members


def test_quilt_is_determined_by_the_run_and_symmetric_under_rotation():
    quilt = svg_art.quilt("0199aaaa")
    assert quilt == svg_art.quilt("0199aaaa") != svg_art.quilt("0199aaab")
    assert len(quilt) % 4 == 0

    def patch_set(patches):
        return {(tint, frozenset(points.split())) for tint, points in patches}

    def rotate(points):
        pairs = [point.split(",") for point in points.split()]
        return " ".join(f"{6 - float(y):g},{float(x):g}" for x, y in pairs)

    assert patch_set((tint, rotate(points)) for tint, points in quilt) == patch_set(quilt)
