"""Tests of GPT-2 over flat buffers, against a plain torch model without fragments.

Tolerance for fp32 sums in another order: 2e-5 of the tensor's largest magnitude.
"""

import math

import pytest
import torch
from torch import nn

from barnraise.ledger.anchor import initial_weights
from barnraise.models.functions import FUNCTIONS, head
from barnraise.planning import cost_model
from barnraise.spec import ALIGN, TENSOR_ALIGN, ModelSpec, preset
from barnraise.swap.fused_loss import Head, head_loss, head_step
from barnraise.swap.leaves import Leaves
from barnraise.swap.precision import units_to_float

GPT = FUNCTIONS["gpt2"]

TOLERANCE = 2e-5
TINY = ModelSpec(layers=2, width=32, heads=4, context=24, vocabulary=301)
# No tensor of this model ends on an alignment boundary.
PADDED = ModelSpec(layers=1, width=20, heads=2, context=9, vocabulary=257)
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


class PlainBlock(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        size = x.shape[-1] // self.heads
        query, key, value = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        mixed = []
        for h in range(self.heads):
            part = slice(h * size, (h + 1) * size)
            scores = query[..., part] @ key[..., part].mT / math.sqrt(size)
            future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            mixed.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ value[..., part])
        x = x + self.out(torch.cat(mixed, -1))
        inner = self.up(self.norm2(x))
        inner = (
            0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
        )
        return x + self.down(inner)


class PlainGPT(nn.Module):
    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.token = nn.Embedding(spec.vocabulary, spec.width)
        self.position = nn.Embedding(spec.context, spec.width)
        self.block = nn.ModuleList(PlainBlock(spec.width, spec.heads) for _ in range(spec.layers))
        self.norm = nn.LayerNorm(spec.width)

    def forward(self, tokens):
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.block:
            x = block(x)
        return self.norm(x) @ self.token.weight.T

    def by_slot(self) -> dict[str, torch.Tensor]:
        """Return the parameters under the names of ModelSpec.fragments()."""
        named = dict(self.named_parameters())
        parameters = {
            "embedding/token": named.pop("token.weight"),
            "embedding/position": named.pop("position.weight"),
        }
        for name, tensor in named.items():
            if name.startswith("block."):
                _, index, rest = name.split(".", 2)
                parameters[f"block.{index}/{rest}"] = tensor
            else:
                parameters[f"final/{name}"] = tensor
        return parameters


class FlatModel(list):
    """Leaves over flat buffers with gradients, and a plain GPT with the same weights.

    All weights are random, so that no norm or bias has its special initial value.
    """

    def __init__(self, spec: ModelSpec, device: str = "cpu"):
        self.spec, self.plain = spec, PlainGPT(spec).to(device)
        # The head's share of the gradient of the table of tokens.
        self.table = torch.zeros(spec.vocabulary, spec.width, device=device)
        self.gradients: list[torch.Tensor] = []
        plain_parameters, generator = self.plain.by_slot(), torch.Generator().manual_seed(3)
        for fragment in spec.fragments():
            leaves = Leaves(fragment, units_to_float(initial_weights(fragment, 7)).to(device))
            self.gradients.append(torch.zeros(fragment.size, device=device))
            leaves.accumulate_into(self.gradients[-1])
            self.append(leaves)
            with torch.no_grad():
                for name, view in leaves.weights.items():
                    view.add_(torch.randn(view.shape, generator=generator).to(device) * 0.05)
                    plain_parameters.pop(f"{fragment.name}/{name}").copy_(view)
        assert not plain_parameters

    def stream(self, tokens: torch.Tensor) -> torch.Tensor:
        x = GPT.embed(self[0].weights, tokens)
        for leaves in self[1:-1]:
            x = GPT.block(leaves.weights, x, self.spec)
        return x

    def backward(self, batch: torch.Tensor, share: float = 1.0) -> torch.Tensor:
        """Return share · loss; add the gradients to those of the leaves."""
        x = self.stream(batch[:, :-1])
        loss, dx = head_step(
            Head(self.spec, self[-1].weights, self[0].weights["token"]),
            x,
            batch[:, 1:],
            share,
            self.table,
        )
        x.backward(dx)
        self[0].weights["token"].grad.add_(self.table)
        return loss


