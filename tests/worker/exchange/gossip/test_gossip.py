"""Tests of gossip, membership and requests as pure state machines, in simulated time."""

import itertools
import math
import time

import hypothesis.strategies as st
import pytest
from helpers.network.simulated_swarm import (
    Simulation,
    author_of,
    connected_gossip,
    key_of,
    peer_state,
    update_requests,
)
from hypothesis import given, settings

from barnraise.exchange.gossip import authors, requests
from barnraise.exchange.gossip import gossip as g
from barnraise.exchange.gossip.agreement import count_each_alike
from barnraise.exchange.gossip.gossip import Gossip
from barnraise.exchange.gossip.state_intervals import STATE_INTERVALS
from barnraise.peering.limits.timeouts import TIMEOUTS
from barnraise.peering.membership.membership import Meeting
from barnraise.protocol.messages import PeerState
from barnraise.protocol.table_sizes import FEW


def pushes(actions: list[g.Action]) -> list[str]:
    return [action.to for action in actions if isinstance(action, g.PushUpdate)]


# ---- how updates spread


def test_membership_single_contact_leads_to_all_peers():
    simulation = Simulation(8)
    simulation.introduce_to_hub()
    simulation.run(60)
    assert simulation.degrees == [7] * 8


def test_gossip_settled_swarm_sends_each_update_once_without_requests():
    simulation = Simulation(6)
    simulation.introduce_to_hub()
    simulation.run(60)
    for number in itertools.chain(*[range(6)] * 4):  # redundant links become lazy
        simulation.publish(number)
        simulation.run(5)
    simulation.sent |= {"push": 0, "request": 0}
    for number in range(6):
        simulation.publish(number)
        assert simulation.run(10, until=lambda: simulation.has_converged)
        simulation.run(5)
    assert simulation.sent["push"] == 6 * 5 and simulation.sent["request"] == 0


def test_gossip_peer_that_missed_updates_catches_up():
    simulation = Simulation(3)
    simulation.introduce_to_hub()
    simulation.run(10)
    simulation.partition({2: 1})
    for _ in range(200):
        simulation.publish(0)
        simulation.run(0.1)
    simulation.partition({})
    assert simulation.run(60, until=lambda: simulation.has_converged)
    assert simulation.machines[key_of(2)].vector == {author_of(0): 200}
    assert simulation.machines[key_of(2)].updates_behind == 0


def test_gossip_chain_of_peers_delivers_updates_to_all():
    simulation = Simulation(5)
    for number in range(4):  # a chain without further links
        simulation.connect(key_of(number), key_of(number + 1))
    for machine in simulation.machines.values():
        machine.membership.passive.clear()
    simulation.publish(0)
    simulation.publish(4)
    assert simulation.run(20, until=lambda: simulation.has_converged)


def test_gossip_duplicate_makes_link_lazy_and_request_makes_it_eager():
    me, author = connected_gossip(1, 2, 3), author_of(9)
    me.on_update(key_of(2), author, 1, 1.0)
    me.on_update(
        key_of(3), author, 1, 1.1
    )  # the second push of an update that is already in flight
    me.next_actions(1.1)
    state = me.build_state(key_of(3), 1.1)
    assert state.declined == {author: 1}
    assert not me.links[key_of(3)].eager and me.links[key_of(2)].eager
    assert me.build_state(key_of(2), 1.1).declined == {}, "the first sender continues"

    you = connected_gossip(3, 1)
    you.on_local_update(author, 1)
    assert pushes(you.next_actions(1.1)) == [key_of(1)]
    you.on_state(key_of(1), state, 1.2)
    you.on_local_update(author, 2)
    assert pushes(you.next_actions(1.2)) == [], "new updates are only announced over a lazy link"
    assert author in you.build_state(key_of(1), 1.5).vector
    you.on_request(key_of(1), author)
    you.on_local_update(author, 3)
    assert pushes(you.next_actions(1.3)) == [key_of(1)]


def test_gossip_liar_that_pushes_to_all_does_not_delay_honest_updates():
    """Let a machine push its updates to everybody, declined or not, and relay nothing."""
    simulation = Simulation(4)
    simulation.introduce_to_hub()
    simulation.run(60)
    liar = simulation.machines[key_of(3)]
    decide = liar.next_actions
    liar.next_actions = lambda now: [
        action
        for action in decide(now)
        if not isinstance(action, g.PushUpdate) or action.author == author_of(3)
    ]
    honest = [simulation.machines[key_of(number)] for number in range(3)]
    late = 0
    for turn in range(30):
        for _ in range(4):
            for link in liar.links.values():
                link.lazy_keys, link.declined, link.eager = {}, {}, True
            simulation.publish(3)
            simulation.run(0.5)
        author = author_of(turn % 3)
        simulation.publish(turn % 3)
        seq = simulation.machines[key_of(turn % 3)].vector[author]

        def has_arrived(author: str = author, seq: int = seq) -> bool:
            return all(machine.vector.get(author, 0) >= seq for machine in honest)

        late += not simulation.run(0.5, until=has_arrived)
    assert late <= 3, f"{late} of 30 honest updates waited for the next State"


