"""Credit: what a machine of another person has taken in, once, and never more than its author did."""

from datetime import timedelta

import hypothesis.strategies as st
import pytest
from django.test import Client
from django.utils import timezone
from helpers.attestations import LIFE, NEXT, witness_of
from helpers.mirror_lists import list_entry, signed_list
from hypothesis import HealthCheck, given, settings

from barnraise.protocol import coordinator_messages
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
from coordinator.lib import site_identity
from coordinator.replication import mirror_list
from coordinator.telemetry.rollup import drain_queue
from coordinator.tokens.models import Token

pytestmark = pytest.mark.django_db
WHO = st.integers(0, 2)


@pytest.fixture
def barn(person, launched_run, volunteer):
    """(run, ada's machine, another of hers, bob's), all in one run."""
    run, ada = launched_run(person(name="Ada"))
    other, bob = volunteer(run.owner, 2), volunteer(person("bob@example.org", name="Bob"), 3)
    for each in (other, bob):
        each.join(run)
    return run, ada, other, bob


def posted(machine, run, report, seen):
    return machine.send_request(
        "POST",
        f"/runs/{run.slug}/reports",
        coordinator_messages.Reports(reports=[report], attestations=seen),
    )


@pytest.fixture
def says(numbered_report):
    """A machine reports: its own tokens, and what it holds of others, as (volunteer, seq, total[, life])."""
    told = {}

    def say(run, machine, tokens: int = 0, *held) -> None:
        for some in held[::2] or [None]:
            told[machine] = told.get(machine, 0) + 1
            at = held.index(some) if some else 0
            seen = [witness_of(machine, run, *each) for each in held[at : at + 2]]
            answer = posted(machine, run, numbered_report(told[machine], tokens=tokens), seen)
            assert answer.status_code == 200, answer.content
        drain_queue()

    return say


def tokens(machine) -> int:
    return sum(row.tokens for row in Credit.objects.filter(machine=machine.machine))


def test_attested_updates_count_once_however_often_attested(barn, says, person, volunteer):
    run, ada, _, bob = barn
    says(run, ada, 3000)
    says(run, bob, 0, (ada, 2, 2000))
    says(run, bob, 0, (ada, 2, 2000))
    assert tokens(ada) == 2000
    carl = volunteer(person("carl@example.org"), 4)
    carl.join(run)
    says(run, carl, 0, (ada, 2, 2000))
    says(run, carl, 0, (ada, 1, 1000))
    assert tokens(ada) == 2000
    says(run, carl, 0, (ada, 3, 3000))
    row = Credit.objects.get()
    assert (row.first, row.last, row.tokens, row.witness) == (1, 3, 3000, carl.machine)
    kept = coordinator_messages.Attestation(head=row.author_header, statement=row.witness_signature)
    update = check_attestation(kept, str(run.pk), carl.identity.key)
    assert (update.peer, update.seq, update.total) == (ada.identity.key, 3, 3000), (
        "what anybody can check"
    )


def test_nobody_vouches_for_themselves_or_for_a_machine_of_their_own(barn, says):
    run, ada, other, _ = barn
    says(run, ada, 3000, (ada, 3, 3000))
    says(run, other, 0, (ada, 3, 3000))
    assert not Credit.objects.exists()


def test_credit_is_capped_by_the_authors_own_reports(barn, says):
    run, ada, _, bob = barn
    says(run, bob, 0, (ada, 2, 2000))
    assert tokens(ada) == 0, "it has not said anything yet"
    says(run, ada, 1500)
    says(run, bob, 0, (ada, 2, 2000))
    assert tokens(ada) == 1500
    says(run, ada, 9000)
    says(run, bob, 0, (ada, 9, 9000))
    assert tokens(ada) == 9000


def test_machine_reporting_to_another_mirror_gets_its_credit_here(barn, says):
    run, ada, _, bob = barn
    here = list_entry(site_identity.identity(), "https://here.example.org")
    mirror_list.ingest_lists([first := signed_list(1, here)], vouched=first.digest)
    says(run, bob, 0, (ada, 2, 2000))
    assert tokens(ada) == 2000, "its signed header says so"


def test_colluding_machines_get_no_more_than_an_update_may_claim(barn, says):
    run, ada, _, bob = barn
    says(run, ada, 2**60)
    says(run, bob, 0, (ada, 2, 2**60))
    assert tokens(ada) == 2 * run.spec.max_tokens_per_update


def test_a_new_life_of_a_state_folder_begins_a_new_range(barn, says):
    run, ada, _, bob = barn
    says(run, ada, 5000)
    says(run, bob, 0, (ada, 3, 3000), (ada, 2, 2000, NEXT))
    assert tokens(ada) == 5000 and Credit.objects.count() == 2
    says(run, bob, 0, (ada, 4, 99_000, NEXT))
    assert tokens(ada) == 5000


def test_another_day_begins_another_range(barn, says):
    run, ada, _, bob = barn
    says(run, ada, 5000)
    says(run, bob, 0, (ada, 2, 2000))
    Credit.objects.update(day=timezone.now().date() - timedelta(days=10))
    says(run, bob, 0, (ada, 5, 5000))
    assert list(Credit.objects.order_by("day").values_list("first", "last", "tokens")) == [
        (1, 2, 2000),
        (3, 5, 3000),
    ]
    assert (
        leaderboard("people", "week")[0].tokens == 3000
        and leaderboard("people", "month")[0].tokens == 5000
    )


def test_who_is_not_in_the_run_gets_nothing(barn, says, volunteer, person):
    run, _, _, bob = barn
    stranger = volunteer(person("eve@example.org"), 5)
    says(run, bob, 0, (stranger, 2, 2000))
    assert not Credit.objects.exists()


