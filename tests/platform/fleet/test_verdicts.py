"""Test the site's verdicts: who may issue them, what they contain, how machines get them."""

import json
from datetime import timedelta

import hypothesis.strategies as st
import pytest
from django.test import Client
from django.utils import timezone
from helpers.mirrors.mirror_lists import list_entry, signed_list
from helpers.site.machine_replies import read_reply
from helpers.updates.attestations import witness_of
from hypothesis import given, settings

from barnraise.errors import SpecError
from barnraise.ledger.validation import UpdateRules
from barnraise.ledger.verdict_set import verify_proof
from barnraise.protocol import coordinator_messages
from barnraise.protocol.mirror_list import Expulsion
from barnraise.protocol.signing import Identity, digest
from coordinator.accounts.models import Machine
from coordinator.audit.models import AuditEntry
from coordinator.fleet import verdict_models
from coordinator.fleet.models import Membership
from coordinator.fleet.report_queries import membership_for_run
from coordinator.fleet.run_authors import count_incarnation_updates, list_authors, resolve_author
from coordinator.fleet.verdict_models import VerdictRecord, exclusion_problem
from coordinator.fleet.verdict_requests import (
    ExclusionRequest,
    RetractionRequest,
    parse_single_updates,
)
from coordinator.fleet.witnesses import record_witnesses
from coordinator.lib import site_identity
from coordinator.replication import mirror_list
from coordinator.replication.volunteer_salt import volunteer_pseudonym
from coordinator.runs.models import Run
from coordinator.telemetry.checkpoints import Checkpoint, CheckpointHolder
from coordinator.telemetry.rollup import drain_queue
from coordinator.tokens.models import Token

pytestmark = pytest.mark.django_db
LIFE, EARLIER = "a" * 16, "b" * 16
ROGUE = Identity(b"r" * 32)


@pytest.fixture
def verdict_run(person, launched_run, volunteer, numbered_report):
    """Return Ada's run and a machine each of Ada and Bob, with four updates of 1,000 tokens."""
    run, ada = launched_run(person("ada@example.org", name="Ada", is_staff=False), name="Dusk")
    bob = volunteer(person("bob@example.org", name="Bob"), 2)
    bob.join(run)
    Run.objects.filter(pk=run.pk).update(created=timezone.now() - timedelta(days=30))
    run.refresh_from_db()
    for machine in (ada, bob):
        machine.report(run, numbered_report(4))
    drain_queue()
    return run, ada, bob


def build_retraction(machine, first: int | None = 3, **more) -> RetractionRequest:
    """Build a request to retract a machine's updates from `first` on."""
    return RetractionRequest(f"{machine.identity.key}.{LIFE}", first, **more)


def send_report(machine, run, report, after: int = 0) -> coordinator_messages.ReportReply:
    """Send a report that says up to which verdict the machine has applied them."""
    request = coordinator_messages.Reports(reports=[report], verdicts_after=after)
    return read_reply(machine.send_request("POST", f"/runs/{run.slug}/reports", request))


def collect_problems(run, *requests, reason="") -> dict[str, str]:
    """Issue a verdict that is refused without an audit entry; return the problems by field."""
    before = AuditEntry.objects.filter(action="run.verdict").count()
    with pytest.raises(SpecError) as raised:
        VerdictRecord.issue(run, requests, reason)
    assert AuditEntry.objects.filter(action="run.verdict").count() == before
    return raised.value.problems


def test_verdict_is_valid_for_the_exchange_and_sent_until_applied(verdict_run, numbered_report):
    run, ada, bob = verdict_run
    record = VerdictRecord.issue(run, [build_retraction(bob, 3)], "noise", actor=run.owner)
    rules = UpdateRules.from_spec(run.spec, str(run.pk), frozenset(run.spec.roots))
    verified = verify_proof(record.signed_verdict, rules)
    author = f"{bob.identity.key}.{LIFE}"
    assert verified.limits == {author: 2} and list(verified.rulings) == [record.digest]
    entry = AuditEntry.objects.get(action="run.verdict")
    assert entry.detail["after"] == {author: 2}
    assert entry.detail["reason"] == "noise"
    assert entry.actor == run.owner
    assert send_report(ada, run, numbered_report(5)).verdicts == [record.signed_verdict]
    assert send_report(ada, run, numbered_report(6)).verdicts == [record.signed_verdict], (
        "the verdict is no longer sent although it is not applied"
    )
    assert send_report(ada, run, numbered_report(7), after=1).verdicts == []
    assert send_report(bob, run, numbered_report(5)).verdicts == [record.signed_verdict]


