"""Verdicts by the site: who may give them, what they may say, and how they reach the machines."""

import json

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from barnraise.errors import SpecError
from barnraise.exchange.ledger.validation import UpdateRules
from barnraise.exchange.ledger.verdicts import verify_proof
from barnraise.protocol import coordinator_messages
from coordinator.accounts.models import Machine
from coordinator.audit.models import AuditEntry
from coordinator.fleet import verdicts
from coordinator.fleet.report_queries import membership_for_run
from coordinator.fleet.verdicts import (
    RetractionRequest,
    VerdictRecord,
    count_incarnation_updates,
    list_authors,
    parse_single_updates,
    resolve_author,
)
from coordinator.runs.models import Run
from coordinator.telemetry.rollup import drain_queue

pytestmark = pytest.mark.django_db
LIFE, EARLIER = "a" * 16, "b" * 16


@pytest.fixture
def world(person, launched_run, volunteer, numbered_report):
    """A run of Ada's; Bob's machine in it has published four updates of 1,000 tokens, Ada's as many."""
    run, ada = launched_run(person("ada@example.org", name="Ada", is_staff=False), name="Dusk")
    bob = volunteer(person("bob@example.org", name="Bob"), 2)
    bob.join(run)
    for each in (ada, bob):
        each.report(run, numbered_report(4))
    drain_queue()
    return run, ada, bob


def charge(machine, first: int | None = 3, **more) -> RetractionRequest:
    return RetractionRequest(f"{machine.identity.key}.{LIFE}", first, **more)


def replied(machine, run, report, heeds=()) -> coordinator_messages.ReportReply:
    sent = coordinator_messages.Reports(reports=[report], applied_verdicts=list(heeds))
    return coordinator_messages.ReportReply.model_validate_json(
        machine.send_request("POST", f"/runs/{run.slug}/reports", sent).content
    )


def wrong(run, *charges, reason="") -> dict[str, str]:
    with pytest.raises(SpecError) as raised:
        VerdictRecord.issue(run, charges, reason)
    assert not AuditEntry.objects.filter(action="run.verdict").exists()
    return raised.value.problems


def test_verdict_is_valid_for_the_exchange_and_sent_until_applied(world, numbered_report):
    run, ada, bob = world
    made = VerdictRecord.issue(run, [charge(bob, 3)], "noise", actor=run.owner)
    rules = UpdateRules.from_spec(run.spec, str(run.pk), frozenset(run.spec.roots))
    found = verify_proof(made.signed_verdict, rules)
    author = f"{bob.identity.key}.{LIFE}"
    assert found.limits == {author: 2} and list(found.rulings) == [made.digest]
    entry = AuditEntry.objects.get(action="run.verdict")
    assert (
        entry.detail["after"] == {author: 2}
        and entry.detail["reason"] == "noise"
        and entry.actor == run.owner
    )
    assert replied(ada, run, numbered_report(5)).verdicts == [made.signed_verdict]
    assert replied(ada, run, numbered_report(6)).verdicts == [made.signed_verdict], (
        "it has not said that it heeds it"
    )
    assert replied(ada, run, numbered_report(7), [made.digest]).verdicts == []
    assert replied(bob, run, numbered_report(5), ["0" * 64]).verdicts == [made.signed_verdict]


def test_many_verdicts_come_two_at_a_time_the_oldest_first(world, numbered_report):
    run, ada, bob = world
    made = [
        VerdictRecord.issue(run, [charge(bob, None, updates={seq: 1000})]) for seq in (1, 2, 3, 4)
    ]
    heeds: list[str] = []
    for seq in (5, 6, 7):
        heeds += [
            verdicts.digest(each.body)
            for each in replied(ada, run, numbered_report(seq), heeds).verdicts
        ]
    assert heeds == [each.digest for each in made]


def test_a_run_without_verdicts_costs_its_reports_no_further_query(
    world, numbered_report, django_assert_num_queries
):
    run, ada, bob = world
    member = membership_for_run(ada.machine, run.slug)
    assert member.has_verdicts is False
    VerdictRecord.issue(run, [charge(bob)])
    with django_assert_num_queries(1):
        assert membership_for_run(ada.machine, run.slug).has_verdicts


