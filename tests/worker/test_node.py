"""The exchange between whole nodes: real files, threads and signatures, on a network in memory, and once on iroh."""

import asyncio
import logging
import shutil
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from blake3 import blake3

from barnraise import wire
from barnraise.errors import StateError
from barnraise.exchange import blobs as blobs_module
from barnraise.exchange import door as door_module
from barnraise.exchange import inbox as inbox_module
from barnraise.exchange import link as link_module
from barnraise.exchange.anchor import sketch
from barnraise.exchange.codec import encode
from barnraise.exchange.frames import pack, unpack
from barnraise.exchange.transport import ChannelClosed, IrohTransport
from barnraise.exchange.verdicts import Fork
from barnraise.identity import Identity, digest

OTHER_RUN = "01890000-0000-7000-8000-00000000000f"


def waits_for(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.01)


@contextmanager
def within(seconds: float):
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


# ---- agreement


def test_three_nodes_trade_updates_and_agree_to_the_last_bit(world):
    a, b, c = (world.machine(n).start() for n in (1, 2, 3))
    b.knows(a)
    c.knows(a)
    for seed in range(4):
        for machine in (a, b, c):
            machine.round(100 * machine.number + seed)
            machine.step()
    world.agree(a, b, c)
    assert a.anchor.tokens == a.ledger.tokens == 12 * 100
    assert (a.node.stats.updates_sent, a.node.stats.updates_received, a.node.stats.behind) == (4, 8, 0)
    assert a.node.stats.bytes_sent > 0 < a.node.stats.bytes_received
    waits_for(lambda: all(m.node.stats.peers == 2 for m in (a, b, c)))  # learnt from each other


def test_three_nodes_agree_over_iroh(world):
    world.transport = lambda identity: IrohTransport(identity.secret, "127.0.0.1")
    a, b, c = (world.machine(n).start() for n in (1, 2, 3))
    b.knows(a)
    c.knows(a)
    for seed in range(3):
        for machine in (a, b, c):
            machine.round(100 * machine.number + seed)
    world.agree(a, b, c)


def test_nodes_agree_over_a_slow_and_lossy_line(world):
    world.network.bandwidth, world.network.delay, world.network.loss = 2e5, 0.02, 0.1
    a, b = (world.machine(n).start() for n in (1, 2))
    b.knows(a)
    for seed in range(5):
        a.round(seed)
        b.round(100 + seed)
    world.agree(a, b)


def test_a_cut_off_node_goes_on_and_catches_up_when_the_network_heals(world):
    a, b, c = (world.machine(n).start() for n in (1, 2, 3))
    b.knows(a)
    c.knows(a, b)
    a.round(1)
    world.agree(a, b, c)
    world.network.partition({a.identity.key, b.identity.key}, {c.identity.key})
    for seed in range(3):
        a.round(10 + seed)
        c.round(20 + seed)
    world.agree(a, b)
    assert c.anchor.vector != a.anchor.vector
    world.network.heal()
    world.agree(a, b, c)


def test_an_update_reaches_a_node_through_a_third_one_when_its_author_is_gone(world):
    a, b = (world.machine(n).start() for n in (1, 2))
    b.knows(a)
    a.round(1)
    world.agree(a, b)
    a.stop()
    c = world.machine(3).start().knows(b)  # it never met the author: the ticket travels with the update
    world.agree(b, c)


def test_settled_once_everybody_is_complete_with_the_same_updates(world):
    a, b = (world.machine(n).start() for n in (1, 2))
    b.knows(a)
    a.round(1)
    world.agree(a, b)
    assert not a.node.settled()
    a.node.complete()
    b.node.complete()
    waits_for(lambda: a.node.settled() and b.node.settled())


def test_weights_follow_the_announced_rates_and_are_one_when_alone(world):
    a, b = (world.machine(n).start() for n in (1, 2))
    assert a.node.weight(100.0) == 1.0
    a.node.announce(100.0)
    b.node.announce(300.0)
    b.knows(a)
    waits_for(lambda: a.node.weight(100.0) == 0.25 and b.node.weight(300.0) == 0.75)
    b.stop()
    waits_for(lambda: a.node.weight(100.0) == 1.0)


