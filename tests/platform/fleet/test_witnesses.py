"""Test what machines witness: the last heads of other people's updates, in any order of arrival."""

from datetime import timedelta

import pytest
from django.utils import timezone
from helpers.updates.attestations import LIFE, sign_header, witness_of

from barnraise.protocol import messages
from barnraise.protocol.signing import digest
from coordinator.fleet import witnesses
from coordinator.fleet.models import UpdateWitness, VouchedAuthor
from coordinator.fleet.token_limits import volunteer_rate
from coordinator.fleet.witnesses import is_plausible, record_witnesses, vouched_people
from coordinator.runs.models import Run

pytestmark = pytest.mark.django_db


@pytest.fixture
def witnessed(person, launched_run, strangers):
    """Return (a run of two days, its owner's machine, machines of four other people in it)."""
    run, owner = launched_run(person("owner@example.org"), seed=9)
    others = strangers(run, 1, 2, 3, 4)
    Run.objects.update(created=timezone.now() - timedelta(days=2))
    run.refresh_from_db()
    for author in (owner, *others):
        for seq in range(1, 6):  # in order, so that each header names the one before
            sign_header(run, author, seq, 100 * seq, LIFE)
    return run, owner, others


def record(run, *seen, changed: int | None = 7) -> list[witnesses.Vouched]:
    """Record that machines have seen updates; each is (witness, author, number, total)."""
    return record_witnesses(
        [
            (run.memberships.get(machine=by.machine), [witness_of(by, run, author, seq, total)])
            for by, author, seq, total in seen
        ],
        changed,
    )


def stored_rows() -> set[tuple]:
    """Return the last head of each author and person."""
    return set(UpdateWitness.objects.values_list("machine", "person", "seq", "total"))


def test_last_head_of_each_person_stays_whatever_comes_first(witnessed):
    run, owner, (ada, bob, *_) = witnessed
    later, earlier = (bob, ada, 3, 300), (bob, ada, 2, 200)
    for batches in ([[later], [earlier]], [[earlier], [later]], [[later, earlier]]):
        UpdateWitness.objects.all().delete()
        for batch in batches:
            record(run, *batch)
        assert stored_rows() == {(ada.machine.pk, bob.machine.owner_id, 3, 300)}
        assert not VouchedAuthor.objects.exists(), "one other person vouches for nothing"
    (vouched,) = record(run, (owner, ada, 2, 200))
    assert (vouched.row.seq, vouched.machine.owner) == (2, ada.machine.owner_id)
    figures = vouched_people(run)
    assert list(figures) == [ada.machine.owner_id]
    assert (figures[ada.machine.owner_id].tokens, figures[ada.machine.owner_id].updates) == (200, 2)


def test_stranger_states_no_more_than_one_volunteer_trains(witnessed):
    run, owner, (ada, bob, *_) = witnessed
    most = volunteer_rate(run) * 2 * 86_400 + run.spec.max_tokens_per_update
    for total, is_stored in ((most + 60 * volunteer_rate(run), False), (most, True)):
        record(run, (owner, ada, 10**9, total))
        assert UpdateWitness.objects.exists() == is_stored
    record(run, (bob, owner, 10**9, 10**14))
    assert UpdateWitness.objects.filter(total=10**14).exists(), "the owner has no such limit"


@pytest.mark.parametrize(
    ("changed", "is_accepted"),
    [
        ({}, True),
        ({"tokens": 101}, False),  # more than an update may state
        ({"total": 301}, False),  # more than three updates may
        ({"total": 40}, False),  # less than this one
        ({"seq": 1, "previous": digest(""), "total": 50}, True),
        ({"seq": 1, "previous": digest(""), "total": 51}, False),
        ({"seq": 1, "total": 50}, False),  # the first names one before
    ],
)
def test_figures_of_a_header_must_agree_with_each_other(changed, is_accepted):
    fields = {"seq": 3, "tokens": 50, "total": 150, "previous": "0" * 64}
    header = messages.Update.model_construct(**{**fields, **changed})
    assert is_plausible(header, max_tokens=100) == is_accepted


def test_speed_is_measured_between_the_last_two_vouched_heads(witnessed):
    run, owner, (ada, *_) = witnessed
    run.memberships.update(joined=timezone.now() - timedelta(seconds=100))
    record(run, (owner, ada, 1, 1000))
    assert VouchedAuthor.objects.get().speed == pytest.approx(10, rel=0.2)
    VouchedAuthor.objects.update(since=timezone.now() - timedelta(seconds=100))
    record(run, (owner, ada, 2, 6000))
    assert VouchedAuthor.objects.get().speed == pytest.approx(50, rel=0.2)
    record(run, (owner, ada, 3, 7000))
    speed = VouchedAuthor.objects.get().speed
    assert speed <= 1000 / witnesses.MIN_SPEED_SECONDS, "two heads at one moment are no speed"


def test_owner_and_the_furthest_witnesses_of_an_author_stay(witnessed, monkeypatch):
    monkeypatch.setattr(witnesses, "MAX_WITNESSES", 3)
    run, owner, (ada, *others) = witnessed
    seen = [(machine, ada, seq, 100 * seq) for seq, machine in enumerate([owner, *others], 1)]
    record(run, *reversed(seen))
    assert sorted(UpdateWitness.objects.values_list("seq", flat=True)) == [1, 3, 4]
