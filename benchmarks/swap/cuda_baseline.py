"""Train FSDP2 or DeepSpeed with CPU offload on a GPU in this process, for bench_swap_cuda.py.

`cuda_baseline.py '["fsdp2", "gpt3-1.3b", 1024, 16, 4, 8000000000]'`: the baseline, the model, the
micro-batch's tokens, micro-batches a step, steps, and bytes of GPU memory.

Layers, tokens, clipping and recomputation are those of baseline_train.py, with bf16 products and
fp32 master weights: FSDP2 by its MixedPrecisionPolicy, DeepSpeed by its bf16 mode with its own
CPUAdam.
"""

import itertools
import json
import sys
import time
from dataclasses import replace
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
    Step,
    deepspeed_step,
    init_single_process_group,
    parameter_groups,
    torch_step,
)
from baselines import batches
from torch import nn

from barnraise.spec import ModelSpec, preset


def build_fsdp2(model: ModelSpec, _micro_batches: int, _sequences: int) -> Step:
    """Return the step of FSDP2 with CPU offload."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    init_single_process_group("nccl")
    options: dict[str, Any] = {
        "mesh": init_device_mesh("cuda", (1,)),
        "offload_policy": CPUOffloadPolicy(),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    module = GPT(model, "sliced")
    for block in module.blocks:
        fully_shard(block, **options)
    fully_shard(module, **options)
    sharded: Any = module  # `fully_shard` has changed its class
    return torch_step(module, sharded.set_requires_gradient_sync)


def build_deepspeed(model: ModelSpec, micro_batches: int, sequences: int) -> Step:
    """Return the step of DeepSpeed ZeRO-3 with optimizer and parameters offloaded to the CPU."""
    import deepspeed  # type: ignore  # installed by hand on the GPU's machine
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore  # as above

    init_single_process_group("nccl")
    deepspeed.init_distributed("nccl", auto_mpi_discovery=False, verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": sequences,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": CLIP_NORM,
        "steps_per_print": 1 << 30,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
            "reduce_bucket_size": model.width**2,
            "stage3_prefetch_bucket_size": int(0.9 * model.width**2),
            "stage3_param_persistence_threshold": 10 * model.width,
        },
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        module: nn.Module = GPT(model, "sliced")
    optimizer = DeepSpeedCPUAdam(
        parameter_groups(module),
        lr=LEARNING_RATE,
        betas=BETAS,
        eps=EPSILON,
        weight_decay=WEIGHT_DECAY,
        adamw_mode=True,
    )
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    return deepspeed_step(engine)


BUILDERS = {"fsdp2": build_fsdp2, "deepspeed": build_deepspeed}


def main() -> None:
    """Train and print tokens/s and the peak of torch's GPU memory."""
    baseline, name, micro_tokens, micro_batches, steps, cap = json.loads(sys.argv[1])
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total))
    model = replace(preset(name), context=min(micro_tokens, preset(name).context))
    step = BUILDERS[baseline](model, micro_batches, micro_tokens // model.context)
    seconds = []
    for step_batches in itertools.islice(batches(model, micro_tokens, micro_batches), steps):
        pairs = [(batch[:, :-1].cuda(), batch[:, 1:].cuda()) for batch in step_batches]
        torch.cuda.synchronize()
        started = time.perf_counter()
        step(pairs)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    result = {
        "tokens_per_second": micro_tokens * micro_batches / median(seconds[1:]),
        "device_gb": torch.cuda.max_memory_allocated() / 1e9,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
