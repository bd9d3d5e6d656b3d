"""Test the synchronous control against its definition, with two processes over gloo."""

import os
import subprocess
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from helpers.paths import ROOT

from barnraise.exchange.mixing.accumulated_adam import AccumulatedAdam, AdamSettings
from barnraise.exchange.mixing.step_averaging import AllReduceAveraging, train_step

TRAIN = """
import sys, torch, torch.distributed as dist
from barnraise.exchange.mixing.accumulated_adam import AccumulatedAdam, AdamSettings
from barnraise.exchange.mixing.step_averaging import AllReduceAveraging, train_step
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=1, world_size=2)
weights = torch.ones(10)
adam = AccumulatedAdam(weights, AdamSettings())
for _ in range(5):
    train_step(AllReduceAveraging(), adam, weights, lambda: weights * 3.0, 0.1)
print(weights.sum().item())
dist.destroy_process_group()
"""


def test_all_reduce_steps_along_the_mean_gradient_on_all_machines(tmp_path):
    place = tmp_path / "store"
    other = subprocess.Popen(
        [sys.executable, "-c", TRAIN, str(place)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "worker")},
    )
    limit = timedelta(seconds=180)
    dist.init_process_group(
        "gloo", init_method=f"file://{place}", rank=0, world_size=2, timeout=limit
    )
    try:
        weights, expected = torch.ones(10), torch.ones(10)
        adam = AccumulatedAdam(weights, AdamSettings())
        alone = AccumulatedAdam(expected, AdamSettings())
        for _ in range(5):
            train_step(AllReduceAveraging(), adam, weights, lambda: weights * 1.0, 0.1)
            alone.apply_gradient(expected, expected * 2.0, 0.1)
    finally:
        dist.destroy_process_group()
    output, _ = other.communicate(timeout=180)
    assert torch.allclose(weights, expected)
    assert float(output) == weights.sum().item(), "both have the same bits"
