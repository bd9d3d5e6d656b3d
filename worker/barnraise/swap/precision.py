"""Weights and moments in fewer bits, and AdamW on them.

**Halves.** A plan that streams bf16 keeps the fp32 master in two halves of 16 bits: `high`, rounded, *is* the streamed
weight; `low` is what rounding took. high = (bits + 0x8000) >> 16, low = bits - (high << 16), both mod 2**32: joining
gives back every one of the 2**32 patterns. What is streamed is another matter: a finite weight above bf16's largest
reads as infinite, as with any rounding to nearest, and the sum may carry out of a NaN's payload, which then reads as
infinite or as zero (the common one, 0x7fc00000, stays a NaN). So it is the loss and the gradient that are checked.

**Bytes.** m and v in 8 bits each. A byte is the upper end of an fp16 that counts in units of its block's largest: v has
5 bits of exponent and 3 of mantissa; m a sign, 4 and 3. So an element is right to an eighth of itself over 32 or 16
octaves below the block's largest. In a linear code small elements next to large ones become zero, in v a catastrophe;
in one by decades (Dettmers et al. 2021) as well, five decades down. What a byte cannot say is rounded up or down by a
dither, right on average over the steps: where gradients stop v fades by 5 % a step, less than half the distance to the
next byte, and rounded to nearest it would stand still.

All by torch operations, in tiles (crew.py). Neither GPUs nor CPUs need anything else.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from barnraise.spec import Fragment
from barnraise.swap.adamw import AdamWStep
from barnraise.swap.tile_threads import BLOCK, Scratch, for_each_tile

HALF = 0x8000
M_TOP, V_TOP = (
    1.875,
    61440.0,
)  # what the block's largest becomes in fp16: the byte's last binade, mantissa 7/8
DROPPED = 7  # fp16's bits below the byte
UPPER = 0x4000  # fp16's upper exponent bit: 0 below 2, so m's byte has no room for it
TINIEST = 1e-30  # a scale is at least this: what divides by it stays finite


@dataclass(frozen=True)
class Moments8:
    """A tile's moments: uint8 [n] each, and the largest of each block, fp32 [⌈n / BLOCK⌉]. All zero: zero moments."""

    m: Tensor
    v: Tensor
    m_scale: Tensor
    v_scale: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.m, self.v, self.m_scale, self.v_scale


# ---- halves --------------------------------------------------------------------------------------------------------


