"""Tests of the peers that a machine remembers, dials and leaves, in simulated time."""

import random
from dataclasses import dataclass

import pytest
from helpers.network.simulated_swarm import address_of, connected_gossip, key_of, number_of

from barnraise.exchange.gossip import gossip as g
from barnraise.exchange.gossip.gossip import Gossip
from barnraise.peering.limits.timeouts import TIMEOUTS
from barnraise.peering.membership import membership
from barnraise.peering.membership.link_targets import LINK_TARGETS
from barnraise.peering.membership.membership import Meeting, PartialView, PeerSource
from barnraise.protocol.messages import Peer


def peer(number: int, *addresses: str) -> Peer:
    return Peer(key=key_of(number), addresses=[*addresses] or [address_of(key_of(number))])


def met(number: int, volunteer: str = "", dialled: bool = False) -> Meeting:
    return Meeting(volunteer, dialled, address_of(key_of(number)))


def dials(me: Gossip, now: float) -> list[Peer]:
    return [action.peer for action in me.next_actions(now) if isinstance(action, g.Dial)]


def goodbyes(me: Gossip, now: float) -> set[str]:
    return {action.to for action in me.next_actions(now) if isinstance(action, g.SendGoodbye)}


# ---- dialling


def test_silent_peer_is_disconnected_and_redialled_with_backoff():
    me = Gossip(key_of(1), 0)
    me.membership.add_peers([peer(2)], 0.0)
    assert dials(me, 0.0)
    me.on_connected(key_of(2), 0.0, met(2, dialled=True))
    silence = TIMEOUTS.peer_silence_seconds
    assert g.CloseLink in {type(action) for action in me.next_actions(silence)}
    me.on_disconnected(key_of(2), silence)
    now, waits = silence, []
    for _ in range(10):
        started_at = now
        while not dials(me, now):
            now += 0.1
        waits.append(now - started_at)
        me.membership.on_dial_failed(key_of(2), now)
    assert waits[0] < 2 and waits[4] > waits[0] and max(waits) <= 30 * 1.3, (
        "a peer that was met before is tried every half a minute"
    )


def test_membership_does_not_dial_itself():
    me = Gossip(key_of(1), 0)
    me.membership.add_peers([peer(1)], 0.0)
    assert not me.membership.passive


def test_peer_after_goodbye_is_not_redialled_soon():
    me = connected_gossip(1, 2, *range(10, 18))
    for number in range(10, 18):
        me.links[key_of(number)].meeting = met(number, dialled=True)
    assert dials(me, 0.0) == []
    me.membership.add_peers([peer(2)], 0.0)
    me.on_goodbye(key_of(2), 1.0)
    me.on_disconnected(key_of(2), 1.0)
    assert not dials(me, 1.0 + membership.GOODBYE_REDIAL_SECONDS)
    assert dials(me, 1.0 + 2 * membership.GOODBYE_REDIAL_SECONDS)


def test_peer_after_goodbye_is_redialled_by_a_machine_that_carries():
    me = connected_gossip(1, *range(10, 18))
    for number in range(10, 18):
        me.links[key_of(number)].meeting = met(number, dialled=True)
    me.membership.add_peers([peer(2)], 0.0)
    me.on_connected(key_of(2), 0.0, met(2, dialled=True))
    me.on_goodbye(key_of(2), 1.0)
    me.on_disconnected(key_of(2), 1.0)
    assert not dials(me, 5.0)
    me.membership.set_carrying(True, 6.0)
    assert [dialled.key for dialled in dials(me, 8.0)] == [key_of(2)]


