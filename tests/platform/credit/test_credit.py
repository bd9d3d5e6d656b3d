"""Test credit: updates that another person's machine attests count once, up to a bound."""

import re
from datetime import timedelta

import hypothesis.strategies as st
import pytest
from django.test import Client
from django.utils import timezone
from helpers.effort import examples
from helpers.mirrors.mirror_lists import list_entry, signed_list
from helpers.site.pages import open_client
from helpers.updates.attestations import LIFE, NEXT, altered_witness_of, witness_of
from hypothesis import HealthCheck, given, settings

from barnraise.protocol import coordinator_messages, verdicts
from barnraise.protocol.signing import check_attestation
from coordinator.accounts.deletion import delete_account
from coordinator.accounts.models import Team
from coordinator.credit import attestations
from coordinator.credit.leaderboard import (
    BADGES,
    MAX_ROWS,
    earned_badges,
    leaderboard,
    volunteer_record,
)
from coordinator.credit.models import Credit
from coordinator.fleet.models import UpdateWitness, VerdictRecord, VouchedAuthor
from coordinator.lib import site_identity
from coordinator.replication import mirror_list
from coordinator.replication.volunteer_salt import volunteer_pseudonym
from coordinator.runs.models import Run
from coordinator.telemetry.rollup import drain_queue
from coordinator.tokens.models import Token

pytestmark = pytest.mark.django_db


@pytest.fixture
def credit_run(person, launched_run, volunteer):
    """Return Bob's run and three machines in it: two of Ada's and one of Bob's."""
    run, bob = launched_run(person("bob@example.org", name="Bob"), seed=3)
    owner = person(name="Ada")
    ada, other = volunteer(owner, 1), volunteer(owner, 2)
    for machine in (ada, other):
        machine.join(run)
    Run.objects.filter(pk=run.pk).update(created=timezone.now() - timedelta(days=30))
    run.record_ledger_tokens(10**9)
    return run, ada, other, bob


def post_report(machine, run, report, seen):
    """Post a report with the attestations `seen`; return the response."""
    return machine.send_request(
        "POST",
        f"/runs/{run.slug}/reports",
        coordinator_messages.Reports(reports=[report], attestations=seen),
    )


@pytest.fixture
def report_attestations(numbered_report):
    """Return a function that reports a machine's own tokens and its attestations.

    Each attestation is (author, seq, total) or (author, seq, total, incarnation); a report
    carries at most two of them.
    """
    sequence_numbers = {}

    def send_reports(run, machine, tokens: int = 0, *attested) -> None:
        batches = [attested[n : n + 2] for n in range(0, len(attested), 2)]
        for batch in batches or [()]:
            sequence_numbers[machine] = sequence_numbers.get(machine, 0) + 1
            report = numbered_report(sequence_numbers[machine], tokens=tokens)
            seen = [witness_of(machine, run, *attestation) for attestation in batch]
            answer = post_report(machine, run, report, seen)
            assert answer.status_code == 200, answer.content
        drain_queue()

    return send_reports


def count_credited_tokens(machine) -> int:
    """Return the tokens credited to a machine."""
    return sum(row.tokens for row in Credit.objects.filter(machine=machine.machine))


def test_attested_updates_count_once_however_often_attested(
    credit_run, report_attestations, strangers
):
    run, ada, _, bob = credit_run
    report_attestations(run, ada, 3000)
    report_attestations(run, bob, 0, (ada, 2, 2000))
    report_attestations(run, bob, 0, (ada, 2, 2000))
    assert count_credited_tokens(ada) == 2000
    (carl,) = strangers(run, 4)
    report_attestations(run, carl, 0, (ada, 2, 2000))
    report_attestations(run, carl, 0, (ada, 1, 1000))
    assert count_credited_tokens(ada) == 2000
    report_attestations(run, carl, 0, (ada, 3, 3000))
    assert count_credited_tokens(ada) == 2000, "one person who is not the owner earned her credit"
    (dora,) = strangers(run, 5)
    report_attestations(run, dora, 0, (ada, 3, 3000))
    row = Credit.objects.get()
    assert (row.first, row.last, row.tokens) == (1, 3, 3000)
    witness = next(machine for machine in (carl, dora) if machine.machine == row.witness)
    attestation = coordinator_messages.Attestation(
        head=row.author_header, statement=row.witness_signature
    )
    update = check_attestation(attestation, str(run.pk), witness.identity.key)
    assert (update.peer, update.seq, update.total) == (ada.identity.key, 3, 3000), (
        "the stored signatures do not prove the range"
    )


