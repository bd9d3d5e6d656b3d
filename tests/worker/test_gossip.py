"""Gossip as a pure state machine: loss, partitions, churn and many peers, in simulated time, without a socket."""

import heapq
import itertools
import random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from barnraise.exchange import gossip as g
from barnraise.exchange.gossip import Gossip
from barnraise.exchange.pace import QUIET, Fellow, Pace, weight
from barnraise.wire import Peer


def key_of(number: int) -> str:
    return f"{number:064x}"


def author_of(number: int, life: int = 1) -> str:
    return f"{key_of(number)}.{life:016x}"


class Simulation:
    """Machines that do what their gossip says over a network of our making. Messages may be lost; links are honest."""

    def __init__(self, count: int, seed: int = 0, loss: float = 0.0, delay: float = 0.05):
        self.random = random.Random(seed)
        self.loss, self.delay, self.now = loss, delay, 0.0
        self.machines = {key_of(n): Gossip(key_of(n), seed + n) for n in range(count)}
        self.held: dict[str, dict[str, set[int]]] = {key: {} for key in self.machines}  # updates that are here
        self.islands: dict[str, int] = {}
        self.sent = {kind: 0 for kind in ("push", "state", "ask", "dial")}
        self._queue: list = []
        self._order = itertools.count()
        for key, machine in self.machines.items():
            machine.asking = True
            self.later(0.0, self.look, key)

    def later(self, delay: float, call, *values) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._order), call, values))

    def run(self, seconds: float, until=lambda: False) -> bool:
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            self.now, _, call, values = heapq.heappop(self._queue)
            call(*values)
            if until():
                return True
        self.now = end
        return until()

    def reachable(self, one: str, other: str) -> bool:
        return other in self.machines and self.islands.get(one, 0) == self.islands.get(other, 0)

    def post(self, source: str, target: str, call, *values) -> None:
        """A message over a standing link; lost with the link, or by chance."""
        if self.random.random() >= self.loss:
            self.later(self.delay, self._deliver, source, target, call, values)

    def _deliver(self, source, target, call, values) -> None:
        if target in self.machines and source in self.machines[target].links and self.reachable(source, target):
            self.machines[target].heard(source, self.now)
            call(*values)
            self.act(target)

    def look(self, key: str) -> None:
        if key in self.machines:
            self.act(key)
            wait = self.machines[key].next_at(self.now) - self.now
            self.later(max(0.02, wait), self.look, key)

    def act(self, key: str) -> None:
        me = self.machines[key]
        for action in me.act(self.now):
            match action:
                case g.Dial(peer):
                    self.sent["dial"] += 1
                    self.later(2 * self.delay, self.dialled, key, peer.key)
                case g.TellState(to):
                    self.sent["state"] += 1
                    self.post(key, to, self.tell_state, key, to, dict(me.vector))
                case g.TellPeers(to, peers):
                    self.post(key, to, self.tell_peers, to, list(peers))
                case g.PushUpdate(to, author, seq):
                    self.push(key, to, author, seq)
                case g.AskFor(to, author, first, last):
                    self.sent["ask"] += 1
                    self.post(key, to, self.answer, to, key, author, first, last)
                case g.Drop(peer):
                    self.cut(key, peer)

    def tell_state(self, source, to, vector) -> None:
        self.machines[to].told_state(source, vector, 1.0, False, self.now)

    def tell_peers(self, to, peers) -> None:
        self.machines[to].introduce(peers, self.now, vouched=False)

    def push(self, source, to, author, seq) -> None:
        self.sent["push"] += 1
        self.post(source, to, self.arrive, source, to, author, seq)

    def answer(self, me, to, author, first, last) -> None:
        for seq in range(first, min(last, self.machines[me].vector.get(author, 0)) + 1):
            self.push(me, to, author, seq)

    def arrive(self, source, key, author, seq) -> None:
        me = self.machines[key]
        me.arriving(source, author, seq, self.now)
        self.held[key].setdefault(author, set()).add(seq)
        if seq > me.vector.get(author, 0) + 1:
            me.waiting(author, seq)
        while (following := me.vector.get(author, 0) + 1) in self.held[key][author]:
            me.holds(author, following)

    def dialled(self, one: str, other: str) -> None:
        if one in self.machines and self.reachable(one, other):
            for me, you in ((one, other), (other, one)):
                self.machines[me].introduce([Peer(key=you, addresses=["x:1"])], self.now)
                self.machines[me].linked(you, self.now)
        elif one in self.machines:
            self.machines[one].dial_failed(other, self.now)

    def cut(self, one: str, other: str) -> None:
        for me, you in ((one, other), (other, one)):
            if me in self.machines:
                self.machines[me].unlinked(you, self.now)

    def publish(self, number: int) -> None:
        key, author = key_of(number), author_of(number)
        seq = self.machines[key].vector.get(author, 0) + 1
        self.held[key].setdefault(author, set()).add(seq)
        self.machines[key].holds(author, seq, own=True)
        self.act(key)

    def partition(self, islands: dict[int, int]) -> None:
        self.islands = {key_of(n): island for n, island in islands.items()}
        for one, other in itertools.combinations(self.machines, 2):
            if not self.reachable(one, other) and other in self.machines[one].links:
                self.cut(one, other)

    def introduce_all(self, hub: int = 0) -> None:
        """Everybody knows one machine; the rest they learn from each other."""
        for machine in self.machines.values():
            machine.introduce([Peer(key=key_of(hub), addresses=["x:1"])], self.now)

    @property
    def agreed(self) -> bool:
        vectors = [machine.vector for machine in self.machines.values()]
        return all(vector == vectors[0] for vector in vectors) and bool(vectors[0])