def test_pending_verdicts_are_sent_in_order_whatever_their_number(
    verdict_run, numbered_report, monkeypatch
):
    monkeypatch.setattr(verdict_models, "MAX_VERDICTS_PER_REPLY", 2)
    run, ada, bob = verdict_run
    records = [
        VerdictRecord.issue(run, [build_retraction(bob, None, updates={seq: 1000})])
        for seq in (1, 2, 3, 4)
    ]
    applied: list[str] = []
    after = 0
    for seq in (5, 6, 7):
        reply = send_report(ada, run, numbered_report(seq), after)
        applied += [digest(item.body) for item in reply.verdicts]
        after = reply.verdicts_until
    assert applied == [item.digest for item in records]


def test_run_without_verdicts_adds_no_query_to_reports(verdict_run, django_assert_num_queries):
    run, ada, bob = verdict_run
    member = membership_for_run(ada.machine, run.slug)
    assert member.has_verdicts is False
    VerdictRecord.issue(run, [build_retraction(bob)])
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
def test_invalid_retraction_request_is_refused_at_its_field(verdict_run, field, change):
    run, _, bob = verdict_run
    fields = {"author": f"{bob.identity.key}.{LIFE}", "first": 1, "updates": {}} | change
    assert list(collect_problems(run, RetractionRequest(**fields))) == [field]


def test_verdict_with_hidden_characters_or_no_author_is_refused(verdict_run):
    run, _, bob = verdict_run
    assert list(
        collect_problems(run, build_retraction(bob), reason="all is well\N{RIGHT-TO-LEFT OVERRIDE}")
    ) == ["reason"]
    assert list(collect_problems(run, build_retraction(bob), reason="x" * 101)) == ["reason"]
    assert list(collect_problems(run)) == ["author"]


def attest(witness, author, run, seq: int) -> None:
    """Let a machine attest an author's first `seq` updates of 1,000 tokens."""
    attestation = witness_of(witness, run, author, seq, 1000 * seq, LIFE)
    member = run.memberships.get(machine=witness.machine)
    record_witnesses([(member, [attestation])])


def test_too_old_retraction_is_refused_with_the_first_possible_update(verdict_run, strangers):
    run, ada, bob = verdict_run
    (carl,) = strangers(run, 3)
    run.record_ledger_tokens(40_000)
    for author in (ada, bob):
        for witness in (ada, bob, carl):
            if witness is not author:
                attest(witness, author, run, 40)
    field_problems = collect_problems(run, build_retraction(bob, 5))
    assert "too old" in field_problems["first"]
    assert "to update 20" in field_problems["first"]
    assert "new run" in field_problems["first"]
    assert (
        "to update 20"
        in collect_problems(run, build_retraction(bob, None, updates={19: 1000}))["updates"]
    )
    VerdictRecord.issue(run, [build_retraction(bob, 20)])
    run.record_ledger_tokens(40_000 + 21 * 2_000)  # Bob has published nothing for 21 rounds
    assert "too old" in collect_problems(run, build_retraction(bob, 40))["first"]


def test_accused_machine_cannot_make_itself_immune(verdict_run, numbered_report, strangers):
    """Let the accused report a million updates, and an accomplice witness them."""
    run, ada, bob = verdict_run
    (accomplice,) = strangers(run, 3)
    attest(ada, bob, run, 4)
    attest(bob, ada, run, 4)
    bob.store_reports(run, numbered_report(5, updates_sent=10**6, ledger_tokens=0))
    VerdictRecord.issue(run, [build_retraction(bob, 1)])
    attest(accomplice, bob, run, 10**6)
    VerdictRecord.issue(run, [build_retraction(bob, 2)])


