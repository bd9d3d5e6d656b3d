"""A laptop that slept finds its peers again, although its ticket expired meanwhile."""

import time

from helpers.wait_for import wait_until

from barnraise.peering.links import handshake

HOUR = 3600.0


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
