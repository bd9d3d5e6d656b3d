"""Which missing update is requested from which peer, and when: alone, and as gossip's part."""

import copy
import heapq
import itertools
import math
from dataclasses import dataclass, field

import hypothesis.strategies as st
from helpers.effort import examples
from helpers.network.simulated_swarm import (
    author_of,
    connected_gossip,
    key_of,
    peer_state,
    update_requests,
)
from hypothesis import given, settings

from barnraise.exchange.gossip import gossip as g
from barnraise.exchange.gossip import requests
from barnraise.exchange.gossip.agreement import count_each_alike
from barnraise.exchange.gossip.gossip import Gossip
from barnraise.exchange.gossip.requests import ArrivedBytes, RequestScheduler

PEERS = st.sampled_from("abc")
AUTHORS = st.sampled_from("xyz")


# ---- the scheduler alone


@dataclass
class Source:
    """A linked peer as the scheduler sees it."""

    key: str
    eager: bool = True
    vector: dict[str, int] = field(default_factory=dict)
    pruned: dict[str, int] = field(default_factory=dict)
    uplink: float | None = None
    is_fast: bool = False


class RequestingMachine:
    """A machine that requests updates, and checks each request against what is open already."""

    def __init__(self) -> None:
        self.scheduler = RequestScheduler(0)
        self.links = {key: Source(key) for key in "abc"}
        self.ours: dict[str, int] = {}
        self.now = 0.0
        self.open: dict[tuple[str, int], tuple[str, float]] = {}  # → peer, and until when

    def announce(self, key: str, author: str, count: int) -> None:
        link = self.links[key]
        link.vector[author] = link.vector.get(author, 0) + count
        self.scheduler.on_vector(key, link.vector, self.ours)

    def prune(self, key: str, author: str, seq: int) -> None:
        self.links[key].pruned[author] = min(seq, self.links[key].vector.get(author, 0))

    def send_header(self, key: str, author: str, ahead: int) -> None:
        seq = self.ours.get(author, 0) + 1 + ahead % 4
        self.scheduler.on_header(key, author, seq, self.now)

    def send_piece(self, key: str, author: str, ahead: int) -> None:
        seq = self.ours.get(author, 0) + 1 + ahead % 4
        self.scheduler.on_payload_bytes(key, author, seq, self.now, ArrivedBytes(1))

    def fail(self, key: str, author: str, ahead: int) -> None:
        seq = self.ours.get(author, 0) + 1 + ahead % 4
        if self.scheduler.is_expected(key, author, seq):
            self.scheduler.on_failed(key, author, seq, self.now)
            self.open.pop((author, seq), None)

    def store(self, key: str, author: str, count: int) -> None:
        for _ in range(count):
            self.ours[author] = seq = self.ours.get(author, 0) + 1
            self.scheduler.on_stored(author, seq)
            self.open.pop((author, seq), None)

    def reconnect(self, key: str, author: str, _: int) -> None:
        self.scheduler.on_disconnected(key)
        self.open = {update: (peer, at) for update, (peer, at) in self.open.items() if peer != key}
        self.links[key] = Source(key)

    def wait(self, key: str, author: str, tenths: int) -> None:
        self.now += tenths / 10

    def look(self) -> list[tuple[str, str, int]]:
        """Choose requests, and check them."""
        before = set(self.scheduler.incoming)
        self.scheduler.expire(self.links, self.ours, self.now)
        still_incoming = set(self.scheduler.incoming)
        chosen = self.scheduler.choose_requests(self.links, self.ours, self.now)
        for key, author, seq in chosen:
            link, last = self.links[key], self.ours.get(author, 0)
            assert link.pruned.get(author, 0) < seq <= link.vector.get(author, 0)
            assert last < seq <= last + requests.UPDATE_WINDOW
            assert (author, seq) not in still_incoming, "it is on its way already"
            _, until = self.open.get((author, seq), ("", 0.0))
            assert self.now >= until, "requested from two peers at once"
            self.open[author, seq] = key, self.now + requests.RESPONSE_SECONDS
        assert len({(author, seq) for _, author, seq in chosen}) == len(chosen)
        for _, group in itertools.groupby(chosen, lambda request: request[1]):
            seqs = [seq for _, _, seq in group]
            assert seqs == sorted(seqs)
        for key in self.links:
            load = [update for update, on in self.scheduler.incoming.items() if on.source == key]
            grown = [update for update in load if update not in before]
            assert not grown or len(load) <= requests.UPDATE_WINDOW
        return chosen

    @property
    def wakeup(self) -> float:
        deadlines = [incoming.deadline for incoming in self.scheduler.incoming.values()]
        return min([self.scheduler.wake_at, *deadlines])


EVENTS = [
    *[RequestingMachine.announce, RequestingMachine.wait, RequestingMachine.wait] * 3,
    RequestingMachine.prune,
    RequestingMachine.send_header,
    RequestingMachine.send_piece,
    RequestingMachine.fail,
    RequestingMachine.store,
    RequestingMachine.reconnect,
]
STEPS = st.lists(
    st.tuples(st.sampled_from(EVENTS), PEERS, AUTHORS, st.integers(1, 90)), max_size=60
)


