"""A machine whose missing updates no peer keeps continues from the peers' anchor."""

import pytest
from helpers.updates.poisoned_machine import poison
from helpers.wait_for import stepping, wait_until
from memory_anchor import MemoryAnchor

from barnraise.exchange.blobs import pruner
from barnraise.exchange.gossip import requests
from barnraise.exchange.snapshots import resync
from barnraise.exchange.snapshots.snapshot_client import load_base_snapshot
from barnraise.ledger import ledger


@pytest.fixture(params=["votes", "site"])
def fallen_behind(request, world, monkeypatch):
    """Provide a machine with a snapshot to continue from, and the two peers that serve it.

    It was away, and they have pruned their updates since. Either they may
    vote, as it has had rounds of theirs for long enough, or the site confirms their weights.
    """
    monkeypatch.setattr(pruner, "payload_budget", lambda free: 20_000)
    monkeypatch.setattr(requests, "SNAPSHOT_DELAY_SECONDS", 0.5)
    monkeypatch.setattr(resync, "RESYNC_RETRY_SECONDS", 0.5)
    if request.param == "votes":
        monkeypatch.setattr(ledger, "VOTER_WORK", ledger.VoterWork(seconds=0.0))
    a, b, c = (world.machine(n).start() for n in (1, 2, 3))
    c.add_peers(a)
    b.add_peers(a)
    for seed in range(3):
        a.publish_round(seed)
        c.publish_round(20 + seed)
    world.wait_for_agreement(a, b, c)
    b.stop()
    for seed in range(3, 11):
        a.publish_round(seed)
        world.wait_for_agreement(a, c)
        for machine in (a, c):
            machine.exchange.on_state_saved(machine.anchor.vector)

    def pruned() -> bool:
        for machine in (a, c):
            # Repeated until each machine has received the other's vector.
            machine.exchange.on_state_saved(machine.anchor.vector)
        author = a.exchange.author.name
        return min(machine.ledger.pruned().get(author, 0) for machine in (a, c)) >= 7

    wait_until(pruned)
    b.open()
    if request.param == "site":
        a.exchange.remember_vector(a.anchor)
        b.exchange.set_listed_anchors({a.anchor.vector_digest(): a.anchor.digest()})
    b.start().publish_round(50)
    b.add_peers(a, c)

    def needs_resync() -> bool:
        for machine in (a, b, c):
            machine.step()
        return b.exchange.needs_resync

    wait_until(needs_resync)
    return b, a, c


def test_pruned_updates_are_not_served_and_late_peer_loads_snapshot(world, fallen_behind, caplog):
    b, a, c = fallen_behind
    author, own = a.exchange.author.name, b.exchange.author.name
    assert b.ledger.vector()[author] == 3, "no peer could serve its later updates"
    records = caplog.get_records("setup")
    assert any("taking a snapshot" in record.getMessage() for record in records)
    before = b.anchor.digest()
    b.exchange.retain_anchor(b.anchor)
    assert b.exchange.resync()
    assert not b.exchange.needs_resync and b.ledger.base.has_former and b.anchor.digest() == before
    snapshot = load_base_snapshot(b.ledger)
    b.anchor = MemoryAnchor(list(snapshot.fragments), snapshot.heads)
    b.start()
    b.publish_round(51)
    world.wait_for_agreement(a, b, c)
    assert b.anchor.vector == {author: 11, c.exchange.author.name: 3, own: 2}
    assert b.exchange.author.name == own and b.ledger.base.has_former
    b.exchange.report_anchor_digest(b.anchor.vector_digest(), b.anchor.digest())
    wait_until(lambda: b.exchange.server.gossip.anchor_digests)
    b.exchange.set_listed_anchors({b.anchor.vector_digest(): "f" * 64})
    assert b.ledger.base.has_former, "other weights are listed"
    former = b.ledger.base.former.fragments
    b.exchange.set_listed_anchors({b.anchor.vector_digest(): b.anchor.digest()})
    assert not b.ledger.base.has_former and not any(b.ledger.blobs.has(name) for name in former)


def test_snapshot_from_before_a_verdict_is_discarded(world, fallen_behind):
    """A verdict arrives while the snapshot waits for the training loop: it lacks its effect."""
    b, a, _ = fallen_behind
    author = a.exchange.author.name  # once a learns of the verdict, it continues under another name
    b.apply_verdict(world.sign_verdict({author: 7}))
    before = b.ledger.vector()
    assert not b.exchange.resync()
    assert b.ledger.vector() == before and before[author] == 3
    assert not b.exchange.needs_resync, "another snapshot is fetched in its place"


def test_machine_that_lacks_nothing_does_not_begin_again(world):
    a = world.machine(1).start()
    a.publish_round(1)
    assert not a.exchange.needs_resync and not a.exchange.resync()
    assert a.ledger.vector() == {a.exchange.author.name: 1}


def test_fetch_without_a_snapshot_is_repeated_after_the_interval(world, monkeypatch):
    """One volunteer alone claims updates that nobody has: its snapshot is never confirmed."""
    monkeypatch.setattr(requests, "SNAPSHOT_DELAY_SECONDS", 0.2)
    monkeypatch.setattr(resync, "RESYNC_SECONDS", 0.2)
    liar = world.machine(9)
    poison(liar)
    liar.start()
    a = world.machine(1).start()
    a.publish_round(1)
    client = a.exchange.server.snapshot_client
    fetch, fetches = client.fetch, []

    async def fetch_and_count(timeout):
        fetches.append(timeout)
        return await fetch(timeout)

    monkeypatch.setattr(client, "fetch", fetch_and_count)
    handler = a.exchange.server.resync_handler
    a.add_peers(liar)
    with stepping(a, liar):
        wait_until(lambda: fetches)
        wait_until(lambda: handler.is_due(1e12))  # it is no longer being fetched
        assert not handler.is_due(a.exchange.thread.loop.time()), "the interval has not passed"
        assert fetches == [0.2] and not a.exchange.needs_resync