def test_gossip_update_that_is_not_urgent_is_announced_and_not_pushed():
    me = connected_gossip(1, 2)
    me.on_state(key_of(2), peer_state({}), 0.0)
    me.next_actions(0.0)
    me.build_state(key_of(2), 0.0)
    me.on_local_update(author_of(3), 1, is_urgent=False)
    actions = me.next_actions(STATE_INTERVALS.shortest_seconds)
    assert not [action for action in actions if isinstance(action, g.PushUpdate)]
    assert g.SendState(key_of(2)) in actions
    assert me.build_state(key_of(2), STATE_INTERVALS.shortest_seconds).vector == {author_of(3): 1}


def test_gossip_declined_push_is_not_continued():
    me, author = connected_gossip(1, 2), author_of(1)
    me.on_local_update(author, 1)
    assert me.needs(key_of(2), author, 1)
    me.on_state(key_of(2), peer_state({}, declined={author: 1}, full=False), 1.0)
    assert not me.needs(key_of(2), author, 1)
    me.on_request(key_of(2), author)  # the peer that was sending it has stopped
    assert me.needs(key_of(2), author, 1)


def test_gossip_received_update_is_pushed_to_eager_links_except_source():
    me, author = connected_gossip(1, 2, 3, 4), author_of(9)
    me.links[key_of(4)].eager = False
    me.on_update(key_of(2), author, 1, 1.0)
    me.on_local_update(author, 1)
    assert pushes(me.next_actions(1.0)) == [key_of(3)]


# ---- the contents of States


def test_build_state_contains_changes_and_periodically_everything():
    me = connected_gossip(1, 2)
    for number in range(50):
        me.on_local_update(author_of(number), 1)
    first = me.build_state(key_of(2), 0.0)
    assert first.full and len(first.vector) == 50
    assert me.build_state(key_of(2), 0.1).vector == {}
    me.on_local_update(author_of(7), 2)
    me.on_pruned(author_of(7), 1)
    changes = me.build_state(key_of(2), 0.2)
    assert (changes.full, changes.vector, changes.pruned) == (
        False,
        {author_of(7): 2},
        {author_of(7): 1},
    )
    assert me.build_state(key_of(2), 2 * STATE_INTERVALS.full_seconds).full


def test_states_that_are_due_soon_are_sent_with_one_that_is_due():
    me = connected_gossip(1, 2, 3, 4)
    for number, link in enumerate(me.links.values()):
        link.has_news = False
        link.next_state_at = 10.0 + number
        link.next_peers_at = 100.0
    assert me.next_actions(9.9) == []
    sent = [action.to for action in me.next_actions(10.0) if isinstance(action, g.SendState)]
    assert sent == [key_of(2), key_of(3)]  # the third is due later than the slack


def count_states(uplink: float) -> int:
    """Count the States that a machine with three links sends in ten minutes without news."""
    me = connected_gossip(1, 2, 3, 4)
    me.set_uplink(uplink)
    sent = 0
    for second in range(600):
        for link in me.links.values():
            link.last_received_at = float(second)
        for action in me.next_actions(float(second)):
            if isinstance(action, g.SendState):
                me.build_state(action.to, float(second))
                sent += 1
    return sent


def test_states_use_little_of_an_uplink_that_is_limited_to_little():
    unlimited = count_states(math.inf)
    assert unlimited == pytest.approx(3 * 600 / STATE_INTERVALS.usual_seconds, rel=0.2)
    assert count_states(1e6) == pytest.approx(unlimited, rel=0.05)
    slow = 2500.0
    expected = g.STATE_SHARE * slow * 600
    assert count_states(slow) * g.STATE_BYTES == pytest.approx(expected, rel=0.25)
    slowest = count_states(1.0)
    assert slowest == pytest.approx(3 * 600 / STATE_INTERVALS.longest_seconds, rel=0.25)


def test_gossip_remembers_which_peers_had_ended_their_part():
    me = connected_gossip(1, 2, 3)
    me.on_state(key_of(2), peer_state({}, complete=True), 0.0)
    for number in (2, 3):
        me.on_disconnected(key_of(number), 1.0)
    assert [*me.ended] == [key_of(2)]
    me.on_connected(key_of(2), 2.0)
    assert not me.ended
    me.on_left(key_of(2))
    me.on_disconnected(key_of(2), 3.0)
    assert [*me.ended] == [key_of(2)], "its program has ended"


