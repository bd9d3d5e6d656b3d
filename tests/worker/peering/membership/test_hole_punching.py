"""Test whom a machine asks for help with a dial, and whom it helps: see `rendezvous`."""

import itertools
import math

from helpers.network.simulated_swarm import address_of, connected_gossip, key_of

from barnraise.exchange.gossip import gossip as g
from barnraise.peering.limits.dial_limits import MAX_ADDRESSES_PER_DIAL
from barnraise.peering.limits.service_limits import SERVICE_LIMITS, Service
from barnraise.peering.membership.hole_punching import (
    HELP_REQUESTS,
    HELP_SECONDS,
    MAX_VIA,
    PATIENCE_SECONDS,
    Rendezvous,
    order_candidates,
)
from barnraise.peering.membership.link_actions import RequestDial
from barnraise.peering.membership.link_targets import LINK_TARGETS
from barnraise.peering.membership.membership import RELAY_REDIAL, Meeting, PeerSource
from barnraise.protocol.messages import Peer
from barnraise.protocol.table_sizes import SOME


def requests(me: g.Gossip, now: float) -> list[tuple[str, str]]:
    """Return whom a machine asks now, and for which peer."""
    actions = me.next_actions(now)
    return [(each.to, each.target) for each in actions if isinstance(each, RequestDial)]


def test_unanswered_dial_asks_the_peer_that_named_the_target() -> None:
    me = connected_gossip(1, 2, 3, 4)
    hidden = Peer(key=key_of(9), addresses=[address_of(key_of(9))])
    me.membership.add_peers([hidden], 0.0, PeerSource.GOSSIP, "person")
    me.membership.rendezvous.on_peers(key_of(3), [key_of(9)])
    assert any(isinstance(action, g.Dial) for action in me.next_actions(2.0))
    assert requests(me, 2.0 + PATIENCE_SECONDS / 2) == []
    assert me.next_wakeup(2.0 + PATIENCE_SECONDS / 2) <= 2.0 + PATIENCE_SECONDS
    assert requests(me, 2.0 + PATIENCE_SECONDS) == [(key_of(3), key_of(9))]
    assert requests(me, 2.0 + PATIENCE_SECONDS) == []


def test_dial_that_was_answered_asks_nobody() -> None:
    rendezvous = Rendezvous(0)
    rendezvous.on_dial("b", 0.0)
    rendezvous.on_dial("c", 0.0)
    rendezvous.on_dial_ended("b")
    rendezvous.on_connected("c")
    assert rendezvous.choose_requests(["a"], 100.0) == []
    assert rendezvous.next_wakeup(["a"]) == math.inf


def test_dial_that_failed_at_once_is_helped_for_a_while() -> None:
    rendezvous = Rendezvous(0)
    rendezvous.on_dial("hidden", 0.0)
    rendezvous.on_dial_failed("hidden", 0.1)
    assert rendezvous.next_wakeup(["link"]) == PATIENCE_SECONDS
    assert rendezvous.choose_requests(["link"], PATIENCE_SECONDS) == [RequestDial("link", "hidden")]
    rendezvous.on_dial("hidden", 100.0)
    rendezvous.on_dial_failed("hidden", 100.0)
    assert rendezvous.choose_requests(["link"], 100.0 + HELP_SECONDS) == []
    assert rendezvous.next_wakeup(["link"]) == math.inf


def test_any_link_is_asked_for_a_target_of_the_site() -> None:
    rendezvous = Rendezvous(0)
    rendezvous.on_dial("hidden", 0.0)
    assert rendezvous.choose_requests([], 100.0) == []
    assert rendezvous.choose_requests(["link"], 100.0) == [RequestDial("link", "hidden")]


def test_requests_for_one_target_back_off() -> None:
    rendezvous = Rendezvous(0)
    times: list[float] = []
    now = 0.0
    while now < 4 * 3600:
        rendezvous.on_dial("hidden", now)
        for step in range(10):
            if rendezvous.choose_requests(["link"], now + step):
                times.append(now + step)
        rendezvous.on_dial_failed("hidden", now + 10.0)
        now += 10.0
    waits = [after - before for before, after in itertools.pairwise(times)]
    assert waits[0] < 40
    assert max(waits) <= 1.5 * HELP_REQUESTS.most_seconds + 20
    assert len(times) < 40, "four hours of vain dials cost few requests"


def test_requests_for_a_target_that_is_gone_for_weeks_go_on() -> None:
    rendezvous = Rendezvous(0)
    rendezvous.on_dial("hidden", 0.0)
    now = 0.0
    for _ in range(1200):  # 2¹⁰²⁴ is no float
        now = max(now, rendezvous.next_wakeup(["link"]))
        assert rendezvous.choose_requests(["link"], now) == [RequestDial("link", "hidden")]
    assert now < rendezvous.next_wakeup(["link"]) <= now + 1.5 * HELP_REQUESTS.most_seconds


def test_what_peers_say_of_their_links_is_bounded() -> None:
    rendezvous = Rendezvous(0)
    for via in range(3 * MAX_VIA):
        rendezvous.on_peers(f"via {via}", [f"target {n}" for n in range(2 * SOME)])
    rendezvous.on_dial(f"target {2 * SOME - 1}", 0.0)
    vias = {
        rendezvous.choose_requests([f"via {n}" for n in range(3 * MAX_VIA)], 1e6 * n)[0].to
        for n in range(1, 60)
    }
    assert vias <= {f"via {n}" for n in range(2 * MAX_VIA, 3 * MAX_VIA)}


