"""The GPT over flat buffers, against a plain torch one that knows nothing of fragments.

Tolerance: fp32, sums in another order; 2e-5 of the tensor's largest magnitude."""

import math

import pytest
import torch
from torch import nn

from barnraise import model as gpt
from barnraise.exchange.anchor import Anchor
from barnraise.spec import ALIGN, TENSOR_ALIGN, ModelSpec, Recipe, preset
from barnraise.swap import loss as loss_module
from barnraise.swap.engine import Engine
from barnraise.swap.loss import head_loss

TOLERANCE = 2e-5
TINY = ModelSpec(layers=2, width=32, heads=4, context=24, vocabulary=301)
PADDED = ModelSpec(layers=1, width=20, heads=2, context=9, vocabulary=257)  # no tensor ends on a boundary
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
        inner = 0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
        return x + self.down(inner)


class PlainGPT(nn.Module):
    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.token, self.position = nn.Embedding(spec.vocabulary, spec.width), nn.Embedding(spec.context, spec.width)
        self.block = nn.ModuleList(PlainBlock(spec.width, spec.heads) for _ in range(spec.layers))
        self.norm = nn.LayerNorm(spec.width)

    def forward(self, tokens):
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.block:
            x = block(x)
        return self.norm(x) @ self.token.weight.T

    def by_slot(self) -> dict[str, torch.Tensor]:
        """Its parameters under the names of ModelSpec.fragments()."""
        named = dict(self.named_parameters())
        found = {"embedding/token": named.pop("token.weight"), "embedding/position": named.pop("position.weight")}
        for name, tensor in named.items():
            if name.startswith("block."):
                _, index, rest = name.split(".", 2)
                found[f"block.{index}/{rest}"] = tensor
            else:
                found[f"final/{name}"] = tensor
        return found


def engine_and_plain(spec: ModelSpec, device: str = "cpu") -> tuple[Engine, PlainGPT]:
    """The same weights in both, stirred so that no norm or bias sits at its special initial value."""
    engine, plain = Engine(spec, Recipe(), Anchor.initial(spec, 7), device), PlainGPT(spec).to(device)
    theirs = plain.by_slot()
    stir = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in engine.arena.layers:
            for name, view in gpt.views(layer.fragment, layer.weights).items():
                view.add_(torch.randn(view.shape, generator=stir).to(device) * 0.05)
                theirs.pop(f"{layer.fragment.name}/{name}").copy_(view)
    assert not theirs
    return engine, plain


def some_text(spec: ModelSpec, sequences: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.randint(spec.vocabulary, (sequences, spec.context + 1), generator=torch.Generator().manual_seed(seed))


def close(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    return bool((mine - theirs).abs().max() <= TOLERANCE * theirs.abs().max().clamp_min(1e-3))


@pytest.mark.parametrize("spec", [TINY, PADDED])
@pytest.mark.parametrize("device", DEVICES)
def test_logits_loss_and_every_gradient_match_a_plain_torch_gpt(spec, device):
    engine, plain = engine_and_plain(spec, device)
    batch = some_text(spec).to(device)
    logits = plain(batch[:, :-1])
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    expected.backward()
    with torch.no_grad():
        embedding, *blocks, final = engine.arena.parameters
        x = gpt.embed(embedding, batch[:, :-1])
        for weights in blocks:
            x = gpt.block(weights, x, spec.heads)
        assert close(gpt.head(final, embedding, x), logits)
    stats = engine.step([batch], rate_scale=0.0)
    assert stats.loss == pytest.approx(expected.item(), rel=1e-5)
    theirs = plain.by_slot()
    for layer in engine.arena.layers:
        for name, gradient in gpt.views(layer.fragment, layer.gradient).items():
            clipped = theirs[f"{layer.fragment.name}/{name}"].grad / max(1.0, stats.norm / engine.recipe.clip)
            assert close(gradient, clipped), f"{layer.fragment.name}/{name}"


def test_a_shorter_sequence_than_the_context_is_read_from_the_first_position():
    engine, plain = engine_and_plain(TINY)
    batch = some_text(TINY)[:, :10]
    expected = nn.functional.cross_entropy(plain(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    assert engine.step([batch]).loss == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("rows", [1, 5, 72, 1000])
def test_the_sliced_cross_entropy_matches_the_whole_one_however_it_is_sliced(rows, monkeypatch):
    monkeypatch.setattr(loss_module, "CPU_SLICE", rows * TINY.vocabulary)
    monkeypatch.setattr(loss_module, "ROWS", 1)
    engine, _ = engine_and_plain(TINY)
    final, embedding = engine.arena.parameters[-1], engine.arena.parameters[0]
    targets = some_text(TINY)[:, 1:]
    gradients = []
    for sliced in (True, False):
        engine.arena.clear_gradients()
        x = torch.randn(3, 24, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
        if sliced:
            value = head_loss(final, embedding, x, targets)
        else:
            value = nn.functional.cross_entropy(gpt.head(final, embedding, x).flatten(0, 1), targets.flatten())
        (3 * value).backward()
        gradients.append((value.detach(), x.grad, embedding["token"].grad.clone(), final["norm.weight"].grad.clone()))
    assert all(close(mine, theirs) for mine, theirs in zip(*gradients, strict=True))


def test_a_hopeless_prediction_has_a_finite_loss_and_a_broken_one_does_not():
    final = {"norm.weight": torch.full((4,), 1e4), "norm.bias": torch.zeros(4)}
    embedding = {"token": torch.tensor([[1.0, 1, -1, -1], [-1.0, -1, 1, 1]])}
    x = torch.tensor([[[1.0, 1, -1, -1]]])
    assert 80 < head_loss(final, embedding, x, torch.tensor([[1]])).item() < 90
    assert head_loss(final, embedding, x * torch.nan, torch.tensor([[1]])).isnan()


@pytest.mark.parametrize("spec", [TINY, PADDED, preset("gpt-nano")])
def test_each_fragment_lies_in_one_flat_buffer_and_its_padding_stays_zero(spec):
    engine = Engine(spec, Recipe(), Anchor.initial(spec, 0))
    engine.step([some_text(spec, 2)])
    for layer, fragment in zip(engine.arena.layers, spec.fragments(), strict=True):
        inside = torch.zeros(fragment.size, dtype=torch.bool)
        for slot in fragment.slots:
            inside[slot.offset : slot.offset + slot.size] = True
            assert slot.offset % TENSOR_ALIGN == 0
            parameter = layer.parameters[slot.name]
            assert parameter.data_ptr() == layer.weights.data_ptr() + 4 * slot.offset
            assert parameter.grad.data_ptr() == layer.gradient.data_ptr() + 4 * slot.offset
        for kind in ("weights", "gradient", "m", "v", "momentum", "feedback"):
            flat = getattr(layer, kind)
            assert flat.shape == (fragment.size,) and fragment.size % ALIGN == 0
            assert flat.data_ptr() % 64 == 0, "every tensor starts on a 64-byte boundary"
            assert not flat[~inside].any(), f"{kind} of {fragment.name}"
