"""Tests of carriers: peers with fast uplinks that pass on the updates of many slow ones."""

import copy
import math
from collections import Counter

import pytest
from helpers.network.simulated_swarm import (
    Simulation,
    author_of,
    connected_gossip,
    key_of,
    number_of,
    peer_state,
)
from pydantic import ValidationError

from barnraise.exchange.gossip import gossip as g
from barnraise.exchange.gossip.carriers import Carriers
from barnraise.exchange.gossip.gossip import Gossip
from barnraise.peering.membership.membership import Meeting
from barnraise.protocol.messages import PeerState

MACHINES = 12
SLOW, FAST = 94_000.0, 6_200_000.0  # bytes per second; machine 0 has the fast line
PAYLOAD = 190_000
ROUND_SECONDS = 16.0  # 7 copies fill a slow line
TREE_SECONDS = (MACHINES - 1) * ROUND_SECONDS  # a round of as many copies as there are others


class Swarm(Simulation):
    """Machines on slow lines and one on a fast line, which count the copies that they send."""

    def __init__(self) -> None:
        super().__init__(MACHINES, payload=PAYLOAD, uplink=SLOW)
        self.copies: Counter[int] = Counter()  # of its own updates that each machine sends
        for number in range(MACHINES):
            self.set_uplink(number, FAST if number == 0 else SLOW)
        self.introduce({n: [*range(MACHINES)] for n in range(MACHINES)})
        self.run(30)
        for _ in range(3):
            self.run_round(TREE_SECONDS)

    def _start_push(self, source: str, to: str, author: str, seq: int) -> None:
        before = self.sent["push"]
        super()._start_push(source, to, author, seq)
        if author.startswith(source):
            self.copies[number_of(source)] += self.sent["push"] - before

    def run_round(self, seconds: float = ROUND_SECONDS) -> None:
        """Let each machine publish once; slow ones without a carrier have longer rounds."""
        for key, machine in list(self.machines.items()):
            is_carried = key == key_of(0) or machine.carrier_rate < math.inf
            if is_carried or seconds >= TREE_SECONDS:
                self.publish(number_of(key))
            self.run(seconds / MACHINES)

    def has_round(self, rounds_behind: int) -> bool:
        """Return whether all have all updates but the last rounds of each."""
        return all(
            other.vector.get(author_of(number_of(key)), 0)
            >= machine.vector[author_of(number_of(key))] - rounds_behind
            for key, machine in self.machines.items()
            for other in self.machines.values()
        )


@pytest.fixture(scope="module")
def warm_swarm():
    """Simulate the first rounds once, in which the fast machine is seen to relay."""
    return Swarm()


@pytest.fixture
def swarm(warm_swarm):
    return copy.deepcopy(warm_swarm)


def test_slow_machines_send_one_copy_and_all_have_the_updates_in_time(swarm):
    swarm.run_round()
    swarm.copies.clear()
    for _ in range(4):
        swarm.run_round()
        assert swarm.has_round(1)
    slow = [swarm.copies[number] / 4 for number in range(1, MACHINES)]
    assert sum(slow) / len(slow) <= 1.1, slow
    carried = sum(machine.carrier_rate < math.inf for machine in swarm.machines.values())
    assert carried >= MACHINES - 3
    assert len(swarm.machines[key_of(0)].links) == MACHINES - 1, "it links to all it can serve"
    assert swarm.machines[key_of(1)].carrier_rate == FAST


def test_carrier_that_leaves_is_replaced_within_two_rounds(swarm):
    swarm.run_round()
    swarm.leave(0)
    for _ in range(2):
        swarm.run_round(TREE_SECONDS)
    assert swarm.has_round(1)


def test_carrier_that_passes_nothing_on_delays_few_updates(swarm):
    liar = swarm.machines[key_of(0)]
    decide = liar.next_actions
    liar.next_actions = lambda now: [
        action
        for action in decide(now)
        if not isinstance(action, g.PushUpdate) or action.author == author_of(0)
    ]
    liar.on_request = lambda key, author: None
    served, swarm._on_request = (
        swarm._on_request,
        lambda me, *values: None if me == key_of(0) else served(me, *values),
    )
    swarm.run_round(TREE_SECONDS)
    for _ in range(3):
        swarm.run_round(TREE_SECONDS)
        assert swarm.has_round(2), "what it withholds takes the tree"
    believers = [machine for machine in swarm.machines.values() if machine.carrier_rate == FAST]
    assert not believers, "it has to be seen to relay again"


