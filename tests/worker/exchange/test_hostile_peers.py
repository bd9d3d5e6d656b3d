"""Invalid messages from peers end the connection with a logged reason and change nothing."""

import asyncio
import logging
import time
from dataclasses import replace

import pytest
import torch
from blake3 import blake3
from helpers.mirror_lists import list_entry, signed_list
from helpers.raw_peer import build_hello, connect_raw_peer
from helpers.wait_for import wait_until, within

from barnraise.errors import MessageError, StateError, TicketError
from barnraise.exchange.gossip import requests
from barnraise.exchange.updates import transfer_budget, update_receiver
from barnraise.ledger.anchor import compute_sketch
from barnraise.ledger.codec import encode
from barnraise.peering.limits.service_limits import SERVICE_LIMITS, Rate, Service
from barnraise.peering.links import handshake
from barnraise.peering.transports.framing import pack
from barnraise.peering.transports.transport import ChannelClosedError
from barnraise.protocol import coordinator_messages
from barnraise.protocol.fork_proof import Fork
from barnraise.protocol.messages import (
    BlobPart,
    DirectiveRelay,
    FragmentUpdate,
    PeerState,
    Ticket,
    Update,
    UpdatePush,
)
from barnraise.protocol.mirror_list import Expulsion
from barnraise.protocol.signing import Identity, digest

RUN = "01890000-0000-7000-8000-000000000001"
OTHER_RUN = "01890000-0000-7000-8000-00000000000f"
FLOOD = 2000  # messages; at 50 a second the test ends before all are accepted


def assert_refused(machine, caplog, messages, reason, hello=None):
    """Send messages, and assert that the connection ends for that reason and nothing changed."""
    caplog.set_level(logging.INFO, "barnraise.exchange")
    world = machine.world
    before = (machine.ledger.vector(), machine.anchor.digest())
    channels = []
    with connect_raw_peer(world, machine, hello=hello, reads=False, channels=channels) as send:
        for message in messages:
            send(message)
        channel, run = channels[0]

        async def receive_until_closed():
            while True:
                await channel.receive()

        with pytest.raises(ChannelClosedError):
            run(asyncio.wait_for(receive_until_closed(), 15))
    machine.step()
    assert (machine.ledger.vector(), machine.anchor.digest()) == before
    wait_until(lambda: any(reason in record.getMessage() for record in caplog.records))
    wait_until(lambda: machine.exchange.stats.peers == 0)


def limit_peers(monkeypatch, service, rate):
    """Let each peer use less of a service than usual."""
    monkeypatch.setitem(SERVICE_LIMITS, service, {"peer": rate})


STRANGER = Identity(bytes([9]) * 32)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (lambda world: {"run": OTHER_RUN}, "it works on run"),
        (lambda world: {"spec": "0" * 64}, "it has spec 00000000"),
        (lambda world: {"protocols": [7]}, "it speaks protocols [7]"),
        (lambda world: {"ticket": world.ticket(STRANGER.key, expires=1.0)}, "expired"),
        (
            lambda world: {"ticket": world.ticket(STRANGER.key, run=OTHER_RUN)},
            "the ticket is for run",
        ),
        (lambda world: {"ticket": world.ticket("a" * 64)}, "the ticket is for peer aaaaaaaa"),
        (
            lambda world: {"ticket": world.ticket(STRANGER.key, by=STRANGER)},
            "is not a mirror of this run",
        ),
        (
            lambda world: {
                "ticket": world.ticket(STRANGER.key).model_copy(update={"signature": "0" * 128})
            },
            "signature",
        ),
    ],
)
def test_hello_without_a_valid_ticket_is_refused(world, caplog, changed, reason):
    a = world.machine(1).start()
    assert_refused(a, caplog, [], reason, hello=build_hello(world, STRANGER, **changed(world)))


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (lambda world: b"\x00\x00\x00\x05{}", "header has 5"),
        (lambda world: b"\x7f\xff\xff\xff" + b"x" * 100, "says its header has"),
        (lambda world: b"garbage", "a frame"),
        (lambda world: DirectiveRelay(directive=world.ticket("a" * 64)), "the directive by"),
        (
            lambda world: push(world, STRANGER, sign_as="ticket"),
            "signature does not match",
        ),
        (lambda world: push(world, STRANGER, run=OTHER_RUN), "is for run"),
        (lambda world: push(world, STRANGER, peer="a" * 64), "is signed by"),
        (lambda world: push(world, STRANGER, tokens=1 << 40), "claims"),
        (
            lambda world: push(world, STRANGER, previous="1" * 64),
            "does not continue",
        ),
        (
            lambda world: push(world, STRANGER, ticket="0" * 64),
            "without the ticket that it names",
        ),
        (
            lambda world: push(world, STRANGER, volunteer="8" * 64),
            "names another volunteer",
        ),
        (
            lambda world: world.sign_verdict(by=(STRANGER,)),
            "neither the run's owner nor one of its mirrors",
        ),
        (lambda world: world.sign_verdict(run=OTHER_RUN), "is for run"),
        (
            lambda world: fork_of_one_update(push(world, STRANGER)),
            "not two",
        ),
    ],
)
def test_invalid_message_ends_the_connection(world, caplog, message, reason):
    a = world.machine(1).start()
    assert_refused(a, caplog, [message(world)], reason)


