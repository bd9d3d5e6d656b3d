"""Accounts that do not train, however many they are, move nobody's weights."""

import time

import pytest
from helpers.updates.poisoned_machine import (
    PHANTOM_VOLUNTEER,
    honest_machines,
    is_poisoned,
    liars,
    list_anchor,
    poison,
)
from helpers.wait_for import stepping, wait_until
from memory_anchor import MemoryAnchor

from barnraise.errors import MessageError
from barnraise.exchange.gossip import requests
from barnraise.exchange.snapshots import snapshot_client
from barnraise.exchange.snapshots.snapshot_client import load_base_snapshot
from barnraise.ledger import ledger
from barnraise.ledger.validation import UpdateRules, validate_header
from barnraise.protocol.signing import digest

RUN = "01890000-0000-7000-8000-000000000001"  # created in June 2023


@pytest.fixture
def hurried(monkeypatch):
    """Let machines decide soon whether they are overtaken, and by whose votes."""
    monkeypatch.setattr(requests, "SNAPSHOT_DELAY_SECONDS", 0.5)
    monkeypatch.setattr(ledger, "VOTER_WORK", ledger.VoterWork(seconds=0.0))


def test_twelve_idle_accounts_move_no_member(world, hurried):
    """More accounts than a machine has honest links name a snapshot of a chain that never was."""
    members = honest_machines(world, 1, 2, 3, rounds=3)
    idle = liars(world, *range(10, 22))
    for member in members:
        member.add_peers(*idle)
    with stepping(*members, *idle):
        time.sleep(3.0)
    for member in members:
        assert not member.exchange.needs_resync and not is_poisoned(member)
        assert member.exchange.waiting_reason is None
    assert world.wait_for_agreement(*members)


def test_sybil_votes_only_once_its_rounds_have_been_here_for_long(world, monkeypatch):
    a, b, c = honest_machines(world, 1, 2, 3, rounds=2)
    a.publish_round(8, tokens=300)
    c.publish_round(9, tokens=0)
    world.wait_for_agreement(a, b, c)
    names = [machine.number for machine in (a, b, c)]
    first, second, third = (f"{number:064x}" for number in names)
    work = {first: 500, second: 200, third: 200}
    assert b.ledger.work_of_volunteers() == (work, set()), "it all came a moment ago"
    monkeypatch.setattr(ledger, "VOTER_WORK", ledger.VoterWork(seconds=0.0))
    assert b.ledger.work_of_volunteers() == (work, {first, third}), "two rounds are too few"
    b.apply_verdict(world.sign_verdict(volunteers={third: {c.exchange.author.name: 2}}))
    assert b.ledger.work_of_volunteers() == ({first: 500, second: 200}, {first})


@pytest.mark.parametrize("known", [0, 1])
def test_idle_accounts_move_no_member_that_knows_few_sybil_free_links(world, hurried, known):
    members = honest_machines(world, *range(1, 2 + known), rounds=3)
    idle = liars(world, 7, 8, 9)
    members[0].add_peers(*idle)
    with stepping(*members, *idle):
        wait_until(lambda: members[0].exchange.waiting_reason is not None)
        time.sleep(1.5)
    assert not members[0].exchange.needs_resync and not is_poisoned(members[0])
    assert members[0].exchange.waiting_reason == snapshot_client.UNCONFIRMED


def test_six_idle_accounts_give_a_joiner_no_weights(world, monkeypatch):
    monkeypatch.setattr(snapshot_client, "MAX_REPLAYED_UPDATES", 0)
    honest = honest_machines(world, 1, 2)
    idle = liars(world, *range(10, 16))
    joiner = world.machine(4)
    joiner.add_peers(*idle, *honest)
    with stepping(*honest, *idle):
        assert joiner.exchange.fetch_snapshot(4.0) is None
        assert joiner.exchange.waiting_reason.startswith(snapshot_client.UNCONFIRMED)
        assert not joiner.ledger.vector()
        joiner.exchange.set_listed_anchors(list_anchor(*honest))
        snapshot = None
        deadline = time.monotonic() + 60
        while snapshot is None and time.monotonic() < deadline:
            snapshot = joiner.exchange.fetch_snapshot(20.0)
    assert snapshot.confirmed and snapshot.heads.keys() == {m.exchange.author.name for m in honest}


@pytest.mark.parametrize(
    "changed",
    [
        {"seq": 5000, "total": 50_000},
        {"seq": 1 << 40, "total": 50_000},
        {"seq": 500, "total": 20 * 1000 + 1},
        {"seq": 5000, "total": 50_000, "started_ms": 1_600_000_000_000},
    ],
)
def test_header_of_a_chain_that_time_does_not_allow_is_refused(world, changed):
    """A header proves its signer, but no update before it: its author began 20 seconds before."""
    a = world.machine(1).start()
    update = a.publish_round(1, tokens=10)
    ticket = world.ticket(a.identity.key, volunteer=1, rate=1000)
    rules = UpdateRules.from_spec(world.spec, RUN, frozenset([world.mirror.key]))
    usual = {"seq": 1000, "previous": "1" * 64, "total": 10_000, "ticket": digest(ticket.body)}
    usual["started_ms"] = update.time_ms - 20_000
    possible = update.model_copy(update=usual)
    assert validate_header(a.identity.sign("update", possible), ticket, rules) == possible
    impossible = possible.model_copy(update=changed)
    with pytest.raises(MessageError, match="cannot have"):
        validate_header(a.identity.sign("update", impossible), ticket, rules)


def test_verdict_on_a_sybil_in_a_snapshot_returns_to_the_weights_before(world):
    """A base that no update led to is in no verdict's reach: the anchor before it takes over."""
    a, b = honest_machines(world, 1, 2, rounds=2)
    honest_digest, vector = b.anchor.digest(), b.ledger.vector()
    b.exchange.retain_anchor(b.anchor)
    b.stop()
    b.open()
    poison(b)
    b.start()
    b.publish_round(7)
    assert is_poisoned(b)
    verdict = world.sign_verdict(volunteers={f"{PHANTOM_VOLUNTEER:064x}": {}})
    b.apply_verdict(verdict)
    assert b.exchange.needs_resync and b.exchange.resync()
    snapshot = load_base_snapshot(b.ledger)
    assert snapshot.heads.keys() == vector.keys()
    b.anchor = MemoryAnchor(list(snapshot.fragments), snapshot.heads)
    assert b.anchor.digest() == honest_digest
    b.start()
    a.apply_verdict(verdict)
    world.wait_for_agreement(a, b)
    assert not is_poisoned(b) and b.ledger.verdicts.covers(a.ledger.verdicts)
