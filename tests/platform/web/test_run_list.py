"""Test the list of runs: pages, search, filters, orders, figures."""

import re
from html import unescape

import pytest
from django.test import Client
from helpers.site.pages import open_client

from barnraise.protocol import reports
from coordinator.runs.models import Run
from coordinator.telemetry.history import load_history, load_machine_curves, load_validation_losses
from coordinator.telemetry.models import LossPoint
from coordinator.telemetry.rollup import drain_queue
from coordinator.telemetry.run_cards import load_run_cards
from coordinator.web import run_list_views

pytestmark = pytest.mark.django_db


def run_names(html: str) -> list[str]:
    return re.findall(r'<a href="/runs/[\w-]+/">(.*?)</a><span class="run-facts">', html)


def list_names(client: Client, **filters: str) -> list[str]:
    return run_names(client.get("/runs/", filters).content.decode())


def read_pages(client: Client, path: str) -> list[list[str]]:
    """Return the names on each page, following the links to the next page."""
    pages = []
    while path:
        html = client.get(path).content.decode()
        pages.append(run_names(html))
        link = re.search(r'href="([^"]*)">Next page', html)
        path = unescape(link[1]) if link else ""
    return pages


@pytest.fixture
def owner_client(person, draft, monkeypatch) -> Client:
    """Create seven drafts and five cancelled runs; a page lists three."""
    monkeypatch.setattr(run_list_views, "PAGE_SIZE", 3)
    owner = person()
    client = open_client(owner)
    for n in range(12):
        run = draft(owner, f"run {n}")
        if n % 5 in (1, 3):
            run.cancel(actor=owner)
    return client


def test_run_list_has_each_run_on_one_page_active_ones_first(owner_client):
    active = [f"run {n}" for n in reversed(range(12)) if n % 5 not in (1, 3)]
    over = [f"run {n}" for n in reversed(range(12)) if n % 5 in (1, 3)]
    pages = read_pages(owner_client, "/runs/")
    assert [name for page in pages for name in page] == active + over
    assert [len(page) for page in pages] == [3, 3, 3, 3]
    names = [name for page in read_pages(owner_client, "/runs/?status=cancelled") for name in page]
    assert names == over
    assert Run.objects.count() == 12


def test_run_list_is_searched_filtered_and_sorted(owner_client):
    assert list_names(owner_client, q="run 1", status="active") == ["run 10"]
    assert list_names(owner_client, q="RUN 7") == ["run 7"]
    assert list_names(owner_client, q="nothing like it") == []
    assert list_names(owner_client, sort="name")[:3] == ["run 0", "run 1", "run 10"]
    assert len(list_names(owner_client, show="mine")) == 3
    assert list_names(owner_client, show="joined") == []
    assert list_names(Client()) == [], "a draft is its owner's"


@pytest.mark.parametrize(
    "filters",
    [
        {"page": "0"},
        {"page": "-1"},
        {"page": "9" * 40},
        {"page": "²"},
        {"status": "' or 1=1 --", "sort": "password", "show": "theirs"},
        {"q": "\0" * 500},
        {"q": "100 % _ \\"},
    ],
)
def test_run_list_with_invalid_filters_is_shown(owner_client, filters):
    assert owner_client.get("/runs/", filters).status_code == 200
    assert Client().get("/runs/", filters | {"show": "mine"}).status_code == 200


def test_run_list_shows_loss_speed_machines_and_a_curve(adas_run, numbered_report):
    run, ada = adas_run
    for seq, loss in ((1, 5.0), (2, 4.0)):
        point = reports.MeasuredLoss(kind="train", tokens=seq * 1000, loss=loss)
        report = numbered_report(seq, points=[point], ledger_tokens=seq * 1000, rate=500.0)
        assert ada.report(run, report).status_code == 200
    drain_queue()
    run.refresh_from_db()
    card = load_run_cards([run])[run.pk]
    assert (card.validation, card.training, card.rate, card.machines) == (None, 4.0, 500.0, 1)
    assert card.curve[0] == 5.0 and card.curve[-1] == card.loss == 4.0
    row = run_list_views.RunRow(run, card)
    assert len(row.curve.split()) == len(card.curve)
    for sort in run_list_views.SORTS:
        assert list_names(Client(), sort=sort) == [run.name]
    joined = open_client(ada.machine.owner)
    assert list_names(joined, show="joined") == [run.name]


def test_losses_at_implausible_tokens_count_nowhere(shared_run, numbered_report):
    run, ada, bob = shared_run
    honest = [
        reports.MeasuredLoss(kind=kind, tokens=tokens, loss=loss)
        for kind in ("train", "validation")
        for tokens, loss in ((1000, 4.0), (2000, 5.0))
    ]
    hostile = [
        reports.MeasuredLoss(kind="train", tokens=(1 << 63) - 1, loss=1.0),
        reports.MeasuredLoss(kind="validation", tokens=1 << 53, loss=0.0),
    ]
    ada.report(run, numbered_report(1, points=honest))
    bob.store_reports(run, numbered_report(1, points=hostile, tokens=1 << 62))
    assert LossPoint.objects.count() == len(honest)
    member = run.memberships.get(machine=bob.machine)
    LossPoint.objects.bulk_create(  # as an earlier version stored them
        LossPoint(membership=member, seq=1, position=place, at=0, **point.model_dump())
        for place, point in enumerate(hostile)
    )
    card = load_run_cards([run])[run.pk]
    assert (card.validation, card.best, card.training) == (5.0, 4.0, 5.0)
    assert Client().get("/runs/").status_code == 200
    assert Client().get("/runs/compare/", {"run": run.slug}).status_code == 200
    assert dict(load_validation_losses(run)) == {1000: 4.0, 2000: 5.0}
    assert [curve["name"] for curve in load_machine_curves(run)] == [ada.machine.name]


def test_validation_losses_everywhere_are_medians_of_people(shared_run, numbered_report):
    run, ada, bob = shared_run
    for machine, losses in ((ada, (5.0, 3.0, 4.0)), (bob, (5.0, 4.0))):
        points = [
            reports.MeasuredLoss(kind="validation", tokens=1000 * place, loss=loss)
            for place, loss in enumerate(losses, 1)
        ]
        machine.report(run, numbered_report(1, points=points))
    drain_queue()
    card = load_run_cards([run])[run.pk]
    assert (card.validation, card.best) == (4.0, 4.0), "of two people the higher loss counts"
    assert dict(load_validation_losses(run)) == {1000: 5.0, 2000: 4.0, 3000: 4.0}
    assert load_history(run)["validation"] == [[1000, 5.0], [2000, 4.0], [3000, 4.0]]
