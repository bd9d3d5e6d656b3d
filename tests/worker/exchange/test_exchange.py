"""Whole exchanges with real files, threads and signatures: in memory, and once over iroh."""

import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.raw_peer import connect_raw_peer
from helpers.wait_for import wait_until, within

from barnraise.exchange.gossip import requests as requests_module
from barnraise.exchange.updates.update_receiver import UpdateReceiver
from barnraise.ledger import blob_store as blobs_module
from barnraise.peering.transports.framing import unpack
from barnraise.peering.transports.iroh_transport import IrohTransport
from barnraise.protocol import messages
from barnraise.training import prefetch

# ---- agreement


def test_three_exchanges_agree_bit_for_bit(world):
    a, b, c = (world.machine(n).start() for n in (1, 2, 3))
    b.add_peers(a)
    c.add_peers(a)
    for seed in range(4):
        for machine in (a, b, c):
            machine.publish_round(100 * machine.number + seed)
            machine.step()
    world.wait_for_agreement(a, b, c)
    assert a.anchor.tokens == a.ledger.tokens == 12 * 100
    stats = a.exchange.stats
    assert (stats.updates_sent, stats.updates_received, stats.updates_behind) == (4, 8, 0)
    assert stats.bytes_sent > 0 and stats.bytes_received > 0
    # b and c learn each other's address from a.
    wait_until(lambda: all(machine.exchange.stats.peers == 2 for machine in (a, b, c)))


def test_three_exchanges_over_iroh_agree(world):
    world.transport = lambda identity: IrohTransport(identity.secret, "127.0.0.1")
    a, b, c = (world.machine(n).start() for n in (1, 2, 3))
    b.add_peers(a)
    c.add_peers(a)
    for seed in range(3):
        for machine in (a, b, c):
            machine.publish_round(100 * machine.number + seed)
    world.wait_for_agreement(a, b, c)


def test_exchanges_on_a_slow_lossy_network_agree(world):
    world.network.bandwidth, world.network.delay, world.network.loss = 2e5, 0.02, 0.1
    a, b = (world.machine(n).start() for n in (1, 2))
    b.add_peers(a)
    for seed in range(5):
        a.publish_round(seed)
        b.publish_round(100 + seed)
    world.wait_for_agreement(a, b, seconds=60.0)


def test_exchange_after_a_partition_catches_up(world):
    a, b, c = (world.machine(n).start() for n in (1, 2, 3))
    b.add_peers(a)
    c.add_peers(a, b)
    a.publish_round(1)
    world.wait_for_agreement(a, b, c)
    world.network.partition({a.identity.key, b.identity.key}, {c.identity.key})
    for seed in range(3):
        a.publish_round(10 + seed)
        c.publish_round(20 + seed)
    world.wait_for_agreement(a, b)
    assert c.anchor.vector != a.anchor.vector
    world.network.heal()
    world.wait_for_agreement(a, b, c)


def test_update_of_a_departed_author_arrives_through_a_third_peer(world):
    a, b = (world.machine(n).start() for n in (1, 2))
    b.add_peers(a)
    a.publish_round(1)
    world.wait_for_agreement(a, b)
    a.stop()
    # c has never met the author, whose ticket is sent with the update.
    c = world.machine(3).start().add_peers(b)
    world.wait_for_agreement(b, c)


def test_is_synchronized_once_all_peers_are_complete_and_equal(world):
    a, b = (world.machine(n).start() for n in (1, 2))
    b.add_peers(a)
    a.publish_round(1)
    world.wait_for_agreement(a, b)
    assert not a.exchange.is_synchronized()
    a.exchange.announce_completion()
    b.exchange.announce_completion()
    wait_until(lambda: a.exchange.is_synchronized() and b.exchange.is_synchronized())


def test_weight_of_new_peers_is_equal_at_least_and_one_alone(world):
    a, b = (world.machine(n).start() for n in (1, 2))
    assert a.exchange.compute_weight(100.0) == 1.0
    a.exchange.announce_rate(100.0)
    b.exchange.announce_rate(300.0)
    b.add_peers(a)
    wait_until(
        lambda: a.exchange.compute_weight(100.0) == 0.5 and b.exchange.compute_weight(300.0) == 0.75
    )
    b.stop()
    wait_until(lambda: a.exchange.compute_weight(100.0) == 1.0)


