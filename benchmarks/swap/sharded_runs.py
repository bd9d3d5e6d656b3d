"""Measure the sharded engine on gloo ranks of this machine, a thread each."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

import bitwise
import torch
from bitwise import HeaderRecorder, initial_units
from dealt_reference import dealt

from barnraise.errors import RankLostError
from barnraise.planning.plan import Plan
from barnraise.spec import ADAMW, ModelSpec, preset
from barnraise.swap.engine import Engine
from barnraise.swap.sharded.rank_group import RankGroup
from barnraise.swap.sharded.sharded_engine import ShardedEngine
from barnraise.swap.state_store import FragmentSequence, StateStore

GPT = replace(bitwise.MODEL, layers=2)
LLAMA = replace(GPT, architecture="llama", heads=4, key_value_heads=2, hidden=32, tied_head=False)
SPEED_MODEL = replace(preset("gpt-mini", 2048), layers=4)
SPEED_SEQUENCES = 4  # of a step, on both ranks together
WARM_UP = 2  # steps before the measured ones


def sharded_plan(
    model: ModelSpec,
    ranks: int,
    tensor: int = 1,
    sequences: int = 2,
    retained: int = 0,
    optimizer: str = ADAMW,
) -> Plan:
    """Return a plan of so many CPU ranks, with micro-batches of `sequences` on each."""
    plan = bitwise.resident_plan(model, optimizer=optimizer)
    shared = ("device",) * len(plan.weights)
    return replace(
        plan,
        weights=shared,
        moments=shared,
        threads=1,
        ranks=("cpu",) * ranks,
        tensor=tensor,
        sequences=sequences,
        micro_batches=bitwise.SEQUENCES // sequences,
        retained_blocks=retained,
    )


@contextmanager
def open_sharded(plan: Plan, group: RankGroup) -> Iterator[ShardedEngine]:
    """Open an engine on a fresh state, which a group of ranks shares."""
    store = StateStore(plan)
    anchor = FragmentSequence(store, "anchor")
    for fragment in plan.fragments:
        anchor[fragment.index] = initial_units(fragment)
    recipe = replace(bitwise.RECIPE, optimizer=plan.optimizer)
    engine = ShardedEngine(plan, recipe, store, HeaderRecorder(), group)
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def open_slow_group(ranks: int, slowness: float) -> Iterator[RankGroup]:
    """Open a group of CPU ranks; all but the first take `slowness` times as long."""
    program = str(Path(__file__).with_name("slow_rank.py")), str(slowness)
    with contextlib.closing(RankGroup.start(["cpu"] * ranks, program)) as group:
        yield group


# ---- exactness -----------------------------------------------------------------------------------


def measure_loss_gap(group: RankGroup, tensor: int, steps: int) -> float:
    """Return the largest relative difference from one process's losses, of two architectures."""
    gap = 0.0
    for model in (GPT, LLAMA):
        with open_sharded(sharded_plan(model, group.ranks, tensor), group) as engine:
            found = bitwise.train(engine, steps)
        expected = bitwise.run_plan(bitwise.resident_plan(model), steps)[0]
        gap = max(gap, *(abs(a - b) / b for a, b in zip(found, expected, strict=True)))
    return gap


def measure_loss_gaps(steps: int) -> tuple[float, float]:
    """Return the gap of two sharded ranks, and of ranks that split blocks, also on a mesh."""
    with contextlib.closing(RankGroup.start(["cpu"] * 2)) as group:
        sharded, tensor = (measure_loss_gap(group, split, steps) for split in (1, 2))
    with contextlib.closing(RankGroup.start(["cpu"] * 4)) as group:
        return sharded, max(tensor, measure_loss_gap(group, 2, steps))


def has_moved(engines: Sequence[Engine]) -> bool:
    """Return whether a state passes from engine to engine without the loss of a bit."""
    first, *others = engines
    bitwise.train(first, 1)
    state = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    for number, engine in enumerate(others, 1):
        engine.load_state_dict(state)
        moved = engine.state_dict()
        if moved.keys() != state.keys():
            return False
        if not all(torch.equal(moved[name], state[name]) for name in state):
            return False
        bitwise.train(engine, 1, first=number)
        state = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    return True


def moves_between_engines() -> bool:
    """Return whether a state moves from one device to two, to two ranks, and back to one."""
    one = bitwise.resident_plan(GPT)
    case = bitwise.Case(2, "memory", "exact", 1, 1)
    two = dealt(case.plan(GPT), (1, 1))
    with ExitStack() as stack:
        group = stack.enter_context(contextlib.closing(RankGroup.start(["cpu"] * 2)))
        engines: list[Engine] = [bitwise.open_engine(plan) for plan in (one, two, one)]
        for engine in engines:
            stack.callback(engine.close)
        engines.insert(2, stack.enter_context(open_sharded(sharded_plan(GPT, 2), group)))
        return has_moved(engines)


# ---- failures ------------------------------------------------------------------------------------


def measure_dead_rank() -> float:
    """Return the seconds from a rank's death to the end of the next step, on new ranks.

    The state is in memory here, and Python need not start again.
    """
    plan = sharded_plan(GPT, 2)
    group = RankGroup.start(["cpu"] * 2)
    try:
        with open_sharded(plan, group) as engine:
            bitwise.train(engine, 1)
            state = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
            os.kill(group.processes[0].pid, signal.SIGKILL)
            started = time.perf_counter()
            bitwise.train(engine, 1, first=1)
    except RankLostError as error:
        print(f"  {error}", flush=True)
    finally:
        group.close()
    with (
        contextlib.closing(RankGroup.start(["cpu"] * 2)) as again,
        open_sharded(plan, again) as engine,
    ):
        engine.load_state_dict(state)
        bitwise.train(engine, 1, first=1)
        return time.perf_counter() - started


# ---- speed ---------------------------------------------------------------------------------------


@contextmanager
def open_plain_loop() -> Iterator[list["subprocess.Popen[str]"]]:
    """Start both processes of the bare loop."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    script = str(Path(__file__).with_name("plain_fsdp.py"))
    processes = [
        subprocess.Popen(
            [sys.executable, script],
            env=os.environ
            | {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def compare_with_plain_loop(rounds: int) -> float:
    """Return the speed of two ranks against the bare loop's, step by step in turns."""
    plan = sharded_plan(SPEED_MODEL, 2, sequences=SPEED_SEQUENCES // 2, retained=SPEED_MODEL.layers)
    ratios: list[float] = []
    with ExitStack() as stack:
        first, _ = stack.enter_context(open_plain_loop())
        group = stack.enter_context(contextlib.closing(RankGroup.start(["cpu"] * 2)))
        engine = stack.enter_context(open_sharded(plan, group))
        assert first.stdin is not None and first.stdout is not None
        for number in range(WARM_UP + rounds):
            first.stdin.write("step\n")
            first.stdin.flush()
            plain = float(first.stdout.readline())
            batch = torch.randint(
                SPEED_MODEL.vocabulary, (SPEED_SEQUENCES, SPEED_MODEL.context + 1)
            )
            started = time.perf_counter()
            engine.step([batch], position=number)
            if number >= WARM_UP:
                ratios.append(plain / (time.perf_counter() - started))
    return median(ratios)
