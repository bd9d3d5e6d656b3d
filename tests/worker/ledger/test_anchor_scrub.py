"""Tests of scrubbing: damage in memory or on disk is found and repaired to the last bit."""

import errno
import logging
import os

import pytest
import torch
from helpers.wait_for import stepping, wait_until

from barnraise.errors import DamageError, StateError
from barnraise.exchange import exchange as exchange_module
from barnraise.exchange.blobs import blob_scrub as blob_scrub_module
from barnraise.exchange.stats import ChecksumView
from barnraise.ledger import anchor_scrub as anchor_scrub_module
from barnraise.ledger.anchor import Anchor, digest_fragments, initial_weights
from barnraise.ledger.anchor_scrub import AnchorScrub
from barnraise.ledger.codec import encode
from barnraise.ledger.scrub_pace import ScrubPace


@pytest.fixture(autouse=True)
def no_intervals(monkeypatch):
    monkeypatch.setattr(anchor_scrub_module, "FRAGMENT_PACE", ScrubPace(0.0, 1e9))


def check_fragments(machine, times: int = 6) -> list:
    """Check fragments in turn; return the index of each damaged one, or None."""
    return [machine.exchange.find_damaged_fragment(machine.anchor) for _ in range(times)]


def repair_fragment(machine, index: int) -> bool:
    """Repair a damaged fragment as the training loop does."""
    units = machine.exchange.rebuild_fragment(machine.anchor, index)
    if units is not None:
        machine.anchor.fragments[index] = units
    return units is not None


def flip_bit(machine, index: int, element: int = 5, bit: int = 20) -> None:
    machine.anchor.fragments[index][element] ^= 1 << bit


def start_pair(world):
    """Return two machines that agree on three updates of each."""
    a, b = world.start_linked(1, 2)
    for seed in range(3):
        a.publish_round(seed)
        b.publish_round(10 + seed)
    world.wait_for_agreement(a, b)
    return a, b


def test_anchor_scrub_intact_anchor_is_checked_fragment_by_fragment(world):
    a, _ = start_pair(world)
    assert check_fragments(a, 7) == [None] * 7
    assert a.exchange.stats.checksum == ChecksumView(checked=7)


def test_anchor_scrub_takes_at_most_its_share_of_time(world, monkeypatch):
    a, _ = start_pair(world)
    monkeypatch.setattr(anchor_scrub_module, "FRAGMENT_PACE", ScrubPace(30.0))
    assert check_fragments(a, 5) == [None] * 5
    assert a.exchange.stats.checksum.checked == 1, "the next check is due in half a minute"


@pytest.mark.parametrize("bit", [0, 20, 31])
def test_anchor_scrub_flipped_bit_is_rebuilt_from_ledger(world, caplog, bit):
    a, _ = start_pair(world)
    correct_digest = a.anchor.digest()
    value = a.anchor.fragments[1].view(-1)
    value[7] = value[7] ^ (1 << bit if bit < 31 else -(1 << 31))
    damaged = [index for index in check_fragments(a, 3) if index is not None]
    assert damaged == [1, 1], "a damaged fragment is checked until it is repaired"
    assert a.exchange.stats.checksum.damaged == "block.0"
    assert repair_fragment(a, 1) and check_fragments(a, 3) == [None] * 3
    assert a.anchor.digest() == correct_digest
    checksum = a.exchange.stats.checksum
    assert (checksum.corruptions, checksum.repaired, checksum.damaged) == (1, 1, None)
    assert "is not what its ledger adds up to" in caplog.text


def test_anchor_scrub_without_payloads_rebuilds_from_peer_at_same_state(world):
    a, b = start_pair(world)
    correct_digest = a.anchor.digest()
    for _, update in a.ledger.updates_since({}):
        for part in update.fragments:
            a.ledger.blobs.delete(part.digest)
    flip_bit(a, 0)
    b.publish_round(50)  # it is ahead, and serves a snapshot of the requested state
    with stepping(b):
        assert repair_fragment(a, 0)
    assert a.anchor.digest() == correct_digest
    assert not a.ledger.blobs.has(digest_fragments(a.anchor.fragments[:1])), (
        "the fetched fragment is deleted after the repair"
    )


def test_anchor_scrub_rejects_wrong_fragment_from_peer(world):
    a, b = start_pair(world)
    for _, update in a.ledger.updates_since({}):
        a.ledger.blobs.delete(update.fragments[0].digest)
    flip_bit(a, 0)
    flip_bit(b, 0, element=9)
    with stepping(b):
        assert not repair_fragment(a, 0)
    assert check_fragments(a, 1) == [0]


def test_anchor_scrub_without_any_source_stays_damaged_and_reports_it(world):
    a = world.machine(1).start()
    update = a.publish_round(1)
    a.ledger.blobs.delete(update.fragments[2].digest)
    flip_bit(a, 2)
    wait_until(lambda: check_fragments(a, 1) == [2])
    assert not repair_fragment(a, 2) and a.exchange.stats.checksum.damaged == "final"


def test_anchor_scrub_after_snapshot_uses_the_snapshots_checksums(world):
    a, b = start_pair(world)
    late = world.machine(3)
    late.add_peers(a, b)
    with stepping(a, b):
        snapshot = late.exchange.fetch_snapshot(30.0, trust_all=True)
    late.anchor.load(snapshot.fragments, snapshot.heads, snapshot.retracted)
    late.start()
    a.publish_round(70)
    correct_digest = world.wait_for_agreement(a, b, late)
    assert check_fragments(late, 3) == [None] * 3
    flip_bit(late, 1)
    wait_until(lambda: check_fragments(late, 1) == [1])
    assert repair_fragment(late, 1) and late.anchor.digest() == correct_digest


