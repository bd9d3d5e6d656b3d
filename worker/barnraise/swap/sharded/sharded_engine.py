"""The engine whose weights and moments several ranks share, with the exchange's state on the host.

Between steps a fragment is gathered on rank 0's host, changed, and scattered back, so that all that
`Engine` does tile by tile works on it. A step is torch's FSDP2 on all ranks.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from barnraise.errors import BarnraiseError
from barnraise.planning.plan import Plan
from barnraise.spec import Recipe
from barnraise.swap.adam_moments import AdamMoments
from barnraise.swap.engine import AnchorLike, Engine, StepStats
from barnraise.swap.executor import EngineProgress
from barnraise.swap.sharded.rank_group import RankGroup
from barnraise.swap.sharded.rank_program import Opcode, SharedSettings
from barnraise.swap.sharded.sharded_model import SharedKind
from barnraise.swap.state_store import StateStore
from barnraise.swap.tiles import Tile, Tiles


class ShardedEngine(Engine):
    """Train a replica whose weights and moments are DTensors of several ranks."""

    def __init__(
        self,
        plan: Plan,
        recipe: Recipe,
        store: StateStore,
        anchor: AnchorLike,
        group: RankGroup,
        progress: EngineProgress | None = None,
    ) -> None:
        """Build the model on all ranks of `group`, and bring the state into a consistent form.

        `progress` is how far the state in `store` has come; None for a fresh state.
        """
        assert group.ranks == len(plan.ranks), "the plan is for another number of ranks"
        self._group = group
        settings = SharedSettings(
            plan.model,
            plan.dtype,
            plan.tensor,
            plan.retained_blocks,
            plan.threads,
            plan.optimizer,
        )
        description = torch.frombuffer(bytearray(settings.to_bytes()), dtype=torch.uint8)
        group.execute(Opcode.BUILD, len(description), payload=description)
        super().__init__(plan, recipe, store, anchor, progress=progress)

    def _create_tiles(self) -> Tiles:
        return ShardedTiles(self.store, self._group)

    def step(
        self,
        batches: list[Tensor],
        rate_scale: float = 1.0,
        position: int = 0,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> StepStats:
        """Make one step on the mean gradient of the micro-batches, exactly clipped; see `Engine`.

        Raises:
            RankLostError: a rank was lost; a new process goes on from what was saved.
        """
        started = time.perf_counter()
        if self._queued_updates or self._target_prediction != self.progress.prediction:
            self.apply_queued()
        tokens = torch.cat(batches)
        for micro_batch in self._deal_sequences(tokens):
            if should_stop():
                self._group.execute(Opcode.DROP)
                seconds = time.perf_counter() - started
                return StepStats(math.nan, 0, seconds, math.nan, interrupted=True)
            sizes = len(micro_batch), len(tokens)
            self._group.execute(Opcode.ACCUMULATE, *sizes, payload=micro_batch)
        count = tokens.shape[0] * (tokens.shape[1] - 1)
        update = self._new_update({}, rate_scale, count, position)
        recipe = self.recipe
        rates = update.learning_rate, recipe.weight_decay, recipe.clip, update.matrix_rate
        words = torch.tensor(rates, dtype=torch.float64).view(torch.int64).tolist()
        loss, norm = self._group.execute(Opcode.APPLY, update.step_number, *words).tolist()
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        if is_finite:
            self.progress = update.progress
        else:
            self.progress = replace(self.progress, position=position)
            self.reset_round()
        seconds = time.perf_counter() - started
        return StepStats(loss, count if is_finite else 0, seconds, norm, abandoned=not is_finite)

    def _deal_sequences(self, tokens: Tensor) -> Iterator[Tensor]:
        """Yield micro-batches for all ranks: of each rank's run of sequences, the next few."""
        ranks = len(self.plan.ranks) // self.plan.tensor
        runs = tokens.view(ranks, -1, tokens.shape[1])
        for part in runs.split(self.plan.sequences, dim=1):
            yield part.reshape(-1, tokens.shape[1])

    def flush(self) -> None:
        """Do nothing: a step's update is applied when the step ends."""

    def close(self) -> None:
        """Free the model on all ranks; the caller that started the group ends it."""
        super().close()
        with contextlib.suppress(BarnraiseError):  # a rank that was lost has no memory any longer
            self._group.execute(Opcode.RELEASE)


class ShardedTiles(Tiles):
    """Access to what ranks share, one fragment at a time, gathered on the host."""

    def __init__(self, store: StateStore, group: RankGroup) -> None:
        """Work on the ranks' weights and moments, and on the exchange's state in `store`."""
        super().__init__(store)
        self._group = group
        # Elements between tensors, which ranks do not have. Updates change them like all others.
        self._padding: dict[int, list[Tensor]] = {}

    def iterate(self, i: int, changes: bool = True, reads: bool = True) -> Iterator[Tile]:
        """Yield fragment i as one tile; what was done to it is scattered when it is left."""
        size = self._plan.fragments[i].size
        weights = torch.zeros(size)
        if reads:
            weights = self._group.execute(Opcode.GATHER, SharedKind.WEIGHTS, i)
        gaps = self._padding_of(i, weights)
        for gap, values in zip(gaps, self._padding.get(i, gaps), strict=True):
            gap.copy_(values)
        nothing = torch.empty(0)
        yield Tile(i, 0, 0, AdamMoments(nothing, nothing, None, None), weights)
        if changes:
            self._padding[i] = [gap.clone() for gap in gaps]
            self._group.execute(Opcode.SCATTER, SharedKind.WEIGHTS, i, payload=weights)

    def _padding_of(self, i: int, flat: Tensor) -> list[Tensor]:
        """Return views of what lies between the tensors of fragment i."""
        fragment = self._plan.fragments[i]
        ends = [slot.offset for slot in fragment.slots[1:]] + [fragment.size]
        pairs = zip(fragment.slots, ends, strict=True)
        return [flat[slot.offset + slot.size : end] for slot, end in pairs]

    def read_moments(self, i: int) -> tuple[Tensor, Tensor]:
        """Return the moments of fragment i: m, fp32 [n], and v, fp32, of what AdamW trains."""
        m, v = (
            self._group.execute(Opcode.GATHER, kind, i)
            for kind in (SharedKind.FIRST_MOMENTS, SharedKind.SECOND_MOMENTS)
        )
        return m, torch.cat(self._spans_of(i, v))

    def write_moments(self, i: int, m: Tensor, v: Tensor) -> None:
        """Set the moments of fragment i as `read_moments` returns them."""
        whole = torch.zeros(m.shape)
        spans = self._spans_of(i, whole)
        for span, values in zip(spans, v.split([len(span) for span in spans]), strict=True):
            span.copy_(values)
        for kind, flat in ((SharedKind.FIRST_MOMENTS, m), (SharedKind.SECOND_MOMENTS, whole)):
            self._group.execute(Opcode.SCATTER, kind, i, payload=flat.contiguous())

    def _spans_of(self, i: int, flat: Tensor) -> list[Tensor]:
        """Return views of what AdamW trains of fragment i."""
        return [
            flat[layout.begin + begin : layout.begin + end]
            for layout in self._plan.tile_layouts(i)
            for begin, end in layout.spans
        ]
