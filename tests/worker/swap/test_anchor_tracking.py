"""Tests of an engine whose machine averages weights: replica and anchor are apart."""

import pytest
import torch
from helpers.worker.plans import exchange_state, sample_text, train_round, weights_of

from barnraise.errors import StateError
from barnraise.ledger.codec import encode
from barnraise.spec import DECENTRALIZED_ADAM
from barnraise.swap.precision import units_to_float


def largest_difference(ones, others) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ones, others, strict=True))


def anchor_of(engine):
    return [units_to_float(units) for units in exchange_state(engine, "anchor")]


@pytest.mark.parametrize("kind", ["resident", "staged"])
def test_round_moves_the_anchor_by_its_weight_towards_the_replica(kind, new_engine):
    engine = new_engine(kind, strategy=DECENTRALIZED_ADAM)
    start = anchor_of(engine)
    for step in range(3):
        engine.step([sample_text(seed=step)])
    engine.flush()
    replica = weights_of(engine)
    exact = 8 * 2**-26  # what rounding to units may change
    for round_number in range(12):  # what 2 bits leave out comes with later rounds
        list(engine.end_round(encode, 0.5))
        if round_number == 0:
            assert largest_difference(anchor_of(engine), start) > 0
    assert all(torch.equal(a, b) for a, b in zip(weights_of(engine), replica, strict=True))
    way = largest_difference(start, replica)
    assert exact < largest_difference(anchor_of(engine), replica) < 0.2 * way


def test_update_of_another_author_changes_the_anchor_only(new_engine):
    other, engine = new_engine(), new_engine(strategy=DECENTRALIZED_ADAM)
    update = train_round(other)
    engine.step([sample_text(seed=5)])
    engine.flush()
    replica = weights_of(engine)
    engine.queue_updates(update)
    assert all(torch.equal(a, b) for a, b in zip(weights_of(engine), replica, strict=True))
    ours, theirs = exchange_state(engine, "anchor"), exchange_state(other, "anchor")
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_change_is_added_to_the_replica_and_saved_with_it(new_engine):
    engine = new_engine("staged", strategy=DECENTRALIZED_ADAM)
    engine.step([sample_text()])
    before = engine.read_replica()
    change = torch.randn(before.numel(), generator=torch.Generator().manual_seed(1)) / 100
    engine.add_to_replica(change)
    assert torch.equal(engine.read_replica(), before + change)
    saved = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    again = new_engine(strategy=DECENTRALIZED_ADAM)
    again.load_state_dict(saved)
    assert torch.equal(again.read_replica(), before + change)
    moments = [again.state_dict()[name] for name in ("m.1", "v.1")]
    assert all(torch.equal(a, saved[n]) for a, n in zip(moments, ("m.1", "v.1"), strict=True))
    with pytest.raises(StateError, match="replica"):
        new_engine().load_state_dict(saved)
