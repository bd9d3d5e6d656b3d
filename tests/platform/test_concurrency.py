"""Test actions that happen at the same moment, or in an unusual order."""

import threading

import pytest
from django.db import connection

from barnraise.protocol import enums
from barnraise.spec import TextSpec
from coordinator.accounts.models import User
from coordinator.runs.drafts import NewRun
from coordinator.runs.models import Run, RunQuerySet
from coordinator.runs.spec_form import spec_from_fields
from coordinator.telemetry.rollup import drain_queue
from coordinator.telemetry.tasks import advance_runs

BPE = {"recipe.token_budget": 100_000, "seed": 7}
BYTES = {**BPE, "text.tokenizer": "bytes"}


@pytest.mark.django_db(transaction=True)
def test_concurrent_runs_of_one_name_get_different_slugs(person, monkeypatch):
    owner = person()
    slugs = []
    all_have_looked = threading.Barrier(4, timeout=10)
    original_exists = RunQuerySet.exists

    def exists(self) -> bool:
        """Let every thread check that the name is free before any of them uses it."""
        name_exists = original_exists(self)
        all_have_looked.wait()
        return name_exists

    def create_run() -> None:
        try:
            new = NewRun("One name", spec_from_fields(BPE))
            slugs.append(Run.create(User.objects.get(pk=owner.pk), new).slug)
        finally:
            connection.close()

    monkeypatch.setattr(RunQuerySet, "exists", exists)
    threads = [threading.Thread(target=create_run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(slugs)) == 4


@pytest.mark.django_db
def test_run_named_like_an_id_is_found_by_its_slug(person):
    run = Run.create(
        person(), NewRun("01890af7-1111-7222-8333-444455556666", spec_from_fields(BPE))
    )
    assert Run.objects.find(run.slug) == run


@pytest.mark.django_db
def test_manifest_checked_against_another_draft_is_refused(person, draft, manifest, volunteer):
    run = draft(person())
    signed = volunteer(run.owner).identity.sign("manifest", manifest(run))
    checked = Run.objects.get(pk=run.pk)  # as a request reads it before its update
    assert run.edit(run.name, spec_from_fields(BYTES))
    assert not checked.accept_manifest(signed)
    assert Run.objects.get(pk=run.pk).manifest is None


@pytest.mark.django_db
def test_edit_of_an_outdated_draft_is_refused(person, draft, manifest, volunteer):
    run = draft(person())
    older = Run.objects.get(pk=run.pk)
    assert run.edit(run.name, spec_from_fields(BYTES))
    assert run.accept_manifest(
        volunteer(run.owner).identity.sign("manifest", manifest(run, tokenizer=None))
    )
    assert not older.edit("Back again", spec_from_fields(BPE))
    run.refresh_from_db()
    assert run.spec.text == TextSpec(tokenizer="bytes") and run.manifest


@pytest.mark.django_db
def test_longer_context_removes_the_manifest(person, draft, manifest, volunteer):
    run = draft(person())
    run.accept_manifest(volunteer(run.owner).identity.sign("manifest", manifest(run)))
    assert run.edit(run.name, spec_from_fields({**BPE, "model.context": 2048}))
    assert run.manifest is None  # its 900 held-out tokens would not fill one context


@pytest.mark.django_db
def test_admin_form_cannot_change_a_run(person, launched_run, client):
    run, _ = launched_run(person())
    client.force_login(person("root@example.org", is_staff=True, is_superuser=True))
    answer = client.post(
        f"/admin/runs/run/{run.pk}/change/", {"name": "New", "quorum": 0, "report_every": "0"}
    )
    assert answer.status_code == 403
    before = (run.name, run.quorum, run.report_every)
    run.refresh_from_db()
    assert (run.name, run.quorum, run.report_every) == before


@pytest.mark.django_db
def test_queued_goodbye_does_not_override_a_later_join(person, launched_run, numbered_report):
    run, ada = launched_run(person())
    # The report is queued when the worker starts again.
    ada.report(run, numbered_report(1, activity=enums.Activity.LEFT))
    ada.join(run)
    drain_queue()
    assert run.memberships.alive().count() == 1


@pytest.mark.django_db
def test_join_acknowledges_reports_that_are_being_stored(
    person, launched_run, numbered_report, monkeypatch
):
    run, ada = launched_run(person())
    ada.report(run, numbered_report(1), numbered_report(2), numbered_report(3))
    # Another process is draining the queue.
    monkeypatch.setattr("coordinator.api.worker_endpoints.drain_queue", lambda wait: 0)
    assert ada.join(run).acknowledged == 3


@pytest.mark.django_db
def test_waiting_drafts_need_one_query_to_advance(person, draft, django_assert_num_queries):
    owner = person()
    for name in "abc":
        draft(owner, name)
    with django_assert_num_queries(1):
        assert advance_runs() == 0
