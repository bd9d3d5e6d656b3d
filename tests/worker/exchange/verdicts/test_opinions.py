"""Opinions among whole exchanges: harmful volunteers are withheld, and return when cleared."""

import time

import pytest
from helpers.network.raw_peer import build_hello, connect_raw_peer
from helpers.wait_for import stepping, wait_until

from barnraise.exchange.verdicts import verdict_handler, verdict_sync
from barnraise.exchange.weights import opinion_former
from barnraise.ledger import ledger
from barnraise.ledger.suspension import MIN_JUDGES
from barnraise.peering.transports.framing import unpack
from barnraise.protocol.enums import Standing
from barnraise.protocol.messages import PeerState
from barnraise.protocol.opinions import Doubt, SignedOpinions
from barnraise.protocol.signing import Identity
from barnraise.protocol.verdicts import VerdictNames


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch):
    monkeypatch.setattr(verdict_sync, "VERDICT_RESEND_SECONDS", 1.0)
    monkeypatch.setattr(verdict_handler, "MIN_OPINION_SECONDS", 0.0)


def start_with_stranger(world, rounds: int = 3):
    """Return two machines that the owner invited and a stranger, agreed on some updates of each."""
    world.standings = {1: Standing.INVITED, 2: Standing.INVITED}
    a, b, x = (world.machine(n).start() for n in (1, 2, 3))
    b.add_peers(a)
    x.add_peers(a, b)
    publish(rounds, a, b, x)
    world.wait_for_agreement(a, b, x)
    return a, b, x


def publish(rounds: int, *machines) -> None:
    for _ in range(rounds):
        for machine in machines:
            machine.publish_round(100 * machine.number + machine.exchange.author.last_seq)


def state_opinions(machine, *doubted, agreeing=(), **kept: int) -> None:
    """Let a machine state that it doubts other machines' volunteers, and who agrees with it."""
    now_ms = int(1000 * time.time())
    kept_updates = {other.exchange.author.name: kept["kept"] for other in doubted if kept}
    statements = machine.ledger.verdicts.statements
    machine.exchange.publish_opinions(
        {f"{n.number:064x}": Doubt(since_ms=now_ms, kept=kept_updates) for n in doubted},
        [f"{other.number:064x}" for other in agreeing],
    )

    def is_stated() -> bool:
        return machine.ledger.verdicts.statements.get(key) != statements.get(key)

    key = machine.identity.key
    wait_until(is_stated)


def clear(world, machine, *others) -> None:
    """Let the owner clear the volunteers of other machines."""
    cleared = [f"{other.number:064x}" for other in others]
    machine.apply_verdict(world.sign_verdict(cleared=cleared, issued=time.time() + 1))


def without(world, machine, author, kept: int = 0) -> str:
    return world.sum_digest(machine, {author: kept})


def test_suspended_volunteers_updates_come_out_and_return_when_cleared(world):
    a, b, x = start_with_stranger(world)
    everything = a.anchor.digest()
    state_opinions(a, x, kept=1)
    world.wait_for_agreement(a, b, x)
    assert a.anchor.digest() == everything, "one doubt suspends nobody"
    state_opinions(b, x, kept=1)
    wait_until(lambda: all(machine.ledger.verdicts.suspended for machine in (a, b, x)))
    assert world.wait_for_agreement(a, b, x) == without(world, a, x.exchange.author.name, kept=1)
    assert a.ledger.tokens == a.anchor.tokens == 700
    assert x.exchange.author.suspension and not a.exchange.author.suspension
    anchor = x.anchor.digest()
    assert x.publish_round(1) is None and x.anchor.digest() == anchor, "what it trains is withdrawn"

    clear(world, a, x)
    assert world.wait_for_agreement(a, b, x) == everything
    publish(1, a, x)
    world.wait_for_agreement(a, b, x)
    assert b.ledger.vector()[x.exchange.author.name] == 4 and not x.exchange.author.suspension


def test_doubt_reaches_peers_at_once_though_others_wait(world, monkeypatch):
    """A second machine's doubt suspends: until then each round of the volunteer does harm."""
    a, b, x = start_with_stranger(world)
    monkeypatch.setattr(verdict_sync, "VERDICT_RESEND_SECONDS", 600.0)
    key = a.identity.key
    state_opinions(a, agreeing=[b])
    state_opinions(a, agreeing=[b, x])  # peers were sent some a moment ago
    state_opinions(a, x)
    wait_until(lambda: any(name == key for name, _ in b.ledger.verdicts.doubts))


def test_updates_that_were_refused_meanwhile_arrive_after_the_return(world):
    a, b, x = start_with_stranger(world)
    late = world.machine(4).start()
    world.network.partition({m.identity.key for m in (a, b)}, {x.identity.key, late.identity.key})
    wait_until(lambda: a.exchange.stats.peers == 1)
    for machine in (a, b):
        state_opinions(machine, x)
    late.add_peers(x)
    publish(2, x)  # it does not know yet that it is suspended
    world.wait_for_agreement(x, late)
    world.network.heal()
    x.add_peers(a, b)
    late.add_peers(a)
    assert world.wait_for_agreement(a, b, x, late) == without(world, a, x.exchange.author.name)
    clear(world, b, x)
    world.wait_for_agreement(a, b, x, late, seconds=40)
    assert a.ledger.vector()[x.exchange.author.name] == 5


