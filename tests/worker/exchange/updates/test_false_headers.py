"""Headers that their payloads contradict."""

from helpers.network.raw_peer import assert_refused, connect_raw_peer
from helpers.updates.forged_updates import (
    STRANGER,
    build_push,
    describe_payload,
    noise_payloads,
    send_payloads,
)
from helpers.wait_for import wait_until

from barnraise.exchange.updates import update_receiver
from barnraise.peering.transports.framing import pack
from barnraise.protocol.messages import Update


def build_false_push(world):
    """Return a stranger's push with a header that its payloads contradict."""
    sound = Update.model_validate_json(build_push(world, STRANGER).header.body)
    parts = [part.model_copy(update={"sketch": "0" * 16}) for part in sound.fragments]
    return build_push(world, STRANGER, fragments=parts)


def test_update_with_a_wrong_sketch_is_never_accepted(world, caplog):
    a = world.machine(1).start()
    parts = [pack(describe_payload(data), data) for data, _ in noise_payloads(world)]
    false = build_false_push(world)
    assert_refused(a, caplog, [false, *parts], "checksum")
    assert_refused(a, caplog, [false], f"update 1 of {STRANGER.key[:8]} is not what its header")


def test_author_with_another_header_for_one_machine_is_cut_off_by_a_proof(world, monkeypatch):
    """An author sends one machine a header that its payloads contradict, and all others a true one.

    The machine must neither lack the author's updates, which all others have, nor blame those who
    have them: the two headers prove the fork to everybody.
    """
    monkeypatch.setattr(update_receiver, "EXPIRY_INTERVAL", 0.2)
    a, b = (world.machine(n).start() for n in (1, 2))
    author = f"{STRANGER.key}.{'9' * 16}"
    with connect_raw_peer(world, b) as send:
        wait_until(lambda: b.exchange.stats.peers == 1)
        send(build_false_push(world))
        send_payloads(world, send)
        wait_until(lambda: b.exchange.stats.peers == 0)
    with connect_raw_peer(world, a) as send:
        send(build_push(world, STRANGER))
        send_payloads(world, send)
        wait_until(lambda: a.ledger.vector() == {author: 1})
    b.add_peers(a)
    a.publish_round(1)
    wait_until(lambda: all(m.ledger.verdicts.limits == {author: 0} for m in (a, b)))
    world.wait_for_agreement(a, b)
    assert b.ledger.vector() == {a.exchange.author.name: 1}
    assert a.identity.key in b.exchange.server.peers.connections, (
        "who passed the true one on is blamed"
    )
