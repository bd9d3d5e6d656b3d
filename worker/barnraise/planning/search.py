"""Search for the plan that trains a model fastest within what a machine may use.

Pure: no torch, under a second for 175B parameters. The search has five stages:

1. Candidates: each micro-batch size, way of clipping and number of blocks per kept input.
2. Fill tiers: put the state as near to the computation as the budgets allow, in the order of what
   a byte there saves.
3. Estimate: rank the candidates by rough step times, with perfect overlap and with none.
4. Simulate: run the best, and the plans most like the best of these, through `simulator.py`.
5. Pick: take the fastest; exact clipping wins if it is nearly as fast.

A model that cannot fit is refused before anything is allocated, with the nearest changes that fit.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from barnraise.errors import PlanError
from barnraise.formats import format_bytes
from barnraise.planning import cost_model, memory_model
from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import Limits
from barnraise.planning.plan import Plan, tile_elements
from barnraise.planning.program import LaneName, Operation, OperationKind
from barnraise.planning.simulator import StepSimulation
from barnraise.spec import PRESETS, ModelSpec, preset

RESERVE = 0.15  # of the RAM, left to the system and the program where no limit says otherwise
DEVICE_RESERVE = 0.08
SIMULATED = 8  # candidates of each way of clipping that are looked at closely first
EXACT_COSTS = 1.10  # exact clipping is given up only where it makes a step this much longer
RESIDENTS = 12  # steps in how many fragments stay on the device
GROUPS = (1, 2, 4, 8)  # blocks whose inputs are computed again from one kept input
DAY = 86_400.0


def make_plan(
    hardware: Hardware,
    model: ModelSpec,
    limits: Limits | None = None,
    step_sequences: int = 8,
    advise: bool = True,
) -> Plan:
    """The quickest plan for steps of so many sequences. Raises PlanError naming the resource that is short and, with
    `advise`, the nearest things that would fit."""
    search = _Search(hardware, model, limits or Limits(), step_sequences)
    found = search.best()
    if found is None:
        raise PlanError(search.refusal(advise))
    return found


class _Search:
    def __init__(self, hardware: Hardware, model: ModelSpec, limits: Limits, step_sequences: int):
        self.hardware, self.model, self.limits, self.step_sequences = (
            hardware,
            model,
            limits,
            step_sequences,
        )
        self.cuda = hardware.device == "cuda"
        self.staged = self.cuda or limits.device_memory is not None
        given = limits.memory
        self.memory = given if given is not None else int(hardware.memory * (1 - RESERVE))
        self.device_memory = limits.device_memory
        if self.device_memory is None and self.cuda:
            self.device_memory = int(hardware.device_memory * (1 - DEVICE_RESERVE))
        self.disk = limits.disk if limits.disk is not None else int(hardware.disk * 0.95)
        self.dtype = limits.precision
        if self.dtype == "auto":
            self.dtype = hardware.dtype if self.staged else "float32"
        self.shortest: tuple[int, int, int] | None = (
            None  # (host, device, disk) of the plan that came nearest
        )
        self.missing = math.inf  # bytes missing on the tier that lacks most

    # ---- 1 candidates

    def best(self) -> Plan | None:
        fitting = [plan for candidate in self._candidates() for plan in self._fill_tiers(candidate)]
        if not fitting:
            return None
        clippings = sorted({plan.clipping for plan in fitting})
        best = {
            each: self._pick_fastest([plan for plan in fitting if plan.clipping == each])
            for each in clippings
        }
        quickest = min(best.values(), key=lambda plan: plan.step_seconds)
        exact = best.get(
            "exact", quickest
        )  # the recipe's own clipping, where it is nearly as quick
        return exact if exact.step_seconds <= EXACT_COSTS * quickest.step_seconds else quickest

    def _pick_fastest(self, fitting: list[Plan]) -> Plan:
        """Of all with one way of clipping: the most promising are looked at closely, half of them those that were best
        if all that can go on at once did, half if nothing did; then all that are like the quickest of these but for how
        much stays on the device."""
        estimates = [(self._estimate_seconds(plan), plan) for plan in fitting]
        few: list[Plan] = []
        for which in (0, 1):
            estimates.sort(key=lambda each: each[0][which])
            few += [plan for _, plan in estimates if plan not in few][: SIMULATED // 2]
        first = min(map(self._simulate, few), key=lambda plan: plan.step_seconds)
        like = [plan for plan in fitting if plan not in few and _shape(plan) == _shape(first)]
        return min([first, *map(self._simulate, like)], key=lambda plan: plan.step_seconds)

    def _candidates(self) -> Iterator[Plan]:
        """Everything at its smallest: what memory is left is given out by `_fill_tiers`."""
        wanted, n = self.limits.clipping, self.model.layers + 2
        clippings = ("exact", "layer") if wanted == "auto" else (wanted,)
        sizes = [s for s in range(self.step_sequences, 0, -1) if self.step_sequences % s == 0]
        for sequences in sizes:
            for clipping in clippings:
                for group in GROUPS:
                    if group > max(1, self.model.layers // 2):
                        continue
                    forward = tuple(
                        tuple(range(first, min(first + group, self.model.layers + 1)))
                        for first in range(1, self.model.layers + 1, group)
                    )
                    yield Plan(
                        model=self.model,
                        device=self.hardware.device,
                        threads=max(1, self.hardware.cores),
                        dtype=self.dtype,
                        staged=self.staged,
                        sequences=sequences,
                        micro_batches=self.step_sequences // sequences,
                        forward_groups=forward,
                        backward_groups=tuple(reversed(forward)),
                        kept_inputs="block" if group == 1 else "group",
                        boundaries="device",
                        weights=("host",) * n,
                        moments=("host",) * n,
                        moments_bits=self.limits.moments_bits,
                        clipping=clipping,
                        slots=0,
                        gradient_slots=group + 1,
                        tile=tile_elements(self.model, whole=False),
                    )

    # ---- 2 fill tiers

    def _fill_tiers(self, plan: Plan) -> list[Plan]:
        """The candidate with its states as near as they fit; nothing where even the smallest does not."""
        if (held := self._in_memory(plan)) is None:
            return (
                [self._promote_tensors(swapped)]
                if (swapped := self._on_disk(plan)) is not None
                else []
            )
        ways = [held]
        if self.cuda:  # resident fragments are updated on the device, in turn with its computation
            n = self.model.layers + 2
            most = self._largest_that_fits(held, n, self._with_resident)
            some = sorted(
                {n * k // RESIDENTS for k in range(1, RESIDENTS)} - {0}
            )  # whatever fits: the same with more
            ways += [
                most,
                *filter(self._fits, (self._with_resident(held, count) for count in some)),
            ]
        if held.kept_inputs == "block":
            ways = [
                self._largest_that_fits(way, self.model.layers, self._with_retained) for way in ways
            ]
        return ways

    def fits(self) -> bool:
        """Whether anything does."""
        smallest = [plan for plan in self._candidates() if plan.sequences == 1]
        return any(self._in_memory(plan) or self._on_disk(plan) for plan in smallest)

    def _fits(self, plan: Plan) -> bool:
        needs = memory_model.host_bytes(plan), memory_model.device_bytes(plan), plan.file_bytes()
        budgets = self.memory, self.device_memory, self.disk
        missing = max(
            need / max(1, budget)
            for need, budget in zip(needs, budgets, strict=True)
            if budget is not None
        )
        if missing < self.missing:
            self.missing, self.shortest = missing, needs
        return missing <= 1

    def _largest_that_fits(
        self, plan: Plan, high: int, change: Callable[[Plan, int], Plan]
    ) -> Plan:
        """`change(plan, k)` with the largest k ≤ high that fits; plan itself fits, as k = 0."""
        low = 0
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits(change(plan, middle)):
                low = middle
            else:
                high = middle - 1
        return change(plan, low) if low else plan

    def _in_memory(self, plan: Plan) -> Plan | None:
        """Everything in RAM, what is computed with a window of it."""
        plan = replace(
            plan, tile=tile_elements(self.model, whole=True), crash_safety="round", ring=0
        )
        plan = self._with_window(plan) if self.staged else plan
        return self._with_boundaries(plan, self._fits)

    def _with_boundaries(self, plan: Plan, fits: Callable[[Plan], object]) -> Plan | None:
        """With kept inputs where they are computed or, if that is on a GPU and too much, in RAM."""
        for where in ("device", "host") if self.cuda else ("device",):
            if fits(changed := replace(plan, boundaries=where)):
                return changed
        return None

    def _with_window(self, plan: Plan) -> Plan:
        """Slots for a group and the next; gradients on their way."""
        group = max(len(g) for g in plan.forward_groups)
        waits = plan.clipping == "exact" and plan.gradients == "host"
        return replace(
            plan,
            slots=min(2 * group + 1, self.model.layers),
            host_gradient_slots=self.model.layers if waits else group + 2,
        )

    def _with_resident(self, plan: Plan, count: int) -> Plan:
        """`count` fragments with all their training state on the device: the ends first, then the top blocks."""
        last = plan.last_fragment
        order = [0, last, *range(last - 1, 0, -1)]
        mine = set(order[:count])
        tiers = tuple("device" if i in mine else "host" for i in range(last + 1))
        paged = self.model.layers - len(mine - {0, last})
        return replace(plan, weights=tiers, moments=tiers, slots=min(plan.slots, paged))

    def _with_retained(self, plan: Plan, count: int) -> Plan:
        """The top blocks keep what their backward needs, as far as their weights stay where they are."""
        if plan.staged or "disk" in plan.weights:
            near = "device" if plan.staged else "host"
            top = next(
                (
                    k
                    for k in range(plan.model.layers)
                    if plan.weights[plan.last_fragment - 1 - k] != near
                ),
                plan.model.layers,
            )
            count = min(count, top)
        return replace(plan, retained_blocks=count)

    def _on_disk(self, plan: Plan) -> Plan | None:
        """Everything on disk, at its smallest."""
        layers, group = self.model.layers, max(len(g) for g in plan.forward_groups)
        moments = ("disk",) * (layers + 2)
        plan = replace(
            plan, moments=moments, exchange="disk", gradients="disk", slots=group + 1, ring=2
        )
        if self.staged:
            plan = replace(plan, slots=min(2 * group + 1, layers), host_gradient_slots=group + 2)
        for tier in ("host", "disk") if self.staged else ("disk",):
            placed = replace(plan, weights=("host", *[tier] * layers, "host"))
            if (found := self._with_boundaries(placed, self._with_crash_safety)) is not None:
                safe = self._with_crash_safety(found)
                assert safe is not None
                return safe
        return None

    def _promote_tensors(self, plan: Plan) -> Plan:
        """What memory is left, in the order of what a byte of it saves."""
        layers, group = self.model.layers, max(len(g) for g in plan.forward_groups)
        tiles = -(-plan.fragments[1].size // plan.tile)
        for ring in (tiles, tiles + 2):
            plan = self._replace_if_fits(plan, ring=ring)
        plan = self._replace_if_fits(plan, slots=min(layers, 2 * group + 1))
        if plan.clipping == "exact":
            plan = self._replace_if_fits(
                plan, gradients="host", host_gradient_slots=layers if self.staged else 2
            )
        if "disk" in plan.weights and self.staged:
            plan = self._largest_that_fits(
                plan, layers, lambda p, k: replace(p, weights=_spread_evenly(p, "weights", k))
            )
        spills = self.staged and plan.clipping == "exact" and plan.gradients == "disk"
        if not spills and not (
            self.staged and "disk" in plan.weights
        ):  # those come through the ring with moments
            plan = self._largest_that_fits(
                plan, layers, lambda p, k: replace(p, moments=_spread_evenly(p, "moments", k))
            )
            plan = self._replace_if_fits(plan, moments=("host", *plan.moments[1:-1], "host"))
        if "disk" in plan.weights and not self.staged:
            plan = self._largest_that_fits(
                plan, layers, lambda p, k: replace(p, weights=_spread_evenly(p, "weights", k))
            )
        return self._replace_if_fits(plan, exchange="host")

    def _with_crash_safety(self, plan: Plan) -> Plan | None:
        wanted = self.limits.crash_safety
        for safety in ("exact", "restart") if wanted == "auto" else (wanted,):
            if self._fits(safe := replace(plan, crash_safety=safety)):
                return safe
        return None

    def _replace_if_fits(self, plan: Plan, **changes) -> Plan:
        changed = replace(plan, **changes)
        return changed if self._fits(changed) else plan

    # ---- 3 estimate and 4 simulate

    def _bytes_written(self, plan: Plan) -> int:
        """Bytes to disk in a step."""
        size = 0
        for i in range(plan.last_fragment + 1):
            size += plan.total_bytes("weights", i) if plan.writes_weights(i) else 0
            size += plan.total_bytes("moments", i) if plan.writes_moments(i) else 0
            size += plan.total_bytes("anchor", i) if plan.spills_gradient(i) else 0
        return size

    def _estimate_seconds(self, plan: Plan) -> tuple[float, float]:
        """Roughly the seconds of a step: the busiest resource's, and all of them one after the other."""
        steps = StepSimulation(plan, self.hardware)
        compute = sum(steps.operation_seconds(op) for op in _compute_operations(plan))
        read = sum(
            (2 * plan.total_bytes("weights", i) if plan.weights[i] == "disk" else 0)
            + (plan.total_bytes("moments", i) if plan.moments[i] == "disk" else 0)
            + (plan.total_bytes("anchor", i) if plan.spills_gradient(i) else 0)
            for i in range(plan.last_fragment + 1)
        )
        disk = read / self.hardware.disk_read + self._bytes_written(plan) / self.hardware.disk_write
        moved = {"host": 0, "device": 0}
        for fragment, tier in zip(plan.fragments, plan.weights, strict=True):
            moved["device" if tier == "device" else "host"] += fragment.size
        here, there = (
            cost_model.adam_seconds(
                self.hardware, moved[where], plan.dtype, plan.moments_bits, where
            )
            for where in moved
        )
        compute += there if plan.staged else here
        lanes = (compute, disk, here) if plan.staged else (compute, disk)
        return max(lanes), sum(lanes)

    def _simulate(self, plan: Plan) -> Plan:
        steps = StepSimulation(plan, self.hardware)
        busy, seconds, written = steps.busy_seconds(), steps.step_seconds, self._bytes_written(plan)
        groups = {
            "compute": busy[LaneName.COMPUTE],
            "disk": busy[LaneName.READ] + busy[LaneName.WRITE],
            "link": max(busy[LaneName.IN], busy[LaneName.OUT]),
            "optimizer": busy[LaneName.OPTIMIZER],
        }
        binding = max(groups, key=lambda name: groups[name])
        daily = self.limits.disk_writes_per_day
        if daily and written and seconds < (paced := written * DAY / daily):
            seconds, binding = paced, "disk writes a day"
        return replace(
            plan,
            step_seconds=seconds,
            bottleneck=binding,
            device_bytes=memory_model.device_bytes(plan),
            host_bytes=memory_model.host_bytes(plan),
            disk_bytes=plan.file_bytes(),
            written_per_step=written,
            written_per_day=int(written * DAY / seconds) if written else 0,
        )

    # ---- refuse

    def refusal(self, advise: bool) -> str:
        assert self.shortest is not None
        host, device, disk = self.shortest
        short = []
        if host > self.memory:
            short.append(f"{format_bytes(host)} of memory, and may use {format_bytes(self.memory)}")
        if self.device_memory is not None and device > self.device_memory:
            short.append(
                f"{format_bytes(device)} of {self.hardware.name}'s memory, and may use {format_bytes(self.device_memory)}"
            )
        if disk > self.disk:
            short.append(f"{format_bytes(disk)} of disk, and may use {format_bytes(self.disk)}")
        text = f"this model does not fit: at the least it needs {'; '.join(short) or 'other limits than these'}"
        if not advise:
            return text
        nearest = self._nearest()
        return f"{text}. What would fit: {'; '.join(nearest)}" if nearest else text

    def _nearest(self) -> list[str]:
        """Up to three changes, each enough by itself."""
        limits, found = self.limits, []

        def fits(
            model: ModelSpec = self.model, sequences: int = self.step_sequences, **changes
        ) -> bool:
            return _Search(self.hardware, model, replace(limits, **changes), sequences).fits()

        smaller = [s for s in (4, 2, 1) if s < self.step_sequences and fits(sequences=s)]
        if smaller:
            found.append(f"steps of {smaller[0]} sequences instead of {self.step_sequences}")
        if limits.moments_bits == 32 and fits(moments_bits=8):
            found.append("Adam's moments in 8 bits")
        for name, now in (
            ("memory", self.memory),
            ("device_memory", self.device_memory),
            ("disk", self.disk),
        ):
            if now is None:
                continue
            more = next(
                (now * f for f in (1.25, 1.5, 2, 3, 4, 8, 16) if fits(**{name: int(now * f)})), None
            )
            if more is not None:
                found.append(f"{format_bytes(int(more))} of {name.replace('_', ' ')}")
        sizes = {name: preset(name).parameters for name in PRESETS}
        mine = self.model.parameters
        others = sorted(
            (name for name in PRESETS if sizes[name] < mine), key=lambda name: -sizes[name]
        )
        other = next((name for name in others if fits(model=preset(name))), None)
        if other:
            found.append(f"the preset {other}")
        return found[:3]


def _shape(plan: Plan) -> tuple:
    return plan.sequences, plan.forward_groups


def _compute_operations(plan: Plan) -> Iterator[Operation]:
    """The computing of a step."""
    for kind, groups in (
        (OperationKind.FORWARD, plan.forward_groups),
        (OperationKind.BACKWARD, plan.backward_groups),
    ):
        for group in groups:
            yield Operation(kind, LaneName.COMPUTE, group)
    yield Operation(OperationKind.EMBED, LaneName.COMPUTE, (0,))
    yield Operation(OperationKind.HEAD, LaneName.COMPUTE, (plan.last_fragment,))


def _spread_evenly(plan: Plan, kind: str, count: int) -> tuple[str, ...]:
    """Tiers with `count` blocks in memory, evenly among those on disk, so that reading never piles up; the ends stay as
    they are."""
    layers, tiers = plan.model.layers, list(getattr(plan, kind))
    for i in plan.blocks:
        tiers[i] = "host" if i * count // layers > (i - 1) * count // layers else "disk"
    return tuple(tiers)