def test_attestation_by_an_own_machine_earns_no_credit(credit_run, report_attestations):
    run, ada, other, _ = credit_run
    report_attestations(run, ada, 3000, (ada, 3, 3000))
    report_attestations(run, other, 0, (ada, 3, 3000))
    assert not Credit.objects.exists()


def test_credit_is_capped_by_the_authors_own_reports(credit_run, report_attestations):
    run, ada, _, bob = credit_run
    report_attestations(run, bob, 0, (ada, 2, 2000))
    assert count_credited_tokens(ada) == 0, "credit exceeds the author's own reports"
    report_attestations(run, ada, 1500)
    report_attestations(run, bob, 0, (ada, 2, 2000))
    assert count_credited_tokens(ada) == 1500
    report_attestations(run, ada, 9000)
    report_attestations(run, bob, 0, (ada, 9, 9000))
    assert count_credited_tokens(ada) == 9000


def test_machine_reporting_to_another_mirror_gets_its_credit_here(credit_run, report_attestations):
    run, ada, _, bob = credit_run
    own_entry = list_entry(site_identity.identity(), "https://here.example.org")
    first = signed_list(1, own_entry)
    mirror_list.ingest_lists([first], vouched=first.digest)
    report_attestations(run, bob, 0, (ada, 2, 2000))
    assert count_credited_tokens(ada) == 2000, "the author's signed header does not count"


def test_credit_of_updates_larger_than_the_spec_allows_counts_nothing(
    credit_run, report_attestations
):
    run, ada, _, bob = credit_run
    report_attestations(run, ada, 2**60)
    report_attestations(run, bob, 0, (ada, 2, 2 * run.spec.max_tokens_per_update + 1))
    assert count_credited_tokens(ada) == 0
    report_attestations(run, bob, 0, (ada, 3, 3 * run.spec.max_tokens_per_update))
    assert count_credited_tokens(ada) == 3 * run.spec.max_tokens_per_update


def test_two_accounts_that_witness_each_other_earn_no_credit(
    credit_run, report_attestations, person, volunteer
):
    """Let two strangers sign headers of updates that do not exist, the millionth of each."""
    run, _, _, bob = credit_run
    eve, mallory = volunteer(person("eve@example.org"), 6), volunteer(person("m@example.org"), 7)
    for machine in (eve, mallory):
        machine.join(run)
    for _ in range(2):
        report_attestations(run, eve, 10**14, (mallory, 10**6, 10**9))
        report_attestations(run, mallory, 10**14, (eve, 10**6, 10**9))
    assert not Credit.objects.exists()
    report_attestations(run, bob, 0, (eve, 1, 900))
    assert count_credited_tokens(eve) == 900, "what the owner's machine applied does not count"


def test_colluding_accounts_earn_no_more_than_the_runs_own_count(
    credit_run, report_attestations, strangers
):
    run, ada, _, bob = credit_run
    run.record_ledger_tokens(100_000)
    report_attestations(run, ada, 60_000)
    report_attestations(run, bob, 0, (ada, 9, 60_000))
    liars = strangers(run, 10, 11, 12)
    for author in liars:
        report_attestations(run, author, 10**14)
        for witness in liars:
            if witness is not author:
                report_attestations(run, witness, 10**14, (author, 10**6, 10**9))
    assert sum(Credit.objects.values_list("tokens", flat=True)) == 100_000
    assert count_credited_tokens(ada) == 60_000


