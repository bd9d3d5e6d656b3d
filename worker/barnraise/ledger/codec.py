"""Compress integer updates to bytes and back, by integer arithmetic alone. Pure.

The bytes and the integers are the same on every CPU, GPU, operating system and number of threads.

A payload is little-endian and consists of

* a header,
* the levels of each chunk of 4096 values (uint32),
* unless the scheme is dense, the positions of the sent values in their chunk (12 bits each,
  ascending, two in three bytes),
* the codes of the values (the first value in the lowest bits).

With 8 or 4 bits a code k stands for k · level units of 2⁻²⁶, with k in -127…127 or -7…7. With 2
bits its low bit selects one of two magnitudes and its high bit is the sign. The part of a value
that exceeds the bound or lies between the levels is not sent; the caller keeps it as error feedback
(`values - sent`; Seide et al., Interspeech 2014; Karimireddy et al., arXiv 1901.09847).

How the levels are chosen:

* 8 bits: the smallest level that reaches the largest magnitude.
* 4 bits: updates are heavy-tailed, and such a level would round most of them to zero. So the level
  is the least-squares one for the values as they are rounded, found in a few iterations.
* 2 bits: the two magnitudes are the means of the values nearer to the one and to the other (Lloyd,
  IEEE Trans. Inf. Theory 28(2), 1982), found likewise.

Both iterations use a third of a chunk's values: the squared error grows by less than 0.4 %, and
encoding takes two thirds of the time. What is cut off an outlier stays in the residual, and later
rounds send it.

Squared error relative to the squared values, for three distributions:

    scheme                                normal   Laplace   Student's t, 4 degrees of freedom
    dense, 8 bits                         0.0001   0.0002    0.0007
    dense, 4 bits                         0.021    0.028     0.054
      best possible level                 0.013    0.028     0.053
      level that reaches the largest      0.026    0.070     0.165
    dense, 2 bits                         0.118    0.177     0.222
      best possible magnitudes            0.118    0.176     0.220
    largest 64 of each chunk, 2 bits      0.88     0.79      0.73
    largest 64 of each chunk, 8 bits      0.88     0.78      0.72

So for a few values of each chunk, two bits are enough.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum

import numpy as np
import torch

from barnraise.errors import MessageError
from barnraise.planning.quantization_scheme import CHUNK, PAYLOAD_HEADER_BYTES, QuantizationScheme
from barnraise.spec import MAX_UPDATE_UNITS

# magic, mode, bits of a value, values sent of each chunk (0: dense), elements
HEADER = struct.Struct("<4sBBHI")
MAGIC = b"BRU1"
# The largest code, per bit width. The code below its negative is never written and never accepted.
MAX_CODES = {2: 1, 4: 7, 8: 127}
MAX_CODE = MAX_CODES[8]
LEVEL_ITERATIONS = {2: 5, 4: 3}  # refinement steps for the levels, per bit width
SAMPLE_STRIDE = 3  # the refinement uses every third value
MIN_SAMPLED_VALUES = 1000  # in a chunk; with fewer the refinement uses all values
BLOCK = 32 * CHUNK  # elements processed at a time, so that intermediates stay small

assert HEADER.size == PAYLOAD_HEADER_BYTES


class PayloadMode(IntEnum):
    """Which values of a chunk are in a payload."""

    DENSE = 1  # all of them
    SPARSE = 2  # the largest, with their positions


def encode(
    values: torch.Tensor, scheme: QuantizationScheme | str = "dense8"
) -> tuple[bytes, torch.Tensor]:
    """Compress an update.

    Of each chunk the largest magnitudes are sent, of equal ones the first. A dense scheme that is
    not larger is used instead.

    Args:
        values: int32[n] in units of 2⁻²⁶.
        scheme: The scheme or its name.

    Returns:
        The payload, and int32[n] of what it stands for, exactly what `decode` returns.

    Raises:
        ValueError: If there is no such scheme.
    """
    assert values.dtype == torch.int32 and values.dim() == 1 and values.device.type == "cpu"
    n = values.numel()
    scheme = _parse(scheme).smallest_for(n)
    sent = torch.empty_like(values) if scheme.dense else torch.zeros_like(values)
    levels = torch.empty(-(-n // CHUNK), scheme.levels_per_chunk, dtype=torch.int32)
    codes = torch.empty(scheme.values_sent(n), dtype=torch.uint8)
    positions = torch.empty(0 if scheme.dense else scheme.values_sent(n), dtype=torch.int16)
    bound = MAX_CODES[scheme.bits] * (MAX_UPDATE_UNITS // MAX_CODES[scheme.bits])
    for start, chunks, size in _split_blocks(n):
        first = start // CHUNK
        sent_values = scheme.values_sent(size)
        rows = values[start : start + chunks * size].view(chunks, size).clamp(-bound, bound)
        sent_rows = sent[start : start + chunks * size].view(chunks, size)
        block = slice(first * scheme.kept, first * scheme.kept + chunks * sent_values)
        if scheme.dense:
            level, code, amounts = _quantize(rows, scheme.bits)
            sent_rows.copy_(amounts)
        else:
            largest = _largest_positions(rows, sent_values)
            level, code, amounts = _quantize(rows.gather(1, largest), scheme.bits)
            sent_rows.scatter_(1, largest, amounts)
            positions[block] = largest.flatten()
        levels[first : first + chunks] = level
        codes[block] = code.flatten()
    mode = PayloadMode.DENSE if scheme.dense else PayloadMode.SPARSE
    header_kept = 0 if scheme.dense else scheme.kept
    sections = (
        HEADER.pack(MAGIC, mode, scheme.bits, header_kept, n),
        levels.numpy().astype("<u4").data,
        _pack_positions(positions).data,
        _pack_codes(codes.numpy(), scheme.bits).data,
    )
    return b"".join(sections), sent


def decode(payload: bytes, n: int) -> torch.Tensor:
    """Decompress a payload.

    Args:
        payload: The payload, from a peer.
        n: The elements that it must stand for.

    Returns:
        int32[n] in units of 2⁻²⁶.

    Raises:
        MessageError: If it is malformed, exceeds the bound, or no encoder writes it.
    """
    scheme = _read_header(payload, n)
    sizes = scheme.section_sizes(n)
    raw = np.frombuffer(payload, np.uint8)
    raw_levels, raw_positions, raw_codes = np.split(raw[HEADER.size :], np.cumsum(sizes)[:2])
    levels = raw_levels.view("<u4").reshape(-1, scheme.levels_per_chunk)
    if levels.size and int(levels.max()) > MAX_UPDATE_UNITS // MAX_CODES[scheme.bits]:
        raise MessageError(
            f"an update's payload moves a weight by more than {MAX_UPDATE_UNITS} units"
        )
    levels = levels.astype(np.int32)
    _validate_padding(scheme, n, raw_positions, raw_codes)
    units = np.zeros(n, np.int32)
    for start, chunks, size in _split_blocks(n):
        first = start // CHUNK
        sent_values = scheme.values_sent(size)
        begin = first * scheme.kept
        count = chunks * sent_values
        codes = _unpack_codes(raw_codes, begin, count, scheme.bits).reshape(chunks, sent_values)
        amounts = _dequantize(codes, levels[first : first + chunks], scheme.bits)
        rows = units[start : start + chunks * size].reshape(chunks, size)
        if scheme.dense:
            rows[:] = amounts
        else:
            positions = _unpack_positions(raw_positions, begin, count).reshape(chunks, sent_values)
            if (positions[:, 1:] <= positions[:, :-1]).any() or (positions[:, -1:] >= size).any():
                raise MessageError(
                    "an update's payload names positions out of order, or twice, or past the end"
                )
            np.put_along_axis(rows, positions, amounts, 1)
    return torch.from_numpy(units)


def payload_size(n: int, scheme: QuantizationScheme | str = "dense8") -> int:
    """Return the bytes of a payload of n values; no scheme takes more than dense8."""
    return _parse(scheme).smallest_for(n).payload_size(n)


def _parse(scheme: QuantizationScheme | str) -> QuantizationScheme:
    return QuantizationScheme.parse(scheme) if isinstance(scheme, str) else scheme


def _read_header(payload: bytes, n: int) -> QuantizationScheme:
    """Return the scheme of a payload of n values; raise MessageError if it cannot be one."""
    if len(payload) < HEADER.size:
        raise MessageError(f"an update's payload of {len(payload)} bytes has no header")
    magic, mode, bits, sent_values, count = HEADER.unpack_from(payload)
    is_known_mode = (mode == PayloadMode.DENSE and sent_values == 0) or (
        mode == PayloadMode.SPARSE and 0 < sent_values < CHUNK
    )
    if magic != MAGIC or not is_known_mode or bits not in MAX_CODES:
        raise MessageError("an update's payload is of a format this version does not read")
    scheme = QuantizationScheme(sent_values or CHUNK, bits)
    if count != n or len(payload) != scheme.payload_size(n):
        raise MessageError(
            f"an update's payload holds {count} values in {len(payload)} bytes, not {n}"
        )
    if scheme.smallest_for(n) != scheme:
        raise MessageError(f"an update's payload is longer as {scheme} than it need be")
    return scheme


def _split_blocks(n: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, chunks, elements of a chunk) of each block; a short last chunk is its own."""
    whole = n - n % CHUNK
    for start in range(0, whole, BLOCK):
        yield start, min(BLOCK, whole - start) // CHUNK, CHUNK
    if whole < n:
        yield whole, 1, n - whole


