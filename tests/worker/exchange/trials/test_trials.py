"""Newcomers among whole exchanges: peers compare what they train before any of it counts."""

import time

import pytest
import torch
from helpers.wait_for import stepping, wait_until

from barnraise.exchange.verdicts import verdict_handler, verdict_sync
from barnraise.ledger.anchor import Withdrawal
from barnraise.ledger.codec import encode
from barnraise.ledger.ledger import Ledger
from barnraise.ledger.validation import EMPTY_PART
from barnraise.planning.round_limits import OPINION_ROUNDS
from barnraise.protocol.enums import Standing
from barnraise.protocol.messages import FragmentUpdate

INVITED, NEWCOMER, OWNER = Standing.INVITED, Standing.NEWCOMER, Standing.OWNER
MOST_ROUNDS = 20
ROUND_SECONDS = 0.3


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch):
    monkeypatch.setattr(verdict_sync, "VERDICT_RESEND_SECONDS", 0.5)
    monkeypatch.setattr(verdict_handler, "MIN_OPINION_SECONDS", 0.0)


def start(world, *standings: Standing):
    """Start linked machines whose tickets state these standings."""
    world.standings = dict(enumerate(standings, 1))
    return world.start_linked(*world.standings)


def train_round(number: int, machine, factor: float = 1.0) -> None:
    """Let a machine publish a round: what all learn alike times a factor, and noise of its own."""
    shared = torch.Generator().manual_seed(number)
    own = torch.Generator().manual_seed(1000 * number + machine.number)
    with machine.exchange.new_update(100) as update:
        for index, fragment in enumerate(machine.anchor.fragments):
            direction = torch.randn(fragment.shape, generator=shared)
            noise = torch.randn(fragment.shape, generator=own)
            payload, units = encode((5000 * (factor * direction + 0.7 * noise)).to(torch.int32))
            machine.anchor.add_units(index, units)
            update.add(index, payload, units)
    if update.withdrawal is None:
        machine.anchor.record(update.header)
    else:
        machine.add_to_anchor(machine.exchange.withdraw(update.withdrawal))
        machine.exchange.on_withdrawn(update.withdrawal)


def train(honest, others=(), factor: float = 1.0, until=lambda: False, first: int = 0) -> int:
    """Let machines train rounds, `others` with a factor; return how many it took until then."""
    for number in range(first, first + MOST_ROUNDS):
        for machine in honest:
            train_round(number, machine)
        for machine in others:
            train_round(number, machine, factor)
        with stepping(*honest, *others):
            time.sleep(ROUND_SECONDS)
        if until():
            return number - first + 1
    return MOST_ROUNDS


def is_admitted(newcomer, *machines) -> bool:
    volunteer = f"{newcomer.number:064x}"
    return all(machine.ledger.verdicts.admits(volunteer) for machine in machines)


def has_updates_of(ledger: Ledger, machine) -> bool:
    return any(author.startswith(machine.identity.key) for author in ledger.volunteers)


@pytest.mark.parametrize("judges", [(OWNER,), (INVITED, INVITED)])
def test_newcomers_updates_count_once_those_let_in_agree(world, judges):
    *known, x = start(world, *judges, NEWCOMER)
    initial = x.anchor.digest()
    train_round(99, x)
    assert x.anchor.digest() == initial, "what a newcomer trains is withdrawn from its own anchor"
    assert x.exchange.author.probation
    rounds = train([*known, x], until=lambda: is_admitted(x, *known, x))
    assert rounds <= 10 and not x.exchange.author.probation
    assert x.exchange.author.last_seq <= rounds - OPINION_ROUNDS, "its trials do not count later"
    train_round(100, x)
    world.wait_for_agreement(*known, x, seconds=40)
    assert all(has_updates_of(machine.ledger, x) for machine in known)
    assert known[0].anchor.digest() == world.sum_digest(known[0])


@pytest.mark.parametrize("factor", [-3.0, 0.0], ids=["harmful", "useless"])
def test_newcomers_that_harm_or_say_nothing_never_count(world, factor):
    a, b, x, y = start(world, INVITED, INVITED, NEWCOMER, NEWCOMER)
    train([a, b], [x, y], factor)
    assert not is_admitted(x, a) and not is_admitted(y, a)
    world.wait_for_agreement(a, b, x, y)
    assert not any(has_updates_of(a.ledger, newcomer) for newcomer in (x, y))
    assert a.ledger.tokens == 100 * 2 * MOST_ROUNDS


