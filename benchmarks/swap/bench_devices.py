"""Measure several devices over one host copy, and ranks; the last line is one JSON object.

    make bench-devices            QUICK=1 takes five minutes

The devices are windows of RAM, each with a thread of its own, and one that is slowed sleeps after
each of its computations. What two cards hold is counted on fake ones (`tests/helpers/cuda`). Two
speeds that are compared are measured in turns.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
from bitwise import CLIPPINGS, MODEL, Case, equal_bits, open_engine, run_plan
from dealt_reference import dealt, run_one_after_the_other
from sharded_runs import (
    compare_with_plain_loop,
    measure_dead_rank,
    measure_loss_gaps,
    moves_between_engines,
    open_sharded,
    open_slow_group,
)

from barnraise.planning.card_choice import choose_cards
from barnraise.planning.hardware import Hardware, MatmulRates, Rates
from barnraise.planning.limits import Limits
from barnraise.planning.plan import Plan
from barnraise.planning.program import Operation, OperationKind
from barnraise.planning.search import deal_step, make_plan
from barnraise.spec import OPTIMIZERS, ModelSpec, preset
from barnraise.swap.engine import Engine
from barnraise.swap.executor import Task
from barnraise.swap.hardware_probe import probe

Handler = Callable[[Operation], Task]

DEALS = ((1, 1), (3, 1), (2, 1, 1), (2, 2, 2, 2))
COMPUTATIONS = (OperationKind.FORWARD, OperationKind.HEAD, OperationKind.BACKWARD)
WINDOW = 3 * 10**9  # bytes of each device
SPEEDUP_MODEL = preset("gpt-mini", 2048)
SLOWED = 3  # times as slow
DEALT = 16  # micro-batches of the unequal deal
NEAR = 0.9  # of the fastest choice's speed
HOPELESS = 0.5  # of the fastest one's speed
QUICK_EVERY = 5  # of the exact cases one is run: so all values of each property are among them
QUICK_SEQUENCES = 24  # times the slowness: ranks wait for the slowest, with more for minutes


@dataclass(frozen=True)
class ChoiceCase:
    """One decision between one device, two over one copy, and two ranks.

    Attributes:
        model: what is trained.
        sequences: of a step.
        slowness: of the second device.
    """

    model: ModelSpec
    sequences: int
    slowness: float


# ---- exactness -----------------------------------------------------------------------------------


def count_inexact(steps: int, every: int) -> tuple[int, int]:
    """Return how many of the dealt runs differ from one after the other, and how many there are."""
    product = itertools.product(DEALS, ("memory", "staged disk"), CLIPPINGS, OPTIMIZERS)
    cases = list(product)[::every]
    inexact = 0
    for counts, tier, clipping, optimizer in cases:
        plan = dealt(Case(sum(counts), tier, clipping, 9, 20, optimizer).plan(), counts)
        expected = run_one_after_the_other(MODEL, counts, clipping, steps, optimizer)
        results = [run_plan(plan, steps) for _ in range(2)]
        if not all(equal_bits(result, expected) for result in results):
            inexact += 1
            print(f"  differs: {counts}, {tier}, {clipping}, {optimizer}", flush=True)
    return inexact, len(cases)


# ---- speed ---------------------------------------------------------------------------------------


def wrap_computations(
    engine: Engine, device: int, wrap: Callable[[Callable[[], object]], object]
) -> None:
    """Let `wrap` call each of a device's computations."""
    for kind in COMPUTATIONS:
        original = engine.executor.handlers[kind]

        def wrapped(op: Operation, original: Handler = original) -> Task:
            call = original(op)
            return partial(wrap, call) if op.device == device else call

        engine.executor.handlers[kind] = wrapped


def slow_down(engine: Engine, device: int, factor: float) -> None:
    """Let a device take `factor` times as long for each of its computations."""

    def slowly(call: Callable[[], object]) -> None:
        started = time.thread_time()
        call()
        time.sleep((factor - 1) * (time.thread_time() - started))

    wrap_computations(engine, device, slowly)


def step_once(engine: Engine, seed: int) -> float:
    """Make a step on random text, and return its seconds."""
    plan = engine.plan
    generator = torch.Generator().manual_seed(seed)
    shape = plan.sequences * plan.micro_batches, plan.model.context + 1
    batch = torch.randint(plan.model.vocabulary, shape, generator=generator)
    started = time.perf_counter()
    engine.step(list(batch.split(plan.sequences)), position=seed + 1)
    return time.perf_counter() - started


