"""Compare a swapped run's bits with those of the same run with everything resident.

Compared are weights, both moments and losses.

    python benchmarks/swap/bitwise.py                                     # all 6,144 cases
    python benchmarks/swap/bitwise.py --tier memory --tier "disk exact"   # two tiers, 3,072 cases
    python benchmarks/swap/bitwise.py --every 10                          # every tenth case
    python benchmarks/swap/bitwise.py --optimizer muon                    # with Muon

"The same run" has the same engine, the same order of micro-batches and the same recomputation. This
script needs no package but torch.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

try:
    import barnraise  # noqa: F401  (is it installed, or on the path already?)
except ImportError:
    sys.path.insert(0, str(Path(__file__).parents[2] / "worker"))

from barnraise.planning.plan import Plan, tile_elements
from barnraise.spec import ADAMW, OPTIMIZERS, UNIT_BITS, Fragment, ModelSpec, Recipe
from barnraise.swap.engine import Engine
from barnraise.swap.muon_moments import view_moments
from barnraise.swap.state_store import FragmentSequence, StateStore

MODEL = ModelSpec(layers=8, width=16, heads=2, context=8, vocabulary=256)
RECIPE = Recipe(learning_rate=3e-3, clip=0.5)
SEQUENCES = 8  # of a step
STEPS = 20
TIERS = ("memory", "disk exact", "disk restart", "staged disk")
CLIPPINGS = ("none", "exact", "layer")
MICRO_BATCHES = (1, 2, 4, 8)

Groups = tuple[tuple[int, ...], ...]
# A run's losses, and at its end (weights, m, v) of each fragment.
RunResult = tuple[list[float], list[Tensor]]


@dataclass(frozen=True)
class Case:
    """One swapped run; `forward` and `backward` are groupings, numbered as in `group_blocks`."""

    micro_batches: int
    tier: str
    clipping: str
    forward: int
    backward: int
    optimizer: str = ADAMW

    def plan(self, model: ModelSpec = MODEL) -> Plan:
        """Return the plan of this case."""
        return replace(swapped_plan(model, self), optimizer=self.optimizer)


class HeaderRecorder:
    """A stand-in for the anchor that only records the headers of updates."""

    def __init__(self) -> None:
        """Begin without headers."""
        self.headers: list[Any] = []

    def record(self, header: Any) -> None:
        """Record an update's header."""
        self.headers.append(header)


def all_cases(optimizer: str = ADAMW) -> Iterator[Case]:
    """Yield the whole product of cases with an optimizer.

    Forward and backward have the same grouping in half of it, and every grouping occurs in both.
    """
    groupings = 1 << MODEL.layers - 1
    product = itertools.product(MICRO_BATCHES, TIERS, CLIPPINGS, range(groupings))
    for number, (micro_batches, tier, clipping, grouping) in enumerate(product):
        forward = grouping if number % 2 else (37 * grouping + 11) % groupings
        yield Case(micro_batches, tier, clipping, forward, grouping, optimizer)


def group_blocks(layers: int, cuts: int) -> Groups:
    """Return blocks 1…layers in groups, bottom up, cut after block k + 1 where bit k is set."""
    groups = []
    first = 1
    for i in range(1, layers + 1):
        if i == layers or cuts >> (i - 1) & 1:
            groups.append(tuple(range(first, i + 1)))
            first = i + 1
    return tuple(groups)


def resident_plan(
    model: ModelSpec = MODEL, micro_batches: int = 1, clipping: str = "exact", **changes: Any
) -> Plan:
    """Return the plan with everything in memory where it is computed: nothing moves.

    Args:
        model: the model's shape.
        micro_batches: micro-batches of a step of SEQUENCES sequences.
        clipping: "none", "exact" or "layer".
        **changes: other fields of the plan.
    """
    single_blocks = group_blocks(model.layers, -1)
    in_memory = ("host",) * (model.layers + 2)
    plan = Plan(
        model=model,
        sequences=SEQUENCES // micro_batches,
        micro_batches=micro_batches,
        clipping=clipping,
        forward_groups=single_blocks,
        backward_groups=single_blocks[::-1],
        weights=in_memory,
        moments=in_memory,
        tile=tile_elements(model, whole=True),
    )
    return replace(plan, **changes)