def test_verdict_on_a_draft_or_ended_run_is_refused(verdict_run, draft):
    run, _, bob = verdict_run
    assert "is draft" in collect_problems(draft(run.owner), build_retraction(bob))["run"]
    run.cancel()
    assert "is cancelled" in collect_problems(run, build_retraction(bob))["run"]


def test_verdict_is_not_sent_before_enough_mirrors_signed_it(
    verdict_run, numbered_report, monkeypatch
):
    run, ada, bob = verdict_run
    spec = json.loads(run.spec_text) | {"threshold": 2, "roots": [*run.spec.roots, "a" * 64]}
    Run.objects.filter(pk=run.pk).update(spec_text=json.dumps(spec))
    record = VerdictRecord.issue(run, [build_retraction(bob)])
    assert not record.proven and send_report(ada, run, numbered_report(5)).verdicts == []


# ---- authors


def test_incarnations_are_listed_apart_and_resolved_by_any_name(verdict_run, numbered_report):
    run, _, bob = verdict_run
    bob.store_reports(run, numbered_report(5, incarnation=EARLIER, updates_sent=6))
    incarnations = [
        (listed.author[-16:], listed.updates, listed.is_present)
        for listed in list_authors(run)
        if listed.person == "Bob"
    ]
    assert incarnations == [(EARLIER, 2, True), (LIFE, 4, False)]
    author = f"{bob.identity.key}.{EARLIER}"
    for name in (author, bob.identity.key, bob.identity.key[:8], "pc-2", str(bob.machine.pk)):
        assert resolve_author(run, name) == author
    for name in ("", "pc-3", bob.identity.key[:7], "%", "0" * 64):
        with pytest.raises(SpecError, match="give its key"):
            resolve_author(run, name)
    Machine.objects.update(hostname="same")
    with pytest.raises(SpecError, match="2 machines"):
        resolve_author(run, "same")


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 50)), max_size=30))
def test_incarnation_update_counts_never_shrink(reports):
    counts: dict[str, int] = {}
    for incarnation, updates in reports:
        after = count_incarnation_updates(counts, incarnation, updates, most=3)
        assert len(after) <= 3
        assert after[incarnation] >= counts.get(incarnation, 0)
        assert all(count >= 0 for count in after.values())
        counts = after


def test_parse_single_updates_accepts_spaces_and_commas():
    assert parse_single_updates(" 7, 9:40960 12 ") == {7: 0, 9: 40960, 12: 0}
    assert parse_single_updates("") == {}
    for text in ("x", ":7", "7:-1", "٣", "7:x", "9" * 50):
        with pytest.raises(SpecError):
            parse_single_updates(text)


# ---- the page and the admin


def test_verdict_page_issues_verdicts_and_shows_field_problems(verdict_run, client):
    run, _, bob = verdict_run
    client.force_login(run.owner)
    author, path = f"{bob.identity.key}.{LIFE}", f"/runs/{run.slug}/verdicts/"
    assert "4 updates" in client.get(path).content.decode()
    page = client.post(
        path, {"author": author, "first": "two", "updates": "7:", "reason": "<b>noise"}
    )
    html = page.content.decode()
    assert page.status_code == 422
    assert "be a whole number, not" in html
    assert 'value="&lt;b&gt;noise"' in html
    assert "Say from which update on" in client.post(path, {"author": author}).content.decode()
    assert not VerdictRecord.objects.exists()
    form = {"author": author, "first": "2", "updates": "1:1000", "reason": "<b>noise"}
    assert client.post(path, form).status_code == 302
    assert VerdictRecord.objects.get().message.after == {author: 1}
    assert VerdictRecord.objects.get().by == run.owner
    assert "&lt;b&gt;noise" in client.get(path).content.decode()
    Run.objects.filter(pk=run.pk).update(status="cancelled")
    assert "is cancelled" in client.post(path, {"author": author, "first": "1"}).content.decode()


