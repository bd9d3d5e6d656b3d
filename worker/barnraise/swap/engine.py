"""One machine's training under a plan: local steps on a replica, and the arithmetic between it, anchor and updates.

A step is a program of operations (`schedule.py`, `operations.py`). Between steps, `harvest`, `add`, `evaluate` and the
rest go fragment by fragment, tile by tile, so that a model larger than memory trades and is judged like a small one.
One thread calls all of this.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from barnraise.errors import StateError
from barnraise.models import gpt2 as gpt
from barnraise.models.gpt2 import views
from barnraise.planning import program
from barnraise.planning.plan import KINDS, Plan
from barnraise.spec import Recipe
from barnraise.swap.adam_moments import AdamMoments
from barnraise.swap.arena import release_free_memory, units_to_float
from barnraise.swap.executor import (
    DecodableUpdate,
    EngineProgress,
    Executor,
    PendingUpdate,
    sum_of_updates,
)
from barnraise.swap.forward_backward import ForwardBackward
from barnraise.swap.fused_loss import head_loss
from barnraise.swap.outer_optimizer import OuterOptimizer
from barnraise.swap.state_store import EXCHANGE_KINDS, TRAINING_KINDS, FragmentSequence, StateStore
from barnraise.swap.tiles import Tiles

UPDATES_PER_STEP = 16  # updates folded in at a time: their sum stays below 2**31
WARMUP_STEPS = 20  # steps over which a machine that lost its moments comes back to its rate

Encode = Callable[
    [Tensor], tuple[bytes, Tensor]
]  # int32 [n] → payload, and the int32 [n] it decodes to


class AnchorLike(Protocol):
    def record(self, header: Any) -> None: ...


@dataclass(frozen=True)
class StepStats:
    """`loss`: nats a token before the step; `norm`: of the gradient before clipping. `abandoned`: a loss or gradient
    was not finite, the round's progress is dropped (the replica is the anchor again) and `tokens` is 0."""

    loss: float
    tokens: int
    seconds: float
    norm: float
    abandoned: bool = False


