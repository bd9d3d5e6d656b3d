"""Tests of the tokens per second that tickets allow, and of the machines of one volunteer."""

import math
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.utils import timezone

from barnraise.protocol.coordinator_messages import JoinRequest
from barnraise.protocol.messages import Ticket
from coordinator.eventlog import writer
from coordinator.fleet import token_limits
from coordinator.fleet.directives import renew_ticket
from coordinator.fleet.join import admit_machine, join_refusal
from coordinator.fleet.models import Membership
from coordinator.fleet.suspension import reports_suspension
from coordinator.replication import mirror_list
from coordinator.runs import tickets

pytestmark = pytest.mark.django_db
REQUEST = JoinRequest(version="0.1.0", addresses=[])


def test_ticket_of_a_mirror_whose_clock_is_wrong_has_the_others_time(adas_run, volunteer, person):
    run, _ = adas_run
    member = admit_machine(run, volunteer(person("ben@example.org"), 2).machine, REQUEST)
    for key in ("1", "2"):
        writer.record_peer_clock(key * 64, time.time() - 3600)
    signed = renew_ticket(member, always=True)
    assert signed
    ticket = Ticket.model_validate_json(signed.body)
    assert ticket.issued == pytest.approx(time.time() - 3600, abs=60)
    assert ticket.expires - ticket.issued == pytest.approx(tickets.TICKET_SECONDS)


def test_suspension_takes_half_of_the_people():
    machines = [("Ada", "training"), ("Ben", "training"), ("Mallory", "suspended")]
    assert not reports_suspension([]) and not reports_suspension(machines)
    assert not reports_suspension([*machines, ("Mallory", "suspended")])
    assert reports_suspension([*machines, ("Ben", "suspended")])


def test_machine_that_is_not_measured_gets_a_conservative_rate(
    adas_run, volunteer, person, settings
):
    run, _ = adas_run
    ben = person("ben@example.org")
    member = admit_machine(run, volunteer(ben, 2).machine, REQUEST)
    expected = math.ceil(2 * token_limits.UNMEASURED_FLOPS / (6 * run.spec.model.parameters))
    room = token_limits.volunteer_rate(run) - (settings.VOLUNTEER_MACHINES - 1)
    assert token_limits.ticket_rate(member) == min(expected, room)


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
    assert sum(rate for (rate,) in rates) <= limit and min(rates) >= (1,)
    fifth = volunteer(ben, 6).machine
    refusal = join_refusal(run, fifth)
    assert "4 machines of yours have joined" in refusal and refusal.endswith("use one of those")
    long_ago = timezone.now() - timedelta(days=30)
    run.memberships.filter(machine__owner=ben).update(ticket_expires=long_ago)
    assert not join_refusal(run, fifth), "tickets that no update can use do not count"


def test_machine_that_outgrows_its_ticket_receives_another(adas_run):
    run, first = adas_run
    member = admit_machine(run, first.machine, REQUEST)
    assert renew_ticket(member, always=True)
    member.refresh_from_db()
    assert renew_ticket(member) is None
    member.rate = 10.0 * member.max_tokens_per_second
    assert renew_ticket(member)
    first = member.max_tokens_per_second
    member.refresh_from_db()
    assert member.max_tokens_per_second == 20 * first


def test_sybil_machines_at_three_mirrors_share_one_limit(
    launched_run, volunteer, person, monkeypatch
):
    """Let all machines of a volunteer claim the highest rate, in turns, again and again."""
    (run, _), ben = launched_run(person()), person("ben@example.org")
    monkeypatch.setattr(mirror_list, "newest_list", lambda: SimpleNamespace(active=[1, 2, 3]))
    members = [admit_machine(run, volunteer(ben, seed).machine, REQUEST) for seed in range(2, 6)]
    for claimed in (10.0, 1e9, 1.0, 1e6):
        for member in members:
            member.rate = claimed
            assert renew_ticket(member, always=True)
    rates = [
        member.max_tokens_per_second
        for member in run.memberships.filter(machine__owner=ben).order_by("joined")
    ]
    assert 3 * sum(rates) <= token_limits.volunteer_rate(run)
    assert rates[0] > 100 and min(rates) >= 1


def test_replayed_older_ticket_allows_no_more_than_the_last(launched_run, volunteer, person):
    """Let a machine slow down: its earlier ticket stays valid, so the sum must still count it."""
    run, ben = launched_run(person())[0], person("ben@example.org")
    fast, other = (admit_machine(run, volunteer(ben, n).machine, REQUEST) for n in (2, 3))
    fast.rate = 1e9
    renew_ticket(fast, always=True)
    fast.refresh_from_db()
    highest = fast.max_tokens_per_second
    fast.rate = 1.0
    renew_ticket(fast, always=True)
    other.rate = 1e9
    renew_ticket(other, always=True)
    fast.refresh_from_db()
    other.refresh_from_db()
    assert fast.max_tokens_per_second == highest
    assert highest + other.max_tokens_per_second <= token_limits.volunteer_rate(run)


def test_machines_that_joined_at_another_mirror_count(launched_run, volunteer, person, settings):
    (run, _), ben = launched_run(person()), person("ben@example.org")
    settings.VOLUNTEER_MACHINES = 1
    elsewhere, machine = (volunteer(ben, seed).machine for seed in (2, 3))
    assert not join_refusal(run, machine)
    Membership.everywhere.create(run=run, machine=elsewhere, mirror="a" * 64)
    assert "1 machines of yours" in join_refusal(run, machine)
