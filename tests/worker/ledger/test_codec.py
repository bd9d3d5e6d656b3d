"""Tests of the codec: exactness, bounds, sizes, and equality on every machine."""

import struct

import hypothesis.strategies as st
import pytest
import torch
from helpers.effort import examples
from hypothesis import given, settings

from barnraise.errors import MessageError
from barnraise.ledger.codec import (
    CHUNK,
    HEADER,
    LEVEL_ITERATIONS,
    MAX_CODE,
    MIN_SAMPLED_VALUES,
    SAMPLE_STRIDE,
    decode,
    encode,
    payload_size,
)
from barnraise.planning.quantization_scheme import QuantizationScheme
from barnraise.spec import MAX_UPDATE_UNITS

MAX_LEVEL = MAX_UPDATE_UNITS // MAX_CODE  # beyond it a level exceeds what an update may change
INT32 = st.integers(-(2**31), 2**31 - 1)
NAMES = [
    "dense8",
    "dense4",
    "dense2",
    "top64x2",
    "top64x4",
    "top64x8",
    "top1x2",
    "top7x4",
    "top3x8",
    "top500x2",
]


def random_units(n: int, scale: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        -scale, scale + 1, (n,), dtype=torch.int32, generator=torch.Generator().manual_seed(seed)
    )


def heavy_tailed(n: int, seed: int = 0, degrees: float = 4.0) -> torch.Tensor:
    """Return values of Student's t, as in updates: few are a hundred times the typical one."""
    noise = torch.Generator().manual_seed(seed)
    squares = torch.randn(int(degrees), n, generator=noise).square().sum(0)
    values = torch.randn(n, generator=noise) / (squares / degrees).sqrt()
    return (values * 20_000).clamp(-1e9, 1e9).to(torch.int32)


def chunks(values: list) -> list[list]:
    return [values[i : i + CHUNK] for i in range(0, len(values), CHUNK)]


# ---- a slow reference: lists of Python integers