# ---- crashes


def test_a_node_killed_and_restarted_goes_on_from_its_folder(world):
    a, b = (world.machine(n).start() for n in (1, 2))
    b.knows(a)
    for seed in range(3):
        a.round(seed)
        b.round(10 + seed)
    world.agree(a, b)
    applied = a.anchor.vector
    a.stop()  # what a checkpoint had not seen comes back out of the ledger
    b.round(20)
    a.open()
    a.start()
    b.knows(a)
    world.agree(a, b)
    assert a.anchor.vector[b.node.author] == 4
    a.round(30)
    world.agree(a, b)
    assert a.node.author in applied and a.anchor.vector[a.node.author] == 4, "the incarnation is the same"


def test_a_node_gets_from_its_ledger_only_what_its_anchor_lacks(world):
    a = world.machine(1).start()
    for seed in range(3):
        a.round(seed)
    a.stop()
    a.open()
    a.node.start({a.node.author: 2})
    assert [arrival.header.seq for arrival in a.node.arrived()] == [3]
    assert a.node.arrived() == []


def test_a_folder_restored_from_an_old_copy_takes_a_new_incarnation_and_gets_its_lost_updates_back(world):
    a, b = (world.machine(n).start() for n in (1, 2))
    b.knows(a)
    a.round(1)
    world.agree(a, b)
    a.stop()
    shutil.copytree(a.folder, world.folder / "copy")
    a.open()
    a.start()
    b.knows(a)
    a.round(2)
    world.agree(a, b)
    a.stop()
    shutil.rmtree(a.folder)
    shutil.copytree(world.folder / "copy", a.folder)
    a.open(reincarnate=lambda: "f" * 16)
    old = a.node.author
    a.start().knows(b)
    waits_for(lambda: a.node.author != old)
    a.round(3)
    world.agree(a, b)
    assert a.node.author.endswith("f" * 16) and b.anchor.vector == {old: 2, a.node.author: 1}


def test_no_incarnation_is_renewed_on_a_mere_claim(world):
    a = world.machine(1).start()
    a.round(1)
    with stranger(world, a) as say:
        say(wire.State(vector={a.node.author: 99}, rate=1.0))
        time.sleep(0.5)
    assert a.node.author.endswith(a.incarnation)


def test_payloads_and_the_ledgers_row_are_safe_before_the_first_byte_is_sent(world, monkeypatch):
    a, b = (world.machine(n).start() for n in (1, 2))
    b.knows(a)
    waits_for(lambda: a.node.stats.peers == 1)
    events: list[str] = []
    settle, send = blobs_module._settle, type(next(iter(a.node._hub.links.values())).channel).send
    append = type(a.ledger).append

    def settled(*paths):
        settle(*paths)
        events.append("file")

    def appended(self, signed, update):
        outcome = append(self, signed, update)
        events.append("row")
        return outcome

    async def sent(self, frame):
        message, _ = unpack(frame)
        if message.type in ("push", "part"):
            events.append(message.type)
        await send(self, frame)

    monkeypatch.setattr(blobs_module, "_settle", settled)
    monkeypatch.setattr(type(a.ledger), "append", appended)
    monkeypatch.setattr(type(next(iter(a.node._hub.links.values())).channel), "send", sent)
    a.round(1)
    world.agree(a, b)
    fragments = len(a.anchor.fragments)
    assert events[: fragments + 2] == ["file"] * fragments + ["row", "push"]


