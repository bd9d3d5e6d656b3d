"""Test the table of a run's page: live before stored figures, and whose weights agree."""

import time
from datetime import timedelta

import pytest
from django.utils import timezone
from helpers.site.pages import open_client
from helpers.site.remote_telemetry import EXCHANGE

from barnraise.protocol import enums
from barnraise.protocol.signing import digest
from coordinator.accounts.models import Machine
from coordinator.fleet.models import Membership
from coordinator.lib.valkey import valkey_client
from coordinator.telemetry import run_table
from coordinator.telemetry.rollup import drain_queue
from coordinator.telemetry.run_table import machine_rows, run_summary

pytestmark = pytest.mark.django_db


def test_page_says_which_machine_with_the_text_is_away(shared_run, numbered_report):
    run, ada, bob = shared_run
    preparing = {"activity": enums.Activity.PREPARING, "tokens": 0}
    bob.report(run, numbered_report(1).model_copy(update=preparing))
    ada.store_reports(run, numbered_report(1))
    assert not run_summary(run, machine_rows(run))["waiting"], "ada sends the text now"
    silent_since = timezone.now() - timedelta(hours=3)
    rows = machine_rows(run)
    for row in rows:
        if row["id"] == str(ada.machine.pk):
            row |= {"alive": False, "last_seen": silent_since.timestamp()}
    sentence = run_summary(run, rows)["waiting"]
    assert f"pc-1 prepared it and has not reported since {silent_since:%H:%M} UTC" in sentence


def test_two_machines_of_one_name_have_their_keys_behind_it(shared_run, volunteer):
    run, ada, _ = shared_run
    other = volunteer(run.owner, 3)
    Machine.objects.filter(pk=other.machine.pk).update(hostname=ada.machine.name)
    other.join(run)
    marked = {f"pc-1 ({machine.identity.key[:8]})" for machine in (ada, other)}
    names = {row["name"] for row in machine_rows(run)}
    assert names == {*marked, "pc-2"}, "Bob's has a name of its own"
    listed = open_client(run.owner).get("/machines/").content.decode()
    assert all(name in listed for name in marked)


def test_summary_says_whether_machines_with_equal_updates_agree(
    adas_run, numbered_report, strangers
):
    run, ada = adas_run
    (other,) = strangers(run, 2)
    same = digest("vector")

    def agreement(run) -> bool | None:
        return run_summary(run, machine_rows(run))["agree"]

    ada.report(run, numbered_report(2, vector=same, anchor=digest("weights")))
    assert agreement(run) is None
    other.report(run, numbered_report(1, vector=same, anchor=digest("weights")))
    assert agreement(run) is True
    other.report(run, numbered_report(2, vector=same, anchor=digest("other weights")))
    assert agreement(run) is False


def test_machine_agrees_with_the_majority_at_its_vector(adas_run, numbered_report, strangers):
    run, ada = adas_run
    others = strangers(run, 2, 3, 4)

    def agreements(*members) -> list[bool | None]:
        agrees = {row["id"]: row["agrees"] for row in machine_rows(run)}
        return [agrees[str(member.machine.pk)] for member in members]

    ada.report(run, numbered_report(2, vector=digest("vector"), anchor=digest("weights")))
    reported = (("vector", "weights"), ("vector", "others"), ("a later one", "weights"))
    for member, (vector, weights) in zip(others, reported, strict=True):
        member.report(run, numbered_report(1, vector=digest(vector), anchor=digest(weights)))
    assert agreements(ada, *others) == [True, True, False, None]
    others[0].report(run, numbered_report(2, activity="left"))
    assert agreements(ada, others[1]) == [False, False], "of two machines there is no majority"


def test_machine_table_shows_reports_before_they_are_stored(person, launched_run, numbered_report):
    run, ada = launched_run(person(name="Ada"))
    ada.report(run, numbered_report(1), numbered_report(2))
    [row] = machine_rows(run)
    assert (row["person"], row["name"], row["tokens"], row["rate"]) == ("Ada", "pc-1", 2000, 500.0)
    assert row["alive"] and row["id"] == str(ada.machine.pk)
    summary = run_summary(run, [row])
    assert (summary["tokens"], summary["rate"], summary["workers_alive"], summary["budget"]) == (
        2000,
        500.0,
        1,
        100_000,
    )
    drain_queue()
    valkey_client().flushall()
    [stored] = machine_rows(run)
    assert stored == row | {"last_seen": stored["last_seen"]}
    [later] = machine_rows(run, now=time.time() + 60)
    assert not later["alive"] and later["rate"] == 0


