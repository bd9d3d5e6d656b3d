"""Joining late: snapshots of the anchor are requested, compared, fetched and continued from."""

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.updates.poisoned_machine import (
    honest_machines,
    is_poisoned,
    liars,
    list_anchor,
)
from helpers.wait_for import join_peers, stepping, wait_until

from barnraise.exchange.gossip import requests
from barnraise.exchange.gossip.agreement import Votes
from barnraise.exchange.snapshots import snapshot_client as client_module
from barnraise.exchange.snapshots.snapshot_majority import choose_majority
from barnraise.ledger.anchor import fragment_to_bytes
from barnraise.peering.limits import rate_limit
from barnraise.protocol.messages import SnapshotManifest


def test_late_machine_starts_from_the_peers_anchor(world):
    a, b, c = world.start_linked(1, 2, 3)
    for seed in range(5):
        for machine in (a, b, c):
            machine.publish_round(10 * seed + machine.number)
    world.wait_for_agreement(a, b, c)
    late = world.machine(4)
    with stepping(a, b, c):
        snapshot = join_peers(late, a, b, c, trust_one=True)
    assert not snapshot.confirmed and late.ledger.base.snapshot() is not None
    late.publish_round(99)
    a.publish_round(98)
    world.wait_for_agreement(a, b, c, late)
    assert late.ledger.tokens == a.ledger.tokens == 17 * 100


def test_snapshots_of_training_peers_at_one_vector_are_equal(world):
    a, b = world.start_linked(1, 2)
    for seed in range(3):
        a.publish_round(seed)
        b.publish_round(10 + seed)
    world.wait_for_agreement(a, b)
    seeds = iter(range(1000, 2000))

    def train(machine):
        if len(machine.ledger.vector()) and machine.ledger.tokens < 6000:
            machine.publish_round(next(seeds))

    late = world.machine(3)
    with stepping(a, b, then=train):
        assert join_peers(late, a, b, trust_one=True)
    world.wait_for_agreement(a, b, late)


def test_joiner_survives_a_restart_and_serves_the_next_joiner(world):
    a, b = world.start_agreed(1, 2)
    with stepping(a, b):
        join_peers(world.machine(3), a, b, trust_one=True)
    c = world.machines[2]
    c.publish_round(5)
    c.stop()
    c.open()
    with stepping(a, b):
        again = join_peers(c, a, b)
    assert again is not None and again.heads.keys() == {a.exchange.author.name}, (
        "its folder contains the snapshot that it started from"
    )
    world.wait_for_agreement(a, b, c)
    d = world.machine(4)
    with stepping(c):
        # a and b are connected, but their loops take no steps.
        snapshot = join_peers(d, c, timeout=4.0, trust_one=True)
    assert snapshot is None, "one of three volunteers confirms nothing"
    with stepping(a, b, c):
        assert d.exchange.fetch_snapshot(20.0, trust_all=True) is not None


def test_snapshot_of_one_peer_is_logged_as_unconfirmed(world, caplog):
    a = world.machine(1).start()
    a.publish_round(1)
    with stepping(a):
        snapshot = join_peers(world.machine(2), a, trust_one=True)
    assert not snapshot.confirmed
    assert any("unconfirmed" in record.getMessage() for record in caplog.records)


def test_two_machines_of_one_volunteer_do_not_confirm_a_snapshot(world):
    a, b = world.machine(1), world.machine(2)
    b.exchange.renew_ticket(world.ticket(b.identity.key, volunteer=1))
    a.start()
    b.start().add_peers(a)
    a.publish_round(1)
    world.wait_for_agreement(a, b)
    with stepping(a, b):
        snapshot = join_peers(world.machine(3), a, b, trust_one=True)
    assert snapshot is not None and not snapshot.confirmed


def test_peer_with_a_different_anchor_is_outvoted(world):
    a, b, c = world.start_agreed(1, 2, 3)
    c.anchor.fragments[0][5] += 1  # bit-rot
    with stepping(a, b, c):
        snapshot = join_peers(world.machine(4), a, b, c, trust_one=True)
    assert bytes(fragment_to_bytes(snapshot.fragments[0])) == bytes(
        fragment_to_bytes(a.anchor.fragments[0])
    )


def test_two_disagreeing_peers_are_both_not_believed(world, caplog):
    a, b = world.start_agreed(1, 2)
    b.anchor.fragments[0][5] += 1  # bit-rot
    with stepping(a, b):
        snapshot = join_peers(world.machine(3), a, b, timeout=5.0, trust_one=True)
    assert snapshot is None
    assert any("disagree" in record.getMessage() for record in caplog.records)


def test_fetch_snapshot_at_the_runs_start_or_alone_returns_none(world):
    a, b = world.machine(1).start(), world.machine(2)
    b.add_peers(a)
    started_at = time.monotonic()
    assert b.exchange.fetch_snapshot(20.0) is None
    assert time.monotonic() - started_at < 18
    alone = world.machine(3)
    assert alone.exchange.fetch_snapshot(0.5) is None


