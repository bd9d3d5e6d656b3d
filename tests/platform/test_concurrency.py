"""What happens when two things happen at the same moment, or in an order nobody thought of."""

import threading

import pytest
from django.db import connection

from barnraise.protocol import enums
from barnraise.spec import TextSpec
from coordinator.accounts.models import User
from coordinator.runs.models import NewRun, Run, RunQuerySet
from coordinator.runs.spec_form import spec_from_fields
from coordinator.telemetry.rollup import drain_queue
from coordinator.telemetry.tasks import advance_runs

BPE = {"recipe.token_budget": 100_000, "seed": 7}
BYTES = {**BPE, "text.tokenizer": "bytes"}


@pytest.mark.django_db(transaction=True)
def test_runs_of_one_name_made_at_once_all_come_to_be(person, monkeypatch):
    owner, made, together, look = person(), [], threading.Barrier(4, timeout=10), RunQuerySet.exists

    def exists(
        self,
    ) -> bool:  # everybody has looked whether the name is free before anybody takes it
        found = look(self)
        together.wait()
        return found

    def make() -> None:
        try:
            new = NewRun("One name", spec_from_fields(BPE))
            made.append(Run.create(User.objects.get(pk=owner.pk), new).slug)
        finally:
            connection.close()

    monkeypatch.setattr(RunQuerySet, "exists", exists)
    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 4


@pytest.mark.django_db
def test_a_run_named_like_an_id_can_be_found_by_its_slug(person):
    run = Run.create(
        person(), NewRun("01890af7-1111-7222-8333-444455556666", spec_from_fields(BPE))
    )
    assert Run.objects.find(run.slug) == run


@pytest.mark.django_db
def test_a_manifest_that_was_checked_against_another_draft_is_not_taken(
    person, draft, manifest, volunteer
):
    run = draft(person())
    signed = volunteer(run.owner).identity.sign("manifest", manifest(run))
    checked = Run.objects.get(
        pk=run.pk
    )  # as a request has it in hand, between its check and its update
    assert run.edit(run.name, spec_from_fields(BYTES))
    assert not checked.accept_manifest(signed)
    assert Run.objects.get(pk=run.pk).manifest is None


@pytest.mark.django_db
def test_an_edit_of_an_older_draft_does_not_leave_it_anothers_text(
    person, draft, manifest, volunteer
):
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
def test_a_longer_context_needs_the_text_checked_again(person, draft, manifest, volunteer):
    run = draft(person())
    run.accept_manifest(volunteer(run.owner).identity.sign("manifest", manifest(run)))
    assert run.edit(run.name, spec_from_fields({**BPE, "model.context": 2048}))
    assert run.manifest is None  # its 900 held-out tokens would not fill one context


@pytest.mark.django_db
def test_the_admin_has_no_form_that_writes_past_a_runs_own_methods(person, launched_run, client):
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
def test_a_goodbye_on_its_way_does_not_come_after_a_new_arrival(
    person, launched_run, numbered_report
):
    run, ada = launched_run(person())
    ada.report(
        run, numbered_report(1, activity=enums.Activity.LEFT)
    )  # queued; and the worker starts again at once
    ada.join(run)
    drain_queue()
    assert run.memberships.alive().count() == 1


@pytest.mark.django_db
def test_a_new_folder_numbers_past_reports_that_are_still_being_stored(
    person, launched_run, numbered_report, monkeypatch
):
    run, ada = launched_run(person())
    ada.report(run, numbered_report(1), numbered_report(2), numbered_report(3))
    monkeypatch.setattr(
        "coordinator.api.worker_endpoints.drain_queue", lambda wait: 0
    )  # it did not get its turn in time
    assert ada.join(run).acknowledged == 3


@pytest.mark.django_db
def test_drafts_that_wait_for_people_cost_the_tick_nothing(
    person, draft, django_assert_num_queries
):
    owner = person()
    for name in "abc":
        draft(owner, name)
    with django_assert_num_queries(1):
        assert advance_runs() == 0
