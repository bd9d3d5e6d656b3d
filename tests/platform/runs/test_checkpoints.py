"""Checkpoints: what machines announce, who confirms it, and what the page says of both. Never the bytes."""

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from barnraise.protocol import reports
from coordinator.fleet.models import Membership
from coordinator.runs.models import Run
from coordinator.telemetry import checkpoints
from coordinator.telemetry.checkpoints import (
    Checkpoint,
    CheckpointHolder,
    list_checkpoint_rows,
    prune_checkpoints,
)
from coordinator.telemetry.rollup import drain_queue

pytestmark = pytest.mark.django_db
V, OTHER = "a" * 64, "b" * 64
RIGHT, WRONG = "c" * 64, "d" * 64


def view(**changed) -> reports.CheckpointView:
    fields = {
        "tokens": 60_000,
        "vector": V,
        "digest": RIGHT,
        "checksum": "0123456789abcdef",
        "size": 5_505_024,
    }
    return reports.CheckpointView(**{**fields, **changed})


def test_a_checkpoint_is_announced_once_however_often_it_is_said(
    person, launched_run, numbered_report
):
    run, ada = launched_run(person())
    ada.report(
        run,
        *(
            numbered_report(seq, checkpoint=view(), vector=OTHER, anchor=None)
            for seq in range(1, 6)
        ),
    )
    drain_queue()
    ada.report(run, numbered_report(6, checkpoint=view(), vector=OTHER, anchor=None))
    drain_queue()
    found = Checkpoint.objects.get()
    assert (found.tokens, found.digest, found.checksum, found.size) == (
        60_000,
        RIGHT,
        "0123456789abcdef",
        5_505_024,
    )
    assert CheckpointHolder.objects.get().machine == ada.machine
    (line,) = list_checkpoint_rows(run)
    assert (line.machines, line.people, line.alive, line.others, line.confirmed) == (
        1,
        1,
        1,
        0,
        False,
    )


def test_an_announcement_that_is_repeated_costs_no_query(
    person, launched_run, numbered_report, django_capture_on_commit_callbacks
):
    run, ada = launched_run(person())
    ada.report(run, numbered_report(1, checkpoint=view(), anchor=None))
    with django_capture_on_commit_callbacks(execute=True):
        drain_queue()
    member = Membership.objects.select_related("run", "machine").get(run=run)
    with CaptureQueriesContext(connection) as queries:
        checkpoints.record_announcements(
            [(member, [numbered_report(2, checkpoint=view(), anchor=None)])]
        )
    assert not queries.captured_queries and CheckpointHolder.objects.count() == 1


def test_checkpoint_is_confirmed_by_another_persons_machine(
    person, launched_run, volunteer, numbered_report
):
    run, ada = launched_run(person())
    ada.report(run, numbered_report(1, checkpoint=view()))
    drain_queue()
    mine, bob = volunteer(run.owner, 2), volunteer(person("bob@example.org"), 3)
    for machine in (mine, bob):
        machine.join(run)
    mine.report(
        run, numbered_report(1, vector=V, anchor=RIGHT)
    )  # without announcing one of its own
    drain_queue()
    assert not list_checkpoint_rows(run)[0].confirmed, (
        "two machines of one person say no more than one"
    )
    bob.report(
        run,
        numbered_report(1, vector=OTHER, anchor=RIGHT),
        numbered_report(2, vector=V, anchor=None),
    )
    drain_queue()
    assert list_checkpoint_rows(run)[0].machines == 2, (
        "other updates, or no digest, confirm nothing"
    )
    bob.report(run, numbered_report(3, vector=V, anchor=RIGHT))
    drain_queue()
    line = list_checkpoint_rows(run)[0]
    assert line.confirmed and (line.machines, line.people) == (3, 2)


def test_two_digests_at_the_same_updates_are_shown_unconfirmed(
    person, launched_run, volunteer, numbered_report
):
    run, _ = launched_run(person(), name="Split")
    for number, (seed, digest) in enumerate(((2, RIGHT), (3, RIGHT), (4, WRONG))):
        machine = volunteer(person(f"{number}@example.org"), seed)
        machine.join(run)
        machine.report(run, numbered_report(1, checkpoint=view(digest=digest)))
    drain_queue()
    assert {
        (line.checkpoint.digest, line.people, line.others) for line in list_checkpoint_rows(run)
    } == {
        (RIGHT, 2, 1),
        (WRONG, 1, 1),
    }
    assert not any(line.confirmed for line in list_checkpoint_rows(run))
    assert "Disputed" in Client().get(f"/runs/{run.slug}/checkpoints/").content.decode()


def test_a_machine_that_lies_about_its_tokens_announces_nothing(
    person, launched_run, numbered_report
):
    run, ada = launched_run(person())
    ada.report(run, numbered_report(1, checkpoint=view(tokens=2**62)))
    drain_queue()
    assert not Checkpoint.objects.exists()


def test_the_page_lists_them_with_the_commands_and_without_a_byte_of_them(
    person, launched_run, numbered_report, django_assert_max_num_queries
):
    run, ada = launched_run(person())
    page = Client()
    assert "None yet" in page.get(f"/runs/{run.slug}/").content.decode()
    for number in range(1, 31):
        ada.report(
            run,
            numbered_report(number, checkpoint=view(tokens=1000 * number, vector=f"{number:064x}")),
        )
    drain_queue()
    with django_assert_max_num_queries(6):
        html = page.get(f"/runs/{run.slug}/checkpoints/").content.decode()
    assert (
        html.count(RIGHT) == checkpoints.ROWS_SHOWN
        and "30.0 K" in html
        and "0123456789abcdef" in html
    )
    assert (
        f"barnraise fetch {run.slug} model" in html and f"barnraise export {run.slug} model" in html
    )
    run.finish()
    html = page.get(f"/runs/{run.slug}/checkpoints/").content.decode()
    assert f"barnraise fetch {run.slug} model" in html and f"barnraise serve {run.slug}" in html


def test_a_drafts_checkpoints_are_its_owners_to_see(person, draft):
    run = draft(person())
    assert Client().get(f"/runs/{run.slug}/checkpoints/").status_code == 404


def test_what_nobody_else_confirmed_is_forgotten_when_there_are_too_many(
    person, launched_run, volunteer, monkeypatch
):
    run, ada = launched_run(person())
    monkeypatch.setattr(checkpoints, "MAX_CHECKPOINTS", 3)
    made = [
        Checkpoint.objects.create(
            run=run, tokens=n, vector=f"{n:064x}", digest=RIGHT, checksum="0" * 16, size=1
        )
        for n in range(6)
    ]
    bob = volunteer(person("bob@example.org"), 2)
    for machine in (ada.machine, bob.machine):
        CheckpointHolder.objects.create(checkpoint=made[0], machine=machine)
    assert prune_checkpoints(run) == 2 and prune_checkpoints(run) == 0
    assert {each.tokens for each in Checkpoint.objects.all()} == {0, 3, 4, 5}


def test_a_run_that_goes_takes_its_checkpoints_along(person, launched_run, numbered_report):
    run, ada = launched_run(person())
    ada.report(run, numbered_report(1, checkpoint=view()))
    drain_queue()
    Run.objects.filter(pk=run.pk).delete()
    assert not Checkpoint.objects.exists() and not CheckpointHolder.objects.exists()