def test_a_disk_that_refuses_publishes_nothing(world, monkeypatch):
    a = world.machine(1).start()

    def full(*paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(blobs_module, "_settle", full)
    with pytest.raises(OSError, match="No space"):
        a.round(1)
    monkeypatch.undo()
    assert a.ledger.vector() == {}
    a.round(1)
    assert a.ledger.vector() == {a.node.author: 1}


def test_more_authors_than_a_message_holds_do_not_end_the_exchange(world, monkeypatch):
    a, b = (world.machine(n).start() for n in (1, 2))
    many = {f"{n:064x}.{'0' * 16}": 1 for n in range(2100)}
    a.node._tell(a.node._hub.gossip.vector.update, many)  # on the thread that reads it
    b.knows(a)
    a.round(1)
    waits_for(lambda: a.node.author in b.ledger.vector())
    assert a.node._thread.is_alive() and b.node._thread.is_alive()


def test_an_exchange_that_breaks_while_it_runs_does_not_take_the_loop_with_it(world, monkeypatch):
    a = world.machine(1).start()

    async def broken():
        raise OSError("the network card was pulled out")

    monkeypatch.setattr(a.node._hub.transport, "close", broken)
    a.node._tell(a.node._hub.stop)
    a.node._thread.join()
    a.round(1)
    assert a.node.addresses() is not None and a.node.weight(1.0) == 1.0 and a.node.arrived() == []


def test_a_node_that_stops_leaves_no_thread_and_may_stop_twice(world):
    before = set(threading.enumerate())
    a, b = (world.machine(n).start() for n in (1, 2))
    b.knows(a)
    a.round(1)
    world.agree(a, b)
    assert set(threading.enumerate()) - before
    with within(5):
        a.node.stop()
        b.node.stop()
        b.node.stop()
    assert not set(threading.enumerate()) - before
    b.node.announce(1.0)  # nobody is told, and nothing breaks
    assert b.node.arrived() == []


def test_a_transport_that_cannot_listen_is_an_error_at_once(world):
    a, again = world.machine(1).start(), world.machine(1, "elsewhere")
    with pytest.raises(OSError, match="on this network already"):
        again.start()
    assert a.node.stats.peers == 0


# ---- blobs


def test_a_blob_is_fetched_from_whoever_has_it_and_checked(world):
    a, b, c = (world.machine(n).start() for n in (1, 2, 3))
    data = bytes(range(256)) * 4000
    name = b.ledger.blobs.put(data)
    c.knows(a, b)
    waits_for(lambda: c.node.stats.peers == 2)
    assert c.node.fetch(name, 20).read_bytes() == data
    with within(5):
        assert c.node.fetch("0" * 64, 1.0) is None


def test_a_fetch_goes_on_from_where_an_interrupted_one_ended(world):
    a, b = (world.machine(n).start() for n in (1, 2))
    data = bytes(range(256)) * 4000
    name = a.ledger.blobs.put(data)
    b.ledger.blobs.extend(name, 0, data[:900_000], len(data))
    b.knows(a)
    assert b.node.fetch(name, 20).read_bytes() == data
    assert b.node.stats.bytes_received < 200_000


def test_a_peer_that_does_not_read_holds_up_nobody_else(world):
    a, b = (world.machine(n).start() for n in (1, 2))
    big = a.ledger.blobs.put(bytes(40_000_000))
    with stranger(world, a, reads=False) as say:
        for _ in range(3):
            say(wire.Want(digest=big))
        b.knows(a)
        waits_for(lambda: a.node.stats.peers == 2)
        with within(10):
            for seed in range(5):
                a.round(seed)
            world.agree(a, b)


# ---- bad input: the connection ends, with a logged reason, and nothing changes


@contextmanager
def stranger(world, machine, number=9, hello=None, reads=True, channels=None):
    """A connection to `machine` by somebody who says what the test tells it to. `say` sends a message or a frame."""
    identity, loop = Identity(bytes([number]) * 32), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    run = lambda work: asyncio.run_coroutine_threadsafe(work, loop).result(20)  # noqa: E731
    transport = world.network.transport(identity.key)
    run(transport.start())
    channel = run(transport.connect(wire.Peer(key=machine.identity.key, addresses=["memory:x"])))
    reader = None
    if channels is not None:
        channels.append((channel, run))

    async def read():
        while True:
            await channel.receive()

    try:
        run(channel.send(pack(hello or greeting(world, identity))))
        if reads:
            reader = asyncio.run_coroutine_threadsafe(read(), loop)
        yield lambda message, payload=b"": run(
            channel.send(message if isinstance(message, bytes) else pack(message, payload))
        )
    finally:
        if reader:
            reader.cancel()
        run(transport.close())
        run(asyncio.sleep(0))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def greeting(world, identity, **changed):
    parts = dict(
        protocols=[1], version="1", run="01890000-0000-7000-8000-000000000001", spec=digest(world.spec.to_json()),
        incarnation="9" * 16, ticket=world.ticket(identity.key, 9), addresses=[],
    )  # fmt: skip
    return wire.Hello(**(parts | changed))


def refused(world, machine, caplog, messages, why, hello=None):
    """Says these things, and sees the connection end for that reason with nothing changed."""
    caplog.set_level(logging.INFO, "barnraise.exchange")
    before = (machine.ledger.vector(), machine.anchor.digest())
    channels = []
    with stranger(world, machine, hello=hello, reads=False, channels=channels) as say:
        for message in messages:
            say(message)
        channel, run = channels[0]

        async def drained():
            while True:
                await channel.receive()

        with pytest.raises(ChannelClosed):
            run(asyncio.wait_for(drained(), 15))
    machine.step()
    assert (machine.ledger.vector(), machine.anchor.digest()) == before
    waits_for(lambda: any(why in record.getMessage() for record in caplog.records), 5)
    waits_for(lambda: machine.node.stats.peers == 0, 5)


STRANGER = Identity(bytes([9]) * 32)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (lambda w: {"run": OTHER_RUN}, "it works on run"),
        (lambda w: {"spec": "0" * 64}, "it has spec 00000000"),
        (lambda w: {"protocols": [7]}, "it speaks protocols [7]"),
        (lambda w: {"ticket": w.ticket(STRANGER.key, expires=1.0)}, "expired"),
        (lambda w: {"ticket": w.ticket(STRANGER.key, run=OTHER_RUN)}, "the ticket is for run"),
        (lambda w: {"ticket": w.ticket("a" * 64)}, "the ticket is for peer aaaaaaaa"),
        (lambda w: {"ticket": w.ticket(STRANGER.key, by=STRANGER)}, "is not a mirror of this run"),
        (lambda w: {"ticket": w.ticket(STRANGER.key).model_copy(update={"signature": "0" * 128})}, "signature"),
    ],
)
def test_a_peer_without_a_good_ticket_for_this_run_is_refused(world, caplog, changed, why):
    a = world.machine(1).start()
    refused(world, a, caplog, [], why, hello=greeting(world, STRANGER, **changed(world)))


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (lambda w: b"\x00\x00\x00\x05{}", "header has 5"),
        (lambda w: b"\x7f\xff\xff\xff" + b"x" * 100, "says its header has"),
        (lambda w: b"garbage", "a frame"),
        (lambda w: wire.Directives(directive=w.ticket("a" * 64)), "the directive by"),
        (lambda w: wire.Push(header=header(w, STRANGER, sign_as="ticket")), "signature does not match"),
        (lambda w: wire.Push(header=header(w, STRANGER, run=OTHER_RUN)), "is for run"),
        (lambda w: wire.Push(header=header(w, STRANGER, peer="a" * 64)), "is signed by"),
        (lambda w: wire.Push(header=header(w, STRANGER, tokens=1 << 40)), "claims"),
        (lambda w: wire.Push(header=header(w, STRANGER, previous="1" * 64)), "does not continue"),
        (lambda w: wire.Push(header=header(w, Identity(b"n" * 32))), "without a ticket"),
        (lambda w: w.ruling(by=(STRANGER,)), "neither the run's owner nor one of its mirrors"),
        (lambda w: w.ruling(run=OTHER_RUN), "is for run"),
        (lambda w: Fork(one=header(w, STRANGER), other=header(w, STRANGER), ticket=w.ticket(STRANGER.key)), "not two"),
    ],
)  # fmt: skip
def test_a_message_that_should_not_have_been_sent_ends_the_connection(world, caplog, message, why):
    a = world.machine(1).start()
    refused(world, a, caplog, [message(world)], why)


