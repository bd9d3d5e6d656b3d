"""Test a run's page: who sees it, what it says, and what its owner controls there."""

import math
from itertools import groupby

import pytest
from django.test import Client
from helpers.site.pages import text
from hypothesis import given
from hypothesis import strategies as st

from barnraise.protocol import enums
from coordinator.web import run_views

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("built_frontend")]


def test_owner_launches_pauses_resumes_and_cancels_runs(signed_in, launched_run, draft):
    client, ada = signed_in()
    draft_run = draft(ada, name="Not yet")
    path = f"/runs/{draft_run.slug}/launch/"
    assert client.get(path).status_code == 405, "a link must not launch"
    assert "Launched" in text(client.post(path, follow=True))
    draft_run.refresh_from_db()
    assert draft_run.launch_requested

    run, _ = launched_run(ada)
    for action, status in (("pause", "paused"), ("resume", "training"), ("cancel", "cancelled")):
        assert client.post(f"/runs/{run.slug}/{action}/").status_code == 302
        run.refresh_from_db()
        assert run.status == status
    assert "cannot pause" in text(client.post(f"/runs/{run.slug}/pause/", follow=True))
    assert "cannot finish" in text(client.post(f"/runs/{run.slug}/finish/", follow=True))


def test_run_page_shows_one_command_to_join_and_machines(person, launched_run):
    run, volunteer = launched_run(person(name="Ada Lovelace"))
    page = Client().get(f"/runs/{run.slug}/")
    assert f"barnraise join http://testserver/runs/{run.slug}" in text(page)
    assert "barnraise login" not in text(page)
    assert volunteer.machine.hostname in text(page) and "Ada Lovelace" in text(page)
    assert "ada@example.org" not in page.content.decode(), "email addresses are private"


def test_run_name_with_markup_is_escaped(signed_in, draft, valkey):
    client, ada = signed_in()
    run = draft(ada, name="<script>alert(1)</script>")
    page = client.get(f"/runs/{run.slug}/").content.decode()
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page


@given(st.lists(st.integers(0, 6), max_size=14), st.integers(1, 4))
def test_pages_of_events_have_each_event_once(times, size):
    """Let no moment have more events than a page: those of one moment are on one page."""
    times = [at for at, same in groupby(sorted(times, reverse=True)) for _ in list(same)[:size]]
    events = [{"at": float(at), "number": n} for n, at in enumerate(times)]
    shown = []
    before = math.inf
    while before is not None:
        older = [event for event in events if event["at"] < before]
        page, before = run_views.cut_page(older[: size + 1], size)
        assert len(page) <= size
        shown += page
    assert shown == events


@pytest.mark.parametrize("text", ["", "x", "nan", "inf", "1e400", "-1e18", "1" * 500, "\0"])
def test_moment_that_is_none_shows_the_newest_events(text, adas_run):
    assert run_views.parse_moment(text) is None
    run, _ = adas_run
    page = Client().get(f"/runs/{run.slug}/events/", {"before": text})
    assert page.status_code == 200 and page.context["is_first"] and page.context["events"]
    assert run_views.parse_moment("0.5").timestamp() == 0.5


@pytest.mark.parametrize("action", ["delete", "advance", "__init__", "refresh_from_db", "%00"])
def test_control_that_is_none_is_not_found(signed_in, launched_run, action):
    client, ada = signed_in()
    run, _ = launched_run(ada)
    assert client.post(f"/runs/{run.slug}/{action}/").status_code == 404
    run.refresh_from_db()
    assert run.state is enums.RunStatus.TRAINING
