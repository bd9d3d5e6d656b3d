"""One machine's training under a plan: local steps on a replica, and its exchange with the anchor.

A step is a program of operations (`planning/program.py`), which the executor runs. Between steps,
everything (`end_round`, `queue_updates`, `evaluate`) works fragment by fragment and tile by tile,
so that a model larger than memory is exchanged and evaluated like a small one. All methods are
called from one thread.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from barnraise.errors import StateError
from barnraise.models.functions import functions_of
from barnraise.models.weights import Weights, views
from barnraise.planning import program
from barnraise.planning.hardware import retain_freed_memory, return_freed_memory
from barnraise.planning.memory_model import sampled_at_once
from barnraise.planning.plan import STATE_KINDS, Plan
from barnraise.spec import Recipe
from barnraise.swap.activations import Activations
from barnraise.swap.anchor_tracking import AnchorTracking
from barnraise.swap.device import release_device_memory
from barnraise.swap.executor import (
    DecodableUpdate,
    EngineProgress,
    Executor,
    PendingUpdate,
    join_norms,
    naming_failures,
    sum_of_updates,
)
from barnraise.swap.forward_backward import ForwardBackward
from barnraise.swap.fused_loss import Head, head_loss
from barnraise.swap.muon_moments import find_optimizer, refuse_other_optimizer
from barnraise.swap.outer_optimizer import OuterOptimizer, RoundStart
from barnraise.swap.precision import units_to_float
from barnraise.swap.sampler import Sampler, SamplingSettings, TokenRange
from barnraise.swap.state_store import (
    EXCHANGE_KINDS,
    TRAINING_KINDS,
    FragmentSequence,
    StateStore,
)
from barnraise.swap.tiles import Tile, Tiles

UPDATES_PER_STEP = 16  # updates applied at a time: the sum of so many stays below 2**31
# The end of a round uses buffers as large as a fragment. Before larger ones than this, the engine
# returns to the system what the step has freed; smaller ones find room in that.
SMALL_BUFFER_BYTES = 4 << 20
WARMUP_STEPS = 20  # steps over which the learning rate recovers after Adam's moments were lost

# An int32 [n] tensor of units → the payload, and the int32 [n] units that the payload decodes to.
Encode = Callable[[Tensor], tuple[bytes, Tensor]]


class AnchorLike(Protocol):
    """The part of the anchor that the engine needs: the record of the updates in it."""

    def record(self, header: Any) -> None:
        """Record that the update with this header was added to the anchor's fragments."""
        ...


@dataclass(frozen=True)
class StepStats:
    """The result of one step.

    Attributes:
        loss: mean cross-entropy before the step, in nats a token.
        tokens: tokens trained on; 0 for an abandoned step.
        seconds: wall-clock time.
        norm: L2 norm of the whole gradient before clipping.
        abandoned: whether the loss or gradient was not finite. The round's progress is then
            dropped: the replica is the anchor again.
        interrupted: whether the step was stopped. What the round had learnt before it stays.
    """

    loss: float
    tokens: int
    seconds: float
    norm: float
    abandoned: bool = False
    interrupted: bool = False


@dataclass(frozen=True)
class EncodedFragment:
    """One fragment's part of an update.

    Attributes:
        fragment: the fragment's index.
        payload: the encoded part.
        units: int32 [n], what the payload decodes to.
    """

    fragment: int
    payload: bytes
    units: Tensor


