"""The executor of programs: one method for each kind of operation, on any tier."""

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from barnraise.errors import BarnraiseError, DeviceLostError, MemoryShortageError, StateError
from barnraise.formats import format_bytes, parse_bytes
from barnraise.models.weights import views
from barnraise.planning import cost_model
from barnraise.planning.plan import Plan
from barnraise.planning.program import Hazards, LaneName, Operation, OperationKind, Program
from barnraise.spec import Recipe
from barnraise.swap.accumulated_moments import MeanGradients
from barnraise.swap.activations import Activations, HostActivations
from barnraise.swap.adamw import AdamWStep, sum_of_squares
from barnraise.swap.buffers import Buffers, HostBuffers
from barnraise.swap.device import (
    has_streams,
    is_device_lost,
    is_device_memory_error,
    select_device,
)
from barnraise.swap.forward_backward import ForwardBackward
from barnraise.swap.lanes import LaneEvent, WorkerLane
from barnraise.swap.leaves import Leaves
from barnraise.swap.precision import units_to_float
from barnraise.swap.state_store import FragmentSequence, StateStore
from barnraise.swap.tiles import Tile, copied_to

DEVICE_LANES = (LaneName.COMPUTE, LaneName.IN, LaneName.OUT)

# Operations that an interrupted step completes: they belong to the update of the step before, or
# apply the updates of other authors.
STATE_CHANGES = {
    OperationKind.UPDATE,
    OperationKind.STORE,
    OperationKind.WRITE,
    OperationKind.COMMIT,
}

Task = Callable[[], object]


class DecodableUpdate(Protocol):
    """Another author's update as the exchange delivers it."""

    @property
    def header(self) -> Any:
        """Return the update's header, for the anchor to record."""
        ...

    def decode(self, index: int) -> Tensor | None:
        """Return fragment `index`'s int32 [n] units; None where the update has no part for it."""
        ...


@dataclass(frozen=True)
class EngineProgress:
    """How far a state has come.

    Attributes:
        position: where in the data the next step begins.
        round_tokens: tokens trained on in this round.
        optimizer_steps: the optimizer's steps.
        warmup_steps_left: steps that still have a reduced rate after Adam's moments were lost.
        prediction: for each fragment, by how many outer momenta the replica is ahead of the anchor,
            because updates in flight are expected to move the anchor there; empty for none.
        residual: for each fragment, 1 if the replica is ahead of the anchor by this machine's
            residual, else 0; empty for none.
        forecast: for each fragment, 1 if its outer momentum only serves predictions because the
            round before had none, else 0; empty for none.
        label: under which a crew's other machines have saved their parts of this state; 0 for none,
            negative once the anchor has more updates than under the label.
    """

    position: int = 0
    round_tokens: int = 0
    optimizer_steps: int = 0
    warmup_steps_left: int = 0
    prediction: tuple[float, ...] = ()
    residual: tuple[float, ...] = ()
    forecast: tuple[float, ...] = ()
    label: int = 0


