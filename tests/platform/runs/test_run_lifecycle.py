"""Test how a run's status follows from its machines' reports."""

from datetime import timedelta

import pytest
from django.core.cache import cache
from django.utils import timezone
from helpers.site.machine_replies import read_directive, read_reply
from helpers.site.pages import open_client, text
from helpers.updates.attestations import witness_of

from barnraise.protocol import coordinator_messages, enums
from coordinator.fleet.lifecycle_facts import gather_facts
from coordinator.fleet.models import Membership
from coordinator.runs.models import Run
from coordinator.telemetry import run_table
from coordinator.telemetry.rollup import drain_queue
from coordinator.telemetry.tasks import advance_runs

pytestmark = pytest.mark.django_db


def test_ledger_tokens_ignore_one_machines_false_report(
    person, adas_run, numbered_report, volunteer
):
    run, ada = adas_run
    machines = [
        ada,
        volunteer(person("bob@example.org"), 2),
        volunteer(person("eve@example.org"), 3),
    ]
    for i, machine in enumerate(machines):
        machine.join(run)
        machine.report(run, numbered_report(5, ledger_tokens=10**15 if i == 2 else 5000))
    drain_queue()
    advance_runs()
    run.refresh_from_db()
    assert run.ledger_tokens == 5000 and run.state is enums.RunStatus.TRAINING


def test_three_keys_without_computers_do_not_decide_the_count(
    person, adas_run, numbered_report, volunteer, valkey
):
    """Let one stranger's three keys claim 10^15 tokens; the budget can still be extended."""
    run, ada = adas_run
    eve = person("eve@example.org")
    for seed in (5, 6, 7):
        machine = volunteer(eve, seed)
        machine.join(run)
        machine.report(run, numbered_report(1, ledger_tokens=10**15, rate=2.7e14))
    ada.store_reports(run, numbered_report(5, ledger_tokens=5000))
    advance_runs()
    run.refresh_from_db()
    assert (run.ledger_tokens, run.ledger_people) == (5000, 1)
    assert run.extension_problem() == "" and run.max_plausible_tokens == 2 * run.token_budget
    summary = run_table.run_summary(run, run_table.machine_rows(run))
    assert (summary["tokens"], summary["people"], summary["rate"]) == (5000, 1, 1000.0)
    assert summary["updates"] == 8


def test_wrong_count_goes_down_when_nobody_vouches_for_it(adas_run, numbered_report, strangers):
    run, ada = adas_run
    (eve,) = strangers(run, 5)
    eve.store_reports(run, numbered_report(1, ledger_tokens=10**15))
    advance_runs()
    run.refresh_from_db()
    assert run.ledger_tokens == 10**15, "the only person in a run is not believed"
    ada.store_reports(run, numbered_report(5, ledger_tokens=5000))
    advance_runs()
    run.refresh_from_db()
    assert run.ledger_tokens == 5000


def test_strangers_do_not_outvote_people_whose_updates_others_have(
    person, adas_run, numbered_report, volunteer
):
    """Let four accounts outnumber Bob and Carl while the run's owner is away."""
    run, ada = adas_run
    bob, carl = volunteer(person("bob@example.org"), 2), volunteer(person("c@example.org"), 3)
    liars = [volunteer(person(f"{n}@example.org"), 10 + n) for n in range(4)]
    for machine in (bob, carl, *liars):
        machine.join(run)
    seen = [witness_of(ada, run, author, 5, 5000) for author in (bob, carl)]
    sent = coordinator_messages.Reports(
        reports=[numbered_report(1, activity="left")], attestations=seen
    )
    assert ada.send_request("POST", f"/runs/{run.slug}/reports", sent).status_code == 200
    for machine in (bob, carl):
        machine.report(run, numbered_report(1, ledger_tokens=10_000))
    for machine in liars:
        machine.report(run, numbered_report(1, ledger_tokens=10**15))
    drain_queue()
    advance_runs()
    run.refresh_from_db()
    assert (run.ledger_tokens, run.ledger_people) == (10_000, 2)


