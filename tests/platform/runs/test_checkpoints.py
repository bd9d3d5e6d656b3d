"""Test checkpoints: announcements, confirmations and the page; the site stores no weights."""

import pytest
from django.db import connection
from django.db.models.signals import post_init
from django.test import Client
from django.test.utils import CaptureQueriesContext
from helpers.site.checkpoint_views import build_checkpoint
from helpers.updates.attestations import witness_of

from coordinator.accounts.models import Machine
from coordinator.fleet.models import Membership
from coordinator.fleet.witnesses import record_witnesses
from coordinator.lib.ttl_cache import TtlCache
from coordinator.runs.models import Run
from coordinator.telemetry import checkpoints
from coordinator.telemetry.checkpoints import (
    Checkpoint,
    CheckpointHolder,
    list_checkpoint_rows,
    prune_checkpoints,
)
from coordinator.telemetry.rollup import drain_queue
from coordinator.telemetry.run_table import machine_rows, run_summary

pytestmark = pytest.mark.django_db
VECTOR, OTHER_VECTOR = "a" * 64, "b" * 64
RIGHT, WRONG = "c" * 64, "d" * 64


def test_checkpoint_announced_repeatedly_is_stored_once(adas_run, numbered_report):
    run, ada = adas_run
    ada.store_reports(
        run,
        *(
            numbered_report(seq, checkpoint=build_checkpoint(), vector=OTHER_VECTOR, anchor=None)
            for seq in range(1, 6)
        ),
    )
    ada.store_reports(
        run,
        numbered_report(6, checkpoint=build_checkpoint(), vector=OTHER_VECTOR, anchor=None),
    )
    checkpoint = Checkpoint.objects.get()
    assert (checkpoint.tokens, checkpoint.digest, checkpoint.checksum, checkpoint.size) == (
        60_000,
        RIGHT,
        "0123456789abcdef",
        5_505_024,
    )
    assert CheckpointHolder.objects.get().machine == ada.machine
    (listed,) = list_checkpoint_rows(run)
    assert (listed.machines, listed.people, listed.alive) == (1, 1, 1)
    assert not listed.confirmed and not listed.disputed


def test_repeated_announcement_needs_no_query(
    adas_run, numbered_report, django_capture_on_commit_callbacks
):
    run, ada = adas_run
    ada.report(run, numbered_report(1, checkpoint=build_checkpoint(), anchor=None))
    with django_capture_on_commit_callbacks(execute=True):
        drain_queue()
    member = Membership.objects.select_related("run", "machine").get(run=run)
    with CaptureQueriesContext(connection) as queries:
        checkpoints.record_announcements(
            [(member, [numbered_report(2, checkpoint=build_checkpoint(), anchor=None)])]
        )
    assert not queries.captured_queries and CheckpointHolder.objects.count() == 1


def test_checkpoint_is_confirmed_by_another_persons_machine(
    person, adas_run, volunteer, numbered_report
):
    run, ada = adas_run
    ada.store_reports(run, numbered_report(1, checkpoint=build_checkpoint()))
    own_machine, bob = volunteer(run.owner, 2), volunteer(person("bob@example.org"), 3)
    for machine in (own_machine, bob):
        machine.join(run)
    member = run.memberships.get(machine=ada.machine)
    record_witnesses([(member, [witness_of(ada, run, bob, 1, 1000)])])
    # This report confirms the checkpoint without announcing one.
    own_machine.store_reports(run, numbered_report(1, vector=VECTOR, anchor=RIGHT))
    assert not list_checkpoint_rows(run)[0].confirmed, (
        "a second machine of the same person confirmed it"
    )
    run.status = "finished"  # here alone: machines report on
    assert run_summary(run, machine_rows(run))["confirmed_by"] == 0, "the head says the same"
    bob.store_reports(
        run,
        numbered_report(1, vector=OTHER_VECTOR, anchor=RIGHT),
        numbered_report(2, vector=VECTOR, anchor=None),
    )
    assert list_checkpoint_rows(run)[0].machines == 2, (
        "a report of other updates, or without a digest, confirmed it"
    )
    bob.store_reports(run, numbered_report(3, vector=VECTOR, anchor=RIGHT))
    listed = list_checkpoint_rows(run)[0]
    assert listed.confirmed and (listed.machines, listed.people) == (3, 2)
    TtlCache.clear_all()
    assert run_summary(run, machine_rows(run))["confirmed_by"] == 2


