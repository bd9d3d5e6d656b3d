"""Which missing update is requested from which peer, and when: alone, and as gossip's part."""

from helpers.simulated_swarm import (
    Simulation,
    author_of,
    connected_gossip,
    key_of,
    peer_state,
    update_requests,
)

from barnraise.exchange.gossip import gossip as g
from barnraise.exchange.gossip import requests
from barnraise.exchange.gossip.gossip import Gossip
from barnraise.exchange.gossip.requests import ArrivedBytes


def test_requests_stalled_update_is_requested_from_another_peer():
    me, author = connected_gossip(1, 2, 3), author_of(9)
    me.on_state(key_of(3), peer_state({author: 1}), 0.0)
    me.on_update(key_of(2), author, 1, 0.5)
    me.next_actions(0.5)
    me.on_payload_bytes(key_of(2), author, 1, 4.0, ArrivedBytes(1))
    assert not update_requests(me.next_actions(4.0 + requests.STALL_TIMEOUT - 0.1))
    # The grace period starts when the transfer counts as stalled.
    assert update_requests(me.next_actions(4.0 + requests.STALL_TIMEOUT + 0.1)) == []
    later = 4.0 + requests.STALL_TIMEOUT + 0.2 + requests.MIN_GRACE
    assert update_requests(me.next_actions(later)) == [g.RequestUpdates(key_of(3), author, 1, 1)]


def test_trickle_of_no_new_bytes_holds_no_honest_update_up():
    """A liar sends a header first, and then pieces that are here already, for ever."""
    me, author = connected_gossip(1, 2, 3), author_of(9)
    liar, honest = key_of(2), key_of(3)
    me.on_state(honest, peer_state({author: 1}), 0.0)
    requested: list[g.RequestUpdates] = []
    for tick in range(300):
        now = tick / 10
        me.on_update(liar, author, 1, now)
        me.on_payload_bytes(liar, author, 1, now, ArrivedBytes(0, 1000))
        requested += update_requests(me.next_actions(now))
        if requested:
            break
    assert requested == [g.RequestUpdates(honest, author, 1, 1)]
    assert now < requests.STALL_TIMEOUT + requests.MAX_GRACE
    me.on_update(liar, author, 1, now)
    assert me.requests.is_expected(honest, author, 1), "the liar takes it over again"


def test_peer_that_answers_late_because_it_has_much_to_send_is_heard():
    """A slow line sends what was requested one after the other: later answers take longer."""
    me, author = connected_gossip(1, 2), author_of(9)
    me.on_author(key_of(2), author)
    me.on_state(key_of(2), peer_state({author: 1}), 0.0)
    me.next_actions(0.0)
    assert update_requests(me.next_actions(requests.MIN_GRACE))
    later = requests.MIN_GRACE + requests.RESPONSE_TIMEOUT + 1.0
    me.next_actions(later)
    me.on_update(key_of(2), author, 1, later)
    assert me.requests.is_expected(key_of(2), author, 1)
    assert not me.links[key_of(2)].to_decline


def test_slow_transfer_continues_from_another_peer_that_has_the_update():
    """A liar sends a byte of a large update every few seconds."""
    me, author = connected_gossip(1, 2, 3), author_of(9)
    liar, honest = key_of(2), key_of(3)
    me.on_update(liar, author, 1, 0.0)

    def send_bytes(since: int, until: int) -> list[g.RequestUpdates]:
        requested: list[g.RequestUpdates] = []
        for now in range(since, until, 5):
            me.on_payload_bytes(liar, author, 1, now, ArrivedBytes(1, 1_000_000))
            requested += update_requests(me.next_actions(now))
        return requested

    assert not send_bytes(0, 200), "nobody else has it"
    me.on_state(honest, peer_state({author: 1}), 200.0)
    me.next_actions(200.0)
    assert send_bytes(205, 220) == [g.RequestUpdates(honest, author, 1, 1)]
    assert me.links[liar].to_decline == {author: 1}, "it need not send the rest"


