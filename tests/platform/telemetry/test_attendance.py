"""Tests of when tickets say that somebody is a newcomer: somebody trains who can vouch for them."""

import time
from datetime import timedelta

import pytest
from django.utils import timezone

from barnraise.protocol.enums import Standing
from barnraise.protocol.messages import Ticket
from coordinator.fleet.directives import renew_ticket
from coordinator.fleet.models import Membership
from coordinator.runs.invitations import RunInvitation
from coordinator.runs.models import Run
from coordinator.runs.tickets import NEWCOMER_SECONDS
from coordinator.telemetry.attendance import ATTENDED_SECONDS, is_attended
from coordinator.telemetry.models import Rollup

pytestmark = pytest.mark.django_db


def launch_long_ago(run: Run) -> None:
    Run.objects.filter(pk=run.pk).update(launched=timezone.now() - timedelta(days=3))
    Membership.objects.filter(run=run).update(joined=timezone.now() - timedelta(days=3))
    run.refresh_from_db()


def train(machine, run: Run, seconds_ago: float = 0) -> None:
    bucket = int(time.time() - seconds_ago) // 60 * 60
    member = Membership.objects.get(run=run, machine=machine.machine)
    Rollup.objects.create(membership=member, width=60, bucket=bucket, tokens=7)


def standing_at_join(machine, run: Run) -> Standing:
    return Ticket.model_validate_json(machine.join(run).ticket.body).standing


def test_stranger_is_a_newcomer_while_the_owners_machine_trains(person, launched_run, volunteer):
    run, owners = launched_run(person())
    owners.join(run)
    eve = volunteer(person("eve@example.org"), 3)
    assert standing_at_join(eve, run) is Standing.NEWCOMER, "the owner's machine has just joined"
    launch_long_ago(run)
    assert standing_at_join(eve, run) is Standing.STRANGER, "nobody trains who could vouch"
    train(owners, run, ATTENDED_SECONDS + 120)
    assert not is_attended(run)
    train(owners, run)
    assert standing_at_join(eve, run) is Standing.NEWCOMER
    assert standing_at_join(owners, run) is Standing.OWNER


def test_two_people_let_in_vouch_and_one_or_two_strangers_do_not(person, launched_run, volunteer):
    run, _ = launched_run(person())
    people = [person(f"{name}@example.org") for name in "abst"]
    machines = [volunteer(one, 3 + number) for number, one in enumerate(people)]
    invitation = RunInvitation.create(run)
    for one in people[:2]:
        invitation.accept(one)
    for machine in machines:
        machine.join(run)
    launch_long_ago(run)
    ann, bea, *strangers = machines
    for machine in (ann, *strangers):
        train(machine, run)
    assert not is_attended(run)
    train(bea, run)
    assert is_attended(run)
    assert standing_at_join(ann, run) is Standing.INVITED


def test_newcomer_has_another_ticket_each_hour_until_an_update_counts(adas_run, person, volunteer):
    run, _ = adas_run
    eve = volunteer(person("eve@example.org"), 3)
    eve.join(run)
    member = Membership.objects.get(run=run, machine=eve.machine)
    assert renew_ticket(member) is None
    member.ticket_expires -= timedelta(seconds=NEWCOMER_SECONDS + 1)
    member.updates_sent = 1
    assert renew_ticket(member) is None
    member.updates_sent = 0
    member.save()
    assert renew_ticket(member)
