"""AdamW over flat buffers, against torch's own, whole and by tiles; and the schedule."""

import dataclasses
import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from barnraise.models.gpt2 import views
from barnraise.spec import ALIGN, TENSOR_ALIGN, Fragment, ModelSpec, Recipe, preset
from barnraise.swap.adamw import (
    BETA1,
    BETA2,
    EPSILON,
    AdamWStep,
    adamw_update,
    decay_spans,
    sum_of_squares,
)
from barnraise.swap.lr_schedule import learning_rate_scale
from barnraise.swap.tile_threads import BLOCK, for_each_tile

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


@pytest.fixture(autouse=True)
def _as_many_threads_as_before():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def stirred(spec: ModelSpec, seed: int = 0) -> list[Layer]:
    """Layers with random weights; padding is zero."""
    stir, layers = torch.Generator().manual_seed(seed), []
    for fragment in spec.fragments():
        layers.append(Layer(fragment, *(torch.zeros(fragment.size) for _ in range(4))))
        for view in views(fragment, layers[-1].weights).values():
            view.normal_(generator=stir)
    return layers


def some_gradient(layers: list[Layer], step: int) -> None:
    stir = torch.Generator().manual_seed(step)
    for layer in layers:
        for view in views(layer.fragment, layer.gradient).values():
            view.normal_(generator=stir)


def tensors(layers: list[Layer], kind: str) -> list[torch.Tensor]:
    return [
        view for layer in layers for view in views(layer.fragment, getattr(layer, kind)).values()
    ]


def buffers(fragment: Fragment, seed: int = 0) -> list[torch.Tensor]:
    """Weights, gradient, m and v of a fragment in the middle of training, padding included."""
    stir = torch.Generator().manual_seed(seed)
    weights, gradient, m = (torch.randn(fragment.size, generator=stir) for _ in range(3))
    return [weights, gradient, m, torch.rand(fragment.size, generator=stir)]


