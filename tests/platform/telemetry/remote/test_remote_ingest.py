"""Every mirror shows the whole run: what machines report to others comes here, is kept apart, and is shown alike."""

import time
from datetime import timedelta

import pytest
from django.utils import timezone
from helpers.remote_telemetry import OTHER, elsewhere, frame, ingest_page, page, report

from coordinator.eventlog.models import LogEvent
from coordinator.fleet.lifecycle_facts import gather_facts
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


# ---- what is ingest_page, and shown


def test_mirror_without_reports_shows_the_run_like_the_reporting_mirror(training_run, valkey):
    run, *_ = training_run
    seen, past, each = (
        RunSnapshot.capture(run),
        history.load_history(run),
        history.load_machine_curves(run),
    )
    everything = TelemetryPage.model_validate_json(
        export.build_signed_page(TelemetryRequest(nonce="0" * 32), OTHER).text
    )
    Membership.objects.all().delete()
    RunEvent.objects.all().delete()
    valkey.flushdb()
    assert RunSnapshot.capture(run).workers == {} and history.load_history(run)["rate"] == []
    logged = LogEvent.objects.count()
    assert ingest_page(everything).rows > 0 and LogEvent.objects.count() == logged, (
        "none of it is an event of the log"
    )
    valkey.flushdb()  # the feed is cached for two seconds
    again = RunSnapshot.capture(run)
    seen_by = [picture.workers | {"now": 0} for picture in (seen, again)]
    for picture in seen_by:
        for row in picture.values():
            if isinstance(row, dict):
                row["last_seen"] = round(row["last_seen"] / 5)
    assert seen_by[0] == seen_by[1] and seen.plans == again.plans
    unlike = {"waiting"}
    assert {k: v for k, v in seen.run.items() if k not in unlike} == {
        k: v for k, v in again.run.items() if k not in unlike
    }
    assert (
        again.run["agree"] is True
        and again.run["workers_alive"] == 2
        and again.run["rate"] == 800.0
    )
    assert history.load_history(run) == past and history.load_machine_curves(run) == each
    assert [e["what"] for e in again.events.values() if e["what"] == "joined"] == [
        "joined",
        "joined",
    ]


def test_only_what_changed_is_told_and_a_plan_once(training_run, numbered_report, plan):
    run, ada, _ = training_run
    first = export.build_page(TelemetryPosition())
    assert len(first.frames) == 2 and first.frames[0].plan == plan and not first.more
    nothing = export.build_page(first.places)
    assert (nothing.machines, nothing.frames, nothing.sums, nothing.points, nothing.events) == (
        [],
        [],
        [],
        [],
        [],
    )
    assert nothing.places == first.places
    report(ada, run, numbered_report(4, plan=plan))
    second = export.build_page(first.places)
    assert second.machines == [elsewhere(run, ada)] and [f.plan for f in second.frames] == [None]
    assert {each.width for each in second.sums} == {10, 60, 3600} and [
        p.seq for p in second.points
    ] == [4]
    changed = plan.model_copy(update={"predicted_seconds": 4.0})
    report(ada, run, numbered_report(5, plan=changed))
    assert export.build_page(second.places).frames[0].plan == changed
    assert (
        sum(frame.plan is not None for frame in export.build_page(TelemetryPosition()).frames) == 1
    ), "who is new hears of it"


def test_what_does_not_fit_one_page_comes_with_the_next_and_nothing_twice(
    training_run, monkeypatch
):
    for name, most in (
        ("MAX_MACHINE_ROWS", 1),
        ("MAX_ROLLUPS", 2),
        ("MAX_LOSSES", 4),
        ("MAX_EVENTS", 1),
    ):
        monkeypatch.setattr(export, name, most)
    after, points, sums, pages = TelemetryPosition(), [], [], 0
    while True:
        found = export.build_page(after)
        points += [(found.machines[p.of], p.seq, p.position) for p in found.points]
        sums += [(found.machines[s.of], s.width, s.bucket) for s in found.sums]
        pages, after = pages + 1, found.places
        if not found.more:
            break
    assert pages > 2 and len(points) == len(set(points)) == LossPoint.objects.count()
    assert len(sums) == len(set(sums)) == Rollup.objects.count()


