"""Tests of engines that average the gradients of every step, against a synchronous reference."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from helpers.plans import TINY, bitwise, sample_text, weights_of

from barnraise.exchange.mixing.gradient_group import GradientGroup, GroupConnector
from barnraise.ledger.anchor import initial_weights
from barnraise.models import gpt2
from barnraise.protocol.group_messages import GroupInvitation
from barnraise.protocol.signing import Identity
from barnraise.spec import ALL_REDUCE
from barnraise.swap.precision import units_to_float

KEYS = sorted(Identity(bytes([n]) * 32).key for n in (1, 2))
STEPS = 3
RATE, DECAY, CLIP = 3e-3, 0.1, 1.0
LIMIT = 120  # seconds that only a failure reaches


def connect_pair(pool: ThreadPoolExecutor) -> list[GradientGroup]:
    connectors = [GroupConnector(key, lambda: False) for key in KEYS]
    invitation = GroupInvitation(
        group="0" * 32,
        members=KEYS,
        source=KEYS[0],
        shares_state=False,
        addresses=[f"127.0.0.1:{connectors[0].serve_store()}"],
    )
    futures = [pool.submit(each.connect, invitation, lambda: "") for each in connectors]
    return [future.result(LIMIT) for future in futures]


def train(engine, group: GradientGroup, rank: int) -> list[float]:
    def average(loss: float, gradients: list[torch.Tensor]) -> bool:
        group.average(gradients)
        return True

    losses = []
    for step in range(STEPS):
        batch = sample_text(seed=10 * rank + step)
        losses.append(engine.step([batch], position=step, average=average).loss)
    engine.flush()
    return losses


def train_reference() -> tuple[list[list[float]], list[dict[str, torch.Tensor]]]:
    """Train synchronously by the definition; return both machines' losses, and the weights."""
    layers = [
        {
            name: view.clone().requires_grad_()
            for name, view in gpt2.views(
                fragment, units_to_float(initial_weights(fragment, 11))
            ).items()
        }
        for fragment in TINY.fragments()
    ]
    tensors = [tensor for layer in layers for tensor in layer.values()]
    moments = [(torch.zeros_like(t), torch.zeros_like(t)) for t in tensors]
    losses = [[], []]
    for step in range(STEPS):
        for rank in range(2):
            batch = sample_text(seed=10 * rank + step)
            x = gpt2.embed(layers[0], batch[:, :-1])
            for weights in layers[1:-1]:
                x = gpt2.block(weights, x, TINY.heads)
            logits = gpt2.head(layers[-1], layers[0], x)
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            (loss / 2).backward()
            losses[rank].append(loss.item())
        torch.nn.utils.clip_grad_norm_(tensors, CLIP)
        for tensor, (m, v) in zip(tensors, moments, strict=True):
            gradient = tensor.grad
            m.mul_(0.9).add_(0.1 * gradient)
            v.mul_(0.95).add_(0.05 * gradient**2)
            corrected = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.95 ** (step + 1))
            decay = DECAY if tensor.ndim >= 2 else 0.0
            with torch.no_grad():
                tensor -= RATE * (corrected[0] / (corrected[1].sqrt() + 1e-8) + decay * tensor)
            tensor.grad = None
    return losses, layers


@pytest.mark.parametrize("kind", ["resident", "staged"])
def test_averaged_steps_equal_those_of_a_synchronous_reference(kind, new_engine):
    engines = [new_engine(kind, strategy=ALL_REDUCE) for _ in KEYS]
    with ThreadPoolExecutor(2) as pool:
        groups = connect_pair(pool)
        futures = [
            pool.submit(train, engine, group, rank)
            for rank, (engine, group) in enumerate(zip(engines, groups, strict=True))
        ]
        losses = [future.result(LIMIT) for future in futures]
    for group in groups:
        group.close()
    expected_losses, expected = train_reference()
    assert torch.allclose(torch.tensor(losses), torch.tensor(expected_losses), atol=1e-4)
    ours, theirs = (weights_of(engine) for engine in engines)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), "the same bits"
    for fragment, flat, layer in zip(TINY.fragments(), ours, expected, strict=True):
        for name, view in gpt2.views(fragment, flat).items():
            if name != "qkv.bias":  # attention does not depend on the keys' bias: its gradient is 0
                assert torch.allclose(view, layer[name], atol=2e-4), name


def test_step_whose_averaging_fails_changes_nothing(new_engine):
    engine = new_engine(strategy=ALL_REDUCE)
    engine.step([sample_text()])
    engine.flush()
    before = weights_of(engine)
    steps = engine.progress.optimizer_steps
    stats = engine.step([sample_text(seed=1)], average=lambda loss, gradients: False)
    assert stats.interrupted and stats.tokens == 0
    assert all(torch.equal(a, b) for a, b in zip(weights_of(engine), before, strict=True))
    assert engine.progress.optimizer_steps == steps


def test_loss_that_is_not_finite_elsewhere_abandons_the_step_here(new_engine):
    engine = new_engine(strategy=ALL_REDUCE)
    resets = engine.replica_resets

    def spoil(loss: float, gradients: list[torch.Tensor]) -> bool:
        for gradient in gradients:
            gradient.fill_(float("nan"))
        return True

    assert engine.step([sample_text()], average=spoil).abandoned
    assert engine.replica_resets == resets + 1


@pytest.mark.parametrize("kind", ["resident", "staged"])
def test_training_state_of_one_engine_continues_in_another(kind, new_engine):
    one, other = new_engine(kind, strategy=ALL_REDUCE), new_engine(strategy=ALL_REDUCE)
    for step in range(2):
        one.step([sample_text(seed=step)])
    for i in range(len(one.fragments)):
        other.write_training_state(i, one.read_training_state(i))
    progress = one.progress_with_pending
    other.count_optimizer_steps(progress.optimizer_steps, progress.warmup_steps_left)
    for engine in (one, other):
        engine.step([sample_text(seed=5)])
        engine.flush()
    states = (bitwise.read_state(engine) for engine in (one, other))
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