# ---- one machine


def peers_with(uplinks: dict[int, float | None], relayed: int = 1) -> Gossip:
    """Return machine 1 on a slow line, linked to peers that state these uplinks."""
    me = Gossip(key_of(1), 0)
    me.start({}, {}, 0.0)
    me.set_uplink(SLOW)
    for number, uplink in uplinks.items():
        me.on_connected(key_of(number), 0.0, Meeting())
        me.on_state(key_of(number), peer_state({}, uplink=uplink), 0.0)
        me.links[key_of(number)].relayed = relayed
    return me


def pushed(me: Gossip, now: float) -> list[int]:
    return [number_of(a.to) for a in me.next_actions(now) if isinstance(a, g.PushUpdate)]


def stated(me: Gossip, number: int, now: float) -> dict[str, int]:
    return me.build_state(key_of(number), now).vector


def test_own_update_is_sent_to_the_carrier_and_announced_once_it_has_it():
    me, author = peers_with({2: SLOW, 3: FAST, 4: None}), author_of(1)
    me.on_local_update(author, 1)
    assert pushed(me, 1.0) == [3]
    assert stated(me, 2, 1.0) == {} and me.carriers.withheld(key_of(2))
    assert stated(me, 3, 1.0) == {author: 1}
    assert me.carriers.on_sent(key_of(3), author, 1, 3.0)
    assert not me.carriers.on_sent(key_of(2), author, 1, 3.0)
    actions = me.next_actions(4.0)
    assert g.SendState(key_of(2)) in actions and g.SendState(key_of(4)) in actions
    assert stated(me, 2, 4.0) == {author: 1} and not me.carriers.withheld(key_of(2))
    assert me.carriers.is_carried(key_of(2), author, 1), (
        "what it requests here it gets from the carrier"
    )
    assert not me.carriers.is_carried(key_of(3), author, 1)


def test_own_updates_are_pushed_fastest_uplink_first():
    me = peers_with({2: 1.0, 3: 3 * SLOW, 4: 2 * SLOW})
    me.on_local_update(author_of(1), 1)
    assert pushed(me, 1.0) == [3, 4, 2], "three times its own uplink carry nothing"


@pytest.mark.parametrize(("uplink", "relayed"), [(FAST, 0), (0.0, 1), (None, 1), (3.9 * SLOW, 1)])
def test_peer_not_seen_to_relay_or_with_a_slow_uplink_carries_nothing(uplink, relayed):
    me = peers_with({2: SLOW, 3: uplink}, relayed)
    me.on_local_update(author_of(1), 1)
    assert sorted(pushed(me, 1.0)) == [2, 3]


def test_what_a_carrier_did_not_deliver_is_pushed_along_the_tree():
    me, author = peers_with({2: SLOW, 3: FAST, 4: SLOW}), author_of(1)
    me.on_local_update(author, 1)
    assert pushed(me, 1.0) == [3]
    assert sorted(pushed(me, 120.0)) == [2, 3, 4]
    me.on_local_update(author, 2)
    assert len(pushed(me, 121.0)) == 3, "it is not chosen again for a while"


def test_update_of_a_carrier_that_is_gone_is_pushed_at_once():
    me, author = peers_with({2: SLOW, 3: FAST, 4: SLOW}), author_of(1)
    me.on_local_update(author, 1)
    assert pushed(me, 1.0) == [3]
    me.on_disconnected(key_of(3), 2.0)
    assert sorted(pushed(me, 2.0)) == [2, 4]


def test_update_of_a_silent_carrier_is_pushed_before_its_link_ends():
    me, author = peers_with({2: SLOW, 3: FAST, 4: SLOW}), author_of(1)
    me.on_message(key_of(3), 4.0)
    me.on_local_update(author, 1)
    assert pushed(me, 5.0) == [3]
    assert pushed(me, 13.0) == []
    assert sorted(pushed(me, 14.5)) == [2, 3, 4]


