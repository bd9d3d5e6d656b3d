"""Test that reports reach Postgres: nothing is lost and nothing is counted twice."""

import random
import time
from datetime import timedelta
from itertools import pairwise
from uuid import uuid4

import pytest
from django.db import connection
from django.utils import timezone
from helpers.effort import examples
from helpers.site.machine_replies import read_reply
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from barnraise.protocol import reports as coordinator_reports
from coordinator.fleet.lifecycle_facts import advance_run
from coordinator.fleet.models import Membership
from coordinator.lib.embedded import embedded_servers, valkey_server
from coordinator.telemetry import report_queue, rollup
from coordinator.telemetry.history import MAX_POINTS, load_history
from coordinator.telemetry.models import BUCKET_WIDTHS, LossPoint, ReportReceipt, Rollup
from coordinator.telemetry.rollup import SentReports, drain_queue, store_reports
from coordinator.telemetry.run_cards import load_run_cards
from coordinator.telemetry.tasks import drain_reports

pytestmark = pytest.mark.django_db


def read_acknowledged_mark(answer) -> int:
    """Return the sequence number that the reply to a report acknowledges."""
    return read_reply(answer).acknowledged


def sum_rollups(member: Membership) -> dict[str, int]:
    """Return the sums over a membership's rollups, which are equal for every bucket width."""
    names = ("reports", "tokens", "updates_sent", "peer_bytes_sent")
    totals = [
        {n: sum(getattr(row, n) for row in member.rollups.filter(width=width)) for n in names}
        for width in BUCKET_WIDTHS
    ]
    assert totals[0] == totals[1] == totals[2]
    return totals[0]


def backdate_run(run) -> None:
    """Set the run's creation an hour back, because earlier measurements are ignored."""
    type(run).objects.filter(pk=run.pk).update(created=run.created - timedelta(hours=1))


def test_mark_acknowledges_only_reports_stored_in_postgres(adas_run, numbered_report):
    run, ada = adas_run
    assert read_acknowledged_mark(ada.report(run, numbered_report(1), numbered_report(2))) == 0
    assert read_acknowledged_mark(ada.report(run, numbered_report(3))) == 0
    drain_reports()
    assert read_acknowledged_mark(ada.report(run, numbered_report(4))) == 3
    drain_reports()
    member = Membership.objects.get(run=run)
    assert (member.high_water_mark, member.tokens, member.latest) == (4, 4000, 4)
    assert sum_rollups(member) == {
        "reports": 4,
        "tokens": 4000,
        "updates_sent": 4,
        "peer_bytes_sent": 400,
    }
    assert LossPoint.objects.count() == 4


@settings(
    max_examples=examples(10, 30),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 1 << 32), size=st.integers(1, 25))
def test_reports_in_any_order_with_duplicates_give_the_same_totals(
    person, launched_run, numbered_report, seed, size
):
    if not Membership.objects.exists():
        launched_run(person())
    member = Membership.objects.get()
    rng = random.Random(seed)
    now = time.time()
    Membership.objects.update(
        high_water_mark=0, latest=0, tokens=0, updates_sent=0, peer_bytes_sent=0
    )
    for model in (Rollup, LossPoint, ReportReceipt):
        model.objects.all().delete()
    posts = [numbered_report(i, at=now - 100 + i) for i in range(1, size + 1)]
    posts += rng.choices(posts, k=size)
    rng.shuffle(posts)
    while posts:
        count = rng.randint(1, 5)
        batch = posts[:count]
        posts = posts[count:]
        store_reports({member.pk: SentReports(batch, [], now)})
        member.refresh_from_db()
        stored_seqs = set(LossPoint.objects.values_list("seq", flat=True))
        assert all(seq in stored_seqs for seq in range(1, member.high_water_mark + 1))
    assert member.high_water_mark == size and not ReportReceipt.objects.exists()
    assert sum_rollups(member)["reports"] == size and sum_rollups(member)["tokens"] == size * 1000
    assert LossPoint.objects.count() == size


