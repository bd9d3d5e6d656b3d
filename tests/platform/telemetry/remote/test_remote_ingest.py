"""Test that telemetry reported to other mirrors is stored apart and shown like our own."""

import time
from datetime import timedelta

import pytest
from django.utils import timezone
from helpers.site.remote_telemetry import (
    OTHER,
    elsewhere,
    ingest_page,
    membership_row,
    page,
)

from coordinator.eventlog.models import LogEvent
from coordinator.fleet.lifecycle_facts import COLUMNS, advance_run, gather_facts, ledgers_by_person
from coordinator.fleet.models import Membership
from coordinator.lib.valkey import valkey_client
from coordinator.live.run_snapshot import RunSnapshot
from coordinator.telemetry import history, report_queue, run_table
from coordinator.telemetry.models import LossPoint, Rollup, RunEvent
from coordinator.telemetry.remote import export, ingest
from coordinator.telemetry.remote.protocol import (
    EventRow,
    LossRow,
    RollupRow,
    TelemetryPage,
    TelemetryPosition,
    TelemetryRequest,
)

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("valkey")]


# ---- export and ingest


def test_mirror_without_reports_shows_the_run_like_the_reporting_mirror(training_run, valkey):
    run, *_ = training_run
    snapshot = RunSnapshot.capture(run)
    run_history = history.load_history(run)
    machine_curves = history.load_machine_curves(run)
    exported = time.time()
    telemetry_page = TelemetryPage.model_validate_json(
        export.build_signed_page(TelemetryRequest(nonce="0" * 32), OTHER).text
    )
    Membership.objects.all().delete()
    RunEvent.objects.all().delete()
    valkey.flushdb()
    assert RunSnapshot.capture(run).workers == {} and history.load_history(run)["rate"] == []
    logged = LogEvent.objects.count()
    assert ingest_page(telemetry_page).rows > 0 and LogEvent.objects.count() == logged, (
        "telemetry was recorded in the event log"
    )
    seconds_between = time.time() - exported
    valkey.flushdb()  # the feed is cached for two seconds
    advance_run(run)  # as every two seconds: counts are weighed between mirrors there
    later_snapshot = RunSnapshot.capture(run)
    assert later_snapshot.plans == snapshot.plans
    assert later_snapshot.workers.keys() == snapshot.workers.keys()
    for machine, row in snapshot.workers.items():
        later = dict(later_snapshot.workers[machine])
        # A page has ages, which the other mirror subtracts from its own clock.
        assert later.pop("last_seen") == pytest.approx(row["last_seen"], abs=0.1 + seconds_between)
        assert later == {name: value for name, value in row.items() if name != "last_seen"}
    changing_fields = {"waiting"}
    assert {k: v for k, v in snapshot.run.items() if k not in changing_fields} == {
        k: v for k, v in later_snapshot.run.items() if k not in changing_fields
    }
    assert later_snapshot.run["agree"] is True
    assert later_snapshot.run["workers_alive"] == 2
    assert later_snapshot.run["rate"] == 800.0
    assert history.load_history(run) == run_history
    assert history.load_machine_curves(run) == machine_curves
    assert [e["what"] for e in later_snapshot.events.values() if e["what"] == "joined"] == [
        "joined",
        "joined",
    ]


def test_export_contains_only_changes_and_each_plan_once(training_run, numbered_report, plan):
    run, ada, _ = training_run
    first = export.build_page(TelemetryPosition())
    assert len(first.memberships) == 2 and first.memberships[0].plan == plan and not first.more
    empty_page = export.build_page(first.position)
    assert (
        empty_page.machines,
        empty_page.memberships,
        empty_page.rollups,
        empty_page.points,
        empty_page.events,
    ) == ([], [], [], [], [])
    assert empty_page.position == first.position
    ada.store_reports(run, numbered_report(4, plan=plan))
    second = export.build_page(first.position)
    assert second.machines == [elsewhere(run, ada)]
    assert [f.plan for f in second.memberships] == [None]
    assert {rollup.width for rollup in second.rollups} == {10, 60, 3600}
    assert [p.seq for p in second.points] == [4]
    changed = plan.model_copy(update={"predicted_seconds": 4.0})
    ada.store_reports(run, numbered_report(5, plan=changed))
    assert export.build_page(second.position).memberships[0].plan == changed
    assert (
        sum(row.plan is not None for row in export.build_page(TelemetryPosition()).memberships) == 1
    ), "a new reader does not get the plan"