@dataclass
class PendingUpdate:
    """One step's update: what the optimizer, arrivals and prediction change when it is applied.

    Attributes:
        clipping: "exact" (by the norm of the whole gradient), "layer" (by each fragment's own) or
            "none".
        learning_rate: the rate of this step, with schedule and warm-up.
        matrix_rate: the same of the matrices that Muon trains.
        step_number: AdamW's step number, from 1.
        prediction_growth: for each fragment, by how many momenta the prediction grows.
        progress: the progress once the update is applied.
        norms: the norm of each fragment's gradient, filled in by the step's program.
        arrivals: updates of other authors that are added to the anchor and the replica on the way.
        gradient_divisor: what exact clipping divides gradients by; None until the whole norm is
            known.
        is_cancelled: whether a loss or gradient was not finite, or the step was interrupted, so
            that AdamW changes nothing more.
        is_interrupted: whether its step was interrupted: the progress stays as it was before.
    """

    clipping: str
    learning_rate: float
    matrix_rate: float
    step_number: int
    prediction_growth: tuple[float, ...]
    progress: EngineProgress
    norms: dict[int, Tensor] = field(default_factory=dict)
    arrivals: list[DecodableUpdate] = field(default_factory=list)
    gradient_divisor: float | None = None
    is_cancelled: bool = False
    is_interrupted: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether it can be applied: exact clipping waits for the norm of the whole gradient."""
        return self.clipping != "exact" or self.gradient_divisor is not None

    def clip_to(self, norm: float, limit: float) -> None:
        """Make an exactly clipped update ready: reduce the whole `norm` to `limit`."""
        self.gradient_divisor = max(1.0, norm / limit)


class Executor:
    """Run programs on lanes and buffers.

    Attributes:
        lanes: the first device's lanes, and those that are no device's, by name.
        device_lanes: the lanes of each device.
        buffers: the static buffers.
        mean_gradients: what Adam's moments have not absorbed yet.
        anchors: the anchor's fragments.
        handlers: for each kind of operation, the method that returns what its lane will run.
    """

    def __init__(
        self,
        plan: Plan,
        recipe: Recipe,
        store: StateStore,
        describe_commit: Callable[[PendingUpdate], str],
    ) -> None:
        """Allocate the buffers and start the lanes.

        `describe_commit` returns the header for a COMMIT of the running update.
        """
        self._plan, self._recipe, self._store = plan, recipe, store
        self._describe_commit = describe_commit
        self._device = torch.device(plan.device)
        self.buffers = HostBuffers(plan) if plan.ranks else Buffers(plan, store)
        self.anchors = FragmentSequence(store, "anchor")
        # Each device's lanes; those that are no device's are the first one's.
        self.device_lanes = _start_lanes([torch.device(each.device) for each in plan.device_plans])
        self.lanes = self.device_lanes[0]
        self._gradient_events: list[LaneEvent] = []  # of several devices' last step
        self._hazards = Hazards()
        self._cached: dict[int, int] = {}  # block → the slot that holds its weights
        # Fragment → the arrivals' units, and the number of tiles that still need them.
        self._arrival_units: dict[int, tuple[Tensor | None, int]] = {}
        self._failure: BaseException | None = None
        self.mean_gradients = MeanGradients(recipe.mixing_accumulation)
        self._running_update: PendingUpdate | None = None
        self._running_passes: Sequence[ForwardBackward] = ()
        self._device_loss = torch.zeros(())  # the step's loss, where the host does not wait for it
        self.handlers: dict[OperationKind, Callable[[Operation], Task]] = {
            OperationKind.READ: self._read,
            OperationKind.LOAD: self._load,
            OperationKind.EMBED: self._embed,
            OperationKind.FORWARD: self._forward,
            OperationKind.HEAD: self._head_task,
            OperationKind.BACKWARD: self._backward,
            OperationKind.EMBED_BACKWARD: self._embed_backward,
            OperationKind.NORM: self._norm_task,
            OperationKind.OFFLOAD: self._offload,
            OperationKind.ADD: self._add,
            OperationKind.SPILL: self._spill,
            OperationKind.FETCH: self._fetch,
            OperationKind.UPDATE: self._update,
            OperationKind.STORE: self._store_records,
            OperationKind.WRITE: self._write,
            OperationKind.COMMIT: self._commit,
        }

    def run(
        self,
        compile_program: Callable[..., Program],
        update: PendingUpdate | None,
        passes: Sequence[ForwardBackward] = (),
    ) -> None:
        """Run a program; return when the calling thread's part is done. The other lanes go on."""
        assert update is None or update.is_ready, "the norm that clips this update is not known yet"
        self._running_update, self._running_passes = update, passes
        program = compile_program(self._plan, cached=self._cached)
        self._cached = {}  # valid again when all operations were submitted without a failure
        changes = [k for k, op in enumerate(program.operations) if op.kind in STATE_CHANGES]
        last_change = max(changes, default=-1)
        for k, op in enumerate(program.operations):
            if passes and passes[0].is_interrupted and k > last_change:
                return
            task = self.handlers[op.kind](op)
            event = self.device_lanes[op.device][op.lane].submit(
                self._guard_task(op, task),
                self._hazards.dependencies(op),
                label=op,
                urgency=self._urgency(op),
            )
            self._hazards.record(op, event)
            if self._plan.devices and op.kind in (OperationKind.HEAD, OperationKind.NORM):
                self._gradient_events.append(event)
        self._cached = dict(program.cached)

    def _urgency(self, op: Operation) -> int:
        """Return how soon the next forward needs an operation; the least is the most urgent.

        The embedding and the final norm are copied back to the device at once, before any block.
        """
        is_block = bool(op.blocks) and op.blocks[0] in self._plan.blocks
        return op.blocks[0] if is_block else 0

    def wait_for_gradients(self) -> None:
        """Wait until all devices' losses, and the norms of what they add up to, are computed.

        Raises:
            BarnraiseError: an operation failed.
        """
        events, self._gradient_events = self._gradient_events, []
        for event in events:
            event.wait()

    def _guard_task(self, op: Operation, task: Task) -> Callable[[], None]:
        """Return a task that remembers the first failure, and fails if there was one before."""

        def run() -> None:
            if self._failure is not None:
                raise self._failure
            try:
                task()
            except (OSError, RuntimeError, MemoryError) as error:
                if self._failure is None:
                    self._failure = _as_state_error(error, *self._describe_failure(op))
                raise self._failure from error
            except BaseException as error:
                self._failure = self._failure or error
                raise

        return run

    def _describe_failure(self, op: Operation) -> tuple[str, str]:
        """Return the beginning of a sentence, and the device that it names; "" if it is clear."""
        subject = self._plan.fragments[op.blocks[0]].name if op.blocks else "the state"
        device = ""
        if self._plan.devices and op.lane in DEVICE_LANES:
            device = self._plan.devices[op.device].name
        where = f" on {device}" if device else ""
        return f"the {op.kind} of {subject}{where} failed", device

    def drain(self) -> None:
        """Wait until every lane is idle.

        Raises:
            BarnraiseError: an operation failed.
        """
        for lane in self._all_lanes():
            lane.wait_until_idle()
        self._gradient_events.clear()
        if self._failure is not None:
            raise self._failure
        self._hazards = Hazards()

    def invalidate_cached_weights(self) -> None:
        """Drop copies of weights in slots and on the device after the masters were changed."""
        self._cached = {}
        if self._plan.staged:
            for i in self._plan.ends:
                if self._plan.weights[i] != "device":
                    for buffers in (self.buffers, *self.buffers.others):
                        buffers.leaves(i, -1).flat.data.copy_(self.buffers.host_weights(i))

    def new_activations(self, device: int) -> Activations:
        """Return an empty store of a device's activations for one step."""
        plan = self._plan.device_plans[device]
        if plan.inputs_in_ram:
            streams = self.buffers.on(device).streams
            return HostActivations(plan, self.device_lanes[device], streams)
        return Activations()

    def _all_lanes(self) -> list[WorkerLane]:
        """List the lanes of all devices, and those that are no device's."""
        others = [lanes[name] for lanes in self.device_lanes[1:] for name in DEVICE_LANES]
        return [*self.lanes.values(), *others]

    def close(self) -> None:
        """Stop the lanes and free the buffers.

        Nothing is left that refers to the executor's owner or to itself, so that its memory is free
        at once, and not when the garbage collector runs.
        """
        for lane in self._all_lanes():
            lane.close()
        self.handlers.clear()
        self._describe_commit = lambda update: ""
        self._running_update = self._failure = None
        self._running_passes = ()
        self._gradient_events.clear()
        self._arrival_units.clear()
        self.mean_gradients.clear()
        self._hazards = Hazards()
        self._device_loss = torch.zeros(())
        self.buffers.close()

    @property
    def accumulates(self) -> bool:
        """Whether Adam's moments absorb the mean gradient of several steps."""
        return self._recipe.mixes_weights and self._recipe.mixing_accumulation > 1

    @property
    def _active_update(self) -> PendingUpdate:
        assert self._running_update is not None, "this program has no update"
        return self._running_update

    def _passes_of(self, op: Operation) -> ForwardBackward:
        assert self._running_passes, "this program has no forward and backward"
        return self._running_passes[op.device]

    # ---- handlers ------------------------------------------------------------------------------
    # Each returns what its lane will run. Buffers are chosen on the calling thread, in order.

    def _read(self, op: Operation) -> Task:
        (i,), target = op.blocks, self.buffers.read_target(op)
        return lambda: self._store.read_fragment("weights", i, target)

    def _load(self, op: Operation) -> Task:
        target, source = self.buffers.load_endpoints(op)
        return lambda: target.data.copy_(source, non_blocking=True)

    def _embed(self, op: Operation) -> Task:
        passes, embedding = self._passes_of(op), self.buffers.on(op.device).leaves(0, -1)
        return lambda: passes.embed(embedding)

    def _forward(self, op: Operation) -> Task:
        passes = self._passes_of(op)
        return lambda: passes.forward(op.blocks, self._leaves_of(op))

    def _head_task(self, op: Operation) -> Task:
        passes, buffers = self._passes_of(op), self.buffers.on(op.device)
        place = len(self._plan.fragments) + op.device  # of the losses' sum among the scalars

        def head() -> None:
            final = buffers.leaves(self._plan.last_fragment, -1)
            gradient = buffers.gradient(self._plan.last_fragment, -1)
            gradient.zero_()
            buffers.head_gradient.zero_()
            final.accumulate_into(gradient)
            passes.head(final, buffers.leaves(0, -1), buffers.head_gradient)
            if self._plan.clipping == "exact":
                return
            if self._cancel_if_interrupted(passes):
                return
            # Updates follow soon: check the losses before.
            loss = torch.stack(passes.losses).sum()
            if self.buffers.host_scalars is None:
                if not math.isfinite(float(loss)):
                    self._active_update.is_cancelled = True
            else:
                self._device_loss = loss
                self.buffers.host_scalars[place].copy_(loss.double(), non_blocking=True)

        return head

    def _backward(self, op: Operation) -> Task:
        leaves = self._leaves_of(op)
        passes, buffers = self._passes_of(op), self.buffers.on(op.device)

        def backward() -> None:
            for i, fragment_leaves, slot in zip(op.blocks, leaves, op.gradients, strict=True):
                gradient = buffers.gradient(i, slot)
                gradient.zero_()
                fragment_leaves.accumulate_into(gradient)
            passes.backward(op.blocks, leaves)
            self._cancel_if_interrupted(passes)

        return backward

    def _cancel_if_interrupted(self, passes: ForwardBackward) -> bool:
        """Return whether the step was interrupted; if it was, cancel its own update.

        With exact clipping, the program's update is the one of the step before, which goes on.
        """
        is_interrupted = passes.is_interrupted
        if is_interrupted and self._plan.clipping != "exact":
            self._active_update.is_cancelled = True
            self._active_update.is_interrupted = True
        return is_interrupted

    def _leaves_of(self, op: Operation) -> list[Leaves]:
        buffers = self.buffers.on(op.device)
        return [buffers.leaves(i, slot) for i, slot in zip(op.blocks, op.slots, strict=True)]

    def _embed_backward(self, op: Operation) -> Task:
        passes, buffers = self._passes_of(op), self.buffers.on(op.device)

        def backward() -> None:
            gradient = buffers.gradient(0, -1)
            gradient.zero_()
            passes.embed_backward(views(self._plan.fragments[0], gradient), buffers.head_gradient)
            self._cancel_if_interrupted(passes)

        return backward

    def _norm_task(self, op: Operation) -> Task:
        (i,), (slot,) = op.blocks, op.gradients
        norms = self._passes_of(op).norms
        has_many = bool(self._plan.devices)
        gradient = self.buffers.host_gradient(i) if has_many else self.buffers.gradient(i, slot)

        def norm() -> None:
            norms[i] = sum_of_squares(gradient).sqrt_()
            if self.buffers.host_scalars is not None:
                # Readers wait for this copy, and for nothing that is launched after it.
                self.buffers.host_scalars[i].copy_(norms[i], non_blocking=True)

        return norm

    def _offload(self, op: Operation) -> Task:
        (i,), (slot,) = op.blocks, op.gradients
        source = self.buffers.on(op.device).gradient(i, slot)
        target = self.buffers.offload_target(i, op.device)
        return lambda: target.copy_(source, non_blocking=True)

    def _add(self, op: Operation) -> Task:
        (i,) = op.blocks
        total = self.buffers.host_gradient(i)
        parts = [self.buffers.offload_target(i, d) for d in range(1, len(self._plan.devices))]

        def add() -> None:
            for part in parts:
                total.add_(part)

        return add

    def _spill(self, op: Operation) -> Task:
        (i,), (slot,) = op.blocks, op.gradients
        source = self.buffers.spill_source(i, slot)
        return lambda: self._store.write_fragment("gradient", i, source)

    def _fetch(self, op: Operation) -> Task:
        (i,), parts = op.blocks, self.buffers.ring_parts(op)

        def fetch() -> None:
            for kind, part in parts.items():
                self._store.read(kind, i, op.tile, part)

        return fetch

    def _update(self, op: Operation) -> Task:
        (i,), update = op.blocks, self._active_update
        tiles = [op.tile] if op.tile >= 0 else range(self._plan.tile_count(i))

        def run() -> None:
            step = AdamWStep(
                fragment=self._plan.fragments[i],
                number=update.step_number,
                learning_rate=update.learning_rate,
                weight_decay=self._recipe.weight_decay,
                matrix_rate=update.matrix_rate,
            )
            norm_is_on_device = self.buffers.host_scalars is not None and not self._plan.devices
            if op.lane is LaneName.COMPUTE and norm_is_on_device:
                step = self._clip_on_device(step, update, i)
            else:
                step = replace(step, gradient_divisor=self._gradient_divisor(update, i))
            for t in tiles:
                parts = self.buffers.update_parts(op, t)
                if self._plan.updates_on_device(i):
                    with copied_to(self._device, *parts) as moved:
                        self._update_tile(update, step, *moved)
                else:
                    self._update_tile(update, step, *parts)

        return run

    def _update_tile(
        self, update: PendingUpdate, step: AdamWStep, tile: Tile, gradient: Tensor
    ) -> None:
        """Apply other authors' updates to a tile, and then its own step."""
        self._apply_arrivals(update, tile)
        if update.is_cancelled:
            return
        if self.accumulates:
            parts = tile.moments, tile.weights, gradient
            self.mean_gradients.update_tile(step, tile.begin, parts)
        else:
            tile.moments.update(step, tile.begin, tile.weights, gradient)

    def _gradient_divisor(self, update: PendingUpdate, i: int) -> float:
        """Return what fragment i's gradient is divided by; cancel if its norm is not finite.

        Layer-wise clipping limits each fragment's norm to clip / √fragments, so that the norm of
        the whole gradient is at most clip.
        """
        if update.gradient_divisor is not None:
            return update.gradient_divisor
        norms, loss = update.norms, 0.0
        if self.buffers.host_scalars is not None:
            losses = self.buffers.host_scalars[len(self._plan.fragments) :]
            norms, loss = self.buffers.host_scalars, float(losses.sum())
        norm = join_norms(float(norms[k]) for k in self._plan.norms_of(i))
        if not (math.isfinite(norm) and math.isfinite(loss)):
            update.is_cancelled = True
        if update.clipping == "none":
            return 1.0
        return max(1.0, norm / self._norm_limit(i))

    def _norm_limit(self, i: int) -> float:
        """Return the limit of the norm that clips fragment i: clip for that of all fragments."""
        share = len(self._plan.norms_of(i)) / len(self._plan.fragments)
        return self._recipe.clip * math.sqrt(share)

    def _clip_on_device(self, step: AdamWStep, update: PendingUpdate, i: int) -> AdamWStep:
        """Return a step that divides and checks as `_gradient_divisor` does, but on the device.

        The host would have to wait for the norm, and with it for all kernels.
        """
        norm = torch.stack([update.norms[k] for k in self._plan.norms_of(i)]).norm()
        is_finite = torch.isfinite(norm).logical_and_(torch.isfinite(self._device_loss))
        step = replace(step, found_inf=is_finite.logical_not_().float())
        if update.clipping == "none":
            return step
        divisor = norm / self._norm_limit(i)
        return replace(step, gradient_divisor=divisor.clamp_min_(1.0).float())

    def _apply_arrivals(self, update: PendingUpdate, tile: Tile) -> None:
        """Apply other authors' updates and the growth of the prediction to one tile."""
        i = tile.fragment
        growth = update.prediction_growth[i]
        if not update.arrivals:
            if growth:
                self.apply_to_tile(tile, None, growth)
            return
        if i not in self._arrival_units:
            units = sum_of_updates(update.arrivals, i)
            self._arrival_units[i] = units, self._plan.tile_count(i)
        units, tiles_left = self._arrival_units[i]
        self.apply_to_tile(tile, units, growth)
        self._arrival_units[i] = units, tiles_left - 1
        if tiles_left == 1:
            del self._arrival_units[i]

    def apply_to_tile(self, tile: Tile, units: Tensor | None, prediction_growth: float) -> None:
        """Add other authors' updates and a growth of the prediction to one tile.

        Updates go into the anchor and the replica alike, so that their difference stays this
        machine's own progress and its prediction.

        Args:
            tile: the replica's tile.
            units: int32 units of the whole fragment, or None for none.
            prediction_growth: how many momenta to subtract from the replica, the direction in which
                updates go.
        """
        store, i, t = self._store, tile.fragment, tile.number
        momentum = None
        for_device = self._plan.updates_on_device(i)
        if units is not None:
            record = store.load_tile("anchor", i, t, for_device=for_device)
            record[: 4 * tile.size].view(torch.int32).add_(units[tile.begin : tile.end])
            store.store_tile("anchor", i, t, record)
        if prediction_growth:
            record = store.load_tile("momentum", i, t, for_device=for_device)
            momentum = record[: 4 * tile.size].view(torch.float32)
        for piece in tile.pieces():
            master = piece.master()
            if units is not None:
                added = units[piece.begin : piece.end].to(master.device)
                master.add_(units_to_float(added))
            if momentum is not None:
                part = momentum[piece.begin - tile.begin : piece.end - tile.begin]
                master.sub_(part.to(master.device) * prediction_growth)
            piece.set_master(master)

    def _store_records(self, op: Operation) -> Task:
        (i,), store = op.blocks, self._store
        if op.ring_slot >= 0:
            parts = self.buffers.ring_parts(op)
            parts.pop("gradient", None)

            def store_tile() -> None:
                for kind, part in parts.items():
                    store.write(kind, i, op.tile, part)

            return store_tile

        moments = store.memory_buffer("moments", i)
        assert moments is not None, "moments on disk pass through the ring"
        return lambda: store.write_fragment("moments", i, moments)

    def _write(self, op: Operation) -> Task:
        (i,), source = op.blocks, self.buffers.write_source(op)
        return lambda: self._store.write_fragment("weights", i, source)

    def _commit(self, op: Operation) -> Task:
        header = self._describe_commit(self._active_update)
        return lambda: self._store.commit(header)