def test_two_unvouched_accounts_withhold_nobodys_updates(world):
    a, b, x = start_with_stranger(world)
    y = world.machine(4).start()
    y.add_peers(a, b, x)
    publish(1, y)
    for sybil in (x, y):
        state_opinions(sybil, a, b)
    wait_until(lambda: len(b.ledger.verdicts.opinions) >= MIN_JUDGES)
    publish(1, a, b)
    world.wait_for_agreement(a, b, x, y)
    assert not a.ledger.verdicts.suspended and a.ledger.tokens == 1200


def test_joiner_takes_a_snapshot_without_the_suspended_volunteers_updates(world):
    a, b, x = start_with_stranger(world)
    for machine in (a, b):
        state_opinions(machine, x, kept=1)
    world.wait_for_agreement(a, b, x)
    state_opinions(a, x, kept=1)  # renewed, with the same effect: the two sets differ for a moment
    late = world.machine(4)
    late.add_peers(a, b, x)
    with stepping(a, b, x):
        snapshot = late.exchange.fetch_snapshot(30.0, trust_all=True)
    assert snapshot is not None and snapshot.heads[x.exchange.author.name].seq == 1
    late.anchor.load(snapshot.fragments, snapshot.heads, snapshot.retracted)
    late.start()
    assert world.wait_for_agreement(a, b, x, late) == without(
        world, a, x.exchange.author.name, kept=1
    )
    clear(world, a, x)
    world.wait_for_agreement(a, b, x, late, seconds=40)


def test_doubted_volunteer_has_no_vote_on_the_doubters_snapshots(world, monkeypatch):
    monkeypatch.setattr(ledger, "VOTER_WORK", ledger.VoterWork(seconds=0.0))
    a, b, x = start_with_stranger(world)

    def find_voters(machine) -> set[str]:
        thread, client = machine.exchange.thread, machine.exchange.server.snapshot_client
        votes = thread.run(client.weigh_votes(), None)
        return {name for name in (f"{n:064x}" for n in (1, 2, 3)) if votes.count([name])}

    invited = {f"{machine.number:064x}" for machine in (a, b)}
    assert find_voters(a) == find_voters(b) == invited
    state_opinions(a, b)
    world.wait_for_agreement(a, b, x)
    assert find_voters(a) == invited - {f"{b.number:064x}"}
    assert find_voters(b) == invited, "one machine's doubt is not another's"


def test_run_does_not_end_by_tokens_of_doubted_volunteers(world):
    a, b, x = start_with_stranger(world)
    x.publish_round(7, tokens=10**6)
    world.wait_for_agreement(a, b, x)
    for machine in (a, b):
        state_opinions(machine)
    wait_until(lambda: a.ledger.verdicts.vouched and len(a.ledger.verdicts.vouched) == MIN_JUDGES)
    a.anchor.set_vouched(a.ledger.verdicts.vouched)
    assert a.anchor.tokens == 1200, "strangers together count at most as much as the vouched"
    for machine in (a, b):
        state_opinions(machine, x)
    world.wait_for_agreement(a, b, x)
    assert a.anchor.tokens == 600


def test_opinions_survive_a_restart_and_are_not_stated_again(world, monkeypatch):
    a, b, x = start_with_stranger(world)
    state_opinions(a, x)
    stated = a.ledger.verdicts.opinions[a.identity.key]
    a.stop()
    a.open()
    assert a.ledger.verdicts.opinions[a.identity.key] == stated
    a.start().add_peers(b)
    publish(2, a)
    world.wait_for_agreement(a, b, x)
    assert b.ledger.verdicts.opinions[a.identity.key] == stated
    monkeypatch.setattr(opinion_former, "RENEWAL_MS", 0)
    publish(1, a)
    wait_until(lambda: b.ledger.verdicts.opinions[a.identity.key] != stated)
    assert f"{x.number:064x}" in b.ledger.verdicts.statements[a.identity.key].doubted


@pytest.mark.parametrize(
    ("protocols", "receives"),
    [pytest.param([2, 1], True, marks=pytest.mark.slow), ([1], False)],
)
def test_peer_of_an_older_protocol_is_sent_no_opinions(world, protocols, receives):
    a, b, _ = start_with_stranger(world, rounds=1)
    hello = build_hello(world, Identity(bytes([9]) * 32), protocols=protocols)
    channels = []
    with connect_raw_peer(world, a, hello=hello, reads=False, channels=channels) as send:
        ((channel, run),) = channels
        state_opinions(a, b)
        send(VerdictNames(prefix="", names=[]))  # it has none, and is sent what it lacks
        states, received = [], []
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            message, _ = unpack(run(channel.receive()))
            received.append(type(message))
            if message.type == "peer_state":
                states.append(message.verdicts_digest)
                send(PeerState(vector={}, rate=1.0))  # silence would end the link
            if SignedOpinions in received or len(states) > 4:
                break
        assert (SignedOpinions in received) == receives
        # To an older peer, sets that differ by opinions alone are equal.
        assert receives or set(states) == {None}