class Engine:
    """Train a replica step by step and keep it consistent with the anchor.

    Attributes:
        progress: how far the state in the store has come.
    """

    def __init__(
        self,
        plan: Plan,
        recipe: Recipe,
        store: StateStore,
        anchor: AnchorLike,
        describe: Callable[[EngineProgress], str] = lambda progress: "",
        progress: EngineProgress | None = None,
    ) -> None:
        """Build the executor and bring the state into a consistent form.

        `describe` returns the header that is committed with a state on disk. `progress` is how far
        the state in `store` has come; None for a fresh state.
        """
        assert plan.optimizer == recipe.optimizer, "the plan is for another optimizer"
        self.plan = plan
        self.recipe = recipe
        self.store = store
        self.anchor = anchor
        self.describe = describe
        self.device = torch.device(plan.device)
        self.fragments = plan.fragments
        # With state on disk or layers on a GPU, a plan may need all of the RAM that it may use.
        retain_freed_memory(plan.device == "cpu" and not plan.on_disk)
        self.executor = Executor(plan, recipe, store, self._describe_commit)
        self.buffers = self.executor.buffers
        self.anchors = self.executor.anchors
        self._tiles = self._create_tiles()
        self._outer_optimizer = (
            AnchorTracking(store, self._tiles)
            if recipe.mixes_weights
            else OuterOptimizer(recipe, store, self._tiles)
        )
        self._no_prediction = (0.0,) * len(self.fragments)
        saved = progress or EngineProgress()
        self._target_prediction = saved.prediction or self._no_prediction
        self.progress = replace(
            saved,
            prediction=self._target_prediction,
            residual=saved.residual or self._no_prediction,
            forecast=saved.forecast or self._no_prediction,
        )
        self._queued_updates: list[DecodableUpdate] = []
        self._pending: PendingUpdate | None = None
        if progress is None:
            self.reset_round()
        else:
            self._recover_invalid_state()

    def _create_tiles(self) -> Tiles:
        return Tiles(self.store)

    # ---- local steps ---------------------------------------------------------------------------

    @property
    def progress_with_pending(self) -> EngineProgress:
        """Return the progress including the step whose update is still pending."""
        return self._pending.progress if self._pending else self.progress

    @property
    def round_tokens(self) -> int:
        """Return the tokens trained on since the last `end_round`, for the next header."""
        return self.progress_with_pending.round_tokens

    def step(
        self,
        batches: list[Tensor],
        rate_scale: float = 1.0,
        position: int = 0,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> StepStats:
        """Make one step on the mean gradient of the micro-batches, clipped as the plan says.

        Muon's matrices are not clipped: their updates do not depend on the gradient's norm.

        Args:
            batches: micro-batches of tokens, int64 [sequences, context + 1] each.
            rate_scale: factor on the recipe's learning rates (`learning_rate_scale`).
            position: where in the data the next step begins.
            should_stop: called between parts of the computation; ends the step without its update.
                With layer-wise clipping, fragments whose update is complete by then have taken the
                step, and the others have not.

        Raises:
            StateError: a tier failed. What the last manifest names is intact then.
            DamageError: the disk returned other bytes than were written to it.
        """
        started = time.perf_counter()
        tokens = [batch.shape[0] * (batch.shape[1] - 1) for batch in batches]
        passes = self._deal_passes(batches, [count / sum(tokens) for count in tokens], should_stop)
        if self.plan.clipping == "exact":
            update = self._step_with_exact_clipping(passes, rate_scale, sum(tokens), position)
        else:
            update = self._step_with_layerwise_clipping(passes, rate_scale, sum(tokens), position)
        loss = norm = math.nan
        if not passes[0].is_interrupted:
            loss, norm = self._loss_and_norm(passes)
        if passes[0].is_interrupted:
            self.executor.drain()
            for each in passes:
                each.finish()
            if update.is_interrupted:  # its program has applied what others sent
                self.progress = self._progress_after(update)
            self.executor.invalidate_cached_weights()
            return StepStats(math.nan, 0, time.perf_counter() - started, math.nan, interrupted=True)
        for each in passes:
            each.finish()
        abandoned = not (math.isfinite(loss) and math.isfinite(norm))
        if abandoned:
            self.progress = replace(self.progress, position=position)
            self.reset_round()
        elif update.is_ready:  # and applied: its program has ended
            self.progress = update.progress
        else:
            update.clip_to(norm, self.recipe.clip)
            self._pending = update
            if not self.plan.defers_updates:
                self.flush()
        seconds = time.perf_counter() - started
        return StepStats(loss, 0 if abandoned else sum(tokens), seconds, norm, abandoned)

    def _deal_passes(
        self, batches: list[Tensor], shares: list[float], should_stop: Callable[[], bool]
    ) -> list[ForwardBackward]:
        """Deal the micro-batches to the devices in contiguous runs, as the plan says.

        The first device's passes ask whether to stop, in this thread; the others' follow them.
        """
        plans = self.plan.device_plans
        counts = [plan.micro_batches for plan in plans] if self.plan.devices else [len(batches)]
        passes: list[ForwardBackward] = []
        for number, (plan, end) in enumerate(zip(plans, accumulate(counts), strict=True)):
            device, run = torch.device(plan.device), slice(end - counts[number], end)
            passes.append(
                ForwardBackward(
                    plan,
                    [batch.to(device) for batch in batches[run]],
                    shares[run],
                    self._open_activations(number),
                    passes[0].has_ended_early if number else should_stop,
                )
            )
        return passes

    def _open_activations(self, device: int) -> Activations:
        """Return an empty store of a device's activations for one step."""
        return self.executor.new_activations(device)

    def _step_with_exact_clipping(
        self, passes: Sequence[ForwardBackward], rate_scale: float, tokens: int, position: int
    ) -> PendingUpdate:
        """Compute a gradient, and apply the previous step's update on the way.

        Clipping needs the norm of the whole gradient, which is known when the last backward has
        ended. So this step's update becomes pending, and runs during the next step's forward.
        """
        previous = self._pending
        if previous is not None:
            self._attach_arrivals(previous)
        update = self._new_update(passes[0].norms, rate_scale, tokens, position)
        self._run_step(passes, previous, pending=previous is not None)
        if previous is not None:
            self.progress = previous.progress
            self._pending = None
        return update

    def _step_with_layerwise_clipping(
        self, passes: Sequence[ForwardBackward], rate_scale: float, tokens: int, position: int
    ) -> PendingUpdate:
        """Compute a gradient, and update each fragment as soon as its own gradient is complete."""
        update = self._new_update(passes[0].norms, rate_scale, tokens, position)
        self._attach_arrivals(update)
        self._run_step(passes, update, pending=False)
        return update

    def _run_step(
        self, passes: Sequence[ForwardBackward], update: PendingUpdate | None, pending: bool
    ) -> None:
        """Run one step's program, which applies `update` and the arrivals attached to it."""
        compile_program = partial(program.step_program, pending=pending)
        if update is None or not update.arrivals:
            self.executor.run(compile_program, update, passes)
            return
        self.executor.drain()  # the anchor's unused slots are free once the last commit has ended
        self.executor.run(compile_program, update, passes)
        self.executor.drain()
        self._record_arrivals(update)

    def _new_update(
        self, norms: dict[int, Tensor], rate_scale: float, tokens: int, position: int
    ) -> PendingUpdate:
        """Return the update of a step that is about to run, which fills `norms` in."""
        before = self.progress_with_pending
        warmup = 1 - before.warmup_steps_left / (WARMUP_STEPS + 1)
        progress = replace(
            before,
            position=position,
            round_tokens=before.round_tokens + tokens,
            optimizer_steps=before.optimizer_steps + 1,
            warmup_steps_left=max(0, before.warmup_steps_left - 1),
        )
        return PendingUpdate(
            clipping=self.plan.clipping,
            learning_rate=self.recipe.learning_rate * rate_scale * warmup,
            matrix_rate=self.recipe.peak_matrix_rate * rate_scale * warmup,
            step_number=progress.optimizer_steps,
            prediction_growth=self._no_prediction,
            progress=progress,
            norms=norms,
        )

    def _loss_and_norm(self, passes: Sequence[ForwardBackward]) -> tuple[float, float]:
        """Return the step's mean loss and its gradient's norm, once they are computed."""
        losses, norms = self._read_scalars(passes)
        return sum(losses), join_norms(norms)

    def _read_scalars(self, passes: Sequence[ForwardBackward]) -> tuple[list[float], list[float]]:
        """Return the losses' shares and the local fragments' norms, once they are computed."""
        self.executor.wait_for_gradients()
        norms = [passes[0].norms[i] for i in self.plan.local_fragments]
        if self.plan.devices:  # whose gradients are added in memory
            groups = [*(each.losses for each in passes), norms]
        else:
            losses = passes[0].losses
            groups = [[scalar.double().to(self.device) for scalar in (*losses, *norms)]]
        # Each of these is a wait for a device, the step's only ones.
        values = [value for group in groups for value in torch.stack(group).tolist()]
        return values[: -len(norms)], values[-len(norms) :]

    def _attach_arrivals(self, update: PendingUpdate) -> None:
        """Attach queued updates and the growth of the prediction to an update about to run."""
        update.arrivals = self._queued_updates[:UPDATES_PER_STEP]
        self._queued_updates = self._queued_updates[UPDATES_PER_STEP:]
        update.prediction_growth = self._prediction_growth(update.progress)
        update.progress = replace(update.progress, prediction=self._target_prediction)

    def flush(self) -> None:
        """Apply the pending update now."""
        update = self._pending
        if update is not None:
            self.executor.run(program.flush_program, update)
            self.progress = update.progress
            self._pending = None

    def _describe_commit(self, update: PendingUpdate) -> str:
        """Return the header for a running program's commit, when all its arrivals are added."""
        self._record_arrivals(update)
        return self.describe(self._progress_after(update))

    def _progress_after(self, update: PendingUpdate) -> EngineProgress:
        """Return the progress once an update is applied, or all of it but its own step."""
        if update.is_interrupted:
            return replace(self.progress, prediction=update.progress.prediction)
        return update.progress

    def _record_arrivals(self, update: PendingUpdate) -> None:
        """Tell the anchor which updates a program has added to it."""
        for arrival in update.arrivals:
            self.anchor.record(arrival.header)
        update.arrivals = []

    # ---- exchange ------------------------------------------------------------------------------

    def queue_updates(
        self, *updates: DecodableUpdate, prediction: tuple[float, ...] | None = None
    ) -> None:
        """Queue other authors' updates, and set the prediction for updates in flight.

        May be called at any moment of a round. A state in memory applies both at once; a state on
        another tier applies them while the next step moves it anyway, or in `apply_queued`. Where
        machines average weights, updates change the anchor only, at once, without a prediction.

        Args:
            updates: what to add to the anchor and to the replica.
            prediction: for each fragment, by how many of its outer momenta the replica is to be
                ahead of the anchor. None leaves the last prediction.
        """
        if not updates and prediction in (None, self._target_prediction):
            return
        self._queued_updates += updates
        if prediction is not None:
            self._target_prediction = prediction
        if not (self.plan.on_disk or self.plan.staged) or self.recipe.mixes_weights:
            self.apply_queued()

    @torch.no_grad()
    def apply_queued(self) -> None:
        """Apply all queued updates and the prediction now, and wait for all operations."""
        self.executor.drain()
        while self._queued_updates or self._target_prediction != self.progress.prediction:
            arrivals = self._queued_updates[:UPDATES_PER_STEP]
            growth = self._prediction_growth(self.progress)
            for i in self.plan.local_fragments:
                units = sum_of_updates(arrivals, i)
                if units is None and not growth[i]:
                    continue
                if self.recipe.mixes_weights and units is not None:
                    # The replica receives the others' progress with the averaging.
                    self.anchors[i] = self.anchors[i].add_(units)
                    continue
                for tile in self._tiles.iterate(i):
                    self.executor.apply_to_tile(tile, units, growth[i])
                del units  # free it before the next fragment's units are allocated
            for arrival in arrivals:
                self.anchor.record(arrival.header)
            self._queued_updates = self._queued_updates[len(arrivals) :]
            self._change_progress(prediction=self._target_prediction)
            self.executor.invalidate_cached_weights()
            if self.plan.commits_steps and self._pending is None:
                self.commit()

    def _prediction_growth(self, progress: EngineProgress) -> tuple[float, ...]:
        """Return by how much each fragment's prediction has to grow from what `progress` states."""
        pairs = zip(self._target_prediction, progress.prediction, strict=True)
        return tuple(target - current for target, current in pairs)

    def _change_progress(self, **changes: Any) -> None:
        """Change fields of the progress, with and without the pending update."""
        self.progress = replace(self.progress, **changes)
        if self._pending is not None:
            self._pending.progress = replace(self._pending.progress, **changes)

    def end_round(
        self,
        encode: Encode,
        weight: float,
        fragments: Collection[int] | None = None,
        carries_residual: bool = False,
        has_momentum: bool = True,
    ) -> Iterator[EncodedFragment]:
        """End the round of some fragments: compute, encode and apply this author's update.

        Consume the iterator completely, then record the update's header with the anchor and
        `commit`. With `fragments` given, a pending step counts towards their next round, so that it
        may stay pending.

            Δ ← w · (anchor − r · e − g · m − replica)
            m ← μ · m + Δ
            s = η · (Δ + μ · m)
            e ← round(β · e) + round(s / unit)
            update = −C(e), e ← e − C(e)
            replica ← anchor − r · e − g · m

        Without momentum s = min(1, η · (1 + μ)) · Δ and m ← s / η, which only serves predictions; a
        round with momentum after it begins with m = 0.

        w: `weight`; g: the fragment's prediction; m: outer momentum; μ: `recipe.outer_momentum`;
        η: `recipe.outer_rate`; e: error feedback; β: `recipe.feedback_decay`; C: `encode`; r: 1 if
        the replica contains the residual, which the round before decided for this one. The two
        roundings are separate, so that with β = 1 everything sent plus the residual is exactly the
        sum of the rounded steps.

        Args:
            encode: compresses int32 [n] units.
            weight: this author's share of all training, 0 to 1.
            fragments: indices of the fragments whose round ends; None ends the round of all.
            carries_residual: whether their next round begins with what `encode` leaves out; for
                compressions that send few values.
            has_momentum: whether the update contains momentum of the rounds before.

        Yields:
            For each of them in order, the encoded part, which is by then applied to the anchor and
            the replica.
        """
        if fragments is None:
            self.flush()
        self.apply_queued()
        due = [i for i in self.plan.local_fragments if fragments is None or i in fragments]
        if any(4 * self.fragments[i].size > SMALL_BUFFER_BYTES for i in due):
            return_freed_memory()
        for i in due:
            with torch.no_grad():  # as a decorator it would hold a reference to the last part
                values = self.buffers.fragment_scratch(i)
                start = self._round_start(i)
                self._outer_optimizer.accumulate(i, values, weight, start, has_momentum)
                part = EncodedFragment(i, *encode(values))
                self._mark_round(i, carries_residual, has_momentum)
                start = self._round_start(i)
                self._outer_optimizer.apply_published(i, values, part.units, start)
            yield part
            del part  # free it before the next fragment's part is allocated
        self.executor.invalidate_cached_weights()
        self._change_progress(round_tokens=0)

    def _round_start(self, i: int) -> RoundStart:
        """Return where fragment i's replica is at the beginning of a round."""
        progress = self.progress
        return RoundStart(
            progress.prediction[i], bool(progress.residual[i]), bool(progress.forecast[i])
        )

    def _mark_round(self, i: int, carries_residual: bool, has_momentum: bool) -> None:
        """Record how fragment i's next round begins: with the residual, and with which momentum."""
        residual, forecast = list(self.progress.residual), list(self.progress.forecast)
        residual[i], forecast[i] = float(carries_residual), float(not has_momentum)
        self._change_progress(residual=tuple(residual), forecast=tuple(forecast))

    # ---- averaging weights ---------------------------------------------------------------------

    def read_replica(self) -> Tensor:
        """Return a copy of the replica, fp32 [all fragments' elements] on the host."""
        replica = torch.empty(sum(fragment.size for fragment in self.fragments))
        for tile, place in self._replica_tiles(changes=False):
            replica[place].copy_(tile.host_master())
        return replica

    @torch.no_grad()
    def add_to_replica(self, change: Tensor) -> None:
        """Add fp32 [all fragments' elements], on the host, to the replica."""
        for tile, place in self._replica_tiles():
            tile.set_master(tile.host_master() + change[place])
        self.executor.invalidate_cached_weights()

    @torch.no_grad()
    def replace_replica(self, replica: Tensor) -> None:
        """Replace the replica by fp32 [all fragments' elements] on the host."""
        for tile, place in self._replica_tiles():
            tile.set_master(replica[place])
        self.executor.invalidate_cached_weights()

    def _replica_tiles(self, changes: bool = True) -> Iterator[tuple[Tile, slice]]:
        """Yield all tiles, and the place of each in the vector of all fragments' elements."""
        self.flush()
        self.executor.drain()
        first = 0
        for i, fragment in enumerate(self.fragments):
            for tile in self._tiles.iterate(i, changes):
                yield tile, slice(first + tile.begin, first + tile.end)
            first += fragment.size

    @torch.no_grad()
    def reset_round(self) -> None:
        """Set the replica to the anchor; drop what the round has learnt, and the prediction."""
        self._pending = None
        self._target_prediction = self.progress.prediction
        self.apply_queued()
        for i in self.plan.local_fragments:
            for tile in self._tiles.iterate(i, reads=False):
                record = self.store.load_tile("anchor", i, tile.number)
                units = record[: 4 * tile.size].view(torch.int32)
                tile.set_master(units_to_float(units))
        self.executor.invalidate_cached_weights()
        self._target_prediction = self._no_prediction
        self.progress = replace(
            self.progress,
            round_tokens=0,
            prediction=self._no_prediction,
            residual=self._no_prediction,
        )
        if self.plan.on_disk and self.store.header is not None:
            self.commit()

    def reset_feedback(self) -> None:
        """Set the error feedback to zero.

        For a ledger that holds an own update newer than the saved feedback, whose residual that
        update may already contain. The round is dropped: its replica may be ahead by the feedback.
        """
        self.store.clear("feedback")
        self.reset_round()

    def reset_momentum(self) -> None:
        """Set the outer momentum to zero after an update that it followed was retracted.

        The error feedback stays.
        """
        self._target_prediction = self._no_prediction  # it is a multiple of the momentum
        self.apply_queued()
        self.store.clear("momentum")

    def replace_fragment(self, index: int, units: Tensor) -> None:
        """Replace a damaged fragment of the anchor by int32 [n] `units`. The round is dropped."""
        self.executor.drain()
        self.anchors[index] = units
        self.reset_round()

    @torch.no_grad()
    def evaluate(
        self, batches: Iterable[Tensor], should_stop: Callable[[], bool] = lambda: False
    ) -> float:
        """Return the mean loss of the *anchor*, in nats a token; NaN if it was stopped.

        Peers with one anchor get the same number. Goes layer by layer over all batches, so that one
        layer's weights are unpacked at a time.
        """
        self.apply_queued()
        # A GPU holds one sequence at a time, and the streams wait in RAM.
        on_gpu = self.device.type != "cpu"
        sequences = 1 if on_gpu else self.plan.sequences
        parts = [part for batch in batches for part in batch.split(sequences)]
        with naming_failures("validation failed"):
            functions = functions_of(self.plan.model)
            weights = self._anchor_weights(0)
            streams = [
                functions.embed(weights, part[:, :-1].to(self.device)).cpu() for part in parts
            ]
            del weights  # free them before the next fragment's are unpacked
            if not self._pass_anchor_blocks(streams, should_stop):
                return math.nan
            return self._mean_loss(parts, streams)

    def _pass_anchor_blocks(self, streams: list[Tensor], should_stop: Callable[[], bool]) -> bool:
        """Replace the inputs of the anchor's blocks by their outputs; return whether it ended.

        The streams, fp32 [sequences, context, width], wait on the host.
        """
        functions = functions_of(self.plan.model)
        for i in self.plan.blocks:
            weights = self._anchor_weights(i)
            for m, stream in enumerate(streams):
                if should_stop():
                    return False
                stream = functions.block(weights, stream.to(self.device), self.plan.model)
                streams[m] = stream.cpu()
            del weights, stream
        return True

    def _mean_loss(self, parts: list[Tensor], streams: list[Tensor]) -> float:
        """Return the mean loss of the anchor's head for the last block's outputs."""
        fragment, name = self.plan.model.head_table
        table = self._anchor_weights(fragment)
        final = table if fragment else self._anchor_weights(self.plan.last_fragment)
        head = Head(self.plan.model, final, table[name])
        total = 0.0
        count = 0
        for part, stream in zip(parts, streams, strict=True):
            targets = part[:, 1:].to(self.device)
            loss = head_loss(head, stream.to(self.device), targets)
            total += loss.item() * targets.numel()
            count += targets.numel()
        return total / count

    def generate(
        self, prompts: Sequence[Sequence[int]], settings: SamplingSettings, vocabulary: TokenRange
    ) -> Iterator[tuple[int, int]]:
        """Generate text with the *anchor*, for as many prompts together as memory was planned for.

        A prompt and its new tokens are `SAMPLE_WINDOW` tokens at most.

        Yields:
            (number of the prompt, its next token).
        """
        self.apply_queued()
        sampler = Sampler(
            self.plan.model, lambda i: units_to_float(self.anchors[i]), device=self.plan.device
        )
        at_once = sampled_at_once(self.plan)
        for first in range(0, len(prompts), at_once):
            group = replace(settings, seed=settings.seed + first)
            with naming_failures("generating text failed"):
                for number, token in sampler.generate(
                    prompts[first : first + at_once], group, vocabulary
                ):
                    yield first + number, token

    def _anchor_weights(self, i: int) -> Weights:
        """Return a copy of fragment i of the anchor as named fp32 weights on the device."""
        return_freed_memory()
        return views(self.fragments[i], self._load_anchor(i))

    def _load_anchor(self, i: int) -> Tensor:
        """Return a copy of fragment i of the anchor, fp32 [n], on the device."""
        return units_to_float(self.anchors[i]).to(self.device)

    # ---- saving and loading --------------------------------------------------------------------

    def commit(self, closing: bool = False) -> None:
        """Make what lies on disk the state to recover.

        Args:
            closing: also write what only memory holds, because the engine is about to close.
        """
        self.flush()
        self.executor.drain()
        if not self.plan.commits_steps:
            self.store.write_memory_records(STATE_KINDS if closing else ("anchor", *EXCHANGE_KINDS))
        trains_in_memory = any(
            self.store.memory_buffer(kind, i) is not None
            for kind in TRAINING_KINDS
            for i in self.plan.local_fragments
        )
        header = self.describe(self.progress)
        self.store.commit(header, training_valid=closing or not trains_in_memory)

    def _recover_invalid_state(self) -> None:
        """Restart the kinds of state that the manifest marks as invalid and the store zeroes.

        The replica restarts at the anchor, and Adam's moments at zero with a warm-up.
        """
        invalid = self.store.invalid_kinds
        if invalid & set(TRAINING_KINDS):
            self.progress = replace(
                self.progress, optimizer_steps=0, warmup_steps_left=WARMUP_STEPS
            )
            self.executor.mean_gradients.clear()
            self.reset_round()
        elif invalid and (any(self.progress.prediction) or any(self.progress.residual)):
            self.reset_round()  # the replica is ahead by momentum or residual, which may be lost
        elif invalid:
            self.commit()
        self.executor.invalidate_cached_weights()

    def state_dict(self) -> dict[str, Tensor]:
        """Return all that a restart needs besides the anchor's heads.

        Host tensors, by reference where possible. The replica is included only where machines
        average weights; otherwise a restart begins a round, without predictions, so momentum that
        only serves these is left out. For states in memory; a state on disk is its own copy.
        """
        self.flush()
        self.apply_queued()
        counters = [self.progress.optimizer_steps, self.progress.warmup_steps_left]
        tensors = {"progress": torch.tensor(counters)}
        for i in self.plan.local_fragments:
            fragment = self.fragments[i]
            m, v = self._tiles.read_moments(i)
            tensors |= {f"m.{i}": m, f"v.{i}": v}
            if self.executor.accumulates:
                mean = self.executor.mean_gradients.find(fragment, self._moments_device(i))
                tensors[f"mean.{i}"] = mean.cpu()
            for kind, sequence in self._exchange_state():
                tensors[f"{kind}.{i}"] = sequence[i]
            if self.progress.forecast[i]:
                tensors[f"momentum.{i}"] = torch.zeros(fragment.size)
        if self.recipe.mixes_weights:
            tensors["replica"] = self.read_replica()
        return tensors

    def _exchange_state(self) -> list[tuple[str, FragmentSequence]]:
        """Return the kinds of state that the exchange needs, by name."""
        return [
            ("anchor", self.anchors),
            ("momentum", FragmentSequence(self.store, "momentum", torch.float32)),
            ("feedback", FragmentSequence(self.store, "feedback")),
        ]

    @torch.no_grad()
    def load_state_dict(
        self, tensors: Mapping[str, Tensor], fragments: Collection[int] | None = None
    ) -> None:
        """Load what `state_dict` of an engine under any plan returned, and begin a round.

        Args:
            tensors: the state.
            fragments: of this engine's, those to load; None: all, and the state has no others.

        Raises:
            StateError: the tensors do not fit this model; nothing has changed.
        """
        second_moments = tensors.get(f"v.{self.plan.blocks.start}")
        refuse_other_optimizer(self.plan, find_optimizer(self.fragments[1], second_moments))
        self._check_shapes(tensors, fragments)
        optimizer_steps, warmup_steps_left = tensors["progress"].tolist()
        self.progress = EngineProgress(
            optimizer_steps=optimizer_steps,
            warmup_steps_left=warmup_steps_left,
            prediction=self._no_prediction,
            residual=self._no_prediction,
            forecast=self._no_prediction,
        )
        for i in self.plan.local_fragments if fragments is None else fragments:
            for kind, sequence in self._exchange_state():
                sequence[i] = tensors[f"{kind}.{i}"]
            self._tiles.write_moments(i, tensors[f"m.{i}"], tensors[f"v.{i}"])
            if self.executor.accumulates:
                self.executor.mean_gradients.replace(
                    self.fragments[i], tensors[f"mean.{i}"], self._moments_device(i)
                )
        self.reset_round()
        if self.recipe.mixes_weights:
            self.replace_replica(tensors["replica"])

    def _moments_device(self, i: int) -> torch.device:
        """Return where fragment i's moments lie, and its gradients when they are absorbed."""
        return self.store.memory_record("moments", i, 0).device

    def _check_shapes(
        self, tensors: Mapping[str, Tensor], fragments: Collection[int] | None
    ) -> None:
        """Raise StateError unless names, sizes and types are those of this model's state."""
        expected: dict[str, tuple[int, torch.dtype]] = {"progress": (2, torch.int64)}
        if self.recipe.mixes_weights:
            elements = sum(fragment.size for fragment in self.fragments)
            expected["replica"] = (elements, torch.float32)
        means = ("mean",) if self.executor.accumulates else ()
        for i in self.plan.local_fragments if fragments is None else fragments:
            fragment = self.fragments[i]
            second_moments = self.plan.tile_layouts(i)[-1].second_end
            expected[f"v.{i}"] = (second_moments, torch.float32)
            for kind in ("m", "momentum", *means):
                expected[f"{kind}.{i}"] = (fragment.size, torch.float32)
            for kind in ("anchor", "feedback"):
                expected[f"{kind}.{i}"] = (fragment.size, torch.int32)
        names = set(tensors) if fragments is None else expected.keys() & tensors.keys()
        actual = {name: (tensors[name].numel(), tensors[name].dtype) for name in names}
        wrong = sorted(name for name, _ in expected.items() ^ actual.items())
        if wrong:
            raise StateError(f"the saved state is not of this model: '{wrong[0]}' does not fit")

    def close(self) -> None:
        """Stop the lanes, close the store, and free the memory of both at once.

        The state stays as the last commit left it.
        """
        self.executor.close()
        self.store.close()
        self._queued_updates.clear()
        self._pending = None
        return_freed_memory()
        release_device_memory(self.device)
