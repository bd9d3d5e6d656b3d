"""Headers of updates: which are refused, and when a complete update enters the ledger."""

import time

import pytest
from helpers.network.raw_peer import assert_refused, connect_raw_peer, limit_peers
from helpers.updates.forged_updates import (
    STRANGER,
    build_push,
    describe_payload,
    noise_payloads,
    send_payloads,
    send_update,
)
from helpers.wait_for import wait_until

from barnraise.exchange.gossip.requests import UPDATE_WINDOW
from barnraise.exchange.updates import update_receiver
from barnraise.ledger import author_pace
from barnraise.peering.limits.service_limits import Rate, Service
from barnraise.peering.transports.transport import ChannelClosedError
from barnraise.protocol import messages
from barnraise.protocol.signing import digest

RUN = "01890000-0000-7000-8000-000000000001"
OTHER_RUN = "01890000-0000-7000-8000-00000000000f"


def test_unknown_peer_with_a_valid_ticket_and_update_is_accepted(world):
    a = world.machine(1).start()
    with connect_raw_peer(world, a) as send:
        send(build_push(world, STRANGER))
        for data, _ in reversed(noise_payloads(world)):
            send(describe_payload(data), data)
        wait_until(lambda: a.ledger.vector() == {f"{STRANGER.key}.{'9' * 16}": 1})
    wait_until(lambda: len(a.exchange.server.queue) == 1)
    (arrival,) = a.exchange.poll_updates()
    assert arrival.decode(0)[:3].tolist() == [-50, -49, -48]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"sign_as": "ticket"}, "signature does not match"),
        ({"run": OTHER_RUN}, "is for run"),
        ({"peer": "a" * 64}, "is signed by"),
        ({"tokens": 1 << 40}, "claims"),
        ({"previous": "1" * 64}, "cannot have"),
        ({"ticket": "0" * 64}, "without the ticket that it names"),
        ({"volunteer": "8" * 64}, "names another volunteer"),
    ],
)
def test_header_that_breaks_a_rule_ends_the_connection(world, caplog, changed, reason):
    a = world.machine(1).start()
    assert_refused(a, caplog, [build_push(world, STRANGER, **changed)], reason)


