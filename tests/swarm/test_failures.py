"""Failures on one machine: full disk, occupied port, mixed backups, leaving at any moment."""

import asyncio
import shutil
import sqlite3
import time
from dataclasses import replace

import pytest
from helpers.worker.fake_coordinator import FakeCoordinator

from barnraise.errors import StateError
from barnraise.exchange import exchange as exchange_module
from barnraise.ledger import blob_store as blobs_module
from barnraise.ledger.blob_store import BlobStore
from barnraise.ledger.ledger import Ledger
from barnraise.protocol.enums import RunStatus
from barnraise.protocol.messages import Signed
from barnraise.protocol.signing import Identity
from barnraise.spec import Start
from barnraise.training import fetch_monitor
from barnraise.training.checkpoint import CheckpointSlots
from barnraise.training.join import DIRECTIVE_FILE

TRIGGER = (
    "CREATE TRIGGER full BEFORE INSERT ON headers BEGIN SELECT RAISE(ABORT, 'disk is full'); END"
)


MIRROR = Identity(b"m" * 32)  # the key that signs the swarm's tickets


def raise_disk_full(*paths):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("written_file", ["payload", "ledger", "checkpoint"])
def test_full_disk_ends_in_one_sentence_and_the_next_join_continues(
    swarm, monkeypatch, written_file
):
    run = swarm(token_budget=10_000_000)
    ada = run.start("ada")
    run.until(lambda: ada.status.get("updates_sent", 0) > 1)
    database = ada.worker.joined.folder.path / "ledger.sqlite"
    if written_file == "payload":
        monkeypatch.setattr(blobs_module, "write_into_place", raise_disk_full)
    elif written_file == "ledger":
        with sqlite3.connect(database) as db:
            db.execute(TRIGGER)
    else:
        monkeypatch.setattr(ada.worker.saved_state.checkpoint, "save", raise_disk_full)
    with pytest.raises(StateError, match=r"stopped: .* holds is whole; join again"):
        ada.join()
    run.volunteers.remove(ada)
    monkeypatch.undo()
    with sqlite3.connect(database) as db:
        db.execute("DROP TRIGGER IF EXISTS full")
    back = run.start("ada")  # the folder is unlocked and whole
    sent = ada.status["updates_sent"]
    run.until(lambda: back.status.get("updates_sent", 0) > sent)
    back.leave()


@pytest.mark.parametrize("missing", ["the text", "the initial weights"])
def test_machine_ends_when_the_run_is_over_and_nobody_has(swarm, monkeypatch, missing):
    """The others have finished and left while this machine started: nobody will ever send it."""
    monkeypatch.setattr(fetch_monitor, "STALLED_SECONDS", 0.2)
    run = swarm()
    if missing == "the initial weights":
        fragments = tuple(f"{n:064x}" for n in range(run.spec.model.layers + 2))
        run.spec = replace(run.spec, start=Start(model="folder", fragments=fragments))
    site = FakeCoordinator(MIRROR, run.manifest.run)
    try:
        late = run.start("late", with_text=False, site=site.url)
        site.directive["machine"] = late.worker.joined.machine
        run.until(lambda: late.status.get("reason") == f"no machine with {missing} is on")
        site.directive["status"] = RunStatus.FINISHED
        with pytest.raises(StateError, match=f"is finished, and no machine that has {missing} is"):
            late.join()
    finally:
        site.close()


def test_occupied_port_ends_in_one_sentence(swarm):
    run = swarm()
    home = run.home("ada")
    other = run.network.transport(home.identity.key)
    asyncio.run(other.start())
    ada = run.start("ada")
    with pytest.raises(StateError, match="on this network already"):
        ada.join()
    home.open_run(ada.worker.joined.run).close()  # the folder is unlocked


def test_lost_ledger_restarts_from_peers_under_a_new_incarnation(swarm):
    run = swarm(token_budget=10_000_000)
    ada, ben = run.start("ada", knows=["ben"]), run.start("ben", knows=["ada"])
    run.until(
        lambda: ben.status.get("updates_sent", 0) > 2 and ada.status.get("updates_received", 0) > 2
    )
    ben.leave()
    folder = ben.worker.joined.folder.path
    for name in folder.glob("ledger.sqlite*"):
        name.unlink()
    before = ben.worker.exchange.author.name
    back = run.start("ben", knows=["ada"])
    run.until(lambda: back.worker.exchange.author.last_seq > 1)
    assert back.worker.exchange.author.name != before, (
        "a new incarnation cannot reuse the number of a lost update"
    )
    assert not ada.worker.ledger.verdicts.forks
    run.until(lambda: ada.status["updates_received"] > ben.status["updates_sent"])
    for volunteer in (back, ada):
        volunteer.leave()


