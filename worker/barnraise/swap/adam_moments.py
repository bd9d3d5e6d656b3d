"""Adam's moments of one tile, in the form a plan keeps them: fp32 or 8 bits, with the low halves of split weights."""

from dataclasses import dataclass

import torch
from torch import Tensor

from barnraise.planning.plan import Plan, moments_parts
from barnraise.spec import Fragment
from barnraise.swap import precision
from barnraise.swap.adamw import adamw_update


@dataclass(frozen=True)
class AdamMoments:
    """Views of one record (uint8): `m` and `v` [n], fp32 or uint8; `scales` fp32 [2, blocks] with 8 bits; `low` int16
    [n] where the weights are streamed as bf16."""

    m: Tensor
    v: Tensor
    scales: Tensor | None
    low: Tensor | None

    @classmethod
    def of(cls, plan: Plan, record: Tensor, n: int) -> "AdamMoments":
        sizes = iter(moments_parts(n, plan.moments_bits, plan.dtype))
        at = 0

        def part(dtype: torch.dtype, count: int) -> Tensor:
            nonlocal at
            begin, at = at, at + next(sizes)
            return record[begin : begin + count * dtype.itemsize].view(dtype)

        wide = torch.float32 if plan.moments_bits == 32 else torch.uint8
        m, v = part(wide, n), part(wide, n)
        blocks = -(-n // precision.BLOCK)
        scales = part(torch.float32, 2 * blocks).view(2, blocks) if plan.moments_bits == 8 else None
        low = part(torch.int16, n) if plan.dtype == "bfloat16" else None
        return cls(m, v, scales, low)

    def step(
        self, fragment: Fragment, begin: int, weights: Tensor, gradient: Tensor, **how
    ) -> None:
        """AdamW on the tile that begins at element `begin` of its fragment; `how` as in `optimizer.update`."""
        if self.scales is not None:
            eight = precision.Moments8(self.m, self.v, self.scales[0], self.scales[1])
            precision.update_8bit(fragment, begin, weights, gradient, eight, low=self.low, **how)
        elif self.low is not None:
            precision.update_split(
                fragment, begin, weights, self.low, gradient, self.m, self.v, **how
            )
        else:
            adamw_update(fragment, begin, weights, gradient, self.m, self.v, **how)

    def master(self, weights: Tensor) -> Tensor:
        """fp32 [n]: the weights themselves, or joined from their halves."""
        return weights if self.low is None else precision.join(weights, self.low)

    def store_master(self, weights: Tensor, master: Tensor) -> None:
        """Takes back a master that was changed."""
        if self.low is not None:
            precision.split(master, out=(weights, self.low))

    def to_float32(self) -> tuple[Tensor, Tensor]:
        """m and v in fp32: by reference where they are so."""
        if self.scales is None:
            return self.m, self.v
        return precision.decode_moments(
            precision.Moments8(self.m, self.v, self.scales[0], self.scales[1])
        )

    def load_float32(self, m: Tensor, v: Tensor) -> None:
        """Sets m and v from fp32 [n]."""
        if self.scales is None:
            self.m.copy_(m)
            self.v.copy_(v)
        else:
            precision.encode_moments(
                m, v, precision.Moments8(self.m, self.v, self.scales[0], self.scales[1])
            )
