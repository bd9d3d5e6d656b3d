"""Runs a program of operations: one method for each kind, on whatever tier its buffers lie."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from barnraise.models.gpt2 import views
from barnraise.planning import program as program_module
from barnraise.planning.plan import Plan
from barnraise.planning.program import Hazards, Kind, Op
from barnraise.spec import Recipe
from barnraise.swap.activations import Activations, HostActivations
from barnraise.swap.adam_moments import AdamMoments
from barnraise.swap.adamw import sum_of_squares
from barnraise.swap.arena import Leaves, units_to_float
from barnraise.swap.buffers import Buffers
from barnraise.swap.forward_backward import ForwardBackward
from barnraise.swap.lanes import WorkerLane, as_state_error
from barnraise.swap.state_store import FragmentSequence, StateStore


class DecodableUpdate(Protocol):
    header: Any

    def decode(self, index: int) -> Tensor | None: ...


@dataclass(frozen=True)
class EngineProgress:
    """How far the state has come: `position` in the data, tokens of the round, AdamW's steps, how many more warm up
    after a loss of moments, and the guess in the replica: by how many of its momenta each fragment is where updates
    under way are thought to take the anchor (empty: nowhere)."""

    position: int = 0
    round_tokens: int = 0
    optimizer_steps: int = 0
    warmup_steps_left: int = 0
    prediction: tuple[float, ...] = ()


@dataclass
class PendingUpdate:
    """One step's updates: the rate, AdamW's count with this one, and by how much gradients are divided; `shrink` None:
    by each fragment's own norm. `arrivals` are folded in on the way, and each fragment's guess grows by `guess`.
    `progress`: once it is done."""

    learning_rate: float
    step_number: int
    gradient_divisor: float | None
    prediction_growth: tuple[float, ...]
    progress: EngineProgress
    norms: dict[int, Tensor] = field(default_factory=dict)
    arrivals: list[DecodableUpdate] = field(default_factory=list)
    is_cancelled: bool = False  # something was not finite: nothing is stepped any more


class Executor:
    """Lanes, buffers, and what is done in them. `committed(update)` is asked for the mark of a COMMIT."""

    def __init__(
        self,
        plan: Plan,
        recipe: Recipe,
        store: StateStore,
        committed: Callable[[PendingUpdate], str],
    ):
        self.plan, self.recipe, self.store, self.committed = plan, recipe, store, committed
        self.device = torch.device(plan.device)
        self.buffers = Buffers(plan, store)
        self.anchors = FragmentSequence(store, "anchor")
        threads = torch.get_num_threads()
        on_device = (program_module.Lane.COMPUTE, program_module.Lane.IN, program_module.Lane.OUT)
        self.lanes = {
            lane: WorkerLane(
                lane,
                self.device if lane in on_device else None,
                inline=lane is program_module.Lane.COMPUTE,
                eager=lane is program_module.Lane.OPTIMIZER,
                threads=threads if lane is program_module.Lane.OPTIMIZER else 1,
            )
            for lane in program_module.Lane
        }
        torch.set_num_threads(threads)
        self._hazards = Hazards()
        self._cached: dict[int, int] = {}
        self._units: dict[
            int, tuple[Tensor | None, int]
        ] = {}  # fragment → what is folded in, tiles still to come
        self._failure: BaseException | None = None
        self._does = {kind: getattr(self, f"_{kind.name.lower()}") for kind in Kind}

    def run(
        self,
        write: Callable[..., program_module.Program],
        update: PendingUpdate | None,
        passes: ForwardBackward | None = None,
    ) -> None:
        """A program: `write(plan, …, cached=…)`. Returns when all that is done on this thread is; the rest goes on."""
        self.update, self.passes = update, passes
        program = write(self.plan, cached=self._cached)
        self._cached = {}  # until it went well
        for op in program.ops:
            call = self._does[op.kind](op)
            urgency = op.blocks[0] if op.blocks else 0
            event = self.lanes[op.lane].submit(
                self._guarded(op, call), self._hazards.before(op), op, urgency
            )
            self._hazards.note(op, event)
        self._cached = dict(program.cached)

    def _guarded(self, op: Op, call: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            if self._failure is not None:
                raise self._failure
            try:
                call()
            except (OSError, RuntimeError, MemoryError) as error:
                self._failure = self._failure or as_state_error(
                    error, f"the {op.kind} of {self._name(op)} failed"
                )
                raise self._failure from error
            except BaseException as error:
                self._failure = self._failure or error
                raise

        return run

    def _name(self, op: Op) -> str:
        return self.plan.fragments[op.blocks[0]].name if op.blocks else "the state"

    def drain(self) -> None:
        """Until every lane has done all it was given. Raises what one of them met."""
        for lane in self.lanes.values():
            lane.wait_until_idle()
        if self._failure is not None:
            raise self._failure
        self._hazards = Hazards()

    def invalidate_cached_weights(self) -> None:
        """The master copies were changed beside the programs: nothing in the slots is theirs any more."""
        self._cached = {}
        if self.plan.staged:
            for i in (0, self.plan.last):
                if self.plan.weights[i] != "device":
                    self.buffers.end_leaves(i).flat.data.copy_(self.buffers.host_weights(i))

    def new_activations(self) -> Activations:
        """For one step."""
        if self.plan.boundaries == "host":
            return HostActivations(self.lanes, self.buffers.streams)
        return Activations()

    def close(self) -> None:
        for lane in self.lanes.values():
            lane.close()

    # ---- kinds: each returns what its lane will do; buffers are chosen here, on the calling thread, in order --

    def _read(self, op: Op) -> Callable[[], None]:
        (i,), into = op.blocks, self.buffers.read_target(op)

        def read() -> None:
            for t in range(self.plan.tile_count(i)):
                self.store.read("weights", i, t, into[self.store.record_slice("weights", i, t)])

        return read

    def _load(self, op: Op) -> Callable[[], None]:
        target, source = self.buffers.load_endpoints(op)
        return lambda: target.data.copy_(source, non_blocking=True)

    def _embed(self, op: Op) -> Callable[[], None]:
        return lambda: self.passes.embed(self.buffers.end_leaves(0))

    def _forward(self, op: Op) -> Callable[[], None]:
        return lambda: self.passes.forward(op.blocks, self._leaves(op))

    def _head(self, op: Op) -> Callable[[], None]:
        def head() -> None:
            final, gradient = (
                self.buffers.end_leaves(self.plan.last),
                self.buffers.gradient(self.plan.last, -1),
            )
            gradient.zero_()
            self.buffers.head_gradient.zero_()
            final.accumulate_into(gradient)
            self.passes.head(final, self.buffers.end_leaves(0), self.buffers.head_gradient)
            if (
                self.plan.clipping != "exact"
            ):  # the losses are looked at before the first update of a step
                self.update.is_cancelled = not math.isfinite(float(sum(self.passes.losses)))

        return head

    def _backward(self, op: Op) -> Callable[[], None]:
        leaves = self._leaves(op)

        def backward() -> None:
            for i, mine, slot in zip(op.blocks, leaves, op.gradients, strict=True):
                gradient = self.buffers.gradient(i, slot)
                gradient.zero_()
                mine.accumulate_into(gradient)
            self.passes.backward(op.blocks, leaves)

        return backward

    def _leaves(self, op: Op) -> list[Leaves]:
        return [self.buffers.leaves(i, slot) for i, slot in zip(op.blocks, op.slots, strict=True)]

    def _embed_backward(self, op: Op) -> Callable[[], None]:
        def backward() -> None:
            gradient = self.buffers.gradient(0, -1)
            gradient.zero_()
            self.passes.embed_backward(
                views(self.plan.fragments[0], gradient), self.buffers.head_gradient
            )

        return backward

    def _norm(self, op: Op) -> Callable[[], None]:
        (i,), (slot,), norms = op.blocks, op.gradients, self.passes.norms
        return lambda: norms.update({i: sum_of_squares(self.buffers.gradient(i, slot)).sqrt_()})

    def _offload(self, op: Op) -> Callable[[], None]:
        (i,), (slot,) = op.blocks, op.gradients
        source, target = self.buffers.gradient(i, slot), self.buffers.host_gradient(i)
        return lambda: target.copy_(source, non_blocking=True)

    def _spill(self, op: Op) -> Callable[[], None]:
        (i,), (slot,) = op.blocks, op.gradients
        source = self.buffers.spill_source(i, slot)

        def spill() -> None:
            for t in range(self.plan.tile_count(i)):
                self.store.write(
                    "gradient", i, t, source[self.store.record_slice("anchor", i, t)]
                )  # four bytes as well

        return spill

    def _fetch(self, op: Op) -> Callable[[], None]:
        (i,), parts = op.blocks, self.buffers.ring_parts(op)

        def fetch() -> None:
            for kind, part in parts.items():
                self.store.read(kind, i, op.tile, part)

        return fetch

    def _update(self, op: Op) -> Callable[[], None]:
        (i,), update = op.blocks, self.update
        tiles = [op.tile] if op.tile >= 0 else range(self.plan.tile_count(i))

        def run() -> None:
            shrink = self._shrink(update, i)
            for t in tiles:
                moments, weights, gradient = self.buffers.update_parts(op, t)
                self._fold(update, i, t, weights, moments)
                if not update.is_cancelled:
                    moments.step(
                        self.plan.fragments[i], self.plan.bounds(i, t)[0], weights, gradient,
                        steps=update.step_number, rate=update.learning_rate, decay=self.recipe.weight_decay, shrink=shrink,
                    )  # fmt: skip

        return run

    def _shrink(self, update: PendingUpdate, i: int) -> float:
        """By how much fragment i's gradient is divided. Per layer: each fragment's norm is held to clip / √fragments,
        so that the whole gradient's is held to clip."""
        if update.gradient_divisor is not None and self.plan.clipping == "exact":
            return update.gradient_divisor
        norm = float(update.norms[i])
        update.is_cancelled = update.is_cancelled or not math.isfinite(norm)
        return update.gradient_divisor or max(
            1.0, norm * math.sqrt(len(self.plan.fragments)) / self.recipe.clip
        )

    def _fold(
        self, update: PendingUpdate, i: int, t: int, weights: Tensor, moments: AdamMoments
    ) -> None:
        """Other machines' updates: into the anchor and the replica alike, so that their difference stays this
        machine's own progress and what is guessed."""
        if not update.arrivals:
            if update.prediction_growth[i]:
                self.apply_to_tile(i, t, None, update.prediction_growth[i], weights, moments)
            return
        if i not in self._units:
            self._units[i] = sum_of_updates(update.arrivals, i), self.plan.tile_count(i)
        units, left = self._units[i]
        self.apply_to_tile(i, t, units, update.prediction_growth[i], weights, moments)
        self._units[i] = units, left - 1
        if left == 1:
            del self._units[i]

    def apply_to_tile(
        self,
        i: int,
        t: int,
        units: Tensor | None,
        guess: float,
        weights: Tensor,
        moments: AdamMoments,
    ) -> None:
        """Adds a tile of int32 units [fragment] to the anchor and to the replica, and to the latter so many momenta:
        down, as an update goes."""
        begin, end = self.plan.bounds(i, t)
        master = moments.master(weights)
        if units is not None:
            raw = self.store.load_tile("anchor", i, t, self.buffers.tile_scratch(1))
            raw[: 4 * (end - begin)].view(torch.int32).add_(units[begin:end])
            self.store.store_tile("anchor", i, t, raw)
            master.add_(units_to_float(units[begin:end].to(master.device)))
        if guess:
            raw = self.store.load_tile("momentum", i, t, self.buffers.tile_scratch(2))
            master.sub_(raw[: 4 * (end - begin)].view(torch.float32).to(master.device) * guess)
        moments.store_master(weights, master)

    def _store(self, op: Op) -> Callable[[], None]:
        (i,) = op.blocks
        if op.ring >= 0:
            parts = {
                kind: part
                for kind, part in self.buffers.ring_parts(op).items()
                if kind != "gradient"
            }
        else:
            parts = {}

        def put() -> None:
            for kind, part in parts.items():
                self.store.write(kind, i, op.tile, part)
            for t in range(self.plan.tile_count(i) if op.ring < 0 else 0):
                self.store.write("moments", i, t, self.store.memory_record("moments", i, t))

        return put

    def _write(self, op: Op) -> Callable[[], None]:
        (i,), source = op.blocks, self.buffers.write_source(op)

        def write() -> None:
            for t in range(self.plan.tile_count(i)):
                self.store.write("weights", i, t, source[self.store.record_slice("weights", i, t)])

        return write

    def _commit(self, op: Op) -> Callable[[], None]:
        mark = self.committed(self.update)
        return lambda: self.store.commit(mark)


def sum_of_updates(arrivals: list[DecodableUpdate], i: int) -> Tensor | None:
    """The sum of all arrivals' units of fragment i, int32 [n]; None where none says anything of it."""
    total = None
    for arrival in arrivals:
        if (units := arrival.decode(i)) is not None:
            total = units if total is None else total.add_(units)
        del units  # before the next one's are made
    return total