def test_gap_in_reports_holds_the_mark_until_it_is_filled(adas_run, numbered_report):
    run, ada = adas_run
    ada.report(run, numbered_report(1))
    ada.store_reports(run, numbered_report(4), numbered_report(5))
    member = Membership.objects.get(run=run)
    assert (member.high_water_mark, member.tokens, member.receipts.count()) == (1, 5000, 2)
    ada.store_reports(run, *(numbered_report(i) for i in range(2, 7)))
    member.refresh_from_db()
    assert (member.high_water_mark, member.receipts.count()) == (6, 0)
    assert sum_rollups(member) == {
        "reports": 6,
        "tokens": 6000,
        "updates_sent": 6,
        "peer_bytes_sent": 600,
    }


def test_reports_lost_by_the_machine_are_skipped_after_a_while(adas_run, numbered_report):
    run, ada = adas_run
    ada.store_reports(run, numbered_report(10), numbered_report(11))
    ada.store_reports(run, numbered_report(10), numbered_report(11), numbered_report(12))
    assert Membership.objects.get(run=run).high_water_mark == 0
    ReportReceipt.objects.update(received=timezone.now() - timedelta(minutes=11))
    ada.store_reports(
        run, numbered_report(10), numbered_report(11), numbered_report(12), numbered_report(13)
    )
    assert Membership.objects.get(run=run).high_water_mark == 13
    assert not ReportReceipt.objects.exists()


def test_crash_after_the_commit_counts_nothing_twice(adas_run, numbered_report, valkey):
    run, ada = adas_run
    ada.report(run, numbered_report(1), numbered_report(2))
    entries = valkey.lrange(report_queue.PENDING_KEY, 0, -1)
    drain_queue()
    # Restore the queue as it is if the process dies before it removes the entries.
    valkey.rpush(report_queue.PENDING_KEY, *entries)
    drain_queue()
    assert sum_rollups(Membership.objects.get(run=run))["reports"] == 2
    assert not valkey.exists(report_queue.PENDING_KEY)


def test_crash_before_the_commit_loses_nothing(adas_run, numbered_report, valkey):
    run, ada = adas_run
    ada.report(run, numbered_report(1), numbered_report(2))
    with connection.cursor() as cursor:  # Postgres itself fails the transaction at its last row
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
        cursor.execute(
            "ALTER TABLE fleet_membership ADD CONSTRAINT broken CHECK (high_water_mark < 2)"
        )
    valkey.rpush(report_queue.PENDING_KEY, valkey.lindex(report_queue.PENDING_KEY, 0))
    drain_queue()
    assert sum_rollups(Membership.objects.get(run=run))["reports"] == 0
    assert not LossPoint.objects.exists()
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE fleet_membership DROP CONSTRAINT broken")
    # The mark has not moved, so the machine posts the reports again.
    ada.store_reports(run, numbered_report(1), numbered_report(2))
    assert Membership.objects.get(run=run).high_water_mark == 2


def test_reports_lost_with_valkey_are_posted_again(adas_run, numbered_report, state):
    run, ada = adas_run
    ada.report(run, numbered_report(1), numbered_report(2))
    valkey_server.stop_valkey(state)
    embedded_servers.start(state, durable=False)  # a server without durability restarts empty
    ada.store_reports(run, numbered_report(3))
    assert Membership.objects.get(run=run).high_water_mark == 0
    ada.store_reports(run, numbered_report(1), numbered_report(2), numbered_report(3))
    member = Membership.objects.get(run=run)
    assert member.high_water_mark == 3 and sum_rollups(member)["reports"] == 3


def test_unreadable_entry_and_deleted_membership_are_skipped(shared_run, numbered_report, valkey):
    run, ada, bob = shared_run
    bob.report(run, numbered_report(1))
    valkey.rpush(
        report_queue.PENDING_KEY,
        "{",
        '{"membership": 1}',
        '{"membership": 1, "reports": [{}], "received": 1}',
    )
    ada.report(run, numbered_report(1))
    bob.machine.delete()
    assert drain_queue() == 5
    assert Membership.objects.get(run=run).high_water_mark == 1


def test_largest_numbers_are_stored(adas_run, numbered_report):
    run, ada = adas_run
    huge = dict.fromkeys(
        ("tokens", "ledger_tokens", "step", "updates_sent", "peer_bytes_sent"), (1 << 63) - 1
    )
    for seq in (1, 2):
        ada.store_reports(
            run, numbered_report(seq, rate=9e14, points=[], **(huge if seq == 1 else {}))
        )
    assert Membership.objects.get(run=run).high_water_mark == 2
    advance_run(run)