def test_statements_of_one_signer_and_through_one_volunteer_are_bounded() -> None:
    rendezvous = Rendezvous(0)
    assert [rendezvous.may_obey("signer", f"v{n}", 0.0) for n in range(5)].count(True) == 2
    rendezvous = Rendezvous(0)
    assert [rendezvous.may_obey(f"s{n}", "v", 0.0) for n in range(50)].count(True) == 8
    rendezvous = Rendezvous(0)
    assert [rendezvous.may_obey(f"s{n}", f"v{n}", 0.0) for n in range(50)].count(True) == 16
    rendezvous = Rendezvous(0)
    assert [rendezvous.may_pass("v", f"t{n}", 0.0) for n in range(99)].count(True) == 32
    rendezvous = Rendezvous(0)
    assert [rendezvous.may_pass(f"v{n}", "t", 0.0) for n in range(99)].count(True) == 16


# ---- where to dial


def test_punch_dials_an_address_that_did_not_answer_before() -> None:
    me = connected_gossip(1, 2)
    address = address_of(key_of(9))
    me.membership.add_peers([Peer(key=key_of(9), addresses=[address])], 0.0)
    assert any(isinstance(action, g.Dial) for action in me.next_actions(2.0))
    me.membership.on_dial_failed(key_of(9), 12.0)
    assert not any(isinstance(action, g.Dial) for action in me.next_actions(12.0))
    peer = me.membership.choose_punch(key_of(9), [address, "no address"], me.links, 12.0)
    assert peer is not None
    assert peer.addresses == [address]


def test_punch_is_declined_for_a_linked_peer_and_without_room() -> None:
    me = connected_gossip(1, 2)
    address = [address_of(key_of(9))]
    assert me.membership.choose_punch(key_of(2), address, me.links, 0.0) is None
    assert me.membership.choose_punch(key_of(1), address, me.links, 0.0) is None
    for number in range(10, 10 + LINK_TARGETS.most):
        me.on_connected(key_of(number), 0.0, Meeting("", True, address_of(key_of(number))))
    assert me.membership.choose_punch(key_of(9), address, me.links, 0.0) is None


def test_punches_at_a_victim_have_the_budget_of_its_host() -> None:
    me = connected_gossip(1, 2)
    victim = [f"203.0.113.7:{port}" for port in range(1, 17)]
    dialled = 0
    for number in range(100):
        peer = me.membership.choose_punch(key_of(1000 + number), victim, me.links, 1.0)
        if peer is not None:
            assert len(peer.addresses) <= MAX_ADDRESSES_PER_DIAL
            dialled += len(peer.addresses)
            me.membership.on_dial_failed(peer.key, 1.0)
    assert dialled <= SERVICE_LIMITS[Service.UNANSWERED_DIALS]["host"].burst + 1


def test_candidates_of_another_home_are_its_public_ones() -> None:
    theirs = ["192.168.1.50:5", "5.9.1.1:5", "[2a02:8108::50]:5"]
    assert order_candidates(theirs, ["192.168.1.60:6", "5.9.2.2:6"]) == theirs[1:]


def test_candidates_in_the_same_home_are_private_first() -> None:
    theirs = ["5.9.1.1:5", "192.168.1.50:5"]
    assert order_candidates(theirs, ["192.168.1.60:6", "5.9.1.1:6"]) == theirs[::-1]


def test_candidates_without_a_public_one_are_all_tried() -> None:
    assert order_candidates(["10.0.0.7:5", "x"], ["10.0.0.8:6"]) == ["10.0.0.7:5", "x"]


# ---- relays


def test_relay_is_dialled_after_two_direct_dials_failed() -> None:
    me = connected_gossip(1)
    relay = "https://relay.example.org/"
    address = address_of(key_of(9))
    me.membership.add_peers([Peer(key=key_of(9), addresses=[address, relay])], 0.0)
    dialled: list[tuple[float, list[str]]] = []
    now = 0.0
    while now < 200:
        for action in me.next_actions(now):
            if isinstance(action, g.Dial):
                dialled.append((now, list(action.peer.addresses)))
                me.membership.on_dial_failed(key_of(9), now)
        now += 0.5
    assert [addresses for _, addresses in dialled[:2]] == [[address], [address]]
    assert all(relay in addresses for _, addresses in dialled[2:]) and len(dialled) > 3
    waits = [after - before for (before, _), (after, _) in itertools.pairwise(dialled[2:])]
    assert min(waits) >= RELAY_REDIAL.first_seconds


def test_relay_in_a_statement_is_remembered_and_offered_last() -> None:
    relay = "https://relay.example.org/"
    theirs = [relay, "192.168.1.50:5", "5.9.1.1:5"]
    assert order_candidates(theirs, ["5.9.2.2:6"]) == ["5.9.1.1:5", relay]
    assert order_candidates(theirs, ["5.9.1.1:6"]) == ["192.168.1.50:5", "5.9.1.1:5", relay]
    me = connected_gossip(1, 2)
    me.membership.add_peers([Peer(key=key_of(9), addresses=["5.9.1.1:5"])], 0.0)
    me.membership.choose_punch(key_of(9), ["5.9.1.1:5", relay], me.links, 0.0)
    assert me.membership.passive[key_of(9)].relay == relay
