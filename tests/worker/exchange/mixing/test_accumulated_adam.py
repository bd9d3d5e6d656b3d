"""Test decentralised Adam's optimizer against torch's AdamW and against its formula."""

import pytest
import torch

from barnraise.exchange.mixing.accumulated_adam import AccumulatedAdam, AdamSettings


def random_gradients(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(64, generator=generator) for _ in range(count)]


def test_accumulation_of_one_step_is_adamw():
    ours, theirs = torch.ones(64), torch.ones(64, requires_grad=True)
    adam = AccumulatedAdam(ours, AdamSettings(weight_decay=0.1))
    reference = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for gradient in random_gradients(20):
        adam.apply_gradient(ours, gradient, 1e-2)
        theirs.grad = gradient.clone()
        reference.step()
    assert torch.allclose(ours, theirs.detach(), atol=1e-6)


@pytest.mark.parametrize("accumulation", [2, 4, 5])
def test_stored_moments_absorb_the_mean_gradient_of_several_steps(accumulation):
    weights, expected = torch.ones(64), torch.ones(64)
    adam = AccumulatedAdam(weights, AdamSettings(weight_decay=0.0, accumulation=accumulation))
    m, v, window = torch.zeros(64), torch.zeros(64), []
    for step, gradient in enumerate(random_gradients(23)):
        adam.apply_gradient(weights, gradient, 1e-2)
        k = step // accumulation + 1
        first, second = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        expected -= 1e-2 * first / (1 - 0.9**k) / ((second / (1 - 0.95**k)).sqrt() + 1e-8)
        window.append(gradient)
        if len(window) == accumulation:
            mean = torch.stack(window).mean(dim=0)
            m, v, window = 0.9 * m + 0.1 * mean, 0.95 * v + 0.05 * mean**2, []
    assert torch.allclose(weights, expected, atol=1e-5)
    assert torch.allclose(adam.first_moment, m, atol=1e-6)
    assert torch.allclose(adam.second_moment, v, atol=1e-6)


def test_accumulation_of_no_steps_is_refused():
    with pytest.raises(ValueError, match="one or more steps"):
        AdamSettings(accumulation=0)