@settings(max_examples=examples(150, 2000), deadline=None)
@given(STEPS)
def test_requests_are_open_once_bounded_and_of_peers_that_have_them(steps):
    machine = RequestingMachine()
    for event, key, author, number in steps:
        event(machine, key, author, number)
        machine.look()
        assert machine.look() == [], "nothing has happened since"


@settings(max_examples=examples(150, 2000), deadline=None)
@given(STEPS, st.floats(0.0, 0.999))
def test_nothing_is_due_before_the_scheduler_wants_to_wake(steps, fraction):
    machine = RequestingMachine()
    for event, key, author, number in steps:
        event(machine, key, author, number)
        machine.look()
        early = copy.deepcopy(machine)
        early.now += fraction * min(early.wakeup - early.now, 100.0)
        assert early.look() == [], "due before the time at which the scheduler wants to wake"


@settings(max_examples=examples(100, 1000), deadline=None)
@given(
    st.dictionaries(AUTHORS, st.integers(1, 150), min_size=1),
    st.lists(st.integers(0, 160), max_size=4),
    st.lists(st.floats(0.01, 4.0), min_size=1, max_size=3),
)
def test_every_missing_update_comes_in_the_end_despite_silent_peers(totals, liars, delays):
    """Let liars claim updates and send nothing; one honest peer has all, others only some."""
    machine = RequestingMachine()
    machine.links = {f"liar{n}": Source(f"liar{n}") for n in range(len(liars))}
    for number, claimed in enumerate(liars):
        for author in totals:
            machine.announce(f"liar{number}", author, claimed)
    for number, _ in enumerate(delays):
        machine.links[f"honest{number}"] = Source(f"honest{number}")
        for author, total in totals.items():
            machine.announce(f"honest{number}", author, total // (number + 1))
    deliveries: list[tuple[float, str, int, str]] = []
    ends = {(author, total + 1) for author, total in totals.items()}
    missing = {(author, seq) for author, total in totals.items() for seq in range(1, total + 1)}
    while missing and machine.now < 3600:
        for key, author, seq in machine.look():
            if key.startswith("honest"):
                at = machine.now + delays[int(key[6:])]
                heapq.heappush(deliveries, (at, author, seq, key))
        machine.now = min([machine.wakeup, *(at for at, *_ in deliveries[:1])])
        assert machine.now < math.inf, f"nothing will be requested any longer: {missing}"
        while deliveries and deliveries[0][0] <= machine.now:
            _, author, seq, key = heapq.heappop(deliveries)
            machine.scheduler.on_header(key, author, seq, machine.now)
            machine.scheduler.on_buffered(author, seq)
            missing.discard((author, seq))
            while (author, machine.ours.get(author, 0) + 1) not in missing | ends:
                machine.store(key, author, 1)
    assert not missing


def test_only_source_has_a_whole_window_of_updates_to_send():
    machine = RequestingMachine()
    machine.announce("a", "x", 500)
    for _ in range(4):
        machine.look()
        machine.now += requests.MIN_GRACE_SECONDS
        machine.look()
        assert len(machine.scheduler.incoming) == requests.UPDATE_WINDOW
        machine.store("a", "x", requests.UPDATE_WINDOW // 2)


def test_slow_transfer_goes_on_once_the_other_source_may_be_asked(monkeypatch):
    monkeypatch.setattr(requests, "UPDATE_RETRY_SECONDS", 100.0)
    machine = RequestingMachine()
    machine.announce("b", "x", 1)
    machine.scheduler.on_failed("b", "x", 1, 0.0)
    for second in range(0, 70, 5):
        machine.now = float(second)
        machine.scheduler.on_payload_bytes("a", "x", 1, machine.now, ArrivedBytes(1, 1 << 20))
    machine.scheduler.incoming["x", 1].deadline = math.inf
    assert machine.look() == [] and machine.wakeup == 100.0
    machine.now = 100.0
    assert machine.look() == [] and machine.wakeup == 101.0, "the other one has its time, too"


# ---- as a part of gossip


def test_requests_stalled_update_is_requested_from_another_peer():
    me, author = connected_gossip(1, 2, 3), author_of(9)
    me.on_author(key_of(2), author)
    me.on_state(key_of(3), peer_state({author: 1}), 0.0)
    me.on_update(key_of(2), author, 1, 0.5)
    me.next_actions(0.5)
    me.requests.on_payload_bytes(key_of(2), author, 1, 4.0, ArrivedBytes(1))
    assert not update_requests(me.next_actions(4.0 + requests.STALL_SECONDS - 0.1))
    # The grace period starts when the transfer counts as stalled.
    assert update_requests(me.next_actions(4.0 + requests.STALL_SECONDS + 0.1)) == []
    later = 4.0 + requests.STALL_SECONDS + 0.2 + requests.MIN_GRACE_SECONDS
    assert update_requests(me.next_actions(later)) == [g.RequestUpdates(key_of(3), author, 1, 1)]


def test_trickle_of_no_new_bytes_holds_no_honest_update_up():
    """A liar sends a header first, and then pieces that are here already, for ever."""
    me, author = connected_gossip(1, 2, 3), author_of(9)
    liar, honest = key_of(2), key_of(3)
    me.on_author(liar, author)
    me.on_state(honest, peer_state({author: 1}), 0.0)
    requested: list[g.RequestUpdates] = []
    for tick in range(300):
        now = tick / 10
        me.on_update(liar, author, 1, now)
        me.requests.on_payload_bytes(liar, author, 1, now, ArrivedBytes(0, 1000))
        requested += update_requests(me.next_actions(now))
        if requested:
            break
    assert requested == [g.RequestUpdates(honest, author, 1, 1)]
    assert now < requests.STALL_SECONDS + requests.MAX_GRACE_SECONDS
    me.on_update(liar, author, 1, now)
    assert me.requests.is_expected(honest, author, 1), "the liar takes it over again"


def test_peer_that_answers_late_because_it_has_much_to_send_is_heard():
    """A slow line sends what was requested one after the other: later answers take longer."""
    me, author = connected_gossip(1, 2), author_of(9)
    me.on_author(key_of(2), author)
    me.on_state(key_of(2), peer_state({author: 1}), 0.0)
    me.next_actions(0.0)
    assert update_requests(me.next_actions(requests.MIN_GRACE_SECONDS))
    later = requests.MIN_GRACE_SECONDS + requests.RESPONSE_SECONDS + 1.0
    me.next_actions(later)
    me.on_update(key_of(2), author, 1, later)
    assert me.requests.is_expected(key_of(2), author, 1)
    assert not me.links[key_of(2)].to_decline


def test_slow_transfer_continues_from_another_peer_that_has_the_update():
    """A liar sends a byte of a large update every few seconds."""
    me, author = connected_gossip(1, 2, 3), author_of(9)
    liar, honest = key_of(2), key_of(3)
    me.on_author(liar, author)
    me.on_update(liar, author, 1, 0.0)

    def send_bytes(since: int, until: int) -> list[g.RequestUpdates]:
        requested: list[g.RequestUpdates] = []
        for now in range(since, until, 5):
            me.requests.on_payload_bytes(liar, author, 1, now, ArrivedBytes(1, 1_000_000))
            requested += update_requests(me.next_actions(now))
        return requested

    assert not send_bytes(0, 200), "nobody else has it"
    me.on_state(honest, peer_state({author: 1}), 200.0)
    me.next_actions(200.0)
    assert send_bytes(205, 220) == [g.RequestUpdates(honest, author, 1, 1)]
    assert me.links[liar].to_decline == {author: 1}, "it need not send the rest"


def test_requests_are_suspended_while_fetching_a_snapshot():
    me, author = Gossip(key_of(1), 0), author_of(3)
    me.on_connected(key_of(2), 0.0)
    me.on_author(key_of(2), author)
    me.on_state(key_of(2), peer_state({author: 5}), 0.0)
    assert not update_requests(me.next_actions(0.0)) and not update_requests(me.next_actions(5.0))
    me.start({}, {}, 5.0)
    me.next_actions(5.0)
    assert update_requests(me.next_actions(5.0 + requests.MIN_GRACE_SECONDS)) == [
        g.RequestUpdates(key_of(2), author, 1, 5)
    ]
    assert not update_requests(me.next_actions(5.1 + requests.MIN_GRACE_SECONDS)), (
        "the request is in flight"
    )


def test_requests_announced_update_waits_for_grace_longer_on_slow_tree():
    me, author = connected_gossip(1, 2, 3), author_of(9)
    me.on_author(key_of(2), author)
    me.on_state(key_of(2), peer_state({author: 1}), 0.0)
    assert not update_requests(me.next_actions(0.0))
    assert me.next_wakeup(0.1) <= requests.MIN_GRACE_SECONDS
    assert update_requests(me.next_actions(requests.MIN_GRACE_SECONDS + 0.01))
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
    assert update_requests(me.next_actions(1000.0 + requests.MAX_GRACE_SECONDS))


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

    def is_overtaken(now: float) -> bool:
        return me.is_overtaken(now, count_each_alike(me.volunteer_vectors()))

    assert not is_overtaken(100.0)
    me.on_disconnected(key_of(3), 100.0)
    me.next_actions(100.0)
    late = 100.0 + requests.SNAPSHOT_DELAY_SECONDS
    assert not is_overtaken(100.0) and is_overtaken(late)
    me.on_connected(key_of(4), 100.0)
    me.on_state(key_of(4), peer_state({author_of(4): 1}), 100.0)
    assert not is_overtaken(late), "one of two volunteers does not have it"
    me.on_state(key_of(4), peer_state({author: 7}), 100.0)
    assert is_overtaken(late)
    me.start({author: 9}, {author: 9}, 200.0)
    me.next_actions(200.0)
    assert not is_overtaken(300.0)