def test_staff_revoke_a_machine_and_retract_its_updates(verdict_run, client, person):
    run, _, bob = verdict_run
    client.force_login(person("root@example.org", is_staff=True, is_superuser=True))
    path = f"/admin/accounts/machine/{bob.machine.pk}/revoke/"
    member = run.memberships.get(machine=bob.machine)
    assert "Dusk: 4 updates" in client.get(path).content.decode()
    form = {
        "_form_submitted": "1",
        "reason": "it sends noise",
        "membership": member.pk,
        "first": "99999999999999999",
    }
    assert client.post(path, form).status_code == 200 and not VerdictRecord.objects.exists()
    assert client.post(path, form | {"first": "3"}).status_code == 302
    bob.machine.refresh_from_db()
    assert bob.machine.revoked
    assert VerdictRecord.objects.get().message.after == {f"{bob.identity.key}.{LIFE}": 2}
    actions = AuditEntry.objects.order_by("id").values_list("action", flat=True)
    assert list(actions)[-2:] == ["machine.revoke", "run.verdict"]
    assert client.post(path, form | {"first": ""}).status_code == 302, (
        "a revoked machine's other updates cannot be retracted"
    )
    assert VerdictRecord.objects.first().message.after == {f"{bob.identity.key}.{LIFE}": 0}


def test_staff_retract_single_updates_in_the_admin(verdict_run, client, person):
    run, _, bob = verdict_run
    client.force_login(person("root@example.org", is_staff=True, is_superuser=True))
    path = f"/admin/fleet/membership/{run.memberships.get(machine=bob.machine).pk}/remove_updates/"
    for form in ({"first": "", "updates": "x"}, {"first": ""}, {"first": "0"}):
        assert (
            client.post(path, {"_form_submitted": "1", "reason": "noise", **form}).status_code
            == 200
        )
    assert not VerdictRecord.objects.exists()
    form = {"_form_submitted": "1", "reason": "noise", "updates": "2:1000,4"}
    assert client.post(path, form).status_code == 302
    assert VerdictRecord.objects.get().message.updates == {
        f"{bob.identity.key}.{LIFE}": {2: 1000, 4: 0}
    }
    assert (
        client.get(
            f"/admin/fleet/verdictrecord/{VerdictRecord.objects.get().pk}/change/"
        ).status_code
        == 200
    )


# ---- exclusion


def exclude(run, person, **fields) -> VerdictRecord:
    """Exclude a person from a run, as its owner does."""
    return VerdictRecord.issue(
        run, [], "noise", exclude=[ExclusionRequest(person, **fields)], actor=run.owner
    )


def test_excluded_volunteer_gets_no_ticket_with_any_machine(verdict_run, volunteer):
    run, ada, bob = verdict_run
    record = exclude(run, bob.machine.owner)
    pseudonym = volunteer_pseudonym(bob.machine.owner_id)
    rules = UpdateRules.from_spec(run.spec, str(run.pk), frozenset(run.spec.roots))
    verified = verify_proof(record.signed_verdict, rules)
    assert verified.excludes(bob.identity.key, "0" * 64)
    assert verified.excludes("f" * 64, pseudonym)
    another = volunteer(bob.machine.owner, 3)  # a key that he enrols afterwards
    for machine in (bob, another):
        answer = machine.request_join(run)
        assert answer.status_code == 403
        assert "has excluded you from it: noise" in answer.json()["error"]
    answer = bob.send_request("GET", f"/runs/{run.slug}/directive")
    assert answer.status_code == 403, "neither a ticket is renewed nor a directive signed"
    assert ada.send_request("GET", f"/runs/{run.slug}/directive").status_code == 200
    assert AuditEntry.objects.get(action="run.exclude").actor == run.owner


def test_exclusion_removes_updates_or_keeps_them(verdict_run):
    run, _, bob = verdict_run
    author = f"{bob.identity.key}.{LIFE}"
    removing = exclude(run, bob.machine.owner).message
    assert removing.keys == {bob.identity.key: {}}, "four updates are within the horizon"
    keeping = exclude(run, bob.machine.owner, remove_updates=False).message
    assert keeping.keys == {bob.identity.key: {author: 4}}
    assert list(keeping.volunteers.values()) == [{author: 4}]


@pytest.fixture
def vouched_run(verdict_run, strangers):
    """Return the run with a third volunteer, Carl, and forty witnessed updates of Ada and Bob."""
    run, ada, bob = verdict_run
    (carl,) = strangers(run, 3)
    run.record_ledger_tokens(80_000)
    for author, witnesses in ((ada, (bob, carl)), (bob, (ada, carl))):
        for witness in witnesses:
            attest(witness, author, run, 40)
    return run, ada, bob