def _start_lanes(devices: Sequence[torch.device]) -> list[dict[LaneName, WorkerLane]]:
    """Start one lane for each name, and those of `DEVICE_LANES` for each further device.

    Besides computations in RAM, only the optimizer's use several threads.
    """
    device, *others = devices
    threads = optimizer_threads = torch.get_num_threads()
    select_device(device)  # for this thread, which launches the kernels
    if has_streams(device):
        optimizer_threads = cost_model.optimizer_threads(threads)
    lanes = {
        name: WorkerLane(
            name,
            device if name in DEVICE_LANES else None,
            inline=name is LaneName.COMPUTE,
            eager=name is LaneName.OPTIMIZER,
            threads=optimizer_threads if name is LaneName.OPTIMIZER else 1,
            shares_tiles=name is LaneName.OPTIMIZER and has_streams(device),
        )
        for name in LaneName
    }
    own_threads = {LaneName.COMPUTE: 1 if has_streams(device) else threads}
    further = [
        {
            name: WorkerLane(f"{name} {number}", other, threads=own_threads.get(name, 1))
            for name in DEVICE_LANES
        }
        for number, other in enumerate(others, 1)
    ]
    torch.set_num_threads(threads)  # each lane's thread has set its own number
    return [lanes, *(lanes | own for own in further)]