def test_what_another_mirror_told_is_not_passed_on(training_run):
    run, ada, _ = training_run
    before = export.build_page(TelemetryPosition())
    now = int(time.time())
    rows = {
        "sums": [RollupRow(0, 10, now // 10 * 10, 1, 1.0, 1, 1, 1, 1, 1)],
        "points": [LossRow(0, 77, 0, "train", 5, 1.0, now)],
        "events": [EventRow(0, "0192f0c1-4d3e-7f40-8a5b-6c7d8e9f0a1c", "left", now)],
    }
    assert ingest_page(page(elsewhere(run, ada), frames=[frame()], **rows)).rows == 4
    after = export.build_page(TelemetryPosition())
    assert after == before.model_copy(update={"frames": after.frames}) and len(after.frames) == 2


def test_the_same_told_twice_changes_nothing(training_run):
    run, ada, _ = training_run
    now = int(time.time())
    said = page(
        elsewhere(run, ada), elsewhere(run, ada), frames=[frame(), frame(of=1)],
        sums=[RollupRow(of, 10, now // 10 * 10, 2, 1000.0, 1, 1, 1, 1, 1) for of in (0, 1)],
        points=[LossRow(0, 77, 0, "train", 5000, 1.0, now)] * 2,
    )  # fmt: skip
    for _ in range(2):
        ingest_page(said)
        assert Membership.everywhere.filter(mirror=OTHER).count() == 1
        assert Rollup.objects.filter(membership__mirror=OTHER).get().rate_sum == 1000.0
        assert LossPoint.objects.filter(membership__mirror=OTHER).count() == 1


def test_another_process_that_was_here_first_is_not_overtaken(training_run):
    run, ada, _ = training_run
    ingest_page(
        page(elsewhere(run, ada), frames=[frame()], places=TelemetryPosition(frames=(5, None)))
    )
    assert (
        ingest_page(page(elsewhere(run, ada), frames=[frame(tokens=1)]), after=TelemetryPosition())
        == ingest.PageIngestResult()
    )
    assert Membership.everywhere.get(mirror=OTHER).tokens == 9000


# ---- one machine, two mirrors


def test_a_machine_that_moves_is_one_machine_and_its_newest_report_counts(
    training_run, numbered_report
):
    run, ada, _ = training_run
    ingest_page(page(elsewhere(run, ada), frames=[frame(age=30.0, tokens=2, rate=7.0)]))
    (mine,) = [row for row in run_table.machine_rows(run) if row["id"] == str(ada.machine.pk)]
    assert mine["tokens"] == 3000, "it reported here since"
    Membership.objects.filter(machine=ada.machine).update(
        heard=timezone.now() - timedelta(minutes=1)
    )
    valkey_client().delete(report_queue.workers_key(run.pk))
    ingest_page(page(elsewhere(run, ada), frames=[frame(age=1.0)]))
    picture = RunSnapshot.capture(run)
    assert (picture.run["workers_known"], picture.run["rate"]) == (2, 1000.0)
    assert picture.workers[str(ada.machine.pk)]["tokens"] == 9000
    assert len(facts_of(run)) == 2
    ada.join(run)  # where it is found is told to every mirror: that is no report
    assert RunSnapshot.capture(run).workers[str(ada.machine.pk)]["activity"] == "training"
    report(ada, run, numbered_report(10, rate=500.0))
    assert RunSnapshot.capture(run).run["rate"] == 800.0


def facts_of(run) -> list:
    found = list(Membership.everywhere.newest().filter(run=run))
    assert gather_facts(run).alive == len(found)
    return found


def test_rate_reported_to_two_mirrors_in_one_bucket_is_averaged(training_run):
    run, ada, _ = training_run
    before = history.load_history(run)["rate"]
    ours = Rollup.objects.filter(membership__machine=ada.machine)
    same = [
        RollupRow(
            0,
            r.width,
            r.bucket,
            r.reports,
            r.rate_sum,
            r.tokens,
            r.updates_sent,
            0,
            r.peer_bytes_sent,
            0,
        )
        for r in ours
    ]
    points = [
        LossRow(0, p.seq, p.position, p.kind, p.tokens, p.loss, p.at)
        for p in LossPoint.objects.filter(membership__machine=ada.machine)
    ]
    curves = history.load_history(run)
    ingest_page(page(elsewhere(run, ada), frames=[frame()], sums=same, points=points))
    assert history.load_history(run)["rate"] == before
    assert history.load_history(run)["validation"] == curves["validation"], (
        "no point is there twice"
    )
    assert len(history.load_machine_curves(run)) == 1


def test_gap_in_own_reports_is_filled_by_reports_to_another_mirror(training_run, numbered_report):
    run, ada, _ = training_run
    ingest_page(page(elsewhere(run, ada), frames=[frame(latest=8, mark=8)]))
    report(ada, run, numbered_report(9), numbered_report(10))
    assert Membership.objects.get(machine=ada.machine).mark == 10
    report(ada, run, numbered_report(15))
    assert Membership.objects.get(machine=ada.machine).mark == 10, "nobody has 11 to 14"
    ingest_page(page(elsewhere(run, ada), frames=[frame(latest=1 << 40, mark=1 << 40)]))
    report(ada, run, numbered_report(16))
    assert Membership.objects.get(machine=ada.machine).mark == 16
    report(ada, run, numbered_report(17))
    assert Membership.objects.get(machine=ada.machine).mark == 17, (
        "a mirror's word never reaches past a machine's own"
    )


def test_a_machine_that_came_over_from_another_mirror_did_not_join_again(
    training_run, volunteer, person, numbered_report
):
    run, *_ = training_run
    carl = volunteer(person("carl@example.org"), seed=3)
    carl.join(run)
    ingest_page(page(elsewhere(run, carl), frames=[frame()]))
    report(carl, run, numbered_report(10))
    assert not RunEvent.objects.filter(machine=carl.machine).exists()


def test_what_a_run_waits_for_is_reckoned_with_all_its_machines(person, draft, manifest, volunteer):
    owner = person()
    run = draft(owner, quorum=2)
    ada, bob = volunteer(owner), volunteer(person("bob@example.org"), seed=2)
    ada.join(run)
    assert gather_facts(run).alive == 1
    ingest_page(page(elsewhere(run, bob), frames=[frame(ledger_tokens=70_000, safe=True)]))
    known = gather_facts(run)
    assert (known.alive, known.ledger_tokens, known.others_safe, known.others_ever) == (
        2,
        70_000,
        1,
        1,
    )
    Membership.everywhere.update(last_seen=timezone.now() - timedelta(minutes=5))
    assert gather_facts(run).alive == 0, "what a dead mirror told grows old as anything does"
