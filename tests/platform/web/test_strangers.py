"""Test what people without an account see: documents, the home page, an invitation, addresses."""

import posixpath
import re
from urllib.parse import quote

import pytest
from django.test import Client
from helpers.site.pages import open_client, text

from coordinator.runs.invitations import RunInvitation
from coordinator.runs.join_policy import Access, JoinPolicy
from coordinator.web import urls

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("built_frontend", "valkey")]


def test_documents_of_this_version_are_pages_and_link_to_each_other():
    client = Client()
    first = client.get("/docs/").content.decode()
    links = set(re.findall(r'href="((?:benchmarks/)?[\w-]+\.md)', first))
    assert {"people.md", "security.md", "benchmarks/site.md"} <= links
    pages = {link: client.get(f"/docs/{link}").content.decode() for link in links}
    for name, page in pages.items():
        for link, anchor in re.findall(r'href="([\w/.-]*\.md)?#([\w-]+)"', page):
            folder = posixpath.dirname(name)
            target = posixpath.normpath(posixpath.join(folder, link)) if link else name
            shown = pages.get(target) or client.get(f"/docs/{target}").content.decode()
            assert f' id="{anchor}"' in shown, f"{name} links to {target}#{anchor}"
    for wrong in ("../README.md", "deploy/compose.yaml", "nothing.md"):
        assert client.get(f"/docs/{wrong}").status_code == 404


def test_home_says_what_joining_gives_takes_and_sees():
    page = text(Client().get("/"))
    for heading in ("What you get", "What it takes", "What it may see"):
        assert heading in page
    steps = page.index("Install the worker")
    assert steps < page.index("Join a run The machine shows"), "the installation is step 1"


def test_newcomer_finds_the_install_line_and_runs_that_need_machines(launched_run, person):
    launched_run(person(name="Ada"), name="Dusk")
    home = Client().get("/").content.decode()
    assert f'href="/accounts/signup/?next={"/machines/"}">Lend a hand<' in home
    page = text(open_client(person("new@example.org")).get("/machines/"))
    assert page.index("Install the worker") < page.index("Runs that need machines")
    assert "Dusk" in page
    assert "Keep me signed in on this browser" in text(Client().get("/accounts/login/"))


def test_invitation_says_who_invites_before_the_account(launched_run, person):
    ada = person(name="Ada")
    run, _ = launched_run(ada, name="Dusk")
    run.update_join_policy(JoinPolicy(Access.INVITATION, 0, 0, "", None), actor=ada)
    path = f"/runs/{run.slug}/invited/{RunInvitation.create(run, 'club', actor=ada).token}/"
    answer = Client().get(path)
    assert "Ada invites you to Dusk" in text(answer)
    assert f"/accounts/signup/?next={quote(path)}" in answer.content.decode()
    assert "/accounts/login/" in Client().post(path)["Location"]


def test_no_link_with_a_token_begins_with_a_bare_form_to_sign_in():
    routes = [route.pattern for route in urls.urlpatterns if "token" in route.pattern.converters]
    assert len(routes) >= 3, "no invitation is looked at"
    for route in routes:
        path = "/" + re.sub(r"<str:\w+>", "wrong", str(route))
        assert Client().get(path).status_code in (200, 404), f"{path} asks for an account first"
