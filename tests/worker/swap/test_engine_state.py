"""What of an engine is kept, forgotten or mended, and how it goes on from there."""

import pytest
import torch
from helpers.plans import (
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


@pytest.mark.parametrize("kind", ["resident", "staged"])
def test_a_restored_engine_goes_on_with_the_same_bits(kind, new_engine):
    engine, again = new_engine(), new_engine(kind)
    train_round(engine)
    again.load_state_dict({name: tensor.clone() for name, tensor in engine.state_dict().items()})
    for one in (engine, again):
        train_round(one, "c", seed=4)
    assert state_digest(engine) == state_digest(again)


@pytest.mark.parametrize("kind", ["exact", "restart", "staged disk"])
def test_what_a_plan_in_memory_saved_goes_on_from_disk_with_the_same_bits(kind, new_engine):
    engine, again = new_engine(), new_engine(kind)
    train_round(engine)
    again.load_state_dict({name: tensor.clone() for name, tensor in engine.state_dict().items()})
    for one in (engine, again):
        train_round(one, "c", seed=4)
    assert state_digest(engine) == state_digest(again)


def test_the_state_of_another_model_is_refused_by_name_and_changes_nothing(new_engine):
    engine = new_engine()
    before = state_digest(engine)
    wider = ModelSpec(layers=2, width=64, heads=4, context=16, vocabulary=300)
    deeper = ModelSpec(layers=3, width=32, heads=4, context=16, vocabulary=300)
    for other in (wider, deeper):
        with pytest.raises(StateError, match="does not fit"):
            engine.load_state_dict(engine_of(tiny_plan(model=other)).state_dict())
    assert state_digest(engine) == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("forgotten", "left"), [("feedback", "momentum"), ("momentum", "feedback")]
)
def test_what_is_forgotten_is_gone_and_the_other_stays(forgotten, left, kind, new_engine):
    engine = new_engine(kind)
    train_round(engine)
    assert any(kept.any() for kept in exchange_state(engine, forgotten))
    {"feedback": engine.reset_feedback, "momentum": engine.reset_momentum}[forgotten]()
    assert not any(kept.any() for kept in exchange_state(engine, forgotten))
    assert any(kept.any() for kept in exchange_state(engine, left))
    train_round(engine, seq=2, seed=1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mended_fragment_is_what_the_next_round_begins_at(kind, new_engine):
    engine = new_engine(kind)
    train_round(engine)
    right = engine.anchors[1].clone()
    hurt = right.clone()
    hurt[3] ^= 1 << 28
    engine.anchors[1] = hurt
    engine.step([sample_text()])
    engine.replace_fragment(1, right)
    assert torch.equal(engine.anchors[1], right) and engine.round_tokens == 0
    train_round(engine, seq=2, seed=1)