def torch_adamw(layers: list[Layer], **kind) -> tuple[torch.optim.AdamW, list[torch.Tensor]]:
    """torch's own over clones of the parameters; its decay groups are by the tensors' rank."""
    clones = [view.clone() for view in tensors(layers, "weights")]
    groups = [
        {"params": [clone for clone in clones if clone.dim() >= 2], "weight_decay": DECAY},
        {"params": [clone for clone in clones if clone.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=RATE, betas=(BETA1, BETA2), eps=EPSILON, **kind), clones


def step_all(layers: list[Layer], count: int, divisor: float = 1.0) -> None:
    for layer in layers:
        flats = layer.weights, layer.gradient, layer.m, layer.v
        adamw_update(AdamWStep(layer.fragment, count, RATE, DECAY, divisor), 0, *flats)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_twenty_steps_match_torch_adamw_with_decay_on_matrices_alone(clip):
    layers = stirred(ODD)
    theirs, clones = torch_adamw(layers, foreach=False, fused=False)
    for step in range(20):
        some_gradient(layers, step)
        for clone, gradient in zip(clones, tensors(layers, "gradient"), strict=True):
            clone.grad = gradient.clone()
        divisor = 1.0
        if clip:
            norm = torch.nn.utils.clip_grad_norm_(clones, clip).item()
            divisor = max(1.0, norm / clip)
        theirs.step()
        step_all(layers, step + 1, divisor)
    for clone, weights in zip(clones, tensors(layers, "weights"), strict=True):
        torch.testing.assert_close(weights, clone, rtol=2e-6, atol=2e-6)


def test_flat_buffers_give_the_same_bits_as_torch_fused_adamw_tensor_by_tensor():
    layers = stirred(preset("gpt-nano"))
    theirs, clones = torch_adamw(layers, fused=True)
    for step in range(3):
        some_gradient(layers, step)
        for clone, gradient in zip(clones, tensors(layers, "gradient"), strict=True):
            clone.grad = gradient.clone()
        theirs.step()
        step_all(layers, step + 1)
    for clone, weights in zip(clones, tensors(layers, "weights"), strict=True):
        assert torch.equal(weights, clone)


BLOCKS = [ODD.fragments()[1], preset("gpt-nano").fragments()[1], preset("gpt-nano").fragments()[0]]


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_the_bits_do_not_depend_on_the_cut_into_tiles_or_on_threads(data):
    fragment = data.draw(st.sampled_from(BLOCKS), label="fragment")
    divisor = data.draw(st.sampled_from([1.0, 1.7]), label="divisor")
    inner = st.integers(1, fragment.size // ALIGN - 1).map(lambda k: k * ALIGN)
    edges = sorted({0, fragment.size, *data.draw(st.lists(inner, max_size=8), label="cuts")})
    whole, tiled = buffers(fragment), buffers(fragment)
    torch.set_num_threads(1)
    reference(fragment, whole, divisor)
    torch.set_num_threads(data.draw(st.integers(1, 4), label="threads"))
    step = AdamWStep(fragment, STEP_NUMBER, RATE, DECAY, divisor)
    for begin, end in data.draw(st.permutations(list(itertools.pairwise(edges))), label="order"):
        adamw_update(step, begin, *(flat[begin:end] for flat in tiled))
    assert all(torch.equal(a, b) for a, b in zip(whole, tiled, strict=True))


def reference(fragment: Fragment, flats: list[torch.Tensor], divisor: float) -> None:
    """torch's kernel on each span, whole."""
    for begin, end, decays in decay_spans(fragment):
        torch._fused_adamw_(
            *([flat[begin:end]] for flat in flats), [], [torch.tensor(float(STEP_NUMBER))],
            lr=RATE, beta1=BETA1, beta2=BETA2, weight_decay=DECAY if decays else 0.0, eps=EPSILON,
            amsgrad=False, maximize=False, grad_scale=None if divisor == 1.0 else torch.tensor(divisor),
        )  # fmt: skip


def test_the_count_of_steps_may_be_a_tensor():
    fragment = ODD.fragments()[1]
    one, two = buffers(fragment), buffers(fragment)
    adamw_update(AdamWStep(fragment, 7, RATE, DECAY, 2.0), 0, *one)
    adamw_update(AdamWStep(fragment, torch.tensor(7.0), RATE, DECAY, 2.0), 0, *two)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("begin, length", [(32, 64), (0, 96), (64, 1 << 20)])
def test_what_is_no_tile_is_refused(begin, length):
    flats = [torch.zeros(length) for _ in range(4)]
    with pytest.raises(AssertionError, match="no tile"):
        adamw_update(AdamWStep(ODD.fragments()[1], STEP_NUMBER, RATE, DECAY), begin, *flats)


@pytest.mark.parametrize(
    "spec", [ODD, preset("gpt-nano"), preset("gpt2-1.5b"), preset("gpt3-175b")]
)
def test_spans_cover_a_fragment_once_in_order_and_decay_matrices_alone(spec):
    for fragment in spec.fragments():
        cut = decay_spans(fragment)
        assert [begin for begin, _, _ in cut] == [0, *(end for _, end, _ in cut[:-1])] and cut[-1][
            1
        ] == fragment.size
        assert all(begin % TENSOR_ALIGN == 0 and end % TENSOR_ALIGN == 0 for begin, end, _ in cut)
        for slot in fragment.slots:
            [decays] = [decays for begin, end, decays in cut if begin <= slot.offset < end]
            assert decays == (len(slot.shape) == 2)


@given(st.integers(1, 100), st.integers(0, BLOCK // ALIGN - 1), st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_every_element_is_in_one_tile(blocks, rest, threads):
    torch.set_num_threads(threads)
    n = blocks * BLOCK + rest * ALIGN
    visits, starts = torch.zeros(n), torch.full((-(-n // BLOCK),), -1)

    def work(scratch, offset, visited, first):
        assert scratch.fp32_scratch(
            0
        ).shape == scratch.int16_scratch.shape == visited.shape and len(first) == -(
            -len(visited) // BLOCK
        )
        visited.add_(1)
        first.copy_(torch.arange(len(first)).mul_(BLOCK).add_(offset))

    for_each_tile(work, visits, starts)
    assert torch.equal(visits, torch.ones(n)) and torch.equal(
        starts, torch.arange(len(starts)) * BLOCK
    )
    assert torch.get_num_threads() == threads, "the crew is nobody else's affair"


@pytest.mark.parametrize("threads", [1, 2])
def test_what_fails_in_a_tile_is_raised(threads):
    torch.set_num_threads(threads)

    def work(scratch, offset, tile):
        raise ValueError(f"at {offset}")

    with pytest.raises(ValueError, match="at "):
        for_each_tile(work, torch.zeros(10 * BLOCK))


@pytest.mark.parametrize("n", [64, BLOCK, 3 * BLOCK + 64, 1_000_000 // 64 * 64])
def test_the_sum_of_squares_is_right_and_the_same_on_any_number_of_threads(n):
    gradient = torch.randn(n, generator=torch.Generator().manual_seed(n)) * 1e-3
    found = set()
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        found.add(sum_of_squares(gradient).item())
    assert len(found) == 1 and found.pop() == pytest.approx(
        gradient.double().square().sum().item(), rel=1e-6
    )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_the_sum_of_squares_shows_what_is_not_finite(bad):
    gradient = torch.zeros(5 * BLOCK + 64)
    gradient[-1] = bad
    assert not torch.isfinite(sum_of_squares(gradient))


def test_the_schedule_warms_up_peaks_once_and_ends_at_a_tenth():
    recipe = Recipe(token_budget=1_000_000, warmup_tokens=50_000)
    rates = [learning_rate_scale(recipe, tokens) for tokens in range(0, 1_200_000, 1000)]
    assert 0 < rates[0] <= 0.2, (
        "the first round must learn something: the ledger's clock stands still for all of it"
    )
    assert max(rates) == rates[50] == 1.0
    assert rates[:51] == sorted(rates[:51]) and rates[50:] == sorted(rates[50:], reverse=True)
    assert rates[-1] == rates[1000] == pytest.approx(0.1)


def test_the_schedule_copes_with_no_warm_up_a_constant_and_a_warm_up_past_the_budget():
    assert learning_rate_scale(Recipe(warmup_tokens=0), 0) == 1.0
    constant = dataclasses.replace(Recipe(), schedule="constant")
    assert learning_rate_scale(constant, constant.token_budget * 2) == 1.0
    long = Recipe(token_budget=1000, warmup_tokens=5000)
    assert [learning_rate_scale(long, tokens) < 1 for tokens in (0, 1000, 4999)] == [True] * 3
    assert learning_rate_scale(long, 6000) == pytest.approx(0.1)