def test_machines_that_know_only_one_learn_of_all_the_others():
    simulation = Simulation(8)
    simulation.introduce_all()
    simulation.run(60)
    assert all(len(machine.links) == 7 for machine in simulation.machines.values())


def test_an_update_is_pushed_once_to_each_peer_and_asked_for_by_nobody_when_nothing_is_lost():
    simulation = Simulation(6)
    simulation.introduce_all()
    simulation.run(60)
    for number in range(6):
        simulation.publish(number)
    assert simulation.run(10, until=lambda: simulation.agreed)
    simulation.run(10)
    assert simulation.sent["push"] == 6 * 5 and simulation.sent["ask"] == 0


def test_a_peer_that_missed_updates_catches_up():
    simulation = Simulation(3)
    simulation.introduce_all()
    simulation.run(10)
    simulation.partition({2: 1})
    for _ in range(200):
        simulation.publish(0)
        simulation.run(0.1)
    simulation.partition({})
    assert simulation.run(60, until=lambda: simulation.agreed)
    assert simulation.machines[key_of(2)].vector == {author_of(0): 200}
    assert simulation.machines[key_of(2)].behind == 0


def test_an_update_reaches_machines_that_know_its_author_only_through_third_peers():
    simulation = Simulation(5)
    for number in range(4):  # a chain, and no more links than that
        simulation.dialled(key_of(number), key_of(number + 1))
    for machine in simulation.machines.values():
        machine.known.clear()
    simulation.publish(0)
    simulation.publish(4)
    assert simulation.run(20, until=lambda: simulation.agreed)


def test_a_peer_that_promises_what_it_does_not_have_is_not_waited_for():
    simulation = Simulation(3)
    simulation.introduce_all()
    simulation.run(10)
    liar, honest, me = (key_of(n) for n in (0, 1, 2))
    author = author_of(9)
    simulation.held[honest][author] = {1}
    simulation.machines[honest].holds(author, 1)
    simulation.machines[me].told_state(liar, {author: 1, author_of(8): 50}, 1.0, False, simulation.now)
    assert simulation.run(40, until=lambda: simulation.machines[me].vector.get(author) == 1)


