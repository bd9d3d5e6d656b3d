"""Compare the cost model's seconds with measured ones: `python benchmarks/swap/cost_model.py`.

Muon's updates are priced by rates that are measured next to them, by turns. The script prints a
table, then one JSON object as its last line, and exits with 1 if a price of Muon's is off by more
than `MUON_TOLERANCE`, with as many parameters as a step's price is held against in `bench_swap.py`.
It takes three minutes on two cores; leave the machine alone meanwhile.
"""

import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "worker"))

from barnraise.models.functions import functions_of
from barnraise.planning import cost_model
from barnraise.planning.hardware import Hardware, MatmulRates, retain_freed_memory
from barnraise.planning.tile_layout import list_matrices
from barnraise.spec import ModelSpec, preset
from barnraise.swap import hardware_probe
from barnraise.swap.adamw import AdamWStep
from barnraise.swap.forward_backward import BlockEnd
from barnraise.swap.fused_loss import Head, head_step
from barnraise.swap.leaves import Leaves
from barnraise.swap.muon import update_matrix

# Models, and sequences of their whole context.
SHAPES = (
    ("gpt2-124m", 1),
    ("gpt2-124m", 2),
    ("gpt2-355m", 1),
    ("gpt-mini", 4),
    ("gpt-micro", 8),
    ("gpt2-1.5b", 1),
    ("llama-mini", 4),
)
MUON_TOLERANCE = 0.15
MUON_PARAMETERS = 20_000_000  # in smaller models Python and torch's threads take their time
MUON_TURNS = 7  # of an update and the rates that price it
# A call is repeated until it has taken ENOUGH_SECONDS, but at least and at most so many times.
MIN_CALLS = 5
MAX_CALLS = 21
ENOUGH_SECONDS = 1.0