def test_export_continues_on_the_next_page_without_duplicates(training_run, monkeypatch):
    for name, limit in (
        ("MAX_MACHINE_ROWS", 1),
        ("MAX_ROLLUPS", 2),
        ("MAX_LOSSES", 4),
        ("MAX_EVENTS", 1),
    ):
        monkeypatch.setattr(export, name, limit)
    position = TelemetryPosition()
    points = []
    sums = []
    pages = 0
    while True:
        exported = export.build_page(position)
        points += [(exported.machines[p.machine_index], p.seq, p.position) for p in exported.points]
        sums += [(exported.machines[s.machine_index], s.width, s.bucket) for s in exported.rollups]
        pages = pages + 1
        position = exported.position
        if not exported.more:
            break
    assert pages > 2 and len(points) == len(set(points)) == LossPoint.objects.count()
    assert len(sums) == len(set(sums)) == Rollup.objects.count()


def test_rows_of_other_mirrors_are_not_exported(training_run):
    run, ada, _ = training_run
    before = export.build_page(TelemetryPosition())
    now = int(time.time())
    rows = {
        "rollups": [RollupRow(0, 10, now // 10 * 10, 1, 1.0, 1, 1, 1, 1, 1)],
        "points": [LossRow(0, 77, 0, "train", 5, 1.0, now)],
        "events": [EventRow(0, "0192f0c1-4d3e-7f40-8a5b-6c7d8e9f0a1c", "left", now)],
    }
    assert ingest_page(page(elsewhere(run, ada), memberships=[membership_row()], **rows)).rows == 4
    after = export.build_page(TelemetryPosition())
    assert after == before.model_copy(update={"memberships": after.memberships})
    assert len(after.memberships) == 2


def test_page_ingested_twice_changes_nothing(training_run):
    run, ada, _ = training_run
    now = int(time.time())
    telemetry_page = page(
        elsewhere(run, ada),
        elsewhere(run, ada),
        memberships=[membership_row(), membership_row(machine_index=1)],
        rollups=[
            RollupRow(index, 10, now // 10 * 10, 2, 1000.0, 1, 1, 1, 1, 1) for index in (0, 1)
        ],
        points=[LossRow(0, 77, 0, "train", 5000, 1.0, now)] * 2,
    )
    for _ in range(2):
        ingest_page(telemetry_page)
        assert Membership.everywhere.filter(mirror=OTHER).count() == 1
        assert Rollup.objects.filter(membership__mirror=OTHER).get().rate_sum == 1000.0
        assert LossPoint.objects.filter(membership__mirror=OTHER).count() == 1


def test_page_of_an_outdated_position_is_ignored(training_run):
    run, ada, _ = training_run
    ingest_page(
        page(
            elsewhere(run, ada),
            memberships=[membership_row()],
            position=TelemetryPosition(memberships=(5, None)),
        )
    )
    assert (
        ingest_page(
            page(elsewhere(run, ada), memberships=[membership_row(tokens=1)]),
            after=TelemetryPosition(),
        )
        == ingest.PageIngestResult()
    )
    assert Membership.everywhere.get(mirror=OTHER).tokens == 9000


# ---- one machine, two mirrors


def test_machine_at_two_mirrors_is_shown_once_with_its_newest_report(training_run, numbered_report):
    run, ada, _ = training_run
    ingest_page(
        page(elsewhere(run, ada), memberships=[membership_row(age=30.0, tokens=2, rate=7.0)])
    )
    (machine_row,) = [
        row for row in run_table.machine_rows(run) if row["id"] == str(ada.machine.pk)
    ]
    assert machine_row["tokens"] == 3000, "an older report to another mirror was preferred"
    Membership.objects.filter(machine=ada.machine).update(
        last_report=timezone.now() - timedelta(minutes=1)
    )
    valkey_client().delete(report_queue.workers_key(run.pk))
    ingest_page(page(elsewhere(run, ada), memberships=[membership_row(age=1.0)]))
    snapshot = RunSnapshot.capture(run)
    assert (snapshot.run["workers_known"], snapshot.run["rate"]) == (2, 1000.0)
    assert snapshot.workers[str(ada.machine.pk)]["tokens"] == 9000
    assert len(list_live_memberships(run)) == 2
    ada.join(run)  # joining is not a report
    assert RunSnapshot.capture(run).workers[str(ada.machine.pk)]["activity"] == "training"
    ada.store_reports(run, numbered_report(10, rate=500.0))
    assert RunSnapshot.capture(run).run["rate"] == 800.0


def list_live_memberships(run) -> list:
    """Return the newest membership of each machine, after checking that all are alive."""
    memberships = list(Membership.everywhere.newest().filter(run=run))
    assert gather_facts(run).alive == len(memberships)
    return memberships


def test_rate_reported_to_two_mirrors_in_one_bucket_is_averaged(training_run):
    run, ada, _ = training_run
    before = history.load_history(run)["rate"]
    own_rollups = Rollup.objects.filter(membership__machine=ada.machine)
    rollup_rows = [
        RollupRow(
            0,
            rollup.width,
            rollup.bucket,
            rollup.reports,
            rollup.rate_sum,
            rollup.tokens,
            rollup.updates_sent,
            0,
            rollup.peer_bytes_sent,
            0,
        )
        for rollup in own_rollups
    ]
    points = [
        LossRow(0, p.seq, p.position, p.kind, p.tokens, p.loss, p.at)
        for p in LossPoint.objects.filter(membership__machine=ada.machine)
    ]
    curves = history.load_history(run)
    ingest_page(
        page(
            elsewhere(run, ada), memberships=[membership_row()], rollups=rollup_rows, points=points
        )
    )
    assert history.load_history(run)["rate"] == before
    assert history.load_history(run)["validation"] == curves["validation"], "a point is shown twice"
    curves = history.load_machine_curves(run)
    assert len([curve for curve in curves if curve["points"]]) == 1


def test_gap_in_own_reports_is_filled_by_reports_to_another_mirror(training_run, numbered_report):
    run, ada, _ = training_run
    ingest_page(
        page(elsewhere(run, ada), memberships=[membership_row(latest=8, high_water_mark=8)])
    )
    ada.store_reports(run, numbered_report(9), numbered_report(10))
    assert Membership.objects.get(machine=ada.machine).high_water_mark == 10
    ada.store_reports(run, numbered_report(15))
    assert Membership.objects.get(machine=ada.machine).high_water_mark == 10, (
        "the gap from 11 to 14 was skipped"
    )
    ingest_page(
        page(
            elsewhere(run, ada),
            memberships=[membership_row(latest=1 << 40, high_water_mark=1 << 40)],
        )
    )
    ada.store_reports(run, numbered_report(16))
    assert Membership.objects.get(machine=ada.machine).high_water_mark == 16
    ada.store_reports(run, numbered_report(17))
    assert Membership.objects.get(machine=ada.machine).high_water_mark == 17, (
        "another mirror's mark exceeded the machine's own reports"
    )


def test_machine_from_another_mirror_records_no_second_join(
    training_run, numbered_report, strangers
):
    run, *_ = training_run
    (carl,) = strangers(run, 3)
    ingest_page(page(elsewhere(run, carl), memberships=[membership_row()]))
    carl.store_reports(run, numbered_report(10))
    assert not RunEvent.objects.filter(machine=carl.machine).exists()


def test_lifecycle_facts_include_machines_of_other_mirrors(person, draft, volunteer):
    owner = person()
    run = draft(owner, quorum=2)
    ada, bob = volunteer(owner), volunteer(person("bob@example.org"), seed=2)
    ada.join(run)
    Membership.objects.update(ticket_expires=timezone.now() + timedelta(hours=1))
    assert gather_facts(run).alive == 1
    ingest_page(
        page(
            elsewhere(run, bob),
            memberships=[membership_row(ledger_tokens=70_000, has_final_checkpoint=True)],
        )
    )
    facts = gather_facts(run)
    assert (facts.alive, facts.ledger_tokens, facts.others_safe, facts.others_ever) == (
        2,
        70_000,
        1,
        1,
    )
    Membership.everywhere.update(last_seen=timezone.now() - timedelta(minutes=5))
    assert gather_facts(run).alive == 0, "rows of a dead mirror never expire"


def test_lying_mirror_changes_nobodys_count(person, adas_run, volunteer, numbered_report):
    """Let a mirror claim 10^15 tokens of machines that report here, and of one that does not."""
    run, ada = adas_run
    bob, carl = volunteer(person("bob@example.org"), 2), volunteer(person("c@example.org"), 3)
    bob.join(run)
    for machine in (ada, bob):
        machine.store_reports(run, numbered_report(5, ledger_tokens=5000))
    lie = membership_row(age=0.0, latest=99, ledger_tokens=10**15)
    for machine in (ada, bob, carl):
        ingest_page(page(elsewhere(run, machine), memberships=[lie]))
    assert gather_facts(run).ledger_tokens == 5000
    true = membership_row(age=2.0, ledger_tokens=4000)
    ingest_page(page(elsewhere(run, carl), memberships=[true]), key="c" * 64)
    everywhere = list(Membership.everywhere.filter(run=run).values(*COLUMNS))
    assert sorted(ledgers_by_person(everywhere).values()) == [[4000], [5000], [5000]]