def test_nothing_is_asked_for_while_a_snapshot_is_being_fetched():
    me = Gossip(key_of(1), 0)
    me.linked(key_of(2), 0.0)
    me.told_state(key_of(2), {author_of(3): 5}, 1.0, False, 0.0)
    assert not [a for a in me.act(5.0) if isinstance(a, g.AskFor)]
    me.asking = True
    assert [a for a in me.act(5.0) if isinstance(a, g.AskFor)] == [g.AskFor(key_of(2), author_of(3), 1, 5)]
    assert not [a for a in me.act(5.1) if isinstance(a, g.AskFor)], "it is under way"


def test_an_author_that_is_linked_gets_a_moment_to_push_before_it_is_asked():
    me = Gossip(key_of(1), 0)
    me.asking = True
    me.linked(key_of(2), 0.0)
    me.told_state(key_of(2), {author_of(2): 1}, 1.0, False, 0.0)
    assert not [a for a in me.act(0.0) if isinstance(a, g.AskFor)]
    assert me.next_at(0.1) <= g.GRACE
    assert [a for a in me.act(g.GRACE + 0.01) if isinstance(a, g.AskFor)]


def test_a_silent_peer_is_dropped_and_a_gone_one_is_dialled_again_ever_more_rarely():
    me = Gossip(key_of(1), 0)
    me.introduce([Peer(key=key_of(2), addresses=["x:1"])], 0.0)
    me.linked(key_of(2), 0.0)
    assert g.Drop in {type(action) for action in me.act(g.SILENCE)}
    me.unlinked(key_of(2), g.SILENCE)
    now, waits = g.SILENCE, []
    for _ in range(10):
        began = now
        while not any(isinstance(action, g.Dial) for action in me.act(now)):
            now += 0.1
        waits.append(now - began)
        me.dial_failed(key_of(2), now)
    assert waits[0] < 2 and waits[4] > waits[0] and max(waits) <= g.REDIAL_MOST * 1.3


def test_hearsay_neither_overrides_what_a_peer_says_of_itself_nor_fills_the_memory():
    me = Gossip(key_of(1), 0)
    me.introduce([Peer(key=key_of(2), addresses=["true:1"])], 0.0)
    me.introduce([Peer(key=key_of(2), addresses=["false:1"])], 1.0, vouched=False)
    assert me.known[key_of(2)].addresses == ("true:1",)
    for number in range(3, 3 * g.MAX_KNOWN):
        me.introduce([Peer(key=key_of(number), addresses=["x:1"])], 1.0, vouched=False)
    assert len(me.known) == g.MAX_KNOWN
    assert sum(isinstance(action, g.Dial) for action in me.act(10.0)) <= g.MAX_DIALLED


def test_whom_a_coordinator_names_is_known_and_dialled_however_much_hearsay_there_is():
    gossip = g.Gossip("0" * 64, seed=1)
    gossip.introduce([Peer(key=f"{n:064x}", addresses=["a:1"]) for n in range(1, g.MAX_KNOWN + 50)], 0.0, vouched=False)
    assert len(gossip.known) == g.MAX_KNOWN
    gossip.introduce([Peer(key="f" * 64, addresses=["a:1"])], 0.0)
    assert "f" * 64 in gossip.known and len(gossip.known) == g.MAX_KNOWN
    first = next(action for action in gossip.act(10.0) if isinstance(action, g.Dial))
    assert first.peer.key == "f" * 64


def test_a_state_of_too_many_authors_tells_ever_another_part():
    gossip = g.Gossip("0" * 64, seed=1)
    gossip.vector = {str(n): n for n in range(g.MAX_TOLD + 100)}
    told = [gossip.told() for _ in range(20)]
    assert {len(each) for each in told} == {g.MAX_TOLD}
    assert {author for each in told for author in each} == set(gossip.vector)


def test_a_machine_does_not_dial_itself():
    me = Gossip(key_of(1), 0)
    me.introduce([Peer(key=key_of(1), addresses=["x:1"])], 0.0)
    assert not me.known


