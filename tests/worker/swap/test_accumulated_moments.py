"""Tests of moments that absorb the mean of several gradients, against the library's reference."""

import pytest
import torch
from helpers.plans import sample_text, tiny_plan

from barnraise.exchange.mixing.accumulated_adam import AccumulatedAdam, AdamSettings
from barnraise.planning.plan import moments_part_bytes
from barnraise.spec import DECENTRALIZED_ADAM, Fragment, Slot
from barnraise.swap import accumulated_moments
from barnraise.swap.accumulated_moments import MeanGradients
from barnraise.swap.adam_moments import AdamMoments
from barnraise.swap.adamw import AdamWStep

SIZE = 4096
MATRIX = Fragment(0, "matrix", (Slot("weight", (64, 64), 0),), SIZE)
RATE, DECAY, DIVISOR = 1e-2, 0.1, 2.0


def new_moments(**changed) -> AdamMoments:
    plan = tiny_plan(**changed)
    size = sum(moments_part_bytes(SIZE, plan.moments_bits, plan.dtype))
    return AdamMoments.of(plan, torch.zeros(size, dtype=torch.uint8), SIZE)


def train(means: MeanGradients, moments: AdamMoments, weights: torch.Tensor, steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for number in range(1, steps + 1):
        gradient = torch.randn(SIZE, generator=generator) * DIVISOR
        step = AdamWStep(MATRIX, number, RATE, DECAY, gradient_divisor=DIVISOR)
        means.update_tile(step, 0, (moments, weights, gradient))


@pytest.mark.parametrize("accumulation", [1, 3])
def test_steps_equal_those_of_the_reference(accumulation, monkeypatch):
    monkeypatch.setattr(accumulated_moments, "MOVED_ELEMENTS", SIZE // 4)
    moments, weights = new_moments(), torch.ones(SIZE)
    train(MeanGradients(accumulation), moments, weights, 7)
    expected = torch.ones(SIZE)
    adam = AccumulatedAdam(expected, AdamSettings(weight_decay=DECAY, accumulation=accumulation))
    generator = torch.Generator().manual_seed(1)
    for _ in range(7):
        adam.apply_gradient(expected, torch.randn(SIZE, generator=generator), RATE)
    assert torch.allclose(weights, expected, atol=1e-6)
    assert torch.allclose(moments.m, adam.first_moment, atol=1e-6)
    assert torch.allclose(moments.v, adam.second_moment, atol=1e-6)


def test_moments_in_eight_bits_follow_those_in_thirty_two():
    weights, exact_weights = torch.ones(SIZE), torch.ones(SIZE)
    train(MeanGradients(3), new_moments(moments_bits=8), weights, 7)
    train(MeanGradients(3), new_moments(), exact_weights, 7)
    assert (weights - exact_weights).abs().mean() < RATE / 20


def test_engine_saves_and_restores_what_moments_have_not_absorbed(new_engine):
    recipe = {"strategy": DECENTRALIZED_ADAM, "mixing_accumulation": 3}
    one, again, plain = new_engine(**recipe), new_engine(**recipe), new_engine()
    for engine in (one, plain):
        for step in range(4):
            engine.step([sample_text(seed=step)])
    saved = {name: tensor.clone() for name, tensor in one.state_dict().items()}
    assert saved["mean.1"].abs().sum() > 0 and "mean.1" not in plain.state_dict()
    assert not torch.equal(saved["m.1"], plain.state_dict()["m.1"])
    again.load_state_dict(saved)
    for engine in (one, again):
        for step in range(4, 7):
            engine.step([sample_text(seed=step)])
    assert torch.equal(one.read_replica(), again.read_replica())