def test_last_plan_is_shown_with_its_measured_step_time(adas_run, numbered_report, plan):
    run, ada = adas_run

    def read_shown_plan() -> tuple:
        [row] = machine_rows(run)
        return row["plan"], row["step_seconds"]

    assert read_shown_plan() == (None, None)
    ada.report(run, numbered_report(1, plan=plan, step_seconds=5.1))
    assert read_shown_plan() == (plan.model_dump(), 5.1), "a plan in the queue is not shown"
    drain_queue()
    valkey_client().flushall()
    assert read_shown_plan() == (plan.model_dump(), 5.1), "the stored plan is not shown"
    ada.report(run, numbered_report(2, step_seconds=9.0))
    assert read_shown_plan() == (plan.model_dump(), 5.1), "a report without a plan changed the plan"
    drain_queue()
    assert read_shown_plan() == (plan.model_dump(), 5.1)
    other = plan.model_copy(update={"groups": 1})
    ada.report(run, numbered_report(3, plan=other))
    assert read_shown_plan() == (other.model_dump(), None), (
        "the new plan has the old plan's step time"
    )
    drain_queue()
    member = Membership.objects.get(run=run)
    stored = member.figures
    assert (stored["plan"], stored["step_seconds"]) == (other.model_dump(), None)
    ada.store_reports(run, numbered_report(5, plan=plan, step_seconds=5.0), numbered_report(6))
    assert read_shown_plan() == (plan.model_dump(), 5.0)


def test_replayed_old_report_does_not_change_the_table(adas_run, numbered_report):
    run, ada = adas_run
    ada.report(run, numbered_report(5))
    ada.report(run, numbered_report(1), numbered_report(2))
    assert machine_rows(run)[0]["tokens"] == 5000


def rows_agree(*reports: str, vectors: str = "") -> bool | None:
    """Return whether machines agree; each report is its owner and what its weights are."""
    rows = [
        {"vector": vector, "anchor": anchor, "alive": owner.isupper(), "owner": owner}
        for (owner, anchor), vector in zip(reports, vectors or "v" * len(reports), strict=True)
    ]
    return run_table.weights_agree(rows)


def test_machines_agree_when_equal_vectors_mean_equal_weights():
    assert rows_agree() is None
    assert rows_agree("A1", "B2", vectors="vw") is None
    assert rows_agree("A1", "B1", "C2", vectors="vvw") is True
    assert rows_agree("A1", "B2") is False
    assert rows_agree("A1", "b2") is None, "one that is not alive has no say"
    assert (
        run_table.weights_agree([{"vector": "v", "anchor": "", "alive": True, "owner": "A"}])
        is None
    )


def test_one_liars_machines_do_not_deny_that_weights_are_identical():
    """Let one person report other weights with three machines, then two people with one each."""
    assert rows_agree("A1", "B1", "M2", "M2", "M2") is True
    assert rows_agree("A1", "B1", "M2", "M3") is True, "who contradicts themself has no vote"
    assert rows_agree("A1", "B1", "M2", "N2") is False
    assert rows_agree("A1", "B1", "C1", "M2", "N3") is False
    assert rows_agree("A1", "M2") is False and rows_agree("A1", "A1", "A2") is False
    assert rows_agree("A1", "A2", "B1", "B2") is False


def test_page_says_that_the_machine_with_the_text_is_not_enrolled(shared_run, numbered_report):
    run, ada, bob = shared_run
    bob.report(run, numbered_report(1, activity="preparing"))
    ada.machine.delete()
    assert "is not enrolled any longer" in run_summary(run, machine_rows(run))["waiting"]
    run.cancel()
    assert "the text" not in (run_summary(run, machine_rows(run))["waiting"] or "")


def test_traffic_is_summed_over_machines_that_are_there(
    person, adas_run, volunteer, numbered_report
):
    run, ada = adas_run
    bob, eve = (volunteer(person(f"{n}@example.org"), n) for n in (2, 3))
    for machine, lag, activity in ((ada, 2, "training"), (bob, 4, "training"), (eve, 9, "left")):
        machine.join(run)
        exchange = EXCHANGE.model_copy(update={"lag": lag})
        machine.report(run, numbered_report(1, exchange=exchange, activity=activity))
    traffic = {"machines": 2, "sent": 2000, "received": 2000, "staleness": 3.0}
    assert run_table.sum_traffic(machine_rows(run)) == traffic
    assert run_table.sum_traffic([]) == dict.fromkeys(traffic, 0)
