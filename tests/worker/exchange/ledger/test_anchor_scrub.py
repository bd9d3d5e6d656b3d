"""The anchor against its ledger: what memory or a disk has changed is found, and put right to the last bit."""

import errno
import logging
import os

import pytest
import torch
from helpers.wait_for import stepping, wait_until

from barnraise.errors import DamageError, StateError
from barnraise.exchange import exchange as exchange_module
from barnraise.exchange.compression.codec import encode
from barnraise.exchange.handlers import blob_scrub as scrub_module
from barnraise.exchange.ledger import anchor_scrub as audit_module
from barnraise.exchange.ledger.anchor import Anchor, initial_weights
from barnraise.exchange.ledger.anchor_scrub import AnchorScrub


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(audit_module, "MIN_INTERVAL", 0.0)
    monkeypatch.setattr(audit_module, "TIME_SHARE", 1e9)


def looked_at(machine, times: int = 6) -> list:
    return [machine.exchange.find_damaged_fragment(machine.anchor) for _ in range(times)]


def mend(machine, index: int) -> bool:
    """What the loop does with a damaged fragment."""
    units = machine.exchange.rebuild_fragment(machine.anchor, index)
    if units is not None:
        machine.anchor.fragments[index] = units
    return units is not None


def flip(machine, index: int, element: int = 5, bit: int = 20) -> None:
    machine.anchor.fragments[index][element] ^= 1 << bit


def pair(world):
    a, b = (world.machine(n).start() for n in (1, 2))
    b.add_peers(a)
    for seed in range(3):
        a.publish_round(seed)
        b.publish_round(10 + seed)
    world.wait_for_agreement(a, b)
    return a, b


def test_a_sound_anchor_is_looked_through_fragment_by_fragment(world):
    a, _ = pair(world)
    assert looked_at(a, 7) == [None] * 7
    assert (
        a.exchange.stats.fragments_checked,
        a.exchange.stats.corruptions,
        a.exchange.stats.damaged_fragment,
    ) == (7, 0, None)


def test_looking_takes_its_share_of_the_time_and_no_more(world, monkeypatch):
    a, _ = pair(world)
    monkeypatch.setattr(audit_module, "MIN_INTERVAL", 30.0)
    assert looked_at(a, 5) == [None] * 5
    assert a.exchange.stats.fragments_checked == 1, "the next one is due in half a minute"


@pytest.mark.parametrize("bit", [0, 20, 31])
def test_a_bit_that_flipped_in_memory_is_found_and_made_anew_from_the_ledger(world, caplog, bit):
    a, _ = pair(world)
    right = a.anchor.digest()
    value = a.anchor.fragments[1].view(-1)
    value[7] = value[7] ^ (1 << bit if bit < 31 else -(1 << 31))
    assert [found for found in looked_at(a, 3) if found is not None] == [1, 1], (
        "it stays due until it is right"
    )
    assert a.exchange.stats.damaged_fragment == "block.0"
    assert mend(a, 1) and looked_at(a, 3) == [None] * 3
    assert a.anchor.digest() == right
    stats = a.exchange.stats
    assert (stats.corruptions, stats.repaired, stats.damaged_fragment) == (1, 1, None)
    assert "is not what its ledger adds up to" in caplog.text


def test_where_payloads_are_gone_the_fragment_comes_from_a_peer_at_the_same_state(world):
    a, b = pair(world)
    right = a.anchor.digest()
    for _, update in a.ledger.updates_since({}):
        for part in update.fragments:
            a.ledger.blobs.delete(part.digest)
    flip(a, 0)
    b.publish_round(50)  # it has gone on, and makes the cut that is asked for
    with stepping(b):
        assert mend(a, 0)
    assert a.anchor.digest() == right
    assert not a.ledger.blobs.has(a.anchor.fragment_digest(0)), (
        "what was fetched for it does not stay"
    )


def test_a_peer_that_gives_another_fragment_is_not_believed(world):
    a, b = pair(world)
    for _, update in a.ledger.updates_since({}):
        a.ledger.blobs.delete(update.fragments[0].digest)
    flip(a, 0)
    flip(b, 0, element=9)
    with stepping(b):
        assert not mend(a, 0)
    assert looked_at(a, 1) == [0]


def test_with_nobody_and_nothing_to_make_it_from_it_stays_damaged_and_says_so(world):
    a = world.machine(1).start()
    update = a.publish_round(1)
    a.ledger.blobs.delete(update.fragments[2].digest)
    flip(a, 2)
    wait_until(lambda: looked_at(a, 1) == [2], 5)
    assert not mend(a, 2) and a.exchange.stats.damaged_fragment == "final"


def test_one_that_began_at_a_snapshot_goes_back_to_the_cuts_own_checksums(world):
    a, b = pair(world)
    late = world.machine(3)
    late.add_peers(a, b)
    with stepping(a, b):
        snapshot = late.exchange.fetch_snapshot(30.0)
    late.anchor.load(snapshot.fragments, snapshot.heads, snapshot.retracted)
    late.start()
    a.publish_round(70)
    right = world.wait_for_agreement(a, b, late)
    assert looked_at(late, 3) == [None] * 3
    flip(late, 1)
    wait_until(lambda: looked_at(late, 1) == [1], 5)
    assert mend(late, 1) and late.anchor.digest() == right


