"""The swap engine against its targets, on this machine: `make bench-swap`, `python benchmarks/swap/bench_swap.py --only xl`.

    exact       swapped runs have the bits of unswapped ones
    memory      peaks of each tier against the plan's
    xl          GPT-2 XL in 4 GB
    efficiency  tokens/s from disk and from RAM over those of the same model with everything where it is computed
    plan_error  predicted against measured seconds of a step, side by side
    adam        AdamW's rate over what memory streams
    peers       FSDP2 and DeepSpeed ZeRO-3, both with CPU offload

Prints tables as it goes and one JSON object as its last line. Leave the machine alone meanwhile.
"""

import argparse
import datetime
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from statistics import median

import baselines
import bitwise
import gpt2_xl
import memory_peaks
import torch
from engine_child import BUILD, Child, turns

from barnraise.errors import PlanError
from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import Limits
from barnraise.planning.plan import Plan
from barnraise.planning.search import make_plan
from barnraise.planning.simulator import StepSimulation
from barnraise.spec import ModelSpec, preset
from barnraise.swap.hardware_probe import again, probe

GB = 10**9
STRIDE, QUICK_STRIDE = (
    83,
    473,
)  # through the product of 6,144 cases, which takes two hours: prime to its factors, so
# that by the first each tier, way of clipping and number of micro-batches meets each other; bitwise.py runs them all


@cache
def machine() -> Hardware:
    """Measured in this run: yesterday's rates would be no fair prediction."""
    return probe(BUILD, "cpu")


# ---- exact ---------------------------------------------------------------------------------------------------------


def exact(quick: bool) -> bool:
    """Whether all cases have the bits of their reference."""
    BUILD.mkdir(parents=True, exist_ok=True)
    return bitwise.tell(list(bitwise.cases())[:: QUICK_STRIDE if quick else STRIDE], folder=BUILD)


# ---- speed ---------------------------------------------------------------------------------------------------------


def resident(plan: Plan) -> Plan:
    """The same micro-batches, clipping and recompute with everything where it is computed."""
    bare = bitwise.resident(plan.model, clipping=plan.clipping, sequences=plan.sequences)
    return replace(bare, micro_batches=plan.micro_batches)


def efficiency(quick: bool) -> dict[str, float]:
    """Tokens/s over those of the resident plan."""
    model, sequences = (preset("gpt-mini"), 2) if quick else (preset("gpt2-124m"), 4)
    model, hardware = replace(model, context=512), machine()
    disk = least(hardware, model, sequences)
    again = replace(disk, sequences=1, micro_batches=sequences) if disk.sequences == 1 else disk
    ram = staged(again)
    with Child(again) as one, Child(resident(again)) as two, Child(ram) as three:
        seconds = turns([one, two, three], 2 if quick else 5)
    tokens = sequences * model.context
    for name, mine in zip(("from disk", "resident", "staged from RAM"), seconds, strict=True):
        print(
            f"  {name:16} {tokens / mine:8,.1f} tokens/s  ({mine:.2f} s a step of {tokens:,} tokens)",
            flush=True,
        )
    return {"ram": round(seconds[1] / seconds[2], 4), "disk": round(seconds[1] / seconds[0], 4)}


def least(hardware: Hardware, model: ModelSpec, sequences: int, **limits: object) -> Plan:
    """With as little memory as there is a plan for: all that can be is on disk."""
    memory = 12 * model.vocabulary * model.width  # the table, its gradient, and the head's
    while memory < hardware.memory:
        try:
            return make_plan(
                hardware, model, Limits(memory=memory, **limits), sequences, advise=False
            )
        except PlanError:
            memory = int(memory * 1.05)
    return make_plan(hardware, model, Limits(**limits), sequences)


def staged(plan: Plan) -> Plan:
    """The same in RAM, with the layers computed in a few buffers of their own."""
    waits, layers = plan.clipping == "exact", plan.model.layers
    slots = {"slots": 3, "gradient_slots": 2, "host_gradient_slots": layers if waits else 3}
    return replace(resident(plan), staged=True, **slots)


def plan_error(quick: bool) -> dict[str, object]:
    """A step's predicted over its measured seconds, − 1, and the worst of all plans. `errors`: side by side (`beside`);
    `beforehand`: by the rates that the plan was chosen from, minutes earlier."""
    models = (("gpt-mini", 256),) if quick else (("gpt2-124m", 384), ("gpt2-355m", 256))
    errors, beforehand = [], []
    for name, context in models:
        model = replace(preset(name), context=context)
        now = again(BUILD, model)
        machine.cache_clear()  # the other model's was ten minutes ago
        for where, plan in budgets(machine(), model):
            predicted, seen = beside(plan, now, 2 if quick else 5)
            errors.append(median(p / s for p, s in zip(predicted, seen, strict=True)) - 1)
            beforehand.append(plan.step_seconds / median(seen) - 1)
            print(
                f"  {name:10} {where:20} measured {median(seen):6.2f} s  predicted beside it {median(predicted):6.2f} s"
                f"  {errors[-1]:+.1%}  beforehand {plan.step_seconds:6.2f} s  {beforehand[-1]:+.1%}",
                flush=True,
            )
    return {
        "worst": round(max(map(abs, errors)), 4), "errors": [round(error, 4) for error in errors],
        "worst_beforehand": round(max(map(abs, beforehand)), 4), "beforehand": [round(e, 4) for e in beforehand],
    }  # fmt: skip