def test_received_update_visits_the_disk_thread_once(world, monkeypatch):
    """Each visit wakes two threads, which costs more than most of what is done there."""
    a, b = (world.machine(n).start() for n in (1, 2))
    b.add_peers(a)
    a.publish_round(1)
    world.wait_for_agreement(a, b)
    visits: list[str] = []
    submit = ThreadPoolExecutor.submit

    def submit_and_record(self, call, *arguments):
        def visit():
            visits.append(threading.current_thread().name)
            return call(*arguments)

        return submit(self, visit)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit_and_record)
    a.publish_round(2)
    world.wait_for_agreement(a, b)
    assert [name for name in visits if name.startswith("barnraise-disk")] == ["barnraise-disk_0"]


def test_header_that_answers_a_probe_late_is_not_waited_for(world):
    """Let a push overtake the answer to a probe: the update of the answer comes when requested."""
    a, b = (world.machine(n).start() for n in (1, 2))
    updates = [a.publish_round(seed) for seed in (1, 2)]
    author = updates[0].author
    headers = [a.ledger.header(author, update.seq) for update in updates]
    tickets = [a.ledger.tickets.get(update.ticket) for update in updates]
    with connect_raw_peer(world, b, 8) as send:

        def push(index: int, has_payloads: bool) -> None:
            send(
                messages.UpdatePush(
                    header=headers[index], ticket=tickets[index], has_payloads=has_payloads
                )
            )
            for part in updates[index].payload_parts if has_payloads else ():
                payload = a.ledger.blobs.read(part.digest)
                send(messages.BlobPart(digest=part.digest, offset=0, total=part.size), payload)

        push(1, has_payloads=True)
        push(0, has_payloads=False)
        wait_until(lambda: b.exchange.server.updates.incomplete == [(author, 2)])
        send(messages.PeerState(vector={}, rate=7.0))  # arrives after the header
        links = b.exchange.server.gossip.links
        wait_until(lambda: 7.0 in [link.rate for link in links.values()])
        assert b.exchange.server.updates.incomplete == [(author, 2)]
        push(0, has_payloads=True)
        wait_until(lambda: b.ledger.vector() == {author: 2})


def test_update_that_two_peers_send_at_once_is_appended_once(world, monkeypatch, caplog):
    a, b = (world.machine(n).start() for n in (1, 2))
    update = a.publish_round(1)
    ticket = a.ledger.tickets.get(update.ticket)
    push = messages.UpdatePush(header=a.ledger.header(update.author, 1), ticket=ticket)
    append_piece = blobs_module.BlobStore.append_piece

    def append_slowly(self, *arguments):
        time.sleep(0.1)
        return append_piece(self, *arguments)

    monkeypatch.setattr(blobs_module.BlobStore, "append_piece", append_slowly)
    with connect_raw_peer(world, b, 8) as send_one, connect_raw_peer(world, b, 9) as send_other:
        for send in (send_one, send_other):
            send(push)
        for part in update.payload_parts:
            payload = a.ledger.blobs.read(part.digest)
            for send in (send_one, send_other):
                send(messages.BlobPart(digest=part.digest, offset=0, total=part.size), payload)
        wait_until(lambda: b.ledger.vector() == {update.author: 1})
        send_other(messages.PeerState(vector={}, rate=7.0))  # arrives after all parts
        links = b.exchange.server.gossip.links
        wait_until(lambda: 7.0 in [link.rate for link in links.values()])
        assert b.exchange.stats.peers == 2
    assert "an error of ours" not in caplog.text
    assert [received.header.seq for received in b.exchange.poll_updates()] == [1]


def test_update_in_flight_is_predicted_for_its_fragments_until_it_arrives(world):
    a, b = (world.machine(n).start() for n in (1, 2))
    b.add_peers(a)
    b.exchange.announce_rate(100.0)
    a.exchange.announce_rate(300.0)
    b.publish_round(1)
    for seed in range(2):
        a.publish_round(10 + seed)
        world.wait_for_agreement(a, b)
        time.sleep(1.0)  # one round of a; its update is predicted until it is four rounds late
    assert b.exchange.predict_in_flight(100.0) == (0.0, 0.0, 0.0)
    world.network.uplinks[a.identity.key] = 2000.0
    a.publish_round(20, due=[1])  # 3 kB
    wait_until(lambda: any(b.exchange.predict_in_flight(100.0)))
    first, block, last = b.exchange.predict_in_flight(100.0)
    assert first == last == 0 < block and b.anchor.vector[a.exchange.author] == 2
    world.wait_for_agreement(a, b)
    assert b.anchor.vector[a.exchange.author] == 3
    assert b.exchange.predict_in_flight(100.0) == (0.0, 0.0, 0.0)