class Engine:
    """`store` holds the state, `anchor` is told which updates are in. `describe(progress)`: what a manifest is to say
    that the state belongs to (asked for states on disk only). `progress`: where the state in the store stands."""

    def __init__(
        self,
        plan: Plan,
        recipe: Recipe,
        store: StateStore,
        anchor: AnchorLike,
        describe: Callable[[EngineProgress], str] = lambda progress: "",
        progress: EngineProgress | None = None,
    ):
        self.plan, self.recipe, self.store, self.anchor, self.describe = (
            plan,
            recipe,
            store,
            anchor,
            describe,
        )
        self.device = torch.device(plan.device)
        self.fragments = plan.fragments
        self.executor = Executor(plan, recipe, store, self._mark)
        self.buffers = self.executor.buffers
        self.anchors = self.executor.anchors
        self.tiles = Tiles(plan, store, self.buffers)
        self.outer_optimizer = OuterOptimizer(recipe, store, self.tiles)
        self._nothing = (0.0,) * len(self.fragments)  # is guessed
        standing = progress or EngineProgress()
        self._guess = standing.prediction or self._nothing  # what it is to be
        self.progress = replace(standing, prediction=self._guess)
        self._arrivals: list[DecodableUpdate] = []
        self._pending: PendingUpdate | None = None
        if progress is None:
            self.reset_round()
        else:
            self._mend()

    # ---- training --------------------------------------------------------------------------------------------

    @property
    def progress_with_pending(self) -> EngineProgress:
        """With the step whose update is pending."""
        return self._pending.progress if self._pending else self.progress

    @property
    def round_tokens(self) -> int:
        """Trained on since the last harvest: what the next update's header states."""
        return self.progress_with_pending.round_tokens

    def step(self, batches: list[Tensor], rate_scale: float = 1.0, position: int = 0) -> StepStats:
        """One AdamW step on the mean gradient of the micro-batches (int64 [sequences, context + 1] each), clipped as
        the plan says. `rate_scale` is what `schedule` says; `position`: where in the data the next step begins.
        Raises StateError or DamageError when a tier fails; what the manifest names is whole then."""
        started = time.perf_counter()
        tokens = [batch.shape[0] * (batch.shape[1] - 1) for batch in batches]
        shares = [mine / sum(tokens) for mine in tokens]
        passes = ForwardBackward(
            self.plan,
            [batch.to(self.device) for batch in batches],
            shares,
            self.executor.new_activations(),
        )
        before, exact = self._pending, self.plan.clipping == "exact"
        if exact and before is not None:
            self._burden(before)
        now = self._next(rate_scale, sum(tokens), position, passes)
        if not exact:
            self._burden(now)
        update = before if exact else now
        folds = update is not None and bool(update.arrivals)
        if folds:
            self.executor.drain()  # the anchor's free slots are only free once the last commit is made
        self.executor.run(partial(program.step, pending=before is not None), update, passes)
        if folds:
            self.executor.drain()
            self._note(update)
        if before is not None:
            self.progress, self._pending = before.progress, None
        figures = [*passes.losses, *(passes.norms[i] for i in range(len(self.fragments)))]
        figures = torch.stack(
            [figure.double().to(self.device) for figure in figures]
        ).tolist()  # the step's only wait
        loss = sum(figures[: len(batches)])
        norm = math.sqrt(sum(n * n for n in figures[len(batches) :]))
        abandoned = not (math.isfinite(loss) and math.isfinite(norm))
        if abandoned:
            self.progress = replace(self.progress, position=position)
            self.reset_round()
        elif exact:
            now.gradient_divisor = max(1.0, norm / self.recipe.clip)
            self._pending = now
            if not self.plan.defers:
                self.flush()
        else:
            self.progress = now.progress
        return StepStats(
            loss, 0 if abandoned else sum(tokens), time.perf_counter() - started, norm, abandoned
        )

    def _next(
        self, rate_scale: float, tokens: int, position: int, passes: ForwardBackward
    ) -> PendingUpdate:
        ahead = self.progress_with_pending
        warmth = 1 - ahead.warmup_steps_left / (WARMUP_STEPS + 1)
        warming = max(0, ahead.warmup_steps_left - 1)
        done = EngineProgress(
            position,
            ahead.round_tokens + tokens,
            ahead.optimizer_steps + 1,
            warming,
            ahead.prediction,
        )
        shrink = 1.0 if self.plan.clipping == "none" else None
        rate = self.recipe.learning_rate * rate_scale * warmth
        return PendingUpdate(rate, done.optimizer_steps, shrink, self._nothing, done, passes.norms)

    def _burden(self, update: PendingUpdate) -> None:
        """What came in meanwhile goes the way of an update."""
        update.arrivals, self._arrivals = (
            self._arrivals[:UPDATES_PER_STEP],
            self._arrivals[UPDATES_PER_STEP:],
        )
        update.prediction_growth = self._growth(update.progress)
        update.progress = replace(update.progress, prediction=self._guess)

    def flush(self) -> None:
        """Makes the pending updates now."""
        if (update := self._pending) is not None:
            self.executor.run(program.flush, update)
            self.progress, self._pending = update.progress, None

    def _mark(self, update: PendingUpdate) -> str:
        """The mark of what a running program commits: all that it folds in is in by then."""
        self._note(update)
        return self.describe(update.progress)

    def _note(self, update: PendingUpdate) -> None:
        for arrival in update.arrivals:
            self.anchor.record(arrival.header)
        update.arrivals = []

    # ---- trading ---------------------------------------------------------------------------------------------

    def queue_updates(
        self, *arrivals: DecodableUpdate, prediction: tuple[float, ...] | None = None
    ) -> None:
        """Other authors' updates, at any moment of a round, and a guess of those that are still under way: by how many
        of its momenta each fragment of the replica is to be ahead (the last guess stays where none is given). In memory
        both are folded in at once; a state on another tier takes them when the next step's updates pass by (or `settle`
        is called)."""
        if not arrivals and prediction in (None, self._guess):
            return
        self._arrivals += arrivals
        self._guess = self._guess if prediction is None else prediction
        if not (self.plan.on_disk or self.plan.staged):
            self.apply_queued()

    @torch.no_grad()
    def apply_queued(self) -> None:
        """All that was added is in the anchor, the replica has the guess it was to have, and nothing is under way."""
        self.executor.drain()
        while (
            arrivals := self._arrivals[:UPDATES_PER_STEP]
        ) or self._guess != self.progress.prediction:
            growth = self._growth(self.progress)
            for i in range(len(self.fragments)):
                units = sum_of_updates(arrivals, i)
                if units is None and not growth[i]:
                    continue
                for t, (_, _, moments, weights) in enumerate(self.tiles.iterate(i)):
                    self.executor.apply_to_tile(i, t, units, growth[i], weights, moments)
                del units  # before the next fragment's are made
            for arrival in arrivals:
                self.anchor.record(arrival.header)
            self._arrivals = self._arrivals[len(arrivals) :]
            self._guessed()
            self.executor.invalidate_cached_weights()
            if self.plan.commits_steps and self._pending is None:
                self.commit()

    def _growth(self, progress: EngineProgress) -> tuple[float, ...]:
        """By how much each fragment's guess is to grow from where `progress` has it."""
        return tuple(
            to_be - is_now for to_be, is_now in zip(self._guess, progress.prediction, strict=True)
        )

    def _guessed(self) -> None:
        """The replica holds the guess that it was to have."""
        self.progress = replace(self.progress, prediction=self._guess)
        if self._pending is not None:
            self._pending.progress = replace(self._pending.progress, prediction=self._guess)

    def end_round(
        self, encode: Encode, weight: float, due: Collection[int] | None = None
    ) -> Iterator[tuple[bytes, Tensor] | None]:
        """Ends the round: for each fragment in order the update's payload and the integers it decodes to, by then
        applied to the anchor and the replica. Consume it whole, then `anchor.record` the header and `commit`. `weight`:
        this author's share, 0…1. `due`: the fragments whose round ends; the others go on, and None comes for them. A
        step whose update is pending counts in the next round of those, so that it may stay so.

        Δ ← w(anchor − g·m − replica), g the fragment's guess; m ← μm + Δ; s = η(Δ + μm); e ← round(βe) + round(s/unit);
        the update is −C(e). The two are rounded apart so that with β = 1 sent plus residual is exactly the sum of the
        rounded steps."""
        if due is None:
            self.flush()
        self.apply_queued()
        release_free_memory()
        for i in range(len(self.fragments)):
            if due is not None and i not in due:
                yield None
                continue
            with torch.no_grad():  # as a decorator it would hold on to what was yielded last
                values = self.buffers.fragment_scratch(i)
                self.outer_optimizer.accumulate(i, values, weight, self.progress.prediction[i])
                payload, units = encode(values)
                self.outer_optimizer.apply_published(i, values, units, self.progress.prediction[i])
            yield payload, units
            del payload, units  # before the next fragment's are made
        self.executor.invalidate_cached_weights()
        self.progress = replace(self.progress, round_tokens=0)
        if self._pending is not None:
            self._pending.progress = replace(self._pending.progress, round_tokens=0)

    @torch.no_grad()
    def reset_round(self) -> None:
        """The replica is the anchor again; what the round had learnt, and the guess, are dropped."""
        self._pending, self._guess = None, self.progress.prediction
        self.apply_queued()
        spare = self.buffers.tile_scratch(1)
        for i in range(len(self.fragments)):
            for t, (begin, end, moments, weights) in enumerate(self.tiles.iterate(i, reads=False)):
                anchor = self.store.load_tile("anchor", i, t, spare)[: 4 * (end - begin)].view(
                    torch.int32
                )
                self.tiles.set_weights(moments, weights, units_to_float(anchor))
        self.executor.invalidate_cached_weights()
        self._guess = self._nothing
        self.progress = replace(self.progress, round_tokens=0, prediction=self._nothing)
        if self.plan.on_disk and self.store.header is not None:
            self.commit()

    def reset_feedback(self) -> None:
        """The ledger holds an update of mine newer than the saved feedback: what it owed may have been said already."""
        self.store.clear("feedback")

    def reset_momentum(self) -> None:
        """A verdict took out what the momentum followed. What this machine owes stays owed."""
        self._guess = self._nothing  # it was made of it
        self.apply_queued()
        self.store.clear("momentum")

    def replace_fragment(self, index: int, units: Tensor) -> None:
        """Fragment `index` of the anchor was damaged and must be int32 [n] `units`. The round is dropped."""
        self.executor.drain()
        self.anchors[index] = units
        self.reset_round()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Tensor]) -> float:
        """Mean loss of the *anchor*, whatever the replica is in the middle of: peers with one anchor get one number.

        Layer by layer over all batches, so that one layer's weights are unpacked at a time."""
        self.apply_queued()
        batches = [
            part.to(self.device) for batch in batches for part in batch.split(self.plan.sequences)
        ]
        embedding = self._anchored(0)
        streams = [gpt.embed(embedding, batch[:, :-1]) for batch in batches]
        for i in self.plan.blocks:
            weights = self._anchored(i)
            for m, stream in enumerate(streams):
                streams[m] = gpt.block(weights, stream, self.plan.model.heads)
            del weights, stream
        final, total, count = self._anchored(self.plan.last), 0.0, 0
        for batch, stream in zip(batches, streams, strict=True):
            targets = batch[:, 1:]
            total += head_loss(final, embedding["token"], stream, targets).item() * targets.numel()
            count += targets.numel()
        return total / count

    def _anchored(self, i: int) -> gpt.Weights:
        release_free_memory()
        return views(self.fragments[i], units_to_float(self.anchors[i]).to(self.device))

    # ---- keeping ---------------------------------------------------------------------------------------------

    def commit(self, closing: bool = False) -> None:
        """A state on disk: what is there is now the state. `closing`: with what only memory held."""
        self.flush()
        self.executor.drain()
        if not self.plan.commits_steps:
            self.store.write_memory_records(KINDS if closing else ("anchor", *EXCHANGE_KINDS))
        held = any(
            self.store.memory_buffer(kind, i) is not None
            for kind in TRAINING_KINDS
            for i in range(len(self.fragments))
        )
        self.store.commit(self.describe(self.progress), whole=closing or not held)

    def _mend(self) -> None:
        """What the manifest said is not whole begins anew: the replica at the anchor, all else at zero, as the store
        has it then, and the moments with a warm-up."""
        void = self.store.invalid_kinds
        if void & set(TRAINING_KINDS):
            self.progress = replace(
                self.progress, optimizer_steps=0, warmup_steps_left=WARMUP_STEPS
            )
            self.reset_round()
        elif void and any(self.progress.prediction):
            self.reset_round()  # the guess in the replica was made of a momentum that may be gone
        elif void:
            self.commit()
        self.executor.invalidate_cached_weights()

    def state_dict(self) -> dict[str, Tensor]:
        """All that a restart needs besides the anchor's heads, on the host, by reference where it lies there. The
        replica is not in it: a restart begins a round. For states in memory; one on disk is its own."""
        self.flush()
        self.apply_queued()
        tensors = {
            "progress": torch.tensor(
                [self.progress.optimizer_steps, self.progress.warmup_steps_left]
            )
        }
        for i, fragment in enumerate(self.fragments):
            m, v = AdamMoments.of(
                self.plan, self.store.memory_record("moments", i, 0), fragment.size
            ).to_float32()
            tensors |= {f"m.{i}": m.cpu(), f"v.{i}": v.cpu()}
            for kind, shelf in self._shelves():
                tensors[f"{kind}.{i}"] = shelf[i]
        return tensors

    def _shelves(self) -> list[tuple[str, FragmentSequence]]:
        floats = FragmentSequence(self.store, "momentum", torch.float32)
        return [
            ("anchor", self.anchors),
            ("momentum", floats),
            ("feedback", FragmentSequence(self.store, "feedback")),
        ]

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes back what `state` gave, of any plan, and begins a round. Raises StateError, with nothing changed, if
        it does not fit."""
        wanted: dict[str, tuple[int, torch.dtype]] = {"progress": (2, torch.int64)}
        for i, fragment in enumerate(self.fragments):
            wanted |= {
                f"{kind}.{i}": (fragment.size, torch.float32) for kind in ("m", "v", "momentum")
            }
            wanted |= {
                f"{kind}.{i}": (fragment.size, torch.int32) for kind in ("anchor", "feedback")
            }
        given = {name: (tensors[name].numel(), tensors[name].dtype) for name in tensors}
        if wrong := sorted(name for name, _ in wanted.items() ^ given.items()):
            raise StateError(f"the saved state is not of this model: '{wrong[0]}' does not fit")
        updates, warming = tensors["progress"].tolist()
        self.progress = EngineProgress(
            optimizer_steps=updates, warmup_steps_left=warming, prediction=self._nothing
        )
        for i in range(len(self.fragments)):
            for kind, shelf in self._shelves():
                shelf[i] = tensors[f"{kind}.{i}"]
            m, v = tensors[f"m.{i}"], tensors[f"v.{i}"]
            for t in range(self.plan.tile_count(i)):
                begin, end = self.plan.bounds(i, t)
                record = self.tiles.record("moments", i, t, 4, reads=False)
                AdamMoments.of(self.plan, record, end - begin).load_float32(
                    m[begin:end], v[begin:end]
                )
                self.store.store_tile("moments", i, t, record)
        self.reset_round()

    def close(self) -> None:
        """Ends the lanes. The state stays as the last commit left it."""
        self.executor.close()
        self.store.close()