def test_more_tokens_than_ticket_and_time_allow_end_the_connection(world, caplog):
    a = world.machine(1).start()
    ticket = world.ticket(STRANGER.key, rate=1000)
    message = build_push(world, STRANGER, ticket, tokens=5_000_000 // 123)
    assert_refused(a, caplog, [message], "its ticket and its time allow 1,000")


def test_tickets_of_headers_that_do_not_count_are_not_stored(world):
    """A machine asks its mirror for a ticket again and again, and names each one in a header."""
    a = world.machine(1).start()
    tickets = [world.ticket(STRANGER.key, volunteer=9, rate=1000 + n) for n in range(5)]
    with connect_raw_peer(world, a) as send:
        for seq, ticket in enumerate(tickets, 2):
            send(build_push(world, STRANGER, under=ticket, seq=seq, total=1000))
        wait_until(lambda: len(a.exchange.server.updates.incomplete) == 5)
        used = build_push(world, STRANGER)
        send(used)
        send_payloads(world, send)
        wait_until(lambda: a.ledger.vector())
    stored = [a.ledger.tickets.get(digest(ticket.body)) for ticket in tickets]
    assert stored == [None] * 5
    assert a.ledger.tickets.get(digest(used.ticket.body)) == used.ticket


def test_honest_peer_is_not_blamed_for_the_second_half_of_a_fork(world):
    """A machine has an honest peer's second update when the author sends it another first one."""
    b = world.machine(2).start()
    author = f"{STRANGER.key}.{'9' * 16}"
    now_ms = int(1000 * time.time())
    first = build_push(world, STRANGER, started_ms=now_ms - 9000, time_ms=now_ms - 8000)
    second = build_push(
        world,
        STRANGER,
        seq=2,
        previous=digest(first.header.body),
        total=20,
        started_ms=now_ms - 9000,
        time_ms=now_ms - 7000,
    )
    other = build_push(world, STRANGER, started_ms=now_ms - 9000, time_ms=now_ms - 1000)
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


def test_header_that_answers_a_probe_late_is_not_waited_for(world):
    """Let a push overtake the answer to a probe: the update of the answer comes when requested."""
    a, b = (world.machine(n).start() for n in (1, 2))
    updates = [a.publish_round(seed) for seed in (1, 2)]
    author = updates[0].author
    with connect_raw_peer(world, b, 8) as send:
        send_update(send, a.ledger, updates[1])
        send_update(send, a.ledger, updates[0], has_payloads=False)
        wait_until(lambda: b.exchange.server.updates.incomplete == [(author, 2)])
        send(messages.PeerState(vector={}, rate=7.0))  # arrives after the header
        links = b.exchange.server.gossip.links
        wait_until(lambda: 7.0 in [link.rate for link in links.values()])
        assert b.exchange.server.updates.incomplete == [(author, 2)]
        send_update(send, a.ledger, updates[0])
        wait_until(lambda: b.ledger.vector() == {author: 2})


def test_header_from_the_future_waits_and_is_not_refused(world, monkeypatch, caplog):
    monkeypatch.setattr(update_receiver, "CLOCK_TOLERANCE", 0.0)
    a = world.machine(1).start()
    author = f"{STRANGER.key}.{'9' * 16}"
    with connect_raw_peer(world, a) as send:
        send(build_push(world, STRANGER, time_ms=int(1000 * time.time()) + 2000))
        send_payloads(world, send)
        wait_until(lambda: "states a time that is" in caplog.text)
        assert not a.ledger.vector() and a.exchange.server.updates.incomplete == [(author, 1)]
        wait_until(lambda: a.ledger.vector() == {author: 1})
    assert a.ledger.head(author).time_ms <= 1000 * time.time()


def test_many_incarnations_of_a_key_state_the_time_of_one(world, monkeypatch):
    monkeypatch.setattr(author_pace, "BATCH_SECONDS", 0.1)
    a = world.machine(1).start()
    ticket = world.ticket(STRANGER.key, rate=1000)
    now_ms = int(1000 * time.time())
    with connect_raw_peer(world, a) as send:
        for life in range(12):
            fields = {"incarnation": f"{life:016x}", "started_ms": now_ms - 10_000}
            send(build_push(world, STRANGER, ticket, tokens=10_000, time_ms=now_ms, **fields))
        send_payloads(world, send)
        wait_until(lambda: len(a.exchange.server.queue) == 12)
    a.step()
    assert a.ledger.tokens == a.anchor.tokens == 10_000, "ten seconds of one machine"


def test_flood_of_known_headers_ends_the_connection_for_a_while(world, monkeypatch):
    limit_peers(monkeypatch, Service.UNNEEDED_HEADERS, Rate(1.0, 20.0))
    a = world.machine(1).start()
    message = build_push(world, STRANGER)
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


def test_flood_of_empty_updates_waits_and_honest_updates_do_not(world, monkeypatch, caplog):
    """An author publishes far more updates than its ticket's rate allows rounds."""
    monkeypatch.setattr(author_pace, "BURST_SECONDS", 4.0)
    b, c = (world.machine(n).start() for n in (2, 3))
    a = world.machine(1)
    a.exchange.stop()
    a.open(ticket=world.ticket(a.identity.key, 1, rate=500))
    a.start().add_peers(b)
    c.add_peers(b)
    wait_until(lambda: b.exchange.stats.peers == 2)
    for seed in range(40):
        a.publish_round(seed, tokens=0, due=[0])
    c.publish_round(100)
    wait_until(lambda: c.exchange.author.name in b.ledger.vector())
    wait_until(lambda: b.ledger.vector().get(a.exchange.author.name, 0) > 8)
    time.sleep(1)
    assert 8 < b.ledger.vector()[a.exchange.author.name] < 20, "the burst, and then the pace"
    assert "more than its machine can train: it waits" in caplog.text
    assert a.identity.key in b.exchange.server.peers.connections, "nobody is refused for it"


def test_update_that_arrives_before_earlier_ones_waits_for_them(world):
    a, b = (world.machine(n).start() for n in (1, 2))
    published = [a.publish_round(seed) for seed in range(3)]
    updates = b.exchange.server.updates
    with connect_raw_peer(world, b) as send:
        for update in (published[2], published[1]):
            send_update(send, a.ledger, update)
        wait_until(lambda: len(updates.incomplete) == 2)
        assert not b.ledger.vector()
        send_update(send, a.ledger, published[0])
        wait_until(lambda: b.ledger.vector() == {a.exchange.author.name: 3})
    assert [received.header.seq for received in b.exchange.poll_updates()] == [1, 2, 3]


def test_header_far_ahead_of_its_authors_last_is_declined(world):
    a = world.machine(1).start()
    updates = a.exchange.server.updates
    with connect_raw_peer(world, a) as send:
        for seq in (UPDATE_WINDOW + 1, UPDATE_WINDOW):
            send(build_push(world, STRANGER, seq=seq, total=1000))
        wait_until(lambda: updates.incomplete)
        assert [seq for _, seq in updates.incomplete] == [UPDATE_WINDOW]


def test_verdict_ends_the_wait_for_an_update_that_it_retracts(world):
    a = world.machine(1).start()
    updates = a.exchange.server.updates
    with connect_raw_peer(world, a) as send:
        for life in ("8" * 16, "9" * 16):
            send(build_push(world, STRANGER, incarnation=life))
        wait_until(lambda: len(updates.incomplete) == 2)
        a.apply_verdict(world.sign_verdict({f"{STRANGER.key}.{'8' * 16}": 0}))
        wait_until(lambda: updates.incomplete == [(f"{STRANGER.key}.{'9' * 16}", 1)])
