"""Predict when each operation of a plan's steps would run on a given machine.

Pure. The simulation takes the same program as the engine and the durations from `cost_model.py`.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from barnraise.planning import cost_model, program
from barnraise.planning.hardware import Hardware
from barnraise.planning.plan import GPU_TILE, Plan
from barnraise.planning.program import LaneName, Operation, OperationKind, Resource
from barnraise.planning.tile_layout import TileLayout
from barnraise.spec.architectures import architecture_of

COMMIT_SECONDS = 0.01  # two flushes of a disk's cache
# Memory traffic per element of a norm: the element is read, its square written and read again.
SQUARED_BYTES = 12
# The number of tiles of a block that are simulated apart; a block of GPT-3 175B has 108 tiles.
TILES = 8
# Steps are simulated until two in a row differ by less than this fraction. A disk that is slower
# than the rest falls behind by more in each step, until the buffers are full.
STEADY = 0.01
MOST_STEPS = 8
COPIES = 256  # of a lane that are remembered; the optimizer is no further behind
DISK_LANES = (LaneName.READ, LaneName.WRITE)
WRITES = (OperationKind.STORE, OperationKind.WRITE, OperationKind.SPILL)


@dataclass(frozen=True)
class Price:
    """What an operation takes.

    Attributes:
        seconds: of its lane, alone.
        launch: seconds of the thread that starts it.
        moved_in: seconds of the link to the device for inputs that a computation needs from RAM.
        moved_out: seconds of the link from the device for inputs that a computation sends to RAM.
        ram: the part of RAM's bandwidth that it takes while it copies or updates.
    """

    seconds: float
    launch: float = 0.0
    moved_in: float = 0.0
    moved_out: float = 0.0
    ram: float = 0.0


@dataclass(frozen=True)
class Span:
    """Say when an operation runs, in seconds, and what it takes."""

    op: Operation
    begin: float
    end: float
    price: Price


class Timeline:
    """Place programs in time, one after the other, by the rules of `program.Hazards`.

    An operation begins when its lane is free and the operations that it waits for have ended. For
    these only the latest end counts, so that two times a buffer stand for the tokens of `Hazards`.
    The optimizer's lane takes the most urgent operation that can begin, as the engine's does: so
    its operations are placed when another one needs their result, or at the end.

    The optimizer streams its state through RAM as fast as RAM allows: what copies take of RAM
    meanwhile makes it longer. So do copies in both directions if they are faster than RAM.
    """

    def __init__(self, price: Callable[[Operation], Price], eager: bool, last: int = -1) -> None:
        """Begin at time 0 with all lanes idle.

        Args:
            price: what an operation takes.
            eager: whether the engine submits operations without waiting for earlier computations,
                as with a GPU's kernels.
            last: the number of the last fragment, whose update is as urgent as the first one's.
        """
        self._price = price
        self._eager = eager
        self._last = last
        # When each device's lane ends its last operation.
        self._lane_free: dict[tuple[LaneName, int], float] = {}
        self._compute_begin = self._compute_end = 0.0
        self._launched = 0.0  # when the thread that launches has started what came so far
        self._changed: dict[Resource, float] = {}  # when a buffer's last change ends
        self._used: dict[Resource, float] = {}  # when its last use since that change ends
        # The optimizer's operations that its lane has not begun: when each can begin, its price.
        self._waiting: list[tuple[Operation, float, Price]] = []
        self._touched: set[Resource] = set()  # by what is waiting
        # Copies that may slow others: (begin, end, part of RAM), in order, by lane.
        self._copies: dict[tuple[LaneName, int], deque[tuple[float, float, float]]] = {}

    def append(self, operations: Iterable[Operation]) -> list[Span]:
        """Return the spans of what is placed while a program follows those appended before."""
        spans: list[Span] = []
        for op in operations:
            touched = (*op.uses, *op.changes)
            while self._waiting and not self._touched.isdisjoint(touched):
                spans.append(self._place_optimizer())
            ready, price = self._ready(op), self._price(op)
            self._launched += price.launch
            if op.lane is LaneName.OPTIMIZER:
                self._waiting.append((op, ready, price))
                self._touched.update(touched)
            else:
                spans.append(self._place(op, ready, price))
        return spans

    def finish(self, kind: OperationKind | None = None) -> list[Span]:
        """Return the spans of the optimizer's operations until none, or none of a kind, waits."""
        spans: list[Span] = []
        while any(kind in (None, op.kind) for op, _, _ in self._waiting):
            spans.append(self._place_optimizer())
        return spans

    def start_step(self, begin: float, preparation: float) -> None:
        """Let the thread that launches wait until `begin`, and prepare a step for some seconds."""
        if self._eager:
            self._launched = max(self._launched, begin) + preparation

    def _ready(self, op: Operation) -> float:
        """Return when `op` is submitted and the operations that it waits for have ended."""
        changed, used = self._changed, self._used
        ready = self._launched if self._eager else self._compute_end
        for resource in (*op.uses, *op.changes):
            if (changed_at := changed.get(resource, 0.0)) > ready:
                ready = changed_at
        for resource in op.changes:
            if (used_until := used.get(resource, 0.0)) > ready:
                ready = used_until
        return ready

    def _urgency(self, waiting: tuple[Operation, float, Price]) -> int:
        """Return how soon the next forward needs a fragment; the least is the most urgent."""
        blocks = waiting[0].blocks
        return blocks[0] if blocks and blocks[0] != self._last else 0

    def _place_optimizer(self) -> Span:
        """Place the most urgent operation that can begin when the optimizer's lane is free."""
        free = self._lane_free.get((LaneName.OPTIMIZER, 0), 0.0)
        soonest = max(free, min(ready for _, ready, _ in self._waiting))
        chosen = min((each for each in self._waiting if each[1] <= soonest), key=self._urgency)
        self._waiting.remove(chosen)
        span = self._place(*chosen)
        self._touched = {r for op, _, _ in self._waiting for r in (*op.uses, *op.changes)}
        return span

    def _place(self, op: Operation, ready: float, price: Price) -> Span:
        lane = op.lane, op.device
        begin = max(ready, self._lane_free.get(lane, 0.0))
        if op.lane is LaneName.COMPUTE:
            end = max(begin + price.seconds, self._launched, *self._move_inputs(op, price, begin))
        else:
            end = self._end_in_ram(lane, begin, price.seconds, price.ram)
        self._lane_free[lane] = end
        if op.lane in DISK_LANES:  # both lanes share one disk
            self._lane_free[LaneName.READ, 0] = self._lane_free[LaneName.WRITE, 0] = end
        elif op.lane is LaneName.COMPUTE and op.device == 0:
            self._compute_begin, self._compute_end = begin, end
        for resource in op.uses:
            if end > self._used.get(resource, 0.0):
                self._used[resource] = end
        for resource in op.changes:
            self._changed[resource] = end
            self._used[resource] = 0.0
        return Span(op, begin, end, price)

    def _move_inputs(self, op: Operation, price: Price, begin: float) -> list[float]:
        """Return when the link has brought a computation's inputs from RAM, or sent them there.

        They come from the begin of the computation before on.
        """
        ends: list[float] = []
        for name, seconds, first in (
            (LaneName.IN, price.moved_in, min(begin, self._compute_begin)),
            (LaneName.OUT, price.moved_out, begin),
        ):
            if seconds:
                lane = (name, op.device)
                first = max(first, self._lane_free.get(lane, 0.0))
                ends.append(self._end_in_ram(lane, first, seconds, price.ram))
                self._lane_free[lane] = ends[-1]
        return ends

    def _end_in_ram(
        self, lane: tuple[LaneName, int], begin: float, seconds: float, ram: float
    ) -> float:
        """Return the end of what takes so many seconds and a part of RAM's bandwidth alone.

        What others copy meanwhile makes it longer, if RAM cannot do both at once.
        """
        end = begin + seconds
        if not ram:
            return end
        if lane[0] is LaneName.OPTIMIZER:  # nothing begins before what it has ended
            for copies in self._copies.values():
                while copies and copies[0][1] <= begin:
                    copies.popleft()
        others = [copies for name, copies in self._copies.items() if name != lane]
        late = sorted(copy for copies in others for copy in copies if copy[1] > begin)
        for copy_begin, copy_end, part in late:
            if copy_begin < end:
                excess = max(0.0, ram + part - 1.0)
                end += excess * (min(copy_end, end) - max(copy_begin, begin))
        if lane[0] is not LaneName.OPTIMIZER:
            self._copies.setdefault(lane, deque(maxlen=COPIES)).append((begin, end, ram))
        return end


