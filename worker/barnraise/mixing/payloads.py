"""Encode weights for neighbours in 32, 16 or 8 bits. Deterministic, on any machine the same bytes.

In 8 bits each chunk of 4,096 values shares a scale: its largest magnitude is 127 steps.
"""

import math

import torch
from torch import Tensor

from barnraise.mixing.payload_size import payload_size
from barnraise.planning.quantization_scheme import CHUNK
from barnraise.spec import DIVERGENCE_LIMIT, UNIT_BITS

# A published model with a larger weight counts as diverged, so no replica may have one either.
MAX_WEIGHT = DIVERGENCE_LIMIT / (1 << UNIT_BITS)
MAX_GROWTH = 8.0  # of a neighbour's weights, in the root of their mean square, over one's own
STEPS = 127  # from zero to a chunk's largest magnitude, in 8 bits


Payload = bytes | bytearray | memoryview


def encode_weights(weights: Tensor, bits: int) -> Payload:
    """Encode weights.

    Args:
        weights: float32 [n], finite. In 32 bits the result is a view of them: nothing may change
            them while it is in use.
        bits: 32, 16 (bfloat16) or 8.
    """
    size = payload_size(weights.numel(), bits)
    if bits == 32:
        return weights.contiguous().view(torch.uint8).numpy().data
    if bits == 16:
        data = weights.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    else:
        chunks = _split(weights)
        scales = chunks.abs().amax(dim=1) / STEPS
        steps = (chunks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_()
        values = steps.to(torch.int8).flatten()[: weights.numel()]
        data = scales.view(torch.uint8).numpy().tobytes() + values.numpy().tobytes()
    assert len(data) == size
    return data


def decode_weights(data: Payload, count: int, bits: int) -> Tensor:
    """Decode weights that a neighbour sent.

    Returns:
        float32 [count]. In 32 bits it is a view of a bytearray.

    Raises:
        ValueError: The bytes are no such weights.
    """
    size = payload_size(count, bits)
    if len(data) != size:
        raise ValueError(f"{count:,} weights in {bits} bits have {size:,} bytes, not {len(data):,}")
    writable = data if isinstance(data, bytearray) else bytearray(data)
    raw = torch.frombuffer(writable, dtype=torch.uint8)
    if bits == 32:
        weights = raw.view(torch.float32)
    elif bits == 16:
        weights = raw.view(torch.bfloat16).to(torch.float32)
    else:
        scale_bytes = size - count
        scales = raw[:scale_bytes].view(torch.float32)
        values = raw[scale_bytes:].view(torch.int8).to(torch.float32)
        weights = (_split(values) * scales[:, None]).flatten()[:count]
    if not are_finite(weights):
        raise ValueError("they hold values that are not finite")
    return weights


def are_finite(weights: Tensor) -> bool:
    """Return whether all of float32 [n] are finite.

    An element that is not makes the sum so, and a sum needs no copy; but it may overflow by itself.
    """
    return math.isfinite(float(weights.sum())) or bool(torch.isfinite(weights).all())


def check_weights(weights: Tensor, own: Tensor | None = None) -> None:
    """Refuse weights that no machine of a run can have, or that have grown out of proportion.

    A machine's mean with a replica that has blown up is blown up as well, and infects the next one:
    two of them would pass it back and forth after each has begun again.

    Args:
        weights: float32 [n], finite.
        own: float32 [n], this machine's; None if they are to be checked themselves.

    Raises:
        ValueError: They are implausible.
    """
    largest = float(torch.linalg.vector_norm(weights, math.inf))
    if not largest <= MAX_WEIGHT:
        raise ValueError(
            f"the largest weight is {largest:.3g}, and a run's are {MAX_WEIGHT:.0f} at most"
        )
    if own is None:
        return
    norm, own_norm = (float(torch.linalg.vector_norm(each)) for each in (weights, own))
    if norm > MAX_GROWTH * own_norm > 0:
        raise ValueError(f"they are {norm / own_norm:.3g} times as large as this machine's")


def _split(values: Tensor) -> Tensor:
    """Return the values in rows of `CHUNK`, the last row padded with zeros."""
    rows = -(-values.numel() // CHUNK)
    padded = torch.zeros(rows * CHUNK)
    padded[: values.numel()] = values
    return padded.view(rows, CHUNK)