# ---- crashes


def test_restarted_exchange_continues_from_its_directory(world):
    a, b = (world.machine(n).start() for n in (1, 2))
    b.add_peers(a)
    for seed in range(3):
        a.publish_round(seed)
        b.publish_round(10 + seed)
    world.wait_for_agreement(a, b)
    applied = a.anchor.vector
    a.stop()  # no checkpoint is saved, so the ledger replays everything
    b.publish_round(20)
    a.open()
    a.start()
    b.add_peers(a)
    world.wait_for_agreement(a, b)
    assert a.anchor.vector[b.exchange.author] == 4
    a.publish_round(30)
    world.wait_for_agreement(a, b)
    assert a.exchange.author in applied and a.anchor.vector[a.exchange.author] == 4, (
        "the incarnation is the same"
    )


def test_start_replays_only_updates_that_the_anchor_lacks(world):
    a = world.machine(1).start()
    for seed in range(3):
        a.publish_round(seed)
    a.stop()
    a.open()
    a.exchange.start({a.exchange.author: 2})
    assert [arrival.header.seq for arrival in a.exchange.poll_updates()] == [3]
    assert a.exchange.poll_updates() == []


def test_rolled_back_directory_gets_a_new_incarnation_and_its_updates(world):
    a, b = (world.machine(n).start() for n in (1, 2))
    b.add_peers(a)
    a.publish_round(1)
    world.wait_for_agreement(a, b)
    a.stop()
    shutil.copytree(a.folder, world.folder / "copy")
    a.open()
    a.start()
    b.add_peers(a)
    a.publish_round(2)
    world.wait_for_agreement(a, b)
    a.stop()
    shutil.rmtree(a.folder)
    shutil.copytree(world.folder / "copy", a.folder)
    a.open(reincarnate=lambda: "f" * 16)
    old = a.exchange.author
    a.start().add_peers(b)
    wait_until(lambda: a.exchange.author != old)
    a.publish_round(3)
    world.wait_for_agreement(a, b)
    assert a.exchange.author.endswith("f" * 16) and b.anchor.vector == {
        old: 2,
        a.exchange.author: 1,
    }


def test_unproven_claim_of_own_updates_keeps_the_incarnation(world):
    a = world.machine(1).start()
    a.publish_round(1)
    with connect_raw_peer(world, a) as send:
        send(messages.PeerState(vector={a.exchange.author: 99}, rate=1.0))
        time.sleep(0.5)
    assert a.exchange.author.endswith(a.incarnation)


def test_publish_is_durable_before_the_first_byte_is_sent(world, monkeypatch):
    a, b = (world.machine(n).start() for n in (1, 2))
    b.add_peers(a)
    wait_until(lambda: a.exchange.stats.peers == 1)
    events: list[str] = []
    (connection,) = a.exchange.server.peers.connections.values()
    channel_type, ledger_type = type(connection.channel), type(a.ledger)
    write_into_place = blobs_module.write_into_place
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

    monkeypatch.setattr(blobs_module, "write_into_place", recorded_write)
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

    monkeypatch.setattr(blobs_module, "write_into_place", raise_disk_full)
    with pytest.raises(OSError, match="No space"):
        a.publish_round(1)
    monkeypatch.undo()
    assert a.ledger.vector() == {}
    a.publish_round(1)
    assert a.ledger.vector() == {a.exchange.author: 1}


def test_server_failure_while_running_does_not_stop_training(world, monkeypatch):
    a = world.machine(1).start()

    async def fail():
        raise OSError("the network card was removed")

    monkeypatch.setattr(a.exchange.server.peers.transport, "close", fail)
    a.exchange.thread.call(a.exchange.server.stop)
    wait_until(lambda: not a.exchange.thread.is_alive())
    a.publish_round(1)
    assert a.exchange.addresses() is not None
    assert a.exchange.compute_weight(1.0) == 1.0
    assert a.exchange.poll_updates() == []


def test_stop_ends_all_threads_and_may_be_called_twice(world):
    before = set(threading.enumerate())
    a, b = (world.machine(n).start() for n in (1, 2))
    b.add_peers(a)
    a.publish_round(1)
    world.wait_for_agreement(a, b)
    assert set(threading.enumerate()) - before
    with within(20):
        a.exchange.stop()
        b.exchange.stop()
        b.exchange.stop()
    assert not set(threading.enumerate()) - before
    b.exchange.announce_rate(1.0)  # has no effect
    assert b.exchange.poll_updates() == []


