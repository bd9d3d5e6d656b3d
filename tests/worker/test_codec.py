"""Updates to bytes and back: exact, bounded, and the same everywhere."""

import struct

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from barnraise.errors import MessageError
from barnraise.exchange.codec import CHUNK, HEADER, MAX_LEVEL, TOP, decode, encode, payload_size
from barnraise.spec import MAX_UPDATE_UNITS

INT32 = st.integers(-(2**31), 2**31 - 1)


def drawn(n: int, scale: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-scale, scale + 1, (n,), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))


@given(st.lists(INT32 | st.integers(-300, 300), max_size=300))
def test_what_is_decoded_is_exactly_what_encode_says_was_sent(values):
    values = torch.tensor(values, dtype=torch.int32)
    payload, sent = encode(values)
    assert len(payload) == payload_size(len(values))
    assert torch.equal(decode(payload, len(values)), sent)
    assert sent.numel() == 0 or int(sent.abs().max()) <= MAX_UPDATE_UNITS


@pytest.mark.parametrize("n", [1, CHUNK - 1, CHUNK, CHUNK + 1, 256 * CHUNK + 5])
def test_rounding_is_within_half_a_level_of_each_value(n):
    values = drawn(n, 1 << 22, n)
    _, sent = encode(values)
    for start in range(0, n, CHUNK):
        piece = slice(start, start + CHUNK)
        level = (int(values[piece].abs().max()) + TOP - 1) // TOP
        assert 2 * int((values[piece] - sent[piece]).abs().max()) <= level


def test_small_integers_travel_without_loss():
    values = drawn(CHUNK * 2 + 7, TOP)
    assert torch.equal(encode(values)[1], values)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(-(2**20), 2**20), min_size=40, max_size=40), min_size=1, max_size=8))
def test_with_decay_one_sent_plus_residual_is_the_exact_sum_of_the_steps(steps):
    residual, total_sent = torch.zeros(40, dtype=torch.int32), torch.zeros(40, dtype=torch.int64)
    for step in steps:
        residual += torch.tensor(step, dtype=torch.int32)
        _, sent = encode(residual)
        residual -= sent
        total_sent += sent
    assert torch.equal(total_sent + residual, torch.tensor(steps).sum(0))


def test_what_is_over_the_bound_stays_in_the_residual():
    values = torch.tensor([2**31 - 1, -(2**31), 5], dtype=torch.int32)
    _, sent = encode(values)
    assert sent.tolist() == [TOP * MAX_LEVEL, -TOP * MAX_LEVEL, 0]


def test_the_bytes_are_the_same_on_every_thread_count():
    values, before = drawn(300_001, 1 << 24), torch.get_num_threads()
    try:
        payloads = set()
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            payloads.add(encode(values)[0])
            assert torch.equal(decode(encode(values)[0], len(values)), encode(values)[1])
    finally:
        torch.set_num_threads(before)
    assert len(payloads) == 1


def test_decoding_uses_no_floating_point():
    level, n = MAX_LEVEL, 3
    payload = HEADER.pack(b"BRU1", 1, 8, 0, n) + struct.pack("<I", level) + struct.pack("<3b", 127, -127, 1)
    assert decode(payload, n).tolist() == [127 * level, -127 * level, level]  # not representable in float32
    assert decode(payload, n).dtype == torch.int32


@given(st.binary(max_size=200), st.integers(0, 100))
def test_garbage_is_refused_and_never_crashes(data, n):
    with pytest.raises(MessageError):
        decode(data, n)


@given(st.data())
def test_an_altered_payload_is_refused_or_stays_within_the_bound(data):
    payload = bytearray(encode(drawn(50, 1 << 20))[0])
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        units = decode(bytes(payload), 50)
    except MessageError:
        return
    assert int(units.abs().max()) <= MAX_UPDATE_UNITS


@pytest.mark.parametrize("cut", [0, 3, HEADER.size, -1])
def test_a_payload_of_the_wrong_length_is_refused(cut):
    payload = encode(drawn(100, 50))[0]
    with pytest.raises(MessageError):
        decode(payload[:cut], 100)
    with pytest.raises(MessageError):
        decode(payload + b"\0", 100)
    with pytest.raises(MessageError):
        decode(payload, 101)


def test_an_unknown_codec_is_refused_by_name():
    with pytest.raises(ValueError, match="top9"):
        encode(drawn(4, 4), "top9")