@pytest.mark.parametrize("kind", ["word", "head", "run", "author", "another's"])
def test_attestation_with_a_bad_signature_is_refused_with_its_report(barn, numbered_report, kind):
    run, ada, _, bob = barn
    good = witness_of(bob, run, ada, 2, 2000)
    spoilt = {
        "word": lambda: good.model_copy(
            update={"statement": good.statement.model_copy(update={"signature": "0" * 128})}
        ),
        "head": lambda: good.model_copy(
            update={"head": good.head.model_copy(update={"body": good.head.body + " "})}
        ),
        "run": lambda: witness_of(
            bob, run, ada, 2, 2000, said={"run": "01890000-0000-7000-8000-0000000000aa"}
        ),
        "author": lambda: witness_of(
            bob, run, ada, 2, 2000, said={"author": f"{bob.identity.key}.{LIFE}"}
        ),
        "another's": lambda: witness_of(ada, run, ada, 2, 2000),
    }[kind]()
    answer = posted(bob, run, numbered_report(1), [spoilt])
    assert (
        answer.status_code == 422
        and "attestations"
        in coordinator_messages.Problem.model_validate_json(answer.content).fields
    )
    drain_queue()
    assert not Credit.objects.exists() and run.memberships.get(machine=bob.machine).mark == 0


@settings(
    max_examples=20,
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
def test_any_order_of_attestations_counts_every_range_once(barn, told):
    """By three machines of two people, of each other, of themselves, again and out of order."""
    run, machines = barn[0], barn[1:]
    Credit.objects.all().delete()
    run.memberships.update(tokens=1 << 40)
    for witness, author, seq, life in told:
        member = run.memberships.get(machine=machines[witness].machine)
        attestations.record_attestations(
            [(member, [witness_of(machines[witness], run, machines[author], seq, 100 * seq, life)])]
        )
    best: dict[tuple, int] = {}
    for witness, author, seq, life in told:
        if machines[witness].machine.owner_id != machines[author].machine.owner_id:
            place = (machines[author].machine.pk, life)
            best[place] = max(seq, best.get(place, 0))
    rows = list(Credit.objects.select_related("machine", "witness"))
    assert {
        (row.machine_id, row.incarnation): (row.first, row.last, row.tokens) for row in rows
    } == {place: (1, seq, 100 * seq) for place, seq in best.items()}
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


def test_ranges_are_shown_with_both_signatures(barn, says, person):
    run, ada, other, bob = barn
    says(run, ada, 3000)
    says(run, bob, 0, (ada, 3, 3000))
    says(run, other, 1000)
    says(run, bob, 0, (other, 1, 1000))
    _, text = Token.create(person("eve@example.org"), "script", ["runs:read"], 1)
    page = (
        Client()
        .get(f"/api/v1/runs/{run.slug}/credit", headers={"Authorization": f"Bearer {text}"})
        .json()
    )
    assert [(row["peer"], row["first"], row["last"], row["tokens"]) for row in page["items"]] == [
        (other.identity.key, 1, 1, 1000), (ada.identity.key, 1, 3, 3000)
    ]  # fmt: skip
    for row in page["items"]:
        told = coordinator_messages.Attestation(head=row["head"], statement=row["witness"])
        assert check_attestation(told, row["run"], bob.identity.key).seq == row["last"]


def test_leaderboards_rank_people_teams_machines_and_runs(
    barn, says, django_assert_max_num_queries
):
    run, ada, other, bob = barn
    team = Team.create("Weavers", run.owner)
    for machine, done in ((ada, 3000), (other, 1000), (bob, 2000)):
        says(run, machine, done)
    says(run, bob, 2000, (ada, 3, 3000), (other, 1, 1000))
    says(run, ada, 3000, (bob, 2, 2000))
    assert [(p.rank, p.name, p.tokens) for p in leaderboard("people")] == [
        (1, "Ada", 4000),
        (2, "Bob", 2000),
    ]
    assert [(p.name, p.tokens, p.owner_name) for p in leaderboard("machines")] == [
        ("pc-1", 3000, "Ada"), ("pc-3", 2000, "Bob"), ("pc-2", 1000, "Ada")
    ]  # fmt: skip
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


def test_a_certificate_is_there_once_there_is_credit_and_not_before(barn, says):
    run, ada, _, bob = barn
    where = f"/volunteers/{run.owner.pk}/"
    mine = Client()
    mine.force_login(run.owner)
    assert Client().get(where).status_code == 404 and b"No credit yet" in mine.get(where).content
    says(run, ada, 200_000)
    says(run, bob, 0, (ada, 2, 200_000))
    page = Client().get(where).content.decode()
    assert "Ada" in page and "200 K" in page and "First peg" in page and run.name in page
    assert "ada@example.org" not in page
    delete_account(run.owner, run.owner)
    assert Client().get(where).status_code == 404
    assert "Ada" not in Client().get("/credit/").content.decode() and tokens(ada) == 200_000


def test_badges_are_reached_one_after_the_other():
    assert earned_badges(0) == [] and earned_badges(1) == ["First peg"]
    assert earned_badges(BADGES[-1][0]) == [name for _, name in BADGES]
    assert [least for least, _ in BADGES] == sorted(least for least, _ in BADGES)


def test_who_did_nothing_has_done_nothing(person):
    record = volunteer_record(person())
    assert (record.tokens, record.updates, record.runs, record.badges, record.next_badge) == (
        0,
        0,
        (),
        [],
        (1, "First peg"),
    )
