"""Verdicts and forks among whole exchanges: every anchor ends without what they retract."""

import logging
import shutil
from dataclasses import replace

import pytest
import torch
from helpers.mirrors.mirror_lists import list_entry, signed_list
from helpers.network.raw_peer import assert_refused
from helpers.updates.forged_updates import STRANGER, build_push
from helpers.wait_for import stepping, wait_until

from barnraise.errors import ExcludedError, UnprovenVerdictError
from barnraise.exchange.verdicts import verdict_sync as verdict_sync_module
from barnraise.exchange.verdicts.verdict_handler import VERDICT_FOLDER
from barnraise.protocol import messages
from barnraise.protocol.fork_proof import Fork
from barnraise.protocol.mirror_list import Expulsion
from barnraise.protocol.signing import Identity, digest
from barnraise.protocol.verdicts import SignedVerdict

RUN = "01890000-0000-7000-8000-000000000001"
OTHER_RUN = "01890000-0000-7000-8000-00000000000f"


def start_with_poisoner(world, rounds: int = 3):
    """Return two honest machines, a poisoner and its author, agreed on `rounds` updates of each."""
    a, b, p = world.start_linked(1, 2, 3)
    for seed in range(rounds):
        for machine in (a, b, p):
            machine.publish_round(100 * machine.number + seed)
    world.wait_for_agreement(a, b, p)
    return a, b, p, p.exchange.author.name


def join_peers(machine, *others):
    machine.add_peers(*others)
    snapshot = machine.exchange.fetch_snapshot(30.0, trust_all=True)
    assert snapshot is not None
    machine.anchor.load(snapshot.fragments, snapshot.heads, snapshot.retracted)
    return machine.start()


def test_verdict_leaves_the_sum_of_the_other_authors_updates(world):
    a, b, p, author = start_with_poisoner(world)
    a.apply_verdict(world.sign_verdict({author: 0}))
    agreed = world.wait_for_agreement(a, b, p)
    assert agreed == world.sum_digest(a, {author: 0})
    assert a.anchor.tokens == a.ledger.tokens == 600 and author not in a.anchor.vector
    assert all(machine.anchor.is_intact(index) for machine in (a, b, p) for index in range(3)), (
        "the expected checksums exclude them as well"
    )
    b.publish_round(7)
    world.wait_for_agreement(a, b, p)


def test_verdict_after_an_update_keeps_the_authors_first_updates(world):
    a, b, p, author = start_with_poisoner(world)
    b.apply_verdict(world.sign_verdict({author: 1}))
    assert world.wait_for_agreement(a, b, p) == world.sum_digest(a, {author: 1})
    assert a.ledger.tokens == 700 and a.anchor.vector[author] == 1


def test_verdict_on_a_single_update_keeps_the_authors_later_ones(world):
    a, b, p, author = start_with_poisoner(world)
    a.apply_verdict(world.sign_verdict(updates={author: {2: 100}}))
    p.publish_round(9)
    wait_until(lambda: a.ledger.vector()[author] == 4)
    assert world.wait_for_agreement(a, b, p) == world.sum_digest(a, updates={author: [2]})
    assert p.exchange.author.name == author, "it continues under its incarnation"
    assert a.anchor.tokens == a.ledger.tokens == 900


def test_verdicts_in_any_order_give_one_anchor(world):
    a, b, p, author = start_with_poisoner(world)
    a.apply_verdict(world.sign_verdict(updates={author: {2: 100}}))
    b.apply_verdict(world.sign_verdict({author: 2}))
    b.apply_verdict(world.sign_verdict({author: 2}, by=(world.mirror,)))
    assert world.wait_for_agreement(a, b, p) == world.sum_digest(a, {author: 1})


def test_verdicts_author_applies_it_and_takes_a_new_incarnation(world):
    a, b, p, author = start_with_poisoner(world)
    a.apply_verdict(world.sign_verdict({author: 2}))
    wait_until(lambda: p.exchange.author.name != author)
    p.publish_round(50)
    world.wait_for_agreement(a, b, p)
    assert a.anchor.vector[p.exchange.author.name] == 1


