"""Test the two SQL statements behind a report against the models they replace."""

from datetime import timedelta

import pytest
from django.utils import timezone

from coordinator.accounts.models import Machine
from coordinator.fleet.machine_state import MachinePause
from coordinator.fleet.models import Membership
from coordinator.fleet.report_queries import machine_for_key, membership_for_run
from coordinator.fleet.verdict_models import VerdictRecord
from coordinator.runs.models import Run

pytestmark = pytest.mark.django_db


def assert_same_columns(read_row, model) -> None:
    """Check that every column, read or deferred, equals the model's."""
    stored_row = model.objects.get(pk=read_row.pk)
    for field in model._meta.concrete_fields:
        assert getattr(read_row, field.attname) == getattr(stored_row, field.attname), field.attname


@pytest.fixture
def members(volunteer, person, launched_run):
    """Return two runs and two machines of one owner: both in the first, one in the second."""
    owner = person()
    (run, _), (other, _) = launched_run(owner, seed=3), launched_run(owner, seed=4)
    ada, bob = volunteer(owner, 1), volunteer(owner, 2)
    for machine, joined_run in ((ada, run), (bob, run), (ada, other)):
        machine.join(joined_run)
    Membership.objects.filter(machine=ada.machine, run=run).update(
        high_water_mark=7,
        addresses=["192.0.2.1:41000", "[2001:db8::1]:9"],
        ticket_expires=timezone.now() + timedelta(hours=3),
    )
    Run.objects.filter(pk=run.pk).update(ledger_tokens=12345, extra_tokens=99)
    return run, other, ada.machine, bob.machine


def test_machine_for_key_reads_owner_and_pause_in_one_query(members, django_assert_num_queries):
    *_, ada, bob = members
    MachinePause.start(bob)
    with django_assert_num_queries(1):
        machine = machine_for_key(bob.key)
        assert machine.owner.is_active and machine.owner.shown_name and machine.pause.since
        assert machine.owner_id == machine.owner.pk and machine.revoked is None
    assert_same_columns(machine, Machine)
    with django_assert_num_queries(1):
        assert getattr(machine_for_key(ada.key), "pause", None) is None
    assert machine_for_key("0" * 64) is None
    assert machine_for_key("'; DROP TABLE fleet_machinepause; --") is None


def test_membership_for_run_reads_the_run_by_id_or_slug(members, django_assert_num_queries):
    run, other, ada, bob = members
    for name in (str(run.pk), run.slug):
        with django_assert_num_queries(1):
            membership = membership_for_run(ada, name)
            assert membership.machine is ada
            assert membership.run.pk == run.pk
            assert membership.has_verdicts is False
            assert (membership.high_water_mark, membership.addresses) == (
                7,
                ["192.0.2.1:41000", "[2001:db8::1]:9"],
            )
            assert membership.run.max_plausible_tokens == 2 * membership.run.token_budget
            assert membership.run.state.value == membership.run.status
        assert_same_columns(membership, Membership)
        assert_same_columns(membership.run, Run)
    assert membership_for_run(ada, other.slug).run.pk == other.pk
    assert membership_for_run(bob, other.slug) is None
    assert membership_for_run(bob, "no-such-run") is None
    assert membership_for_run(bob, "a b'; --") is None


def test_membership_reported_by_another_mirror_is_not_returned(members):
    _, other, _, bob = members
    Membership.everywhere.create(run=other, machine=bob, mirror="a" * 64)
    assert membership_for_run(bob, other.slug) is None


@pytest.mark.parametrize("proven", [True, False])  # this site refuses tickets before the proof
def test_membership_has_verdicts_if_its_own_run_has_any(members, proven):
    run, other, ada, _ = members
    VerdictRecord.objects.create(run=run, body="{}", digest="1" * 64, signatures={}, proven=proven)
    assert membership_for_run(ada, run.slug).has_verdicts is True
    assert membership_for_run(ada, other.slug).has_verdicts is False