def test_requests_do_not_wait_for_a_peer_without_the_update():
    simulation = Simulation(3)
    simulation.introduce_to_hub()
    simulation.run(10)
    liar, honest, me = (key_of(n) for n in (0, 1, 2))
    author = author_of(9)
    simulation.stored[honest][author] = {1}
    simulation.machines[honest].on_local_update(author, 1)
    simulation.machines[me].on_state(
        liar, peer_state({author: 1, author_of(8): 50}), simulation.now
    )
    assert simulation.run(40, until=lambda: simulation.machines[me].vector.get(author) == 1)


def test_requests_are_suspended_while_fetching_a_snapshot():
    me, author = Gossip(key_of(1), 0), author_of(3)
    me.on_connected(key_of(2), 0.0)
    me.on_author(key_of(2), author)
    me.on_state(key_of(2), peer_state({author: 5}), 0.0)
    assert not update_requests(me.next_actions(0.0)) and not update_requests(me.next_actions(5.0))
    me.start({}, {}, 5.0)
    me.next_actions(5.0)
    assert update_requests(me.next_actions(5.0 + requests.MIN_GRACE)) == [
        g.RequestUpdates(key_of(2), author, 1, 5)
    ]
    assert not update_requests(me.next_actions(5.1 + requests.MIN_GRACE)), (
        "the request is in flight"
    )


def test_requests_announced_update_waits_for_grace_longer_on_slow_tree():
    me, author = connected_gossip(1, 2, 3), author_of(9)
    me.on_author(key_of(2), author)
    me.on_state(key_of(2), peer_state({author: 1}), 0.0)
    assert not update_requests(me.next_actions(0.0))
    assert me.next_wakeup(0.1) <= requests.MIN_GRACE
    assert update_requests(me.next_actions(requests.MIN_GRACE + 0.01))
    # Now each update arrives along the tree three seconds after its announcement.
    for seq in range(2, 40):
        now = 10.0 * seq
        me.on_local_update(author, seq - 1)
        me.on_state(key_of(2), peer_state({author: seq}), now)
        me.next_actions(now)
        me.on_update(key_of(3), author, seq, now + 3)
    me.on_local_update(author, seq)
    me.on_state(key_of(2), peer_state({author: seq + 1}), 1000.0)
    assert not update_requests(me.next_actions(1000.0))
    assert not update_requests(me.next_actions(1005.0))
    assert update_requests(me.next_actions(1000.0 + requests.MAX_GRACE))


def test_requests_pruned_update_is_not_requested_and_needs_snapshot():
    me, author = connected_gossip(1, 2, 3), author_of(9)
    me.on_author(key_of(2), author)
    me.on_state(key_of(2), peer_state({author: 9}, pruned={author: 5}), 0.0)
    me.on_state(key_of(3), peer_state({author: 3}), 0.0)
    me.next_actions(0.0)
    assert update_requests(me.next_actions(2.0)) == [
        g.RequestUpdates(key_of(3), author, 1, 3),
        g.RequestUpdates(key_of(2), author, 6, 9),
    ]
    assert not me.needs_snapshot(100.0)
    me.on_disconnected(key_of(3), 100.0)
    me.next_actions(100.0)
    late = 100.0 + requests.SNAPSHOT_DELAY
    assert not me.needs_snapshot(100.0) and me.needs_snapshot(late)
    me.on_connected(key_of(4), 100.0)
    me.on_state(key_of(4), peer_state({author_of(4): 1}), 100.0)
    late += g.AGREEMENT_SECONDS
    assert not me.needs_snapshot(late), "one of two volunteers does not have it"
    me.on_state(key_of(4), peer_state({author: 7}), 100.0)
    assert me.needs_snapshot(late + g.AGREEMENT_SECONDS)
    me.start({author: 9}, {author: 9}, 200.0)
    me.next_actions(200.0)
    assert not me.needs_snapshot(300.0)