def sum_of_updates(updates: list[DecodableUpdate], i: int) -> Tensor | None:
    """Return the sum of the updates' units of fragment i, int32 [n]; None for no part."""
    total = None
    for update in updates:
        units = update.decode(i)
        if units is not None:
            total = units if total is None else total.add_(units)
        del units  # free it before the next update is decoded
    return total


def join_norms(norms: Iterable[float]) -> float:
    """Return the norm of a whole gradient from those of its fragments, in index order."""
    return math.sqrt(sum(norm * norm for norm in norms))


@contextlib.contextmanager
def naming_failures(summary: str) -> Iterator[None]:
    """Raise failures of memory, disk or device as errors that begin with `summary`."""
    try:
        yield
    except (OSError, RuntimeError, MemoryError) as error:
        raise _as_state_error(error, summary) from error


def _describe_shortage(reason: str, on_device: bool) -> str:
    """Return a sentence about memory that ran out; `reason` is what torch says about it."""
    need = ""
    if size := re.search(r"allocate ([\d.]+ ?[KMGT]iB|\d+(?= bytes))", reason):
        need = f" ({format_bytes(parse_bytes(size[1]))} more)"
    memory = "GPU memory" if on_device else "memory"
    shortage = f"there is not as much {memory} left as it needs{need}"
    return f"{shortage}; another program may have taken it"


def _as_state_error(error: BaseException, summary: str, device: str = "") -> BarnraiseError:
    """Return a failure as an error whose message is one sentence about the resource that failed.

    `device` is that of several on which it failed.
    """
    if isinstance(error, BarnraiseError):
        return error
    reason = getattr(error, "strerror", None) or str(error)
    if is_device_lost(error):
        return DeviceLostError(f"{summary}: {reason.splitlines()[0]}", device)
    on_device = is_device_memory_error(error)
    if on_device or isinstance(error, MemoryError) or "allocate memory" in reason:
        return MemoryShortageError(f"{summary}: {_describe_shortage(reason, on_device)}", on_device)
    where = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
    return StateError(f"{summary}: {reason}{where}")