def test_states_are_sent_before_a_peer_takes_the_link_for_dead():
    longest = 1.25 * STATE_INTERVALS.longest_seconds
    late = 0.75 * TIMEOUTS.peer_silence_seconds
    assert longest <= late, "a State may be late by seconds on a full line"


def test_state_calls_for_actions_only_if_it_brings_news():
    me = connected_gossip(1, 2)
    me.on_local_update(author_of(7), 2)
    assert not me.on_state(key_of(2), peer_state({author_of(7): 2}), 1.0)
    assert me.on_state(key_of(2), peer_state({author_of(7): 3}), 2.0)  # an update is missing
    me = connected_gossip(1, 2)
    assert me.on_state(key_of(2), peer_state({author_of(8): 1}), 1.0)  # an unknown author
    me.on_connected(key_of(3), 1.0)
    assert me.on_state(key_of(3), peer_state({}), 2.0)  # its first


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=60))
def test_build_state_sequence_conveys_the_whole_vector(steps):
    me, you = connected_gossip(1, 2), connected_gossip(2, 1)
    now = 0.0
    for number, sends_state in steps:
        now += 0.1
        author = author_of(number)
        me.on_local_update(author, me.vector.get(author, 0) + 1)
        if sends_state:
            you.on_state(key_of(1), me.build_state(key_of(2), now), now)
            for author in me.vector:
                you.on_author(key_of(1), author)
            assert you.links[key_of(1)].vector == me.vector


def test_build_state_too_many_authors_sends_parts_until_all_are_sent():
    me, you = Gossip(key_of(1), 1), connected_gossip(2, 1)
    me.on_connected(key_of(2), 0.0)
    me.start({author_of(n): n for n in range(1, g.MAX_STATE_AUTHORS + 100)}, {}, 0.0)
    for author in me.vector:
        you.on_author(key_of(1), author)
    for n in range(40):
        state = me.build_state(key_of(2), n * 2 * STATE_INTERVALS.full_seconds)
        assert len(state.vector) == g.MAX_STATE_AUTHORS and not state.full
        you.on_state(key_of(1), state, 0.0)
    assert you.links[key_of(1)].vector == me.vector


def test_flood_of_declines_is_bounded_and_makes_the_link_lazy():
    me = connected_gossip(1, 2)
    me.start({author_of(n): 1 for n in range(300, 2000)}, {}, 0.0)
    declined = dict.fromkeys(me.vector, 1)
    state = PeerState.model_construct(vector={}, full=False, declined=declined, rate=1.0)
    me.on_state(key_of(2), state, 0.1)
    link = me.links[key_of(2)]
    assert len(link.declined) == len(link.lazy_keys) == g.MAX_DECLINED
    first, last = min(declined), max(declined)
    assert not link.is_eager_for(first) and link.is_eager_for(last)


# ---- which authors exist


def probes(actions: list[g.Action]) -> list[g.ProbeAuthor]:
    return [action for action in actions if isinstance(action, g.ProbeAuthor)]


def phantoms(count: int, part: int = 0) -> PeerState:
    """Create a State that names authors who do not exist."""
    many = {author_of(n, life=part + 1): 1 << 40 for n in range(count)}
    gone = dict.fromkeys(many, (1 << 40) - 1)
    return PeerState.model_construct(vector=many, pruned=gone, full=False, declined={}, rate=1.0)


def test_phantom_authors_of_one_liar_leave_a_bounded_counter():
    """Let a link name 50,000 authors that do not exist, as in a flood of States."""
    me = connected_gossip(1, 2, 3)
    for part in range(50):
        me.on_state(key_of(2), phantoms(1000, part), 0.1)
    assert len(me.authors.claims_of(key_of(2))) <= FEW
    assert me.links[key_of(2)].vector == {} and me.links[key_of(2)].pruned == {}
    assert me.authors.ignored > 40_000
    now, started = 0.1, time.perf_counter()
    for _ in range(50):
        now += 0.02
        assert not update_requests(me.next_actions(now))
    assert time.perf_counter() - started < 2.0
    assert not me.unavailable_authors(now + 1000)
    assert me.updates_behind == 0


def test_phantom_authors_are_probed_a_few_at_a_time_and_then_refused():
    me = connected_gossip(1, 2)
    me.on_state(key_of(2), phantoms(100), 0.0)
    assert len(probes(me.next_actions(0.0))) == authors.MAX_PROBES
    assert not probes(me.next_actions(5.0))
    for step in range(1, 30):
        me.next_actions(step * authors.PROBE_SECONDS)
    assert me.authors.claims_of(key_of(2)) == {}
    me.on_state(key_of(2), phantoms(100), 290.0)
    assert me.authors.claims_of(key_of(2)) == {}, "its claims are refused for a while"


