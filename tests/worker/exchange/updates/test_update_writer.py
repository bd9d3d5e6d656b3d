"""An update is durable before its first byte is sent; what the disk refuses is not published."""

import threading
import time

import pytest
import torch
from helpers.wait_for import wait_until

from barnraise.exchange.updates import update_writer
from barnraise.exchange.updates.update_writer import UpdateWriter
from barnraise.ledger import blob_store
from barnraise.ledger.local_author import AuthorConfig, LocalAuthor
from barnraise.peering.transports.framing import unpack


def test_publish_is_durable_before_the_first_byte_is_sent(world, monkeypatch):
    a, b = world.start_linked(1, 2)
    wait_until(lambda: a.exchange.stats.peers == 1)
    events: list[str] = []
    (connection,) = a.exchange.server.peers.connections.values()
    channel_type, ledger_type = type(connection.channel), type(a.ledger)
    write_into_place = blob_store.write_into_place
    append, send = ledger_type.append, channel_type.send

    def recorded_write(*arguments):
        write_into_place(*arguments)
        events.append("file")

    def recorded_append(self, signed, update):
        outcome = append(self, signed, update)
        events.append("row")
        return outcome

    async def recorded_send(self, frame):
        message, _ = unpack(frame)
        if message.type in ("update_push", "blob_part"):
            events.append(message.type)
        await send(self, frame)

    monkeypatch.setattr(blob_store, "write_into_place", recorded_write)
    monkeypatch.setattr(ledger_type, "append", recorded_append)
    monkeypatch.setattr(channel_type, "send", recorded_send)
    a.publish_round(1)
    world.wait_for_agreement(a, b)
    fragments = len(a.anchor.fragments)
    assert events[: fragments + 2] == ["file"] * fragments + ["row", "update_push"]


def test_update_whose_payload_the_disk_refuses_is_not_published(world, monkeypatch):
    a = world.machine(1).start()
    store = blob_store.BlobStore.store
    calls: list[bytes] = []

    def refuse_third(self, data, pin=False):
        calls.append(data)
        if len(calls) == 3:
            raise OSError("no space left on device")
        return store(self, data, pin)

    monkeypatch.setattr(blob_store.BlobStore, "store", refuse_third)
    with pytest.raises(OSError, match="no space left"):
        a.publish_round(1)
    assert a.exchange.author.last_seq == 0 and a.ledger.vector() == {}
    a.publish_round(2)
    assert a.exchange.author.last_seq == 1


PARTS = [(bytes([n]) * 60, torch.full((8,), n, dtype=torch.int32)) for n in range(4)]


@pytest.fixture
def machine(world):
    """Provide a machine whose exchange does not run: nothing but the writer uses its ledger."""
    return world.machine(1)


def open_writer(machine, on_published=lambda update: None) -> UpdateWriter:
    """Return a writer of an update with as many fragments as there are parts."""
    config = AuthorConfig(
        identity=machine.identity,
        run="01890000-0000-7000-8000-000000000001",
        incarnation=machine.incarnation,
        ticket=machine.ticket,
        spec=machine.world.spec,
        clock=time.time,
        reincarnate=lambda: "0" * 16,
    )
    author = LocalAuthor(config, machine.ledger)
    return UpdateWriter(author, machine.ledger.blobs, len(PARTS), 100, on_published)


def test_fragments_that_are_left_out_become_empty_parts(machine):
    with open_writer(machine) as writer:
        writer.add(1, *PARTS[1])
        writer.add(2, *PARTS[2])
        with pytest.raises(AssertionError, match="ascend"):
            writer.add(1, *PARTS[1])
    assert [part.size for part in writer.header.fragments] == [0, 60, 60, 0]


def test_block_that_raises_publishes_nothing_and_pins_no_payload(machine):
    published = []
    with (
        pytest.raises(RuntimeError, match="training failed"),
        open_writer(machine, published.append) as writer,
    ):
        writer.add(0, *PARTS[0])
        raise RuntimeError("training failed")
    assert not published and not machine.ledger.vector()
    (name,) = (path.name for path in machine.ledger.blobs.folder.glob("*/*"))
    assert machine.ledger.blobs.remove_unless_pinned(name)


def test_row_that_the_disk_refuses_is_not_reported_as_published(machine, monkeypatch):
    def refuse(*arguments):
        raise OSError("no space left on device")

    monkeypatch.setattr(machine.ledger, "append", refuse)
    published = []
    with (
        pytest.raises(OSError, match="no space left"),
        open_writer(machine, published.append) as writer,
    ):
        writer.add(0, *PARTS[0])
    assert not published and not machine.ledger.vector()


def test_payloads_that_wait_for_the_disk_are_bounded(machine, monkeypatch):
    """Two payloads are more than may wait: each is on the disk before the next one is added."""
    monkeypatch.setattr(update_writer, "MAX_PENDING_BYTES", 100)
    store, lock = machine.ledger.blobs.store, threading.Lock()
    stored_at_once = []

    def store_slowly(data):
        stored_at_once.append(lock.acquire(blocking=False))
        time.sleep(0.05)
        if stored_at_once[-1]:
            lock.release()
        return store(data)

    monkeypatch.setattr(machine.ledger.blobs, "store", store_slowly)
    with open_writer(machine) as writer:
        for fragment, part in enumerate(PARTS):
            writer.add(fragment, *part)
    assert stored_at_once == [True] * len(PARTS)
