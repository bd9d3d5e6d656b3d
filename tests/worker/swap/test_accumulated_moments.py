"""Tests of moments that absorb the mean of several gradients, against their formula."""

import pytest
import torch
from helpers.worker.plans import sample_text, tiny_plan

from barnraise.planning.plan import moments_part_bytes
from barnraise.spec import DECENTRALIZED_ADAM, Fragment, Slot
from barnraise.swap import accumulated_moments
from barnraise.swap.accumulated_moments import MeanGradients
from barnraise.swap.adam_moments import AdamMoments
from barnraise.swap.adamw import AdamWStep

SIZE = 4096
MATRIX = Fragment(0, "matrix", (Slot("weight", (64, 64), "matrix"),), SIZE)
RATE, DECAY, DIVISOR = 1e-2, 0.1, 2.0


def new_moments(**changed) -> AdamMoments:
    plan = tiny_plan(**changed)
    size = sum(moments_part_bytes(SIZE, SIZE, plan.moments_bits, plan.dtype))
    return AdamMoments.of(plan, torch.zeros(size, dtype=torch.uint8), SIZE, SIZE)


def random_gradients(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(SIZE, generator=generator) for _ in range(count)]


def train(means: MeanGradients, moments: AdamMoments, weights: torch.Tensor, steps: int) -> None:
    for number, gradient in enumerate(random_gradients(steps), 1):
        step = AdamWStep(MATRIX, number, RATE, DECAY, gradient_divisor=DIVISOR)
        means.update_tile(step, 0, (moments, weights, gradient * DIVISOR))


@pytest.mark.parametrize("accumulation", [2, 3, 4])
def test_stored_moments_absorb_the_mean_gradient_of_several_steps(accumulation, monkeypatch):
    monkeypatch.setattr(accumulated_moments, "MOVED_ELEMENTS", SIZE // 4)
    moments, weights = new_moments(), torch.ones(SIZE)
    train(MeanGradients(accumulation), moments, weights, 11)
    expected, window = torch.ones(SIZE), []
    m, v = torch.zeros(SIZE), torch.zeros(SIZE)
    for step, gradient in enumerate(random_gradients(11)):
        k = step // accumulation + 1
        first, second = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        expected *= 1 - RATE * DECAY
        expected -= RATE * first / (1 - 0.9**k) / ((second / (1 - 0.95**k)).sqrt() + 1e-8)
        window.append(gradient)
        if len(window) == accumulation:
            mean = torch.stack(window).mean(dim=0)
            m, v, window = 0.9 * m + 0.1 * mean, 0.95 * v + 0.05 * mean**2, []
    assert torch.allclose(weights, expected, atol=1e-6)
    assert torch.allclose(moments.m, m, atol=1e-6)
    assert torch.allclose(moments.v, v, atol=1e-6)


def test_accumulation_of_one_step_is_adamw():
    weights, expected = torch.ones(SIZE), torch.ones(SIZE)
    train(MeanGradients(1), new_moments(), weights, 7)
    adam = torch.optim.AdamW([expected], RATE, betas=(0.9, 0.95), weight_decay=DECAY)
    for gradient in random_gradients(7):
        expected.grad = gradient
        adam.step()
    assert torch.allclose(weights, expected, atol=1e-6)


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
