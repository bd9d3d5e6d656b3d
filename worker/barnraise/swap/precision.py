"""Number formats, and AdamW on them: fixed-point units, split weights, 8-bit moments.

**Fixed point.** The anchor and all updates are int32 in units of 2**-UNIT_BITS, so that sums are
exact.

**Halves.** A plan that streams bf16 stores the fp32 master in two halves of 16 bits: `high`,
rounded, *is* the streamed weight; `low` is what the rounding removed. high = (bits + 0x8000) >> 16,
low = bits - (high << 16), both mod 2**32: joining restores every one of the 2**32 bit patterns. The
streamed value alone is less exact: a finite weight above bf16's largest reads as infinite, as with
any rounding to nearest, and the addition may carry out of a NaN's payload, which then reads as
infinite or as zero (the common NaN, 0x7fc00000, stays a NaN). So the engine checks the loss and the
gradient, not the weights.

**Bytes.** m and v in 8 bits each. A byte is the upper end of an fp16 in units of its block's
largest element: v has 5 bits of exponent and 3 of mantissa; m has a sign, 4 and 3. So an element is
accurate to an eighth of itself over 32 or 16 octaves below the block's largest. In a linear code
small elements next to large ones would become zero, which in v is a catastrophe; in a code by
decades (Dettmers et al. 2021, arXiv:2110.02861) as well, five decades down. A dither rounds up or
down such that the average over the steps is exact: where gradients stop, v fades by 5 % a step,
less than half the distance to the next byte, and rounding to nearest would never change it.

All by torch operations, in tiles (`tile_threads.py`). Neither GPUs nor CPUs need anything else.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from barnraise.spec import UNIT_BITS
from barnraise.swap.adamw import AdamWKernel, AdamWStep
from barnraise.swap.tile_threads import BLOCK, Scratch, for_each_tile

UNIT = 2.0**-UNIT_BITS
HALF = 0x8000
# What the block's largest element becomes in fp16: in the byte's last binade, with mantissa 7/8.
M_TOP, V_TOP = 1.875, 61440.0
DROPPED_BITS = 7  # fp16's bits below the byte
UPPER_EXPONENT_BIT = 0x4000  # of fp16: 0 for values below 2, so that m's byte needs no room for it
SMALLEST_SCALE = 1e-30  # keeps what is divided by a scale finite


def units_to_float(units: Tensor) -> Tensor:
    """Convert int32 units to fp32 weights: the nearest fp32 of the integer, then an exact scaling.

    The result has the same bits on every machine.
    """
    return units.float().mul_(UNIT)


class SplitWeights(NamedTuple):
    """Both halves of fp32 [n] weights: `high` bf16 [n], which is streamed, and `low` int16 [n]."""

    high: Tensor
    low: Tensor


class Moments8(NamedTuple):
    """A tile's 8-bit moments; all zero bytes are zero moments.

    Attributes:
        m: uint8 [n].
        v: uint8 [n].
        m_scale: the largest |m| of each block, fp32 [⌈n / BLOCK⌉].
        v_scale: the largest v of each block, fp32 [⌈n / BLOCK⌉].
    """

    m: Tensor
    v: Tensor
    m_scale: Tensor
    v_scale: Tensor


# ---- halves ----------------------------------------------------------------------------------


def split(weights: Tensor, out: SplitWeights | None = None) -> SplitWeights:
    """Split fp32 [n] weights into halves, in `out` if given."""
    halves = out or SplitWeights(
        torch.empty_like(weights, dtype=torch.bfloat16),
        torch.empty_like(weights, dtype=torch.int16),
    )

    def split_tile(scratch: Scratch, _: int, weights: Tensor, *halves: Tensor) -> None:
        _split(scratch.fp32_scratch(0).copy_(weights), *halves)

    for_each_tile(split_tile, weights, *halves)
    return halves


def join(halves: SplitWeights, out: Tensor | None = None) -> Tensor:
    """Return the fp32 [n] weights that were split, in `out` if given."""
    out = torch.empty_like(halves.high, dtype=torch.float32) if out is None else out
    for_each_tile(lambda _, __, *parts: _join(*parts), out, *halves)
    return out


def update_split(
    step: AdamWStep, begin: int, weights: SplitWeights, gradient: Tensor, m: Tensor, v: Tensor
) -> None:
    """Apply `adamw_update` of the joined master, bit for bit, in place; see its arguments.

    The gradient may be bf16 as well.
    """
    kernel = AdamWKernel.prepare(step, begin, weights.high)

    def update_tile(scratch: Scratch, offset: int, *tile: Tensor) -> None:
        high, low, gradient, m, v = tile
        master = _join(scratch.fp32_scratch(0), high, low)
        kernel.apply(begin + offset, master, _as_float32(gradient, scratch), m, v)
        _split(master, high, low)

    for_each_tile(update_tile, *weights, gradient, m, v)


def _join(master: Tensor, high: Tensor, low: Tensor) -> Tensor:
    """Write the joined weights into `master`, fp32, and return it."""
    master.copy_(high).view(torch.int32).add_(low)
    return master


def _split(master: Tensor, high: Tensor, low: Tensor) -> None:
    """Write both halves; overwrite `master`, which spares the cache another buffer."""
    bits = master.view(torch.int32)
    low.copy_(bits)  # its low 16
    high.view(torch.int16).copy_(bits.add_(HALF).bitwise_right_shift_(16))


def _as_float32(gradient: Tensor, scratch: Scratch) -> Tensor:
    """Return the gradient itself if it is fp32, else a copy in scratch buffer 2."""
    if gradient.dtype == torch.float32:
        return gradient
    return scratch.fp32_scratch(2).copy_(gradient)


# ---- bytes -----------------------------------------------------------------------------------


def update_8bit(
    step: AdamWStep,
    begin: int,
    weights: Tensor,
    gradient: Tensor,
    moments: Moments8,
    low: Tensor | None = None,
) -> None:
    """Decode the moments, apply `adamw_update`, and encode them again, in place.

    The result has the same bits for every cut into tiles at multiples of BLOCK and every number of
    threads.

    Args:
        step: the hyperparameters.
        begin: the tile's first element in its fragment, a multiple of BLOCK.
        weights: fp32 [n], or the high half of split weights.
        gradient: fp32 or bf16 [n].
        moments: of [n].
        low: the low half of split weights, int16 [n].
    """
    assert begin % BLOCK == 0, f"a tile of 8-bit moments begins on a block, not at {begin}"
    kernel = AdamWKernel.prepare(step, begin, weights)
    dither = _dither(int(step.number), weights.device)
    low_part = () if low is None else (low,)

    def update_tile(scratch: Scratch, offset: int, *tile: Tensor) -> None:
        weights, gradient = tile[:2]
        moments = Moments8(*tile[2:6])
        m, v = scratch.fp32_scratch(0), scratch.fp32_scratch(1)
        master = weights if len(tile) == 6 else _join(scratch.fp32_scratch(3), weights, tile[6])
        _decode(scratch, m, v, moments)
        kernel.apply(begin + offset, master, _as_float32(gradient, scratch), m, v)
        _encode(scratch, m, v, moments, dither)
        if len(tile) > 6:
            _split(master, weights, tile[6])

    for_each_tile(update_tile, weights, gradient, *moments, *low_part)


def encode_moments(m: Tensor, v: Tensor, moments: Moments8, steps: int = 0) -> None:
    """Encode m and v, fp32 [n] with v ≥ 0, into bytes; `steps` varies the dither.

    Each element is restored to an eighth of itself, or to 2**-17.9 (m) or 2**-32.9 (v) of its
    block's largest where that is more. v is never restored as zero unless its block is zero: at the
    lower end m is rounded to zero instead. Blocks whose largest element is below 1e-30 are restored
    as almost zero.
    """
    dither = _dither(steps, m.device)

    def encode_tile(scratch: Scratch, _: int, m: Tensor, v: Tensor, *coded: Tensor) -> None:
        m_copy, v_copy = scratch.fp32_scratch(0).copy_(m), scratch.fp32_scratch(1).copy_(v)
        _encode(scratch, m_copy, v_copy, Moments8(*coded), dither)

    for_each_tile(encode_tile, m, v, *moments)


def decode_moments(moments: Moments8) -> tuple[Tensor, Tensor]:
    """Decode bytes into m and v, fp32 [n]."""
    m = torch.empty_like(moments.m, dtype=torch.float32)
    v = torch.empty_like(moments.m, dtype=torch.float32)

    def decode_tile(scratch: Scratch, _: int, m: Tensor, v: Tensor, *coded: Tensor) -> None:
        _decode(scratch, m, v, Moments8(*coded))

    for_each_tile(decode_tile, m, v, *moments)
    return m, v


def _decode(scratch: Scratch, m: Tensor, v: Tensor, moments: Moments8) -> None:
    """Write the decoded moments into m and v, fp32."""
    bits, halves = scratch.int16_scratch, scratch.fp16_scratch
    bits.copy_(moments.m.view(torch.int8)).mul_(1 << DROPPED_BITS)
    bits.bitwise_and_(~UPPER_EXPONENT_BIT)  # the sign was extended into it
    _view_blocks(m.copy_(halves)).mul_(moments.m_scale.div(M_TOP)[:, None])
    bits.copy_(moments.v).mul_(1 << DROPPED_BITS)
    _view_blocks(v.copy_(halves)).mul_(moments.v_scale.div(V_TOP)[:, None])


def _encode(scratch: Scratch, m: Tensor, v: Tensor, moments: Moments8, dither: Tensor) -> None:
    """Write the bytes of m and v, fp32; overwrite m and v."""
    bits, halves = scratch.int16_scratch, scratch.fp16_scratch
    blocks = _view_blocks(m)
    torch.maximum(blocks.amax(1), blocks.amin(1).neg_(), out=moments.m_scale)
    moments.m_scale.clamp_min_(SMALLEST_SCALE)
    blocks.mul_(moments.m_scale.reciprocal().mul_(M_TOP)[:, None])
    halves.copy_(m)  # what is too small becomes subnormal, and then zero
    row = dither[:, : blocks.shape[1]]
    _view_blocks(bits).add_(row[0])  # to the magnitude: the sign is a bit of its own
    bits.bitwise_right_shift_(DROPPED_BITS)
    # Move the sign down to the byte's upper bit.
    bits.sub_(torch.bitwise_right_shift(bits, 8, out=scratch.int16_spare), alpha=128)
    moments.m.view(torch.int8).copy_(bits)

    blocks = _view_blocks(v)
    torch.amax(blocks, 1, out=moments.v_scale).clamp_min_(SMALLEST_SCALE)
    blocks.mul_(moments.v_scale.reciprocal().mul_(V_TOP)[:, None])
    halves.copy_(v)
    _view_blocks(bits).add_(row[1])
    moments.v.copy_(bits.bitwise_right_shift_(DROPPED_BITS).clamp_min_(1))


def _view_blocks(flat: Tensor) -> Tensor:
    """View a tile as [blocks, BLOCK]; a last block that is not whole is a tile of its own."""
    return flat.view(-1, min(BLOCK, flat.numel()))


def _dither(steps: int, device: torch.device) -> Tensor:
    """Return int16 [2, BLOCK] from 0 to 127.

    Evenly distributed along the block, over the steps, and as pairs: multiples of irrationals mod
    1, in units of 2**-32: along the block powers of the plastic number (M. Roberts 2018, "The
    unreasonable effectiveness of quasirandom sequences"), over the steps √5 and √2.
    """
    positions = torch.arange(BLOCK, device=device)  # computed there: a copy would wait for a GPU
    rows = [
        (positions * along + over * steps).bitwise_and_(0xFFFFFFFF) >> (32 - DROPPED_BITS)
        for along, over in ((0xC13FA9A9, 0x9E3779B9), (0x91E10DA5, 0x6A09E667))
    ]
    return torch.stack(rows).to(torch.int16)
