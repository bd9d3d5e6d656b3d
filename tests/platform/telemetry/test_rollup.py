"""Reports on their way into Postgres: nothing lost, nothing counted twice."""

import random
import time
from datetime import timedelta
from itertools import pairwise
from uuid import uuid4

import pytest
from django.db import connection
from django.utils import timezone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from barnraise.protocol import coordinator_messages
from coordinator.fleet.lifecycle_facts import advance_run
from coordinator.fleet.models import Membership
from coordinator.lib import embedded_servers
from coordinator.lib.valkey import valkey_client
from coordinator.telemetry import report_queue, run_table
from coordinator.telemetry.history import MAX_POINTS, load_history
from coordinator.telemetry.models import BUCKET_WIDTHS, LossPoint, ReportReceipt, Rollup
from coordinator.telemetry.rollup import drain_queue, store_reports
from coordinator.telemetry.tasks import drain_reports

pytestmark = pytest.mark.django_db


def mark_of(answer) -> int:
    assert answer.status_code == 200, answer.content
    return coordinator_messages.ReportReply.model_validate_json(answer.content).acknowledged


def counted(member: Membership) -> dict[str, int]:
    """What rows of ten seconds add up to; those of a minute and of an hour add up to the same."""
    names = ("reports", "tokens", "updates_sent", "peer_bytes_sent")
    each = [
        {n: sum(getattr(row, n) for row in member.rollups.filter(width=width)) for n in names}
        for width in BUCKET_WIDTHS
    ]
    assert each[0] == each[1] == each[2]
    return each[0]


def aged(run) -> None:
    """As if it had been made an hour ago: nothing is measured before there is a run."""
    type(run).objects.filter(pk=run.pk).update(created=run.created - timedelta(hours=1))


def test_the_mark_is_what_postgres_holds_and_not_what_was_merely_heard(
    person, launched_run, numbered_report
):
    run, ada = launched_run(person())
    assert mark_of(ada.report(run, numbered_report(1), numbered_report(2))) == 0
    assert mark_of(ada.report(run, numbered_report(3))) == 0
    drain_reports()
    assert mark_of(ada.report(run, numbered_report(4))) == 3
    drain_reports()
    member = Membership.objects.get(run=run)
    assert (member.mark, member.tokens, member.latest) == (4, 4000, 4)
    assert counted(member) == {
        "reports": 4,
        "tokens": 4000,
        "updates_sent": 4,
        "peer_bytes_sent": 400,
    }
    assert LossPoint.objects.count() == 4


def test_a_report_posted_again_counts_once(person, launched_run, numbered_report):
    run, ada = launched_run(person())
    reports = [numbered_report(i) for i in range(1, 6)]
    for _ in range(3):
        ada.report(run, *reports)
    drain_queue()
    ada.report(run, *reports, numbered_report(6))
    drain_queue()
    assert counted(Membership.objects.get(run=run))["reports"] == 6
    assert LossPoint.objects.count() == 6


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 1 << 32), size=st.integers(1, 25))
def test_any_order_and_any_duplication_comes_to_the_same(
    person, launched_run, numbered_report, seed, size
):
    if not Membership.objects.exists():
        launched_run(person())
    member = Membership.objects.get()
    chance, now = random.Random(seed), time.time()
    Membership.objects.update(mark=0, latest=0, tokens=0, updates_sent=0, peer_bytes_sent=0)
    for model in (Rollup, LossPoint, ReportReceipt):
        model.objects.all().delete()
    posts = [numbered_report(i, at=now - 100 + i) for i in range(1, size + 1)]
    posts += chance.choices(posts, k=size)
    chance.shuffle(posts)
    while posts:
        batch, posts = posts[: (n := chance.randint(1, 5))], posts[n:]
        store_reports({member.pk: (batch, [], now)})
        member.refresh_from_db()
        held = set(LossPoint.objects.values_list("seq", flat=True))
        assert all(seq in held for seq in range(1, member.mark + 1))
    assert member.mark == size and not ReportReceipt.objects.exists()
    assert counted(member)["reports"] == size and counted(member)["tokens"] == size * 1000
    assert LossPoint.objects.count() == size