def header(world, identity, sign_as="update", **changed):
    """A header of noise, with its payloads' names, for `identity`'s first update."""
    payloads = noise(world)
    parts = dict(
        run="01890000-0000-7000-8000-000000000001", peer=identity.key, incarnation="9" * 16, seq=1,
        previous=digest(""), tokens=10, total=changed.get("tokens", 10),
        fragments=[
            wire.FragmentUpdate(digest=blake3(data).hexdigest(), size=len(data), sketch=mark) for data, mark in payloads
        ],
    )  # fmt: skip
    return identity.sign(sign_as, wire.Update(**(parts | changed)))


def noise(world):
    made = []
    for fragment in world.spec.model.fragments():
        values = torch.arange(fragment.size, dtype=torch.int32) % 127 - 50
        payload, sent = encode(values)
        made.append((payload, sketch(sent)))
    return made


def test_an_altered_payload_ends_the_connection_and_changes_nothing(world, caplog):
    a = world.machine(1).start()
    (first, _), *_ = noise(world)
    name = blake3(first).hexdigest()
    part = pack(wire.Part(digest=name, offset=0, total=len(first)), b"\0" + first[1:])
    refused(world, a, caplog, [wire.Push(header=header(world, STRANGER)), part], "not what their digest says")


def test_a_payload_of_another_size_than_signed_is_refused(world, caplog):
    a = world.machine(1).start()
    name = blake3(noise(world)[0][0]).hexdigest()
    part = pack(wire.Part(digest=name, offset=0, total=1 << 40), b"x")
    refused(world, a, caplog, [wire.Push(header=header(world, STRANGER)), part], "its header says")