def fork_of_one_update(sent):
    """Return a proof of a fork whose two updates are the same one."""
    return Fork(one=sent.header, other=sent.header, ticket=sent.ticket)


def push(world, identity, under=None, sign_as="update", **changed):
    """Return a push of an identity's first update, of noise, under a ticket."""
    parts = [
        FragmentUpdate(digest=blake3(payload).hexdigest(), size=len(payload), sketch=sketch)
        for payload, sketch in noise_payloads(world)
    ]
    ticket = under or world.ticket(identity.key, volunteer=9)
    now_ms = int(1000 * time.time())
    fields = {
        "run": RUN,
        "peer": identity.key,
        "incarnation": "9" * 16,
        "seq": 1,
        "previous": digest(""),
        "tokens": 10,
        "total": changed.get("tokens", 10),
        "started_ms": now_ms - 1000,
        "time_ms": now_ms,
        "ticket": digest(ticket.body),
        "volunteer": Ticket.model_validate_json(ticket.body).volunteer,
        "fragments": parts,
    }
    return UpdatePush(header=identity.sign(sign_as, Update(**(fields | changed))), ticket=ticket)


def noise_payloads(world):
    """Return the payload and the sketch of each fragment of an update."""
    payloads = []
    for fragment in world.spec.model.fragments():
        values = torch.arange(fragment.size, dtype=torch.int32) % 127 - 50
        payload, sent = encode(values)
        payloads.append((payload, compute_sketch(sent)))
    return payloads


def test_altered_payload_ends_the_connection_and_changes_nothing(world, caplog):
    a = world.machine(1).start()
    (first, _), *_ = noise_payloads(world)
    name = blake3(first).hexdigest()
    part = pack(BlobPart(digest=name, offset=0, total=len(first)), b"\0" + first[1:])
    assert_refused(
        a,
        caplog,
        [push(world, STRANGER), part],
        "not what their digest says",
    )


def test_payload_of_another_size_than_signed_is_refused(world, caplog):
    a = world.machine(1).start()
    name = blake3(noise_payloads(world)[0][0]).hexdigest()
    part = pack(BlobPart(digest=name, offset=0, total=1 << 40), b"x")
    assert_refused(
        a,
        caplog,
        [push(world, STRANGER), part],
        "its header says",
    )


def test_update_with_a_wrong_sketch_is_never_accepted(world, caplog):
    a = world.machine(1).start()
    sound = Update.model_validate_json(push(world, STRANGER).header.body)
    lying = [part.model_copy(update={"sketch": "0" * 16}) for part in sound.fragments]
    parts = [
        pack(
            BlobPart(digest=blake3(data).hexdigest(), offset=0, total=len(data)),
            data,
        )
        for data, _ in noise_payloads(world)
    ]
    assert_refused(a, caplog, [push(world, STRANGER, fragments=lying), *parts], "checksum")


