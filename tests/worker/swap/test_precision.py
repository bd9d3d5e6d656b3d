"""Tests of split weights, which are exact, and of 8-bit moments, which train almost as well."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from barnraise.spec import ALIGN, Fragment, ModelSpec, preset
from barnraise.swap import precision
from barnraise.swap.adamw import AdamWStep, adamw_update
from barnraise.swap.tile_threads import BLOCK, SHARING_THREADS, sharing_tiles

TINY = ModelSpec(layers=2, width=32, heads=4, context=16, vocabulary=300)
BLOCKS = [TINY.fragments()[1], preset("gpt-nano").fragments()[1]]

THREADS = [*range(1, 4), SHARING_THREADS + 1]


def buffers(n: int, seed: int = 0) -> list[Tensor]:
    """Return weights, gradient, m and v in mid-training."""
    generator = torch.Generator().manual_seed(seed)
    weights, gradient, m = (torch.randn(n, generator=generator) for _ in range(3))
    return [weights, gradient, m, torch.rand(n, generator=generator)]


def step_of(fragment: Fragment, divisor: float = 1.0) -> AdamWStep:
    return AdamWStep(fragment, 3, learning_rate=3e-3, weight_decay=0.1, gradient_divisor=divisor)


def zero_moments(n: int) -> precision.Moments8:
    m, v = torch.zeros(2, n, dtype=torch.uint8)
    return precision.Moments8(m, v, *torch.zeros(2, math.ceil(n / BLOCK)))


def slice_moments(moments: precision.Moments8, begin: int, end: int) -> precision.Moments8:
    blocks = slice(begin // BLOCK, math.ceil(end / BLOCK))
    return precision.Moments8(
        moments.m[begin:end], moments.v[begin:end], moments.m_scale[blocks], moments.v_scale[blocks]
    )


def floats_of(bits: Tensor) -> Tensor:
    """Convert int64 bit patterns to fp32."""
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


# ---- halves --------------------------------------------------------------------------------------


def test_split_and_join_restore_every_upper_half():
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234, 0xABCD])
    weights = floats_of(((torch.arange(1 << 16) << 16)[:, None] + low).view(-1))
    assert same_bits(precision.join(precision.split(weights)), weights)


def test_join_writes_into_its_out_argument():
    weights = torch.randn(100)
    out = torch.empty(100)
    assert precision.join(precision.split(weights), out=out) is out and torch.equal(out, weights)


def test_split_high_half_is_rounded_to_nearest_ties_away_from_zero():
    weights = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    high, low = precision.split(weights)
    apart = low != -0x8000  # the others lie halfway, where torch rounds to even
    assert torch.equal(high[apart], weights.bfloat16()[apart]) and apart.sum() > 99_000
    between = floats_of(torch.tensor([0x3F808000, 0x3F818000, 0xBF808000]))
    assert precision.split(between)[0].tolist() == [1.0078125, 1.015625, -1.0078125]


def test_split_values_beyond_bf16_read_as_infinite_and_are_restored():
    cases = floats_of(
        torch.tensor(
            [0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF]
        )
    )
    high, low = precision.split(cases)
    inf = torch.inf
    assert high.tolist()[:4] == [inf, -inf, inf, -inf] and high[4].isnan()
    assert high.tolist()[5:] == [inf, 0.0], "a NaN's payload is rounded too, and may carry"
    assert same_bits(precision.join(precision.SplitWeights(high, low)), cases)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_update_split_has_the_bits_of_adamw_update(data):
    fragment = data.draw(st.sampled_from(BLOCKS), label="fragment")
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]), label="gradient")
    divisor = data.draw(st.sampled_from([1.0, 1.7]), label="divisor")
    step = step_of(fragment, divisor)
    inner = st.integers(1, fragment.size // ALIGN - 1).map(lambda k: k * ALIGN)
    edges = sorted({0, fragment.size, *data.draw(st.lists(inner, max_size=4), label="cuts")})
    weights, gradient, m, v = buffers(fragment.size)
    gradient = gradient.to(dtype)
    (high, low), m2, v2 = precision.split(weights), m.clone(), v.clone()
    torch.set_num_threads(1)
    adamw_update(step, 0, weights, gradient.float().clone(), m, v)
    torch.set_num_threads(data.draw(st.sampled_from(THREADS), label="threads"))
    with sharing_tiles(data.draw(st.booleans(), label="shares")):
        for begin, end in itertools.pairwise(edges):
            parts = [flat[begin:end] for flat in (high, low, gradient, m2, v2)]
            precision.update_split(step, begin, precision.SplitWeights(*parts[:2]), *parts[2:])
    assert same_bits(precision.join(precision.SplitWeights(high, low)), weights)
    assert torch.equal(m2, m)
    assert torch.equal(v2, v)


# ---- bytes ---------------------------------------------------------------------------------------

ROUNDING = 1 + 2.0**-8  # of fp16 and of the scales


@given(
    st.integers(0, 2**31),
    st.floats(0, 9),
    st.floats(-12, 8),
    st.integers(1, 4 * BLOCK // ALIGN),
    st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_moments_in_8_bits_are_within_the_stated_bounds(seed, decades, size, lines, steps):
    """Encode elements over many decades, the largest about 10**size, in a buffer of any length."""
    generator, n = torch.Generator().manual_seed(seed), lines * ALIGN
    m = torch.randn(n, generator=generator) * 10 ** (
        size - decades * torch.rand(n, generator=generator)
    )
    v = (
        torch.randn(n, generator=generator)
        * 10 ** (size - decades * torch.rand(n, generator=generator))
    ).square()
    moments = zero_moments(n)
    precision.encode_moments(m, v, moments, steps)
    m2, v2 = precision.decode_moments(moments)
    m_top, v_top = (
        scale.repeat_interleave(BLOCK)[:n] for scale in (moments.m_scale, moments.v_scale)
    )
    assert ((m2 - m).abs() <= ROUNDING * torch.maximum(m.abs() / 8, m_top * 2**-17.9)).all()
    assert ((v2 - v).abs() <= ROUNDING * torch.maximum(v / 8, v_top * 2**-32.9)).all()
    assert (v2 > 0).all(), "8 bits must never turn v into zero"
    assert (torch.sign(m2) * torch.sign(m) >= 0).all()


def test_moments_in_8_bits_restore_the_largest_of_a_block():
    m, v = torch.randn(5 * BLOCK), torch.rand(5 * BLOCK)
    moments = zero_moments(5 * BLOCK)
    for steps in range(10):
        precision.encode_moments(m, v, moments, steps)
        m2, v2 = precision.decode_moments(moments)
        largest = m.view(5, -1).abs().argmax(1, keepdim=True)
        torch.testing.assert_close(
            m2.view(5, -1).gather(1, largest), m.view(5, -1).gather(1, largest), rtol=1e-6, atol=0
        )
        torch.testing.assert_close(v2.view(5, -1).amax(1), v.view(5, -1).amax(1), rtol=1e-6, atol=0)


def test_moments_in_8_bits_are_unbiased_over_the_steps():
    m, v = torch.randn(4 * BLOCK), torch.rand(4 * BLOCK) + 0.01
    moments, m_sum, v_sum = zero_moments(4 * BLOCK), torch.zeros(4 * BLOCK), torch.zeros(4 * BLOCK)
    for steps in range(256):
        precision.encode_moments(m, v, moments, steps)
        m2, v2 = precision.decode_moments(moments)
        m_sum += m2
        v_sum += v2
    assert ((m_sum / 256 - m).abs() <= 0.005 * m.abs() + 1e-4).all()
    assert ((v_sum / 256 - v).abs() <= 0.005 * v).all()


def test_zero_bytes_are_zero_moments_and_zeros_stay_zero():
    moments = zero_moments(3 * BLOCK + 64)
    assert not any(flat.any() for flat in precision.decode_moments(moments))
    precision.encode_moments(torch.zeros(3 * BLOCK + 64), torch.zeros(3 * BLOCK + 64), moments)
    m, v = precision.decode_moments(moments)
    assert not m.any() and v.max() < 1e-30


def test_update_8bit_v_fades_as_in_fp32_where_gradients_stop():
    fragment = BLOCKS[1]
    n, moments = fragment.size, zero_moments(fragment.size)
    generator = torch.Generator().manual_seed(0)
    weights, gradient, m, v = (
        torch.zeros(n),
        torch.randn(n, generator=generator),
        torch.zeros(n),
        torch.zeros(n),
    )
    still = torch.arange(n) % 2 == 1
    for steps in range(1, 121):
        gradient.normal_(generator=generator)
        gradient[still] *= steps <= 20
        step = AdamWStep(fragment, steps, learning_rate=0.0, weight_decay=0.0)
        adamw_update(step, 0, weights.clone(), gradient, m, v)
        precision.update_8bit(step, 0, weights, gradient, moments)
    ratio = (precision.decode_moments(moments)[1] / v)[still]
    assert ratio.mean() == pytest.approx(1, abs=0.1) and ratio.min() > 0.2 and ratio.max() < 5


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_update_8bit_bits_do_not_depend_on_tiles_or_threads(data):
    fragment = BLOCKS[1]
    halves = data.draw(st.booleans(), label="weights in halves")
    inner = st.integers(1, fragment.size // BLOCK).map(lambda k: k * BLOCK)
    edges = sorted({0, fragment.size, *data.draw(st.lists(inner, max_size=4), label="cuts")})
    weights, gradient, m, v = buffers(fragment.size)
    whole, tiled = zero_moments(fragment.size), zero_moments(fragment.size)
    for moments in (whole, tiled):
        precision.encode_moments(m, v, moments)
    flat = precision.split(weights) if halves else (weights.clone(),)
    torch.set_num_threads(1)
    step = step_of(fragment)
    precision.update_8bit(step, 0, weights, gradient, whole)
    torch.set_num_threads(data.draw(st.sampled_from(THREADS), label="threads"))
    with sharing_tiles(data.draw(st.booleans(), label="shares")):
        for begin, end in itertools.pairwise(edges):
            low = {"low": flat[1][begin:end]} if halves else {}
            moments = slice_moments(tiled, begin, end)
            precision.update_8bit(
                step, begin, flat[0][begin:end], gradient[begin:end], moments, **low
            )
    assert same_bits(precision.join(precision.SplitWeights(*flat)) if halves else flat[0], weights)
    assert all(torch.equal(a, b) for a, b in zip(whole, tiled, strict=True))


def test_update_8bit_refuses_a_tile_that_begins_within_a_block():
    with pytest.raises(AssertionError, match="begins on a block"):
        precision.update_8bit(
            step_of(BLOCKS[1]), ALIGN, torch.zeros(ALIGN), torch.zeros(ALIGN), zero_moments(ALIGN)
        )
