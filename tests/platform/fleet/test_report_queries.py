"""The two statements behind a report, against the models they stand for."""

from datetime import timedelta

import pytest
from django.utils import timezone

from coordinator.accounts.models import Machine
from coordinator.fleet.machine_state import MachinePause
from coordinator.fleet.models import Membership
from coordinator.fleet.report_queries import machine_for_key, membership_for_run
from coordinator.fleet.verdicts import VerdictRecord
from coordinator.runs.models import Run

pytestmark = pytest.mark.django_db


def same(found, model) -> None:
    """Every column that was read says what the model says, and each other one is read when it is looked at."""
    told = model.objects.get(pk=found.pk)
    for field in model._meta.concrete_fields:
        assert getattr(found, field.attname) == getattr(told, field.attname), field.attname


@pytest.fixture
def members(volunteer, person, launched_run):
    """Two of one owner in one run, and one of them in another."""
    owner = person()
    (run, _), (other, _) = launched_run(owner, seed=3), launched_run(owner, seed=4)
    ada, bob = volunteer(owner, 1), volunteer(owner, 2)
    for who, where in ((ada, run), (bob, run), (ada, other)):
        who.join(where)
    Membership.objects.filter(machine=ada.machine, run=run).update(
        mark=7,
        addresses=["192.0.2.1:41000", "[2001:db8::1]:9"],
        ticket_expires=timezone.now() + timedelta(hours=3),
    )
    Run.objects.filter(pk=run.pk).update(ledger_tokens=12345, extra_tokens=99)
    return run, other, ada.machine, bob.machine


def test_who_signs_is_read_with_its_owner_and_its_rest_at_once(members, django_assert_num_queries):
    *_, ada, bob = members
    MachinePause.start(bob)
    with django_assert_num_queries(1):
        found = machine_for_key(bob.key)
        assert found.owner.is_active and found.owner.shown_name and found.pause.since
        assert found.owner_id == found.owner.pk and found.revoked is None
    same(found, Machine)
    with django_assert_num_queries(1):
        assert getattr(machine_for_key(ada.key), "pause", None) is None
    assert (
        machine_for_key("0" * 64) is None
        and machine_for_key("'; DROP TABLE fleet_machinepause; --") is None
    )


def test_a_part_is_read_with_its_run_by_id_and_by_slug(members, django_assert_num_queries):
    run, other, ada, bob = members
    for name in (str(run.pk), run.slug):
        with django_assert_num_queries(1):
            found = membership_for_run(ada, name)
            assert found.machine is ada and found.run.pk == run.pk and found.has_verdicts is False
            assert (found.mark, found.addresses) == (7, ["192.0.2.1:41000", "[2001:db8::1]:9"])
            assert (
                found.run.max_plausible_tokens == 2 * found.run.token_budget
                and found.run.state.value == found.run.status
            )
        same(found, Membership)
        same(found.run, Run)
    assert membership_for_run(ada, other.slug).run.pk == other.pk
    assert (
        membership_for_run(bob, other.slug) is None
        and membership_for_run(bob, "no-such-run") is None
        and membership_for_run(bob, "a b'; --") is None
    )


def test_what_another_mirror_tells_of_a_machine_is_not_its_part_here(members):
    _, other, _, bob = members
    Membership.everywhere.create(run=other, machine=bob, mirror="f" * 64)
    assert membership_for_run(bob, other.slug) is None


def test_verdicts_are_told_of_with_the_run_they_are_on(members):
    run, other, ada, _ = members
    VerdictRecord.objects.create(run=run, body="{}", digest="1" * 64, signatures={}, proven=True)
    VerdictRecord.objects.create(run=other, body="{}", digest="2" * 64, signatures={}, proven=False)
    assert (
        membership_for_run(ada, run.slug).has_verdicts is True
        and membership_for_run(ada, other.slug).has_verdicts is False
    )