def test_checkpoints_of_many_machines_are_listed_without_their_models(adas_run):
    run, ada = adas_run
    machines = Machine.objects.bulk_create(
        Machine(key=f"{n:064x}", owner=run.owner, hostname=f"pc-{n}") for n in range(30)
    )
    rows = Checkpoint.objects.bulk_create(
        Checkpoint(run=run, tokens=n, vector=f"{n:064x}", digest=RIGHT, checksum="0" * 16, size=8)
        for n in (1, 2, 3, 1 << 62)  # the last one as a lying mirror publishes it
    )
    CheckpointHolder.objects.bulk_create(
        CheckpointHolder(checkpoint=row, machine=machine)
        for row in rows
        for machine in (*machines, ada.machine)
    )
    built: list[type] = []

    def count_model(sender: type, **_: object) -> None:
        if sender in (CheckpointHolder, Machine):
            built.append(sender)

    post_init.connect(count_model)
    try:
        with CaptureQueriesContext(connection) as queries:
            listed = list_checkpoint_rows(run, most=2)
    finally:
        post_init.disconnect(count_model)
    assert [row.checkpoint.tokens for row in listed] == [3, 2]
    assert [(row.machines, row.alive, row.serving) for row in listed] == [(31, 1, 1), (31, 1, 0)]
    assert listed[0].holders[0] == ada.machine.name, "the machine that is alive is not the first"
    assert [len(row.holders) for row in listed] == [12, 12]
    assert len(built) <= 12 and len(queries) <= 5


def vote_lines(run) -> set[tuple]:
    """Return what the list of checkpoints shows of each digest."""
    return {
        (line.checkpoint.digest, line.people, line.confirmed, line.disputed)
        for line in list_checkpoint_rows(run)
    }


def test_one_liars_report_does_not_dispute_a_confirmed_checkpoint(
    person, launched_run, volunteer, numbered_report
):
    run, _ = launched_run(person(), name="Split")
    for number, (seed, digest) in enumerate(((2, RIGHT), (3, RIGHT), (4, WRONG))):
        machine = volunteer(person(f"{number}@example.org"), seed)
        machine.join(run)
        machine.report(run, numbered_report(1, checkpoint=build_checkpoint(digest=digest)))
    drain_queue()
    assert vote_lines(run) == {(RIGHT, 2, True, False), (WRONG, 1, False, True)}
    html = Client().get(f"/runs/{run.slug}/checkpoints/").content.decode()
    assert "By 2 people" in html and "Disputed" in html


def test_two_accounts_do_not_confirm_what_a_majority_denies(adas_run, numbered_report, strangers):
    """Let two accounts announce weights that three others report otherwise, unannounced."""
    run, ada = adas_run
    machines = strangers(run, 2, 3, 4, 5, 6)
    for machine in machines[:2]:
        machine.report(run, numbered_report(1, checkpoint=build_checkpoint(digest=WRONG)))
    drain_queue()
    assert vote_lines(run) == {(WRONG, 2, True, False)}
    for machine in machines[2:]:
        machine.report(run, numbered_report(1, vector=VECTOR, anchor=RIGHT))
    drain_queue()
    assert vote_lines(run) == {(WRONG, 2, False, True), (RIGHT, 3, True, True)}
    anchors = ada.join(run).confirmed_anchors
    assert [(anchor.vector, anchor.digest, anchor.people) for anchor in anchors] == [
        (VECTOR, RIGHT, 3)
    ]


def test_strangers_confirm_nothing_next_to_vouched_people(
    person, adas_run, volunteer, numbered_report
):
    run, ada = adas_run
    ada.report(run, numbered_report(1, checkpoint=build_checkpoint()))
    for number in range(3):
        machine = volunteer(person(f"{number}@example.org"), 2 + number)
        machine.join(run)
        machine.report(run, numbered_report(1, checkpoint=build_checkpoint(digest=WRONG)))
    drain_queue()
    assert vote_lines(run) == {(RIGHT, 1, False, False), (WRONG, 0, False, False)}


def test_joiner_of_a_run_that_only_the_owner_trains_receives_their_weights(
    person, adas_run, volunteer, numbered_report
):
    """Nobody else can confirm them, and the joiner would wait for ever."""
    run, ada = adas_run
    ada.store_reports(run, numbered_report(1, checkpoint=build_checkpoint()))
    bob = volunteer(person("bob@example.org"), 2)
    (anchor,) = bob.join(run).confirmed_anchors
    assert (anchor.vector, anchor.digest, anchor.people) == (VECTOR, RIGHT, 1)
    strange = build_checkpoint(digest=WRONG, vector=OTHER_VECTOR, tokens=70_000)
    bob.store_reports(run, numbered_report(1, checkpoint=strange))
    assert [anchor.digest for anchor in bob.join(run).confirmed_anchors] == [RIGHT]