def test_exclusion_keeps_updates_that_are_too_old_to_come_out(vouched_run):
    run, _, bob = vouched_run
    removing = exclude(run, bob.machine.owner).message
    kept = {f"{bob.identity.key}.{LIFE}": 19}  # of 40: verdicts reach back 20 rounds
    assert removing.keys == {bob.identity.key: kept}
    assert list(removing.volunteers.values()) == [kept]


def test_excluded_silent_author_keeps_no_number_beyond_its_last_update(vouched_run):
    """Let the run go on for a thousand rounds in which Bob publishes nothing."""
    run, _, bob = vouched_run
    run.record_ledger_tokens(80_000 + 1000 * 2_000)
    removing = exclude(run, bob.machine.owner).message
    assert removing.keys == {bob.identity.key: {f"{bob.identity.key}.{LIFE}": 40}}, (
        "updates 41 to 1019 do not exist, and would count once Bob signs them"
    )


def test_excluded_volunteer_cannot_reserve_updates_by_reporting_a_million(
    vouched_run, numbered_report
):
    run, _, bob = vouched_run
    bob.report(run, numbered_report(5, updates_sent=10**6))
    bob.store_reports(run, numbered_report(6, incarnation=EARLIER, updates_sent=2 * 10**6))
    keeping = exclude(run, bob.machine.owner, remove_updates=False).message
    assert keeping.keys == {bob.identity.key: {f"{bob.identity.key}.{LIFE}": 40}}


def test_excluded_volunteer_cannot_hide_updates_of_another_incarnation(vouched_run):
    """Let Bob report nothing of an incarnation whose payloads machines have pruned."""
    run, _, bob = vouched_run
    run.memberships.filter(machine=bob.machine).update(updates_by_incarnation={})
    run.record_ledger_tokens(80_000 + 1000 * 2_000)
    removing = exclude(run, bob.machine.owner).message
    assert removing.keys == {bob.identity.key: {f"{bob.identity.key}.{LIFE}": 40}}


def test_verdict_that_no_reply_can_contain_is_refused_when_it_is_issued(verdict_run):
    run, ada, bob = verdict_run
    single = dict.fromkeys(range(10**9, 10**9 + 200), 1000)
    requests = [
        RetractionRequest(f"{bob.identity.key}.{number:016x}", None, single) for number in range(40)
    ]
    problems = collect_problems(run, *requests)
    assert "limit of 50,000 bytes" in problems["author"]
    assert ada.send_request("GET", f"/runs/{run.slug}/directive").status_code == 200


def test_owner_excludes_a_machine_that_is_not_there_in_a_sentence(verdict_run):
    run, _, _ = verdict_run
    _, text = Token.create(run.owner, "t", ["runs:write"], 1)
    answer = Client().post(
        f"/api/v1/runs/{run.slug}/verdicts",
        {"exclude": f"{'f' * 64}.{LIFE}"},
        content_type="application/json",
        headers={"Authorization": f"Bearer {text}"},
    )
    assert answer.status_code == 422 and "no machine of this run" in answer.content.decode()


def test_owner_is_not_excluded_from_their_own_run(verdict_run):
    run, _, _ = verdict_run
    with pytest.raises(SpecError, match="cannot be excluded"):
        exclude(run, run.owner)


def test_unproven_exclusion_by_another_mirror_refuses_nobody(verdict_run):
    run, _, bob = verdict_run
    spec = json.loads(run.spec_text) | {"threshold": 2, "roots": [*run.spec.roots, ROGUE.key]}
    Run.objects.filter(pk=run.pk).update(spec_text=json.dumps(spec))
    record = exclude(run, bob.machine.owner)
    text = record.message.model_copy(update={"reason": "forged"})
    signed = ROGUE.sign("verdict", text)
    VerdictRecord.objects.filter(pk=record.pk).update(
        body=signed.body, signatures={ROGUE.key: signed.signature}
    )
    record = VerdictRecord.objects.get(pk=record.pk)
    record.update_force()
    assert record.missing_signatures == 1 and not record.proven
    assert not exclusion_problem(run, bob.identity.key, bob.machine.owner_id)
    assert record.countersign(actor=run.owner) and record.proven
    assert exclusion_problem(run, bob.identity.key, bob.machine.owner_id)
    assert not record.countersign(actor=run.owner), "it has signed already"