def test_a_gap_keeps_the_mark_down_until_it_is_filled(person, launched_run, numbered_report):
    run, ada = launched_run(person())
    ada.report(run, numbered_report(1))
    ada.report(run, numbered_report(4), numbered_report(5))
    drain_queue()
    member = Membership.objects.get(run=run)
    assert (member.mark, member.tokens, member.receipts.count()) == (1, 5000, 2)
    ada.report(run, *(numbered_report(i) for i in range(2, 7)))
    drain_queue()
    member.refresh_from_db()
    assert (member.mark, member.receipts.count()) == (6, 0)
    assert counted(member) == {
        "reports": 6,
        "tokens": 6000,
        "updates_sent": 6,
        "peer_bytes_sent": 600,
    }


def test_reports_that_the_machine_lost_itself_are_given_up_in_the_end(
    person, launched_run, numbered_report
):
    run, ada = launched_run(person())
    ada.report(run, numbered_report(10), numbered_report(11))
    drain_queue()
    ada.report(run, numbered_report(10), numbered_report(11), numbered_report(12))
    drain_queue()
    assert Membership.objects.get(run=run).mark == 0
    ReportReceipt.objects.update(received=timezone.now() - timedelta(minutes=11))
    ada.report(
        run, numbered_report(10), numbered_report(11), numbered_report(12), numbered_report(13)
    )
    drain_queue()
    assert Membership.objects.get(run=run).mark == 13
    assert not ReportReceipt.objects.exists()


def test_dying_after_the_commit_counts_nothing_twice(person, launched_run, numbered_report, valkey):
    run, ada = launched_run(person())
    ada.report(run, numbered_report(1), numbered_report(2))
    entries = valkey.lrange(report_queue.PENDING_KEY, 0, -1)
    drain_queue()
    valkey.rpush(
        report_queue.PENDING_KEY, *entries
    )  # as if the process had died before it took them off the queue
    drain_queue()
    assert counted(Membership.objects.get(run=run))["reports"] == 2
    assert not valkey.exists(report_queue.PENDING_KEY)


def test_dying_before_the_commit_loses_nothing(person, launched_run, numbered_report, valkey):
    run, ada = launched_run(person())
    ada.report(run, numbered_report(1), numbered_report(2))
    with connection.cursor() as cursor:  # Postgres itself fails the transaction at its last row
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
        cursor.execute("ALTER TABLE fleet_membership ADD CONSTRAINT broken CHECK (mark < 2)")
    valkey.rpush(report_queue.PENDING_KEY, valkey.lindex(report_queue.PENDING_KEY, 0))
    drain_queue()
    assert (
        counted(Membership.objects.get(run=run))["reports"] == 0 and not LossPoint.objects.exists()
    )
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE fleet_membership DROP CONSTRAINT broken")
    ada.report(
        run, numbered_report(1), numbered_report(2)
    )  # its mark stood still, so the machine posts them again
    drain_queue()
    assert Membership.objects.get(run=run).mark == 2


def test_with_valkey_emptied_the_machine_posts_again_and_nothing_is_lost(
    person, launched_run, numbered_report, state
):
    run, ada = launched_run(person())
    ada.report(run, numbered_report(1), numbered_report(2))
    embedded_servers.stop_valkey(state)
    embedded_servers.start(state, durable=False)  # an undurable one comes back empty
    ada.report(run, numbered_report(3))
    drain_queue()
    assert Membership.objects.get(run=run).mark == 0
    ada.report(run, numbered_report(1), numbered_report(2), numbered_report(3))
    drain_queue()
    member = Membership.objects.get(run=run)
    assert member.mark == 3 and counted(member)["reports"] == 3


def test_an_unreadable_entry_and_a_deleted_membership_hold_nothing_up(
    person, launched_run, numbered_report, volunteer, valkey
):
    run, ada = launched_run(person())
    bob = volunteer(person("bob@example.org"), 2)
    bob.join(run)
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
    assert Membership.objects.get(run=run).mark == 1