def test_anchor_scrub_rebuild_leaves_out_retracted_updates(world):
    a, b = start_pair(world)
    a.apply_verdict(
        world.sign_verdict({b.exchange.author.name: 1}, {a.exchange.author.name: {2: 100}})
    )
    correct_digest = world.wait_for_agreement(a, b)
    assert check_fragments(a, 3) == [None] * 3
    flip_bit(a, 0)
    assert repair_fragment(a, 0) and a.anchor.digest() == correct_digest


def test_anchor_scrub_damage_error_from_disk_counts_as_damage(world):
    a, _ = start_pair(world)

    class DamagedFragments(list):
        def __getitem__(self, index):
            if index == 1:
                raise DamageError("the anchor of block.0 are not what was written there")
            return super().__getitem__(index)

    a.anchor.fragments = DamagedFragments(a.anchor.fragments)
    assert [index for index in check_fragments(a, 2) if index is not None] == [1]


def test_anchor_scrub_without_expected_sketches_checks_nothing(world):
    a = world.machine(1)
    bare = Anchor([initial_weights(fragment, 3) for fragment in world.spec.model.fragments()])
    assert AnchorScrub(world.spec, a.ledger).check_next(bare) is None


# ---- payload files


def damage_file(machine, part) -> None:
    path = machine.ledger.blobs.path(part.digest)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_blob_scrub_damaged_payload_is_refetched_from_peer(world, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "barnraise.exchange")
    monkeypatch.setattr(blob_scrub_module, "FILE_PACE", ScrubPace(0.01, 1e9))
    a, b = start_pair(world)
    part = b.ledger.update(a.exchange.author.name, 2).fragments[1]
    damage_file(b, part)
    wait_until(lambda: b.exchange.stats.checksum.repaired == 1)
    assert b.ledger.blobs.read_verified(part.digest) is not None
    assert b.exchange.stats.checksum.corruptions == 1
    assert "is damaged" in caplog.text and "came again" in caplog.text


def test_blob_scrub_rereads_files_and_skips_empty_parts(world, monkeypatch):
    monkeypatch.setattr(blob_scrub_module, "FILE_PACE", ScrubPace(0.01, 1e9))
    a = world.machine(1).start()
    read_names: list[str] = []
    read_verified = a.ledger.blobs.read_verified

    def recorded_read(name: str) -> bytes | None:
        read_names.append(name)
        return read_verified(name)

    monkeypatch.setattr(a.ledger.blobs, "read_verified", recorded_read)
    with a.exchange.new_update(10) as update:
        update.add(0, *encode(torch.arange(a.anchor.fragments[0].numel(), dtype=torch.int32)))
    wait_until(lambda: len(read_names) > 3)
    assert set(read_names) == {update.header.fragments[0].digest}


def test_blob_scrub_unreadable_payload_is_refetched_from_peer(world, monkeypatch, caplog):
    monkeypatch.setattr(blob_scrub_module, "FILE_PACE", ScrubPace(0.01, 1e9))
    a, b = start_pair(world)
    part = b.ledger.update(a.exchange.author.name, 2).fragments[1]
    read_verified = b.ledger.blobs.read_verified
    failed: list[str] = []

    def fail_once(name: str) -> bytes | None:
        if name == part.digest and not failed:
            failed.append(name)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read_verified(name)

    monkeypatch.setattr(b.ledger.blobs, "read_verified", fail_once)
    wait_until(lambda: b.exchange.stats.checksum.repaired == 1)
    assert read_verified(part.digest) is not None and b.exchange.stats.checksum.corruptions == 1
    assert "cannot be read: [Errno 5]" in caplog.text


def test_blob_scrub_missing_files_cost_no_time(world, monkeypatch):
    monkeypatch.setattr(blob_scrub_module, "FILE_PACE", ScrubPace(0.01))
    _, b = start_pair(world)
    parts = [part for _, update in b.ledger.updates_since({}) for part in update.payload_parts]
    for part in parts[:-1]:
        b.ledger.blobs.delete(part.digest)
    damage_file(b, parts[-1])
    monkeypatch.setattr(blob_scrub_module, "BATCH_FILES", 1)
    # After the first file, the next one is due in years.
    monkeypatch.setattr(blob_scrub_module, "FILE_PACE", ScrubPace(0.01, 1e-9))
    wait_until(lambda: b.exchange.stats.checksum.corruptions == 1)


def test_damaged_payload_that_is_needed_is_refetched_at_once(world):
    a, b = start_pair(world)
    correct_digest = b.anchor.digest()
    b.stop()
    damage_file(b, a.ledger.update(a.exchange.author.name, 3).fragments[0])
    b.open()
    b.exchange.open()
    b.add_peers(a)
    wait_until(lambda: b.exchange.stats.peers == 1)
    b.start()
    assert world.wait_for_agreement(a, b) == correct_digest


def test_damaged_payload_without_source_raises_one_sentence(world, monkeypatch):
    monkeypatch.setattr(exchange_module, "REPAIR_SECONDS", 0.5)
    a = world.machine(1).start()
    update = a.publish_round(1)
    a.stop()
    damage_file(a, update.fragments[0])
    a.open()
    with pytest.raises(StateError, match="is damaged: join again from an empty folder"):
        a.start()


def test_anchor_scrub_does_not_rebuild_from_damaged_payload(world):
    a, b = start_pair(world)
    correct_digest = a.anchor.digest()
    damage_file(a, a.ledger.update(b.exchange.author.name, 1).fragments[0])
    flip_bit(a, 0)
    with stepping(b):
        assert repair_fragment(a, 0)
    assert a.anchor.digest() == correct_digest