def test_three_colluders_who_claim_first_take_what_the_count_leaves_once(
    credit_run, report_attestations, strangers
):
    """Let three accounts claim before the honest do, again and again, while the run goes on."""
    run, ada, _, bob = credit_run
    run.record_ledger_tokens(100_000)
    liars = strangers(run, 10, 11, 12)
    for count, seq in ((100_000, 10**6), (150_000, 2 * 10**6)):
        run.record_ledger_tokens(count)
        for author in liars:
            report_attestations(run, author, 10**14)
            for witness in liars:
                if witness is not author:
                    report_attestations(run, witness, 10**14, (author, seq, 1000 * seq))
        report_attestations(run, ada, 60_000)
        report_attestations(run, bob, 0, (ada, 9, 60_000))
        run.refresh_from_db()
        credited = sum(Credit.objects.values_list("tokens", flat=True))
        assert credited <= run.ledger_tokens


def test_author_who_signs_two_histories_earns_nothing_more(
    credit_run, report_attestations, strangers
):
    run, ada, _, bob = credit_run
    (carl,) = strangers(run, 4)
    report_attestations(run, ada, 9000)
    report_attestations(run, bob, 0, (ada, 2, 2000))
    report_attestations(run, carl, 0, (ada, 5, 5000))
    report_attestations(run, bob, 0, (ada, 5, 4000))
    assert count_credited_tokens(ada) == 2000


def test_new_incarnation_of_a_machine_starts_a_new_credit_range(credit_run, report_attestations):
    run, ada, _, bob = credit_run
    report_attestations(run, ada, 5000)
    report_attestations(run, bob, 0, (ada, 3, 3000), (ada, 2, 2000, NEXT))
    assert count_credited_tokens(ada) == 5000 and Credit.objects.count() == 2
    report_attestations(run, bob, 0, (ada, 4, 99_000, NEXT))
    assert count_credited_tokens(ada) == 5000


def test_credit_on_another_day_starts_a_new_range(credit_run, report_attestations):
    run, ada, _, bob = credit_run
    report_attestations(run, ada, 5000)
    report_attestations(run, bob, 0, (ada, 2, 2000))
    Credit.objects.update(day=timezone.now().date() - timedelta(days=10))
    report_attestations(run, bob, 0, (ada, 5, 5000))
    assert list(Credit.objects.order_by("day").values_list("first", "last", "tokens")) == [
        (1, 2, 2000),
        (3, 5, 3000),
    ]
    assert leaderboard("people", "week")[0].tokens == 3000
    assert leaderboard("people", "month")[0].tokens == 5000


def test_machine_outside_the_run_earns_no_credit(
    credit_run, report_attestations, volunteer, person
):
    run, _, _, bob = credit_run
    stranger = volunteer(person("eve@example.org"), 5)
    report_attestations(run, bob, 0, (stranger, 2, 2000))
    assert not Credit.objects.exists()


@pytest.mark.parametrize("kind", ["word", "head", "run", "author", "another's"])
def test_attestation_with_a_bad_signature_is_refused_with_its_report(
    credit_run, numbered_report, kind
):
    run, ada, _, bob = credit_run
    valid = witness_of(bob, run, ada, 2, 2000)
    invalid = {
        "word": lambda: valid.model_copy(
            update={"statement": valid.statement.model_copy(update={"signature": "0" * 128})}
        ),
        "head": lambda: valid.model_copy(
            update={"head": valid.head.model_copy(update={"body": valid.head.body + " "})}
        ),
        "run": lambda: altered_witness_of(
            bob, run, ada, {"run": "01890000-0000-7000-8000-0000000000aa"}
        ),
        "author": lambda: altered_witness_of(
            bob, run, ada, {"author": f"{bob.identity.key}.{LIFE}"}
        ),
        "another's": lambda: witness_of(ada, run, ada, 2, 2000),
    }[kind]()
    answer = post_report(bob, run, numbered_report(1), [invalid])
    assert answer.status_code == 422
    assert "attestations" in coordinator_messages.Problem.model_validate_json(answer.content).fields
    drain_queue()
    assert not Credit.objects.exists()
    assert run.memberships.get(machine=bob.machine).high_water_mark == 0