def test_fetch_snapshot_from_a_silent_peer_ends_in_time(world):
    a = world.machine(1).start()  # connected, but its loop takes no steps
    a.publish_round(1)
    late = world.machine(2)
    late.add_peers(a)
    started_at = time.monotonic()
    assert late.exchange.fetch_snapshot(2.0) is None
    assert time.monotonic() - started_at < 20


def test_joiner_replays_updates_if_no_peer_sends_its_weights(world, monkeypatch):
    monkeypatch.setattr(client_module, "REQUEST_TIMEOUT", 0.5)
    a = world.machine(1).start()  # as the lead of a crew: it takes part, and serves no snapshots
    a.publish_round(1)
    joiner = world.machine(2)
    assert join_peers(joiner, a, trust_one=True) is None
    assert joiner.exchange.waiting_reason is None and not joiner.exchange.needs_snapshot
    with stepping(joiner):
        wait_until(lambda: joiner.anchor.vector == a.anchor.vector)
    assert list_anchor(joiner) == list_anchor(a)


def test_large_slow_fragment_arrives_beyond_the_timeout(world, monkeypatch):
    a = world.machine(1).start()
    a.publish_round(1)
    largest = max(4 * fragment.numel() for fragment in a.anchor.fragments)
    monkeypatch.setattr(client_module, "MAX_HEADS_BYTES", largest - 1)
    monkeypatch.setattr(client_module, "MIN_FETCH_SECONDS", 0.5)
    monkeypatch.setattr(client_module, "MIN_FETCH_RATE", 1000)
    monkeypatch.setattr(rate_limit, "PIECE_BYTES", 1000)
    world.network.bandwidth = (
        largest / 3
    )  # the transfer takes three seconds, and the join waits for two
    with stepping(a):
        assert join_peers(world.machine(2), a, timeout=4.0, trust_one=True) is not None


def test_fetch_snapshot_returns_soon_after_should_stop(world):
    a, late = world.machine(1).start(), world.machine(2)
    a.publish_round(1)
    late.add_peers(a)  # its loop never answers
    leaving = threading.Event()
    threading.Timer(0.5, leaving.set).start()
    started_at = time.monotonic()
    assert late.exchange.fetch_snapshot(30.0, leaving.is_set) is None
    assert time.monotonic() - started_at < 20


def test_choose_majority_counts_each_volunteer_once():
    def manifest(letter: str) -> SnapshotManifest:
        return SnapshotManifest(vector={}, fragments=[letter * 64], heads="0" * 64)

    voters = Votes({"v1": 2, "v2": 2, "v3": 2, "v4": 9}, {"v1", "v2", "v3"})
    assert choose_majority([], "me", voters) is None
    offers = [("v1", "a"), ("v1", "a"), ("v2", "b"), ("v3", "b"), ("v4", "a")]
    answers = [(volunteer, manifest(letter)) for volunteer, letter in offers]
    chosen, supporters = choose_majority(answers, "me", voters)
    assert chosen.fragments == ["b" * 64] and supporters[1] == {"v2", "v3"}
    chosen, supporters = choose_majority(answers, "v1", voters)
    assert chosen.fragments == ["a" * 64], "this machine's own volunteer counts before all others"


def test_several_machines_join_at_once(world, caplog):
    caplog.set_level(logging.WARNING)
    a, b = world.start_agreed(1, 2)
    late = [world.machine(n) for n in (3, 4, 5)]
    for machine in late:
        machine.add_peers(a, b)
    with stepping(a, b), ThreadPoolExecutor(3) as pool:
        fetched = list(
            pool.map(lambda joiner: joiner.exchange.fetch_snapshot(30.0, trust_all=True), late)
        )
    assert None not in fetched


# ---- liars


@pytest.fixture
def without_replay(monkeypatch):
    """Let no joiner receive every update from the run's start on."""
    monkeypatch.setattr(client_module, "MAX_REPLAYED_UPDATES", 0)


def test_phantom_author_alone_overtakes_nobody(world, monkeypatch, caplog):
    monkeypatch.setattr(requests, "SNAPSHOT_DELAY_SECONDS", 0.5)
    (liar,) = liars(world, 9)
    a = world.machine(1).start()
    a.publish_round(1)
    before = a.anchor.digest()
    a.add_peers(liar)
    with stepping(a, liar):
        wait_until(lambda: a.exchange.waiting_reason is not None)
        time.sleep(1.0)
    assert not a.exchange.needs_resync and a.anchor.digest() == before
    assert a.exchange.waiting_reason == client_module.UNCONFIRMED
    lines = [r for r in caplog.records if client_module.UNCONFIRMED in r.getMessage()]
    assert len(lines) == 1, "it says once why it waits"