def test_checkpoint_with_implausible_tokens_is_not_stored(adas_run, numbered_report):
    run, ada = adas_run
    ada.store_reports(run, numbered_report(1, checkpoint=build_checkpoint(tokens=2**62)))
    assert not Checkpoint.objects.exists()


def announce_many(machine, run, report, first: int, count: int) -> None:
    """Report checkpoints of ever more tokens, one in each report."""
    for number in range(first, first + count):
        view = build_checkpoint(tokens=1000 * number, vector=f"{number:064x}")
        machine.report(run, report(number, checkpoint=view))
    drain_queue()


def test_flood_of_announcements_hides_no_confirmed_checkpoint(adas_run, numbered_report, strangers):
    """Carl trains with the others, and announces weights that nobody else has."""
    run, ada = adas_run
    bob, carl = strangers(run, 2, 3)
    for machine in (bob, carl):
        member = run.memberships.get(machine=ada.machine)
        record_witnesses([(member, [witness_of(ada, run, machine, 1, 1000)])])
    for machine in (ada, bob):
        machine.report(run, numbered_report(1, checkpoint=build_checkpoint(tokens=1)))
    announce_many(carl, run, numbered_report, 2, 30)
    assert Checkpoint.objects.count() == 31
    (confirmed,) = [row for row in list_checkpoint_rows(run) if row.confirmed]
    assert confirmed.checkpoint.tokens == 1
    assert [anchor.vector for anchor in ada.join(run).confirmed_anchors] == [VECTOR]


def test_person_adds_a_bounded_number_of_checkpoints(shared_run, numbered_report, monkeypatch):
    monkeypatch.setattr(checkpoints, "MAX_OF_PERSON", 5)
    run, ada, bob = shared_run
    announce_many(bob, run, numbered_report, 1, 9)
    for number in range(10, 20):  # other weights of the same updates
        bob.report(run, numbered_report(number, vector=f"{1:064x}", anchor=f"{number:064x}"))
    drain_queue()
    assert Checkpoint.objects.count() == 5
    ada.store_reports(run, numbered_report(1, checkpoint=build_checkpoint()))
    assert Checkpoint.objects.count() == 6, "it leaves room for others"


def test_checkpoint_page_lists_digests_and_commands(
    adas_run, numbered_report, django_assert_max_num_queries
):
    run, ada = adas_run
    page = Client()
    assert "None yet" in page.get(f"/runs/{run.slug}/").content.decode()
    for number in range(1, 31):
        ada.report(
            run,
            numbered_report(
                number,
                checkpoint=build_checkpoint(tokens=1000 * number, vector=f"{number:064x}"),
            ),
        )
    drain_queue()
    with django_assert_max_num_queries(10):
        html = page.get(f"/runs/{run.slug}/checkpoints/").content.decode()
    assert html.count(RIGHT) == 30 and "30.0 K" in html and "0123456789abcdef" in html
    html = page.get(f"/runs/{run.slug}/").content.decode()
    assert f"barnraise fetch {run.slug} model" in html
    assert f"barnraise export {run.slug} model" in html


def test_oldest_unconfirmed_checkpoints_are_pruned_above_the_limit(
    person, adas_run, volunteer, monkeypatch
):
    run, ada = adas_run
    monkeypatch.setattr(checkpoints, "MAX_CHECKPOINTS", 3)
    created = [
        Checkpoint.objects.create(
            run=run, tokens=n, vector=f"{n:064x}", digest=RIGHT, checksum="0" * 16, size=1
        )
        for n in range(6)
    ]
    bob = volunteer(person("bob@example.org"), 2)
    bobs_other = volunteer(bob.machine.owner, 3)
    for machine in (ada.machine, bob.machine):
        CheckpointHolder.objects.create(checkpoint=created[0], machine=machine)
    for machine in (bob.machine, bobs_other.machine):  # one person confirms nothing
        CheckpointHolder.objects.create(checkpoint=created[1], machine=machine)
    assert prune_checkpoints(run) == 2 and prune_checkpoints(run) == 0
    assert {checkpoint.tokens for checkpoint in Checkpoint.objects.all()} == {0, 3, 4, 5}


def test_deleted_run_deletes_its_checkpoints(adas_run, numbered_report):
    run, ada = adas_run
    ada.store_reports(run, numbered_report(1, checkpoint=build_checkpoint()))
    Run.objects.filter(pk=run.pk).delete()
    assert not Checkpoint.objects.exists() and not CheckpointHolder.objects.exists()