def test_the_largest_numbers_there_are_fit(person, launched_run, numbered_report):
    run, ada = launched_run(person())
    huge = dict.fromkeys(
        ("tokens", "ledger_tokens", "step", "updates_sent", "peer_bytes_sent"), (1 << 63) - 1
    )
    for seq in (1, 2):
        ada.report(run, numbered_report(seq, rate=9e14, points=[], **(huge if seq == 1 else {})))
        drain_queue()
    assert Membership.objects.get(run=run).mark == 2
    advance_run(run)


def test_a_full_queue_asks_machines_to_keep_their_reports(
    person, launched_run, numbered_report, valkey, monkeypatch
):
    run, ada = launched_run(person())
    monkeypatch.setattr(report_queue, "MAX_PENDING", 2)
    assert [ada.report(run, numbered_report(i)).status_code for i in (1, 2, 3)] == [200, 200, 503]
    drain_queue()
    assert ada.report(run, numbered_report(3)).status_code == 200


def test_a_new_folder_numbers_its_reports_past_those_on_their_way(
    person, launched_run, numbered_report
):
    run, ada = launched_run(person())
    ada.report(run, numbered_report(1), numbered_report(2))
    assert ada.join(run).acknowledged == 2
    ada.report(run, numbered_report(3, tokens=10, incarnation="b" * 16))
    drain_queue()
    member = Membership.objects.get(run=run)
    assert (member.mark, member.tokens, counted(member)["tokens"]) == (3, 10, 2010)


# ---- what is made of them --------------------------------------------------------------------------------------


def test_history_puts_spooled_reports_where_they_were_measured(
    person, launched_run, numbered_report
):
    run, ada = launched_run(person())
    aged(run)
    start = time.time() // 10 * 10 - 1000
    for first in range(1, 101, 50):
        ada.report(
            run,
            *(
                numbered_report(i, at=start + i * 10 - 5, rate=100.0)
                for i in range(first, first + 50)
            ),
        )
    drain_queue()
    rate = load_history(run)["rate"]
    assert len(rate) == 100
    assert [b[0] - a[0] for a, b in pairwise(rate)] == [10] * 99
    assert {r for _, r in rate} == {100.0}


def test_history_is_thinned_to_what_a_chart_shows_and_averages_machines(
    person, launched_run, numbered_report
):
    run, _ = launched_run(person())
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
    known = load_history(run)
    assert 300 < len(known["train"]) <= MAX_POINTS and {loss for _, loss in known["train"]} == {3.0}
    assert known["train"] == sorted(known["train"])
    assert known["validation"] == []
    assert len(known["rate"]) <= MAX_POINTS and {rate for _, rate in known["rate"]} == {10.0}


def test_rates_of_machines_add_up(person, launched_run, numbered_report, volunteer):
    run, ada = launched_run(person())
    aged(run)
    bob = volunteer(person("bob@example.org"), 2)
    bob.join(run)
    now = time.time() // 10 * 10 - 10
    for each, rate in ((ada, 100.0), (bob, 50.0)):
        each.report(run, *(numbered_report(i, at=now + i, rate=rate) for i in range(1, 9)))
    drain_queue()
    assert load_history(run)["rate"] == [[now, 150.0]]


def test_the_table_shows_the_newest_numbers_before_postgres_has_them(
    person, launched_run, numbered_report
):
    run, ada = launched_run(person(name="Ada"))
    ada.report(run, numbered_report(1), numbered_report(2))
    [row] = run_table.machine_rows(run)
    assert (row["person"], row["name"], row["tokens"], row["rate"]) == ("Ada", "pc-1", 2000, 500.0)
    assert row["alive"] and row["behind"] == 0 and row["id"] == str(ada.machine.pk)
    line = run_table.run_summary(run, [row])
    assert (line["tokens"], line["rate"], line["workers_alive"], line["budget"]) == (
        2000,
        500.0,
        1,
        100_000,
    )
    drain_queue()
    valkey_client().flushall()
    [stored] = run_table.machine_rows(run)
    assert stored == row | {"last_seen": stored["last_seen"]}
    [later] = run_table.machine_rows(run, now=time.time() + 60)
    assert not later["alive"] and later["rate"] == 0


