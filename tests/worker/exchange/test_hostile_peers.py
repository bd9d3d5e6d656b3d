"""What a stranger or a broken peer may say to a node: it is cut off, with a logged reason, and nothing changes."""

import asyncio
import logging
import time
from dataclasses import replace

import pytest
import torch
from blake3 import blake3
from helpers.raw_peer import greeting, stranger
from helpers.wait_for import waits_for, within

from barnraise.errors import StateError
from barnraise.exchange.compression.codec import encode
from barnraise.exchange.handlers import handshake, update_receiver
from barnraise.exchange.ledger.anchor import compute_sketch
from barnraise.exchange.ledger.verdicts import Fork
from barnraise.exchange.network import connection as connection_module
from barnraise.exchange.network.framing import pack
from barnraise.exchange.network.transport import ChannelClosedError
from barnraise.protocol import coordinator_messages
from barnraise.protocol import messages as messages_module
from barnraise.protocol.signing import Identity, digest

OTHER_RUN = "01890000-0000-7000-8000-00000000000f"


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

        with pytest.raises(ChannelClosedError):
            run(asyncio.wait_for(drained(), 15))
    machine.step()
    assert (machine.ledger.vector(), machine.anchor.digest()) == before
    waits_for(lambda: any(why in record.getMessage() for record in caplog.records), 5)
    waits_for(lambda: machine.exchange.stats.peers == 0, 5)


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
        (
            lambda w: {
                "ticket": w.ticket(STRANGER.key).model_copy(update={"signature": "0" * 128})
            },
            "signature",
        ),
    ],
)
def test_hello_without_a_valid_ticket_is_refused(world, caplog, changed, why):
    a = world.machine(1).start()
    refused(world, a, caplog, [], why, hello=greeting(world, STRANGER, **changed(world)))


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (lambda w: b"\x00\x00\x00\x05{}", "header has 5"),
        (lambda w: b"\x7f\xff\xff\xff" + b"x" * 100, "says its header has"),
        (lambda w: b"garbage", "a frame"),
        (lambda w: messages_module.DirectiveRelay(directive=w.ticket("a" * 64)), "the directive by"),
        (lambda w: messages_module.UpdatePush(header=header(w, STRANGER, sign_as="ticket")), "signature does not match"),
        (lambda w: messages_module.UpdatePush(header=header(w, STRANGER, run=OTHER_RUN)), "is for run"),
        (lambda w: messages_module.UpdatePush(header=header(w, STRANGER, peer="a" * 64)), "is signed by"),
        (lambda w: messages_module.UpdatePush(header=header(w, STRANGER, tokens=1 << 40)), "claims"),
        (lambda w: messages_module.UpdatePush(header=header(w, STRANGER, previous="1" * 64)), "does not continue"),
        (lambda w: messages_module.UpdatePush(header=header(w, Identity(b"n" * 32))), "without a ticket"),
        (lambda w: w.ruling(by=(STRANGER,)), "neither the run's owner nor one of its mirrors"),
        (lambda w: w.ruling(run=OTHER_RUN), "is for run"),
        (lambda w: Fork(one=header(w, STRANGER), other=header(w, STRANGER), ticket=w.ticket(STRANGER.key)), "not two"),
    ],
)  # fmt: skip
def test_invalid_message_ends_the_connection(world, caplog, message, why):
    a = world.machine(1).start()
    refused(world, a, caplog, [message(world)], why)


def header(world, identity, sign_as="update", **changed):
    """A header of noise, with its payloads' names, for `identity`'s first update."""
    payloads = noise(world)
    parts = dict(
        run="01890000-0000-7000-8000-000000000001", peer=identity.key, incarnation="9" * 16, seq=1,
        previous=digest(""), tokens=10, total=changed.get("tokens", 10),
        fragments=[
            messages_module.FragmentUpdate(digest=blake3(data).hexdigest(), size=len(data), sketch=mark) for data, mark in payloads
        ],
    )  # fmt: skip
    return identity.sign(sign_as, messages_module.Update(**(parts | changed)))


def noise(world):
    made = []
    for fragment in world.spec.model.fragments():
        values = torch.arange(fragment.size, dtype=torch.int32) % 127 - 50
        payload, sent = encode(values)
        made.append((payload, compute_sketch(sent)))
    return made