@settings(
    max_examples=examples(8, 20),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.integers(0, 2), st.integers(1, 9), st.sampled_from([LIFE, NEXT])
        ),
        max_size=12,
    )
)
def test_any_order_of_attestations_counts_every_range_once(credit_run, statements):
    """Let three machines of two people attest updates of all, repeatedly and out of order."""
    run, machines = credit_run[0], credit_run[1:]
    Credit.objects.all().delete()
    UpdateWitness.objects.all().delete()
    VouchedAuthor.objects.all().delete()
    run.memberships.update(tokens=1 << 40)
    for witness, author, seq, life in statements:
        member = run.memberships.get(machine=machines[witness].machine)
        attestations.record_attestations(
            [(member, [witness_of(machines[witness], run, machines[author], seq, 100 * seq, life)])]
        )
    highest_seqs: dict[tuple, int] = {}
    for witness, author, seq, life in statements:
        if witness == 2 and author != 2:  # Bob owns the run; Ada alone does not vouch for him
            author_key = (machines[author].machine.pk, life)
            highest_seqs[author_key] = max(seq, highest_seqs.get(author_key, 0))
    rows = list(Credit.objects.select_related("machine", "witness"))
    assert {
        (row.machine_id, row.incarnation): (row.first, row.last, row.tokens) for row in rows
    } == {author_key: (1, seq, 100 * seq) for author_key, seq in highest_seqs.items()}
    for row in rows:
        update = check_attestation(
            coordinator_messages.Attestation(
                head=row.author_header, statement=row.witness_signature
            ),
            str(run.pk),
            row.witness.key,
        )
        assert (update.author, update.seq) == (f"{row.machine.key}.{row.incarnation}", row.last)
        assert row.witness.owner_id != row.machine.owner_id


def test_credit_api_lists_ranges_with_both_signatures(credit_run, report_attestations, person):
    run, ada, other, bob = credit_run
    report_attestations(run, ada, 3000)
    report_attestations(run, bob, 0, (ada, 3, 3000))
    report_attestations(run, other, 1000)
    report_attestations(run, bob, 0, (other, 1, 1000))
    _, token = Token.create(person("eve@example.org"), "script", ["runs:read"], 1)
    page = (
        Client()
        .get(f"/api/v1/runs/{run.slug}/credit", headers={"Authorization": f"Bearer {token}"})
        .json()
    )
    assert [(row["peer"], row["first"], row["last"], row["tokens"]) for row in page["items"]] == [
        (other.identity.key, 1, 1, 1000),
        (ada.identity.key, 1, 3, 3000),
    ]
    for row in page["items"]:
        attestation = coordinator_messages.Attestation(head=row["head"], statement=row["witness"])
        assert check_attestation(attestation, row["run"], bob.identity.key).seq == row["last"]


