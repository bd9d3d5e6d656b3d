"""Test joining runs: tickets, pseudonyms and peers to try."""

import time
from datetime import timedelta

import pytest
from django.utils import timezone
from helpers.site.machine_replies import read_reply

from barnraise.protocol import coordinator_messages, enums, messages
from barnraise.protocol.signing import TicketPolicy, check_ticket, open_signed
from coordinator.fleet import run_broadcast
from coordinator.fleet.lifecycle_facts import gather_facts
from coordinator.fleet.models import Membership
from coordinator.runs.join_policy import JoinPolicy
from coordinator.telemetry.models import RunEvent
from coordinator.telemetry.run_table import machine_rows

pytestmark = pytest.mark.django_db


def test_join_returns_a_valid_ticket_and_peers_to_try(person, adas_run, volunteer):
    run, first = adas_run
    bob = volunteer(person("bob@example.org"), 2)
    reply = bob.join(run)
    policy = TicketPolicy(str(run.pk), frozenset(run.spec.roots))
    ticket = check_ticket(reply.ticket, bob.identity.key, policy, time.time())
    assert ticket.expires - ticket.issued == 24 * 3600
    assert (
        ticket.volunteer != open_signed(first.join(run).ticket, "ticket", messages.Ticket).volunteer
    )
    assert [peer.key for peer in reply.peers] == [first.identity.key]
    assert reply.run.spec == run.spec_text


def test_machines_of_one_person_have_the_same_volunteer_pseudonym(adas_run, volunteer):
    run, first = adas_run
    second = volunteer(run.owner, 2)
    tickets = [
        open_signed(machine.join(run).ticket, "ticket", messages.Ticket)
        for machine in (first, second)
    ]
    assert tickets[0].volunteer == tickets[1].volunteer and tickets[0].peer != tickets[1].peer
    assert str(run.owner.pk) not in tickets[0].model_dump_json()


def test_ticket_near_its_expiry_is_renewed_with_a_report(adas_run, numbered_report):
    run, ada = adas_run
    reply = read_reply(ada.report(run, numbered_report(1)))
    assert reply.ticket is None
    Membership.objects.update(ticket_expires=timezone.now() + timedelta(hours=11))
    reply = read_reply(ada.report(run, numbered_report(2)))
    assert open_signed(reply.ticket, "ticket", messages.Ticket).expires > time.time() + 23 * 3600


def test_peer_hints_list_reachable_machines_newest_first(person, adas_run, volunteer, monkeypatch):
    run, ada = adas_run
    others = {seed: volunteer(person(f"{seed}@example.org"), seed) for seed in range(2, 8)}
    for machine in others.values():
        machine.join(run)
    now = timezone.now()
    local_memberships = run.memberships
    seconds_since_report = {1: 0.6, 2: 0.5, 3: 0.4, 4: 0.3, 5: 0.2, 6: 0.2, 7: 90_000}
    for seed, seconds in seconds_since_report.items():
        local_memberships.filter(machine__hostname=f"pc-{seed}").update(
            last_seen=now - timedelta(seconds=seconds)
        )
    other_mirror_fields = {"run": run, "mirror": "b" * 64, "activity": "training", "changed": None}
    # Machine 7 is not gone: it reports to another mirror now.
    Membership.everywhere.create(machine=others[7].machine, last_seen=now, **other_mirror_fields)
    Membership.everywhere.create(
        machine=others[2].machine, last_seen=now - timedelta(seconds=0.1), **other_mirror_fields
    )
    local_memberships.filter(machine__hostname="pc-3").update(addresses=[])  # unreachable
    local_memberships.filter(machine__hostname="pc-4").update(activity="left")
    others[5].machine.revoke()
    expected = [others[7], others[2], others[6], ada]
    assert [peer.key for peer in run_broadcast.load_broadcast(run).peers] == [
        machine.identity.key for machine in expected
    ]
    # One more than the limit is loaded, because the machine that asks is left out.
    monkeypatch.setattr(run_broadcast, "MAX_PEER_HINTS", 1)
    assert [peer.key for peer in run_broadcast.load_broadcast(run).peers] == [
        machine.identity.key for machine in expected[:2]
    ]


