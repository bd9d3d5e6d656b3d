"""Tests of retention: which payloads stay, and how a peer catches up without them."""

import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from functools import partial

import hypothesis.strategies as st
import pytest
from helpers import wait_for
from helpers.effort import examples
from helpers.paths import TESTS, WORKER
from helpers.updates.retention_child import AUTHORS, publish
from hypothesis import given, settings

from barnraise.exchange.blobs import pruner
from barnraise.ledger import ledger as ledger_module
from barnraise.ledger import retention
from barnraise.ledger.ledger import Ledger
from barnraise.ledger.verdict_set import VerdictSet
from barnraise.protocol import enums, messages

wait_until = partial(wait_for.wait_until, seconds=30.0)


def has_payloads(ledger: Ledger, update: messages.Update) -> bool:
    return all(ledger.blobs.has(part.digest) for part in update.fragments)


def check_files_match_rows(ledger: Ledger) -> None:
    """Assert that retained payloads have their files, and pruned ones only if they are shared."""
    pruned = ledger.pruned()
    retained_files: set[str] = set()
    pruned_files: set[str] = set()
    for author, last in ledger.vector().items():
        for _, update in ledger.headers(author, 1, last):
            files = {part.digest for part in update.fragments}
            if update.seq > pruned.get(author, 0):
                assert has_payloads(ledger, update), f"{author[:8]} {update.seq}"
                retained_files |= files
            else:
                pruned_files |= files
    assert not {name for name in pruned_files - retained_files if ledger.blobs.has(name)}
    db = sqlite3.connect(ledger.blobs.folder.parent / "ledger.sqlite")
    rows = db.execute("SELECT author, seq FROM payloads").fetchall()
    assert sorted(rows) == sorted(
        (author, seq)
        for author, last in ledger.vector().items()
        for seq in range(pruned.get(author, 0) + 1, last + 1)
    )
    assert not db.execute("SELECT 1 FROM files_to_delete").fetchall()


@pytest.mark.parametrize("fails", [False, True], ids=["stored", "refused"])
def test_expect_files_leaves_the_database_fully_synchronous(tmp_path, fails):
    ledger = Ledger(tmp_path)
    db = sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)
    db.execute("PRAGMA synchronous=FULL")
    kept = retention.Retention(db, threading.RLock(), ledger.blobs, sweep=False)
    if fails:
        db.execute("PRAGMA query_only=1")
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            kept.expect_files(["a" * 64])
    else:
        kept.expect_files(["a" * 64])
    assert db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
    rows = db.execute("SELECT digest FROM files_to_delete").fetchall()
    assert rows == ([] if fails else [("a" * 64,)])
    db.close()
    ledger.close()


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger(tmp_path)
    yield ledger
    ledger.close()


# ---- pruning


def test_prune_removes_oldest_payloads_and_keeps_all_headers(ledger, tmp_path):
    updates = [
        publish(ledger, AUTHORS[n % 2], bytes([n]) * 100, bytes([n]) * 50) for n in range(10)
    ]
    assert ledger.prune(1500, ledger.vector()) == {}
    one, two = updates[0].author, updates[1].author
    assert ledger.prune(600, ledger.vector()) == {one: 3, two: 3}
    assert [has_payloads(ledger, update) for update in updates] == [False] * 6 + [True] * 4
    check_files_match_rows(ledger)
    assert ledger.vector() == {one: 5, two: 5} and len(list(ledger.updates_since({}))) == 10
    assert ledger.can_continue_from({one: 3, two: 3}, {})
    assert not ledger.can_continue_from({one: 2, two: 3}, {})
    again = Ledger(tmp_path)
    assert again.pruned() == {one: 3, two: 3}
    assert again.prune(600, again.vector()) == {}
    again.close()


def test_prune_keeps_unsaved_updates_and_removes_each_authors_first(ledger):
    updates = [publish(ledger, AUTHORS[n % 2], bytes([n]) * 100) for n in range(10)]
    one, two = updates[0].author, updates[1].author
    assert ledger.prune(0, {one: 2}) == {one: 2}
    assert ledger.prune(0, {one: 2, two: 4}) == {two: 4}
    check_files_match_rows(ledger)


def test_prune_keeps_pinned_blobs(ledger):
    first = publish(ledger, AUTHORS[0], b"same")
    name = first.fragments[0].digest
    ledger.blobs.pin([name])
    ledger.prune(0, ledger.vector())
    assert ledger.blobs.has(name)
    second = publish(ledger, AUTHORS[1], b"same")
    ledger.blobs.unpin([name])
    assert has_payloads(ledger, second)
    ledger.prune(0, ledger.vector())
    assert not ledger.blobs.has(name)
    check_files_match_rows(ledger)