# ---- values and levels ---------------------------------------------------------------------------


def _largest_positions(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ascending positions of each row's largest magnitudes.

    Of equal magnitudes the first is chosen.

    Args:
        rows: int32[chunks, size].
        count: How many positions of each row.

    Returns:
        int64[chunks, count].
    """
    size = rows.shape[1]
    # No two keys are equal, so that the choice does not depend on the implementation of topk.
    key = rows.abs().long().mul_(CHUNK).add_(torch.arange(size - 1, -1, -1))
    return key.topk(count, dim=1, sorted=False).indices.sort(dim=1).values


def _quantize(values: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choose levels and codes.

    Args:
        values: int32[chunks, kept] within the bound.
        bits: Bits of a code.

    Returns:
        Levels int32[chunks, levels], codes uint8[chunks, kept], and int32[chunks, kept] of what the
        codes stand for.
    """
    magnitude = values.abs()
    max_code = MAX_CODES[bits]
    largest = magnitude.amax(dim=1, keepdim=True)
    stride = SAMPLE_STRIDE if magnitude.shape[1] > MIN_SAMPLED_VALUES else 1
    sample = magnitude[:, ::stride]
    if bits == 2:
        return _quantize_two_bits(values, magnitude, sample, largest)
    level = largest = (largest + (max_code - 1)) // max_code
    if bits == 4:
        level = _least_squares_level(sample.double(), largest, max_code)
        level = torch.where(level > 0, level, largest)
    steps = _nearest_steps(magnitude.double(), level, max_code).to(torch.int32).mul_(values.sign())
    codes = steps.bitwise_and((1 << bits) - 1).to(torch.uint8)
    return level, codes, steps.mul_(level)


def _quantize_two_bits(
    values: torch.Tensor, magnitude: torch.Tensor, sample: torch.Tensor, largest: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choose the two magnitudes of each chunk and the codes, see `_quantize`."""
    low, high = _two_means(sample.double())
    # If the sampled values are all zero, the largest value of the chunk is the upper magnitude.
    high = torch.where(high > 0, high, largest)
    # If the two magnitudes are equal, every value gets the lower.
    middle = torch.where(high > low, (low + high) // 2, MAX_UPDATE_UNITS)
    upper = torch.gt(magnitude, middle, out=torch.empty_like(values))
    amounts = upper.mul(high - low).add_(low)
    negative = (values >> 31).mul_(amounts.clamp(max=1))  # 0 or −1; zero is never negative
    codes = upper.sub_(negative, alpha=2).to(torch.uint8)
    return torch.cat([low, high], 1), codes, amounts.bitwise_xor_(negative).sub_(negative)


# The functions below compute in float64, for its speed. All values, and all their sums in any
# order, are integers below 2**53, so the results are exact.


def _nearest_steps(magnitude: torch.Tensor, level: torch.Tensor, max_code: int) -> torch.Tensor:
    """Return the nearest multiples of a level, halves rounded up, none over `max_code`.

    A quotient up to `max_code` that is below half an odd integer is so by at least 2⁻²⁸, so that it
    is not rounded to it.

    Args:
        magnitude: float64[chunks, kept].
        level: int32[chunks, 1].
        max_code: The largest code.

    Returns:
        float64[chunks, kept].
    """
    return magnitude.div(level.clamp(min=1).double()).add_(0.5).floor_().clamp_(max=max_code)


def _least_squares_level(
    magnitude: torch.Tensor, largest: torch.Tensor, max_code: int
) -> torch.Tensor:
    """Return the level L that nearly minimises Σ (x - k·L)² for each chunk.

        x   magnitudes                    `magnitude`
        k   their nearest multiples of L  `steps`

    For fixed k the minimum is at L = Σ k·x / Σ k². The iteration starts where the largest code is
    about five times the mean magnitude or, if that is less, at the level that reaches the largest.

    Args:
        magnitude: float64[chunks, kept].
        largest: int32[chunks, 1], the level that reaches the largest magnitude.
        max_code: The largest code.

    Returns:
        int32[chunks, 1].
    """
    mean = _sum_rows(magnitude) // magnitude.shape[1]
    level = torch.minimum(largest, (5 * mean // max_code + 1).to(torch.int32))
    for _ in range(LEVEL_ITERATIONS[4]):
        steps = _nearest_steps(magnitude, level, max_code)
        squares = _sum_rows(steps * steps).clamp_(min=1)
        products = _sum_rows(steps * magnitude)
        level = torch.minimum(largest, ((2 * products + squares) // (2 * squares)).to(torch.int32))
    return level


def _two_means(magnitude: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the means of the magnitudes up to, and over, the middle between the two means.

    Args:
        magnitude: float64[chunks, kept].

    Returns:
        The lower and the upper means, int32[chunks, 1] each.
    """
    count = magnitude.shape[1]
    total = _sum_rows(magnitude)
    middle = total // count  # starts at the mean, over which there is a value unless all are equal
    low = high = total
    upper = torch.empty_like(magnitude)
    for _ in range(LEVEL_ITERATIONS[2]):
        torch.gt(magnitude, middle.double(), out=upper)
        upper_count = _sum_rows(upper)
        upper_total = _sum_rows(upper.mul_(magnitude))
        # The lowest value is over the middle only if all values are one.
        lower_count = (count - upper_count).clamp_(min=1)
        low = (2 * (total - upper_total) + lower_count) // (2 * lower_count)
        upper_mean = (2 * upper_total + upper_count) // (2 * upper_count.clamp(min=1))
        high = torch.where(upper_count > 0, upper_mean, low)
        middle = (low + high) // 2
    return low.to(torch.int32), high.to(torch.int32)


def _sum_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return int64[chunks, 1], the sums of float64[chunks, kept]."""
    return rows.sum(dim=1, keepdim=True).long()


def _dequantize(codes: np.ndarray, levels: np.ndarray, bits: int) -> np.ndarray:
    """Return what codes stand for.

    Args:
        codes: uint8[chunks, kept].
        levels: int32[chunks, levels].
        bits: Bits of a code.

    Returns:
        int32[chunks, kept].

    Raises:
        MessageError: If no encoder writes these codes with these levels.
    """
    if bits == 2:
        low = levels[:, :1]
        high = levels[:, 1:]
        has_one_level = (low == high)[:, 0]  # for each chunk
        has_zero = (low == 0)[:, 0]  # for each chunk
        negative_zero = codes[has_zero] == 2
        if (low > high).any() or (codes[has_one_level] & 1).any() or negative_zero.any():
            raise MessageError("an update's payload holds a value that no encoder writes")
        amounts = np.multiply(codes & 1, high - low, dtype=np.int32) + low
        return np.multiply(amounts, 1 - (codes & 2).view(np.int8), dtype=np.int32)
    shift = 8 - bits
    steps = (codes << shift).view(np.int8) >> shift
    if (steps < -MAX_CODES[bits]).any() or ((levels == 0) & (steps != 0)).any():
        raise MessageError("an update's payload holds a value that no encoder writes")
    return np.multiply(steps, levels, dtype=np.int32)


# ---- bits ----------------------------------------------------------------------------------------


def _pack_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack uint8[n] of `bits` bits each end to end."""
    if bits == 8:
        return codes
    per_byte = 8 // bits
    # Each word holds the codes that will share a byte, one code a byte.
    words = np.pad(codes, (0, -len(codes) % per_byte)).view(f"<u{per_byte}")
    packed = words.astype(np.uint8)
    for i in range(1, per_byte):
        packed |= (words >> ((8 - bits) * i)).astype(np.uint8)
    return packed


def _unpack_codes(raw: np.ndarray, begin: int, count: int, bits: int) -> np.ndarray:
    """Return uint8[count], the codes from `begin` on."""
    if bits == 8:
        return raw[begin : begin + count]
    per_byte = 8 // bits
    first = begin // per_byte
    last = -(-(begin + count) // per_byte)
    codes = CODES_OF_BYTE[bits].take(raw[first:last]).view(np.uint8)
    return codes[begin - first * per_byte :][:count]


def _codes_of_byte(bits: int) -> np.ndarray:
    """Return [256], the codes in each byte, one code a byte, as one number.

    Looking them up is faster than shifting.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = np.arange(256, dtype=np.uint8)[:, None] >> shifts & ((1 << bits) - 1)
    return codes.view(f"u{8 // bits}").reshape(256)


CODES_OF_BYTE = {bits: _codes_of_byte(bits) for bits in (2, 4)}


def _pack_positions(positions: torch.Tensor) -> np.ndarray:
    """Pack int16[n] of 12 bits each end to end, two in three bytes; return uint8."""
    pairs = np.pad(positions.numpy().astype(np.uint16), (0, positions.numel() % 2)).reshape(-1, 2)
    a = pairs[:, 0]
    b = pairs[:, 1]
    packed = np.stack([a & 255, (a >> 8) | (b & 15) << 4, b >> 4], 1).astype(np.uint8)
    return packed.reshape(-1)[: -(-positions.numel() * 3 // 2)]


def _unpack_positions(raw: np.ndarray, begin: int, count: int) -> np.ndarray:
    """Return int64[count], the positions from `begin` on."""
    first = begin // 2
    last = -(-(begin + count) // 2)
    part = raw[3 * first : 3 * last].astype(np.int64)
    a, b, c = np.pad(part, (0, -len(part) % 3)).reshape(-1, 3).T
    positions = np.stack([a | (b & 15) << 8, b >> 4 | c << 4], 1).reshape(-1)
    return positions[begin - 2 * first :][:count]


def _validate_padding(
    scheme: QuantizationScheme, n: int, positions: np.ndarray, codes: np.ndarray
) -> None:
    """Raise MessageError unless the bits after the last position and the last code are zero."""
    sent_values = scheme.values_sent(n)
    for section, used_bits in ((positions, 12 * sent_values), (codes, scheme.bits * sent_values)):
        if section.size and used_bits % 8 and int(section[-1]) >> used_bits % 8:
            raise MessageError("an update's payload holds bits that no encoder writes")
