"""Measure the swap engine against its targets, on this machine: `make bench-swap`.

`python benchmarks/swap/bench_swap.py --only xl` measures one part:

    exact       swapped runs have the same bits as unswapped ones
    memory      measured peaks of each tier against the plan's
    xl          GPT-2 XL in 4 GB
    efficiency  tokens/s from disk and from RAM over those with everything resident
    plan_error  predicted against measured seconds of a step, side by side
    adam        AdamW's rate over the memory bandwidth
    peers       FSDP2 and DeepSpeed ZeRO-3, both with CPU offload

The script prints tables on the way and one JSON object as its last line. Leave the machine alone
meanwhile.
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
from types import FrameType
from typing import Any

import adamw
import baselines
import bitwise
import gpt2_xl
import memory_peaks
import torch
from engine_child import BUILD, Child, measure_in_turns
from model_probe import create_model_probe

from barnraise.errors import PlanError
from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import UNLIMITED, Limits
from barnraise.planning.plan import Plan
from barnraise.planning.search import make_plan
from barnraise.planning.simulator import StepSimulation
from barnraise.spec import ADAMW, MUON, OPTIMIZERS, ModelSpec, preset
from barnraise.swap.hardware_probe import probe

# Every n-th of the product's 6,144 cases. All of them take two hours; bitwise.py runs them.
# Both strides are prime to the product's factors, so that with the first each tier, way of clipping
# and number of micro-batches meets each other.
STRIDE = 83
QUICK_STRIDE = 473
# Speed is measured with every step committed to disk, however much that writes a day.
MEASURED_LIMITS = Limits(crash_safety="exact", disk_writes_per_day=UNLIMITED)


@cache
def measure_machine() -> Hardware:
    """Measure this machine's rates in this run: yesterday's would be no fair prediction.

    What the run writes fits into the cache of an SSD, so its writes are not priced down.
    """
    hardware = probe(BUILD, "cpu")
    return replace(hardware, disk_write_sustained=hardware.disk_write)


# ---- exact ------------------------------------------------------------------------------------


def measure_exactness(quick: bool) -> bool:
    """Return whether all chosen cases have the same bits as their references."""
    BUILD.mkdir(parents=True, exist_ok=True)
    stride = QUICK_STRIDE if quick else STRIDE
    return all(
        bitwise.report_cases(list(bitwise.all_cases(optimizer))[::stride], folder=BUILD)
        for optimizer in OPTIMIZERS
    )


# ---- speed ------------------------------------------------------------------------------------


def resident_plan(plan: Plan) -> Plan:
    """Return a plan with the same micro-batches and clipping, and everything resident."""
    bare = bitwise.resident_plan(plan.model, clipping=plan.clipping, sequences=plan.sequences)
    return replace(bare, micro_batches=plan.micro_batches)


def staged_plan(plan: Plan) -> Plan:
    """Return the resident plan with its layers computed in a few buffers of their own."""
    slots = 3 if plan.clipping != "exact" else plan.model.layers
    return replace(
        resident_plan(plan), staged=True, slots=3, gradient_slots=2, host_gradient_slots=slots
    )


def least_memory_plan(
    hardware: Hardware, model: ModelSpec, sequences: int, optimizer: str = ADAMW
) -> Plan:
    """Return the plan with the least memory there is one for: whatever can be is on disk."""
    memory = 12 * model.vocabulary * model.width  # the embedding, its gradient, and the head's
    while memory < hardware.memory:
        try:
            limits = replace(MEASURED_LIMITS, memory=memory)
            return make_plan(hardware, model, limits, sequences, False, optimizer)
        except PlanError:
            memory = int(memory * 1.05)
    return make_plan(hardware, model, MEASURED_LIMITS, sequences, optimizer=optimizer)


def measure_efficiency(quick: bool) -> dict[str, float]:
    """Measure tokens/s from disk and staged from RAM, over those of the resident plan."""
    name, sequences = ("gpt-mini", 2) if quick else ("gpt2-124m", 4)
    model = replace(preset(name), context=512)
    disk = least_memory_plan(measure_machine(), model, sequences)
    if disk.sequences == 1:
        disk = replace(disk, sequences=1, micro_batches=sequences)
    with (
        Child(disk) as disk_child,
        Child(resident_plan(disk)) as resident_child,
        Child(staged_plan(disk)) as staged_child,
    ):
        children = [disk_child, resident_child, staged_child]
        disk_seconds, resident_seconds, staged_seconds = measure_in_turns(
            children, 2 if quick else 5
        )
    tokens = sequences * model.context
    for label, seconds in (
        ("from disk", disk_seconds),
        ("resident", resident_seconds),
        ("staged from RAM", staged_seconds),
    ):
        print(
            f"  {label:16} {tokens / seconds:8,.1f} tokens/s"
            f"  ({seconds:.2f} s a step of {tokens:,} tokens)",
            flush=True,
        )
    return {
        "ram": round(resident_seconds / staged_seconds, 4),
        "disk": round(resident_seconds / disk_seconds, 4),
    }


# ---- the planner's predictions ----------------------------------------------------------------


def measure_plan_error(quick: bool) -> dict[str, object]:
    """Measure a step's predicted over its measured seconds, − 1.

    Returns:
        "errors": the prediction by rates measured next to each step, see `predict_side_by_side`.
        "beforehand": the prediction by the rates that the plan was chosen from, minutes earlier.
        "worst", "worst_beforehand": the largest magnitudes.
    """
    models = (("gpt-mini", 256, ADAMW), ("llama-mini", 256, ADAMW), ("llama-mini", 256, MUON))
    if not quick:
        models = (("gpt2-124m", 384, ADAMW), ("gpt2-355m", 256, ADAMW))
        models += tuple(("smollm2-135m", 256, optimizer) for optimizer in OPTIMIZERS)
    errors, beforehand = [], []
    for name, context, optimizer in models:
        model = replace(preset(name), context=context)
        measure_rates = create_model_probe(BUILD, model)
        measure_machine.cache_clear()  # The rates for the last model are ten minutes old.
        for label, plan in plans_by_budget(measure_machine(), model, optimizer):
            predicted, measured = predict_side_by_side(plan, measure_rates, 2 if quick else 5)
            ratios = [p / m for p, m in zip(predicted, measured, strict=True)]
            errors.append(median(ratios) - 1)
            beforehand.append(plan.step_seconds / median(measured) - 1)
            print(
                f"  {name:12} {optimizer:5} {label:20} measured {median(measured):6.2f} s"
                f"  predicted side by side {median(predicted):6.2f} s  {errors[-1]:+.1%}"
                f"  beforehand {plan.step_seconds:6.2f} s  {beforehand[-1]:+.1%}",
                flush=True,
            )
    return {
        "worst": round(max(map(abs, errors)), 4),
        "errors": [round(error, 4) for error in errors],
        "worst_beforehand": round(max(map(abs, beforehand)), 4),
        "beforehand": [round(error, 4) for error in beforehand],
    }


def predict_side_by_side(
    plan: Plan, measure_rates: Callable[[], Hardware], steps: int
) -> tuple[list[float], list[float]]:
    """Predict and measure the seconds of each step with rates measured next to it.

    The machine's rates are measured before and after every step. The plan stays as it is and is
    priced at both; the prediction is their mean. So each ratio is of neighbours in time, and the
    median of the ratios tells how good the price is, not how steady the machine is. A ratio of two
    medians would be of different minutes.

    Returns:
        The predicted and the measured seconds.
    """
    predicted, measured = [], []
    with Child(plan) as child:
        child.request("steps", count=1, drained=True)
        before = StepSimulation(plan, measure_rates()).step_seconds
        for _ in range(steps):
            measured += child.request("steps", count=1, drained=True)["seconds"]
            after = StepSimulation(plan, measure_rates()).step_seconds
            predicted.append((before + after) / 2)
            before = after
    return predicted, measured


def plans_by_budget(
    hardware: Hardware, model: ModelSpec, optimizer: str, sequences: int = 2
) -> list[tuple[str, Plan]]:
    """Return plans with everything in RAM, with half of the moments on disk, and from disk."""
    roomy = make_plan(hardware, model, MEASURED_LIMITS, sequences, optimizer=optimizer)
    tight = least_memory_plan(hardware, model, sequences, optimizer)
    middle_limits = replace(MEASURED_LIMITS, memory=tight.host_bytes + 24 * model.parameters)
    middle = make_plan(hardware, model, middle_limits, sequences, optimizer=optimizer)
    return [
        ("in RAM", roomy),
        (f"{middle.host_bytes / 1e9:.1f} GB and disk", middle),
        ("from disk", tight),
    ]


# ---- AdamW and other systems ------------------------------------------------------------------


def measure_adamw(quick: bool) -> dict[str, float]:
    """Measure AdamW's rate over the memory bandwidth, in fp32 and with split weights."""
    rates = adamw.measure(5) if quick else adamw.measure()
    return {name: round(rates[name], 4) for name in ("of_stream", "of_stream_split")}


