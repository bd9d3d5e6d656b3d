"""FSDP2 or DeepSpeed with CPU offload on a GPU, in this process, as swap_cuda.py calls it:
`cuda_baseline.py '[peer, model, micro-tokens, micro-batches, steps, bytes of GPU memory]'`.

The layers, tokens, clipping and recompute of baseline_train.py, with bf16 products and fp32 masters: FSDP2 by its
MixedPrecisionPolicy, DeepSpeed by its bf16 mode with its own CPUAdam.
"""

import itertools
import json
import sys
import time
from dataclasses import replace
from statistics import median

import torch
from baseline_train import BETAS, CLIP, DECAY, EPSILON, GPT, RATE, groups, torch_step
from baselines import batches
from torch import nn

from barnraise.spec import ModelSpec, preset


def join() -> None:
    torch.distributed.init_process_group(
        "nccl", store=torch.distributed.HashStore(), rank=0, world_size=1
    )


def fsdp2(model: ModelSpec, micro_batches: int, sequences: int):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    join()
    how = {
        "mesh": init_device_mesh("cuda", (1,)),
        "offload_policy": CPUOffloadPolicy(),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    module = GPT(model, "sliced")
    for block in module.blocks:
        fully_shard(block, **how)
    fully_shard(module, **how)
    return torch_step(module, module.set_requires_gradient_sync)


def deepspeed(model: ModelSpec, micro_batches: int, sequences: int):
    import deepspeed as ds
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    join()
    ds.init_distributed("nccl", auto_mpi_discovery=False, verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": sequences,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": CLIP,
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
    with ds.zero.Init(config_dict_or_path=config):
        module: nn.Module = GPT(model, "sliced")
    optimizer = DeepSpeedCPUAdam(
        groups(module), lr=RATE, betas=BETAS, eps=EPSILON, weight_decay=DECAY, adamw_mode=True
    )  # fmt: skip
    engine, *_ = ds.initialize(model=module, optimizer=optimizer, config=config)

    def step(micro: list) -> float:
        total = 0.0
        for tokens, targets in micro:
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
            total += loss.item() / len(micro)
        return total

    return step


def main() -> None:
    peer, name, micro_tokens, micro_batches, steps, cap = json.loads(sys.argv[1])
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total))
    model = replace(preset(name), context=min(micro_tokens, preset(name).context))
    step = {"fsdp2": fsdp2, "deepspeed": deepspeed}[peer](
        model, micro_batches, micro_tokens // model.context
    )
    seconds = []
    for micro in itertools.islice(batches(model, micro_tokens, micro_batches), steps):
        pairs = [(batch[:, :-1].cuda(), batch[:, 1:].cuda()) for batch in micro]
        torch.cuda.synchronize()
        started = time.perf_counter()
        step(pairs)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    speed = micro_tokens * micro_batches / median(seconds[1:])
    print(
        json.dumps(
            {"tokens_per_second": speed, "device_gb": torch.cuda.max_memory_allocated() / 1e9}
        )
    )


if __name__ == "__main__":
    main()