def test_an_update_whose_integers_are_not_what_its_header_says_is_never_taken(world, caplog):
    a = world.machine(1).start()
    sound = wire.Update.model_validate_json(header(world, STRANGER).body)
    lying = [part.model_copy(update={"sketch": "0" * 16}) for part in sound.fragments]
    parts = [
        pack(wire.Part(digest=blake3(data).hexdigest(), offset=0, total=len(data)), data) for data, _ in noise(world)
    ]
    push = wire.Push(header=header(world, STRANGER, fragments=lying))
    refused(world, a, caplog, [push, *parts], "checksum")


def test_a_stranger_with_a_good_ticket_and_sound_updates_is_welcome(world):
    a = world.machine(1).start()
    with stranger(world, a) as say:
        say(wire.Push(header=header(world, STRANGER)))
        for data, _ in reversed(noise(world)):
            say(wire.Part(digest=blake3(data).hexdigest(), offset=0, total=len(data)), data)
        waits_for(lambda: a.ledger.vector() == {f"{STRANGER.key}.{'9' * 16}": 1})
    (arrival,) = a.node.arrived()
    assert arrival.decode(0)[:3].tolist() == [-50, -49, -48]


def test_headers_whose_payloads_never_come_do_not_keep_everybody_else_out(world, monkeypatch):
    monkeypatch.setattr(inbox_module, "PENDING_OF_ONE", 3)
    monkeypatch.setattr(inbox_module, "STALE", 1.0)
    a = world.machine(1).start()
    inbox = a.node._hub.inbox
    with stranger(world, a) as say:
        for life in range(20):
            say(wire.Push(header=header(world, STRANGER, incarnation=f"{life:016x}")))
        data, _ = noise(world)[0]
        name = blake3(data).hexdigest()
        say(wire.Part(digest=name, offset=0, total=len(data)), data[:-1])
        waits_for(lambda: a.ledger.blobs.started(name))
        assert len(inbox._pending) == 3
        b = world.machine(2).start().knows(a)
        b.round(1)
        world.agree(a, b)
        time.sleep(1.1)
        for life in range(20, 23):
            say(wire.Push(header=header(world, STRANGER, incarnation=f"{life:016x}")))
        waits_for(lambda: {author[-2:] for author, _ in inbox._pending} == {"14", "15", "16"})
        inbox._cut(f"{STRANGER.key}.{20:016x}", "the test says so")
        assert a.ledger.blobs.started(name), "others still wait for it"
        for life in (21, 22):
            inbox._cut(f"{STRANGER.key}.{life:016x}", "the test says so")
        assert not a.ledger.blobs.started(name), "what nobody waits for does not stay on the disk"


