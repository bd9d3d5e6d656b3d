"""Tests of saving, loading, resetting and repairing an engine's state."""

import pytest
import torch
from helpers.worker.plans import (
    KINDS,
    engine_of,
    exchange_state,
    sample_text,
    state_digest,
    tiny_plan,
    train_round,
)

from barnraise.errors import StateError
from barnraise.spec import ModelSpec


@pytest.mark.parametrize("kind", ["resident", "staged", "exact", "restart", "staged disk"])
def test_load_state_dict_continues_with_the_same_bits(kind, new_engine):
    engine, again = new_engine(), new_engine(kind)
    train_round(engine)
    again.load_state_dict({name: tensor.clone() for name, tensor in engine.state_dict().items()})
    for one in (engine, again):
        train_round(one, "c", seed=4)
    assert state_digest(engine) == state_digest(again)


def test_load_state_dict_of_another_model_is_refused_unchanged(new_engine):
    engine = new_engine()
    before = state_digest(engine)
    wider = ModelSpec(layers=2, width=64, heads=4, context=16, vocabulary=300)
    deeper = ModelSpec(layers=3, width=32, heads=4, context=16, vocabulary=300)
    for other in (wider, deeper):
        with pytest.raises(StateError, match="does not fit"):
            engine.load_state_dict(engine_of(tiny_plan(model=other)).state_dict())
    assert state_digest(engine) == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("reset", "other"), [("feedback", "momentum"), ("momentum", "feedback")])
def test_reset_of_feedback_or_momentum_leaves_the_other(reset, other, kind, new_engine):
    engine = new_engine(kind)
    train_round(engine)
    assert any(tensor.any() for tensor in exchange_state(engine, reset))
    {"feedback": engine.reset_feedback, "momentum": engine.reset_momentum}[reset]()
    assert not any(tensor.any() for tensor in exchange_state(engine, reset))
    assert any(tensor.any() for tensor in exchange_state(engine, other))
    train_round(engine, seq=2, seed=1)


@pytest.mark.parametrize("kind", KINDS)
def test_replace_fragment_is_where_the_next_round_begins(kind, new_engine):
    engine = new_engine(kind)
    train_round(engine)
    intact = engine.anchors[1].clone()
    damaged = intact.clone()
    damaged[3] ^= 1 << 28
    engine.anchors[1] = damaged
    engine.step([sample_text()])
    engine.replace_fragment(1, intact)
    assert torch.equal(engine.anchors[1], intact) and engine.round_tokens == 0
    train_round(engine, seq=2, seed=1)