def test_a_fragment_that_verdicts_changed_is_made_anew_without_what_they_took_out(world):
    a, b = pair(world)
    a.exchange.apply_verdict(world.sign_verdict({b.exchange.author: 1}, {a.exchange.author: {2: 100}}))
    right = world.wait_for_agreement(a, b)
    assert looked_at(a, 3) == [None] * 3
    flip(a, 0)
    assert mend(a, 0) and a.anchor.digest() == right


def test_a_fragment_whose_disk_says_itself_that_it_is_damaged_is_found_so(world):
    a, _ = pair(world)

    class Shelf(list):
        def __getitem__(self, index):
            if index == 1:
                raise DamageError("the anchor of block.0 are not what was written there")
            return super().__getitem__(index)

    a.anchor.fragments = Shelf(a.anchor.fragments)
    assert [found for found in looked_at(a, 2) if found is not None] == [1]


def test_an_anchor_of_unknown_beginning_is_not_judged(world):
    a = world.machine(1)
    bare = Anchor([initial_weights(fragment, 3) for fragment in world.spec.model.fragments()])
    assert AnchorScrub(world.spec, a.ledger).check_next(bare) is None


# ---- payload files


def damage(machine, part) -> None:
    path = machine.ledger.blobs.path(part.digest)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_payload_file_that_changed_is_found_while_nobody_needs_it_and_comes_again_from_a_peer(
    world, monkeypatch, caplog
):
    caplog.set_level(logging.INFO, "barnraise.exchange")
    monkeypatch.setattr(scrub_module, "MIN_INTERVAL", 0.01)
    monkeypatch.setattr(scrub_module, "TIME_SHARE", 1e9)
    a, b = pair(world)
    part = b.ledger.update(a.exchange.author, 2).fragments[1]
    damage(b, part)
    wait_until(lambda: b.exchange.stats.repaired == 1)
    assert (
        b.ledger.blobs.read_verified(part.digest) is not None and b.exchange.stats.corruptions == 1
    )
    assert "is damaged" in caplog.text and "came again" in caplog.text


def test_files_are_read_again_and_no_time_is_spent_on_what_an_update_does_not_say(
    world, monkeypatch
):
    monkeypatch.setattr(scrub_module, "MIN_INTERVAL", 0.01)
    monkeypatch.setattr(scrub_module, "TIME_SHARE", 1e9)
    a = world.machine(1).start()
    read, sound = [], a.ledger.blobs.read_verified
    monkeypatch.setattr(
        a.ledger.blobs, "read_verified", lambda name: read.append(name) or sound(name)
    )
    said = encode(torch.arange(a.anchor.fragments[0].numel(), dtype=torch.int32))
    update = a.exchange.publish([said, *[None] * (len(a.anchor.fragments) - 1)], 10)
    wait_until(lambda: len(read) > 3)
    assert set(read) == {update.fragments[0].digest}


def test_a_payload_file_that_the_disk_cannot_read_comes_again_from_a_peer(
    world, monkeypatch, caplog
):
    monkeypatch.setattr(scrub_module, "MIN_INTERVAL", 0.01)
    monkeypatch.setattr(scrub_module, "TIME_SHARE", 1e9)
    a, b = pair(world)
    part, sound = b.ledger.update(a.exchange.author, 2).fragments[1], b.ledger.blobs.read_verified
    failed: list[str] = []

    def unreadable(name: str) -> bytes | None:
        if name == part.digest and not failed:
            failed.append(name)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return sound(name)

    monkeypatch.setattr(b.ledger.blobs, "read_verified", unreadable)
    wait_until(lambda: b.exchange.stats.repaired == 1)
    assert sound(part.digest) is not None and b.exchange.stats.corruptions == 1
    assert "cannot be read: [Errno 5]" in caplog.text


def test_files_that_are_not_here_any_more_cost_no_time(world, monkeypatch):
    monkeypatch.setattr(scrub_module, "MIN_INTERVAL", 0.01)
    _, b = pair(world)
    parts = [part for _, update in b.ledger.updates_since({}) for part in update.payload_parts]
    for part in parts[:-1]:
        b.ledger.blobs.delete(part.digest)
    damage(b, parts[-1])
    monkeypatch.setattr(scrub_module, "BATCH_FILES", 1)
    monkeypatch.setattr(scrub_module, "TIME_SHARE", 1e-9)  # whoever looked at one waits for years
    wait_until(lambda: b.exchange.stats.corruptions == 1)


def test_a_damaged_payload_that_is_needed_now_is_fetched_now(world):
    a, b = pair(world)
    right = b.anchor.digest()
    b.stop()
    damage(b, a.ledger.update(a.exchange.author, 3).fragments[0])
    b.open()
    b.exchange.open()
    b.add_peers(a)
    wait_until(lambda: b.exchange.stats.peers == 1)
    b.start()
    assert world.wait_for_agreement(a, b) == right


def test_a_damaged_payload_that_nobody_else_has_is_one_sentence(world, monkeypatch):
    monkeypatch.setattr(exchange_module, "REPAIR_TIMEOUT", 0.5)
    a = world.machine(1).start()
    update = a.publish_round(1)
    a.stop()
    damage(a, update.fragments[0])
    a.open()
    with pytest.raises(StateError, match="is damaged: join again from an empty folder"):
        a.start()


def test_a_fragment_is_not_made_of_a_payload_that_changed(world):
    a, b = pair(world)
    right = a.anchor.digest()
    damage(a, a.ledger.update(b.exchange.author, 1).fragments[0])
    flip(a, 0)
    with stepping(b):
        assert mend(a, 0)
    assert a.anchor.digest() == right