def test_machine_that_sends_too_much_is_put_off_and_others_are_not(
    shared_run, numbered_report, monkeypatch
):
    """A machine fills the database with reports of as many losses as fit."""
    cost = report_queue.cost_of([numbered_report(1)])
    monkeypatch.setattr(report_queue, "MAX_COSTS", ((3600, 2 * cost), (86_400, 2 * cost)))
    run, ada, bob = shared_run
    # The day's limit is the same where a new hour begins meanwhile.
    statuses = [ada.report(run, numbered_report(seq)).status_code for seq in range(1, 6)]
    assert statuses[0] == 200 and statuses[-1] == 503
    assert bob.report(run, numbered_report(1)).status_code == 200
    many = [coordinator_reports.MeasuredLoss(kind="validation", tokens=1, loss=1.0)] * 64
    assert report_queue.cost_of([numbered_report(1, points=many)]) > 64 * 100


def test_gaps_on_purpose_leave_a_bounded_number_of_receipts(adas_run, numbered_report, monkeypatch):
    """A machine sends every second report, and never those in between."""
    monkeypatch.setattr(rollup, "MAX_BEYOND", 3)
    run, ada = adas_run
    for seq in range(2, 22, 2):
        ada.store_reports(run, numbered_report(seq))
        assert ReportReceipt.objects.count() <= 3
    assert Membership.objects.get(run=run).high_water_mark == 14


def test_queue_of_large_requests_is_read_in_parts(adas_run, numbered_report, monkeypatch):
    monkeypatch.setattr(rollup, "MAX_CHUNK", 2)
    monkeypatch.setattr(rollup, "MAX_READ_CHARS", 1)
    run, ada = adas_run
    for seq in range(1, 6):
        ada.report(run, numbered_report(seq))
    assert drain_queue() == 5
    assert Membership.objects.get(run=run).high_water_mark == 5


def test_totals_beyond_a_column_do_not_make_the_batch_of_all_fail(
    shared_run, numbered_report, caplog
):
    """A machine states huge totals, then small ones, again and again: sums only grow."""
    run, ada, bob = shared_run
    now = time.time()
    bob.store_reports(run, numbered_report(1, at=now, tokens=1))
    Rollup.objects.update(tokens=(1 << 63) - 10)
    bob.report(run, numbered_report(2, at=now, tokens=1 << 40))
    ada.store_reports(run, numbered_report(1, at=now))
    assert set(Membership.objects.values_list("latest", flat=True)) == {1, 2}
    assert max(Rollup.objects.values_list("tokens", flat=True)) == (1 << 63) - 1
    assert "Postgres refuses" not in caplog.text


def test_full_queue_answers_503_until_it_is_drained(adas_run, numbered_report, valkey, monkeypatch):
    run, ada = adas_run
    monkeypatch.setattr(report_queue, "MAX_PENDING", 2)
    assert [ada.report(run, numbered_report(i)).status_code for i in (1, 2, 3)] == [200, 200, 503]
    drain_queue()
    assert ada.report(run, numbered_report(3)).status_code == 200


def test_new_incarnation_continues_after_queued_reports(adas_run, numbered_report):
    run, ada = adas_run
    ada.report(run, numbered_report(1), numbered_report(2))
    assert ada.join(run).acknowledged == 2
    ada.store_reports(run, numbered_report(3, tokens=10, incarnation="b" * 16))
    member = Membership.objects.get(run=run)
    assert (member.high_water_mark, member.tokens, sum_rollups(member)["tokens"]) == (3, 10, 2010)


# ---- history and table


def test_history_puts_spooled_reports_where_they_were_measured(adas_run, numbered_report):
    run, ada = adas_run
    backdate_run(run)
    start = time.time() // 10 * 10 - 1000
    for first in range(1, 101, 25):
        ada.report(
            run,
            *(
                numbered_report(i, at=start + i * 10 - 5, rate=100.0)
                for i in range(first, first + 25)
            ),
        )
    drain_queue()
    rate = load_history(run)["rate"]
    assert len(rate) == 100
    assert [b[0] - a[0] for a, b in pairwise(rate)] == [10] * 99
    assert {r for _, r in rate} == {100.0}


