"""One peer in this process, for baselines.py: `baseline_train.py '[peer, model, micro-tokens, micro-batches, steps, loss]'`."""

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
import torch.nn.functional as F
from baselines import SEED, batches
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from barnraise.models import gpt2 as gpt
from barnraise.spec import UNIT_BITS, Fragment, ModelSpec, preset

SLICE = 256  # rows of logits at a time
RATE, BETAS, EPSILON, DECAY, CLIP = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0

Batch = tuple[Tensor, Tensor]  # tokens and what follows each: int64 [B, T] both
Step = Callable[
    [list[Batch]], float
]  # one optimizer step on the mean of the micro-batches → mean loss before it


class Layer(nn.Module):
    """Fragments' tensors as parameters of one module, named alike, "." as "_"; initial values by seed."""

    def __init__(self, *fragments: Fragment):
        super().__init__()
        self.fragments = fragments
        dice = torch.Generator().manual_seed(SEED + fragments[0].index)
        for slot in (slot for fragment in fragments for slot in fragment.slots):
            value = torch.full(slot.shape, float(slot.initial == "ones"))
            if slot.initial == "normal":
                value.normal_(0.0, slot.deviation / 2**UNIT_BITS, generator=dice)
            self.register_parameter(slot.name.replace(".", "_"), nn.Parameter(value))

    def weights(self, index: int = 0) -> gpt.Weights:
        return {
            slot.name: getattr(self, slot.name.replace(".", "_"))
            for slot in self.fragments[index].slots
        }


class Block(Layer):
    """Recomputes itself in backward; inside the module, so that its weights come once for recompute and backward."""

    def __init__(self, fragment: Fragment, heads: int):
        super().__init__(fragment)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.compute, x, use_reentrant=False, preserve_rng_state=False)

    def compute(self, x: Tensor) -> Tensor:
        return gpt.block(self.weights(), x, self.heads)


class GPT(Layer):
    """tokens, targets → mean loss. The embedding and the final norm are the root's own: the head is tied to them."""

    def __init__(self, model: ModelSpec, loss: str):
        first, *middle, last = model.fragments()
        super().__init__(first, last)
        self.blocks = nn.ModuleList(Block(fragment, model.heads) for fragment in middle)
        self.loss = LOSSES[loss]

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        embedding, final = self.weights(0), self.weights(1)
        x = gpt.embed(embedding, tokens)
        for block in self.blocks:
            x = block(x)
        return self.loss(final, embedding, x, targets)