def compare_with_baselines(quick: bool) -> dict[str, dict[str, Any]]:
    """Compare speed and memory with FSDP2 and DeepSpeed.

    Our steps run before, between and after theirs. Memory is that of whole processes.

    Returns:
        {baseline: {"ratio": our tokens/s over theirs, "memory_ratio": their peak over ours}}, or
        {"why"} where one could not be run.
    """
    name, micro_tokens, micro_batches, steps = (
        ("gpt-mini", 512, 2, 4) if quick else ("gpt2-124m", 1024, 2, 6)
    )
    model = preset(name)
    sequences = micro_tokens // model.context
    # As with the baselines, the state is in RAM and nothing is written for a crash; only what the
    # exchange needs is on disk.
    memory_limit = 16 * model.parameters + (3 * 10**8 if quick else 7 * 10**8)
    limits = Limits(
        memory=memory_limit,
        clipping="exact",
        crash_safety="restart",
        disk_writes_per_day=UNLIMITED,
    )
    plan = make_plan(measure_machine(), model, limits, sequences * micro_batches)
    plan = replace(plan, sequences=sequences, micro_batches=micro_batches)
    results: dict[str, dict[str, Any]] = {}
    measured: dict[str, dict[str, Any]] = {}
    with Child(plan) as child:
        child.request("steps", count=1)
        our_seconds = child.request("steps", count=2)["seconds"]
        for baseline in ("fsdp2", "deepspeed"):
            try:
                training = baselines.BaselineTraining(
                    baseline, name, micro_tokens, micro_batches, steps
                )
                measured[baseline] = baselines.measure(training)
                results[baseline] = {}
            except baselines.BaselineError as error:
                print(f"  {baseline}: {error}")
                results[baseline] = {"ratio": None, "memory_ratio": None, "why": str(error)}
            our_seconds += child.request("steps", count=2)["seconds"]
        our_megabytes = child.request("peak")["resident"] / 1e6
    our_speed = micro_tokens * micro_batches / median(our_seconds)
    print(f"  {'ours':12} {our_speed:8,.1f} tokens/s {our_megabytes:8,.0f} MB")
    for baseline, theirs in measured.items():
        speed, megabytes = theirs["tokens_per_second"], theirs["peak_rss_mb"] * 1.048576
        print(f"  {baseline:12} {speed:8,.1f} tokens/s {megabytes:8,.0f} MB", flush=True)
        results[baseline] = {
            "ratio": round(our_speed / speed, 4),
            "memory_ratio": round(megabytes / our_megabytes, 4),
        }
    return results