def test_author_partitioned_during_a_verdict_catches_up(world):
    a, b, p, author = start_with_poisoner(world)
    world.network.partition({a.identity.key, b.identity.key}, {p.identity.key})
    wait_until(lambda: a.exchange.stats.peers == 1)
    a.apply_verdict(world.sign_verdict({author: 2}))
    for seed in range(3):
        p.publish_round(60 + seed)
        a.publish_round(70 + seed)
    world.wait_for_agreement(a, b)
    world.network.heal()
    assert world.wait_for_agreement(a, b, p) == world.sum_digest(a, {author: 2})
    assert p.exchange.author.name != author


def test_machine_without_a_retracted_update_gets_the_later_ones(world):
    a, b, p, author = start_with_poisoner(world, rounds=1)
    late = world.machine(4)
    late.start()
    late.add_peers(a)
    world.wait_for_agreement(a, b, p, late)
    world.network.partition({m.identity.key for m in (a, b, p)}, {late.identity.key})
    wait_until(lambda: late.exchange.stats.peers == 0)
    p.publish_round(80)
    p.publish_round(81)
    world.wait_for_agreement(a, b, p)
    a.apply_verdict(world.sign_verdict(updates={author: {2: 100}}))
    world.wait_for_agreement(a, b, p)
    second = a.ledger.update(author, 2)
    for machine in (a, b, p):
        for part in second.fragments:
            machine.ledger.blobs.delete(part.digest)  # no machine has it
    world.network.heal()
    late.add_peers(a, b, p)
    agreed = world.wait_for_agreement(a, b, p, late, seconds=40)
    assert agreed == world.sum_digest(late, updates={author: [2]})


def test_late_joiner_gets_an_anchor_without_retracted_updates(world):
    a, b, p, author = start_with_poisoner(world)
    a.apply_verdict(world.sign_verdict({author: 1}, {b.exchange.author.name: {2: 100}}))
    world.wait_for_agreement(a, b, p)
    late = world.machine(4)
    with stepping(a, b, p):
        join_peers(late, a, b, p)
    agreed = world.wait_for_agreement(a, b, p, late)
    assert agreed == world.sum_digest(a, {author: 1}, {b.exchange.author.name: [2]})
    assert late.anchor.tokens == a.anchor.tokens and late.ledger.tokens == a.ledger.tokens
    late.publish_round(5)
    world.wait_for_agreement(a, b, p, late)
    late.stop()
    late.open()
    with stepping(a, b, p):
        join_peers(late, a)
    world.wait_for_agreement(a, b, p, late)


def test_joiner_with_a_retracted_update_requests_headers_and_payloads(world):
    a, b, p, author = start_with_poisoner(world, rounds=5)
    late = world.machine(4)
    with stepping(a, b, p):
        join_peers(late, a, b, p)
    world.wait_for_agreement(a, b, p, late)
    assert late.ledger.update(author, 4) is None
    a.apply_verdict(world.sign_verdict({author: 2}, {b.exchange.author.name: {1: 100}}))
    agreed = world.wait_for_agreement(a, b, p, late, seconds=40)
    assert agreed == world.sum_digest(a, {author: 2}, {b.exchange.author.name: [1]})
    late.stop()
    late.open()
    with stepping(a, b, p):
        join_peers(late, a)
    assert world.wait_for_agreement(a, b, p, late) == agreed


def test_retraction_without_the_payloads_fetches_them(world):
    a, b, p, author = start_with_poisoner(world)
    for seq in (2, 3):
        for part in b.ledger.update(author, seq).fragments:
            b.ledger.blobs.delete(part.digest)
    a.apply_verdict(world.sign_verdict({author: 1}))
    assert world.wait_for_agreement(a, b, p) == world.sum_digest(a, {author: 1})


def test_retraction_after_a_crash_is_completed_from_any_anchor(world):
    a, b, p, author = start_with_poisoner(world)
    old, heads = [f.clone() for f in b.anchor.fragments], dict(b.anchor.heads)
    a.apply_verdict(world.sign_verdict({author: 1}, {a.exchange.author.name: {2: 100}}))
    wait_until(lambda: b.ledger.verdicts.digest is not None)
    b.stop()  # before its loop has retracted anything
    b.open()
    b.anchor.load(old, heads)
    b.start().add_peers(a, p)
    agreed = world.wait_for_agreement(a, b, p)
    b.stop()
    b.open()  # now from the seed's weights
    b.start().add_peers(a, p)
    assert world.wait_for_agreement(a, b, p) == agreed


