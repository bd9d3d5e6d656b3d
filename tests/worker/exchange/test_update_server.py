"""What the update server adds to its parts: waking gossip, composing States, renewing tickets."""

import time

from helpers.network.raw_peer import connect_raw_peer
from helpers.wait_for import wait_until, within

from barnraise.peering.links import handshake
from barnraise.protocol import messages

HOUR = 3600.0


def test_announcing_what_can_wait_does_not_wake_the_server(world, monkeypatch):
    """A worker announces its values twice a second; the next State sends them."""
    exchange = world.machine(1).start().exchange
    gossip = exchange.server.gossip
    calls: list[tuple] = []
    exchange.announce_rate(100.0)
    wait_until(lambda: gossip.rate == 100.0)
    monkeypatch.setattr(exchange.thread, "call", lambda call, *values: calls.append(values))
    exchange.announce_rate(103.0)
    assert not calls and gossip.rate == 103.0
    exchange.announce_rate(150.0)
    assert calls == [(150.0, False)]
    monkeypatch.undo()  # the fixture stops the exchange


def test_reported_anchor_digest_is_in_the_next_state(world):
    a, b = world.start_linked(1, 2)
    wait_until(lambda: len(a.exchange.server.gossip.links) == 1)
    for machine in (a, b):
        machine.exchange.report_anchor_digest("a" * 64, "b" * 64)
    for machine in (a, b):
        links = machine.exchange.server.gossip.links
        wait_until(lambda links=links: [link.anchor_agrees for link in links.values()] == [True])


def test_more_authors_than_a_state_holds_keep_the_server_alive(world):
    a, b = (world.machine(n).start() for n in (1, 2))
    authors = {f"{number:064x}.{'0' * 16}": 1 for number in range(2100)}
    a.exchange.thread.call(a.exchange.server.gossip.vector.update, authors)
    b.add_peers(a)
    # The invented authors cannot answer probes, so the real one is to be pushed.
    links = a.exchange.server.gossip.links
    wait_until(lambda: [link for link in links.values() if link.has_state])
    a.publish_round(1)
    wait_until(lambda: a.exchange.author.name in b.ledger.vector())
    assert a.exchange.thread.is_alive() and b.exchange.thread.is_alive()


def test_peer_that_does_not_read_delays_no_other_peer(world):
    a, b = (world.machine(n).start() for n in (1, 2))
    big = a.ledger.blobs.store(bytes(40_000_000))
    with connect_raw_peer(world, a, reads=False) as send:
        for _ in range(3):
            send(messages.BlobRequest(digest=big))
        b.add_peers(a)
        wait_until(lambda: a.exchange.stats.peers == 2)
        with within(30):
            for seed in range(5):
                a.publish_round(seed)
            world.wait_for_agreement(a, b)


def test_machines_link_again_after_three_hours_of_sleep(world, monkeypatch):
    monkeypatch.setattr(handshake, "RECHECK_SECONDS", 0.1)
    now = [time.time()]
    machines = [world.machine(number) for number in (1, 2)]
    for machine in machines:
        machine.stop()
        machine.ticket = world.ticket(
            machine.identity.key, machine.number, expires=now[0] + HOUR / 2
        )
        machine.open(clock=lambda: now[0])
        machine.start()
    ada, ben = machines
    ben.add_peers(ada)
    wait_until(lambda: ada.exchange.stats.peers == 1)
    now[0] += 3 * HOUR
    wait_until(lambda: ada.exchange.stats.peers == ben.exchange.stats.peers == 0)
    for machine in machines:  # as the site's next answer brings them
        renewed = world.ticket(machine.identity.key, machine.number, expires=now[0] + HOUR / 2)
        machine.exchange.renew_ticket(renewed)
    ben.add_peers(ada)
    wait_until(lambda: ada.exchange.stats.peers == 1)
    ada.publish_round(1)
    world.wait_for_agreement(ada, ben, seconds=60)
    assert ben.ledger.vector() == ada.ledger.vector() != {}


def test_ticket_of_a_peer_is_found_while_linked_and_by_its_updates(world):
    a, b, c = (world.machine(n).start() for n in (1, 2, 3))
    for machine in (b, c):
        machine.add_peers(a)
    b.publish_round(1)
    world.wait_for_agreement(a, b, c)
    server = a.exchange.server
    for machine in (b, c):
        assert server.find_ticket(machine.identity.key) == machine.ticket
        machine.exchange.stop()
    wait_until(lambda: not a.exchange.stats.peers)
    assert server.find_ticket(b.identity.key) == b.ticket
    assert server.find_ticket(c.identity.key) is None, "it has published nothing"