PARTS: dict[str, Callable[[bool], object]] = {
    "exact": measure_exactness,
    "memory": lambda quick: memory_peaks.measure(measure_machine(), quick),
    "xl": lambda quick: gpt2_xl.measure(measure_machine(), quick),
    "efficiency": measure_efficiency,
    "plan_error": measure_plan_error,
    "adam": measure_adamw,
    "peers": compare_with_baselines,
}


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", choices=PARTS, action="append", help="measure this part; repeatable"
    )
    parser.add_argument(
        "--quick", action="store_true", help="smaller models, fewer steps: 5 minutes"
    )
    return parser.parse_args()


def exit_on_sigterm(_signal: int, _frame: FrameType | None) -> None:
    """Exit by an exception, so that the children's folders are removed from the disk."""
    sys.exit(143)


def main() -> None:
    """Measure the chosen parts; a part that fails does not stop the others."""
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, exit_on_sigterm)
    started = time.perf_counter()
    results: dict[str, Any] = {}
    seconds_by_part: dict[str, int] = {}
    failed = False
    for part in arguments.only or PARTS:
        print(part, flush=True)
        part_started = time.perf_counter()
        try:
            results[part] = PARTS[part](arguments.quick)
        except Exception as error:
            traceback.print_exc()
            results[part] = {"error": f"{type(error).__name__}: {error}"}
            failed = True
        seconds_by_part[part] = round(time.perf_counter() - part_started)
        print(f"  {json.dumps(results[part])} in {seconds_by_part[part]} s", flush=True)
    machine = measure_machine().name
    threads = torch.get_num_threads()
    results |= {
        "machine": f"{machine}, {threads} threads, torch {torch.__version__}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "quick": arguments.quick,
        "seconds": round(time.perf_counter() - started),
        "seconds_by_part": seconds_by_part,
    }
    print(json.dumps(results))
    sys.exit(failed)


if __name__ == "__main__":
    main()