def swapped_plan(model: ModelSpec, case: Case) -> Plan:
    """Return the case's plan for a model."""
    forward = group_blocks(model.layers, case.forward)
    backward = group_blocks(model.layers, case.backward)[::-1]
    largest = max(len(group) for group in (*forward, *backward))
    plan = replace(
        resident_plan(model, case.micro_batches, case.clipping),
        forward_groups=forward,
        backward_groups=backward,
        kept_inputs="group" if case.backward % 3 else "block",
        slots=min(largest + 1 + case.forward % 2, model.layers),
        gradient_slots=largest + 1,
        host_gradient_slots=largest,
    )
    if case.tier == "memory":  # Staged: what a GPU would get by a copy is copied within RAM.
        slots = model.layers if case.clipping == "exact" else largest
        return replace(plan, staged=True, host_gradient_slots=slots)
    return plan_on_disk(
        plan, restart=case.tier == "disk restart", staged=case.tier == "staged disk"
    )


def plan_on_disk(
    plan: Plan, restart: bool = False, staged: bool = False, tile: int = 2048, **changes: Any
) -> Plan:
    """Return the plan with blocks, moments and the exchange's state on disk."""
    layers = plan.model.layers
    return replace(
        plan,
        weights=("host", *["disk"] * layers, "host"),
        moments=("disk",) * (layers + 2),
        exchange="disk",
        gradients="disk",
        crash_safety="restart" if restart else "exact",
        staged=staged,
        tile=tile,
        slots=plan.slots or 2,
        ring=3,
        **changes,
    )


# ---- running ----------------------------------------------------------------------------------


def initial_units(fragment: Fragment) -> Tensor:
    """Return a fragment's initial weights in units, int32 [size]."""
    generator = torch.Generator().manual_seed(fragment.index)
    units = torch.zeros(fragment.size, dtype=torch.int32)
    for slot in fragment.slots:
        target = units[slot.offset : slot.offset + slot.size]
        if slot.initial == "ones":
            target.fill_(1 << UNIT_BITS)
        elif slot.initial == "normal":
            values = torch.randn(slot.size, generator=generator, dtype=torch.float64)
            target.copy_(values.mul_(slot.deviation).round_())
    return units