def test_altered_payload_ends_the_connection_and_changes_nothing(world, caplog):
    a = world.machine(1).start()
    (first, _), *_ = noise(world)
    name = blake3(first).hexdigest()
    part = pack(
        messages_module.BlobPart(digest=name, offset=0, total=len(first)), b"\0" + first[1:]
    )
    refused(
        world,
        a,
        caplog,
        [messages_module.UpdatePush(header=header(world, STRANGER)), part],
        "not what their digest says",
    )


def test_payload_of_another_size_than_signed_is_refused(world, caplog):
    a = world.machine(1).start()
    name = blake3(noise(world)[0][0]).hexdigest()
    part = pack(messages_module.BlobPart(digest=name, offset=0, total=1 << 40), b"x")
    refused(
        world,
        a,
        caplog,
        [messages_module.UpdatePush(header=header(world, STRANGER)), part],
        "its header says",
    )


def test_update_with_a_wrong_sketch_is_never_accepted(world, caplog):
    a = world.machine(1).start()
    sound = messages_module.Update.model_validate_json(header(world, STRANGER).body)
    lying = [part.model_copy(update={"sketch": "0" * 16}) for part in sound.fragments]
    parts = [
        pack(
            messages_module.BlobPart(digest=blake3(data).hexdigest(), offset=0, total=len(data)),
            data,
        )
        for data, _ in noise(world)
    ]
    push = messages_module.UpdatePush(header=header(world, STRANGER, fragments=lying))
    refused(world, a, caplog, [push, *parts], "checksum")


def test_unknown_peer_with_a_valid_ticket_and_update_is_accepted(world):
    a = world.machine(1).start()
    with stranger(world, a) as say:
        say(messages_module.UpdatePush(header=header(world, STRANGER)))
        for data, _ in reversed(noise(world)):
            say(
                messages_module.BlobPart(
                    digest=blake3(data).hexdigest(), offset=0, total=len(data)
                ),
                data,
            )
        waits_for(lambda: a.ledger.vector() == {f"{STRANGER.key}.{'9' * 16}": 1})
    (arrival,) = a.exchange.poll_updates()
    assert arrival.decode(0)[:3].tolist() == [-50, -49, -48]


@pytest.mark.parametrize("room", [update_receiver.MAX_DECODED_BYTES, 0])
def test_decoded_units_stay_in_memory_up_to_the_limit(
    world, monkeypatch, room
):
    monkeypatch.setattr(update_receiver, "MAX_DECODED_BYTES", room)
    a, b = world.machine(1).start(), world.machine(2).start()
    a.knows(b)
    world.agree(a, b)
    a.round(1), a.round(2)
    waits_for(lambda: len(b.exchange.server.queue) == 2)
    for arrival in b.exchange.poll_updates():
        assert bool(arrival.units) == bool(room)
        read = replace(arrival, units=())
        for index in range(len(b.anchor.fragments)):
            arrival.decode(index).zero_()  # what was handed out is the receiver's
            assert torch.equal(arrival.decode(index), read.decode(index))


def test_stale_headers_make_room_for_other_authors(world, monkeypatch):
    monkeypatch.setattr(update_receiver, "MAX_INCOMPLETE_PER_PEER", 3)
    monkeypatch.setattr(update_receiver, "STALE_AFTER", 1.0)
    a = world.machine(1).start()
    updates = a.exchange.server.updates
    with stranger(world, a) as say:
        for life in range(20):
            say(
                messages_module.UpdatePush(
                    header=header(world, STRANGER, incarnation=f"{life:016x}")
                )
            )
        data, _ = noise(world)[0]
        name = blake3(data).hexdigest()
        say(messages_module.BlobPart(digest=name, offset=0, total=len(data)), data[:-1])
        waits_for(lambda: a.ledger.blobs.partial_size(name))
        assert len(updates.incomplete) == 3
        b = world.machine(2).start().knows(a)
        b.round(1)
        world.agree(a, b)
        time.sleep(1.1)
        for life in range(20, 23):
            say(
                messages_module.UpdatePush(
                    header=header(world, STRANGER, incarnation=f"{life:016x}")
                )
            )
        waits_for(lambda: {author[-2:] for author, _ in updates.incomplete} == {"14", "15", "16"})
        updates.ban_author(f"{STRANGER.key}.{20:016x}", "the test says so")
        assert a.ledger.blobs.partial_size(name), "others still wait for it"
        for life in (21, 22):
            updates.ban_author(f"{STRANGER.key}.{life:016x}", "the test says so")
        assert not a.ledger.blobs.partial_size(name), (
            "what nobody waits for does not stay on the disk"
        )