def _merge_tiles(plan: Plan) -> Plan:
    """Merge tiles of a plan whose blocks have many, with a ring of about as many bytes.

    Merging hardly changes what overlaps, but makes the simulation much faster.
    """
    merged = -(-plan.tile_count(1) // TILES)
    if merged == 1:
        return plan
    ring = max(2, plan.ring // merged) if plan.ring else 0
    return replace(plan, tile=plan.tile * merged, ring=ring)


class StepSimulation:
    """Simulate a plan's steps on `hardware`, until each takes as long as the one before."""

    def __init__(self, plan: Plan, hardware: Hardware) -> None:
        self.plan = _merge_tiles(plan)
        self.hardware = hardware
        self._machines = (hardware, *hardware.others)  # by the number of the device
        self._prices: dict[tuple[object, ...], Price] = {}  # computed so far

    @cached_property
    def spans(self) -> list[Span]:
        """Return the spans of one step of many.

        Time 0 is the end of the previous step's last computation.
        """
        first = program.step_program(self.plan)
        second = program.step_program(
            self.plan, pending=self.plan.defers_updates, cached=first.cached
        )
        later = second
        if second.cached != first.cached:
            later = program.step_program(
                self.plan, pending=self.plan.defers_updates, cached=second.cached
            )
        timeline = Timeline(self.price, self.plan.device != "cpu", self.plan.last_fragment)
        launches = self.hardware.launches
        preparation = cost_model.STEP_LAUNCHES / launches if launches else 0.0
        spans = timeline.append(second.operations) + timeline.finish(OperationKind.NORM)
        begin, end = 0.0, self._end(spans)
        for _ in range(MOST_STEPS):
            last_seconds = end - begin
            begin = end
            timeline.start_step(begin, preparation)
            spans = timeline.append(later.operations)
            spans += timeline.finish(OperationKind.NORM)  # the engine waits for all of them
            end = self._end(spans)
            if abs(end - begin - last_seconds) <= STEADY * last_seconds:
                break
        return [Span(s.op, s.begin - begin, s.end - begin, s.price) for s in spans]

    @staticmethod
    def _end(spans: Sequence[Span]) -> float:
        return max(
            span.end
            for span in spans
            if span.op.lane is LaneName.COMPUTE or span.op.kind is OperationKind.NORM
        )

    @property
    def step_seconds(self) -> float:
        """Return the duration of one step of many in seconds.

        No resource can be busy for longer than that, and the disk not at the rate at which it only
        writes its cache.
        """
        busy = self.busy_seconds
        return max(
            self._end(self.spans) + self._deferred_update_seconds,
            *busy.values(),
            self._sustained_disk_seconds,
            self.shared_memory_seconds,
        )

    @cached_property
    def shared_memory_seconds(self) -> float:
        """Return the seconds of RAM's traffic: of the updates, and of copies to devices."""
        seconds = 0.0
        for span in self.spans:
            price = span.price
            computes = span.op.lane is LaneName.COMPUTE
            seconds += price.ram * (price.moved_in + price.moved_out if computes else price.seconds)
        return seconds

    @cached_property
    def _sustained_disk_seconds(self) -> float:
        """Return the seconds of a step's reads and writes, for a disk that never rests."""
        slowdown = self.hardware.disk_write / self.hardware.sustained_disk_write
        return sum(
            (span.end - span.begin) * (slowdown if span.op.kind in WRITES else 1.0)
            for span in self.spans
            if span.op.lane in DISK_LANES
        )

    @property
    def _deferred_update_seconds(self) -> float:
        """Return the seconds of the updates that follow the step under exact clipping.

        They are 0 if the updates run during the step.
        """
        plan = self.plan
        if plan.clipping != "exact" or plan.defers_updates:
            return 0.0
        return sum(map(self.update_seconds, plan.local_fragments))

    @cached_property
    def busy_seconds(self) -> dict[LaneName, float]:
        """Return the seconds each lane works in a step, on the device where it works longest."""
        by_device = [dict.fromkeys(LaneName, 0.0) for _ in self.plan.device_plans]
        for span in self.spans:
            price, seconds = span.price, by_device[span.op.device]
            seconds[span.op.lane] += price.seconds
            seconds[LaneName.IN] += price.moved_in
            seconds[LaneName.OUT] += price.moved_out
        by_device[0][LaneName.COMPUTE] += self._deferred_update_seconds
        return {lane: max(seconds[lane] for seconds in by_device) for lane in LaneName}

    def price(self, op: Operation) -> Price:
        """Return what an operation takes."""
        plan = self.plan
        i = op.blocks[0] if op.blocks else 0
        cost_key: tuple[object, ...] = op.blocks  # blocks are alike: many operations cost the same
        if op.kind in (OperationKind.FORWARD, OperationKind.BACKWARD):
            far = bisect_left(op.blocks, self._first_near_input)
            cost_key = (len(op.blocks), plan.recomputed_blocks(op.blocks), far)
        elif 0 < i < plan.last_fragment:
            cost_key = (plan.weights[i], plan.spills_gradient(i))
        key = (op.kind, cost_key, op.tile, op.ring_slot >= 0, op.device)
        if key not in self._prices:
            self._prices[key] = self._price(op)
        return self._prices[key]

    @cached_property
    def _first_near_input(self) -> int:
        """Return the first block above those whose inputs wait in RAM."""
        return max(self.plan.inputs_in_ram, default=0) + 1

    def _price(self, op: Operation) -> Price:
        seconds, hardware = self._seconds(op), self._machines[op.device]
        if self.plan.device == "cpu":
            return Price(seconds)
        launch = self._launch_seconds(op)
        goes_out = op.lane is LaneName.OUT or op.kind is OperationKind.FORWARD
        rate = hardware.from_device if goes_out else hardware.to_device
        if op.lane in (LaneName.IN, LaneName.OUT):
            return Price(seconds, launch, ram=rate / hardware.stream)
        if op.lane is LaneName.OPTIMIZER:
            return Price(seconds, launch, ram=1.0)
        if op.lane is not LaneName.COMPUTE:
            return Price(seconds, launch)
        moved = self._input_bytes(op) / rate
        return Price(
            seconds,
            launch,
            moved_in=0.0 if goes_out else moved,
            moved_out=moved if goes_out else 0.0,
            ram=rate / hardware.stream,
        )

    def _input_bytes(self, op: Operation) -> int:
        """Return the bytes of inputs that a computation of a group sends to RAM or needs back."""
        if op.kind not in (OperationKind.FORWARD, OperationKind.BACKWARD):
            return 0
        plan = self.plan.device_plans[op.device]
        inputs = len(set(plan.inputs_in_ram).intersection(op.blocks))
        return inputs * plan.micro_batches * cost_model.stream_bytes(plan.model, plan.sequences)

    def _seconds(self, op: Operation) -> float:
        match op.kind:
            case OperationKind.READ | OperationKind.FETCH:
                return self._bytes_read(op) / self.hardware.disk_read
            case OperationKind.STORE | OperationKind.WRITE | OperationKind.SPILL:
                return self._bytes_written(op) / self.hardware.disk_write
            case OperationKind.LOAD:
                rate = self._machines[op.device].to_device
                return self._count_elements(op) * self.plan.streamed_bytes / rate
            case OperationKind.OFFLOAD:
                return self._count_elements(op) * 4 / self._machines[op.device].from_device
            case OperationKind.ADD:
                added = (len(self.plan.devices) - 1) * cost_model.ADDED_GRADIENT_BYTES
                return self._count_elements(op) * added / self.hardware.stream
            case OperationKind.NORM:
                on_host = op.lane is LaneName.OPTIMIZER
                rate = self.hardware.stream if on_host else self.hardware.compute_stream
                return self._count_elements(op) * SQUARED_BYTES / rate
            case OperationKind.UPDATE:
                return self.update_seconds(op.blocks[0], op.tile)
            case OperationKind.COMMIT:
                return COMMIT_SECONDS
            case _:
                return self._computation_seconds(op)

    def _count_elements(self, op: Operation) -> int:
        """Return the number of elements of an operation's fragment."""
        return self.plan.fragments[op.blocks[0]].size

    def _bytes_read(self, op: Operation) -> int:
        """Return the bytes that a READ or FETCH reads from disk."""
        if op.kind is OperationKind.READ:
            return self.plan.total_bytes("weights", op.blocks[0])
        return self._tile_bytes(op)

    def _bytes_written(self, op: Operation) -> int:
        """Return the bytes that a STORE, WRITE or SPILL writes to disk."""
        if op.kind is OperationKind.WRITE:
            return self.plan.total_bytes("weights", op.blocks[0])
        if op.kind is OperationKind.SPILL:
            return self.plan.total_bytes("anchor", op.blocks[0])
        if op.ring_slot >= 0:
            return self._tile_bytes(op, back=True)
        return self.plan.total_bytes("moments", op.blocks[0])

    def _computation_seconds(self, op: Operation) -> float:
        """Return the seconds of a computation for all micro-batches of its device in a step."""
        plan, hardware = self.plan.device_plans[op.device], self._machines[op.device]
        batch = hardware, plan.model, plan.sequences
        match op.kind:
            case OperationKind.EMBED | OperationKind.EMBED_BACKWARD:
                seconds = cost_model.embed_seconds(*batch)
            case OperationKind.FORWARD:
                seconds = len(op.blocks) * cost_model.block_forward_seconds(*batch, plan.dtype)
            case OperationKind.BACKWARD:
                seconds = self._backward_seconds(op)
            case OperationKind.HEAD:
                seconds = cost_model.head_seconds(*batch, plan.dtype)
            case _:
                raise AssertionError(op)
        return plan.micro_batches * seconds

    def _launch_seconds(self, op: Operation) -> float:
        """Return the seconds in which the host starts a GPU's operation, with all its kernels.

        One thread of Python runs at a time, so that several devices' launches take turns.
        """
        if op.lane is not LaneName.COMPUTE:
            return cost_model.launch_seconds(self.hardware, 0, 0)
        return cost_model.launch_seconds(
            self.hardware, self._count_block_kernels(op), self._count_tile_kernels(op)
        )

    def _count_block_kernels(self, op: Operation) -> int:
        """Return the kernels of a computation on a GPU, which autograd or autocast starts."""
        plan = self.plan
        micro_batches = plan.device_plans[op.device].micro_batches
        if op.kind is OperationKind.HEAD:
            return micro_batches * cost_model.HEAD_KERNELS[plan.dtype]
        forward, backward = architecture_of(plan.model).block_kernels[plan.dtype]
        if op.kind is OperationKind.FORWARD:
            return micro_batches * len(op.blocks) * forward
        if op.kind is OperationKind.BACKWARD:
            retained = len(op.blocks) - plan.recomputed_blocks(op.blocks)
            return micro_batches * (len(op.blocks) * backward - retained * forward)
        return 0

    def _count_tile_kernels(self, op: Operation) -> int:
        """Return the kernels of an update or a norm on a GPU, which work on tiles."""
        if op.kind not in (OperationKind.UPDATE, OperationKind.NORM):
            return 0
        tiles = -(-self._count_elements(op) // GPU_TILE)
        if op.kind is OperationKind.NORM:
            return cost_model.NORM_KERNELS * tiles
        kernels = cost_model.UPDATE_KERNELS[self.plan.dtype, self.plan.moments_bits] * tiles
        matrices = sum(len(each.matrices) for each in self._layouts(op.blocks[0], op.tile))
        return kernels + cost_model.MUON_KERNELS * matrices

    def _backward_seconds(self, op: Operation) -> float:
        """Return the seconds of the backward of a group of blocks for one micro-batch.

        Blocks below the retained ones recompute their activations. If forward kept only the inputs
        of the group, all but one of these blocks also run a whole forward, which gives the inputs
        of the others.
        """
        plan = self.plan
        batch = self._machines[op.device], plan.model, plan.sequences, plan.dtype
        forward = cost_model.block_forward_seconds(*batch)
        backward = cost_model.block_backward_seconds(*batch, plan.deterministic)
        recompute = cost_model.block_recompute_seconds(*batch)
        recomputed = plan.recomputed_blocks(op.blocks)
        repeated = max(0, recomputed - 1) if plan.kept_inputs == "group" else 0
        return repeated * forward + recomputed * recompute + len(op.blocks) * backward

    def _layouts(self, i: int, tile: int) -> tuple[TileLayout, ...]:
        """Return the tiles of an update of fragment i: all, or the one of this number."""
        layouts = self.plan.tile_layouts(i)
        return layouts if tile < 0 else layouts[tile : tile + 1]

    def update_seconds(self, i: int, tile: int = -1) -> float:
        """Return the seconds of the update of fragment i, or of one tile of it."""
        plan, hardware = self.plan, self.hardware
        layouts = self._layouts(i, tile)
        where = "device" if plan.updates_on_device(i) else "host"
        # Of a matrix, AdamW's rate is not asked for: all its traffic is in Muon's own price.
        adam_elements = sum(layout.second_moments for layout in layouts)
        seconds = adam_elements / hardware.update_rate(where, plan.dtype, plan.moments_bits)
        if where == "host" and plan.device != "cpu":  # the rate was measured with all threads
            seconds *= plan.threads / cost_model.optimizer_threads(plan.threads)
        shapes = [(m.rows, m.columns) for layout in layouts for m in layout.matrices]
        seconds += cost_model.muon_seconds(hardware, shapes)
        if shapes and plan.staged and plan.weights[i] != "device" and where == "device":
            moved = sum(layout.elements for layout in layouts)
            low = plan.streamed_bytes if plan.dtype == "bfloat16" else 0
            state = plan.streamed_bytes + low + cost_model.FP32_BYTES  # with the momentum
            gradient = cost_model.FP32_BYTES if plan.moves_gradient(i) else 0
            seconds += moved * (state + gradient) / hardware.to_device
            seconds += moved * state / hardware.from_device
        return seconds

    def _tile_bytes(self, op: Operation, back: bool = False) -> int:
        """Return the bytes that pass through the ring with one tile, to memory or `back`."""
        plan = self.plan
        (i,) = op.blocks
        begin, end = plan.tile_bounds(i, op.tile)
        size = plan.tile_record_bytes("moments", i)[op.tile]
        if plan.staged and plan.weights[i] == "disk":
            size += plan.record_bytes("weights", end - begin)
        if plan.spills_gradient(i) and not back:
            size += plan.record_bytes("anchor", end - begin)
        return size