def test_author_with_another_header_for_one_machine_is_cut_off_by_a_proof(world, monkeypatch):
    """An author sends one machine a header that its payloads contradict, and all others a true one.

    The machine must neither lack the author's updates, which all others have, nor blame those who
    have them: the two headers prove the fork to everybody.
    """
    monkeypatch.setattr(update_receiver, "EXPIRY_INTERVAL", 0.2)
    a, b = (world.machine(n).start() for n in (1, 2))
    author = f"{STRANGER.key}.{'9' * 16}"
    sound = push(world, STRANGER)
    parts = Update.model_validate_json(sound.header.body).fragments
    lying = [part.model_copy(update={"sketch": "0" * 16}) for part in parts]
    with connect_raw_peer(world, b) as send:
        wait_until(lambda: b.exchange.stats.peers == 1)
        send(push(world, STRANGER, fragments=lying))
        send_payloads(world, send)
        wait_until(lambda: b.exchange.stats.peers == 0)
    with connect_raw_peer(world, a) as send:
        send(sound)
        send_payloads(world, send)
        wait_until(lambda: a.ledger.vector() == {author: 1})
    b.add_peers(a)
    a.publish_round(1)
    wait_until(lambda: all(m.ledger.verdicts.limits == {author: 0} for m in (a, b)))
    world.wait_for_agreement(a, b)
    assert b.ledger.vector() == {a.exchange.author: 1}
    assert a.identity.key in b.exchange.server.peers.connections, (
        "who passed the true one on is blamed"
    )


def test_honest_peer_is_not_blamed_for_the_second_half_of_a_fork(world):
    """A machine has an honest peer's second update when the author sends it another first one."""
    b = world.machine(2).start()
    author = f"{STRANGER.key}.{'9' * 16}"
    now_ms = int(1000 * time.time())
    first = push(world, STRANGER, started_ms=now_ms - 9000, time_ms=now_ms - 8000)
    second = push(
        world,
        STRANGER,
        seq=2,
        previous=digest(first.header.body),
        total=20,
        started_ms=now_ms - 9000,
        time_ms=now_ms - 7000,
    )
    other = push(world, STRANGER, started_ms=now_ms - 9000, time_ms=now_ms - 1000)
    with connect_raw_peer(world, b, number=8) as honest, connect_raw_peer(world, b) as liar:
        honest(second)
        send_payloads(world, honest)
        wait_until(lambda: (author, 2) in b.exchange.server.updates.incomplete)
        liar(other)
        send_payloads(world, liar)
        wait_until(lambda: b.ledger.vector() == {author: 1})
        wait_until(lambda: not b.exchange.server.updates.incomplete)
        assert b.exchange.stats.peers == 2
        honest(first.model_copy(update={"has_payloads": False}))  # as it is asked to
        wait_until(lambda: b.ledger.verdicts.limits == {author: 0})


def test_peer_that_completes_a_poisoned_payload_is_not_blamed(world, monkeypatch):
    """A liar sends the first bytes of an update's payload, which an honest peer completes."""
    monkeypatch.setattr(requests, "RESPONSE_SECONDS", 0.5)
    monkeypatch.setattr(requests, "STALL_SECONDS", 0.5)
    b = world.machine(2).start()
    author = f"{STRANGER.key}.{'9' * 16}"
    data = noise_payloads(world)[0][0]
    name = blake3(data).hexdigest()
    with connect_raw_peer(world, b, number=8) as liar, connect_raw_peer(world, b) as honest:
        honest(push(world, STRANGER))
        wait_until(lambda: b.exchange.server.updates.incomplete)
        liar(BlobPart(digest=name, offset=0, total=len(data)), b"\0" * 10)
        wait_until(lambda: b.ledger.blobs.partial_size(name) == 10)
        honest(BlobPart(digest=name, offset=10, total=len(data)), data[10:])
        wait_until(lambda: not b.ledger.blobs.partial_size(name))

        def is_complete() -> bool:
            # The liar goes on, and the honest peer sends what it is asked for.
            liar(BlobPart(digest=name, offset=0, total=len(data)), b"\0" * 10)
            send_payloads(world, honest)
            time.sleep(0.1)
            return b.ledger.vector() == {author: 1}

        wait_until(is_complete)
        assert b.exchange.stats.peers == 2