def measure_seconds(call: Callable[[], Any]) -> float:
    """Return the lower quartile of a call's seconds."""
    call()
    durations: list[float] = []
    while len(durations) < MIN_CALLS or (
        sum(durations) < ENOUGH_SECONDS and len(durations) < MAX_CALLS
    ):
        durations.append(_time_call(call))
    return sorted(durations)[len(durations) // 4]


def random_leaves(model: ModelSpec, index: int) -> Leaves:
    """Return a fragment's tensors with random weights, whose gradients accumulate."""
    fragment = model.fragments()[index]
    leaves = Leaves(fragment, torch.randn(fragment.size).mul_(0.02))
    leaves.accumulate_into(torch.zeros(fragment.size))
    return leaves


def measure_parts(model: ModelSpec, sequences: int) -> dict[str, float]:
    """Measure a block's forward, its recompute and backward, and the head."""
    block, functions = random_leaves(model, 1), functions_of(model)
    x = torch.randn(sequences, model.context, model.width)
    dy = torch.randn_like(x)

    def forward() -> None:
        with torch.no_grad():
            functions.block(block.weights, x, model)

    def backward() -> None:
        leaf = x.detach().requires_grad_()
        start, expanded = functions.block_start(block.weights, leaf, model)
        output = BlockEnd.apply(start, expanded, block, False)
        assert isinstance(output, torch.Tensor)
        output.backward(dy)

    seconds = {"forward": measure_seconds(forward), "backward": measure_seconds(backward)}
    final = random_leaves(model, -1).weights
    token = random_leaves(model, 0).weights["token"].detach()
    targets = torch.randint(model.vocabulary, x.shape[:2])
    head = Head(model, final, token)
    gradient = torch.zeros_like(token)
    seconds["head"] = measure_seconds(lambda: head_step(head, x, targets, 1.0, gradient))
    return seconds


def compare_muon(hardware: Hardware, model: ModelSpec) -> tuple[float, float]:
    """Return the predicted and the measured seconds in which Muon updates a block's matrices."""
    update = _muon_update(model)
    shapes = [(matrix.rows, matrix.columns) for matrix in list_matrices(model.fragments()[1])]
    widths = sorted({min(shape) for shape in shapes})
    calls = hardware_probe.product_calls("cpu", "float32", widths)
    moved_bytes, elementwise = hardware_probe.memory_calls("cpu")["elementwise", 0]

    def measure_forward(width: int) -> tuple[int, float]:
        flops, forward = calls["float32 forward", width]
        return width, flops / fmean(_time_call(forward) for _ in range(3))

    predicted: list[float] = []
    measured: list[float] = []
    for turn in range(MUON_TURNS + 1):
        seconds = _time_call(update)
        rates = tuple(map(measure_forward, widths))
        now = dataclasses.replace(
            hardware,
            products=(MatmulRates("float32", rates, rates),),
            elementwise=moved_bytes / fmean(_time_call(elementwise) for _ in range(3)),
        )
        if turn:  # in the first one all is slow
            measured.append(seconds)
            predicted.append(cost_model.muon_seconds(now, shapes))
    ratio = median(p / m for p, m in zip(predicted, measured, strict=True))
    return ratio * median(measured), median(measured)


def _time_call(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _muon_update(model: ModelSpec) -> Callable[[], None]:
    """Return a function that updates a block's matrices with Muon."""
    fragment = model.fragments()[1]
    weights, gradient, momentum = torch.randn(3, fragment.size).mul_(0.02)
    step = AdamWStep(fragment, 1, 1e-3, 0.1, matrix_rate=1e-3)
    pieces = [(matrix, slice(matrix.begin, matrix.end)) for matrix in list_matrices(fragment)]

    def update() -> None:
        for matrix, piece in pieces:
            update_matrix(step, matrix, weights[piece], gradient[piece], momentum[piece])

    return update


def predict_parts(hardware: Hardware, model: ModelSpec, sequences: int) -> dict[str, float]:
    """Predict the seconds that `measure_parts` measures."""
    recompute = cost_model.block_recompute_seconds(hardware, model, sequences)
    return {
        "forward": cost_model.block_forward_seconds(hardware, model, sequences),
        "backward": recompute + cost_model.block_backward_seconds(hardware, model, sequences),
        "head": cost_model.head_seconds(hardware, model, sequences),
    }


def main() -> None:
    """Measure this machine, then print predicted and measured seconds of each shape."""
    retain_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        hardware = hardware_probe.probe(Path(folder), "cpu")
        probe_seconds = time.perf_counter() - started
    print(hardware.to_json())
    print(f"probed in {probe_seconds:.1f} s; milliseconds predicted / measured (error)")
    rows: list[dict[str, Any]] = []
    worst: dict[str, float] = {}
    for name, sequences in SHAPES:
        model = preset(name)
        predicted = predict_parts(hardware, model, sequences)
        parts = measure_parts(model, sequences)
        predicted["muon"], parts["muon"] = compare_muon(hardware, model)
        for part, measured in parts.items():
            error = predicted[part] / measured - 1
            rows.append(
                {"model": name, "sequences": sequences, "part": part, "error": round(error, 4)}
            )
            worst[part] = max(worst.get(part, 0.0), abs(round(error, 4)))
            shape = f"{name} {sequences}×{model.context}"
            print(
                f"{shape:18} {part:9} {predicted[part] * 1e3:8.1f} / {measured * 1e3:8.1f}"
                f"  ({error:+.1%})"
            )
    result = {
        "probe_seconds": round(probe_seconds, 1),
        "threads": hardware.cores,
        "worst": worst,
        "rows": rows,
    }
    print(json.dumps(result))
    large = [name for name, _ in SHAPES if preset(name).parameters >= MUON_PARAMETERS]
    prices = [row["error"] for row in rows if row["part"] == "muon" and row["model"] in large]
    sys.exit(max(map(abs, prices)) > MUON_TOLERANCE)


if __name__ == "__main__":
    main()
