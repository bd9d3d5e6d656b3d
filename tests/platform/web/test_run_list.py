"""Test the list of runs and its pages: active runs and finished runs."""

import re

import pytest
from django.test import Client

from coordinator.runs.models import Run
from coordinator.web import run_views

pytestmark = pytest.mark.django_db


def run_names(html: str) -> list[str]:
    return re.findall(r'<h3><a href="/runs/[\w-]+/">(.*?)</a></h3>', html)


def read_pages(client: Client, path: str) -> list[list[str]]:
    """Return the names on each page, following the links to the next page."""
    pages = []
    while path:
        html = client.get(path).content.decode()
        pages.append(run_names(html))
        link = re.search(r'href="(/runs/\?[^"]*before=[^"]*)"', html)
        path = link[1].replace("&amp;", "&") if link else ""
    return pages


@pytest.fixture
def owner_client(person, draft, monkeypatch) -> Client:
    """Create seven drafts and five cancelled runs; a page lists three, or two that are over."""
    monkeypatch.setattr(run_views, "PAGE_SIZE", 3)
    monkeypatch.setattr(run_views, "MAX_FINISHED", 2)
    owner = person()
    client = Client()
    client.force_login(owner)
    for n in range(12):
        run = draft(owner, f"run {n}")
        if n % 5 in (1, 3):
            run.cancel(actor=owner)
    return client


def test_run_list_has_each_run_on_one_page_newest_first(owner_client):
    active = [f"run {n}" for n in reversed(range(12)) if n % 5 not in (1, 3)]
    finished = [f"run {n}" for n in reversed(range(12)) if n % 5 in (1, 3)]
    pages = read_pages(owner_client, "/runs/")
    assert pages[0] == active[:3] + finished[:2]
    assert [name for page in [pages[0][:3], *pages[1:]] for name in page] == active
    finished_pages = read_pages(owner_client, "/runs/?finished")
    assert [name for page in finished_pages for name in page] == finished
    assert Run.objects.count() == 12


@pytest.mark.parametrize(
    "before", ["", "x", "0", "' or 1=1 --", "0199aaaa-0000-7000-8000-000000000000"]
)
def test_run_list_with_invalid_cursor_is_shown(owner_client, before):
    assert owner_client.get("/runs/", {"before": before}).status_code == 200
    assert owner_client.get("/runs/", {"finished": "", "before": before}).status_code == 200