def test_start_without_a_listening_transport_raises_at_once(world):
    a = world.machine(1).start()
    same_key = world.machine(1, "elsewhere")
    with pytest.raises(OSError, match="on this network already"):
        same_key.start()
    assert a.exchange.stats.peers == 0


# ---- blobs


def test_fetch_blobs_finds_the_peer_that_has_the_blob(world):
    a, b, c = (world.machine(n).start() for n in (1, 2, 3))
    data = bytes(range(256)) * 4000
    name = b.ledger.blobs.store(data)
    c.add_peers(a, b)
    wait_until(lambda: c.exchange.stats.peers == 2)
    assert c.exchange.fetch_blobs({name: None}, 20) and c.ledger.blobs.read(name) == data
    with within(20):
        assert not c.exchange.fetch_blobs({"0" * 64: None}, 1.0)


def test_fetch_of_many_files_uses_all_peers_at_once(world, monkeypatch):
    monkeypatch.setattr(prefetch, "BATCH_BLOBS", 5)  # eight files make two batches
    a, b, c = (world.machine(n).start() for n in (1, 2, 3))
    files = [bytes([n]) * 300_000 for n in range(8)]
    for machine in (a, b):
        sizes = {machine.ledger.blobs.store(data): len(data) for data in files}
        machine.exchange.set_uplink_limit(1_000_000)
    c.add_peers(a, b)
    wait_until(lambda: c.exchange.stats.peers == 2)
    assert prefetch.fetch_all_blobs(c.exchange, c.ledger.blobs, sizes, "files", lambda: False)
    assert [c.ledger.blobs.read(digest) for digest in sizes] == files
    for machine in (a, b):
        assert machine.exchange.stats.bytes_sent > 2 * 300_000, "both uplinks are used"
    with within(20):
        assert not prefetch.fetch_all_blobs(
            c.exchange, c.ledger.blobs, {"0" * 64: None}, "files", lambda: True
        )


def test_fetch_continues_where_an_interrupted_one_ended(world):
    a, b = (world.machine(n).start() for n in (1, 2))
    data = bytes(range(256)) * 4000
    name = a.ledger.blobs.store(data)
    b.ledger.blobs.append_piece(name, 0, data[:900_000], len(data))
    b.add_peers(a)
    assert b.exchange.fetch_blobs({name: len(data)}, 20) and b.ledger.blobs.read(name) == data
    assert b.exchange.stats.bytes_received < 200_000


def test_update_whose_payload_the_disk_refuses_is_not_published(world, monkeypatch):
    a = world.machine(1).start()
    store = blobs_module.BlobStore.store
    calls: list[bytes] = []

    def refuse_third(self, data, pin=False):
        calls.append(data)
        if len(calls) == 3:
            raise OSError("no space left on device")
        return store(self, data, pin)

    monkeypatch.setattr(blobs_module.BlobStore, "store", refuse_third)
    with pytest.raises(OSError, match="no space left"):
        a.publish_round(1)
    assert a.exchange.last_published_seq == 0 and a.ledger.vector() == {}
    a.publish_round(2)
    assert a.exchange.last_published_seq == 1


@pytest.mark.parametrize(
    ("method", "failing_call"),
    [("_fits_in_memory", 1), ("_check_and_append", 1), ("_append", 1), ("_append", 2)],
)
def test_update_that_could_not_be_stored_is_received_again(
    world, monkeypatch, caplog, method, failing_call
):
    """Let one call fail, as on a full disk. The link ends, and no update is lost."""
    monkeypatch.setattr(requests_module, "RETRY_DELAY", 0.2)
    a, b = (world.machine(n).start() for n in (1, 2))
    call = getattr(UpdateReceiver, method)
    calls: list[str] = []

    def fail_once(self, *arguments):
        calls.append(method)
        if len(calls) == failing_call:
            raise OSError("no space left on device")
        return call(self, *arguments)

    monkeypatch.setattr(UpdateReceiver, method, fail_once)
    b.add_peers(a)
    for seed in (1, 2, 3):
        a.publish_round(seed)
    world.wait_for_agreement(a, b)
    assert len(calls) > failing_call
    assert "no space left on device" in caplog.text
