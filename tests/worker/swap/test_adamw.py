"""Tests of AdamW over flat buffers, whole and by tiles, against torch's own."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.models.weights import views
from barnraise.spec import ALIGN, TENSOR_ALIGN, Fragment, ModelSpec, preset
from barnraise.swap import adamw
from barnraise.swap.tile_threads import BLOCK, SHARING_THREADS, sharing_tiles

ODD = ModelSpec(layers=2, width=20, heads=2, context=9, vocabulary=257)
DECAY, RATE = 0.1, 3e-3
STEP_NUMBER = 3


@dataclass
class Layer:
    fragment: Fragment
    weights: torch.Tensor
    gradient: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor


THREADS = [*range(1, 5), SHARING_THREADS + 1]


def random_layers(spec: ModelSpec, seed: int = 0) -> list[Layer]:
    """Return layers with random weights and zero padding."""
    generator, layers = torch.Generator().manual_seed(seed), []
    for fragment in spec.fragments():
        layers.append(Layer(fragment, *(torch.zeros(fragment.size) for _ in range(4))))
        for view in views(fragment, layers[-1].weights).values():
            view.normal_(generator=generator)
    return layers


def set_random_gradient(layers: list[Layer], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for layer in layers:
        for view in views(layer.fragment, layer.gradient).values():
            view.normal_(generator=generator)


def tensors(layers: list[Layer], kind: str) -> list[torch.Tensor]:
    return [
        view for layer in layers for view in views(layer.fragment, getattr(layer, kind)).values()
    ]


def buffers(fragment: Fragment, seed: int = 0) -> list[torch.Tensor]:
    """Return weights, gradient, m and v of a fragment in mid-training, padding included."""
    generator = torch.Generator().manual_seed(seed)
    weights, gradient, m = (torch.randn(fragment.size, generator=generator) for _ in range(3))
    return [weights, gradient, m, torch.rand(fragment.size, generator=generator)]


def torch_adamw(layers: list[Layer], **kind) -> tuple[torch.optim.AdamW, list[torch.Tensor]]:
    """Return torch's AdamW over clones of the parameters, which decays by the tensors' rank."""
    clones = [view.clone() for view in tensors(layers, "weights")]
    groups = [
        {"params": [clone for clone in clones if clone.dim() >= 2], "weight_decay": DECAY},
        {"params": [clone for clone in clones if clone.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=RATE, betas=(adamw.BETA1, adamw.BETA2), eps=adamw.EPSILON, **kind
    ), clones


def step_all(layers: list[Layer], count: int, divisor: float = 1.0) -> None:
    for layer in layers:
        flats = layer.weights, layer.gradient, layer.m, layer.v
        adamw.adamw_update(adamw.AdamWStep(layer.fragment, count, RATE, DECAY, divisor), 0, *flats)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_adamw_twenty_steps_match_torch_with_decay_on_matrices_only(clip):
    layers = random_layers(ODD)
    optimizer, clones = torch_adamw(layers, foreach=False, fused=False)
    for step in range(20):
        set_random_gradient(layers, step)
        for clone, gradient in zip(clones, tensors(layers, "gradient"), strict=True):
            clone.grad = gradient.clone()
        divisor = 1.0
        if clip:
            norm = torch.nn.utils.clip_grad_norm_(clones, clip).item()
            divisor = max(1.0, norm / clip)
        optimizer.step()
        step_all(layers, step + 1, divisor)
    for clone, weights in zip(clones, tensors(layers, "weights"), strict=True):
        torch.testing.assert_close(weights, clone, rtol=2e-6, atol=2e-6)


BLOCKS = [ODD.fragments()[1], preset("gpt-nano").fragments()[1], preset("gpt-nano").fragments()[0]]


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_adamw_bits_do_not_depend_on_tiles_or_threads(data):
    fragment = data.draw(st.sampled_from(BLOCKS), label="fragment")
    divisor = data.draw(st.sampled_from([1.0, 1.7]), label="divisor")
    inner = st.integers(1, fragment.size // ALIGN - 1).map(lambda k: k * ALIGN)
    edges = sorted({0, fragment.size, *data.draw(st.lists(inner, max_size=8), label="cuts")})
    whole, tiled = buffers(fragment), buffers(fragment)
    torch.set_num_threads(1)
    apply_torch_kernel(fragment, whole, divisor)
    torch.set_num_threads(data.draw(st.sampled_from(THREADS), label="threads"))
    step = adamw.AdamWStep(fragment, STEP_NUMBER, RATE, DECAY, divisor)
    with sharing_tiles(data.draw(st.booleans(), label="shares")):
        for begin, end in data.draw(
            st.permutations(list(itertools.pairwise(edges))), label="order"
        ):
            adamw.adamw_update(step, begin, *(flat[begin:end] for flat in tiled))
    assert all(torch.equal(a, b) for a, b in zip(whole, tiled, strict=True))


def apply_torch_kernel(fragment: Fragment, flats: list[torch.Tensor], divisor: float) -> None:
    """Apply torch's kernel to each whole span."""
    for begin, end, decays in adamw.decay_spans(fragment):
        torch._fused_adamw_(
            *([flat[begin:end]] for flat in flats),
            [],
            [torch.tensor(float(STEP_NUMBER))],
            lr=RATE,
            beta1=adamw.BETA1,
            beta2=adamw.BETA2,
            weight_decay=DECAY if decays else 0.0,
            eps=adamw.EPSILON,
            amsgrad=False,
            maximize=False,
            grad_scale=None if divisor == 1.0 else torch.tensor(divisor),
        )


