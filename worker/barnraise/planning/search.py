"""Search for the plan that trains a model fastest within what a machine may use.

Pure: no torch, under a second for 175B parameters. The search has five stages:

1. Candidates: each micro-batch size, way of clipping and number of blocks per kept input.
2. Fill tiers: put the state as near to the computation as the budgets allow, in the order of what
   a byte there saves.
3. Estimate: rank the candidates by a rough step time, with perfect overlap.
4. Simulate: run those through `simulator.py` that can be the fastest by this time.
5. Pick: take the fastest; exact clipping wins if it is nearly as fast.

A model that cannot fit is refused before anything is allocated, with the nearest changes that fit.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from barnraise.errors import PlanError
from barnraise.formats import format_bytes
from barnraise.planning import memory_model
from barnraise.planning.budgets import compute_budgets, extend_to_limits
from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import Limits
from barnraise.planning.plan import REMOTE, DeviceShare, PipelineStage, Plan, tile_elements
from barnraise.planning.program import LaneName, Operation, OperationKind
from barnraise.planning.simulator import StepSimulation
from barnraise.spec import ADAMW, MUON, PRESETS, ModelSpec, preset

TOLERANCE = 0.004  # plans that can be faster by less than this fraction are not simulated
# Exact clipping is dropped only if it makes a step longer by this factor. Exact crash safety is
# chosen only if it makes a step longer by less, and writes less than this many bytes a day.
EXACT_COSTS = 1.10
EXACT_WRITES = 10**12
RESIDENTS = 12  # the number of fragments on the device is tried in this many steps
GROUPS = (1, 2, 4, 8)  # blocks per kept input
DAY = 86_400.0  # seconds
WRITES_LIMIT = "disk writes a day"  # the bottleneck of a plan that waits for the next day


def make_plan(
    hardware: Hardware,
    model: ModelSpec,
    limits: Limits | None = None,
    step_sequences: int = 8,
    advise: bool = True,
    optimizer: str = ADAMW,
) -> Plan:
    """Find the plan with the fastest optimizer steps of `step_sequences` sequences.

    Raises:
        PlanError: the model does not fit. The message names the resource that is short and, with
            `advise`, the nearest changes that would fit.
    """
    return _Search(hardware, model, limits or Limits(), step_sequences, optimizer).find(advise)


def make_stage_plan(
    hardware: Hardware,
    model: ModelSpec,
    stage: PipelineStage,
    limits: Limits,
    step_sequences: int,
    optimizer: str = ADAMW,
) -> Plan:
    """Find the plan with which one machine of a crew does its part of each step soonest.

    The plan's seconds are those of its own operations, without waiting for other machines.

    Raises:
        PlanError: the stage does not fit; the message names the resource that is short.
    """
    alone = replace(hardware, others=())
    return _Search(alone, model, limits, step_sequences, optimizer, stage).find(advise=False)


class _Search:
    """Search the plans of one model on one machine; remember the plan that came nearest to fit."""

    def __init__(
        self,
        hardware: Hardware,
        model: ModelSpec,
        limits: Limits,
        step_sequences: int,
        optimizer: str,
        stage: PipelineStage | None = None,
    ) -> None:
        if optimizer == MUON and limits.moments_bits != 32:
            raise PlanError(
                "Muon's momentum is stored in 32 bits: leave out --moments-8bit for this run"
            )
        self.optimizer = optimizer
        self.hardware = hardware
        self.model = model
        self.limits = limits
        self.step_sequences = step_sequences
        self.stage = stage
        local = stage.fragments if stage else range(model.layers + 2)
        self.blocks = [i for i in local if 0 < i <= model.layers]
        # "host" where this machine holds a fragment, whatever tier is chosen for it later.
        self.tiers = tuple("host" if i in local else REMOTE for i in range(model.layers + 2))
        self.cuda = hardware.device == "cuda"
        self.staged = self.cuda or limits.device_memory is not None
        self.budgets = compute_budgets(hardware, limits)
        self.dtype = limits.precision
        if self.dtype == "auto":
            is_common = all(other.dtype == hardware.dtype for other in hardware.others)
            self.dtype = hardware.dtype if self.staged and is_common else "float32"
        # The bytes (host, device, disk) of the plan that came nearest to fit, and its need divided
        # by the budget on the tier that lacks most.
        self.shortest: tuple[int, int, int] | None = None
        self.missing = math.inf

    def find(self, advise: bool) -> Plan:
        """Return the best plan that fits and may write what it writes, or raise PlanError."""
        best = self._best()
        if best is None or self.writes_too_much(best):
            raise PlanError(self.refusal(best, advise))
        return best

    def _best(self) -> Plan | None:
        """Return the best plan, or None if none fits.

        Exact clipping is the recipe's own: it is preferred where it is nearly as fast, and with
        Muon, whose matrices no norm clips, where it is as fast. In a crew's stage each group but
        the last delays the outputs, and with them all later stages, by its time.
        """
        fitting: dict[str | int, list[Plan]] = {}
        for candidate in self._generate_candidates():
            for plan in self._fill_tiers(candidate):
                kind = len(plan.forward_groups) if self.stage else plan.clipping
                fitting.setdefault(kind, []).append(plan)
        if not fitting:
            return None
        best = {kind: self._pick_fastest(fitting[kind]) for kind in sorted(fitting, key=str)}
        if self.stage:
            quickest = min(best.values(), key=lambda p: p.step_seconds * len(p.forward_groups))
            return self._with_safest_commits(quickest)
        fastest = min(best.values(), key=lambda plan: plan.step_seconds)
        exact = best.get("exact", fastest)
        costs = 1.0 if self.optimizer == MUON else EXACT_COSTS
        is_cheap = exact.step_seconds <= costs * fastest.step_seconds
        return self._with_safest_commits(exact if is_cheap else fastest)

    # ---- 5 pick ----

    def _with_safest_commits(self, plan: Plan) -> Plan:
        """Commit every step if the limits leave the choice and it costs little."""
        if self.limits.crash_safety != "auto" or not plan.on_disk:
            return plan
        exact = replace(plan, crash_safety="exact")
        longest = EXACT_COSTS * plan.step_seconds
        if self._bytes_written(exact) * DAY / longest >= EXACT_WRITES or not self._check_fit(exact):
            return plan
        exact = self._simulate(exact)
        is_cheap = exact.step_seconds < longest and exact.written_per_day < EXACT_WRITES
        return exact if is_cheap else plan

    def _pick_fastest(self, fitting: list[Plan]) -> Plan:
        """Return the fastest of plans of one kind, simulating as few as possible.

        A step lasts at least as long as its busiest resource, which is quick to compute. So plans
        are simulated in the order of this bound, and the rest is not when it cannot be faster. A
        larger budget only adds plans, so it never gives a slower one by more than TOLERANCE.
        """
        bounds = [(self._estimate_seconds(plan), index) for index, plan in enumerate(fitting)]
        (_, first), *others = sorted(bounds)
        best = self._simulate(fitting[first])
        for bound, index in others:
            if bound >= best.step_seconds * (1 - TOLERANCE):
                break
            simulated = self._simulate(fitting[index])
            best = min(best, simulated, key=lambda plan: plan.step_seconds)
        return best

    # ---- 1 candidates ----

    def _generate_candidates(self) -> Iterator[Plan]:
        """Yield plans of the smallest size; `_fill_tiers` distributes the memory that is left."""
        wanted = self.limits.clipping
        clippings = ("exact", "layer") if wanted == "auto" else (wanted,)
        sizes = [s for s in range(self.step_sequences, 0, -1) if self.step_sequences % s == 0]
        if self.stage:
            clippings, sizes = ("exact",), [self.stage.sequences]
        for sequences in sizes:
            if self.step_sequences // sequences <= len(self.hardware.others):
                continue  # each device computes at least one micro-batch
            for clipping in clippings:
                for group, kept_inputs in self._list_groupings():
                    forward = tuple(
                        tuple(self.blocks[first : first + group])
                        for first in range(0, len(self.blocks), group)
                    )
                    plan = Plan(
                        model=self.model,
                        device=self.hardware.device_name,
                        threads=max(1, self.hardware.cores),
                        dtype=self.dtype,
                        staged=self.staged,
                        sequences=sequences,
                        micro_batches=self.step_sequences // sequences,
                        forward_groups=forward,
                        backward_groups=tuple(reversed(forward)),
                        kept_inputs=kept_inputs,
                        boundaries="device",
                        weights=self.tiers,
                        moments=self.tiers,
                        optimizer=self.optimizer,
                        moments_bits=self.limits.moments_bits,
                        deterministic=self.limits.deterministic and self.cuda,
                        daily_write_limit=self.budgets.disk_writes_per_day,
                        clipping=clipping,
                        slots=0,
                        gradient_slots=group + 1,
                        tile=tile_elements(self.model, whole=False),
                    )
                    yield deal_step(plan, self.hardware)

    def _list_groupings(self) -> list[tuple[int, str]]:
        """List the blocks per group that are tried, with the inputs that forward keeps.

        A stage of a crew sends its first outputs once its last group begins: it is best as one.
        """
        layers = len(self.blocks)
        groupings = [
            (group, "block" if group == 1 else "group")
            for group in GROUPS
            if group <= max(1, layers // 2)
        ]
        if self.stage and layers > 1:
            groupings += [(layers, "block"), (layers, "group")]
        return groupings

    # ---- 2 fill tiers ----

    def _fill_tiers(self, plan: Plan) -> list[Plan]:
        """Place the candidate's state as near to the computation as it fits.

        Returns:
            Plans that fit and differ in how much stays on the device; none if even the smallest
            does not fit.
        """
        placed = self._in_memory(plan)
        if not placed:
            placed = [self._promote(way) for way in self._on_disk(plan)]
        return [filled for way in placed for filled in self._fill_device(way)]

    def _fill_device(self, placed: Plan) -> list[Plan]:
        """Return a plan with more and more on the device, and retained activations where it pays.

        Returns:
            Plans that fit; the plan itself comes first.
        """
        plans = [placed]
        if placed.devices:  # what remains of their memory keeps weights for the backward
            return [self._largest_that_fits(placed, len(self.blocks), _with_slots)]
        if self.cuda:
            # The device updates resident fragments between its computations, so the largest number
            # that fits is not always the fastest. The counts do not depend on the budget: more
            # memory only adds plans.
            fragments = len(placed.local_fragments)
            plans.append(self._largest_that_fits(placed, fragments, self._with_resident))
            counts = sorted({fragments * k // RESIDENTS for k in range(1, RESIDENTS)} - {0})
            resident = (self._with_resident(placed, count) for count in counts)
            plans += filter(self._check_fit, resident)
        layers = len(self.blocks)
        if placed.kept_inputs == "block" and not placed.on_disk:
            plans = [self._largest_that_fits(way, layers, self._with_retained) for way in plans]
        if placed.boundaries == "host":
            plans = [self._largest_that_fits(way, layers, _with_near_inputs) for way in plans]
            # With all inputs near, a plan is the same as one with its boundaries on the device.
            plans = [way for way in plans if way.inputs_in_ram]
        return plans

    def fits(self) -> bool:
        """Whether any plan fits."""
        smallest = [plan for plan in self._generate_candidates() if plan.sequences == 1]
        return any(map(self._in_memory, smallest)) or any(map(self._fits_on_disk, smallest))

    def _fits_on_disk(self, plan: Plan) -> bool:
        """Whether a candidate fits on disk, and a day is enough to write what a step writes."""
        ways = self._on_disk(plan)
        return any(
            not (self.writes_too_much(way) and self.writes_too_much(self._promote(way)))
            for way in ways
        )

    def writes_too_much(self, plan: Plan) -> bool:
        """Whether a step of the plan writes more to disk than may be written in a day."""
        daily = self.budgets.disk_writes_per_day
        return daily is not None and self._bytes_written(plan) > daily

    def _check_fit(self, plan: Plan) -> bool:
        """Return whether a plan fits; remember it if it came nearest so far."""
        sizes = memory_model.all_device_bytes(plan)
        needs = memory_model.host_bytes(plan), *sizes, plan.file_bytes()
        budgets = self.budgets.memory, self.budgets.device_memory
        budgets = *budgets, *self.budgets.other_devices, self.budgets.disk
        missing = max(
            need / max(1, budget)
            for need, budget in zip(needs, budgets, strict=True)
            if budget is not None
        )
        if missing < self.missing:
            self.missing, self.shortest = missing, (needs[0], max(sizes), needs[-1])
        return missing <= 1

    def _largest_that_fits(
        self, plan: Plan, high: int, change: Callable[[Plan, int], Plan]
    ) -> Plan:
        """Return `change(plan, k)` with the largest k ≤ high that fits; the plan fits as k = 0."""
        low, middle = 0, high  # mostly all of them fit
        while low < high:
            if self._check_fit(change(plan, middle)):
                low = middle
            else:
                high = middle - 1
            middle = (low + high + 1) // 2
        return change(plan, low) if low else plan

    def _in_memory(self, plan: Plan) -> list[Plan]:
        """Place everything in RAM, with a window for the computation if the plan is staged.

        Returns:
            Plans that fit.
        """
        plan = replace(
            plan, tile=tile_elements(self.model, whole=True), crash_safety="round", ring=0
        )
        plan = self._with_window(plan) if self.staged else plan
        ways = self._with_boundaries(plan, self._check_fit)
        if not self.cuda:
            return ways
        return [self._largest_that_fits(way, self.model.layers, _with_host_slots) for way in ways]

    def _with_boundaries(self, plan: Plan, fits: Callable[[Plan], object]) -> list[Plan]:
        """Keep inputs where they are computed or, on a GPU, in RAM; return what fits.

        Inputs in RAM leave room for more fragments on the GPU, whichever is faster.
        """
        places = ("device", "host") if self.cuda else ("device",)
        ways = (replace(plan, boundaries=where) for where in places)
        return [way for way in ways if fits(way)]

    def _with_window(self, plan: Plan) -> Plan:
        """Provide slots for a group and the next one, and for gradients in transfer."""
        group = max(len(g) for g in plan.forward_groups)
        waits = plan.clipping == "exact" and plan.gradients == "host"
        return replace(
            plan,
            slots=min(2 * group + 1, len(self.blocks)),
            host_gradient_slots=len(self.blocks) if waits else group + 2,
        )

    def _with_resident(self, plan: Plan, count: int) -> Plan:
        """Place `count` fragments with all their training state on the device.

        The embedding and the final norm come first, then the top blocks.
        """
        order = [*plan.ends, *reversed(plan.blocks)]
        resident = set(order[:count])

        def move(tiers: tuple[str, ...]) -> tuple[str, ...]:
            return tuple("device" if i in resident else tier for i, tier in enumerate(tiers))

        paged = len(self.blocks) - len(resident - set(plan.ends))
        return replace(
            plan,
            weights=move(plan.weights),
            moments=move(plan.moments),
            slots=min(plan.slots, paged),
        )

    def _with_retained(self, plan: Plan, count: int) -> Plan:
        """Retain the activations of the top blocks, as far as their weights stay in place."""
        if plan.staged or "disk" in plan.weights:
            near = "device" if plan.staged else "host"
            in_place = 0
            for i in reversed(plan.blocks):
                if plan.weights[i] != near:
                    break
                in_place += 1
            count = min(count, in_place)
        return replace(plan, retained_blocks=count)

    def _on_disk(self, plan: Plan) -> list[Plan]:
        """Place everything on disk, with the smallest buffers.

        Returns:
            Plans that fit.
        """
        layers = len(self.blocks)
        group = max(len(g) for g in plan.forward_groups)
        moments = _placed(self.tiers, "disk", plan.local_fragments)
        wanted = self.limits.crash_safety
        plan = replace(
            plan,
            moments=moments,
            exchange="disk",
            gradients="disk",
            # It takes less disk and less time. `best` commits every step where that costs little.
            crash_safety="restart" if wanted == "auto" else wanted,
            slots=group + 1,
            ring=2,
        )
        if self.staged:
            plan = replace(plan, slots=min(2 * group + 1, layers), host_gradient_slots=group + 2)
        for tier in ("host", "disk") if self.staged else ("disk",):
            placed = replace(plan, weights=_placed(self.tiers, tier, plan.blocks))
            if fitting := self._with_boundaries(placed, self._check_fit):
                return fitting
        return []

    def _promote(self, plan: Plan) -> Plan:
        """Distribute the memory that is left, in the order of what a byte saves."""
        layers = len(self.blocks)
        group = max(len(g) for g in plan.forward_groups)
        tiles = -(-plan.fragments[1].size // plan.tile)
        for ring in (tiles, tiles + 2):
            plan = self._replace_if_fits(plan, ring=ring)
        plan = self._replace_if_fits(plan, slots=min(layers, 2 * group + 1))
        if plan.clipping == "exact":
            plan = self._replace_if_fits(
                plan, gradients="host", host_gradient_slots=layers if self.staged else 2
            )
        if "disk" in plan.weights and self.staged:
            plan = self._largest_that_fits(plan, layers, partial(_spread_evenly, kind="weights"))
        # Spilled gradients, and weights that go from disk to a device, pass through the ring
        # together with moments: these then stay on disk.
        spills = self.staged and plan.clipping == "exact" and plan.gradients == "disk"
        if not spills and not (self.staged and "disk" in plan.weights):
            plan = self._largest_that_fits(plan, layers, partial(_spread_evenly, kind="moments"))
            plan = self._replace_if_fits(plan, moments=_placed(plan.moments, "host", plan.ends))
        if "disk" in plan.weights and not self.staged:
            plan = self._largest_that_fits(plan, layers, partial(_spread_evenly, kind="weights"))
        return self._replace_if_fits(plan, exchange="host")

    def _replace_if_fits(self, plan: Plan, **changes: Any) -> Plan:
        changed = replace(plan, **changes)
        return changed if self._check_fit(changed) else plan

    # ---- 3 estimate and 4 simulate ----

    def _bytes_written(self, plan: Plan) -> int:
        """Return the bytes that a step writes to disk."""
        size = 0
        for i in plan.local_fragments:
            size += plan.total_bytes("weights", i) if plan.writes_weights(i) else 0
            size += plan.total_bytes("moments", i) if plan.writes_moments(i) else 0
            size += plan.total_bytes("anchor", i) if plan.spills_gradient(i) else 0
        return size

    def _estimate_seconds(self, plan: Plan) -> float:
        """Estimate the seconds of a step with perfect overlap: no simulated step is shorter.

        They are those of the busiest resource, or of the longest chain of operations that wait for
        each other.
        """
        steps = StepSimulation(plan, self.hardware)
        seconds = max(
            (compute_seconds(steps, device) for device in range(len(plan.device_plans))),
            key=lambda by_kind: sum(by_kind.values()),
        )
        compute = sum(seconds.values())
        read = sum(
            (2 * plan.total_bytes("weights", i) if plan.weights[i] == "disk" else 0)
            + (plan.total_bytes("moments", i) if plan.moments[i] == "disk" else 0)
            + (plan.total_bytes("anchor", i) if plan.spills_gradient(i) else 0)
            for i in range(plan.last_fragment + 1)
        )
        # What a step leaves in slots is not read again.
        kept = min(2 * plan.slots, 2 * len(plan.blocks)) * plan.total_bytes("weights", 1)
        writing = self._bytes_written(plan) / self.hardware.sustained_disk_write
        disk = max(0, read - kept) / self.hardware.disk_read + writing
        host_update, device_update = _sum_update_seconds(steps)
        if plan.staged:
            compute += device_update
        else:
            compute += host_update
            host_update = 0.0
        chain = host_update + seconds[OperationKind.HEAD]
        if any(plan.weights[i] != "device" for i in plan.blocks):
            # Updates follow the whole gradient, and end before the next backward; or they follow
            # the first block's gradient, and end before the next forward. Of the latter, those
            # whose gradients can wait in RAM may run during the forward as well.
            if plan.defers_updates:
                chain += seconds[OperationKind.BACKWARD]
            else:
                waiting = min(1.0, plan.host_gradient_slots / self.model.layers)
                chain += seconds[OperationKind.FORWARD] - waiting * host_update
        return max(compute, disk, chain, self._least_seconds(plan))

    def _least_seconds(self, plan: Plan) -> float:
        """Return the seconds that a step's writes must last to stay within the day's."""
        daily = self.budgets.disk_writes_per_day
        return 0.0 if daily is None else self._bytes_written(plan) * DAY / max(1, daily)

    def _simulate(self, plan: Plan) -> Plan:
        """Return the plan with its predictions filled in."""
        steps = StepSimulation(plan, self.hardware)
        busy = steps.busy_seconds
        seconds = steps.step_seconds
        written = self._bytes_written(plan)
        groups = {
            "compute": busy[LaneName.COMPUTE],
            "disk": busy[LaneName.READ] + busy[LaneName.WRITE],
            "link": max(busy[LaneName.IN], busy[LaneName.OUT], steps.shared_memory_seconds),
            "optimizer": busy[LaneName.OPTIMIZER],
        }
        binding = max(groups, key=lambda name: groups[name])
        if seconds < self._least_seconds(plan):
            seconds = self._least_seconds(plan)
            binding = WRITES_LIMIT
        return replace(
            plan,
            step_seconds=seconds,
            bottleneck=binding,
            device_bytes=memory_model.device_bytes(plan),
            card_bytes=tuple(memory_model.all_device_bytes(plan)) if plan.devices else (),
            host_bytes=memory_model.host_bytes(plan),
            disk_bytes=plan.file_bytes(),
            written_per_step=written,
            written_per_day=int(written * DAY / seconds) if written else 0,
        )

    # ---- refuse ----

    def refusal(self, best: Plan | None, advise: bool) -> str:
        """Explain which resource is short and, with `advise`, what would fit.

        `best` is the best plan that fits, but writes too much; None if none fits.
        """
        text = self._describe_shortage() if best is None else self._excess_writes(best)
        if not advise:
            return text
        nearest = self._list_nearest(writes=best is not None)
        return f"{text}. What would fit: {'; '.join(nearest)}" if nearest else text

    def _excess_writes(self, plan: Plan) -> str:
        daily = self.budgets.disk_writes_per_day
        assert daily is not None
        return (
            f"this model does not fit: one step would write {format_bytes(plan.written_per_step)} "
            f"to disk, and may write {format_bytes(daily)} a day"
        )

    def _describe_shortage(self) -> str:
        """Explain what the plan that came nearest to fit lacks."""
        assert self.shortest is not None
        host, device, disk = self.shortest
        budgets = self.budgets
        short: list[str] = []
        if host > budgets.memory:
            short.append(
                f"{format_bytes(host)} of memory, and may use {format_bytes(budgets.memory)}"
            )
        if budgets.device_memory is not None and device > budgets.device_memory:
            besides = budgets.device_overhead
            short.append(
                f"{format_bytes(device + besides)} of {self.hardware.name}'s memory, "
                f"and may use {format_bytes(budgets.device_memory + besides)}"
            )
        if disk > budgets.disk:
            short.append(f"{format_bytes(disk)} of disk, and may use {format_bytes(budgets.disk)}")
        needs = "; ".join(short) or "other limits than these"
        return f"this model does not fit: it needs at least {needs}"

    def _list_nearest(self, writes: bool) -> list[str]:
        """List up to three changes, each enough by itself; with `writes` more writes a day, too."""
        limits = self.limits
        advice: list[str] = []

        def fits(
            model: ModelSpec = self.model, sequences: int = self.step_sequences, **changes: Any
        ) -> bool:
            changed = replace(limits, **changes)
            hardware = extend_to_limits(self.hardware, changed)
            return _Search(hardware, model, changed, sequences, self.optimizer).fits()

        smaller = [s for s in (4, 2, 1) if s < self.step_sequences and fits(sequences=s)]
        if smaller:
            advice.append(f"steps of {smaller[0]} sequences instead of {self.step_sequences}")
        may_shrink = limits.moments_bits == 32 and self.optimizer == ADAMW
        if may_shrink and fits(moments_bits=8):
            advice.append("Adam's moments in 8 bits")
        budgets = {"memory": self.budgets.memory, "disk": self.budgets.disk}
        if self.budgets.device_memory is not None:
            besides = self.budgets.device_overhead
            budgets["device_memory"] = self.budgets.device_memory + besides
        if writes and self.budgets.disk_writes_per_day is not None:
            budgets["disk_writes_per_day"] = self.budgets.disk_writes_per_day
        for name, budget in budgets.items():
            for factor in (1.25, 1.5, 2, 3, 4, 8, 16):
                larger: dict[str, Any] = {name: int(budget * factor)}
                if fits(**larger):
                    more = format_bytes(int(budget * factor))
                    advice.append(f"{more} of {name.replace('_', ' ')}")
                    break
        presets = ((preset(name), name) for name in PRESETS)
        smaller_presets = [
            (model.parameters, name)
            for model, name in presets
            if model.architecture == self.model.architecture
            and model.parameters < self.model.parameters
        ]
        by_size = sorted(smaller_presets, reverse=True)
        largest = next((name for _, name in by_size if fits(model=preset(name))), None)
        if largest:
            advice.append(f"the preset {largest}")
        return advice[:3]


def _with_host_slots(plan: Plan, count: int) -> Plan:
    """Return a plan in which so many gradients can wait in RAM, so that backward need not wait."""
    return replace(plan, host_gradient_slots=max(plan.host_gradient_slots, count))


def _with_slots(plan: Plan, count: int) -> Plan:
    return replace(plan, slots=max(plan.slots, count))


def _with_near_inputs(plan: Plan, count: int) -> Plan:
    return replace(plan, near_inputs=min(count, len(plan.stored_inputs)))


def _sum_update_seconds(steps: StepSimulation) -> tuple[float, float]:
    """Return the seconds of all updates on the host and on the device. Blocks are alike."""
    plan = steps.plan
    seconds = {False: 0.0, True: 0.0}
    blocks = [plan.weights[i] for i in plan.blocks]
    for i in plan.ends:
        seconds[plan.updates_on_device(i)] += steps.update_seconds(i)
    for tier in dict.fromkeys(blocks):
        i = plan.blocks[blocks.index(tier)]
        seconds[plan.updates_on_device(i)] += blocks.count(tier) * steps.update_seconds(i)
    return seconds[False], seconds[True]


def deal_step(plan: Plan, hardware: Hardware) -> Plan:
    """Return a plan of one device with its micro-batches dealt to all that a machine has."""
    if not hardware.others:
        return plan
    alone = replace(plan, micro_batches=1)
    seconds = [
        sum(compute_seconds(StepSimulation(alone, card)).values()) for card in hardware.cards
    ]
    counts = deal_micro_batches(plan.micro_batches, seconds)
    names = (card.device_name for card in hardware.cards)
    return replace(plan, devices=tuple(map(DeviceShare, names, counts)))


def deal_micro_batches(count: int, seconds: Sequence[float]) -> list[int]:
    """Deal micro-batches to devices so that the last one is done soonest; at least one each.

    Args:
        count: of the micro-batches; at least as many as devices.
        seconds: that each device takes for one.
    """
    dealt = [1] * len(seconds)
    for _ in range(count - len(seconds)):
        ends = [(number + 1) * each for number, each in zip(dealt, seconds, strict=True)]
        dealt[ends.index(min(ends))] += 1
    return dealt


def compute_seconds(steps: StepSimulation, device: int = 0) -> dict[OperationKind, float]:
    """Return the seconds that a device computes in a step, by the kind of operation."""
    seconds = dict.fromkeys(OperationKind, 0.0)
    for op in _compute_operations(steps.plan, device):
        seconds[op.kind] += steps.price(op).seconds
    return seconds


def _compute_operations(plan: Plan, device: int) -> Iterator[Operation]:
    """Yield a device's computations of a step."""
    for kind, groups in (
        (OperationKind.FORWARD, plan.forward_groups),
        (OperationKind.BACKWARD, plan.backward_groups),
    ):
        for group in groups:
            yield Operation(kind, LaneName.COMPUTE, group, device=device)
    if not plan.ends:
        return
    yield Operation(OperationKind.EMBED, LaneName.COMPUTE, (0,), device=device)
    yield Operation(OperationKind.HEAD, LaneName.COMPUTE, (plan.last_fragment,), device=device)


def _placed(tiers: Sequence[str], tier: str, fragments: Collection[int]) -> tuple[str, ...]:
    """Return the tiers of all fragments, with some of them on another one."""
    return tuple(tier if i in fragments else before for i, before in enumerate(tiers))


def _spread_evenly(plan: Plan, count: int, kind: str) -> Plan:
    """Place `count` blocks' "weights" or "moments" in memory, spread evenly among those on disk.

    So the reads spread over the step as well. The tiers of the embedding and the final norm stay.
    """
    layers = len(plan.blocks)
    spread = list(getattr(plan, kind))
    for number, i in enumerate(plan.blocks):
        stays = (number + 1) * count // layers > number * count // layers
        spread[i] = "host" if stays else "disk"
    return replace(plan, **{kind: tuple(spread)})