def sample_text(model: ModelSpec, sequences: int, seed: int) -> Tensor:
    """Return int64 [sequences, context + 1], in which each token is the last one plus one."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(model.vocabulary, (sequences, 1), generator=generator)
    return (first + torch.arange(model.context + 1)) % model.vocabulary


def open_engine(plan: Plan, folder: Path | None = None, recipe: Recipe = RECIPE) -> Engine:
    """Return an engine on a fresh state, in a folder if the plan has a disk.

    It trains with the plan's optimizer.
    """
    recipe = replace(recipe, optimizer=plan.optimizer)
    store = StateStore(plan, folder)
    anchor = FragmentSequence(store, "anchor")
    for fragment in plan.fragments:
        anchor[fragment.index] = initial_units(fragment)
    return Engine(
        plan, recipe, store, HeaderRecorder(), describe=lambda progress: str(progress.position)
    )


def read_state(engine: Engine) -> list[Tensor]:
    """Flush, and return copies in RAM of (fp32 master weights, m, v) of each fragment."""
    engine.flush()
    engine.apply_queued()
    plan = engine.plan
    state: list[Tensor] = []
    for i in plan.local_fragments:
        tiles = [_read_tile(engine, i, t) for t in range(plan.tile_count(i))]
        state += [torch.cat(tensors) for tensors in zip(*tiles, strict=True)]
    return state


def _read_tile(engine: Engine, i: int, t: int) -> list[Tensor]:
    plan, store = engine.plan, engine.store
    begin, end = plan.tile_bounds(i, t)
    size = end - begin
    weights, record = (store.load_tile(kind, i, t) for kind in ("weights", "moments"))
    moments = view_moments(plan, i, t, record)
    dtype = torch.bfloat16 if plan.dtype == "bfloat16" else torch.float32
    master = moments.master(weights[: size * plan.streamed_bytes].view(dtype))
    return [tensor.clone().cpu() for tensor in (master, *moments.to_float32())]


def train(engine: Engine, steps: int, first: int = 0) -> list[float]:
    """Train `steps` steps on the texts of step `first` and after, and return their losses."""
    plan = engine.plan
    losses = []
    for step in range(first, first + steps):
        batch = sample_text(plan.model, plan.sequences * plan.micro_batches, seed=step)
        losses.append(engine.step(list(batch.split(plan.sequences)), position=step + 1).loss)
    return losses


def run_plan(plan: Plan, steps: int = STEPS) -> RunResult:
    """Run a plan in a folder of its own, and return its losses and its state at the end."""
    with tempfile.TemporaryDirectory() as folder:
        engine = open_engine(plan, Path(folder) if plan.on_disk else None)
        try:
            return train(engine, steps), read_state(engine)
        finally:
            engine.close()


@cache
def reference_run(
    model: ModelSpec, micro_batches: int, clipping: str, steps: int, optimizer: str = ADAMW
) -> RunResult:
    """Return the result of the run with everything resident."""
    plan = resident_plan(model, micro_batches, clipping, optimizer=optimizer)
    return run_plan(plan, steps)


def equal_bits(one: RunResult, other: RunResult) -> bool:
    """Return whether two runs agree to the bit, signs of zeros included."""
    return one[0] == other[0] and all(
        torch.equal(a.view(torch.int32), b.view(torch.int32))
        for a, b in zip(one[1], other[1], strict=True)
    )


def matches_reference(case: Case, steps: int = STEPS) -> bool:
    """Return whether the case has the same bits as its reference."""
    expected = reference_run(MODEL, case.micro_batches, case.clipping, steps, case.optimizer)
    return equal_bits(run_plan(case.plan(), steps), expected)


def compare_cases(
    cases: Sequence[Case], steps: int = STEPS, folder: Path | None = None
) -> Iterator[tuple[Case, bool]]:
    """Compare cases in a process for each core, and yield each result when it is there.

    Args:
        cases: the cases.
        steps: steps of each run.
        folder: where the runs' disks lie; by default where temporary files do.

    Yields:
        The case, and whether it has the same bits as its reference.
    """
    workers = max(1, min(os.cpu_count() or 1, 8))
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, _start_process, [folder]) as pool:
        yield from pool.imap_unordered(partial(_compare_case, steps=steps), cases, chunksize=8)


def _start_process(folder: Path | None) -> None:
    # So tiny a model is mostly Python: threads must hand over the interpreter quickly.
    sys.setswitchinterval(1e-4)
    torch.set_num_threads(1)
    if folder is not None:
        tempfile.tempdir = str(folder)


def _compare_case(case: Case, steps: int) -> tuple[Case, bool]:
    return case, matches_reference(case, steps)


def report_cases(cases: Sequence[Case], steps: int = STEPS, folder: Path | None = None) -> bool:
    """Compare cases, print the progress and each case that differs, and return if all agree."""
    different = 0
    for done, (case, is_equal) in enumerate(compare_cases(cases, steps, folder), 1):
        if not is_equal:
            different += 1
            print(f"  differs: {case}", flush=True)
        if done % max(1, len(cases) // 8) == 0:
            print(f"  {done:,} of {len(cases):,} cases, {different} differ", flush=True)
    return not different


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    description = "Compare swapped runs with resident ones, to the bit."
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument(
        "--tier", choices=TIERS, action="append", help="cases of this tier; repeatable"
    )
    parser.add_argument(
        "--micro-batches",
        type=int,
        choices=MICRO_BATCHES,
        action="append",
        help="cases with so many micro-batches; repeatable",
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default=ADAMW)
    parser.add_argument("--every", type=int, default=1, help="only every n-th of these cases")
    return parser.parse_args()


def main() -> None:
    """Compare the chosen cases; exit with 1 if any differs."""
    arguments = parse_arguments()
    tiers = arguments.tier or TIERS
    counts = arguments.micro_batches or MICRO_BATCHES
    cases = all_cases(arguments.optimizer)
    cases = [case for case in cases if case.tier in tiers and case.micro_batches in counts]
    cases = cases[:: arguments.every]
    started = time.perf_counter()
    exact = report_cases(cases, arguments.steps)
    result = {
        "exact": exact,
        "cases": len(cases),
        "steps": arguments.steps,
        "seconds": round(time.perf_counter() - started),
    }
    print(json.dumps(result))
    sys.exit(not exact)


if __name__ == "__main__":
    main()
