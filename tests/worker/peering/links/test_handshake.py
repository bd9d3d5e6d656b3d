"""Who is let in, and who has to leave: tickets, revocations and expiry."""

import logging
import time
from functools import partial

import pytest
from helpers.mirrors.mirror_lists import list_entry, signed_list
from helpers.network.handshakes import sign_directive
from helpers.network.raw_peer import assert_refused, build_hello
from helpers.updates.forged_updates import STRANGER
from helpers.wait_for import wait_until

from barnraise.errors import MessageError, TicketError
from barnraise.peering.links import handshake
from barnraise.protocol.messages import DirectiveRelay
from barnraise.protocol.mirror_list import Expulsion
from barnraise.protocol.signing import Identity

RUN = "01890000-0000-7000-8000-000000000001"
OTHER_RUN = "01890000-0000-7000-8000-00000000000f"
sign_in_run = partial(sign_directive, run=RUN)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (lambda world: {"run": OTHER_RUN}, "it works on run"),
        (lambda world: {"spec": "0" * 64}, "it has spec 00000000"),
        (lambda world: {"protocols": [7]}, "it speaks protocols [7]"),
        (lambda world: {"ticket": world.ticket(STRANGER.key, expires=1.0)}, "expired"),
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


def test_key_that_changes_its_volunteer_on_a_link_is_disconnected(world, caplog):
    """Otherwise one key could count as several people, one after the other."""
    a = world.machine(1).start()
    other = build_hello(world, STRANGER, ticket=world.ticket(STRANGER.key, volunteer=8))
    assert_refused(a, caplog, [other], "it belongs to another volunteer than before")


def test_directive_of_a_foreign_signer_ends_the_connection(world, caplog):
    a = world.machine(1).start()
    message = DirectiveRelay(directive=world.ticket("a" * 64))
    assert_refused(a, caplog, [message], "the directive by")


def test_revoked_peer_stays_out_and_the_directive_is_relayed(world, caplog):
    caplog.set_level(logging.INFO, "barnraise.exchange")
    a, b, c = world.start_linked(1, 2, 3)
    wait_until(lambda: all(m.exchange.stats.peers == 2 for m in (a, b, c)))
    a.exchange.apply_directive(sign_in_run(world.mirror, c.identity.key, issued=time.time()))
    wait_until(lambda: [m.exchange.stats.peers for m in (a, b, c)] == [1, 1, 0])
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
    machines = world.start_linked(1, 2, 3)
    for machine in machines:
        machine.exchange.set_mirror_lists([signed_list(1, *mirrors)])
    wait_until(lambda: all(m.exchange.stats.peers == 2 for m in machines))
    wait_until(lambda: all(m.exchange.server.peers.mirror_lists.version == 1 for m in machines))
    everybody = [machine.identity.key for machine in machines]
    directive = sign_in_run(rogue, *everybody, issued=time.time())
    machines[0].exchange.apply_directive(directive)
    handshakes = [machine.exchange.server.peers.handshake for machine in machines]
    wait_until(lambda: all(rogue.key in handshake.directives for handshake in handshakes))
    assert all(m.exchange.stats.peers == 2 for m in machines), "it signed none of their tickets"
    own = world.ticket(everybody[0], by=rogue)
    with pytest.raises(TicketError, match="was revoked"):
        handshakes[1].check_ticket(everybody[0], own)
    expelled = mirrors[1].model_copy(update={"expelled": Expulsion(at=1.0, since=2)})
    machines[0].exchange.set_mirror_lists([signed_list(2, mirrors[0], expelled)])
    wait_until(lambda: all(m.exchange.server.peers.mirror_lists.version == 2 for m in machines))
    again = sign_in_run(rogue, everybody[0], issued=time.time())
    assert not handshakes[1].revoke(again)
    assert not handshakes[1].is_revoked(everybody[0], rogue.key)
    assert not handshakes[1].current_directives(), "it is not relayed either"
    with pytest.raises(MessageError, match="not by a mirror"):
        handshakes[1].revoke(sign_in_run(Identity(b"x" * 32), *everybody))


def test_revocation_ends_when_the_tickets_before_it_have_expired(world):
    now = time.time()
    a = world.machine(1)
    server = a.exchange.server.peers.handshake
    b = world.machine(2)
    too_old = now - handshake.REVOCATION_SECONDS - 1
    assert not server.revoke(sign_in_run(world.mirror, b.identity.key, issued=too_old))
    server.check_ticket(b.identity.key, b.ticket)
    assert server.revoke(sign_in_run(world.mirror, b.identity.key, issued=now))
    assert server.is_revoked(b.identity.key, world.mirror.key)
    assert server.revoke(sign_in_run(world.mirror, issued=now + 1))
    server.check_ticket(b.identity.key, b.ticket)


def test_expired_ticket_ends_the_connection_unless_renewed(world, monkeypatch):
    monkeypatch.setattr(handshake, "RECHECK_SECONDS", 0.1)
    a, now = world.start_machine_with_clock(1)
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