def compare_speeds(
    plans: Sequence[Plan], rounds: int, slowness: float = 1.0
) -> Iterator[list[float]]:
    """Yield each plan's tokens/s in a round of steps; the last of several devices is slowed.

    A plan that is hopelessly slow is measured once.
    """
    with ExitStack() as stack:
        engines = [stack.enter_context(open_slowed(plan, slowness)) for plan in plans]
        for engine in engines:
            step_once(engine, 0)
        speeds = [0.0] * len(engines)
        for number in range(1, rounds + 1):
            least = HOPELESS * max(speeds)
            speeds = [
                before if before < least else engine.plan.step_tokens / step_once(engine, number)
                for engine, before in zip(engines, speeds, strict=True)
            ]
            yield speeds


@contextmanager
def open_slowed(plan: Plan, slowness: float) -> Iterator[Engine]:
    """Open an engine whose last device or rank, if there are several, is slowed."""
    if plan.ranks:
        with (
            open_slow_group(len(plan.ranks), slowness) as group,
            open_sharded(replace(plan, threads=1), group) as engine,
        ):
            yield engine
        return
    with closing(open_engine(plan)) as engine:
        if slowness > 1 and plan.devices:
            slow_down(engine, len(plan.devices) - 1, slowness)
        yield engine


def measure_speedup(hardware: Hardware, rounds: int) -> float:
    """Return the speed of two devices against one: gpt-mini's blocks, 8 micro-batches of one."""
    one, two = (
        plan_with(machine, SPEEDUP_MODEL, 8, 8)
        for machine in (hardware, replace(hardware, others=(hardware,)))
    )
    ratios = [b / a for a, b in compare_speeds([one, two], rounds)]
    return median(ratios)


def plan_with(hardware: Hardware, model: ModelSpec, sequences: int, micro_batches: int) -> Plan:
    """Return the planner's plan of windows of RAM, with so many micro-batches."""
    plan = make_plan(hardware, model, Limits(device_memory=WINDOW, clipping="exact"), sequences)
    size = sequences // micro_batches
    plan = replace(plan, sequences=size, micro_batches=micro_batches, devices=())
    return deal_step(plan, hardware)


def scale(hardware: Hardware, factor: float) -> Hardware:
    """Return a machine that computes blocks `factor` times as slowly."""

    def scaled(rates: Rates) -> Rates:
        return tuple((size, rate / factor) for size, rate in rates)

    return replace(
        hardware,
        matmul=scaled(hardware.matmul),
        products=tuple(
            MatmulRates(each.dtype, scaled(each.forward), scaled(each.backward))
            for each in hardware.products
        ),
        attention=hardware.attention / factor,
        attention_contexts=scaled(hardware.attention_contexts),
        attention_heads=scaled(hardware.attention_heads),
        attention_backward=hardware.attention_backward / factor,
        logits=scaled(hardware.logits),
        elementwise=hardware.elementwise / factor,
    )


def measure_unequal_share(hardware: Hardware) -> float:
    """Return the relative error of the share that a threefold slower device is dealt."""
    model = replace(preset("gpt-micro", 512), context=128)
    plan = plan_with(hardware, model, 4, 4)
    seconds: list[list[float]] = []
    for factor in (1, SLOWED):
        engine = open_engine(plan)
        spent: list[float] = []
        slow_down(engine, 0, factor)

        def timed(call: Callable[[], object], spent: list[float] = spent) -> None:
            started = time.perf_counter()
            call()
            spent.append(time.perf_counter() - started)

        wrap_computations(engine, 0, timed)
        for number in range(4):
            step_once(engine, number)
        engine.close()
        seconds.append(spent)
    measured = sum(seconds[1]) / sum(seconds[0])
    machine = replace(hardware, others=(scale(hardware, measured),))
    shares = plan_with(machine, model, DEALT, DEALT).devices
    print(f"  slowed {measured:.2f}-fold: {[share.micro_batches for share in shares]}", flush=True)
    ideal = DEALT / (SLOWED + 1)
    return abs(shares[1].micro_batches - ideal) / ideal


# ---- the planner ---------------------------------------------------------------------------------


