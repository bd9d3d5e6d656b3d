"""Integer updates to bytes and back, by integer arithmetic alone: the same bytes and the same integers on every CPU,
GPU, OS and number of threads.

A payload is a header, one level (uint32) a chunk of 4096, and the values; a value stands for `value · level` units of
2**-26. All little-endian. The header's `mode` and `bits` leave room for sparse and 2- or 4-bit payloads: what is here
is dense at 8 bits. What does not fit the bound or the level's grid is not sent; the caller keeps it as error feedback
(`values - sent`).
"""

import struct

import numpy as np
import torch

from barnraise.errors import MessageError
from barnraise.spec import MAX_UPDATE_UNITS

CHUNK = 4096  # elements that share a level
HEADER = struct.Struct("<4sBBHI")  # magic, mode, bits a value, zero, elements
MAGIC = b"BRU1"
DENSE = 1
TOP = 127  # the largest magnitude of an 8-bit value; -128 is never written and never read
MAX_LEVEL = MAX_UPDATE_UNITS // TOP
_BLOCK = 256 * CHUNK  # elements worked on at a time, so that intermediates stay small


def encode(values: torch.Tensor, codec: str = "dense8") -> tuple[bytes, torch.Tensor]:
    """(payload, sent) for int32[n] `values` in units; `sent` is int32[n], exactly what `decode` returns.

    Each chunk's level is the least that reaches its largest magnitude (clipped to the bound), and values are rounded
    to the nearest multiple of it, halves away from zero.
    """
    assert values.dtype == torch.int32 and values.dim() == 1 and values.device.type == "cpu"
    if codec != "dense8":
        raise ValueError(f"this version has the codec dense8; there is no '{codec}'")
    n = values.numel()
    sent = torch.empty_like(values)
    levels = torch.empty(-(-n // CHUNK), dtype=torch.int32)
    small = torch.empty(n, dtype=torch.int8)
    for start in range(0, n, _BLOCK):
        bounded = _chunked(values[start : start + _BLOCK].clamp(-TOP * MAX_LEVEL, TOP * MAX_LEVEL))
        magnitude = bounded.abs()
        level = (magnitude.amax(dim=1, keepdim=True) + (TOP - 1)) // TOP
        divisor = level.clamp(min=1)  # 2 · magnitude + divisor stays under 2**28: int32 is wide enough throughout
        steps = (2 * magnitude + divisor).div_(2 * divisor, rounding_mode="floor").clamp_(max=TOP) * bounded.sign()
        count = min(_BLOCK, n - start)
        levels[start // CHUNK : start // CHUNK + len(level)] = level[:, 0]
        small[start : start + count] = steps.flatten()[:count]
        sent[start : start + count] = (steps * level).flatten()[:count]
    header = HEADER.pack(MAGIC, DENSE, 8, 0, n)
    return header + levels.numpy().astype("<u4").tobytes() + small.numpy().tobytes(), sent


def decode(payload: bytes, n: int) -> torch.Tensor:
    """The int32[n] a payload stands for. Raises MessageError on anything malformed or over the bound."""
    chunks = -(-n // CHUNK)
    if len(payload) < HEADER.size:
        raise MessageError(f"an update's payload of {len(payload)} bytes has no header")
    magic, mode, bits, zero, count = HEADER.unpack_from(payload)
    if (magic, mode, bits, zero) != (MAGIC, DENSE, 8, 0):
        raise MessageError("an update's payload is of a format this version does not read")
    if count != n or len(payload) != payload_size(n):
        raise MessageError(f"an update's payload holds {count} values in {len(payload)} bytes, not {n}")
    levels = np.frombuffer(payload, "<u4", chunks, HEADER.size)
    small = np.frombuffer(payload, "i1", n, HEADER.size + 4 * chunks)
    if chunks and int(levels.max()) > MAX_LEVEL:
        raise MessageError(f"an update's payload moves a weight by more than {MAX_UPDATE_UNITS} units")
    if n and int(small.min()) < -TOP:
        raise MessageError("an update's payload holds a value that no encoder writes")
    level = torch.from_numpy(levels.astype(np.int32))
    units = torch.from_numpy(small.astype(np.int32))
    whole = n - n % CHUNK
    units[:whole].view(-1, CHUNK).mul_(level[: whole // CHUNK, None])
    if whole < n:
        units[whole:].mul_(level[-1])
    return units


def payload_size(n: int) -> int:
    """Bytes of a dense 8-bit payload of n values."""
    return HEADER.size + 4 * -(-n // CHUNK) + n


def _chunked(values: torch.Tensor) -> torch.Tensor:
    """[n] → [chunks, CHUNK], the last chunk padded with zeros."""
    return torch.nn.functional.pad(values, (0, -values.numel() % CHUNK)).view(-1, CHUNK)