def test_update_is_owed_until_somebody_reports_it():
    me, author = peers_with({2: SLOW, 3: FAST, 4: SLOW}), author_of(1)
    me.on_local_update(author, 1)
    assert pushed(me, 1.0) == [3]
    assert me.carriers.owes_update
    me.carriers.on_sent(key_of(3), author, 1, 2.0)  # to a buffer: it may be gone
    assert me.carriers.owes_update, "the line may have to send it to everybody"
    me.on_state(key_of(2), peer_state({author: 1}, uplink=SLOW), 9.0)
    me.next_actions(9.0)
    assert not me.carriers.owes_update, "another peer has it, and it came from there"


def test_carrier_is_judged_from_when_all_of_an_update_was_sent_to_it():
    me, author = peers_with({2: SLOW, 3: FAST, 4: SLOW}), author_of(1)
    for seconds_to_send in (1.0, 100.0):
        me = peers_with({2: SLOW, 3: FAST, 4: SLOW})
        me.on_local_update(author, 1)
        assert pushed(me, 0.0) == [3]
        me.carriers.on_sent(key_of(3), author, 1, seconds_to_send)
        assert me.carriers.next_wakeup == seconds_to_send + 60.0


def test_carrier_reports_to_an_author_that_it_has_its_update():
    for uplink, is_reported in ((SLOW, True), (FAST, False)):
        me, author = peers_with({2: uplink, 3: SLOW}), author_of(2)
        me.set_uplink(FAST)
        for number in (2, 3):
            me.build_state(key_of(number), 0.0)
        me.next_actions(0.0)
        me.on_author(key_of(2), author)
        me.on_update(key_of(2), author, 1, 2.5)
        me.on_local_update(author, 1)
        assert (g.SendState(key_of(2)) in me.next_actions(2.5)) == is_reported


@pytest.mark.parametrize("is_reported", [True, False])
def test_update_that_a_carrier_lost_is_owed_until_peers_have_it(is_reported):
    me, author = peers_with({2: SLOW, 3: FAST, 4: SLOW}), author_of(1)
    me.on_local_update(author, 1)
    assert pushed(me, 1.0) == [3]
    me.on_disconnected(key_of(3), 2.0)
    assert sorted(pushed(me, 2.0)) == [2, 4]
    for number in (2, 4) if is_reported else ():
        assert me.carriers.owes_update, "the tree has to grow again"
        me.on_state(key_of(number), peer_state({author: 1}, uplink=SLOW), 31.0)
        me.next_actions(31.0)
    now = 32.0 if is_reported else me.carriers.next_wakeup
    assert now <= 122.0, "a peer may never report it"
    me.on_local_update(author, 2)
    assert sorted(pushed(me, now)) == [2, 4]
    assert not me.carriers.owes_update, "the next one takes the tree from the start"


def test_peers_that_lag_behind_a_carrier_are_sent_nothing():
    me, author = peers_with({2: SLOW, 3: FAST, 4: SLOW, 5: SLOW}), author_of(1)
    now, waits = 0.0, []
    for seq in (1, 2):
        me.on_local_update(author, seq)
        assert pushed(me, now) == [3]
        me.carriers.on_sent(key_of(3), author, seq, now)
        for number in (2, 3, 4):
            state = peer_state({author: seq}, uplink=FAST if number == 3 else SLOW)
            me.on_state(key_of(number), state, now)
        me.next_actions(now)
        waits.append(me.carriers.next_wakeup - now)
        now = me.carriers.next_wakeup
        me.on_message(key_of(3), now)
        assert me.carriers.is_carried(key_of(5), author, seq)
        assert pushed(me, now) == [], "it knows of the update, and requests it"
        assert not me.carriers.is_carried(key_of(5), author, seq), "also from here"
    assert waits[1] == pytest.approx(1.5 * waits[0])


def test_machine_that_ends_withholds_nothing():
    me, author = peers_with({2: SLOW, 3: FAST, 4: SLOW}), author_of(1)
    me.on_local_update(author, 1)
    assert pushed(me, 1.0) == [3]
    me.set_progress(0.0, complete=True)
    assert {2, 4} <= set(pushed(me, 2.0)) and not me.carriers.withheld(key_of(2))


@pytest.mark.parametrize("source", [3, 4])
def test_others_updates_are_only_announced_next_to_a_carrier(source):
    me, author = peers_with({2: SLOW, 3: FAST, 4: SLOW}), author_of(9)
    for seq in (1, 2):
        me.on_author(key_of(source), author)
        me.on_update(key_of(source), author, seq, 1.0 * seq)
        me.next_actions(1.0 * seq)
        me.on_local_update(author, seq)
        assert 2 not in pushed(me, 2.0 * seq) and stated(me, 2, 2.0 * seq)[author] == seq
        me.on_request(key_of(2), author)  # one request asks for one update


