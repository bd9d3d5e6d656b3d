"""Whether a swapped run has the bits of the same run with everything resident: weights, both moments and losses.

    python benchmarks/swap/bitwise.py                                     # the whole product, 6,144 cases
    python benchmarks/swap/bitwise.py --tier memory --tier "disk exact"   # those of two tiers, 3,072
    python benchmarks/swap/bitwise.py --every 10                          # each tenth case

"The same run" is the same engine, micro-batches in the same order, and recompute (DESIGN section 4). Needs torch alone.
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

import torch
from torch import Tensor

try:
    import barnraise  # noqa: F401  (installed, or on the path already)
except ImportError:
    sys.path.insert(0, str(Path(__file__).parents[2] / "worker"))

from barnraise.planning.plan import Plan, tile_elements
from barnraise.spec import UNIT_BITS, Fragment, ModelSpec, Recipe
from barnraise.swap.adam_moments import AdamMoments
from barnraise.swap.arena import page_aligned
from barnraise.swap.engine import Engine
from barnraise.swap.state_store import FragmentSequence, StateStore

MODEL = ModelSpec(layers=8, width=16, heads=2, context=8, vocabulary=256)
RECIPE = Recipe(learning_rate=3e-3, clip=0.5)
SEQUENCES = 8  # of a step
STEPS = 20
TIERS = ("memory", "disk exact", "disk restart", "staged disk")
CLIPPINGS = ("none", "exact", "layer")
MICRO_BATCHES = (1, 2, 4, 8)

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Case:
    """`forward`, `backward`: groupings, as `groups` counts them."""

    micro_batches: int
    tier: str
    clipping: str
    forward: int
    backward: int

    def plan(self, model: ModelSpec = MODEL) -> Plan:
        return swapped(model, self)


class Known:
    """An anchor that only says which updates are in."""

    def __init__(self) -> None:
        self.headers: list = []

    def record(self, header) -> None:
        self.headers.append(header)


def cases() -> Iterator[Case]:
    """The whole product; forward and backward have the same grouping in half of it, and every one in both."""
    count = 1 << MODEL.layers - 1
    for number, parts in enumerate(
        itertools.product(MICRO_BATCHES, TIERS, CLIPPINGS, range(count))
    ):
        *rest, grouping = parts
        yield Case(
            *rest,
            forward=grouping if number % 2 else (37 * grouping + 11) % count,
            backward=grouping,
        )


def groups(layers: int, cuts: int) -> Groups:
    """Blocks 1…layers cut after block k + 1 where bit k of `cuts` is set; bottom up."""
    found, first = [], 1
    for i in range(1, layers + 1):
        if i == layers or cuts >> (i - 1) & 1:
            found.append(tuple(range(first, i + 1)))
            first = i + 1
    return tuple(found)


def resident(
    model: ModelSpec = MODEL, micro_batches: int = 1, clipping: str = "exact", **more
) -> Plan:
    """Everything in memory, where it is computed; nothing moves."""
    each = groups(model.layers, -1)
    held = ("host",) * (model.layers + 2)
    plan = Plan(
        model=model, sequences=SEQUENCES // micro_batches, micro_batches=micro_batches, clipping=clipping,
        forward_groups=each, backward_groups=each[::-1], weights=held, moments=held,
        tile=tile_elements(model, whole=True),
    )  # fmt: skip
    return replace(plan, **more)


def swapped(model: ModelSpec, case: Case) -> Plan:
    forward, backward = (
        groups(model.layers, case.forward),
        groups(model.layers, case.backward)[::-1],
    )
    largest = max(len(group) for group in (*forward, *backward))
    plan = replace(
        resident(model, case.micro_batches, case.clipping),
        forward_groups=forward, backward_groups=backward,
        kept_inputs="group" if case.backward % 3 else "block",
        slots=min(largest + 1 + case.forward % 2, model.layers), gradient_slots=largest + 1,
        host_gradient_slots=largest,
    )  # fmt: skip
    if case.tier == "memory":  # staged: what is copied to a GPU elsewhere is copied within RAM
        waiting = model.layers if case.clipping == "exact" else largest
        return replace(plan, staged=True, host_gradient_slots=waiting)
    return from_disk(plan, restart=case.tier == "disk restart", staged=case.tier == "staged disk")


def from_disk(
    plan: Plan, restart: bool = False, staged: bool = False, tile: int = 2048, **more
) -> Plan:
    """The same plan with blocks, moments and what is traded on disk."""
    layers = plan.model.layers
    return replace(
        plan, weights=("host", *["disk"] * layers, "host"), moments=("disk",) * (layers + 2), exchange="disk",
        gradients="disk", crash_safety="restart" if restart else "exact", staged=staged, tile=tile,
        slots=plan.slots or 2, ring=3, **more,
    )  # fmt: skip


# ---- running -----------------------------------------------------------------------------------------------------


def begun(fragment: Fragment) -> Tensor:
    """int32 [size] of initial weights, in units."""
    stir, units = (
        torch.Generator().manual_seed(fragment.index),
        torch.zeros(fragment.size, dtype=torch.int32),
    )
    for slot in fragment.slots:
        part = units[slot.offset : slot.offset + slot.size]
        if slot.initial == "ones":
            part.fill_(1 << UNIT_BITS)
        elif slot.initial == "normal":
            part.copy_(
                torch.randn(slot.size, generator=stir, dtype=torch.float64)
                .mul_(slot.deviation)
                .round_()
            )
    return units


def text(model: ModelSpec, sequences: int, seed: int) -> Tensor:
    """int64 [sequences, context + 1]: each token is the one before plus one."""
    start = torch.randint(
        model.vocabulary, (sequences, 1), generator=torch.Generator().manual_seed(seed)
    )
    return (start + torch.arange(model.context + 1)) % model.vocabulary


def opened(plan: Plan, folder: Path | None = None, recipe: Recipe = RECIPE) -> Engine:
    store = StateStore(plan, folder)
    shelf = FragmentSequence(store, "anchor")
    for fragment in plan.fragments:
        shelf[fragment.index] = begun(fragment)
    return Engine(plan, recipe, store, Known(), describe=lambda progress: str(progress.position))


def state(engine: Engine) -> list[Tensor]:
    """(master weights fp32, m, v) of each fragment, copied to RAM, whatever tier they are on. Flushes first."""
    engine.flush()
    engine.apply_queued()
    plan, store, found = engine.plan, engine.store, []
    for i in range(plan.last_fragment + 1):
        parts = []
        for t in range(plan.tile_count(i)):
            begin, end = plan.tile_bounds(i, t)
            weights, record = (
                store.load_tile(kind, i, t, page_aligned(plan.record_bytes(kind, end - begin)))
                for kind in ("weights", "moments")
            )
            moments = AdamMoments.of(plan, record, end - begin)
            dtype = torch.bfloat16 if plan.dtype == "bfloat16" else torch.float32
            master = moments.master(weights[: (end - begin) * plan.streamed_bytes].view(dtype))
            parts.append([each.clone().cpu() for each in (master, *moments.to_float32())])
        found += [torch.cat(kind) for kind in zip(*parts, strict=True)]
    return found


def train(engine: Engine, steps: int, first: int = 0) -> list[float]:
    """Losses of `steps` steps, on the text of step `first` and on."""
    plan, losses = engine.plan, []
    for step in range(first, first + steps):
        batch = text(plan.model, plan.sequences * plan.micro_batches, seed=step)
        losses.append(engine.step(list(batch.split(plan.sequences)), position=step + 1).loss)
    return losses


def run(plan: Plan, steps: int = STEPS) -> tuple[list[float], list[Tensor]]:
    """A whole run in a folder of its own: its losses, and its state at the end."""
    with tempfile.TemporaryDirectory() as folder:
        engine = opened(plan, Path(folder) if plan.on_disk else None)
        try:
            return train(engine, steps), state(engine)
        finally:
            engine.close()


@cache
def reference(
    model: ModelSpec, micro_batches: int, clipping: str, steps: int
) -> tuple[list[float], list[Tensor]]:
    return run(resident(model, micro_batches, clipping), steps)


def same(one: tuple[list[float], list[Tensor]], other: tuple[list[float], list[Tensor]]) -> bool:
    """To the bit, signs of zeros included."""
    pairs = zip(one[1], other[1], strict=True)
    return one[0] == other[0] and all(
        torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs
    )


def compare(case: Case, steps: int = STEPS) -> bool:
    """Whether the case has the bits of its reference."""
    return same(run(case.plan(), steps), reference(MODEL, case.micro_batches, case.clipping, steps))


def compared(
    chosen: Sequence[Case], steps: int = STEPS, folder: Path | None = None
) -> Iterator[tuple[Case, bool]]:
    """Each case and whether it has its reference's bits, as they come; a process a core. `folder`: for their disks."""
    workers = max(1, min(os.cpu_count() or 1, 8))
    with multiprocessing.get_context("spawn").Pool(workers, _begin, [folder]) as pool:
        yield from pool.imap_unordered(partial(_compared, steps=steps), chosen, chunksize=8)


