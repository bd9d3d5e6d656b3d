"""Tests of the tokens per second that tickets allow, and of the machines of one volunteer."""

import math
from datetime import timedelta

import pytest
from django.utils import timezone

from barnraise.protocol.coordinator_messages import JoinRequest
from coordinator.fleet import token_limits
from coordinator.fleet.directives import renew_ticket
from coordinator.fleet.join import admit_machine, join_refusal
from coordinator.fleet.suspension import reports_suspension

pytestmark = pytest.mark.django_db
REQUEST = JoinRequest(version="0.1.0", addresses=[])


def test_suspension_takes_half_of_the_people():
    machines = [("Ada", "training"), ("Ben", "training"), ("Mallory", "suspended")]
    assert not reports_suspension([]) and not reports_suspension(machines)
    assert not reports_suspension([*machines, ("Mallory", "suspended")])
    assert reports_suspension([*machines, ("Ben", "suspended")])


def test_machine_that_is_not_measured_gets_a_conservative_rate(launched_run, volunteer, person):
    run, _ = launched_run(person())
    ben = person("ben@example.org")
    member = admit_machine(run, volunteer(ben, 2).machine, REQUEST)
    expected = math.ceil(2 * token_limits.UNMEASURED_FLOPS / (6 * run.spec.model.parameters))
    assert token_limits.ticket_rate(member) == min(expected, token_limits.volunteer_rate(run))


def test_machines_of_one_volunteer_share_a_limit(launched_run, volunteer, person, settings):
    (run, _), ben = launched_run(person()), person("ben@example.org")
    settings.VOLUNTEER_MACHINES = 4
    limit = token_limits.volunteer_rate(run)
    for seed in range(2, 6):
        machine = volunteer(ben, seed).machine
        assert not join_refusal(run, machine)
        member = admit_machine(run, machine, REQUEST)
        member.rate = 1e9
        assert renew_ticket(member, always=True)
    rates = list(run.memberships.filter(machine__owner=ben).values_list("max_tokens_per_second"))
    assert sum(rate for (rate,) in rates) <= 2 * limit
    fifth = volunteer(ben, 6).machine
    refusal = join_refusal(run, fifth)
    assert "4 machines of yours have joined" in refusal and refusal.endswith("use one of those")
    long_ago = timezone.now() - timedelta(days=30)
    run.memberships.filter(machine__owner=ben).update(ticket_expires=long_ago)
    assert not join_refusal(run, fifth), "tickets that no update can use do not count"


def test_machine_that_outgrows_its_ticket_receives_another(launched_run, volunteer, person):
    run, first = launched_run(person())
    member = admit_machine(run, first.machine, REQUEST)
    assert renew_ticket(member, always=True)
    member.refresh_from_db()
    assert renew_ticket(member) is None
    member.rate = 10.0 * member.max_tokens_per_second
    assert renew_ticket(member)
    first = member.max_tokens_per_second
    member.refresh_from_db()
    assert member.max_tokens_per_second == 20 * first