def test_two_damaged_slots_of_a_late_joiner_are_recovered(swarm):
    run = swarm(token_budget=10_000_000)
    ada = run.start("ada")
    run.until(lambda: ada.status.get("updates_sent", 0) > 2)
    late = run.start("late", knows=["ada"])
    run.until(lambda: late.status.get("updates_sent", 0) > 2)
    late.leave()
    checkpoint = late.worker.joined.folder.path / "checkpoint"
    for slot in ("a", "b"):
        (checkpoint / slot / "tensors.safetensors").write_bytes(b"rot")
    back = run.start("late", knows=["ada"])
    sent = late.status["updates_sent"]
    run.until(lambda: back.status.get("updates_sent", 0) > sent)
    back.leave()
    ada.leave()


def test_first_report_after_a_restart_contains_the_totals(swarm):
    run = swarm(token_budget=10_000_000)
    ada = run.start("ada")
    run.until(lambda: ada.status.get("updates_sent", 0) > 1)
    ada.leave()
    back = run.start("ada")
    run.until(lambda: back.status.get("updates_sent", 0) > ada.status["updates_sent"])
    reports = back.worker.reporter.unsent_reports()
    tokens = [report.tokens for report in reports]
    assert tokens == sorted(tokens), "a total that falls back to zero would be counted twice"
    assert all(report.anchor is None for report in reports if report.activity == "joining")
    back.leave()


def test_ctrl_c_interrupts_fetching_the_anchor_and_the_text(swarm):
    run = swarm(token_budget=10_000_000)
    waiting = run.start("ada", with_text=False)  # no peer has the text
    run.until(lambda: waiting.status.get("activity") == "preparing")
    started_at = time.monotonic()
    waiting.leave()
    assert time.monotonic() - started_at < 20

    joining = run.start("cleo", knows=["nobody"])
    time.sleep(0.5)
    started_at = time.monotonic()
    joining.leave()
    assert time.monotonic() - started_at < 20
    assert CheckpointSlots(joining.worker.joined.folder.path / "checkpoint").load() is None


def test_ctrl_c_interrupts_a_finished_worker_that_waits_for_peers(swarm):
    run = swarm(token_budget=20_000)
    ada = run.start("ada")
    ada.worker.is_synchronized = lambda: False
    run.until(lambda: ada.status.get("activity") == "finishing")
    started_at = time.monotonic()
    ada.leave()
    assert time.monotonic() - started_at < 20


def test_revocation_is_stored_for_times_without_a_coordinator(swarm):
    ada = swarm(token_budget=10_000_000).start("ada")
    joined, reporter = ada.worker.joined, ada.worker.reporter
    fields = {"revoked": ["e" * 64], "issued": time.time()}
    revoking = joined.directive.model_copy(update=fields)
    reporter.directive = revoking
    reporter.signed_directive = MIRROR.sign("directive", revoking)
    stored = joined.folder.path / DIRECTIVE_FILE
    deadline = time.monotonic() + 20
    while not stored.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ada.leave()
    assert Signed.model_validate_json(stored.read_bytes()) == MIRROR.sign("directive", revoking)


def test_payload_damaged_on_disk_never_reaches_the_anchor(swarm, monkeypatch):
    """The checkpoint is lost as well, so the whole ledger is replayed; no peer has it."""
    monkeypatch.setattr(exchange_module, "REPAIR_SECONDS", 0.5)
    run = swarm(token_budget=10_000_000)
    ada = run.start("ada")
    run.until(lambda: ada.status.get("updates_sent", 0) >= 1)
    ada.leave()
    folder = ada.worker.joined.folder.path
    ledger = Ledger(folder)
    _, first = next(ledger.updates_since({}))
    ledger.close()
    path = BlobStore(folder / "blobs").path(first.fragments[1].digest)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    shutil.rmtree(folder / "checkpoint")
    back = run.start("ada")
    back.thread.join(60)
    assert isinstance(back.failure[0], StateError) and "is damaged" in str(back.failure.pop())