def test_leaderboards_rank_people_teams_machines_and_runs(
    credit_run, report_attestations, django_assert_max_num_queries, strangers
):
    run, ada, other, bob = credit_run
    team = Team.create("Weavers", ada.machine.owner)
    (carl,) = strangers(run, 4)
    for machine, done in ((ada, 3000), (other, 1000), (bob, 2000)):
        report_attestations(run, machine, done)
    report_attestations(run, bob, 2000, (ada, 3, 3000), (other, 1, 1000))
    report_attestations(run, ada, 3000, (bob, 2, 2000))
    report_attestations(run, carl, 0, (bob, 2, 2000))
    assert [(p.rank, p.name, p.tokens) for p in leaderboard("people")] == [
        (1, "Ada", 4000),
        (2, "Bob", 2000),
    ]
    assert [(p.name, p.tokens, p.owner_name) for p in leaderboard("machines")] == [
        ("pc-1", 3000, "Ada"),
        ("pc-3", 2000, "Bob"),
        ("pc-2", 1000, "Ada"),
    ]
    assert [(p.name, p.tokens, p.url) for p in leaderboard("teams")] == [
        ("Weavers", 4000, team.get_absolute_url())
    ]
    assert [(p.name, p.tokens) for p in leaderboard("runs")] == [(run.name, 6000)]
    for by in ("people", "teams", "machines", "runs"):
        for period in ("week", "all"):
            with django_assert_max_num_queries(3):
                assert leaderboard(by, period)
            assert Client().get(f"/credit/?by={by}&period={period}").status_code == 200
    assert Client().get("/credit/?by=nonsense&period=%00").status_code == 200
    assert MAX_ROWS == 100


def test_volunteer_page_is_public_once_there_is_credit(credit_run, report_attestations):
    run, ada, _, bob = credit_run
    owner = ada.machine.owner
    volunteer_path = f"/volunteers/{owner.pk}/"
    own_client = open_client(owner)
    assert Client().get(volunteer_path).status_code == 404
    assert b"No credit yet" in own_client.get(volunteer_path).content
    report_attestations(run, ada, 200_000)
    report_attestations(run, bob, 0, (ada, 2, 200_000))
    page = Client().get(volunteer_path).content.decode()
    assert "Ada" in page and "200 K" in page and "First peg" in page and run.name in page
    assert "ada@example.org" not in page
    assert re.search(r"machines, on \d+ \w+ \d{4}\.", page) and "between" not in page
    from_machine = Client().get(f"/machines/{ada.machine.pk}/certificate/")
    assert (from_machine.status_code, from_machine["Location"]) == (302, volunteer_path)
    delete_account(owner, owner)
    assert Client().get(volunteer_path).status_code == 404
    assert "Ada" not in Client().get("/credit/").content.decode()
    assert count_credited_tokens(ada) == 200_000


def test_badges_are_earned_in_order_of_tokens():
    assert earned_badges(0) == [] and earned_badges(1) == ["First peg"]
    assert earned_badges(BADGES[-1][0]) == [name for _, name in BADGES]
    assert [least for least, _ in BADGES] == sorted(least for least, _ in BADGES)


def test_record_of_a_new_volunteer_is_empty(person):
    record = volunteer_record(person())
    assert (record.tokens, record.updates, record.runs, record.badges, record.next_badge) == (
        0,
        0,
        (),
        [],
        (1, "First peg"),
    )


@pytest.mark.parametrize("excluded", ["key", "volunteer", "single"])
def test_credit_removed_by_a_verdict_leaves_room_for_others(
    credit_run, report_attestations, excluded
):
    run, ada, other, bob = credit_run
    run.record_ledger_tokens(3000)
    report_attestations(run, ada, 3000)
    report_attestations(run, bob, 0, (ada, 3, 3000))
    assert count_credited_tokens(ada) == 3000
    author = f"{ada.identity.key}.{LIFE}"
    pseudonym = volunteer_pseudonym(ada.machine.owner_id)
    fields = {
        "key": {"keys": {ada.identity.key: {author: 1}}},
        "volunteer": {"volunteers": {pseudonym: {author: 1}}},
        "single": {"updates": {author: {2: 1000, 3: 1000}}},
    }[excluded]
    verdict = verdicts.Verdict(run=str(run.pk), issued=1.0, **fields)
    VerdictRecord.objects.create(
        run=run, body=verdict.model_dump_json(), digest="0" * 64, signatures={}, proven=True
    )
    report_attestations(run, other, 9000)
    report_attestations(run, bob, 0, (other, 2, 4000))
    assert count_credited_tokens(other) == 2000, "what the verdict removed used up the count"