def test_a_machines_last_plan_stays_with_the_time_measured_under_it(
    person, launched_run, numbered_report, plan
):
    run, ada = launched_run(person())

    def told() -> tuple:
        [row] = run_table.machine_rows(run)
        return row["plan"], row["step_seconds"]

    assert told() == (None, None)
    ada.report(run, numbered_report(1, plan=plan, step_seconds=5.1))
    assert told() == (plan.model_dump(), 5.1), "before Postgres has it"
    drain_queue()
    valkey_client().flushall()
    assert told() == (plan.model_dump(), 5.1), "after the site forgot what it heard"
    ada.report(run, numbered_report(2, step_seconds=9.0))
    assert told() == (plan.model_dump(), 5.1), "a report without a plan changes nothing"
    drain_queue()
    assert told() == (plan.model_dump(), 5.1)
    other = plan.model_copy(update={"groups": 1})
    ada.report(run, numbered_report(3, plan=other))
    assert told() == (other.model_dump(), None), "nothing is measured under the new one yet"
    drain_queue()
    member = Membership.objects.get(run=run)
    assert (member.plan, member.step_seconds) == (other.model_dump(), None)
    ada.report(run, numbered_report(5, plan=plan, step_seconds=5.0), numbered_report(6))
    drain_queue()
    assert told() == (plan.model_dump(), 5.0)


def test_a_replayed_old_report_does_not_turn_the_table_back(person, launched_run, numbered_report):
    run, ada = launched_run(person())
    ada.report(run, numbered_report(5))
    ada.report(run, numbered_report(1), numbered_report(2))
    assert run_table.machine_rows(run)[0]["tokens"] == 5000


def test_points_come_by_cursor_each_once(person, launched_run, numbered_report):
    run, ada = launched_run(person())
    assert report_queue.points_cursor(run.pk) == "0-0"
    ada.report(run, numbered_report(1), numbered_report(2))
    points, cursor = report_queue.points_since(run.pk, "0-0")
    assert [p["tokens"] for p in points] == [1000, 2000] and points[0]["machine"] == str(
        ada.machine.pk
    )
    assert report_queue.points_since(run.pk, cursor) == ([], cursor)
    assert report_queue.points_cursor(run.pk) == cursor
    ada.report(run, numbered_report(3))
    assert [p["tokens"] for p in report_queue.points_since(run.pk, cursor)[0]] == [3000]


def test_machines_agree_when_equal_vectors_mean_equal_weights():
    def row(vector, anchor, alive=True):
        return {"vector": vector, "anchor": anchor, "alive": alive}

    assert run_table.weights_agree([]) is None
    assert run_table.weights_agree([row("a", "1"), row("b", "2")]) is None
    assert run_table.weights_agree([row("a", "1"), row("a", "1"), row("b", "2")]) is True
    assert run_table.weights_agree([row("a", "1"), row("a", "2")]) is False
    assert (
        run_table.weights_agree([row("a", "1"), row("a", "2", alive=False), row("a", "")]) is None
    )


def test_of_a_runs_live_rows_only_those_that_changed_are_read_anew(valkey):
    run = uuid4()
    valkey.hset(report_queue.workers_key(run), mapping={"oak": '{"seq": 1}', "elm": '{"seq": 1}'})
    before = report_queue.live_rows(run)
    assert before == {"oak": {"seq": 1}, "elm": {"seq": 1}}
    valkey.hset(report_queue.workers_key(run), mapping={"elm": '{"seq": 2}', "ash": '{"seq": 1}'})
    after = report_queue.live_rows(run)
    assert after == {"oak": {"seq": 1}, "elm": {"seq": 2}, "ash": {"seq": 1}}
    assert after["oak"] is before["oak"]
    valkey.hdel(report_queue.workers_key(run), "oak")
    assert set(report_queue.live_rows(run)) == {"elm", "ash"}, "who is gone is not remembered"
    for _ in range(2 * report_queue.MAX_CACHED_RUNS):
        report_queue.live_rows(uuid4())
    assert len(report_queue._parsed_rows) == report_queue.MAX_CACHED_RUNS, (
        "nor are runs without end"
    )