def test_honest_new_author_is_probed_and_then_requested():
    me, author = connected_gossip(1, 2), author_of(9)
    me.on_state(key_of(2), peer_state({author: 3}), 0.0)
    assert probes(me.next_actions(0.0)) == [g.ProbeAuthor(key_of(2), author, 3)]
    assert me.on_author(key_of(2), author), "its header answers the probe"
    assert not me.on_author(key_of(2), author)
    me.next_actions(0.1)
    requested = update_requests(me.next_actions(0.2 + requests.MIN_GRACE_SECONDS))
    assert requested == [g.RequestUpdates(key_of(2), author, 1, 3)]


def test_honest_new_author_becomes_known_beside_a_liars_phantoms():
    simulation = Simulation(3)
    simulation.introduce_to_hub()
    simulation.run(10)
    liar, honest, me = (key_of(n) for n in (0, 1, 2))
    for part in range(20):
        simulation.machines[me].on_state(liar, phantoms(1000, part), simulation.now)
    author = author_of(9)
    simulation.stored[honest][author] = {1}
    simulation.machines[honest].on_local_update(author, 1)
    assert simulation.run(20, until=lambda: simulation.machines[me].vector.get(author) == 1)


def test_authors_of_one_key_are_bounded():
    me = connected_gossip(1, 2)
    for life in range(1, 1000):
        me.on_author(key_of(2), author_of(9, life))
    known = [life for life in range(1, 1000) if me.is_known(author_of(9, life))]
    assert len(known) == authors.MAX_AUTHORS_PER_KEY


def test_false_numbers_of_a_known_author_do_not_make_one_overtaken():
    me, author = connected_gossip(1, 2, 3, 4), author_of(9)
    me.on_local_update(author, 5)
    for honest in (3, 4):
        me.on_state(key_of(honest), peer_state({author: 5}), 0.0)
    me.on_state(key_of(2), peer_state({author: 1 << 40}, pruned={author: 1 << 39}), 0.0)
    me.next_actions(0.0)
    me.next_actions(1.0)
    started = time.perf_counter()
    assert all(me.unavailable_authors(1000.0 + n / 1e6) == [author] for n in range(10_000))
    assert time.perf_counter() - started < 2.0, "a liar's claim costs no work at every event"
    assert not me.is_overtaken(1000.0, count_each_alike(me.volunteer_vectors()))
    assert me.agreed_vector() == {author: 5}


def test_own_volunteers_machine_decides_which_vector_is_agreed():
    me, author = Gossip(key_of(1), 0, "me"), author_of(9)
    for number, volunteer in ((2, "me"), (3, "liar"), (4, "liar 2")):
        me.on_connected(key_of(number), 0.0, Meeting(volunteer=volunteer))
        me.on_author(key_of(number), author)
        me.on_state(key_of(number), peer_state({author: 2 if volunteer == "me" else 9}), 0.0)
    assert me.agreed_vector() == {author: 2}


def test_truly_overtaken_machine_is_not_held_back_by_a_liar():
    """A link that claims every update and sends none does not keep a machine from catching up."""
    me, author = connected_gossip(1, 2, 3, 4), author_of(9)
    me.on_author(key_of(3), author)
    for honest in (3, 4):
        me.on_state(key_of(honest), peer_state({author: 50}, pruned={author: 40}), 0.0)
    me.on_state(key_of(2), peer_state({author: 50}), 0.0)
    now, votes = 0.0, count_each_alike(me.volunteer_vectors())
    while now < 60 and not me.is_overtaken(now, votes):
        for link in me.links:
            me.on_message(link, now)
        me.next_actions(now)
        now += 0.5
    assert now < 40 and me.agreed_vector() == {author: 50}


def test_is_converged_requires_complete_peers_with_equal_vectors():
    me = Gossip(key_of(1), 0)
    assert me.is_converged
    me.on_connected(key_of(2), 0.0)
    assert not me.is_converged, "the peer has sent no vector yet"
    me.on_local_update(author_of(1), 3)
    me.on_state(key_of(2), peer_state({author_of(1): 3}), 0.0)
    assert not me.is_converged
    me.on_state(key_of(2), peer_state({author_of(1): 2}, complete=True), 0.0)
    assert not me.is_converged
    me.on_state(key_of(2), peer_state({author_of(1): 3}, complete=True), 0.0)
    assert me.is_converged


def test_next_wakeup_never_causes_a_busy_loop():
    simulation = Simulation(4, loss=0.3)
    simulation.introduce_to_hub()
    for _ in range(30):
        simulation.publish(0)
        simulation.run(1)
    assert simulation.wakeups < 4 * 30 * 12
