"""Train what a user would otherwise choose on a GPU: plain torch, FSDP2 and torchao with offload.

For gpu_first.py. Layers, tokens, clipping and recomputation are those of baseline_train.py, with
bf16 products and fp32 master weights: FSDP2 by its MixedPrecisionPolicy, the others by autocast.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from baseline_train import (
    BETAS,
    CLIP_NORM,
    EPSILON,
    GPT,
    LEARNING_RATE,
    WEIGHT_DECAY,
    Batch,
    Step,
    init_single_process_group,
    parameter_groups,
    torch_step,
)
from torch import nn

from barnraise.spec import ModelSpec

LOSS = "sliced"


@dataclass(frozen=True)
class GpuTraining:
    """What a baseline trains.

    Attributes:
        model: the model's shape.
        sequences: of a micro-batch.
        micro_batches: of a step.
        steps: of the training; the first is the warm-up.
        device: "cuda", or "cpu" to show that the program runs.
    """

    model: ModelSpec
    sequences: int
    micro_batches: int
    steps: int
    device: str


def build_plain(training: GpuTraining) -> Step:
    """Return the step of plain torch with everything on the GPU."""
    module = GPT(training.model, LOSS).to(training.device)
    return _with_autocast(torch_step(module), training.device)


def build_fsdp2(training: GpuTraining, offloads: bool = True) -> Step:
    """Return the step of FSDP2, with CPU offload or with all on the GPUs of torchrun's ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    is_gpu = training.device == "cuda"
    backend = "cpu:gloo,cuda:nccl" if is_gpu else "gloo"
    if "WORLD_SIZE" in os.environ:
        torch.distributed.init_process_group(backend)
    else:
        init_single_process_group(backend)
    policy = CPUOffloadPolicy(pin_memory=is_gpu) if offloads else OffloadPolicy()
    options: dict[str, Any] = {
        "mesh": init_device_mesh(training.device, (torch.distributed.get_world_size(),)),
        "offload_policy": policy,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    module = GPT(training.model, LOSS)
    if not offloads:
        module.to(training.device)
    for block in module.blocks:
        fully_shard(block, **options)
    fully_shard(module, **options)
    sharded: Any = module  # `fully_shard` has changed its class
    return torch_step(module, sharded.set_requires_gradient_sync)


def build_torchao(training: GpuTraining) -> Step:
    """Return the step of torchao's CPUOffloadOptimizer: weights on the GPU, moments in RAM."""
    from torchao.optim import CPUOffloadOptimizer  # type: ignore  # installed by hand

    module = GPT(training.model, LOSS).to(training.device)
    optimizer = CPUOffloadOptimizer(
        parameter_groups(module),
        torch.optim.AdamW,
        offload_gradients=False,
        fused=True,
        lr=LEARNING_RATE,
        betas=BETAS,
        eps=EPSILON,
        weight_decay=WEIGHT_DECAY,
    )

    def step(micro_batches: list[Batch]) -> float:
        total = 0.0
        for tokens, targets in micro_batches:
            loss = module(tokens, targets) / len(micro_batches)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(module.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return _with_autocast(step, training.device)


def _with_autocast(step: Step, device: str) -> Step:
    """Return a step whose products are in bf16."""

    def run(micro_batches: list[Batch]) -> float:
        with torch.autocast(device, torch.bfloat16):
            return step(micro_batches)

    return run


BUILDERS: dict[str, Callable[[GpuTraining], Step]] = {
    "plain": build_plain,
    "fsdp2": build_fsdp2,
    "fsdp2 resident": partial(build_fsdp2, offloads=False),
    "torchao": build_torchao,
}


def measure(baseline: str, training: GpuTraining) -> dict[str, Any]:
    """Train a baseline in this process.

    Returns:
        Tokens per second by the median step, the seconds of each step and the losses.
    """
    step = BUILDERS[baseline](training)
    shape = (training.sequences, training.model.context + 1)
    seconds: list[float] = []
    losses: list[float] = []
    for _ in range(training.steps):
        batches = [
            torch.randint(training.model.vocabulary, shape, device=training.device)
            for _ in range(training.micro_batches)
        ]
        started = time.perf_counter()
        losses.append(step([(batch[:, :-1], batch[:, 1:]) for batch in batches]))
        if training.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    tokens = training.micro_batches * training.sequences * training.model.context
    return {
        "tokens_per_second": tokens / median(seconds[1:]),
        "seconds": [round(each, 4) for each in seconds],
        "losses": [round(loss, 4) for loss in losses],
    }