def test_expelled_mirrors_verdict_loses_its_force_at_the_site(verdict_run, numbered_report):
    run, ada, bob = verdict_run
    own = site_identity.identity()
    spec = json.loads(run.spec_text) | {"roots": [own.key, ROGUE.key]}
    Run.objects.filter(pk=run.pk).update(spec_text=json.dumps(spec))
    record = VerdictRecord.issue(run, [build_retraction(bob)])
    signed = ROGUE.sign("verdict", record.message)
    VerdictRecord.objects.filter(pk=record.pk).update(signatures={ROGUE.key: signed.signature})
    entries = [list_entry(own, "https://a.example.org"), list_entry(ROGUE, "https://b.example.org")]
    first = signed_list(1, *entries)
    mirror_list.ingest_lists([first], first.digest)
    assert VerdictRecord.objects.get(pk=record.pk).proven, "half of two mirrors signed it"
    expelled = entries[1].model_copy(update={"expelled": Expulsion(at=1.0, since=2)})
    mirror_list.ingest_lists([signed_list(2, entries[0], expelled)])
    assert not VerdictRecord.objects.get(pk=record.pk).proven
    assert send_report(ada, run, numbered_report(5)).verdicts == []


def test_owner_begins_again_from_the_weights_before_an_excluded_volunteer(verdict_run, client):
    run, ada, bob = verdict_run
    joined = Membership.objects.get(run=run, machine=bob.machine).joined
    for tokens, hours, holder in ((10, -2, ada), (20, -1, ada), (25, -1, bob), (30, 1, ada)):
        checkpoint = Checkpoint.objects.create(
            run=run,
            tokens=tokens,
            vector=f"{tokens:064x}",
            digest=f"{tokens:064x}",
            checksum="0" * 16,
            size=8,
            announced=joined + timedelta(hours=hours),
        )
        CheckpointHolder.objects.create(checkpoint=checkpoint, machine=holder.machine)
    client.force_login(run.owner)
    form = {"person": bob.machine.owner_id, "updates": "remove", "afterwards": "begin-again"}
    answer = client.post(f"/runs/{run.slug}/exclude/", form, follow=True)
    page = answer.content.decode()
    assert "with the weights at 20 tokens" in page and "Launch it to begin again" in page
    copy = Run.objects.get(parent=run)
    assert (copy.spec.start.run, copy.spec.start.digest) == (str(run.pk), f"{20:064x}")
    run.refresh_from_db()
    assert run.state == "paused" and run.verdicts.count() == 1


def test_run_whose_excluded_volunteer_was_there_first_begins_as_it_did(verdict_run, client):
    run, _, bob = verdict_run
    client.force_login(run.owner)
    form = {"person": bob.machine.owner_id, "updates": "keep", "afterwards": "begin-again"}
    page = client.post(f"/runs/{run.slug}/exclude/", form, follow=True).content.decode()
    assert "it has no checkpoint from before they joined" in page
    assert Run.objects.get(parent=run).spec.start == run.spec.start


def test_owner_excludes_a_volunteer_on_the_page(verdict_run, client):
    run, _, bob = verdict_run
    client.force_login(run.owner)
    path = f"/runs/{run.slug}/exclude/"
    assert "Exclude a volunteer" in client.get(f"/runs/{run.slug}/").content.decode()
    page = client.get(path).content.decode()
    assert "Bob" in page and "data-confirm" in page
    assert "Begin again from the weights before them" in page
    assert client.post(path, {"updates": "remove"}).status_code == 422
    form = {"person": bob.machine.owner_id, "updates": "remove", "reason": "noise"}
    answer = client.post(path, form, follow=True)
    mark = bob.machine.key[:16]
    assert f"Bob ({mark})" in page
    assert f"Bob ({mark}) is excluded" in answer.content.decode()
    assert "Excluded: 1 volunteer with 1 machine" in answer.content.decode()
    client.force_login(bob.machine.owner)
    assert client.post(path, form).status_code == 403