def test_unrequested_pieces_are_ignored(world):
    a = world.machine(1).start()
    with stranger(world, a) as say:
        say(messages_module.BlobPart(digest="a" * 64, offset=0, total=10), b"0123456789")
        time.sleep(0.2)
        assert (
            a.exchange.stats.peers == 1
            and not a.ledger.blobs.has("a" * 64)
            and not a.ledger.blobs.partial_size("a" * 64)
        )


def test_revoked_peer_stays_out_and_the_directive_is_relayed(world, caplog):
    caplog.set_level(logging.INFO, "barnraise.exchange")
    a, b, c = (world.machine(n).start() for n in (1, 2, 3))
    c.knows(a, b)
    b.knows(a)
    waits_for(lambda: all(m.exchange.stats.peers == 2 for m in (a, b, c)))
    directive = coordinator_messages.Directive(
        run="01890000-0000-7000-8000-000000000001", machine="01890000-0000-7000-8000-000000000001",
        status="training", revoked=[c.identity.key], issued=time.time(),
    )  # fmt: skip
    a.exchange.revoke_keys(directive.revoked, world.mirror.sign("directive", directive))
    waits_for(
        lambda: (
            a.exchange.stats.peers == 1
            and b.exchange.stats.peers == 1
            and c.exchange.stats.peers == 0
        )
    )
    c.knows(a, b)
    time.sleep(1.5)
    assert c.exchange.stats.peers == 0
    assert any("was revoked" in record.getMessage() for record in caplog.records)


def test_expired_ticket_ends_the_connection_unless_renewed(
    world, monkeypatch
):
    monkeypatch.setattr(handshake, "RECHECK_INTERVAL", 0.1)
    now = [time.time()]
    a = world.machine(1)
    a.exchange.stop()
    a.open(clock=lambda: now[0])
    a.start()
    b, c = (world.machine(n).start() for n in (2, 3))
    b.knows(a)
    c.knows(a)
    waits_for(lambda: a.exchange.stats.peers == 2)
    b.exchange.renew_ticket(world.ticket(b.identity.key, 2, expires=now[0] + 10 * 86400))
    time.sleep(0.3)
    now[0] += 3 * 86400
    waits_for(lambda: a.exchange.stats.peers == 1)
    assert list(a.exchange.server.connections) == [b.identity.key]
    a.exchange.set_orphaned(True)  # no mirror has answered for an hour: old tickets count again
    c.knows(a)
    waits_for(lambda: a.exchange.stats.peers == 2)


def test_start_with_an_anchor_before_the_ledgers_base_is_refused(world):
    a = world.machine(1).start()
    signed = a.round(1)
    b = world.machine(2)
    digests = [b.ledger.blobs.store(bytes([i])) for i in range(len(b.anchor.fragments))]
    b.ledger.rebase([(a.ledger.header(signed.author, 1), signed)], digests)
    with pytest.raises(StateError, match="join again from an empty folder"):
        b.start()


def test_blob_of_another_size_than_known_is_refused_unstored(world, caplog):
    a, b = (world.machine(n).start() for n in (1, 2))
    name = a.ledger.blobs.store(bytes(5_000_000))
    b.knows(a)
    assert not b.exchange.fetch_blobs({name: 1000}, 2.0)
    assert b.ledger.blobs.partial_size(name) == 0
    assert "is not the one that was wanted" in caplog.text


def test_flood_of_messages_slows_only_its_sender(world, monkeypatch):
    monkeypatch.setattr(connection_module, "FRAME_LIMIT", (50.0, 100.0))
    a, b = (world.machine(n).start() for n in (1, 2))
    channels = []
    with stranger(world, a, channels=channels):
        channel, run = channels[0]

        async def flood():
            for count in range(400):
                await channel.send(pack(messages_module.PeerState(vector={}, rate=count)))

        run(flood())
        b.knows(a)
        with within(10):
            for seed in range(3):
                a.round(seed)
                world.agree(a, b)
        time.sleep(1.0)
        heard = a.exchange.server.gossip.links[STRANGER.key].rate
        assert 50 < heard < 399, "the rest of it waits"