def choice_cases(quick: bool) -> list[ChoiceCase]:
    """Return the decisions that are measured."""
    micro = preset("gpt-micro", 512)
    mini = replace(preset("gpt-mini", 512), layers=4)
    models, sequences = (micro, mini), (2, 8) if quick else (2, 4, 8, 16)
    return [
        ChoiceCase(model, count, slowness)
        for model in models
        for count in sequences
        for slowness in (1.0, 3.0, 12.0)
        if not quick or count * slowness <= QUICK_SEQUENCES
    ]


def measure_choice(hardware: Hardware, case: ChoiceCase, rounds: int) -> bool:
    """Return whether the planner's choice is nearly the fastest of its alternatives."""
    limits = Limits(device_memory=WINDOW)
    second = replace(scale(hardware, case.slowness), name="the second")
    both = replace(hardware, others=(second,))
    alone, together = (
        make_plan(machine, case.model, limits, case.sequences) for machine in (hardware, both)
    )
    of_ranks = choose_cards(both, case.model, replace(limits, engine="sharded"), case.sequences)
    plans = {"one": alone, "two": together, "ranks": of_ranks.plan}
    predicted = {name: plan.tokens_per_second for name, plan in plans.items()}
    chosen = max(predicted, key=lambda name: predicted[name])
    speeds = list(compare_speeds(list(plans.values()), rounds, case.slowness))
    medians = [median(values) for values in zip(*speeds, strict=True)]
    measured = dict(zip(plans, medians, strict=True))
    print(
        f"  {case.model.layers} layers, {case.sequences} sequences, second {case.slowness:g} times "
        f"as slow: {chosen} of {', '.join(plans)}; tokens/s measured "
        f"{', '.join(f'{speed:,.0f}' for speed in measured.values())}; predicted "
        f"{', '.join(f'{speed:,.0f}' for speed in predicted.values())}",
        flush=True,
    )
    return measured[chosen] >= NEAR * max(measured.values())


# ---- memory --------------------------------------------------------------------------------------


def measure_cards() -> tuple[int, float]:
    """Return the bytes by which two fake cards exceed their plans, and the least share used."""
    command = [sys.executable, str(Path(__file__).with_name("card_bytes.py"))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    over, least = json.loads(done.stdout.splitlines()[-1])
    return over, least


@contextmanager
def timed_part(name: str) -> Iterator[None]:
    """Print a part's name before it runs, and its seconds after it."""
    print(f"{name} …", flush=True)
    started = time.perf_counter()
    yield
    print(f"  {time.perf_counter() - started:.0f} s", flush=True)


def main() -> None:
    """Run all parts and print the results."""
    parser = argparse.ArgumentParser(description="Measure several devices over one host copy.")
    parser.add_argument("--quick", action="store_true", help="within five minutes")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-4)
    started = time.perf_counter()
    with timed_part("bits of the dealt runs"):
        inexact, cases = count_inexact(3 if quick else 20, QUICK_EVERY if quick else 1)
    with timed_part("bytes on two fake cards"):
        over, least = measure_cards()
    with timed_part("this machine"), tempfile.TemporaryDirectory() as folder:
        hardware = replace(probe(Path(folder), "cpu"), disk=0)
    with timed_part("two devices against one"):
        speedup = measure_speedup(hardware, 3 if quick else 15)
    with timed_part("unequal devices"):
        share_error = measure_unequal_share(hardware)
    with timed_part("losses of ranks"):
        sharded_gap, tensor_gap = measure_loss_gaps(20 if quick else 100)
    with timed_part("ranks against a bare loop"):
        of_plain = compare_with_plain_loop(5 if quick else 25)
    with timed_part("moves between engines"):
        moves = moves_between_engines()
    with timed_part("a rank that dies"):
        dead_rank = measure_dead_rank()
    with timed_part("the planner's choice"):
        near = [measure_choice(hardware, case, 3 if quick else 9) for case in choice_cases(quick)]
    result = {
        "devices_exact": not inexact,
        "devices_cases": cases,
        "devices_speedup": round(speedup, 2),
        "unequal_share_error": round(share_error, 3),
        "card_bytes_over": max(0, over),
        "card_least_share": round(least, 3),
        "sharded_loss_gap": float(f"{sharded_gap:.1e}"),
        "tensor_loss_gap": float(f"{tensor_gap:.1e}"),
        "sharded_of_plain_fsdp": round(of_plain, 2),
        "moves_between_engines": moves,
        "dead_rank_s": round(dead_rank, 1),
        "plan_is_fastest": round(sum(near) / len(near), 2),
        "plan_cases": len(near),
        "seconds": round(time.perf_counter() - started),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