def test_carrier_that_is_silent_carries_nothing():
    me = peers_with({2: SLOW, 3: FAST, 4: SLOW})
    me.next_actions(0.0)
    assert me.has_carrier
    me.next_actions(60.0)
    assert not me.has_carrier
    me.on_message(key_of(3), 60.0)
    me.next_actions(60.0)
    assert me.has_carrier


def test_machine_that_relays_nothing_pushes_its_own_updates_only():
    me = Gossip(key_of(1), 0, relays=False)
    me.start({}, {}, 0.0)
    for number in (2, 3):
        me.on_connected(key_of(number), 0.0, Meeting())
        me.on_state(key_of(number), peer_state({}), 0.0)
    me.on_author(key_of(2), author_of(2))
    me.on_update(key_of(2), author_of(2), 1, 1.0)
    me.on_local_update(author_of(2), 1)
    me.on_local_update(author_of(1), 1)
    actions = me.next_actions(5.0)
    pushes = [a for a in actions if isinstance(a, g.PushUpdate)]
    assert {push.author for push in pushes} == {author_of(1)}
    assert me.build_state(key_of(3), 5.0).uplink == 0.0


def test_missing_updates_are_requested_from_carriers_first():
    author = author_of(9)
    for uplinks, expected in (({2: SLOW, 3: FAST}, 3), ({2: 0.0, 3: None}, 3), ({2: 0.0}, 2)):
        me = peers_with(uplinks)
        me.next_actions(0.0)
        for number, uplink in uplinks.items():
            me.on_author(key_of(number), author)
            me.on_state(key_of(number), peer_state({author: 1}, uplink=uplink), 1.0)
        me.next_actions(1.0)
        asked = [a.to for a in me.next_actions(60.0) if isinstance(a, g.RequestUpdates)]
        assert asked == [key_of(expected)]


# ---- what a peer states


@pytest.mark.parametrize("uplink", [-1.0, float("nan"), float("inf"), 1.01 * 100e9 / 8, "fast", []])
def test_impossible_uplink_is_refused(uplink):
    with pytest.raises(ValidationError):
        PeerState(vector={}, rate=1.0, uplink=uplink)


def test_state_of_a_version_without_uplinks_is_accepted():
    assert PeerState.model_validate_json('{"vector": {}, "rate": 1.0}').uplink is None


def test_stated_uplink_is_the_lower_of_limit_and_measurement():
    me = connected_gossip(1, 2)
    assert me.build_state(key_of(2), 0.0).uplink is None
    me.set_uplink(math.inf, 2e6)
    assert me.build_state(key_of(2), 0.0).uplink == 2e6
    me.set_uplink(1e6, 2e6)
    assert me.build_state(key_of(2), 0.0).uplink == 1e6
    me.set_uplink(1e15)
    assert PeerState(**me.build_state(key_of(2), 0.0).model_dump()).uplink == 100e9 / 8


def test_carrier_that_reaches_some_counts_for_less_until_it_reaches_all():
    me, author = peers_with({2: SLOW, 3: 100 * SLOW, 4: SLOW, 5: SLOW}), author_of(1)
    now, seq = 0.0, 0

    def carry(reported: list[int], seconds: float) -> float:
        nonlocal now, seq
        seq += 1
        me.on_local_update(author, seq)
        assert pushed(me, now) == [3]
        me.carriers.on_sent(key_of(3), author, seq, now)
        me.next_actions(now)
        for number in (3, *reported):
            me.on_state(
                key_of(number),
                peer_state({author: seq}, uplink=100 * SLOW if number == 3 else SLOW),
                now,
            )
        now += seconds
        me.on_message(key_of(3), now)
        me.next_actions(now)
        return me.carrier_rate / SLOW

    assert carry([2, 4, 5], 1.0) == 100
    assert carry([2, 4], 200.0) == pytest.approx(100 * 2 / 3)
    assert carry([2, 4, 5], 1.0) == pytest.approx(100 * 2 / 3 * 1.25)


def test_carriers_without_an_update_wake_nobody():
    assert Carriers().next_wakeup == math.inf