def random_text(spec: ModelSpec, sequences: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        spec.vocabulary,
        (sequences, spec.context + 1),
        generator=torch.Generator().manual_seed(seed),
    )


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((actual - expected).abs().max() <= TOLERANCE * expected.abs().max().clamp_min(1e-3))


@pytest.mark.parametrize("spec", [TINY, PADDED])
@pytest.mark.parametrize("device", DEVICES)
def test_logits_loss_and_gradients_match_a_plain_torch_gpt(spec, device):
    model, batch = FlatModel(spec, device), random_text(spec).to(device)
    logits = model.plain(batch[:, :-1])
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    expected.backward()
    with torch.no_grad():
        assert close(
            head(
                model[-1].weights,
                model[0].weights["token"],
                model.stream(batch[:, :-1]),
                spec,
            ),
            logits,
        )
    assert model.backward(batch).item() == pytest.approx(expected.item(), rel=1e-5)
    plain_parameters = model.plain.by_slot()
    for leaves in model:
        for name, weight in leaves.weights.items():
            assert close(weight.grad, plain_parameters[f"{leaves.fragment.name}/{name}"].grad), (
                f"{leaves.fragment.name}/{name}"
            )


def test_sequence_shorter_than_the_context_begins_at_position_zero():
    model, batch = FlatModel(TINY), random_text(TINY)[:, :10]
    expected = nn.functional.cross_entropy(
        model.plain(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
    )
    assert model.backward(batch).item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("rows", [1, 5, 72, 1000])
def test_sliced_cross_entropy_matches_the_whole_one(rows, monkeypatch):
    monkeypatch.setattr(cost_model, "LOSS_CPU_LOGITS", rows * TINY.vocabulary)
    monkeypatch.setattr(cost_model, "LOSS_ROWS", 1)
    targets = random_text(TINY)[:, 1:]
    results = []
    for sliced in (True, False):
        model = FlatModel(TINY)
        x = torch.randn(3, 24, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
        final, token = model[-1].weights, model[0].weights["token"]
        if sliced:
            output = Head(TINY, final, token)
            value, dx = head_step(output, x, targets, 0.25, model.table)
            assert head_loss(output, x, targets).item() == pytest.approx(4 * value.item(), rel=1e-6)
        else:
            value = nn.functional.cross_entropy(
                head(final, token, x, TINY).flatten(0, 1), targets.flatten()
            )
            value = 0.25 * value
            value.backward()
            dx, model.table = x.grad, token.grad
        results.append(
            (value.detach(), dx, model.table, final["norm.weight"].grad, final["norm.bias"].grad)
        )
    assert all(close(sliced, whole) for sliced, whole in zip(*results, strict=True))


def test_loss_of_a_hopeless_prediction_is_finite_and_nan_stays_nan():
    final = {"norm.weight": torch.full((4,), 1e4), "norm.bias": torch.zeros(4)}
    token = torch.tensor([[1.0, 1, -1, -1], [-1.0, -1, 1, 1]])
    x = torch.tensor([[[1.0, 1, -1, -1]]])
    output = Head(TINY, final, token)
    assert 80 < head_loss(output, x, torch.tensor([[1]])).item() < 90
    assert head_loss(output, x * torch.nan, torch.tensor([[1]])).isnan()


@pytest.mark.parametrize("spec", [TINY, PADDED, preset("gpt-nano")])
def test_fragment_is_one_flat_buffer_with_padding_of_zeros(spec):
    model = FlatModel(spec)
    model.backward(random_text(spec, 2))
    for leaves, gradient in zip(model, model.gradients, strict=True):
        inside, weights = torch.zeros(leaves.fragment.size, dtype=torch.bool), leaves.flat
        for slot in leaves.fragment.slots:
            inside[slot.offset : slot.offset + slot.size] = True
            assert slot.offset % TENSOR_ALIGN == 0
            weight = leaves.weights[slot.name]
            assert weight.data_ptr() == weights.data_ptr() + 4 * slot.offset
            assert weight.grad.data_ptr() == gradient.data_ptr() + 4 * slot.offset
        for flat in (weights, gradient):
            assert flat.shape == (leaves.fragment.size,) and leaves.fragment.size % ALIGN == 0
            assert not flat[~inside].any(), leaves.fragment.name