def test_pieces_nobody_asked_for_are_let_go_by(world):
    a = world.machine(1).start()
    with stranger(world, a) as say:
        say(wire.Part(digest="a" * 64, offset=0, total=10), b"0123456789")
        time.sleep(0.2)
        assert a.node.stats.peers == 1 and not a.ledger.blobs.has("a" * 64) and not a.ledger.blobs.started("a" * 64)


def test_a_revoked_peer_is_dropped_and_not_let_in_again_and_the_directive_travels_on(world, caplog):
    caplog.set_level(logging.INFO, "barnraise.exchange")
    a, b, c = (world.machine(n).start() for n in (1, 2, 3))
    c.knows(a, b)
    b.knows(a)
    waits_for(lambda: all(m.node.stats.peers == 2 for m in (a, b, c)))
    directive = wire.Directive(
        run="01890000-0000-7000-8000-000000000001", machine="01890000-0000-7000-8000-000000000001",
        status="training", revoked=[c.identity.key], issued=time.time(),
    )  # fmt: skip
    a.node.revoke(directive.revoked, world.mirror.sign("directive", directive))
    waits_for(lambda: a.node.stats.peers == 1 and b.node.stats.peers == 1 and c.node.stats.peers == 0)
    c.knows(a, b)
    time.sleep(1.5)
    assert c.node.stats.peers == 0
    assert any("was revoked" in record.getMessage() for record in caplog.records)


def test_a_ticket_that_runs_out_ends_the_connection_unless_it_is_renewed_in_time(world, monkeypatch):
    monkeypatch.setattr(door_module, "RECHECK", 0.1)
    now = [time.time()]
    a = world.machine(1)
    a.node.stop()
    a.open(clock=lambda: now[0])
    a.start()
    b, c = (world.machine(n).start() for n in (2, 3))
    b.knows(a)
    c.knows(a)
    waits_for(lambda: a.node.stats.peers == 2)
    b.node.renew(world.ticket(b.identity.key, 2, expires=now[0] + 10 * 86400))
    time.sleep(0.3)
    now[0] += 3 * 86400
    waits_for(lambda: a.node.stats.peers == 1)
    assert list(a.node._hub.links) == [b.identity.key]
    a.node.orphaned = True  # no mirror has answered for an hour: old tickets count again
    c.knows(a)
    waits_for(lambda: a.node.stats.peers == 2)


def test_an_anchor_older_than_its_ledgers_base_is_refused_with_a_sentence(world):
    a = world.machine(1).start()
    signed = a.round(1)
    b = world.machine(2)
    digests = [b.ledger.blobs.put(bytes([i])) for i in range(len(b.anchor.fragments))]
    b.ledger.rebase([(a.ledger.header(signed.author, 1), signed)], digests)
    with pytest.raises(StateError, match="join again from an empty folder"):
        b.start()


def test_a_blob_of_another_size_than_is_known_is_refused_before_it_fills_the_disk(world, caplog):
    a, b = (world.machine(n).start() for n in (1, 2))
    name = a.ledger.blobs.put(bytes(5_000_000))
    b.knows(a)
    assert b.node.fetch(name, 2.0, 1000) is None
    assert b.ledger.blobs.started(name) == 0
    assert "is not the one that was wanted" in caplog.text


def test_a_flood_of_messages_slows_its_sender_down_and_nobody_else(world, monkeypatch):
    monkeypatch.setattr(link_module, "HEARD", (50.0, 100.0))
    a, b = (world.machine(n).start() for n in (1, 2))
    channels = []
    with stranger(world, a, channels=channels):
        channel, run = channels[0]

        async def flood():
            for count in range(400):
                await channel.send(pack(wire.State(vector={}, rate=count)))

        run(flood())
        heard = lambda: a.node._hub.gossip.links[STRANGER.key].rate  # noqa: E731
        b.knows(a)
        with within(10):
            for seed in range(3):
                a.round(seed)
                world.agree(a, b)
        time.sleep(1.0)
        assert 50 < heard() < 399, "the rest of it waits"