def test_machines_that_strangers_reach_are_hinted_first_few_of_each_person(
    person, adas_run, volunteer
):
    run, ada = adas_run
    liar = person("mallory@example.org")
    owners = [person(f"{seed}@example.org") for seed in (2, 3)]
    members = [volunteer(owner, seed) for seed, owner in enumerate((*owners, *[liar] * 3), 2)]
    now = timezone.now()
    for age, member in enumerate(members):  # the liar's machines were seen last
        member.join(run)
        run.memberships.filter(machine=member.machine).update(
            last_seen=now - timedelta(seconds=1 - age / 10),
            exchange={"reached": member is not members[1]},
        )
    run.memberships.filter(machine=ada.machine).update(last_seen=now, exchange={"reached": False})
    reached, unreached, *lying = [member.identity.key for member in members]
    hinted = [peer.key for peer in run_broadcast.load_broadcast(run).peers]
    assert hinted == [lying[2], lying[1], reached, ada.identity.key, lying[0], unreached]


def test_address_of_a_stranger_that_a_machine_announces_is_not_passed_on(
    person, adas_run, volunteer, numbered_report
):
    run, ada = adas_run
    liar = volunteer(person("mallory@example.org"), 2)
    liar.client.defaults["REMOTE_ADDR"] = "8.8.4.4"
    addresses = ["1.1.1.1:53", "8.8.4.4:4000", "192.168.1.9:4000"]
    liar.request_join(run, addresses=addresses)
    assert [peer.addresses for peer in ada.join(run).peers] == [["8.8.4.4:4000"]]
    neighbour = volunteer(person("bob@example.org"), 3)
    neighbour.client.defaults["REMOTE_ADDR"] = "8.8.4.4"
    peers = {peer.key: peer.addresses for peer in neighbour.join(run).peers}
    assert peers == {liar.identity.key: ["8.8.4.4:4000", "192.168.1.9:4000"]}
    liar.report(run, numbered_report(1, addresses=["1.1.1.1:53"]))
    assert [peer.key for peer in ada.join(run).peers] == []


def test_machine_that_fetches_the_weights_is_no_machine_of_the_run(
    person, adas_run, volunteer, numbered_report
):
    run, ada = adas_run
    ada.join(run)
    bob = volunteer(person("bob@example.org"), 2)
    answer = bob.request_join(run, purpose=enums.JoinPurpose.FETCH)
    reply = coordinator_messages.JoinReply.model_validate_json(answer.content)
    assert reply.ticket is not None and len(reply.peers) == 1
    fetching = {"activity": enums.Activity.FETCHING, "tokens": 0}
    bob.report(run, numbered_report(1).model_copy(update=fetching))
    ada.store_reports(run, numbered_report(1))
    run.refresh_from_db()
    assert gather_facts(run).alive == 1, "a quorum of two would wait for another machine"
    assert [row["name"] for row in machine_rows(run)] == ["pc-1"]
    assert not RunEvent.objects.filter(machine=bob.machine).exists()
    assert ada.machine in {m.machine for m in Membership.objects.alive_in(run)}
    assert bob.machine in {m.machine for m in Membership.objects.reachable_in(run)}


def test_member_of_a_crew_needs_no_memory_for_the_whole_model(person, launched_run, volunteer):
    run, _ = launched_run(person("owner@example.org"), join_policy=JoinPolicy(min_memory=10**14))
    bob = volunteer(person("bob@example.org"), 2)
    refused = bob.request_join(run)
    assert refused.status_code == 403 and "of memory" in refused.json()["error"]
    answer = bob.request_join(run, purpose=enums.JoinPurpose.CREW)
    reply = coordinator_messages.JoinReply.model_validate_json(answer.content)
    assert reply.ticket is not None
    alive = {membership.machine for membership in Membership.objects.alive_in(run)}
    assert bob.machine not in alive, "the crew's lead is the run's machine"
