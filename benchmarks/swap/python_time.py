"""Measure what Python takes of the thread that launches: the constants of `planning/cost_model.py`.

    python benchmarks/swap/python_time.py   # ten seconds

Steps of a model so small that nothing else takes time, on the CPU with one thread. More blocks and
more micro-batches tell apart what a kernel costs, an operation of a program, and a step.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "worker"))

import bitwise

from barnraise.planning.program import step_program
from barnraise.spec import ModelSpec, Recipe
from barnraise.spec.architectures import architecture_of
from barnraise.swap.engine import Engine
from barnraise.swap.state_store import StateStore

LAYERS, MICRO_BATCHES = (4, 12), (1, 5)
STEPS = 40
LAUNCHES = 1000


def median_seconds(call: Callable[[], object], count: int) -> float:
    """Return the median seconds of a call."""
    seconds: list[float] = []
    for _ in range(count):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return median(seconds)


def measure_step(layers: int, micro_batches: int) -> tuple[float, int, int]:
    """Return a step's seconds, its program's operations and its blocks' kernels."""
    model = ModelSpec(layers=layers, width=32, heads=1, context=8, vocabulary=256)
    plan = replace(
        bitwise.resident_plan(model, micro_batches),
        staged=True,
        slots=3,
        host_gradient_slots=layers,
    )
    engine = Engine(plan, Recipe(), StateStore(plan, None), bitwise.HeaderRecorder(), lambda _: "")
    batches = [torch.zeros(1, 9, dtype=torch.int64) for _ in range(micro_batches)]
    engine.step(batches)
    seconds = median_seconds(lambda: engine.step(batches), STEPS)
    engine.close()
    operations = len(step_program(plan, plan.defers_updates).operations)
    kernels = sum(architecture_of(model).block_kernels["float32"])
    return seconds, operations, layers * micro_batches * kernels


def main() -> None:
    """Print the constants as JSON, in bare launches."""
    torch.set_num_threads(1)
    x = torch.zeros(64)
    bare = median_seconds(lambda: [x.mul(2.0) for _ in range(LAUNCHES)], STEPS) / LAUNCHES
    rows = [measure_step(layers, count) for layers in LAYERS for count in MICRO_BATCHES]
    matrix = torch.tensor([[1.0, operations, kernels] for _, operations, kernels in rows])
    seconds = torch.tensor([[row[0]] for row in rows])
    step, operation, kernel = torch.linalg.lstsq(matrix, seconds).solution.flatten().tolist()
    figures = {"kernel": kernel, "operation": operation, "step": step}
    in_launches = {name: round(value / bare, 1) for name, value in figures.items()}
    print(json.dumps(in_launches | {"bare_microseconds": round(1e6 * bare, 2)}))


if __name__ == "__main__":
    main()