def test_verdict_left_in_the_folder_is_applied(world):
    a, b, p, author = start_with_poisoner(world)
    folder = a.folder / VERDICT_FOLDER
    folder.mkdir()
    ruling = world.sign_verdict({author: 0})
    (folder / "bad.json").write_text(
        world.sign_verdict({author: 0}, by=(p.identity,)).model_dump_json()
    )
    (folder / "worse.json").write_text("{")
    (folder / f"{digest(ruling.body)}.json").write_text(ruling.model_dump_json())
    world.wait_for_agreement(a, b, p)
    wait_until(lambda: author not in b.ledger.vector())
    wait_until(lambda: sorted(p.name for p in folder.iterdir()) == ["bad.refused", "worse.refused"])


def test_verdict_during_a_join_is_not_lost(world):
    a, b, p, author = start_with_poisoner(world)
    late = world.machine(4)
    late.add_peers(a, b, p)
    wait_until(lambda: late.exchange.stats.peers > 0)
    a.apply_verdict(world.sign_verdict({author: 1}))
    world.wait_for_agreement(a, b, p)
    with stepping(a, b, p):
        join_peers(late, a, b, p)
    world.wait_for_agreement(a, b, p, late)


# ---- forks


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch):
    monkeypatch.setattr(verdict_sync_module, "HEADS_SECONDS", 0.2)
    monkeypatch.setattr(verdict_sync_module, "VERDICT_RESEND_SECONDS", 1.0)


def restore_copy(machine, copy, name: str = "f" * 16):
    """Return the machine after its directory was replaced by a copy."""
    machine.stop()
    shutil.rmtree(machine.folder)
    shutil.copytree(copy, machine.folder)
    machine.open(reincarnate=lambda: name)
    return machine.start()


def start_with_fork(world, updates: int = 1):
    """Return machines a, b, c; a published its next updates twice, once to b and once to c."""
    a, b, c = world.start_agreed(1, 2, 3)
    a.stop()
    shutil.copytree(a.folder, world.folder / "copy")
    a.open()
    keys = [m.identity.key for m in (a, b, c)]
    world.network.partition({keys[0], keys[1]}, {keys[2]})
    a.start().add_peers(b)
    for seed in range(updates):
        a.publish_round(10 + seed)
    world.wait_for_agreement(a, b)
    world.network.partition({keys[0], keys[2]}, {keys[1]})
    restore_copy(a, world.folder / "copy").add_peers(c)
    for seed in range(updates):
        a.publish_round(20 + seed)
    world.wait_for_agreement(a, c)
    return a, b, c


@pytest.mark.parametrize("updates", [1, 3])
def test_fork_of_a_restored_directory_is_found_and_retracted(world, updates, caplog):
    caplog.set_level(logging.INFO, "barnraise.exchange")
    a, b, c = start_with_fork(world, updates)
    old = a.exchange.author.name
    assert b.ledger.head(old).digest != c.ledger.head(old).digest
    assert b.ledger.vector() == c.ledger.vector()
    world.network.heal()
    for machine in (a, b, c):
        machine.add_peers(*(other for other in (a, b, c) if other is not machine))
    wait_until(lambda: all(m.ledger.verdicts.limits == {old: 1} for m in (a, b, c)))
    assert world.wait_for_agreement(a, b, c) == world.sum_digest(b, {old: 1})
    assert a.exchange.author.name != old
    assert any("signed two updates as number" in record.getMessage() for record in caplog.records)
    a.publish_round(99)
    b.publish_round(98)
    world.wait_for_agreement(a, b, c)
    assert a.anchor.vector[a.exchange.author.name] == 1


def test_fork_is_found_by_a_later_update_while_vectors_differ(world):
    a, b, c = start_with_fork(world)
    old = a.exchange.author.name
    a.publish_round(30)
    world.wait_for_agreement(a, c)
    b.publish_round(31)
    world.network.heal()
    b.add_peers(c)
    wait_until(lambda: all(m.ledger.verdicts.limits == {old: 1} for m in (b, c)))
    world.wait_for_agreement(b, c)


def test_fork_proof_reaches_machines_that_saw_one_half(world):
    a, b, c = start_with_fork(world)
    old = a.exchange.author.name
    d = world.machine(4)
    world.network.heal()
    d.start().add_peers(b)
    wait_until(lambda: d.ledger.verdicts.limits == {old: 1})
    world.wait_for_agreement(a, b, c, d, seconds=40)


