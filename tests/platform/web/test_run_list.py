"""The list of runs, page by page: those under way, and those that ended."""

import re

import pytest
from django.test import Client

from coordinator.runs.models import Run
from coordinator.web import run_views

pytestmark = pytest.mark.django_db


def names(html: str) -> list[str]:
    return re.findall(r'<h3><a href="/runs/[\w-]+/">(.*?)</a></h3>', html)


def walk(client: Client, path: str) -> list[list[str]]:
    """The names on each page, following the link to what began before."""
    pages = []
    while path:
        html = client.get(path).content.decode()
        pages.append(names(html))
        found = re.search(r'href="(/runs/\?[^"]*before=[^"]*)"', html)
        path = found[1].replace("&amp;", "&") if found else ""
    return pages


@pytest.fixture
def many(person, draft, monkeypatch) -> Client:
    """Create seven drafts and five cancelled runs; pages list three, and two that are over."""
    monkeypatch.setattr(run_views, "LISTED", 3)
    monkeypatch.setattr(run_views, "ENDED", 2)
    owner, client = person(), Client()
    client.force_login(owner)
    for n in range(12):
        run = draft(owner, f"run {n}")
        if n % 5 in (1, 3):
            run.cancel(actor=owner)
    return client


def test_each_run_is_on_one_page_the_newest_first(many):
    open_ones = [f"run {n}" for n in reversed(range(12)) if n % 5 not in (1, 3)]
    ended = [f"run {n}" for n in reversed(range(12)) if n % 5 in (1, 3)]
    pages = walk(many, "/runs/")
    assert pages[0] == open_ones[:3] + ended[:2]
    assert [name for page in [pages[0][:3], *pages[1:]] for name in page] == open_ones
    assert [name for page in walk(many, "/runs/?finished") for name in page] == ended
    assert Run.objects.count() == 12


@pytest.mark.parametrize(
    "before", ["", "x", "0", "' or 1=1 --", "0199aaaa-0000-7000-8000-000000000000"]
)
def test_a_page_after_nonsense_is_a_page(many, before):
    assert many.get("/runs/", {"before": before}).status_code == 200
    assert many.get("/runs/", {"ended": "", "before": before}).status_code == 200