def test_dials_alternate_between_the_sources():
    me = Gossip(key_of(9999), 3)
    for source, numbers in (
        (PeerSource.GOSSIP, range(1, 61)),
        (PeerSource.FRIEND, range(100, 110)),
        (PeerSource.SITE, range(200, 210)),
    ):
        me.membership.add_peers([peer(n) for n in numbers], 0.0, source)
    dialled = [number_of(chosen.key) // 100 for chosen in dials(me, 10.0)]
    assert sorted(dialled.count(source) for source in (0, 1, 2)) == [2, 3, 3]


def test_hearsay_of_one_reporter_gets_one_share_of_the_dials():
    me = Gossip(key_of(9999), 3)
    me.membership.add_peers([peer(n) for n in range(1, 61)], 0.0, PeerSource.GOSSIP, "liar")
    for n in range(3):
        me.membership.add_peers([peer(500 + n)], 0.0, PeerSource.GOSSIP, f"reporter {n}")
    numbers = {number_of(chosen.key) for chosen in dials(me, 10.0)}
    assert {500, 501, 502} <= numbers


def test_peer_that_answers_elsewhere_is_not_dialled_at_what_it_claims():
    me = Gossip(key_of(1), 0)
    claimed = ("203.0.113.7:1", "10.0.2.1:9", "198.51.100.1:53")
    me.on_connected(key_of(2), 0.0, Meeting("", False, "10.0.2.1:1", claimed))
    known = me.membership.passive[key_of(2)]
    assert known.addresses == ("10.0.2.1:1", "10.0.2.1:9"), "only the host where it was met"
    me.on_connected(key_of(3), 0.0, met(3))
    (shared,) = me.membership.peers_to_share(key_of(3), me.links)
    assert shared.addresses == ["10.0.2.1:1"]


@pytest.mark.integration
def test_swarm_is_no_udp_cannon_at_one_address_and_network():
    """A site and a liar name a victim's addresses for hundreds of keys that do not exist."""
    me = Gossip(key_of(9999), 0)
    sent: dict[str, int] = {}
    now = 0.0
    while now < 3600:
        if now % 60 == 0:
            victims = [f"203.0.113.{n}:{now % 6000:.0f}" for n in range(1, 9)]
            named = [peer(int(now) * 100 + n, *victims) for n in range(1, 40)]
            me.membership.add_peers(named, now, PeerSource.SITE)
            same = [peer(9_000_000 + n, "203.0.113.1:53") for n in range(40)]
            me.membership.add_peers(same, now, PeerSource.GOSSIP, "liar")
        for chosen in dials(me, now):
            assert len(chosen.addresses) <= 3
            for address in chosen.addresses:
                sent[address] = sent.get(address, 0) + 1
            me.membership.on_dial_failed(chosen.key, now)
        now += 1.0
    per_host: dict[str, int] = {}
    for address, count in sent.items():
        host = address.rpartition(":")[0]
        per_host[host] = per_host.get(host, 0) + count
    dial_bytes = 12_000  # ten packets of 1,200 bytes
    assert max(per_host.values()) * dial_bytes / 3600 < 500, "bytes a second to one host"
    assert sum(sent.values()) * dial_bytes / 3600 < 1500, "bytes a second to one network"
    assert sent["203.0.113.1:53"] <= 14


def test_peer_that_the_site_names_is_forgotten_when_it_never_answers():
    me = Gossip(key_of(9999), 0)
    me.membership.add_peers([peer(2)], 0.0)
    for now in range(2000):
        for chosen in dials(me, float(now)):
            me.membership.on_dial_failed(chosen.key, float(now))
    assert key_of(2) not in me.membership.passive


def test_addresses_of_a_friend_are_tried_again_after_an_outage():
    me = Gossip(key_of(9999), 0)
    me.membership.add_peers([peer(2)], 0.0)
    assert dials(me, 2.0)
    me.on_connected(key_of(2), 2.0, met(2, dialled=True))
    me.on_disconnected(key_of(2), 2.0)
    now = 2.0
    while now < 7200:  # this machine's line is down for two hours
        for chosen in dials(me, now):
            me.membership.on_dial_failed(chosen.key, now)
        now += 1.0
    tried_at = next(now + n for n in range(100) if dials(me, now + n))
    assert tried_at - now < 60


# ---- the passive view


def test_hearsay_overrides_nothing_and_is_bounded_by_reporter_and_in_all():
    view = PartialView(key_of(1), 0)
    view.add_peers([peer(2, "10.0.0.1:1")], 0.0)
    view.add_peers([peer(2, "10.0.0.2:1")], 1.0, PeerSource.GOSSIP, "liar")
    assert view.passive[key_of(2)].addresses == ("10.0.0.1:1",)
    view.add_peers([peer(n) for n in range(3, 2000)], 1.0, PeerSource.GOSSIP, "liar")
    assert len(view.passive) == 1 + membership.MAX_REPORTED
    for volunteer in range(20):
        reported = [peer(10_000 + 100 * volunteer + n) for n in range(100)]
        view.add_peers(reported, 1.0, PeerSource.GOSSIP, f"volunteer {volunteer}")
    assert len(view.passive) == 1 + membership.MAX_PASSIVE_PEERS[PeerSource.GOSSIP]
    assert key_of(2) in view.passive


def test_sources_do_not_displace_each_others_peers():
    view = PartialView(key_of(9999), 0)
    view.add_peers([peer(1)], 0.0, PeerSource.FRIEND)
    view.add_peers([peer(2)], 0.0, PeerSource.GOSSIP, "someone")
    view.add_peers([peer(n) for n in range(10, 3000)], 0.0, PeerSource.SITE)
    assert {key_of(1), key_of(2)} <= set(view.passive)
    assert len(view.passive) == 2 + membership.MAX_PASSIVE_PEERS[PeerSource.SITE]


def test_keys_of_one_person_do_not_displace_other_friends():
    view = PartialView(key_of(9999), 0)
    view.on_connected(key_of(1), 0.0, met(1, "honest"))
    for number in range(2, 500):
        view.on_connected(key_of(number), 1.0, met(number, "liar"))
        view.on_disconnected(key_of(number), 1.0, said_goodbye=False)
    assert key_of(1) in view.passive
    assert len(view.passive) == 1 + membership.MAX_FRIENDS_OF_VOLUNTEER


# ---- closing links


def test_surplus_closes_lazy_links_and_spares_the_oldest_and_dialled_ones():
    me = Gossip(key_of(99), 0)
    for number in range(1, LINK_TARGETS.most + 5):
        me.on_connected(key_of(number), 0.01 * number, met(number, dialled=number in (7, 8)))
        me.links[key_of(number)].eager = number in (9, 10, 11, 12, 13, 14, 15)
    assert not goodbyes(me, 1.0), "the links are too young"
    surplus = goodbyes(me, LINK_TARGETS.least_age_seconds + 1)
    lazy = {key_of(number) for number in (3, 4, 5, 6, 16)}
    assert len(surplus) == 4 and surplus < lazy
    assert not goodbyes(me, LINK_TARGETS.least_age_seconds + 2), "each peer gets one goodbye"
    late = me.next_actions(LINK_TARGETS.least_age_seconds + TIMEOUTS.goodbye_seconds + 2)
    assert {action.peer for action in late if isinstance(action, g.CloseLink)} == surplus, (
        "peers that do not disconnect are disconnected"
    )


def test_third_link_of_a_volunteer_has_no_room():
    me = Gossip(key_of(99), 0, "me")
    for number, volunteer in ((1, "v"), (2, "v"), (3, "w"), (4, "me"), (5, "me")):
        me.on_connected(key_of(number), 0.0, met(number, volunteer))
    has_room = me.membership.has_room_for
    assert not has_room(me.links, key_of(6), "v")
    assert has_room(me.links, key_of(1), "v"), "a newer connection replaces the one that it has"
    assert has_room(me.links, key_of(6), "w")
    assert has_room(me.links, key_of(6), "me"), "machines of one's own volunteer may be more"


def test_eclipse_by_twelve_keys_of_one_volunteer_keeps_all_honest_links():
    me = Gossip(key_of(99), 0)
    for number in range(1, 7):
        me.on_connected(key_of(number), 0.0, met(number, f"honest {number}"))
    for number in range(20, 32):
        me.on_connected(key_of(number), 1.0, met(number, "liar"))
    for now in range(2, 60):
        for key in goodbyes(me, float(now)):
            me.on_disconnected(key, float(now))
    honest = {key_of(number) for number in range(1, 7)}
    assert honest < set(me.links) and len(me.links) == 8


def test_eclipse_by_many_volunteers_leaves_the_oldest_and_dialled_links():
    me = Gossip(key_of(99), 0)
    honest = {key_of(number) for number in range(1, 7)}
    for number in range(1, 7):
        me.on_connected(key_of(number), 0.01 * number, met(number, dialled=number > 3))
    for wave in range(20):
        now = 10.0 + 20 * wave
        for number in range(100 + 12 * wave, 112 + 12 * wave):
            me.on_connected(key_of(number), now, met(number))
        for key in goodbyes(me, now + 10):
            me.on_disconnected(key, now + 10)
    remaining = honest & set(me.links)
    assert {key_of(1), key_of(2)} <= remaining and len(remaining) >= 5
    assert len(me.links) <= LINK_TARGETS.most


def test_exploration_continues_with_all_links_in_use():
    me = Gossip(key_of(99), 0)
    for number in range(1, LINK_TARGETS.most + 1):
        me.on_connected(key_of(number), 0.0, met(number, dialled=True))
    me.membership.add_peers([peer(number) for number in range(20, 40)], 0.0)
    explored = 0
    for now in range(1, 600):
        for link in me.links.values():
            link.last_received_at = float(now)
        for chosen in dials(me, float(now)):
            explored += 1
            me.membership.on_dial_failed(chosen.key, float(now))
    assert 5 <= explored <= 30


# ---- a swarm with Sybil keys


@dataclass
class SybilSwarm:
    """Honest machines, one of each volunteer, and the keys of a few who want to isolate them.

    Sybil keys accept every link, dial every machine all the time, and report only each other.
    """

    seed: int
    honest: int = 21
    sybils: int = 9
    volunteers: int = 3

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.now = 0.0
        self.machines = {
            key_of(n): Gossip(key_of(n), self.seed + n, f"honest {n}")
            for n in range(1, self.honest + 1)
        }
        self.liars = {key_of(1000 + n): f"liar {n % self.volunteers}" for n in range(self.sybils)}
        everybody = [*self.machines, *self.liars]
        for me in self.machines.values():
            named = self.random.sample(everybody, 6)  # as the site names them
            me.membership.add_peers([self.peer(key) for key in named], 0.0)

    @staticmethod
    def peer(key: str) -> Peer:
        return Peer(key=key, addresses=[address_of(key)])

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            for key, me in self.machines.items():
                self.look(key, me)
            for liar, volunteer in self.liars.items():
                victim = self.machines[self.random.choice([*self.machines])]
                self.accept(victim, liar, volunteer, dialled=False)

    def look(self, key: str, me: Gossip) -> None:
        view = me.membership
        for leaving in view.choose_goodbyes(me.links, self.now):
            me.on_goodbye(leaving, self.now)
            me.on_disconnected(leaving, self.now)
            if leaving in self.machines:
                self.machines[leaving].on_goodbye(key, self.now)
                self.machines[leaving].on_disconnected(key, self.now)
        for chosen in view.choose_dials(me.links, self.now):
            self.connect(key, me, chosen.key)
        if self.random.random() < 1 / 15:  # each half a minute, both ways
            self.share(me, list(me.links))

    def connect(self, key: str, me: Gossip, other: str) -> None:
        meeting = Meeting(self.volunteer_of(other), True, address_of(other))
        if other not in self.machines and other not in self.liars:
            me.membership.on_dial_failed(other, self.now)
            return
        far = self.machines.get(other)
        mine = me.membership.has_room_for(me.links, other, meeting.volunteer)
        if not mine or (far is not None and key in far.links):
            me.membership.on_refused(other, self.now, meeting)
            return
        if far is not None:
            self.accept(far, key, self.volunteer_of(key), dialled=False)
        me.on_connected(other, self.now, meeting)
        self.share(me, [other])
        if far is not None:
            self.share(far, [key])

    def accept(self, me: Gossip, key: str, volunteer: str, dialled: bool) -> None:
        if key not in me.links and me.membership.has_room_for(me.links, key, volunteer):
            me.on_connected(key, self.now, Meeting(volunteer, dialled, address_of(key)))
            me.links[key].eager = key in self.liars or self.random.random() < 0.5

    def share(self, me: Gossip, links: list[str]) -> None:
        for key in links:
            if key in self.liars:
                reported = [self.peer(liar) for liar in self.liars]
                reported += [self.peer(key_of(50_000 + n)) for n in range(20)]
            else:
                reported = list(self.machines[key].membership.peers_to_share(me.key, me.links))
            me.membership.add_peers(reported, self.now, PeerSource.GOSSIP, self.volunteer_of(key))

    def volunteer_of(self, key: str) -> str:
        return self.liars.get(key) or f"honest {number_of(key)}"

    def honest_links(self, key: str) -> set[str]:
        return set(self.machines[key].links) & set(self.machines)

    @property
    def isolated(self) -> int:
        """Count the honest machines that honest links do not join to the largest part."""
        parts: list[set[str]] = []
        left = set(self.machines)
        while left:
            part = newest = {left.pop()}
            while newest:
                newest = {other for key in newest for other in self.honest_links(key)} - part
                part = part | newest
            parts.append(part)
            left -= part
        return len(self.machines) - max(map(len, parts))


@pytest.mark.integration
@pytest.mark.parametrize(
    "seeds", [range(10), pytest.param(range(1000), marks=pytest.mark.slow)], ids=["10", "1000"]
)
def test_sybil_keys_of_three_volunteers_isolate_no_honest_machine(seeds):
    for seed in seeds:
        swarm = SybilSwarm(seed)
        for _ in range(3):
            swarm.run(30)
            assert swarm.isolated == 0 or swarm.now < 60, f"seed {seed} at {swarm.now} s"
            for me in swarm.machines.values():
                liars = set(me.links) & set(swarm.liars)
                assert len(liars) <= 2 * swarm.volunteers