def test_tickets_of_headers_that_do_not_count_are_not_stored(world):
    """A machine asks its mirror for a ticket again and again, and names each one in a header."""
    a = world.machine(1).start()
    tickets = [world.ticket(STRANGER.key, volunteer=9, rate=1000 + n) for n in range(5)]
    with connect_raw_peer(world, a) as send:
        for seq, ticket in enumerate(tickets, 2):
            send(push(world, STRANGER, under=ticket, seq=seq, total=1000))
        wait_until(lambda: len(a.exchange.server.updates.incomplete) == 5)
        used = push(world, STRANGER)
        send(used)
        send_payloads(world, send)
        wait_until(lambda: a.ledger.vector())
    stored = [a.ledger.peer_store.ticket(digest(ticket.body)) for ticket in tickets]
    assert stored == [None] * 5
    assert a.ledger.peer_store.ticket(digest(used.ticket.body)) == used.ticket


def test_unknown_peer_with_a_valid_ticket_and_update_is_accepted(world):
    a = world.machine(1).start()
    with connect_raw_peer(world, a) as send:
        send(push(world, STRANGER))
        for data, _ in reversed(noise_payloads(world)):
            send(
                BlobPart(digest=blake3(data).hexdigest(), offset=0, total=len(data)),
                data,
            )
        wait_until(lambda: a.ledger.vector() == {f"{STRANGER.key}.{'9' * 16}": 1})
    wait_until(lambda: len(a.exchange.server.queue) == 1)
    (arrival,) = a.exchange.poll_updates()
    assert arrival.decode(0)[:3].tolist() == [-50, -49, -48]


def test_header_from_the_future_waits_and_is_not_refused(world, monkeypatch, caplog):
    monkeypatch.setattr(update_receiver, "CLOCK_TOLERANCE", 0.0)
    a = world.machine(1).start()
    author = f"{STRANGER.key}.{'9' * 16}"
    with connect_raw_peer(world, a) as send:
        send(push(world, STRANGER, time_ms=int(1000 * time.time()) + 2000))
        send_payloads(world, send)
        wait_until(lambda: "states a time that is" in caplog.text)
        assert not a.ledger.vector() and a.exchange.server.updates.incomplete == [(author, 1)]
        wait_until(lambda: a.ledger.vector() == {author: 1})
    assert a.ledger.head(author).time_ms <= 1000 * time.time()


def test_many_incarnations_of_a_key_state_the_time_of_one(world):
    a = world.machine(1).start()
    ticket = world.ticket(STRANGER.key, rate=1000)
    now_ms = int(1000 * time.time())
    with connect_raw_peer(world, a) as send:
        for life in range(12):
            fields = {"incarnation": f"{life:016x}", "started_ms": now_ms - 10_000}
            send(push(world, STRANGER, ticket, tokens=10_000, time_ms=now_ms, **fields))
        send_payloads(world, send)
        wait_until(lambda: len(a.exchange.server.queue) == 12)
    a.step()
    assert a.ledger.tokens == a.anchor.tokens == 10_000, "ten seconds of one machine"


