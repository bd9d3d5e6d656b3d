"""Test a run's page: who sees it, what it says, and what its owner controls there."""

import pytest
from django.test import Client
from helpers.pages import text

from barnraise.protocol import enums
from coordinator.accounts.models import Machine

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("built_frontend")]


def test_confirmed_machine_is_not_asked_about_again(person, draft, volunteer, signed_in):
    client, ada = signed_in()
    run = draft(ada)
    known = volunteer(ada, 1)
    new = volunteer(ada, 2)
    Machine.objects.filter(pk=new.machine.pk).update(confirmed=None)
    known.join(run)
    new.join(run)
    assert "waits to prepare the text" not in client.get(f"/runs/{run.slug}/").content.decode()


def test_draft_is_shown_to_its_owner_only(signed_in, draft, valkey):
    owner, ada = signed_in()
    stranger, _ = signed_in("bob@example.org")
    run = draft(ada, name="Secret plans")
    for client in (Client(), stranger):
        assert client.get(f"/runs/{run.slug}/").status_code == 404
        assert "Secret plans" not in text(client.get("/runs/")) + text(client.get("/"))
    assert "Secret plans" in text(owner.get(f"/runs/{run.slug}/"))
    assert "Secret plans" in text(owner.get("/runs/"))


def test_launched_run_is_public_and_controlled_by_its_owner(person, signed_in, launched_run):
    run, _ = launched_run(person("owner@example.org"))
    stranger, _ = signed_in()
    for client in (Client(), stranger):
        response = client.get(f"/runs/{run.slug}/")
        assert response.status_code == 200 and b"data-control" not in response.content
    assert stranger.post(f"/runs/{run.slug}/pause/").status_code == 403
    assert Client().post(f"/runs/{run.slug}/pause/").status_code == 302
    run.refresh_from_db()
    assert run.state is enums.RunStatus.TRAINING


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