def test_joiner_with_one_liar_among_three_gets_the_honest_weights(world):
    a, b, c = honest_machines(world, 1, 2, 3)
    (liar,) = liars(world, 9)
    joiner = world.machine(4)
    with stepping(a, b, c, liar):
        snapshot = join_peers(joiner, liar, a, b, c, trust_one=True)
    assert snapshot is not None and not is_poisoned(joiner)
    world.wait_for_agreement(a, b, c, joiner)


def test_keys_of_one_volunteer_count_as_one_liar(world):
    a, b = honest_machines(world, 1, 2)
    crowd = liars(world, 7, 8, 9)
    for machine in crowd:
        machine.exchange.renew_ticket(world.ticket(machine.identity.key, volunteer=9))
    joiner = world.machine(4)
    with stepping(a, b, *crowd):
        snapshot = join_peers(joiner, *crowd, a, b, timeout=20.0, trust_one=True)
    assert snapshot is None or not is_poisoned(joiner)


def test_joiner_without_confirmation_replays_updates_and_trusts_no_weights(world):
    a, b = honest_machines(world, 1, 2)
    joiner = world.machine(3)
    with stepping(a, b):
        assert join_peers(joiner, a, b) is None
        assert joiner.exchange.waiting_reason is None
    world.wait_for_agreement(a, b, joiner)


@pytest.mark.parametrize("volunteers", [(1,), (1, 2)])
def test_joiner_waits_for_confirmation_unless_told_to_trust(world, without_replay, volunteers):
    honest = honest_machines(world, *volunteers)
    joiner = world.machine(3)
    joiner.add_peers(*honest)
    with stepping(*honest):
        assert joiner.exchange.fetch_snapshot(3.0) is None
        assert "--trust-one" in joiner.exchange.waiting_reason
        snapshot = joiner.exchange.fetch_snapshot(10.0, trust_all=True)
    assert snapshot is not None and not snapshot.confirmed
    assert joiner.exchange.waiting_reason is None


@pytest.mark.parametrize("volunteers", [(1,), (1, 2, 3)])
def test_joiner_takes_what_the_site_confirms(world, without_replay, volunteers):
    honest = honest_machines(world, *volunteers)
    listed = {"e" * 64: "e" * 64} | list_anchor(*honest)
    honest[0].publish_round(8)
    joiner = world.machine(4)
    with stepping(*honest):
        snapshot = join_peers(joiner, *honest, confirmed=listed)
    assert snapshot.confirmed and joiner.exchange.waiting_reason is None
    world.wait_for_agreement(*honest, joiner)


@pytest.mark.parametrize("lie", ["other updates", "other weights", "unknown anchor"])
def test_single_lying_volunteer_does_not_pass_for_the_site(world, without_replay, lie):
    """Let the only volunteer serve other weights where the site lists an anchor."""
    (a,) = honest_machines(world, 1)
    listed = {a.anchor.vector_digest(): a.anchor.digest()}
    liar = a
    if lie == "other updates":
        (liar,) = liars(world, 9)
        server = liar.exchange.server.snapshot_server
        server.remember_vector(a.anchor.vector_digest(), liar.anchor.vector, 0)
    elif lie == "other weights":
        list_anchor(a)
        a.anchor.fragments[0][5] += 1
    joiner = world.machine(4)
    with stepping(liar):
        assert join_peers(joiner, liar, timeout=5.0, confirmed=listed) is None
    assert client_module.UNCONFIRMED in joiner.exchange.waiting_reason
    assert not joiner.ledger.vector() and not is_poisoned(joiner)


def test_lying_mirror_and_an_honest_volunteer_give_no_weights(world, without_replay):
    (a,) = honest_machines(world, 1)
    list_anchor(a)
    joiner = world.machine(4)
    joiner.add_peers(a)
    joiner.exchange.set_listed_anchors({a.anchor.vector_digest(): "f" * 64})
    with stepping(a):
        assert joiner.exchange.fetch_snapshot(5.0) is None
    assert not joiner.ledger.vector()


def test_second_machine_of_a_volunteer_believes_the_first(world):
    (a,) = honest_machines(world, 1)
    sibling = world.machine(2)
    sibling.stop()
    sibling.ticket = world.ticket(sibling.identity.key, volunteer=1)
    sibling.open()
    with stepping(a):
        snapshot = join_peers(sibling, a)
    assert snapshot is not None and snapshot.confirmed


def test_folder_with_updates_takes_no_weights_from_one_volunteer(world):
    (liar,) = liars(world, 9)
    a = world.machine(1).start()
    a.publish_round(1)
    a.add_peers(liar)
    server = a.exchange.server
    with stepping(a, liar):
        wait_until(lambda: a.exchange.stats.peers == 1)
        joining = server.snapshot_client.join(4.0, trust_all=True)
        assert a.exchange.thread.run(joining, None) is None
    assert not is_poisoned(a)