def test_run_finishes_when_owner_and_others_have_the_model(shared_run, numbered_report):
    run, ada, bob = shared_run
    for machine in (ada, bob):
        machine.report(run, numbered_report(1, ledger_tokens=100_000, activity="finishing"))
    drain_queue()
    assert advance_runs() == 0
    run.refresh_from_db()
    assert "one other person" in run_table.run_summary(run, run_table.machine_rows(run))["waiting"]
    ada.report(run, numbered_report(2, ledger_tokens=100_000, activity="finished"))
    bob.store_reports(
        run,
        numbered_report(2, ledger_tokens=100_000, activity="finished"),
        numbered_report(3, activity="left"),
    )
    assert advance_runs() == 1 and advance_runs() == 0
    run.refresh_from_db()
    assert run.state is enums.RunStatus.FINISHED and run.finished
    reply = read_reply(ada.report(run, numbered_report(3)))
    assert read_directive(reply).status is enums.RunStatus.FINISHED


def test_delayed_reports_finish_the_run_within_minutes(adas_run, numbered_report, valkey):
    """Advance runs that are silent for two minutes less often, but advance them."""
    run, ada = adas_run
    assert advance_runs() == 0
    ada.store_reports(run, numbered_report(1, ledger_tokens=100_000, activity="finished"))
    Membership.objects.update(last_seen=timezone.now() - timedelta(minutes=30))
    Run.objects.filter(pk=run.pk).update(ledger_tokens=100_000)
    assert advance_runs() == 0
    valkey.delete(cache.make_key("telemetry:looked"))  # as it expires after five minutes
    assert advance_runs() == 1
    run.refresh_from_db()
    assert run.state is enums.RunStatus.FINISHED


def test_revoked_machine_is_not_counted(shared_run, numbered_report):
    run, _, bob = shared_run
    bob.store_reports(run, numbered_report(1, activity="finished"))
    assert (
        gather_facts(run).alive,
        gather_facts(run).others_ever,
        gather_facts(run).others_safe,
    ) == (2, 1, 1)
    bob.machine.revoke()
    assert (
        gather_facts(run).alive,
        gather_facts(run).others_ever,
        gather_facts(run).others_safe,
    ) == (1, 0, 0)


def test_machine_is_gone_after_three_missed_reports_or_on_leaving(adas_run, numbered_report):
    run, ada = adas_run
    assert gather_facts(run).alive == 1
    Membership.objects.update(last_seen=timezone.now() - timedelta(seconds=9))
    assert gather_facts(run).alive == 0 and not Membership.objects.get().is_alive
    ada.store_reports(run, numbered_report(1))
    assert gather_facts(run).alive == 1 and Membership.objects.get().is_alive
    ada.store_reports(run, numbered_report(2, activity="left"))
    assert gather_facts(run).alive == 0 and not Membership.objects.get().is_alive


def test_machine_that_only_prepared_the_text_starts_no_run(person, draft, manifest, volunteer):
    run = draft(person())
    ada = volunteer(run.owner)
    ada.join(run)  # a draft gives no ticket
    run.launch()
    ada.post_manifest(run, manifest(run))
    for _ in range(2):
        advance_runs()
    run.refresh_from_db()
    assert run.state is enums.RunStatus.RECRUITING
    rows = run_table.machine_rows(run)
    assert "0 of 1" in run_table.run_summary(run, rows)["waiting"]
    assert not run_table.counted_rows(rows), "it is no machine of the run's page"
    shown = text(open_client(run.owner).get("/machines/"))
    assert "In touch just now for" in shown and "has not trained" in shown
    assert "Last report" not in shown
    assert ada.join(run).ticket
    assert advance_runs() == 1


def test_run_recruits_until_its_quorum_is_alive(person, draft, manifest, volunteer):
    run = draft(person(), quorum=2)
    run.launch()
    ada, bob = volunteer(run.owner), volunteer(person("bob@example.org"), 2)
    ada.post_manifest(run, manifest(run))
    advance_runs()
    run.refresh_from_db()
    ada.join(run)
    advance_runs()
    run.refresh_from_db()
    assert run.state is enums.RunStatus.RECRUITING
    assert "1 of 2" in run_table.run_summary(run, run_table.machine_rows(run))["waiting"]
    bob.join(run)
    assert advance_runs() == 1


def test_waiting_drafts_need_one_query_to_advance(person, draft, django_assert_num_queries):
    owner = person()
    for name in "abc":
        draft(owner, name)
    with django_assert_num_queries(1):
        assert advance_runs() == 0