def test_two_incomplete_updates_with_one_number_prove_a_fork(world):
    a = world.machine(1).start()
    stranger = world.machine(2)
    updates = a.exchange.server.updates
    for tokens in (10, 11):
        push = build_push(world, stranger.identity, tokens=tokens)
        a.exchange.thread.run(updates.on_header("nobody", push, 0.0), None)
    assert a.ledger.verdicts.limits == {f"{stranger.identity.key}.{'9' * 16}": 0}
    assert not updates.incomplete


def test_verdict_by_enough_mirrors_is_applied(world):
    a, b, p, author = start_with_poisoner(world)
    ruling = world.sign_verdict({author: 0}, by=(world.mirror,))
    a.apply_verdict(SignedVerdict.model_validate_json(ruling.model_dump_json()))
    assert world.wait_for_agreement(a, b, p) == world.sum_digest(a, {author: 0})


def test_retraction_restores_the_anchor_bit_for_bit(world):
    a, b, p, author = start_with_poisoner(world, rounds=1)
    before = [f.clone() for f in a.anchor.fragments]
    p.publish_round(5)
    world.wait_for_agreement(a, b, p)
    a.apply_verdict(world.sign_verdict({author: 1}))
    world.wait_for_agreement(a, b, p)
    assert all(
        torch.equal(one, other) for one, other in zip(before, a.anchor.fragments, strict=True)
    )


# ---- exclusion


def links(machine) -> set[str]:
    """Return the keys of the peers that a machine is connected to."""
    return set(machine.exchange.server.peers.connections)


def test_excluded_key_cannot_go_on_in_another_incarnation(world):
    a, b, p, author = start_with_poisoner(world)
    a.apply_verdict(world.sign_verdict(keys={p.identity.key: {author: 1}}))
    digest_without = world.wait_for_agreement(a, b)
    assert digest_without == world.sum_digest(a, {author: 1})
    wait_until(lambda: p.identity.key not in links(a) | links(b))
    wait_until(lambda: p.exchange.author.exclusion is not None)
    with pytest.raises(ExcludedError, match="excludes this machine"):
        p.publish_round(7)

    # A program that does not obey continues under a new name, and others forward its updates.
    p.stop()
    p.incarnation = "e" * 16
    p.open()
    p.start()
    p.add_peers(a, b)
    for machine in (a, b):
        machine.add_peers(p)
        receive = machine.exchange.server.updates.on_header("nobody", next_push(p), 0.0)
        assert machine.exchange.thread.run(receive, None) is None
    assert world.wait_for_agreement(a, b) == digest_without
    assert p.identity.key not in links(a) | links(b)


def next_push(machine) -> messages.UpdatePush:
    """Return the first update of a machine in its incarnation, as another peer forwards it."""
    return build_push(
        machine.world, machine.identity, machine.ticket, incarnation=machine.incarnation
    )


def test_excluded_volunteer_is_out_with_all_keys(world):
    a, b, p, author = start_with_poisoner(world)
    q = world.machine(4)
    q.stop()
    q.ticket = world.ticket(q.identity.key, volunteer=3)  # another key of the poisoner
    q.open()
    join_peers_while_stepping(q, a, b)
    q.publish_round(9)
    world.wait_for_agreement(a, b, p, q)
    b.apply_verdict(world.sign_verdict(volunteers={f"{3:064x}": {}}))
    agreed = world.wait_for_agreement(a, b)
    assert agreed == world.sum_digest(a, {author: 0, q.exchange.author.name: 0})
    wait_until(lambda: not {p.identity.key, q.identity.key} & (links(a) | links(b)))
    c = join_peers_while_stepping(world.machine(5), a, b)
    assert world.wait_for_agreement(a, b, c) == agreed, "a joiner agrees"
    receive = c.exchange.server.updates.on_header("nobody", next_push(q), 0.0)
    c.exchange.thread.run(receive, None)
    assert world.wait_for_agreement(a, b, c) == agreed


def join_peers_while_stepping(machine, *others):
    with stepping(*others):
        return join_peers(machine, *others)


def test_excluded_key_and_its_updates_end_the_same_in_any_order(world):
    a, b, p, author = start_with_poisoner(world, rounds=2)
    late = world.machine(6).start()
    verdict = world.sign_verdict(keys={p.identity.key: {}})
    late.apply_verdict(verdict)  # before any update
    a.apply_verdict(verdict)  # after them
    late.add_peers(a, b)
    assert world.wait_for_agreement(a, b, late) == world.sum_digest(a, {author: 0})


