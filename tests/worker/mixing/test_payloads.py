"""Test how weights are encoded for neighbours."""

import math

import pytest
import torch

from barnraise.mixing.payload_size import payload_size
from barnraise.mixing.payloads import are_finite, decode_weights, encode_weights
from barnraise.spec import MIXING_BITS


@pytest.mark.parametrize("bits", MIXING_BITS)
@pytest.mark.parametrize("count", [1, 4095, 4096, 4097, 10_000])
def test_weights_survive_within_the_precision_of_their_bits(bits, count):
    weights = torch.randn(count, generator=torch.Generator().manual_seed(count))
    data = encode_weights(weights, bits)
    assert len(data) == payload_size(count, bits)
    decoded = decode_weights(data, count, bits)
    largest = float(weights.abs().max())
    tolerance = {32: 0.0, 16: largest / 256, 8: largest / 254 * 1.001}[bits]
    assert float((decoded - weights).abs().max()) <= tolerance
    assert encode_weights(decoded, bits) == data, "what was rounded once is not rounded again"


def test_huge_weights_whose_sum_overflows_are_finite():
    huge = torch.full((10,), 3e38)
    assert math.isinf(float(huge.sum())) and are_finite(huge)
    assert torch.equal(decode_weights(encode_weights(huge, 32), 10, 32), huge)
    assert not are_finite(torch.tensor([math.inf, -math.inf]))


def test_zeros_stay_zeros_in_eight_bits():
    assert not decode_weights(encode_weights(torch.zeros(5000), 8), 5000, 8).any()


def test_wrong_bytes_are_refused_in_a_sentence():
    with pytest.raises(ValueError, match="have 40 bytes, not 39"):
        decode_weights(bytes(39), 10, 32)
    with pytest.raises(ValueError, match="not finite"):
        decode_weights(encode_weights(torch.full((10,), math.nan), 32), 10, 32)
