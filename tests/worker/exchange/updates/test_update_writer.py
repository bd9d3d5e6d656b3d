"""An update is durable before its first byte is sent; what the disk refuses is not published."""

import pytest
from helpers.wait_for import wait_until

from barnraise.ledger import blob_store
from barnraise.peering.transports.framing import unpack


def test_publish_is_durable_before_the_first_byte_is_sent(world, monkeypatch):
    a, b = (world.machine(n).start() for n in (1, 2))
    b.add_peers(a)
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


def test_publish_on_a_full_disk_publishes_nothing(world, monkeypatch):
    a = world.machine(1).start()

    def raise_disk_full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(blob_store, "write_into_place", raise_disk_full)
    with pytest.raises(OSError, match="No space"):
        a.publish_round(1)
    monkeypatch.undo()
    assert a.ledger.vector() == {}
    a.publish_round(1)
    assert a.ledger.vector() == {a.exchange.author: 1}


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
    assert a.exchange.last_published_seq == 0 and a.ledger.vector() == {}
    a.publish_round(2)
    assert a.exchange.last_published_seq == 1
