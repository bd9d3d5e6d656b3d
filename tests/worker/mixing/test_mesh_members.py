"""Test how long machines stay members of a mesh."""

import time
from dataclasses import replace

import pytest
from helpers.wait_for import wait_until

from barnraise.mixing import mesh_links
from barnraise.mixing.mesh_members import TicketedMembership
from barnraise.peering.limits.back_off import BackOff
from barnraise.peering.limits.service_limits import SERVICE_LIMITS, Service
from barnraise.peering.membership.membership import PartialView
from barnraise.peering.transports.transport import Channel, ChannelClosedError
from barnraise.protocol.messages import Peer
from barnraise.protocol.signing import Identity

DAY = 86_400.0


@pytest.fixture
def mixing_world(world, monkeypatch):
    monkeypatch.setattr(mesh_links, "MEMBER_REDIAL", BackOff(0.1, 60.0))
    recipe = replace(world.spec.recipe, strategy="decentralized-adam")
    world.spec = replace(world.spec, recipe=recipe)
    return world


def test_ticket_that_was_renewed_with_the_exchange_saves_the_link(mixing_world, caplog):
    now = [time.time()]
    ada = mixing_world.machine(1)
    ada.exchange.stop()
    ada.open(clock=lambda: now[0])
    ada.start()
    ben, cleo = (mixing_world.machine(number).start().add_peers(ada) for number in (2, 3))
    wait_until(lambda: ada.exchange.stats.peers == 2)
    meshes = [machine.exchange.open_mesh(8, 8) for machine in (ada, ben, cleo)]
    wait_until(lambda: len(meshes[0].neighbours()) == 2)

    renewed = mixing_world.ticket(ben.identity.key, 2, expires=now[0] + 10 * DAY)
    ben.exchange.renew_ticket(renewed)
    wait_until(lambda: ada.exchange.server.find_ticket(ben.identity.key) == renewed)
    now[0] += 3 * DAY
    wait_until(lambda: cleo.identity.key not in meshes[0].neighbours())
    assert meshes[0].neighbours() == [ben.identity.key]
    assert f"ended the link to {ben.identity.key[:8]}" not in caplog.text
    assert f"ended the link to {cleo.identity.key[:8]}: the ticket of" in caplog.text
    for mesh in meshes:
        mesh.stop()


async def test_mesh_is_no_udp_cannon_at_an_address_that_peers_name():
    """Peers name ever new keys at one victim's address, and no mesh answers there."""
    victim = "203.0.113.7:4433"
    view = PartialView("0" * 64, 0)
    dials: list[str] = []

    class SilentChannels:
        key = "0" * 64

        async def connect(self, peer: Peer) -> Channel:
            dials.extend(peer.addresses)
            raise ChannelClosedError("no answer")

    membership = TicketedMembership(SilentChannels(), view, None, lambda key: None)
    for number in range(200):
        peer = Peer(key=Identity(number.to_bytes(32, "big")).key, addresses=[victim])
        with pytest.raises(ChannelClosedError):
            await membership.connect(peer)
    assert 1 <= len(dials) <= SERVICE_LIMITS[Service.UNANSWERED_DIALS]["host"].burst


async def test_mesh_dials_a_proven_address_as_often_as_it_likes():
    view = PartialView("0" * 64, 0)
    peer = Peer(key="1" * 64, addresses=["203.0.113.7:4433"])
    assert view.choose_mesh_dial(peer, 0.0) == peer
    view.on_mesh_dial_ended(peer, peer.addresses[0], 0.0)
    for now in range(1, 100):
        assert view.choose_mesh_dial(peer, float(now)) == peer
        view.on_mesh_dial_ended(peer, "", float(now))  # it does not average weights yet