def test_more_tokens_than_ticket_and_time_allow_end_the_connection(world, caplog):
    a = world.machine(1).start()
    ticket = world.ticket(STRANGER.key, rate=1000)
    message = push(world, STRANGER, ticket, tokens=5_000_000 // 123)
    assert_refused(a, caplog, [message], "its ticket and its time allow 1,000")


def send_payloads(world, send):
    """Send the payloads of the updates that `push` builds."""
    for data, _ in noise_payloads(world):
        send(BlobPart(digest=blake3(data).hexdigest(), offset=0, total=len(data)), data)


@pytest.mark.parametrize("max_bytes", [update_receiver.MAX_DECODED_BYTES, 0])
def test_decoded_units_stay_in_memory_up_to_the_limit(world, monkeypatch, max_bytes):
    monkeypatch.setattr(update_receiver, "MAX_DECODED_BYTES", max_bytes)
    a, b = world.machine(1).start(), world.machine(2).start()
    a.add_peers(b)
    world.wait_for_agreement(a, b)
    a.publish_round(1)
    a.publish_round(2)
    wait_until(lambda: len(b.exchange.server.queue) == 2)
    for arrival in b.exchange.poll_updates():
        assert bool(arrival.units) == bool(max_bytes)
        without_units = replace(arrival, units=())
        for index in range(len(b.anchor.fragments)):
            arrival.decode(index).zero_()  # the caller may change what it received
            assert torch.equal(arrival.decode(index), without_units.decode(index))


def test_stale_headers_make_room_for_other_authors(world, monkeypatch):
    monkeypatch.setattr(update_receiver, "MAX_INCOMPLETE_OF_VOLUNTEER", 3)
    monkeypatch.setattr(transfer_budget, "STALE_SECONDS", 1.0)
    a = world.machine(1).start()
    updates = a.exchange.server.updates
    with connect_raw_peer(world, a) as send:
        for life in range(20):
            send(push(world, STRANGER, incarnation=f"{life:016x}"))
        data, _ = noise_payloads(world)[0]
        name = blake3(data).hexdigest()
        send(BlobPart(digest=name, offset=0, total=len(data)), data[:-1])
        wait_until(lambda: a.ledger.blobs.partial_size(name))
        assert len(updates.incomplete) == 3
        b = world.machine(2).start().add_peers(a)
        b.publish_round(1)
        world.wait_for_agreement(a, b)
        time.sleep(1.1)
        for life in range(20, 23):
            send(push(world, STRANGER, incarnation=f"{life:016x}"))
        wait_until(lambda: {author[-2:] for author, _ in updates.incomplete} == {"14", "15", "16"})
        updates.ban_author(f"{STRANGER.key}.{20:016x}", 1, "the test says so")
        assert a.ledger.blobs.partial_size(name), "other updates still need it"
        for life in (21, 22):
            updates.ban_author(f"{STRANGER.key}.{life:016x}", 1, "the test says so")
        assert not a.ledger.blobs.partial_size(name), "pieces that no update needs are deleted"


def test_payloads_of_updates_that_never_complete_do_not_stay(world, monkeypatch):
    """A peer sends all payloads of an update but one; they go after a time, or a restart."""
    monkeypatch.setattr(update_receiver, "EXPIRY_INTERVAL", 0.2)
    monkeypatch.setattr(update_receiver, "MAX_BUFFERED_UPDATE", 0)  # as for larger models
    a = world.machine(1).start()
    blobs = a.ledger.blobs
    payloads = [data for data, _ in noise_payloads(world)]
    names = [blake3(data).hexdigest() for data in payloads]

    def send_half(send, life):
        send(push(world, STRANGER, incarnation=f"{life:016x}"))
        for name, data in zip(names[1:], payloads[1:], strict=True):
            send(BlobPart(digest=name, offset=0, total=len(data)), data)
        send(BlobPart(digest=names[0], offset=0, total=len(payloads[0])), payloads[0][:100])

    with connect_raw_peer(world, a) as send:
        send_half(send, 1)
        wait_until(lambda: blobs.partial_bytes() == 100 and all(map(blobs.has, names[1:])))
        with monkeypatch.context() as later:
            later.setattr(transfer_budget, "EXPIRY_SECONDS", -1e6)
            wait_until(lambda: not a.exchange.server.updates.incomplete)
            wait_until(lambda: not any(map(blobs.has, names)) and not blobs.partial_bytes())
        send_half(send, 2)
        wait_until(lambda: all(map(blobs.has, names[1:])))
        a.stop()  # while they wait
    a.open()
    assert not any(map(a.ledger.blobs.has, names)), "the next start deletes them"
    a.exchange.open()


def start_machine_with_clock(world):
    """Start the first machine; return it and its clock, a list whose one value a test changes."""
    now = [time.time()]
    machine = world.machine(1)
    machine.exchange.stop()
    machine.open(clock=lambda: now[0])
    return machine.start(), now


def test_complete_update_that_waits_for_its_time_does_not_expire(world, monkeypatch, caplog):
    monkeypatch.setattr(update_receiver, "EXPIRY_INTERVAL", 0.1)
    monkeypatch.setattr(update_receiver, "MAX_WAIT", 0.1)
    a, now = start_machine_with_clock(world)
    updates = a.exchange.server.updates
    author = f"{STRANGER.key}.{'9' * 16}"
    incomplete = push(world, STRANGER, incarnation="8" * 16)
    parts = Update.model_validate_json(incomplete.header.body).fragments
    lost = [part.model_copy(update={"digest": f"{n:064x}"}) for n, part in enumerate(parts)]
    with connect_raw_peer(world, a) as send:
        send(push(world, STRANGER, time_ms=int(1000 * now[0]) + 100_000))
        send_payloads(world, send)
        wait_until(lambda: "states a time that is" in caplog.text)
        send(push(world, STRANGER, incarnation="8" * 16, fragments=lost))
        wait_until(lambda: len(updates.incomplete) == 2)
        monkeypatch.setattr(transfer_budget, "EXPIRY_SECONDS", -1e6)
        wait_until(lambda: len(updates.incomplete) < 2)
        assert updates.incomplete == [(author, 1)], "its bytes are all here"
        now[0] += 200.0
        wait_until(lambda: a.ledger.vector() == {author: 1})


def test_flood_of_unwanted_payloads_ends_the_connection(world, monkeypatch, caplog):
    limit_peers(monkeypatch, Service.UNWANTED_BYTES, Rate(1000.0, 100_000.0))
    a = world.machine(1).start()
    part = pack(BlobPart(digest="a" * 64, offset=0, total=1 << 30), bytes(60_000))
    assert_refused(a, caplog, [part, part], "nothing here waits for")


def test_key_that_changes_its_volunteer_on_a_link_is_disconnected(world, caplog):
    """Otherwise one key could count as several people, one after the other."""
    a = world.machine(1).start()
    other = build_hello(world, STRANGER, ticket=world.ticket(STRANGER.key, volunteer=8))
    assert_refused(a, caplog, [other], "it belongs to another volunteer than before")


def test_flood_of_known_headers_ends_the_connection_for_a_while(world, monkeypatch):
    limit_peers(monkeypatch, Service.UNNEEDED_HEADERS, Rate(1.0, 20.0))
    a = world.machine(1).start()
    message = push(world, STRANGER)
    with connect_raw_peer(world, a) as send:
        send(message)
        send_payloads(world, send)
        wait_until(lambda: a.ledger.vector())
        with pytest.raises(ChannelClosedError, match="again and again"):
            for _ in range(10_000):
                send(message)
        wait_until(lambda: a.exchange.stats.peers == 0)
    channels = []
    with (
        pytest.raises(ChannelClosedError, match="you flooded this machine"),
        connect_raw_peer(world, a, reads=False, channels=channels),
    ):
        channel, run = channels[0]
        run(channel.receive())


def test_flood_of_empty_updates_waits_and_honest_updates_do_not(world, caplog):
    """An author publishes far more updates than its ticket's rate allows rounds."""
    b, c = (world.machine(n).start() for n in (2, 3))
    a = world.machine(1)
    a.exchange.stop()
    a.open(ticket=world.ticket(a.identity.key, 1, rate=100))
    a.start().add_peers(b)
    c.add_peers(b)
    wait_until(lambda: b.exchange.stats.peers == 2)
    for seed in range(70):
        a.publish_round(seed, tokens=0, due=[0])
    c.publish_round(100)
    wait_until(lambda: c.exchange.author in b.ledger.vector())
    wait_until(lambda: b.ledger.vector().get(a.exchange.author, 0) > 8)
    time.sleep(2)
    assert 8 < b.ledger.vector()[a.exchange.author] < 20, "the burst, and then the pace"
    assert "more than its machine can train: it waits" in caplog.text
    assert a.identity.key in b.exchange.server.peers.connections, "nobody is refused for it"


def test_unrequested_pieces_are_ignored(world):
    a = world.machine(1).start()
    with connect_raw_peer(world, a) as send:
        send(BlobPart(digest="a" * 64, offset=0, total=10), b"0123456789")
        send(push(world, STRANGER))  # messages are handled in their order
        send_payloads(world, send)
        wait_until(a.ledger.vector)
        assert a.exchange.stats.peers == 1
        assert not a.ledger.blobs.has("a" * 64)
        assert not a.ledger.blobs.partial_size("a" * 64)


def test_revoked_peer_stays_out_and_the_directive_is_relayed(world, caplog):
    caplog.set_level(logging.INFO, "barnraise.exchange")
    a, b, c = (world.machine(n).start() for n in (1, 2, 3))
    c.add_peers(a, b)
    b.add_peers(a)
    wait_until(lambda: all(m.exchange.stats.peers == 2 for m in (a, b, c)))
    directive = coordinator_messages.Directive(
        run=RUN, machine=RUN, status="training", revoked=[c.identity.key], issued=time.time()
    )
    a.exchange.apply_directive(world.mirror.sign("directive", directive))
    wait_until(
        lambda: (
            a.exchange.stats.peers == 1
            and b.exchange.stats.peers == 1
            and c.exchange.stats.peers == 0
        )
    )
    c.add_peers(a, b)

    def count_lines(start: str) -> int:
        return sum(record.getMessage().startswith(start) for record in caplog.records)

    # The revoked peer counts itself connected for as long as the refusal travels.
    wait_until(lambda: count_lines(f"refused {c.identity.key[:8]}: peer") == 2)
    assert count_lines(f"connected to {c.identity.key[:8]}") == 2, "before the directive"
    assert all(c.identity.key not in m.exchange.server.peers.connections for m in (a, b))
    wait_until(lambda: c.exchange.stats.peers == 0)


def test_directive_of_one_mirror_cannot_part_all_machines(world):
    rogue = Identity(b"r" * 32)
    mirrors = [
        list_entry(world.mirror, "https://one.example.org"),
        list_entry(rogue, "https://two.example.org"),
    ]
    machines = [world.machine(n).start() for n in (1, 2, 3)]
    for machine in machines:
        machine.add_peers(*machines[: machine.number - 1])
        machine.exchange.set_mirror_lists([signed_list(1, *mirrors)])
    wait_until(lambda: all(m.exchange.stats.peers == 2 for m in machines))
    wait_until(lambda: all(m.exchange.server.peers.mirror_lists.version == 1 for m in machines))
    everybody = [machine.identity.key for machine in machines]
    directive = coordinator_messages.Directive(
        run=RUN, machine=RUN, status="training", revoked=everybody, issued=time.time()
    )
    machines[0].exchange.apply_directive(rogue.sign("directive", directive))
    handshakes = [machine.exchange.server.peers.handshake for machine in machines]
    wait_until(lambda: all(rogue.key in handshake.directives for handshake in handshakes))
    assert all(m.exchange.stats.peers == 2 for m in machines), "it signed none of their tickets"
    own = world.ticket(everybody[0], by=rogue)
    with pytest.raises(TicketError, match="was revoked"):
        handshakes[1].check_ticket(everybody[0], own)
    expelled = mirrors[1].model_copy(update={"expelled": Expulsion(at=1.0, since=2)})
    machines[0].exchange.set_mirror_lists([signed_list(2, mirrors[0], expelled)])
    wait_until(lambda: all(m.exchange.server.peers.mirror_lists.version == 2 for m in machines))
    again = directive.model_copy(update={"issued": time.time(), "revoked": everybody[:1]})
    assert not handshakes[1].revoke(rogue.sign("directive", again))
    assert not handshakes[1].is_revoked(everybody[0], rogue.key)
    assert not handshakes[1].current_directives(), "it is not relayed either"
    with pytest.raises(MessageError, match="not by a mirror"):
        handshakes[1].revoke(Identity(b"x" * 32).sign("directive", directive))


def test_revocation_ends_when_the_tickets_before_it_have_expired(world):
    now = time.time()
    a = world.machine(1)
    server = a.exchange.server.peers.handshake
    b = world.machine(2)
    old = coordinator_messages.Directive(
        run=RUN,
        machine=RUN,
        status="training",
        revoked=[b.identity.key],
        issued=now - handshake.REVOCATION_SECONDS - 1,
    )
    assert not server.revoke(world.mirror.sign("directive", old))
    server.check_ticket(b.identity.key, b.ticket)
    recent = old.model_copy(update={"issued": now})
    assert server.revoke(world.mirror.sign("directive", recent))
    assert server.is_revoked(b.identity.key, world.mirror.key)
    lifted = old.model_copy(update={"issued": now + 1, "revoked": []})
    assert server.revoke(world.mirror.sign("directive", lifted))
    server.check_ticket(b.identity.key, b.ticket)


def test_expired_ticket_ends_the_connection_unless_renewed(world, monkeypatch):
    monkeypatch.setattr(handshake, "RECHECK_SECONDS", 0.1)
    a, now = start_machine_with_clock(world)
    b, c = (world.machine(n).start() for n in (2, 3))
    b.add_peers(a)
    c.add_peers(a)
    wait_until(lambda: a.exchange.stats.peers == 2)
    b.exchange.renew_ticket(world.ticket(b.identity.key, 2, expires=now[0] + 10 * 86400))
    time.sleep(0.3)
    now[0] += 3 * 86400
    wait_until(lambda: a.exchange.stats.peers == 1)
    assert list(a.exchange.server.peers.connections) == [b.identity.key]
    a.exchange.set_orphaned(True)  # expired tickets are valid again
    c.add_peers(a)
    wait_until(lambda: a.exchange.stats.peers == 2)


def test_start_with_an_anchor_before_the_ledgers_base_is_refused(world):
    a = world.machine(1).start()
    signed = a.publish_round(1)
    b = world.machine(2)
    digests = [b.ledger.blobs.store(bytes([i])) for i in range(len(b.anchor.fragments))]
    b.ledger.rebase([(a.ledger.header(signed.author, 1), signed)], digests)
    with pytest.raises(StateError, match="join again from an empty folder"):
        b.start()


def test_blob_of_another_size_than_known_is_refused_unstored(world, caplog):
    a, b = (world.machine(n).start() for n in (1, 2))
    name = a.ledger.blobs.store(bytes(5_000_000))
    b.add_peers(a)
    assert not b.exchange.fetch_blobs({name: 1000}, 2.0)
    assert b.ledger.blobs.partial_size(name) == 0
    assert "is not the one that was wanted" in caplog.text


def test_flood_of_valid_headers_is_verified_at_a_bounded_rate(world, monkeypatch):
    """Each header is of another incarnation, so that each has a signature to verify."""
    limit_peers(monkeypatch, Service.UPDATE_HEADERS, Rate(5.0, 10.0))
    a, b = (world.machine(n).start() for n in (1, 2))
    with connect_raw_peer(world, a) as send:
        for life in range(200):
            send(push(world, STRANGER, incarnation=f"{life:016x}"))
        b.add_peers(a)
        for seed in range(3):
            b.publish_round(seed)
            world.wait_for_agreement(a, b)
        incomplete = a.exchange.server.updates.incomplete
        assert 0 < len(incomplete) < 200, "the other headers still wait"


def test_flood_of_messages_slows_only_its_sender(world, monkeypatch):
    limit_peers(monkeypatch, Service.FRAMES, Rate(50.0, 100.0))
    a, b = (world.machine(n).start() for n in (1, 2))
    channels = []
    with connect_raw_peer(world, a, channels=channels):
        channel, run = channels[0]

        async def flood():
            for count in range(FLOOD):
                await channel.send(pack(PeerState(vector={}, rate=count)))

        run(flood())
        b.add_peers(a)
        with within(30):
            for seed in range(3):
                a.publish_round(seed)
                world.wait_for_agreement(a, b)
        time.sleep(1.0)
        newest_rate = a.exchange.server.gossip.links[STRANGER.key].rate
        assert 50 < newest_rate < FLOOD - 1, "the other messages still wait"


def test_useless_updates_of_a_stranger_take_no_weight(world, caplog):
    """Its updates are valid and state all tokens that its ticket permits; they contain noise."""
    machines = [world.machine(n).start() for n in (1, 2, 3, 9)]
    honest, stranger = machines[:3], machines[3]
    first = honest[0]
    for machine in machines[1:]:
        machine.add_peers(first)
    wait_until(lambda: first.exchange.stats.peers == 3)

    def train_round(seed: int) -> None:
        for machine in honest:
            machine.publish_round(seed)  # all honest machines learn the same
        stranger.publish_round(1000 + seed, tokens=1 << 20)
        world.wait_for_agreement(*machines)

    for seed in range(4):
        train_round(seed)
    for machine in honest:
        # Next to so fast a machine only the stranger's claim could count.
        assert machine.exchange.compute_weight(1e6) > 0.95
        assert machine.exchange.stats.doubted == (f"{9:064x}",), "the coordinator is informed"
    findings = [record.message for record in caplog.records if "does not agree" in record.message]
    assert len(findings) == 3, "each machine says so once"
    assert all(stranger.identity.key[:8] in finding for finding in findings)