@pytest.mark.parametrize(
    "field, change",
    [
        ("author", {"author": "nonsense"}),
        ("author", {"author": "0" * 64 + "." + LIFE}),
        ("first", {"first": None}),
        ("first", {"first": 0}),
        ("first", {"first": 1 << 53}),
        ("updates", {"updates": {0: 1}}),
        ("updates", {"updates": {seq: 1 for seq in range(1, 202)}}),
        ("updates", {"updates": {1: 1 << 40}}),
    ],
)
def test_what_makes_no_sense_is_refused_at_its_field(world, field, change):
    run, _, bob = world
    fields = {"author": f"{bob.identity.key}.{LIFE}", "first": 1, "updates": {}} | change
    assert list(wrong(run, RetractionRequest(**fields))) == [field]


def test_a_reason_that_hides_something_and_nobody_at_all_are_refused(world):
    run, _, bob = world
    assert list(wrong(run, charge(bob), reason="all is well\N{RIGHT-TO-LEFT OVERRIDE}")) == [
        "reason"
    ]
    assert list(wrong(run, charge(bob), reason="x" * 101)) == ["reason"]
    assert list(wrong(run)) == ["author"]


def test_what_is_too_old_is_refused_with_the_first_that_is_not(world, numbered_report):
    run, ada, bob = world
    for seq in (20, 40):
        bob.report(run, numbered_report(seq, ledger_tokens=40_000))
        ada.report(run, numbered_report(seq, ledger_tokens=40_000))
    drain_queue()
    found = wrong(run, charge(bob, 5))
    assert (
        "too old" in found["first"]
        and "to update 20" in found["first"]
        and "new run" in found["first"]
    )
    assert "to update 20" in wrong(run, charge(bob, None, updates={19: 1000}))["updates"]
    VerdictRecord.issue(run, [charge(bob, 20)])
    run.record_ledger_tokens(40_000 + 21 * 2_000)  # bob has been silent for 21 rounds
    assert "too old" in wrong_again(run, charge(bob, 40))["first"]


def wrong_again(run, *charges) -> dict[str, str]:
    with pytest.raises(SpecError) as raised:
        VerdictRecord.issue(run, charges)
    return raised.value.problems


def test_verdict_on_a_draft_or_ended_run_or_above_the_limit_is_refused(world, draft, monkeypatch):
    run, _, bob = world
    assert "is draft" in wrong(draft(run.owner), charge(bob))["run"]
    monkeypatch.setattr(verdicts, "MAX_VERDICTS", 0)
    assert "has its 0 verdicts" in wrong(run, charge(bob))["run"]
    run.cancel()
    assert "is cancelled" in wrong(run, charge(bob))["run"]


def test_who_asks_for_more_mirrors_waits_for_their_signatures(world, numbered_report, monkeypatch):
    run, ada, bob = world
    spec = json.loads(run.spec_text) | {"threshold": 2, "roots": [*run.spec.roots, "0" * 64]}
    Run.objects.filter(pk=run.pk).update(spec_text=json.dumps(spec))
    made = VerdictRecord.issue(run, [charge(bob)])
    assert not made.proven and replied(ada, run, numbered_report(5)).verdicts == []


# ---- whose ---------------------------------------------------------------------------------------------------------


def test_a_machines_lives_are_told_apart_and_named_as_people_would(world, numbered_report):
    run, _, bob = world
    bob.report(run, numbered_report(5, incarnation=EARLIER, updates_sent=6))
    drain_queue()
    told = [
        (each.author[-16:], each.updates, each.is_present)
        for each in list_authors(run)
        if each.person == "Bob"
    ]
    assert told == [(EARLIER, 2, True), (LIFE, 4, False)]
    author = f"{bob.identity.key}.{EARLIER}"
    for said in (author, bob.identity.key, bob.identity.key[:8], "pc-2", str(bob.machine.pk)):
        assert resolve_author(run, said) == author
    for said in ("", "pc-3", bob.identity.key[:7], "%", "0" * 64):
        with pytest.raises(SpecError, match="give its key"):
            resolve_author(run, said)
    Machine.objects.update(hostname="same")
    with pytest.raises(SpecError, match="2 machines"):
        resolve_author(run, "same")


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 50)), max_size=30))
def test_lives_never_shrink_and_never_grow_beyond_what_was_told(reports):
    known: dict[str, int] = {}
    for life, updates in reports:
        after = count_incarnation_updates(known, life, updates, most=3)
        assert (
            len(after) <= 3
            and after[life] >= known.get(life, 0)
            and all(count >= 0 for count in after.values())
        )
        known = after