def split(weights: Tensor, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """fp32 [n] → bfloat16 [n] and int16 [n], in `out` if given."""
    high, low = out or (
        torch.empty_like(weights, dtype=dtype) for dtype in (torch.bfloat16, torch.int16)
    )
    for_each_tile(
        lambda scratch, _, weights, *halves: _split(scratch.a.copy_(weights), *halves),
        weights,
        high,
        low,
    )
    return high, low


def join(high: Tensor, low: Tensor, out: Tensor | None = None) -> Tensor:
    """The fp32 [n] that was split, in `out` if given."""
    out = torch.empty_like(high, dtype=torch.float32) if out is None else out
    for_each_tile(lambda _, __, *parts: _join(*parts), out, high, low)
    return out


def update_split(
    fragment: Fragment, begin: int, high: Tensor, low: Tensor, gradient: Tensor, m: Tensor, v: Tensor, *,
    steps: int | Tensor, rate: float, decay: float, shrink: float = 1.0,
) -> None:  # fmt: skip
    """`optimizer.update` of the joined master, bit for bit, in place; gradient fp32 or bf16 [n]."""
    step = AdamWStep.of(fragment, begin, high, steps=steps, rate=rate, decay=decay, shrink=shrink)

    def work(
        scratch: Scratch,
        offset: int,
        high: Tensor,
        low: Tensor,
        gradient: Tensor,
        m: Tensor,
        v: Tensor,
    ) -> None:
        master = _join(scratch.a, high, low)
        step.apply(begin + offset, master, _wide(gradient, scratch), m, v)
        _split(master, high, low)

    for_each_tile(work, high, low, gradient, m, v)


def _join(master: Tensor, high: Tensor, low: Tensor) -> Tensor:
    """Into `master`, fp32."""
    master.copy_(high).view(torch.int32).add_(low)
    return master


def _split(master: Tensor, high: Tensor, low: Tensor) -> None:
    """Uses up `master`: a buffer less that a cache has to hold."""
    bits = master.view(torch.int32)
    low.copy_(bits)  # its low 16
    high.view(torch.int16).copy_(bits.add_(HALF).bitwise_right_shift_(16))


def _wide(gradient: Tensor, scratch: Scratch) -> Tensor:
    return gradient if gradient.dtype == torch.float32 else scratch.c.copy_(gradient)


# ---- bytes ---------------------------------------------------------------------------------------------------------


def update_8bit(
    fragment: Fragment, begin: int, weights: Tensor, gradient: Tensor, moments: Moments8, *,
    steps: int | Tensor, rate: float, decay: float, shrink: float = 1.0, low: Tensor | None = None,
) -> None:  # fmt: skip
    """`optimizer.update` between decoding the moments and encoding them; gradient fp32 or bf16 [n]; begin a multiple of
    BLOCK. The weights are fp32 [n], or with `low` split ones: the high half. The same bits for every cut into tiles at
    multiples of BLOCK and every number of threads."""
    assert begin % BLOCK == 0, f"a tile of 8-bit moments begins on a block, not at {begin}"
    step = AdamWStep.of(
        fragment, begin, weights, steps=steps, rate=rate, decay=decay, shrink=shrink
    )
    dither, halves = _dither(int(steps), weights.device), () if low is None else (low,)

    def work(
        scratch: Scratch, offset: int, weights: Tensor, gradient: Tensor, *rest: Tensor
    ) -> None:
        *coded, low = rest if halves else (*rest, None)
        master = weights if low is None else _join(scratch.e, weights, low)
        _decode(scratch, offset, scratch.a, scratch.b, *coded)
        step.apply(begin + offset, master, _wide(gradient, scratch), scratch.a, scratch.b)
        _encode(scratch, scratch.a, scratch.b, *coded, dither)
        if low is not None:
            _split(master, weights, low)

    for_each_tile(work, weights, gradient, *moments.tensors, *halves)


def encode_moments(m: Tensor, v: Tensor, moments: Moments8, steps: int = 0) -> None:
    """m and v, fp32 [n], v ≥ 0, → bytes; `steps` varies the dither. Each comes back right to an eighth of itself, or to
    2**-17.9 (m) or 2**-32.9 (v) of its block's largest where that is more. v never comes back as zero unless its block
    is: at the lower end it is m that is rounded away. What is below 1e-30 counts as nothing much."""
    dither = _dither(steps, m.device)

    def work(scratch: Scratch, _: int, m: Tensor, v: Tensor, *coded: Tensor) -> None:
        _encode(scratch, scratch.a.copy_(m), scratch.b.copy_(v), *coded, dither)

    for_each_tile(work, m, v, *moments.tensors)


def decode_moments(moments: Moments8) -> tuple[Tensor, Tensor]:
    """Bytes → m and v, fp32 [n]."""
    m, v = (torch.empty_like(moments.m, dtype=torch.float32) for _ in range(2))
    for_each_tile(_decode, m, v, *moments.tensors)
    return m, v


def _decode(
    scratch: Scratch,
    _: int,
    m: Tensor,
    v: Tensor,
    m8: Tensor,
    v8: Tensor,
    m_scale: Tensor,
    v_scale: Tensor,
) -> None:
    bits, halves = scratch.int16_scratch, scratch.fp16_scratch
    bits.copy_(m8.view(torch.int8)).mul_(1 << DROPPED).bitwise_and_(
        ~UPPER
    )  # the sign had spread into it
    _blocks(m.copy_(halves)).mul_(m_scale.div(M_TOP)[:, None])
    bits.copy_(v8).mul_(1 << DROPPED)
    _blocks(v.copy_(halves)).mul_(v_scale.div(V_TOP)[:, None])


def _encode(
    scratch: Scratch,
    m: Tensor,
    v: Tensor,
    m8: Tensor,
    v8: Tensor,
    m_scale: Tensor,
    v_scale: Tensor,
    dither: Tensor,
) -> None:
    """Uses up m and v."""
    blocks, bits, halves = _blocks(m), scratch.int16_scratch, scratch.fp16_scratch
    torch.maximum(blocks.amax(1), blocks.amin(1).neg_(), out=m_scale).clamp_min_(TINIEST)
    blocks.mul_(m_scale.reciprocal().mul_(M_TOP)[:, None])
    halves.copy_(m)  # what is too small becomes subnormal, and then zero
    row = dither[:, : blocks.shape[1]]
    _blocks(bits).add_(row[0])  # to the magnitude: the sign is a bit of its own
    bits.bitwise_right_shift_(DROPPED)
    bits.sub_(
        torch.bitwise_right_shift(bits, 8, out=scratch.int16_spare), alpha=128
    )  # the sign down to the byte's upper bit
    m8.view(torch.int8).copy_(bits)

    blocks = _blocks(v)
    torch.amax(blocks, 1, out=v_scale).clamp_min_(TINIEST)
    blocks.mul_(v_scale.reciprocal().mul_(V_TOP)[:, None])
    halves.copy_(v)
    _blocks(bits).add_(row[1])
    v8.copy_(bits.bitwise_right_shift_(DROPPED).clamp_min_(1))


def _blocks(flat: Tensor) -> Tensor:
    """[blocks, BLOCK]; a last block that is not whole is a tile of its own."""
    return flat.view(-1, min(BLOCK, flat.numel()))


def _dither(steps: int, device: torch.device) -> Tensor:
    """int16 [2, BLOCK], 0…127: even along the block, over the steps, and as pairs. Multiples of irrationals mod 1, in
    units of 2**-32; along the block powers of the plastic number (M. Roberts 2018), over the steps √5 and √2."""
    along = torch.tensor([[0xC13FA9A9], [0x91E10DA5]]) * torch.arange(BLOCK)
    over = torch.tensor([[0x9E3779B9], [0x6A09E667]]) * steps
    return (along.add_(over).bitwise_and_(0xFFFFFFFF) >> (32 - DROPPED)).to(device, torch.int16)