def test_history_is_thinned_for_the_chart_and_averages_machines(adas_run):
    run, _ = adas_run
    member = Membership.objects.get(run=run)
    LossPoint.objects.bulk_create(
        LossPoint(
            membership=member, seq=i, position=p, kind="train", tokens=i * 100, loss=loss, at=0
        )
        for i in range(2000)
        for p, loss in enumerate((2.0, 4.0))
    )
    Rollup.objects.bulk_create(
        Rollup(membership=member, bucket=i * 10, reports=2, rate_sum=20.0) for i in range(5000)
    )
    curves = load_history(run)
    assert 300 < len(curves["train"]) <= MAX_POINTS
    assert {loss for _, loss in curves["train"]} == {3.0}
    assert curves["train"] == sorted(curves["train"])
    assert curves["validation"] == []
    assert len(curves["rate"]) <= MAX_POINTS and {rate for _, rate in curves["rate"]} == {10.0}


def test_training_curve_of_three_people_is_not_moved_by_one_of_them(person, adas_run, volunteer):
    """One person with many machines, an invented loss, norm and time has one voice in each bin."""
    run, ada = adas_run
    honest = [ada, volunteer(person("bob@example.org"), 2)]
    mallory = person("mallory@example.org")
    liars = [volunteer(mallory, n) for n in range(3, 7)]
    for machine in honest[1:] + liars:
        machine.join(run)
    members = {member.machine_id: member for member in Membership.objects.filter(run=run)}
    LossPoint.objects.bulk_create(
        LossPoint(
            membership=members[machine.machine.pk],
            seq=i,
            position=0,
            kind="train",
            tokens=i * 10,
            loss=9.0 if machine in liars else 2.0 + n / 10,
            gradient_norm=1e9 if machine in liars else 1.0,
            learning_rate=1e-3,
            at=9e9 if machine in liars else 1000.0,
        )
        for n, machine in enumerate(honest + liars)
        for i in range(2000)
    )
    curves = load_history(run)
    assert {loss for _, loss in curves["train"]} == {2.1}  # the middle of 2.0, 2.1 and 9.0
    assert {norm for _, norm in curves["gradient_norm"]} == {1.0}
    assert {at for _, at in curves["clock"]} == {1000.0}
    assert set(load_run_cards([run])[run.pk].curve) == {2.1}


def test_history_adds_the_rates_of_machines(adas_run, numbered_report, strangers):
    run, ada = adas_run
    backdate_run(run)
    (bob,) = strangers(run, 2)
    now = time.time() // 10 * 10 - 10
    for machine, rate in ((ada, 100.0), (bob, 50.0)):
        machine.report(run, *(numbered_report(i, at=now + i, rate=rate) for i in range(1, 9)))
    drain_queue()
    assert load_history(run)["rate"] == [[now, 150.0]]


def test_points_are_read_once_by_cursor(adas_run, numbered_report):
    run, ada = adas_run
    assert report_queue.points_cursor(run.pk) == "0-0"
    ada.report(run, numbered_report(1), numbered_report(2))
    points, cursor = report_queue.points_since(run.pk, "0-0")
    assert [p["tokens"] for p in points] == [1000, 2000]
    assert points[0]["machine"] == str(ada.machine.pk)
    assert report_queue.points_since(run.pk, cursor) == ([], cursor)
    assert report_queue.points_cursor(run.pk) == cursor
    ada.report(run, numbered_report(3))
    assert [p["tokens"] for p in report_queue.points_since(run.pk, cursor)[0]] == [3000]


def test_live_rows_parse_only_rows_that_changed(valkey):
    run = uuid4()
    valkey.hset(report_queue.workers_key(run), mapping={"oak": '{"seq": 1}', "elm": '{"seq": 1}'})
    before = report_queue.live_rows(run)
    assert before == {"oak": {"seq": 1}, "elm": {"seq": 1}}
    valkey.hset(report_queue.workers_key(run), mapping={"elm": '{"seq": 2}', "ash": '{"seq": 1}'})
    after = report_queue.live_rows(run)
    assert after == {"oak": {"seq": 1}, "elm": {"seq": 2}, "ash": {"seq": 1}}
    assert after["oak"] is before["oak"]
    valkey.hdel(report_queue.workers_key(run), "oak")
    assert set(report_queue.live_rows(run)) == {"elm", "ash"}, "a removed row is still returned"
    for _ in range(2 * report_queue.MAX_CACHED_RUNS):
        report_queue.live_rows(uuid4())
    assert report_queue.cached_run_count() == report_queue.MAX_CACHED_RUNS, (
        "the cache of runs is unbounded"
    )