# ---- the mirrors' verdicts

SECOND_MIRROR, THIRD_MIRROR = Identity(b"2" * 32), Identity(b"3" * 32)


def mirrors_list(world, version: int, *mirrors, expelled=()):
    """Return a list of the world's mirror and others."""
    return signed_list(
        version,
        *(
            list_entry(
                mirror,
                f"https://{mirror.key[:8]}.example.org",
                expelled=Expulsion(at=1.0, since=version) if mirror in expelled else None,
            )
            for mirror in (world.mirror, *mirrors)
        ),
    )


def test_past_verdict_of_an_expelled_mirror_loses_its_effect(world):
    a, b = world.machine(1).start(), world.machine(2).start()
    b.add_peers(a)
    for machine in (a, b):
        machine.exchange.set_mirror_lists([mirrors_list(world, 1, SECOND_MIRROR)])
        for seed in range(3):
            machine.publish_round(10 * machine.number + seed)
    honest = world.wait_for_agreement(a, b)
    assert a.ledger.tokens == 600
    erase = dict.fromkeys([a.exchange.author.name, b.exchange.author.name], 0)
    rogue = world.sign_verdict(erase, by=(world.mirror,), mirror_list_version=1)
    a.apply_verdict(rogue)  # one of two mirrors is half of them
    world.wait_for_agreement(a, b)
    assert a.ledger.tokens == b.ledger.tokens == 0
    expulsion = mirrors_list(world, 2, SECOND_MIRROR, expelled=[world.mirror])
    a.exchange.set_mirror_lists([expulsion])
    wait_until(lambda: a.ledger.tokens == b.ledger.tokens == 600)
    assert world.wait_for_agreement(a, b) == honest
    for forged in (
        rogue,
        world.sign_verdict(erase, by=(world.mirror,), mirror_list_version=0),
        world.sign_verdict(erase, by=(world.mirror,), mirror_list_version=2),
    ):
        with pytest.raises(UnprovenVerdictError):
            a.apply_verdict(forged)
    assert a.ledger.tokens == 600 and not a.ledger.verdicts.rulings


def test_rogue_mirror_of_three_erases_nothing(world):
    world.spec = replace(
        world.spec, roots=(world.mirror.key, SECOND_MIRROR.key, THIRD_MIRROR.key), threshold=2
    )
    a = world.machine(1).start()
    a.publish_round(1)
    erase = {a.exchange.author.name: 0}
    with pytest.raises(UnprovenVerdictError, match="1 more of the mirrors"):
        a.apply_verdict(world.sign_verdict(erase, by=(world.mirror,)))
    assert a.ledger.tokens == 100


def test_joiner_accepts_a_snapshot_with_a_verdict_of_later_mirrors(world):
    a, b, _, author = start_with_poisoner(world)
    lists = [mirrors_list(world, 1, SECOND_MIRROR, THIRD_MIRROR)]
    for machine in (a, b):
        machine.exchange.set_mirror_lists(lists)
    by_later = world.sign_verdict(
        {author: 0}, by=(SECOND_MIRROR, THIRD_MIRROR), mirror_list_version=1
    )
    wait_until(lambda: b.exchange.server.peers.mirror_lists.version == 1)
    a.apply_verdict(by_later)
    agreed = world.wait_for_agreement(a, b)
    c = world.machine(5)
    c.exchange.set_mirror_lists(lists)  # as its coordinator names them
    join_peers_while_stepping(c, a, b)
    assert world.wait_for_agreement(a, b, c) == agreed


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (lambda world: world.sign_verdict(by=(STRANGER,)), "neither the run's owner nor one of"),
        (lambda world: world.sign_verdict(run=OTHER_RUN), "is for run"),
        (lambda world: fork_of_one_update(build_push(world, STRANGER)), "not two"),
    ],
)
def test_invalid_verdict_or_proof_ends_the_connection(world, caplog, message, reason):
    a = world.machine(1).start()
    assert_refused(a, caplog, [message(world)], reason)


def fork_of_one_update(sent):
    """Return a proof of a fork whose two updates are the same one."""
    return Fork(one=sent.header, other=sent.header, ticket=sent.ticket)