def test_adamw_step_number_may_be_a_tensor():
    fragment = ODD.fragments()[1]
    one, two = buffers(fragment), buffers(fragment)
    adamw.adamw_update(adamw.AdamWStep(fragment, 7, RATE, DECAY, 2.0), 0, *one)
    adamw.adamw_update(adamw.AdamWStep(fragment, torch.tensor(7.0), RATE, DECAY, 2.0), 0, *two)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_adamw_divides_and_skips_by_tensors_as_a_gpu_does():
    """A GPU divides by a norm, and skips what is not finite, without asking the host."""
    fragment = ODD.fragments()[1]
    one, two, untouched = buffers(fragment), buffers(fragment), buffers(fragment)
    adamw.adamw_update(adamw.AdamWStep(fragment, 7, RATE, DECAY, 1.7), 0, *one)
    found, divisor = torch.zeros(()), torch.tensor(1.7)
    adamw.adamw_update(adamw.AdamWStep(fragment, 7, RATE, DECAY, divisor, found), 0, *two)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    found.fill_(1.0)
    adamw.adamw_update(adamw.AdamWStep(fragment, 7, RATE, DECAY, divisor, found), 0, *two)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not torch.equal(one[0], untouched[0])


@pytest.mark.parametrize("begin, length", [(32, 64), (0, 96), (64, 1 << 20)])
def test_adamw_refuses_what_is_not_a_tile(begin, length):
    flats = [torch.zeros(length) for _ in range(4)]
    with pytest.raises(AssertionError, match="not a tile"):
        adamw.adamw_update(
            adamw.AdamWStep(ODD.fragments()[1], STEP_NUMBER, RATE, DECAY), begin, *flats
        )


@pytest.mark.parametrize(
    "spec", [ODD, preset("gpt-nano"), preset("gpt2-1.5b"), preset("gpt3-175b")]
)
def test_decay_spans_cover_a_fragment_once_and_decay_matrices_only(spec):
    for fragment in spec.fragments():
        spans = adamw.decay_spans(fragment)
        begins, ends, _ = zip(*spans, strict=True)
        assert [*begins, fragment.size] == [0, *ends]
        assert all(edge % TENSOR_ALIGN == 0 for edge in (*begins, *ends))
        for slot in fragment.slots:
            [decays] = [decays for begin, end, decays in spans if begin <= slot.offset < end]
            assert decays == (len(slot.shape) == 2)


@pytest.mark.parametrize("n", [64, BLOCK, 3 * BLOCK + 64, 1_000_000 // 64 * 64])
def test_sum_of_squares_is_the_same_on_any_number_of_threads(n):
    gradient = torch.randn(n, generator=torch.Generator().manual_seed(n)) * 1e-3
    sums = set()
    for threads, shares in itertools.product(THREADS, (False, True)):
        torch.set_num_threads(threads)
        with sharing_tiles(shares):
            sums.add(adamw.sum_of_squares(gradient).item())
    assert len(sums) == 1
    assert sums.pop() == pytest.approx(gradient.double().square().sum().item(), rel=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_sum_of_squares_is_not_finite_if_an_element_is_not(bad):
    gradient = torch.zeros(5 * BLOCK + 64)
    gradient[-1] = bad
    assert not torch.isfinite(adamw.sum_of_squares(gradient))