def whole_loss(final: gpt.Weights, embedding: gpt.Weights, x: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(gpt.head(final, embedding, x).flatten(0, 1), targets.flatten())


def sliced_loss(final: gpt.Weights, embedding: gpt.Weights, x: Tensor, targets: Tensor) -> Tensor:
    return SlicedCrossEntropy.apply(
        gpt.norm(final, "norm", x).flatten(0, 1), embedding["token"], targets.flatten()
    )


class SlicedCrossEntropy(torch.autograd.Function):
    """Mean loss of rows x [n, d] under the tied head [V, d]; both gradients are made on the way, logits never whole."""

    @staticmethod
    def forward(ctx, x: Tensor, token: Tensor, targets: Tensor) -> Tensor:
        dx, dtoken, total = torch.empty_like(x), torch.zeros_like(token), x.new_zeros(())
        for begin in range(0, len(x), SLICE):
            part, right = x[begin : begin + SLICE], targets[begin : begin + SLICE, None]
            slab = torch.log_softmax(part @ token.t(), dim=-1)
            total -= slab.gather(1, right).sum()
            slab.exp_().scatter_add_(1, right, slab.new_full((1, 1), -1.0).expand_as(right)).div_(
                len(x)
            )
            torch.mm(slab, token, out=dx[begin : begin + SLICE])
            dtoken.addmm_(slab.t(), part)
        ctx.gradients = dx, dtoken
        return total / len(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, outer: Tensor) -> tuple[Tensor, Tensor, None]:
        (dx, dtoken), ctx.gradients = ctx.gradients, None
        return dx.mul_(outer), dtoken.mul_(outer), None


LOSSES = {"sliced": sliced_loss, "whole": whole_loss}


def groups(module: nn.Module) -> list[dict]:
    """Parameters that decay (matrices, embeddings) and those that do not."""
    parameters = list(module.parameters())
    return [
        {"params": [p for p in parameters if dimensions(p) >= 2], "weight_decay": DECAY},
        {"params": [p for p in parameters if dimensions(p) < 2], "weight_decay": 0.0},
    ]


def dimensions(parameter: Tensor) -> int:
    return len(
        getattr(parameter, "ds_shape", parameter.shape)
    )  # ZeRO-3 leaves an empty tensor in its place


# ---- the peers -----------------------------------------------------------------------------------------------------


def in_memory(model: ModelSpec, loss: str, micro_batches: int, sequences: int) -> Step:
    return torch_step(GPT(model, loss))


def fsdp2(
    model: ModelSpec, loss: str, micro_batches: int, sequences: int, lean: bool = False
) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    join_alone()
    how = {
        "mesh": init_device_mesh("cpu", (1,)),
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
    }
    module = GPT(model, loss)
    for block in module.blocks:
        fully_shard(block, **how)
    fully_shard(module, **how)
    return torch_step(module, None if lean else module.set_requires_gradient_sync)


def torch_step(module: nn.Module, sync: Callable[[bool], None] | None = None) -> Step:
    optimizer = torch.optim.AdamW(groups(module), lr=RATE, betas=BETAS, eps=EPSILON, fused=True)

    def step(micro: list[Batch]) -> float:
        total = 0.0
        for index, (tokens, targets) in enumerate(micro):
            if sync:
                sync(index == len(micro) - 1)
            loss = module(tokens, targets) / len(micro)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def deepspeed(model: ModelSpec, loss: str, micro_batches: int, sequences: int) -> Step:
    import deepspeed as ds
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    join_alone()
    ds.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    square = model.width**2
    config = {
        "train_micro_batch_size_per_gpu": sequences,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": CLIP,
        "steps_per_print": 1 << 30,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
            "reduce_bucket_size": square,
            "stage3_prefetch_bucket_size": int(0.9 * square),
            "stage3_param_persistence_threshold": 10 * model.width,
        },
    }
    with ds.zero.Init(config_dict_or_path=config):
        module = GPT(model, loss)
    optimizer = DeepSpeedCPUAdam(groups(module), lr=RATE, betas=BETAS, eps=EPSILON, adamw_mode=True)
    engine, *_ = ds.initialize(model=module, optimizer=optimizer, config=config)

    def step(micro: list[Batch]) -> float:
        total = 0.0
        for tokens, targets in micro:
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
            total += loss.item() / len(micro)
        return total

    return step


def join_alone() -> None:
    """A process group of one, without an address."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )


BUILD = {
    "torch": in_memory,
    "fsdp2": fsdp2,
    "fsdp2-lean": partial(fsdp2, lean=True),
    "deepspeed": deepspeed,
}


def run(
    peer: str, model: str, micro_tokens: int, micro_batches: int, steps: int, loss: str
) -> dict:
    """What `measure` promises, in this process."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    spec = preset(model)
    stream = batches(spec, micro_tokens, micro_batches)
    step = BUILD[peer](spec, loss, micro_batches, max(1, micro_tokens // spec.context))
    seconds, losses = [], []
    for micro in itertools.islice(stream, steps):
        pairs = [(batch[:, :-1], batch[:, 1:]) for batch in micro]
        started = time.perf_counter()
        losses.append(step(pairs))
        seconds.append(round(time.perf_counter() - started, 4))
    return {
        "peer": peer,
        "tokens_per_second": round(
            micro_tokens * micro_batches / statistics.median(seconds[1:]), 2
        ),
        "step_seconds": seconds,
        "peak_rss_mb": peak_rss_mb(),
        "loss_first": round(losses[0], 4),
        "loss_last": round(losses[-1], 4),
        "threads": torch.get_num_threads(),
        "version": version("deepspeed" if peer == "deepspeed" else "torch"),
    }


def peak_rss_mb() -> float:
    """MiB, of this process since it began; not its parent's, as getrusage has it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return round(int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024, 1)


if __name__ == "__main__":
    print(json.dumps(run(*json.loads(sys.argv[1]))))
