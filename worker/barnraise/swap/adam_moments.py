"""Adam's moments of one tile: fp32 or 8 bits, with the low halves of split weights."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from barnraise.planning.plan import Plan, moments_part_bytes
from barnraise.swap import precision
from barnraise.swap.adamw import AdamWStep, adamw_update
from barnraise.swap.tile_threads import device_pieces


@dataclass(frozen=True)
class AdamMoments:
    """Views of one record of moments (uint8).

    Attributes:
        m: first moment [n], fp32 or uint8.
        v: second moment [n], fp32 or uint8.
        scales: fp32 [2, blocks] with 8-bit moments.
        low: int16 [n], the low halves of the weights, where bf16 weights are streamed.
    """

    m: Tensor
    v: Tensor
    scales: Tensor | None
    low: Tensor | None

    @classmethod
    def of(cls, plan: Plan, record: Tensor, n: int, second_moments: int) -> "AdamMoments":
        """Return views of a record, uint8, that holds the moments of n elements.

        `second_moments` of them have a second moment.
        """
        sizes = iter(moments_part_bytes(n, second_moments, plan.moments_bits, plan.dtype))
        offset = 0

        def part(dtype: torch.dtype, count: int) -> Tensor:
            nonlocal offset
            begin = offset
            offset += next(sizes)
            return record[begin : begin + count * dtype.itemsize].view(dtype)

        dtype = torch.float32 if plan.moments_bits == 32 else torch.uint8
        m = part(dtype, n)
        v = part(dtype, second_moments)
        blocks = -(-n // precision.BLOCK)
        scales = part(torch.float32, 2 * blocks).view(2, blocks) if plan.moments_bits == 8 else None
        low = part(torch.int16, n) if plan.dtype == "bfloat16" else None
        return AdamMoments(m, v, scales, low)

    def update(self, step: AdamWStep, begin: int, weights: Tensor, gradient: Tensor) -> None:
        """Apply an AdamW step in place to the tile that begins at element `begin` of its fragment.

        The weights are those that are streamed, fp32 or bf16 [n], and the gradient is fp32 [n].
        """
        if self.scales is not None:
            precision.update_8bit(step, begin, weights, gradient, self._eight_bit(), low=self.low)
        elif self.low is not None:
            halves = precision.SplitWeights(weights, self.low)
            precision.update_split(step, begin, halves, gradient, self.m, self.v)
        else:
            adamw_update(step, begin, weights, gradient, self.m, self.v)

    def master(self, weights: Tensor) -> Tensor:
        """Return the master weights, fp32 [n]: the streamed ones, or joined from their halves."""
        if self.low is None:
            return weights
        return precision.join(precision.SplitWeights(weights, self.low))

    def store_master(self, weights: Tensor, master: Tensor) -> None:
        """Write what `master` returned, or other fp32 [n], into the streamed weights and halves."""
        if self.low is not None:
            precision.split(master, out=precision.SplitWeights(weights, self.low))
        elif master is not weights:
            weights.copy_(master)

    def part(self, begin: int, end: int) -> "AdamMoments":
        """Return views of elements [begin, end); `begin` is a multiple of a block's size."""
        blocks = slice(begin // precision.BLOCK, -(-end // precision.BLOCK))
        scales = None if self.scales is None else self.scales[:, blocks]
        low = None if self.low is None else self.low[begin:end]
        return AdamMoments(self.m[begin:end], self.v[begin:end], scales, low)

    def _split_pieces(self) -> Iterator[tuple[slice, "AdamMoments"]]:
        """Yield the pieces in which a conversion takes little of a device's memory."""
        for begin, end in device_pieces(self.m):
            yield slice(begin, end), self.part(begin, end)

    def to_float32(self) -> tuple[Tensor, Tensor]:
        """Return m and v in fp32 and host memory: by reference where they are stored so."""
        if self.scales is None:
            return self.m.cpu(), self.v.cpu()
        m, v = (torch.empty(self.m.numel()) for _ in range(2))
        for piece, moments in self._split_pieces():
            decoded = precision.decode_moments(moments._eight_bit())
            m[piece].copy_(decoded[0])
            v[piece].copy_(decoded[1])
        return m, v

    def load_float32(self, m: Tensor, v: Tensor) -> None:
        """Set m and v from fp32 [n] each, in any memory."""
        if self.scales is None:
            self.m.copy_(m)
            self.v.copy_(v)
            return
        device = self.m.device
        for piece, moments in self._split_pieces():
            encoded = moments._eight_bit()
            precision.encode_moments(m[piece].to(device), v[piece].to(device), encoded)

    def _eight_bit(self) -> precision.Moments8:
        assert self.scales is not None, "these moments are fp32"
        return precision.Moments8(self.m, self.v, self.scales[0], self.scales[1])