def test_single_updates_are_read_as_they_are_typed():
    assert (
        parse_single_updates(" 7, 9:40960 12 ") == {7: 0, 9: 40960, 12: 0}
        and parse_single_updates("") == {}
    )
    for text in ("x", ":7", "7:-1", "٣", "7:x", "9" * 50):
        with pytest.raises(SpecError):
            parse_single_updates(text)


# ---- by the page, the API, a ban -----------------------------------------------------------------------------------


def test_the_owners_page_takes_out_and_says_at_the_field_what_is_wrong(world, client):
    run, _, bob = world
    client.force_login(run.owner)
    author, path = f"{bob.identity.key}.{LIFE}", f"/runs/{run.slug}/verdicts/"
    assert "4 updates" in client.get(path).content.decode()
    page = client.post(
        path, {"author": author, "first": "two", "updates": "7:", "reason": "<b>noise"}
    )
    html = page.content.decode()
    assert (
        page.status_code == 422
        and "be a whole number, not" in html
        and 'value="&lt;b&gt;noise"' in html
    )
    assert "Say from which update on" in client.post(path, {"author": author}).content.decode()
    assert not VerdictRecord.objects.exists()
    said = {"author": author, "first": "2", "updates": "1:1000", "reason": "<b>noise"}
    assert client.post(path, said).status_code == 302
    assert (
        VerdictRecord.objects.get().message.after == {author: 1}
        and VerdictRecord.objects.get().by == run.owner
    )
    assert "&lt;b&gt;noise" in client.get(path).content.decode()
    Run.objects.filter(pk=run.pk).update(status="cancelled")
    assert "is cancelled" in client.post(path, {"author": author, "first": "1"}).content.decode()


def test_staff_ban_a_machine_in_mid_run_and_take_out_what_it_did(world, client, person):
    run, _, bob = world
    client.force_login(person("root@example.org", is_staff=True, is_superuser=True))
    path = f"/admin/accounts/machine/{bob.machine.pk}/revoke/"
    member = run.memberships.get(machine=bob.machine)
    assert "Dusk: 4 updates" in client.get(path).content.decode()
    said = {
        "_form_submitted": "1",
        "reason": "it sends noise",
        "membership": member.pk,
        "first": "99999999999999999",
    }
    assert client.post(path, said).status_code == 200 and not VerdictRecord.objects.exists()
    assert client.post(path, said | {"first": "3"}).status_code == 302
    bob.machine.refresh_from_db()
    assert bob.machine.revoked and VerdictRecord.objects.get().message.after == {
        f"{bob.identity.key}.{LIFE}": 2
    }
    actions = AuditEntry.objects.order_by("id").values_list("action", flat=True)
    assert list(actions)[-2:] == ["machine.revoke", "run.verdict"]
    assert client.post(path, said | {"first": ""}).status_code == 302, (
        "banned before; the rest comes out as well"
    )
    assert VerdictRecord.objects.first().message.after == {f"{bob.identity.key}.{LIFE}": 0}


def test_staff_take_updates_out_by_the_admin(world, client, person):
    run, _, bob = world
    client.force_login(person("root@example.org", is_staff=True, is_superuser=True))
    path = f"/admin/fleet/membership/{run.memberships.get(machine=bob.machine).pk}/remove_updates/"
    for said in ({"first": "", "updates": "x"}, {"first": ""}, {"first": "0"}):
        assert (
            client.post(path, {"_form_submitted": "1", "reason": "noise", **said}).status_code
            == 200
        )
    assert not VerdictRecord.objects.exists()
    said = {"_form_submitted": "1", "reason": "noise", "updates": "2:1000,4"}
    assert client.post(path, said).status_code == 302
    assert VerdictRecord.objects.get().message.updates == {
        f"{bob.identity.key}.{LIFE}": {2: 1000, 4: 0}
    }
    assert (
        client.get(
            f"/admin/fleet/verdictrecord/{VerdictRecord.objects.get().pk}/change/"
        ).status_code
        == 200
    )