def beside(plan: Plan, now: Callable[[], Hardware], steps: int) -> tuple[list[float], list[float]]:
    """Predicted and measured seconds of each step. The machine is measured before and after every one, and the plan,
    which stays as it is, priced at both: the prediction is their mean. So each ratio is of neighbours in time, and the
    median of the ratios says how good the price is, not how steady the machine (medians apart would be of different
    minutes)."""
    predicted, seen = [], []
    with Child(plan) as child:
        child.ask("steps", count=1, drained=True)
        before = StepSimulation(plan, now()).step_seconds
        for _ in range(steps):
            seen += child.ask("steps", count=1, drained=True)["seconds"]
            after = StepSimulation(plan, now()).step_seconds
            predicted.append((before + after) / 2)
            before = after
    return predicted, seen


def budgets(hardware: Hardware, model: ModelSpec, sequences: int = 2) -> list[tuple[str, Plan]]:
    """Everything in RAM; half of the moments on disk; all of it."""
    roomy = make_plan(hardware, model, Limits(), sequences)
    tight = least(hardware, model, sequences)
    between = make_plan(
        hardware, model, Limits(memory=(tight.host_bytes + 24 * model.parameters)), sequences
    )
    return [
        ("in RAM", roomy),
        (f"{between.host_bytes / 1e9:.1f} GB and disk", between),
        ("from disk", tight),
    ]


# ---- others --------------------------------------------------------------------------------------------------------


def adam(quick: bool) -> dict[str, float]:
    import adamw as rates

    found = rates.measure(5) if quick else rates.measure()
    return {name: round(found[name], 4) for name in ("of_stream", "of_stream_split")}


def against_peers(quick: bool) -> dict[str, dict]:
    """{peer: {"ratio": our tokens/s over theirs, "memory_ratio": their peak over ours}}; ours takes its turns before,
    between and after theirs. Memory is of whole processes."""
    name, micro_tokens, micro_batches, steps = (
        ("gpt-mini", 512, 2, 4) if quick else ("gpt2-124m", 1024, 2, 6)
    )
    model = preset(name)
    sequences = micro_tokens // model.context
    # As the peers: state in RAM and nothing written to disk for a crash; what is only traded is on disk.
    memory = 16 * model.parameters + (3 * 10**8 if quick else 7 * 10**8)
    limits = Limits(memory=memory, clipping="exact", crash_safety="restart")
    plan = make_plan(machine(), model, limits, sequences * micro_batches)
    recast = replace(plan, sequences=sequences, micro_batches=micro_batches)
    found: dict[str, dict] = {}
    with Child(recast) as child:
        child.ask("steps", count=1)
        ours = child.ask("steps", count=2)["seconds"]
        for peer in ("fsdp2", "deepspeed"):
            try:
                theirs = baselines.measure(peer, name, micro_tokens, micro_batches, steps)
                found[peer] = {
                    "theirs": theirs["tokens_per_second"],
                    "memory": theirs["peak_rss_mb"] * 1.048576,
                }
            except baselines.PeerError as error:
                print(f"  {peer}: {error}")
                found[peer] = {"ratio": None, "memory_ratio": None, "why": str(error)}
            ours += child.ask("steps", count=2)["seconds"]
        memory = child.ask("peak")["resident"] / 1e6
    speed = micro_tokens * micro_batches / median(ours)
    print(f"  {'ours':12} {speed:8,.1f} tokens/s {memory:8,.0f} MB")
    for peer, its in found.items():
        if "theirs" in its:
            print(
                f"  {peer:12} {its['theirs']:8,.1f} tokens/s {its['memory']:8,.0f} MB", flush=True
            )
            found[peer] = {
                "ratio": round(speed / its["theirs"], 4),
                "memory_ratio": round(its["memory"] / memory, 4),
            }
    return found


PARTS: dict[str, Callable[[bool], object]] = {
    "exact": exact,
    "memory": lambda quick: memory_peaks.measure(machine(), quick),
    "xl": lambda quick: gpt2_xl.measure(machine(), quick),
    "efficiency": efficiency,
    "plan_error": plan_error,
    "adam": adam,
    "peers": against_peers,
}


def main() -> None:
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked.add_argument(
        "--only", choices=PARTS, action="append", help="one part; may be given again"
    )
    asked.add_argument(
        "--quick", action="store_true", help="smaller models, fewer steps: 5 minutes"
    )
    given = asked.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is on disk goes
    begun, found, took, failed = time.perf_counter(), {}, {}, False
    for part in given.only or PARTS:
        print(part, flush=True)
        started = time.perf_counter()
        try:
            found[part] = PARTS[part](given.quick)
        except Exception as error:  # the others may still be measured
            traceback.print_exc()
            found[part], failed = {"error": f"{type(error).__name__}: {error}"}, True
        took[part] = round(time.perf_counter() - started)
        print(f"  {json.dumps(found[part])} in {took[part]} s", flush=True)
    found |= {
        "machine": f"{machine().name}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "quick": given.quick,
        "seconds": round(time.perf_counter() - begun),
        "seconds_by_part": took,
    }
    print(json.dumps(found))
    sys.exit(failed)


if __name__ == "__main__":
    main()