def test_prune_archive_keeps_everything_within_the_horizon(ledger, monkeypatch):
    for n in range(20):
        publish(ledger, AUTHORS[n % 2], bytes([n]) * 100, tokens=10)
    assert not ledger.prune(0, ledger.vector(), archive_rounds=4), "all is younger than an hour"
    monkeypatch.setattr(ledger_module, "HORIZON_SECONDS", 0.0)
    assert sum(ledger.prune(0, ledger.vector(), archive_rounds=4).values()) == 11
    assert ledger.retention.payload_bytes == 900, (
        "a round of each author is one update of the other"
    )
    check_files_match_rows(ledger)


def test_archive_role_in_ticket_enables_the_horizon(world):
    machine = world.machine(1)
    assert machine.exchange.server.pruner.archive_rounds is None
    ticket = messages.Ticket.model_validate_json(machine.ticket.body)
    roles = {"roles": [enums.Role.WORKER, enums.Role.ARCHIVE]}
    machine.open(ticket=world.mirror.sign("ticket", ticket.model_copy(update=roles)))
    assert machine.exchange.server.pruner.archive_rounds == world.spec.verdict_horizon


def test_payload_budget_is_a_share_of_free_disk_within_bounds():
    assert retention.payload_budget(0) == retention.MIN_BUDGET_BYTES
    assert retention.payload_budget(1 << 60) == retention.MAX_BUDGET_BYTES
    assert retention.payload_budget(100 << 30) == 10 << 30


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_retention_rows_match_files_after_any_operations(tmp_path_factory, data):
    ledger = Ledger(tmp_path_factory.mktemp("ledger"))
    for step in range(data.draw(st.integers(1, 25))):
        operation = data.draw(st.sampled_from(["publish", "publish", "prune", "reopen", "rebase"]))
        if operation == "publish":
            payloads = [bytes([data.draw(st.integers(0, 3))]) * 10, bytes([step]) * 10]
            publish(ledger, data.draw(st.sampled_from(AUTHORS)), *payloads)
        elif operation == "prune":
            safe = {
                author: data.draw(st.integers(0, last)) for author, last in ledger.vector().items()
            }
            ledger.prune(data.draw(st.integers(0, 100)), safe)
        elif operation == "reopen":
            folder = ledger.blobs.folder.parent
            ledger.close()
            ledger = Ledger(folder)
        elif heads := ledger.last_updates():
            signed = [(ledger.header(author, head.seq), head) for author, head in heads.items()]
            ledger.rebase(signed, [ledger.blobs.store(b"anchor %d" % step)])
            assert ledger.base.snapshot()[1] and ledger.can_continue_from(ledger.vector(), {})
        vector = ledger.vector()
        check_files_match_rows(ledger)
        assert ledger.vector() == vector and ledger.can_rebase(vector, VerdictSet())
    ledger.close()


def test_retention_rows_match_files_after_a_kill_at_any_instant(tmp_path):
    chance = random.Random(7)
    seen = kills = 0
    # On a busy machine the child publishes little before it is killed.
    while kills < examples(2, exhaustive=12) or (seen <= 5 and kills < 100):
        kills += 1
        command = [
            sys.executable,
            str(TESTS / "helpers" / "updates" / "retention_child.py"),
            str(tmp_path),
            str(WORKER),
        ]
        child = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert child.stdout.readline() == b"open\n"
        time.sleep(chance.uniform(0.0, 0.3))
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        ledger = Ledger(tmp_path)
        check_files_match_rows(ledger)
        assert sum(ledger.vector().values()) >= seen
        seen = sum(ledger.vector().values())
        ledger.close()
    assert seen > 5


# ---- peers that need pruned updates


def test_prune_keeps_own_updates_that_no_peer_has(world, monkeypatch):
    monkeypatch.setattr(pruner, "payload_budget", lambda free: 0)
    a, b = (world.machine(n).start() for n in (1, 2))
    for seed in range(4):
        a.publish_round(seed)
        a.exchange.on_state_saved(a.anchor.vector)
    time.sleep(0.3)
    assert a.ledger.pruned() == {}
    b.add_peers(a)
    world.wait_for_agreement(a, b)
    wait_until(lambda: a.exchange.all_published_delivered())
    a.exchange.on_state_saved(a.anchor.vector)
    wait_until(lambda: a.ledger.pruned() == {a.exchange.author.name: 4})
