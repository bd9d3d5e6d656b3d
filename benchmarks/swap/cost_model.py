"""Predicted against measured seconds of the model's parts on this machine: `python benchmarks/swap/cost_model.py`.

Prints a table, then one JSON object as its last line. About a minute on two cores; leave the machine alone meanwhile.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "worker"))

from barnraise.models import gpt2 as gpt
from barnraise.planning import cost_model
from barnraise.planning.hardware import keep_freed_memory
from barnraise.spec import ModelSpec, preset
from barnraise.swap.forward_backward import BlockEnd
from barnraise.swap.fused_loss import head_step
from barnraise.swap.hardware_probe import probe
from barnraise.swap.leaves import Leaves

SHAPES = (  # model, sequences of its context
    ("gpt2-124m", 1), ("gpt2-124m", 2), ("gpt2-355m", 1), ("gpt-mini", 4), ("gpt-micro", 8), ("gpt2-1.5b", 1),
)  # fmt: skip
LEAST, MOST, ENOUGH = 5, 21, 1.0  # calls, calls, seconds


def seconds(call: Callable[[], Any]) -> float:
    call()
    found = []
    while len(found) < LEAST or (sum(found) < ENOUGH and len(found) < MOST):
        begun = time.perf_counter()
        call()
        found.append(time.perf_counter() - begun)
    return sorted(found)[len(found) // 4]  # as the probe does


def leaves(model: ModelSpec, index: int) -> Leaves:
    fragment = model.fragments()[index]
    found = Leaves(fragment, torch.randn(fragment.size).mul_(0.02))
    found.accumulate_into(torch.zeros(fragment.size))
    return found


def measured(model: ModelSpec, sequences: int) -> dict[str, float]:
    """Seconds of a block's forward, of its recompute and backward, of the head's step."""
    mine, x = leaves(model, 1), torch.randn(sequences, model.context, model.width)
    dy = torch.randn_like(x)

    def forward() -> None:
        with torch.no_grad():
            gpt.block(mine.weights, x, model.heads)

    def backward() -> None:
        leaf = x.detach().requires_grad_()
        BlockEnd.apply(*gpt.block_start(mine.weights, leaf, model.heads), mine, False).backward(dy)

    found = {"forward": seconds(forward), "backward": seconds(backward)}
    final, token = leaves(model, -1).weights, leaves(model, 0).weights["token"].detach()
    targets, gradient = torch.randint(model.vocabulary, x.shape[:2]), torch.zeros_like(token)
    found["head"] = seconds(lambda: head_step(final, token, x, targets, 1.0, gradient))
    return found


def main() -> None:
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        hw = probe(Path(folder), "cpu")
        took = time.perf_counter() - begun
    print(hw.to_json(), f"\nprobed in {took:.1f} s; milliseconds predicted / measured (error)")
    rows = []
    for name, sequences in SHAPES:
        model = preset(name)
        forward = cost_model.block_forward_seconds(hw, model, sequences)
        predicted = {
            "forward": forward,
            "backward": cost_model.block_again_seconds(hw, model, sequences)
            + cost_model.block_backward_seconds(hw, model, sequences),
            "head": cost_model.head_seconds(hw, model, sequences),
        }
        for part, seen in measured(model, sequences).items():
            error = predicted[part] / seen - 1
            rows.append(
                {"model": name, "sequences": sequences, "part": part, "error": round(error, 4)}
            )
            shape = f"{name} {sequences}×{model.context}"
            print(
                f"{shape:18} {part:9} {predicted[part] * 1e3:8.1f} / {seen * 1e3:8.1f}  ({error:+.1%})"
            )
    worst = {
        part: max(abs(row["error"]) for row in rows if row["part"] == part) for part in predicted
    }
    print(
        json.dumps(
            {"probe_seconds": round(took, 1), "threads": hw.cores, "worst": worst, "rows": rows}
        )
    )


if __name__ == "__main__":
    main()