def test_two_newcomers_admit_nobody_by_agreeing_with_each_other(world):
    x, y, z = start(world, NEWCOMER, NEWCOMER, NEWCOMER)
    train([x, y, z])
    assert not any(machine.ledger.vector() for machine in (x, y, z))


def test_trials_leave_no_files_and_no_updates_on_any_disk(world):
    a, x = start(world, OWNER, NEWCOMER)
    rounds = train([a], [x], factor=0.0)

    def count_files(machine) -> int:
        return sum(path.is_file() for path in (machine.folder / "blobs").rglob("*"))

    fragments = len(a.anchor.fragments)
    wait_until(lambda: count_files(a) == rounds * fragments)
    assert count_files(x) <= (rounds + 3) * fragments


def test_joiner_takes_a_snapshot_with_an_admitted_newcomers_updates(world):
    a, b, x = start(world, INVITED, INVITED, NEWCOMER)
    train([a, b, x], until=lambda: is_admitted(x, a, b, x))
    train_round(100, x)
    world.wait_for_agreement(a, b, x, seconds=40)
    late = world.machine(4)
    late.add_peers(a, b, x)
    with stepping(a, b, x):
        snapshot = late.exchange.fetch_snapshot(30.0, trust_all=True)
    assert snapshot is not None and x.exchange.author.name in snapshot.heads
    late.anchor.load(snapshot.fragments, snapshot.heads, snapshot.retracted)
    late.start()
    world.wait_for_agreement(a, b, x, late)
    assert is_admitted(x, late)


def test_excluded_attester_takes_its_admissions_with_it(world):
    a, b, x = start(world, INVITED, INVITED, NEWCOMER)
    train([a, b, x], until=lambda: is_admitted(x, a, b, x))
    train_round(100, x)
    world.wait_for_agreement(a, b, x, seconds=40)
    kept = {b.exchange.author.name: b.exchange.author.last_seq}
    a.apply_verdict(world.sign_verdict(volunteers={f"{b.number:064x}": kept}, issued=time.time()))
    wait_until(lambda: not is_admitted(x, a))
    world.wait_for_agreement(a, x, seconds=40)
    assert (
        a.ledger.vector()[b.exchange.author.name]
        and x.exchange.author.name not in a.ledger.vector()
    )
    assert x.exchange.author.probation


def test_newcomer_that_republishes_others_updates_is_not_compared(world):
    """It has not trained: a machine that compared the copies would find that they agree."""
    a, b, x = start(world, INVITED, INVITED, NEWCOMER)
    for number in range(MOST_ROUNDS // 2):
        for machine in (a, b):
            train_round(number, machine)
        world.wait_for_agreement(a, b, x)
        _, update = next(x.ledger.headers(a.exchange.author.name, number + 1, number + 1))
        copy = Withdrawal(update.fragments, update.tokens)
        x.exchange.thread.run(x.exchange.server.trial_sender.offer(copy), None)
        with stepping(a, b, x):
            time.sleep(ROUND_SECONDS)
    assert not is_admitted(x, a)
    assert all(a.ledger.blobs.has(part.digest) for part in update.fragments), "and none is deleted"


@pytest.mark.parametrize("damage", ["sketch", "count"])
def test_newcomer_with_a_false_trial_is_disconnected(world, damage):
    a, x = start(world, OWNER, NEWCOMER)
    train([a], until=lambda: a.ledger.verdicts.statements)
    units = torch.arange(a.anchor.fragments[0].numel(), dtype=torch.int32)
    payload, _ = encode(units)
    part = FragmentUpdate(digest=x.ledger.blobs.store(payload), size=len(payload), sketch="0" * 16)
    count = len(a.anchor.fragments) + (damage == "count")
    trial = Withdrawal([part] + [EMPTY_PART] * (count - 1), 100)
    session = a.exchange.server.peers.connections[x.identity.key]
    x.exchange.thread.run(x.exchange.server.trial_sender.offer(trial), None)
    wait_until(lambda: a.exchange.server.peers.connections.get(x.identity.key) is not session)
