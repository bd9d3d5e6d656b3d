"""Valid mirror lists spread among peers; invalid ones do not."""

import itertools
import time

import pytest
from helpers.mirrors.mirror_lists import list_entry, signed_list
from helpers.wait_for import wait_until

from barnraise.errors import TicketError
from barnraise.protocol import messages
from barnraise.protocol.mirror_list import Expulsion, MirrorLists, SignedMirrorList
from barnraise.protocol.signing import Identity

SECOND = Identity(b"2" * 32)


def first_list(world) -> SignedMirrorList:
    return signed_list(1, list_entry(world.mirror, "https://one.example.org"))


def second_list(world) -> SignedMirrorList:
    return signed_list(
        2,
        list_entry(world.mirror, "https://one.example.org"),
        list_entry(SECOND, "https://two.example.org"),
    )


def list_version(machine) -> int:
    return machine.exchange.server.peers.mirror_lists.version


def linked_machines(world, count: int):
    """Start machines in a row, each connected to the one before, with the first list."""
    machines = [world.machine(n).start() for n in range(1, count + 1)]
    for before, after in itertools.pairwise(machines):
        after.add_peers(before)
    for machine in machines:
        machine.exchange.set_mirror_lists([first_list(world)])
    wait_until(lambda: all(list_version(machine) == 1 for machine in machines))
    return machines


def test_mirror_list_of_one_machine_reaches_all_peers(world):
    machines = linked_machines(world, 4)
    wait_until(lambda: all(machine.exchange.stats.peers for machine in machines))
    machines[0].exchange.set_mirror_lists([second_list(world)])
    wait_until(lambda: all(list_version(machine) == 2 for machine in machines))
    received = machines[3].exchange.set_mirror_lists([first_list(world)])
    assert received[-1].digest == second_list(world).digest
    assert machines[3].exchange.set_mirror_lists([second_list(world)]) == []


def test_ticket_by_a_new_mirror_is_valid_once_the_list_names_it(world):
    a, b = linked_machines(world, 2)
    b.stop()
    b.ticket = world.ticket(b.identity.key, by=SECOND)
    b.open()
    a.exchange.set_mirror_lists([second_list(world)])
    b.exchange.set_mirror_lists([second_list(world)])
    wait_until(lambda: list_version(a) == list_version(b) == 2)
    b.start()
    b.add_peers(a)
    b.publish_round(1)
    world.wait_for_agreement(a, b)
    assert a.anchor.vector == {b.exchange.author.name: 1}


def test_ticket_by_a_mirror_outside_the_run_is_refused(world):
    a = world.machine(1).start()
    stranger = signed_list(1, list_entry(SECOND, "https://two.example.org"))
    a.exchange.set_mirror_lists([stranger])
    wait_until(lambda: list_version(a) == 1)
    with pytest.raises(TicketError, match="not a mirror of this run"):
        a.exchange.server.peers.handshake.check_ticket("b" * 64, world.ticket("b" * 64, by=SECOND))


def test_ticket_by_an_expelled_mirror_is_refused_but_its_updates_stay(world):
    a, b = linked_machines(world, 2)
    b.publish_round(1)
    world.wait_for_agreement(a, b)
    a.exchange.set_mirror_lists([second_list(world)])
    wait_until(lambda: list_version(b) == 2)
    expulsion = Expulsion(at=time.time())
    expelled = list_entry(world.mirror, "https://one.example.org", expelled=expulsion)
    remaining = list_entry(SECOND, "https://two.example.org")
    a.exchange.set_mirror_lists([signed_list(3, expelled, remaining)])
    wait_until(lambda: list_version(b) == 3)
    with pytest.raises(TicketError, match="not a mirror of this run"):
        b.exchange.server.peers.handshake.check_ticket(a.identity.key, a.ticket)
    b.exchange.server.peers.handshake.check_ticket(
        a.identity.key, world.ticket(a.identity.key, by=SECOND)
    )
    assert world.mirror.key in a.exchange.server.updates.rules.mirrors.keys, (
        "updates that came with its tickets stay valid"
    )


@pytest.mark.parametrize(
    "kind", ["too few signatures", "expired", "older", "another of that version"]
)
def test_invalid_list_changes_nothing_and_a_forged_one_disconnects(world, kind):
    a, b = linked_machines(world, 2)
    wait_until(lambda: a.exchange.stats.peers and b.exchange.stats.peers)
    both = (
        list_entry(world.mirror, "https://one.example.org"),
        list_entry(SECOND, "https://two.example.org"),
    )
    invalid = {
        "too few signatures": signed_list(
            3, list_entry(world.mirror, "https://evil.example.org"), signers=1
        ),
        "expired": signed_list(3, *both, expires=time.time() - 5),
        "older": first_list(world),
        "another of that version": signed_list(
            2, list_entry(world.mirror, "https://other.example.org")
        ),
    }[kind]
    a.exchange.set_mirror_lists([second_list(world)])
    wait_until(lambda: list_version(a) == list_version(b) == 2)
    link = a.exchange.server.peers.connections[b.identity.key]
    a.exchange.thread.call(link.send_message, MirrorLists(lists=[invalid]))
    # The answer to this request shows that b has read everything before it.
    a.exchange.thread.call(link.send_message, messages.BlobRequest(digest="0" * 64))
    if kind == "too few signatures":
        wait_until(
            lambda: (
                link.channel
                is not a.exchange.server.peers.connections.get(b.identity.key, link).channel
                or not a.exchange.stats.peers
            )
        )
    else:
        time.sleep(0.5)
        assert a.exchange.server.peers.connections.get(b.identity.key) is link
    assert list_version(b) == 2
    assert b.exchange.server.peers.mirror_lists.chain[-1].digest == second_list(world).digest


def test_peer_of_an_older_version_is_not_sent_lists(world):
    a, b = linked_machines(world, 2)
    wait_until(lambda: a.exchange.stats.peers and b.exchange.stats.peers)
    server, peer = a.exchange.server, b.identity.key

    async def count_sent_lists() -> list[int]:
        """Count the lists that are sent after a State without a version and after one with it.

        This runs in the exchange's thread, where meanwhile no State of the peer itself arrives.
        """
        server.peers.mirror_lists.set_lists([second_list(world)])
        sent: list[messages.Message] = []
        server.peers.connections[peer].send_message = sent.append
        without = messages.PeerState(vector={}, rate=0)
        counts = []
        for state in (without, without.model_copy(update={"mirror_list_version": 0})):
            server.peers.mirror_lists.on_state(peer, state, 0.0)
            counts.append(sum(isinstance(message, MirrorLists) for message in sent))
        return counts

    assert a.exchange.thread.run(count_sent_lists(), []) == [0, 1]