def test_it_never_asks_to_be_looked_at_again_without_pause():
    simulation = Simulation(4, loss=0.3)
    simulation.introduce_all()
    looks = 0
    original = simulation.look

    def counted(key: str) -> None:
        nonlocal looks
        looks += 1
        original(key)

    simulation.look = counted
    simulation._queue = [(at, n, counted if call == original else call, v) for at, n, call, v in simulation._queue]
    for _ in range(30):
        simulation.publish(0)
        simulation.run(1)
    assert looks < 4 * 30 * 12


def test_settled_means_everybody_is_complete_with_the_same_updates():
    me = Gossip(key_of(1), 0)
    assert me.settled
    me.linked(key_of(2), 0.0)
    assert not me.settled, "it has not said where it is"
    me.holds(author_of(1), 3)
    me.told_state(key_of(2), {author_of(1): 3}, 0.0, False, 0.0)
    assert not me.settled
    me.told_state(key_of(2), {author_of(1): 2}, 0.0, True, 0.0)
    assert not me.settled
    me.told_state(key_of(2), {author_of(1): 3}, 0.0, True, 0.0)
    assert me.settled


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 10**6), st.floats(0, 0.4), st.integers(2, 9))
def test_with_loss_partitions_and_churn_all_who_are_left_agree_in_the_end(seed, loss, count):
    simulation = Simulation(count, seed, loss)
    simulation.introduce_all()
    chance = random.Random(seed)
    for _ in range(25):
        simulation.run(chance.random() * 3)
        event = chance.random()
        alive = [int(key, 16) for key in simulation.machines]
        if event < 0.6:
            simulation.publish(chance.choice(alive))
        elif event < 0.8:
            simulation.partition({number: chance.randrange(2) for number in alive})
        elif event < 0.9:
            simulation.partition({})
        else:  # a machine loses its memory of connections, not its ledger, as one that is restarted does
            number = chance.choice(alive)
            old, fresh = simulation.machines[key_of(number)], Gossip(key_of(number), seed + 1)
            for other in list(old.links):
                simulation.cut(key_of(number), other)
            fresh.vector, fresh.asking = dict(old.vector), True
            fresh.introduce([Peer(key=key_of(0), addresses=["x:1"])], simulation.now)
            simulation.machines[key_of(number)] = fresh
    simulation.partition({})
    simulation.publish(0)
    assert simulation.run(400, until=lambda: simulation.agreed)


def test_two_hundred_peers_agree_with_a_bounded_number_of_links():
    simulation = Simulation(200, seed=5)
    for number, machine in enumerate(simulation.machines.values()):  # as a coordinator would: a few random hints
        hints = simulation.random.sample(range(200), 5)
        machine.introduce([Peer(key=key_of(h), addresses=["x:1"]) for h in hints if h != number], 0.0)
    simulation.run(5)
    for number in (0, 77, 199):
        simulation.publish(number)
    assert simulation.run(30, until=lambda: simulation.agreed)


# ---- pace


def test_weights_of_machines_that_train_at_once_add_up_to_one():
    rates = [100.0, 300.0, 50.0]
    total = sum(weight(r, [Fellow(o, 0.0) for o in rates if o is not r], 1e6) for r in rates)
    assert total == pytest.approx(1.0)
    assert weight(100.0, [], 0.0) == 1.0


def test_a_peer_that_has_announced_nothing_counts_as_our_equal_for_a_while_only():
    fellow = [Fellow(0.0, since=10.0)]
    assert weight(100.0, fellow, 11.0) == 0.5
    assert weight(100.0, fellow, 10.0 + QUIET) == 1.0


def test_the_ledger_corrects_what_a_peer_says_of_itself_within_a_factor():
    pace = Pace()
    assert pace.rate(100.0) == 100.0
    pace.note(0.0, 1000)
    pace.note(10.0, 500)
    assert pace.rate(100.0) == 50.0
    pace.note(10.1, 10**9)
    assert pace.rate(100.0) == 400.0
    assert pace.rate(0.0) == 0.0