def _begin(folder: Path | None) -> None:
    sys.setswitchinterval(1e-4)  # a tiny model is all Python
    torch.set_num_threads(1)
    tempfile.tempdir = folder and str(folder)


def _compared(case: Case, steps: int) -> tuple[Case, bool]:
    return case, compare(case, steps)


def tell(chosen: Sequence[Case], steps: int = STEPS, folder: Path | None = None) -> bool:
    """Whether all of them have the bits; prints how far it is, and which have not."""
    differ = 0
    for done, (case, good) in enumerate(compared(chosen, steps, folder), 1):
        if not good:
            differ += 1
            print(f"  differs: {case}", flush=True)
        if done % max(1, len(chosen) // 8) == 0:
            print(f"  {done:,} of {len(chosen):,} cases, {differ} differ", flush=True)
    return not differ


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--steps", type=int, default=STEPS)
    asked.add_argument(
        "--tier", choices=TIERS, action="append", help="cases of this tier; may be given again"
    )
    asked.add_argument(
        "--micro-batches", type=int, choices=MICRO_BATCHES, action="append", help="cases of so many"
    )
    asked.add_argument("--every", type=int, default=1, help="take each n-th of these cases")
    given = asked.parse_args()
    tiers, counts = given.tier or TIERS, given.micro_batches or MICRO_BATCHES
    chosen = [case for case in cases() if case.tier in tiers and case.micro_batches in counts][
        :: given.every
    ]
    begun = time.perf_counter()
    exact = tell(chosen, given.steps)
    seconds = round(time.perf_counter() - begun)
    print(
        json.dumps({"exact": exact, "cases": len(chosen), "steps": given.steps, "seconds": seconds})
    )
    sys.exit(not exact)


if __name__ == "__main__":
    main()