def slow_encode(values: list[int], name: str) -> tuple[bytes, list[int]]:
    """Return what `encode` must return for a scheme that fits already."""
    dense = name.startswith("dense")
    kept, bits = (CHUNK, int(name[5:])) if dense else map(int, name[3:].split("x"))
    top = {2: 1, 4: 7, 8: 127}[bits]
    bound = top * (MAX_UPDATE_UNITS // top)
    levels, positions, codes, sent = [], [], [], []
    for chunk in chunks(values):
        bounded = [max(-bound, min(bound, v)) for v in chunk]
        order = sorted(range(len(chunk)), key=lambda i, b=bounded: (-abs(b[i]), i))
        chosen = sorted(order[: -(-kept * len(chunk) // CHUNK)])
        quantize = slow_two_levels if bits == 2 else slow_multiples
        chunk_levels, quantized, chunk_codes = quantize([bounded[i] for i in chosen], top)
        chunk_sent = [0] * len(chunk)
        for i, value in zip(chosen, quantized, strict=True):
            chunk_sent[i] = value
        levels += chunk_levels
        positions += chosen
        codes += chunk_codes
        sent += chunk_sent
    header = (
        b"BRU1"
        + bytes([1 if dense else 2, bits])
        + struct.pack("<HI", 0 if dense else kept, len(values))
    )
    packed_positions = b"" if dense else pack_bits(positions, 12)
    return header + pack_bits(levels, 32) + packed_positions + pack_bits(codes, bits), sent


def pack_bits(numbers: list[int], width: int) -> bytes:
    joined = sum((v % (1 << width)) << i * width for i, v in enumerate(numbers))
    return joined.to_bytes(-(-len(numbers) * width // 8), "little")


def divide_rounding_half_up(a: int, b: int) -> int:
    return (2 * a + b) // (2 * b)


def slow_multiples(values: list[int], top: int) -> tuple[list[int], list[int], list[int]]:
    sizes = [abs(v) for v in values]
    sampled = sampled_values(sizes)

    def multiples(magnitudes: list[int], level: int) -> list[int]:
        return [min(top, divide_rounding_half_up(s, max(1, level))) for s in magnitudes]

    level = largest = -(-max(sizes) // top)
    if top == 7:
        level = min(largest, first_level(sum(sampled) // len(sampled)))
        for _ in range(LEVEL_ITERATIONS[4]):
            rounded = multiples(sampled, level)
            products = sum(a * b for a, b in zip(rounded, sampled, strict=True))
            level = min(
                largest, divide_rounding_half_up(products, max(1, sum(q * q for q in rounded)))
            )
    level = level or largest
    signed = [q if v > 0 else -q for q, v in zip(multiples(sizes, level), values, strict=True)]
    return [level], [q * level for q in signed], signed


def sampled_values(sizes: list[int]) -> list[int]:
    return sizes[::SAMPLE_STRIDE] if len(sizes) > MIN_SAMPLED_VALUES else sizes


def first_level(mean: int) -> int:
    return 5 * mean // 7 + 1


def slow_two_levels(values: list[int], _: int) -> tuple[list[int], list[int], list[int]]:
    sampled = sampled_values([abs(v) for v in values])
    twice_the_border = 2 * sum(sampled) // len(sampled)
    for _ in range(LEVEL_ITERATIONS[2]):
        below = [size for size in sampled if 2 * size <= twice_the_border]
        above = [size for size in sampled if 2 * size > twice_the_border]
        low = divide_rounding_half_up(sum(below), len(below))
        high = divide_rounding_half_up(sum(above), len(above)) if above else low
        twice_the_border = low + high
    high = high or max(abs(v) for v in values)
    quantized, codes = [], []
    for value in values:
        upper = low < high and 2 * abs(value) > low + high
        size = high if upper else low
        quantized.append(-size if value < 0 else size)
        codes.append(upper + 2 * (value < 0 < size))
    return [low, high], quantized, codes


@settings(deadline=None, max_examples=examples(60, 150))
@given(st.lists(INT32 | st.integers(-300, 300), min_size=1, max_size=80), st.sampled_from(NAMES))
def test_encode_matches_slow_reference(values, name):
    fitted = str(QuantizationScheme.parse(name).smallest_for(len(values)))
    payload, sent = encode(torch.tensor(values, dtype=torch.int32), name)
    assert (payload, sent.tolist()) == slow_encode(values, fitted)


@pytest.mark.parametrize("name", NAMES)
def test_encode_matches_slow_reference_for_long_fragments(name):
    values = heavy_tailed(2 * CHUNK + 77, 5)
    payload, sent = encode(values, name)
    assert (payload, sent.tolist()) == slow_encode(values.tolist(), name)


# ---- round trips


@given(st.lists(INT32 | st.integers(-300, 300), max_size=300), st.sampled_from(NAMES))
def test_decode_returns_exactly_what_encode_reports_sent(values, name):
    values = torch.tensor(values, dtype=torch.int32)
    payload, sent = encode(values, name)
    assert len(payload) == payload_size(len(values), name) <= payload_size(len(values))
    assert torch.equal(decode(payload, len(values)), sent)
    assert sent.numel() == 0 or int(sent.abs().max()) <= MAX_UPDATE_UNITS


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [CHUNK, 33 * CHUNK + 64, 64 * CHUNK + 4095])
def test_decode_returns_what_was_sent_across_blocks_and_short_chunks(n, name):
    values = heavy_tailed(n, n)
    payload, sent = encode(values, name)
    assert len(payload) == payload_size(n, name)
    assert torch.equal(decode(payload, n), sent)


@pytest.mark.parametrize("n", [1, CHUNK - 1, CHUNK, CHUNK + 1, 256 * CHUNK + 5])
def test_encode_eight_bits_rounds_within_half_a_level(n):
    values = random_units(n, 1 << 22, n)
    _, sent = encode(values)
    for start in range(0, n, CHUNK):
        piece = slice(start, start + CHUNK)
        level = (int(values[piece].abs().max()) + MAX_CODE - 1) // MAX_CODE
        assert 2 * int((values[piece] - sent[piece]).abs().max()) <= level


def test_encode_leaves_values_over_the_bound_in_the_residual():
    values = torch.tensor([2**31 - 1, -(2**31), 5], dtype=torch.int32)
    _, sent = encode(values)
    assert sent.tolist() == [MAX_CODE * MAX_LEVEL, -MAX_CODE * MAX_LEVEL, 0]
    for name in NAMES:
        assert int(encode(values.repeat(100), name)[1].abs().max()) <= MAX_UPDATE_UNITS


@pytest.mark.parametrize("name", NAMES)
def test_encode_is_the_same_on_every_thread_count(name):
    values, before = heavy_tailed(300_001), torch.get_num_threads()
    try:
        payloads = set()
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            payload, sent = encode(values, name)
            payloads.add(payload)
            assert torch.equal(decode(payload, len(values)), sent)
    finally:
        torch.set_num_threads(before)
    assert len(payloads) == 1


# ---- sizes and residuals


@pytest.mark.parametrize(
    ("name", "max_bits"), [("top64x2", 0.25), ("dense4", 4.1), ("dense2", 2.1), ("dense8", 8.1)]
)
def test_bits_per_parameter_match_hand_computation(name, max_bits):
    n = 198_272  # a block of width 128
    payload, _ = encode(heavy_tailed(n), name)
    assert 8 * len(payload) / n <= max_bits
    assert 8 * len(payload) / n == pytest.approx(
        QuantizationScheme.parse(name).bits_per_parameter, rel=0.01
    )


def test_payload_size_is_its_levels_positions_and_values():
    assert QuantizationScheme.parse("top64x2").bits_per_parameter == (2 * 32 + 64 * (12 + 2)) / 4096
    assert QuantizationScheme.parse("top100x8").bits_per_parameter == (32 + 100 * (12 + 8)) / 4096
    assert QuantizationScheme.parse("dense4").bits_per_parameter == 4 + 32 / 4096


@pytest.mark.parametrize(
    ("name", "smallest"),
    [
        ("top1000x2", "dense2"),
        ("top585x2", "top585x2"),
        ("top1600x4", "dense4"),
        ("top2000x8", "dense8"),
    ],
)
def test_smallest_for_prefers_dense_scheme_of_equal_size(name, smallest):
    values = heavy_tailed(16 * CHUNK)
    assert str(QuantizationScheme.parse(name).smallest_for(len(values))) == smallest
    assert encode(values, name)[0] == encode(values, smallest)[0]


@given(
    st.sampled_from(["dense2", "dense4", "dense8"]), st.integers(0, CHUNK - 1), INT32.filter(bool)
)
def test_encode_sends_a_single_value_at_any_position(name, position, value):
    """Also if the value is not among the sampled ones that determine the levels."""
    values = torch.zeros(CHUNK, dtype=torch.int32)
    values[position] = value
    assert int(encode(values, name)[1][position])


# The squared error over the squared values, for Student's t of 4 degrees, as in the codec's
# docstring.
DOCUMENTED_ERRORS = {"dense8": 0.001, "dense4": 0.056, "dense2": 0.23, "top64x2": 0.74}


@pytest.mark.parametrize("name", DOCUMENTED_ERRORS)
def test_encode_residual_of_heavy_tailed_values_is_as_documented(name):
    values = heavy_tailed(64 * CHUNK)
    residual = (values - encode(values, name)[1]).double()
    error = residual.square().sum() / values.double().square().sum()
    assert error <= DOCUMENTED_ERRORS[name]


@pytest.mark.parametrize("name", ["dense8", "dense4", "dense2", "top64x2", "top4095x8", "top1x2"])
def test_scheme_has_one_name(name):
    assert str(QuantizationScheme.parse(name)) == name


@pytest.mark.parametrize(
    "name", ["top9", "dense3", "dense", "top0x2", "top4096x2", "top064x2", "top64x3", "top٣x2"]
)
def test_parse_refuses_unknown_codec_by_name(name):
    with pytest.raises(ValueError, match=name):
        encode(random_units(4, 4), name)


# ---- hostile bytes


def test_decode_uses_no_floating_point():
    level, n = MAX_LEVEL, 3
    payload = (
        HEADER.pack(b"BRU1", 1, 8, 0, n)
        + struct.pack("<I", level)
        + struct.pack("<3b", 127, -127, 1)
    )
    # float32 cannot represent these integers.
    assert decode(payload, n).tolist() == [127 * level, -127 * level, level]
    assert decode(payload, n).dtype == torch.int32


@given(st.binary(max_size=200), st.integers(0, 100))
def test_decode_refuses_garbage_without_crashing(data, n):
    with pytest.raises(MessageError):
        decode(data, n)


@settings(deadline=None, max_examples=examples(100, 300))
@given(st.data(), st.sampled_from(NAMES))
def test_decode_altered_payload_is_refused_or_within_bound(data, name):
    payload = bytearray(encode(random_units(1500, 1 << 20), name)[0])
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        units = decode(bytes(payload), 1500)
    except MessageError:
        return
    assert int(units.abs().max()) <= MAX_UPDATE_UNITS


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cut", [0, 3, HEADER.size, -1])
def test_decode_refuses_payload_of_wrong_length(cut, name):
    payload = encode(random_units(1000, 50), name)[0]
    for wrong, n in (
        (payload[:cut], 1000),
        (payload + b"\0", 1000),
        (payload, 1001),
        (payload, 999),
    ):
        with pytest.raises(MessageError):
            decode(wrong, n)


def build_payload(
    levels: list[int], positions: list[int], codes: int, n: int = CHUNK, **header: int
) -> bytes:
    """Build a payload of one chunk from levels, positions, and codes as one integer.

    `header` has the fields mode, bits and kept.
    """
    mode, bits, kept = header["mode"], header["bits"], header["kept"]
    count = len(positions) or n
    joined = sum(position << 12 * i for i, position in enumerate(positions))
    packed = joined.to_bytes(-(-12 * len(positions) // 8), "little")
    head = HEADER.pack(b"BRU1", mode, bits, kept, n) + struct.pack(f"<{len(levels)}I", *levels)
    return head + packed + codes.to_bytes(-(-count * bits // 8), "little")


VALID = dict(mode=2, bits=2, kept=3, levels=[5, 9], positions=[0, 7, 4095], codes=0b11_01_00)


def test_decode_reads_payload_written_by_hand():
    units = decode(build_payload(**VALID), CHUNK)
    assert {i: int(units[i]) for i in units.nonzero().flatten().tolist()} == {0: 5, 7: 9, 4095: -9}


@pytest.mark.parametrize(
    "change",
    [
        {"positions": [7, 0, 4095]},  # out of order
        {"positions": [0, 7, 7]},  # twice
        {"positions": [0, 7, 4095 + (1 << 12)]},  # bits past the last position
        {"codes": 0b01_11_01_00},  # bits past the last value
        {"levels": [9, 5]},  # in descending order
        {"levels": [5, 5]},  # two equal levels
        {"levels": [0, 9], "codes": 0b10_01_00},  # a negative zero
        {"levels": [5, MAX_UPDATE_UNITS + 1]},  # over the bound
        {"levels": [5, 2**32 - 1]},
        {"mode": 3},
        {"mode": 1},
        {"bits": 3},
        {"bits": 0, "codes": 0},
        {"kept": 0},
        {"kept": 4096},
        {"bits": 4, "levels": [5], "codes": 0x800},  # -8
        {"bits": 4, "levels": [0], "codes": 0x001},  # a multiple of the level zero
        {"bits": 4, "levels": [MAX_UPDATE_UNITS // 7 + 1], "codes": 0},
        {"bits": 8, "levels": [5], "codes": 0x80},  # -128
    ],
    ids=str,
)
def test_decode_refuses_what_no_encoder_writes(change):
    with pytest.raises(MessageError):
        decode(build_payload(**VALID | change), CHUNK)


def test_decode_refuses_position_past_the_end_of_a_short_chunk():
    short = dict(mode=2, bits=2, kept=64, levels=[5, 9], codes=0, n=1000)  # 16 values are sent
    assert int(decode(build_payload(positions=[*range(15), 999], **short), 1000).sum()) == 16 * 5
    with pytest.raises(MessageError, match="past the end"):
        decode(build_payload(positions=[*range(15), 1000], **short), 1000)
