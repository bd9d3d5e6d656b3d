"""Train one baseline in this process, for baselines.py.

`baseline_train.py '["fsdp2", "gpt2-124m", 1024, 2, 6, "sliced"]'`: the baseline, the model, the
micro-batch's tokens, micro-batches a step, steps, and the loss. The script prints one line of JSON.
"""

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
from typing import Any

import torch
import torch.nn.functional as F
from baselines import SEED, batches
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from barnraise.models.functions import FUNCTIONS
from barnraise.models.weights import Weights
from barnraise.spec import UNIT_BITS, Fragment, ModelSpec, preset

GPT2 = FUNCTIONS["gpt2"]

# Rows of logits that exist at a time: few for a CPU's caches, many for a GPU's width.
LOSS_SLICE_ROWS = {"cpu": 256, "cuda": 4096}
LEARNING_RATE = 3e-4
BETAS = (0.9, 0.95)
EPSILON = 1e-8
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0

# Tokens and the token that follows each: int64 [B, T] both.
Batch = tuple[Tensor, Tensor]
# Runs one optimizer step on the mean of the micro-batches and returns the mean loss before it.
Step = Callable[[list[Batch]], float]


class Layer(nn.Module):
    """Fragments' tensors as parameters of one module, with "_" for each "." of their names."""

    def __init__(self, *fragments: Fragment) -> None:
        """Create the parameters with initial values that only the seed decides."""
        super().__init__()
        self.fragments = fragments
        generator = torch.Generator().manual_seed(SEED + fragments[0].index)
        for slot in (slot for fragment in fragments for slot in fragment.slots):
            value = torch.full(slot.shape, float(slot.initial == "ones"))
            if slot.initial == "normal":
                value.normal_(0.0, slot.deviation / 2**UNIT_BITS, generator=generator)
            self.register_parameter(slot.name.replace(".", "_"), nn.Parameter(value))

    def weights(self, index: int = 0) -> Weights:
        """Return the tensors of one of the fragments, by their names in the model."""
        return {
            slot.name: getattr(self, slot.name.replace(".", "_"))
            for slot in self.fragments[index].slots
        }


class Block(Layer):
    """A block that recomputes itself in backward.

    Recomputing inside the module fetches its weights once for recompute and backward.
    """

    def __init__(self, fragment: Fragment, model: ModelSpec) -> None:
        """Create the block of a fragment of a model."""
        super().__init__(fragment)
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, [B, T, d], and save only its input."""
        output = checkpoint(self.compute, x, use_reentrant=False, preserve_rng_state=False)
        assert isinstance(output, Tensor)
        return output

    def compute(self, x: Tensor) -> Tensor:
        """Return the block's output, [B, T, d]."""
        return GPT2.block(self.weights(), x, self.model)


class GPT(Layer):
    """The whole model, from tokens and targets to their mean loss.

    The embedding and the final norm are the root's own parameters, as the head is tied to them.
    """

    def __init__(self, model: ModelSpec, loss: str) -> None:
        """Create the model.

        Args:
            model: its shape.
            loss: "sliced" or "whole", a key of LOSSES.
        """
        first, *middle, last = model.fragments()
        super().__init__(first, last)
        self.blocks = nn.ModuleList(Block(fragment, model) for fragment in middle)
        self.loss = LOSSES[loss]

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of int64 [B, T] tokens and targets."""
        embedding, final = self.weights(0), self.weights(1)
        x = GPT2.embed(embedding, tokens)
        for block in self.blocks:
            x = block(x)
        return self.loss(final, embedding, x, targets)


def _final_norm(final: Weights, x: Tensor) -> Tensor:
    """Apply the norm before the head, [B, T, d]."""
    return F.layer_norm(
        x, x.shape[-1:], final["norm.weight"], final["norm.bias"], ModelSpec.norm_epsilon
    )


def whole_loss(final: Weights, embedding: Weights, x: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss by way of all logits at once."""
    return F.cross_entropy(
        F.linear(_final_norm(final, x), embedding["token"]).flatten(0, 1), targets.flatten()
    )


def sliced_loss(final: Weights, embedding: Weights, x: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss without ever holding all logits."""
    rows = _final_norm(final, x).flatten(0, 1)
    token = embedding["token"]
    if torch.is_autocast_enabled(rows.device.type):  # which does not reach into the function
        dtype = torch.get_autocast_dtype(rows.device.type)
        rows, token = rows.to(dtype), token.to(dtype)
    # torch types the result of an autograd function's apply as optional.
    return SlicedCrossEntropy.apply(rows, token, targets.flatten())  # type: ignore  # torch declares no type


class SlicedCrossEntropy(torch.autograd.Function):
    """The mean loss of rows x [n, d] under the tied head [V, d].

    The forward computes both gradients slice by slice, so that the logits never exist as a whole.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss and save both gradients."""
        dx, dtoken = torch.empty_like(x), torch.zeros_like(token)
        total = torch.zeros((), device=x.device)
        slice_rows = LOSS_SLICE_ROWS[x.device.type]
        for begin in range(0, len(x), slice_rows):
            end = begin + slice_rows
            rows, target = x[begin:end], targets[begin:end, None]
            slab = torch.log_softmax(rows @ token.t(), dim=-1, dtype=torch.float32)
            total -= slab.gather(1, target).sum()
            # The slab becomes the gradient of its logits: (softmax − one-hot) / n.
            slab.exp_()
            slab.scatter_add_(1, target, slab.new_full((1, 1), -1.0).expand_as(target))
            slab = slab.div_(len(x)).to(x.dtype)
            torch.mm(slab, token, out=dx[begin:end])
            dtoken.addmm_(slab.t(), rows)
        ctx.gradients = dx, dtoken
        return total / len(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the saved gradients, scaled by the loss's own."""
        dx, dtoken = ctx.gradients
        ctx.gradients = None
        return dx.mul_(outer), dtoken.mul_(outer), None


LOSSES = {"sliced": sliced_loss, "whole": whole_loss}


def parameter_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Return the parameters that decay (matrices, embeddings) and those that do not."""
    parameters = list(module.parameters())
    return [
        {"params": [p for p in parameters if dimensions(p) >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if dimensions(p) < 2], "weight_decay": 0.0},
    ]


def dimensions(parameter: Tensor) -> int:
    """Return the number of a parameter's dimensions; ZeRO-3 leaves an empty tensor in its place."""
    return len(getattr(parameter, "ds_shape", parameter.shape))


# ---- the baselines ----------------------------------------------------------------------------


def build_in_memory(model: ModelSpec, loss: str, _micro_batches: int, _sequences: int) -> Step:
    """Return the step of plain torch with everything resident."""
    return torch_step(GPT(model, loss))


def build_fsdp2(
    model: ModelSpec, loss: str, _micro_batches: int, _sequences: int, lean: bool = False
) -> Step:
    """Return the step of FSDP2 with CPU offload; `lean` reduces gradients every micro-batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    init_single_process_group()
    options: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (1,)),
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
    }
    module = GPT(model, loss)
    for block in module.blocks:
        fully_shard(block, **options)
    fully_shard(module, **options)
    sharded: Any = module  # `fully_shard` has changed its class
    return torch_step(module, None if lean else sharded.set_requires_gradient_sync)


def torch_step(module: nn.Module, set_gradient_sync: Callable[[bool], None] | None = None) -> Step:
    """Return a step with torch's fused AdamW.

    Args:
        module: returns the mean loss of tokens and targets.
        set_gradient_sync: switches the reduction of gradients; it is on for the last micro-batch.
    """
    optimizer = torch.optim.AdamW(
        parameter_groups(module), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, fused=True
    )

    def step(micro_batches: list[Batch]) -> float:
        total = 0.0
        for index, (tokens, targets) in enumerate(micro_batches):
            if set_gradient_sync:
                set_gradient_sync(index == len(micro_batches) - 1)
            loss = module(tokens, targets) / len(micro_batches)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(module.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def build_deepspeed(model: ModelSpec, loss: str, micro_batches: int, sequences: int) -> Step:
    """Return the step of DeepSpeed ZeRO-3 with optimizer and parameters offloaded to the CPU."""
    import deepspeed  # type: ignore  # installed only in the baselines' own environment
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore  # as above

    init_single_process_group()
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    square = model.width**2
    config = {
        "train_micro_batch_size_per_gpu": sequences,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": CLIP_NORM,
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
    with deepspeed.zero.Init(config_dict_or_path=config):
        module = GPT(model, loss)
    optimizer = DeepSpeedCPUAdam(
        parameter_groups(module), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, adamw_mode=True
    )
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    return deepspeed_step(engine)


def deepspeed_step(engine: Any) -> Step:
    """Return a step of a DeepSpeed engine, which accumulates, clips and updates by itself."""

    def step(micro_batches: list[Batch]) -> float:
        total = 0.0
        for tokens, targets in micro_batches:
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
            total += loss.item() / len(micro_batches)
        return total

    return step


def init_single_process_group(backend: str = "gloo") -> None:
    """Initialise a process group of one, without an address."""
    store = torch.distributed.HashStore()  # type: ignore  # exported without a type
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)


BUILDERS: dict[str, Callable[[ModelSpec, str, int, int], Step]] = {
    "torch": build_in_memory,
    "fsdp2": build_fsdp2,
    "fsdp2-lean": partial(build_fsdp2, lean=True),
    "deepspeed": build_deepspeed,
}


def run(
    baseline: str, model: str, micro_tokens: int, micro_batches: int, steps: int, loss: str
) -> dict[str, Any]:
    """Train in this process and return the dictionary that `baselines.measure` documents."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    spec = preset(model)
    stream = batches(spec, micro_tokens, micro_batches)
    step = BUILDERS[baseline](spec, loss, micro_batches, max(1, micro_tokens // spec.context))
    seconds, losses = [], []
    for step_batches in itertools.islice(stream, steps):
        pairs = [(batch[:, :-1], batch[:, 1:]) for batch in step_batches]
        started = time.perf_counter()
        losses.append(step(pairs))
        seconds.append(round(time.perf_counter() - started, 4))
    tokens_per_step = micro_tokens * micro_batches
    return {
        "peer": baseline,
        "tokens_per_second": round(tokens_per_step / statistics.median(seconds[1:]), 2),
        "step_seconds": seconds,
        "peak_rss_mb": peak_rss_mb(),
        "loss_first": round(losses[0], 4),
        "loss_last": round(losses[-1], 4),
        "threads": torch.get_num_threads(),
        "version": version("deepspeed" if baseline == "deepspeed" else "torch"),
    }


def peak_rss_mb() -> float:
    """Return this process's largest resident set so far, in MiB.

    `getrusage` would include that of the process which started this one.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return round(int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024, 1)


if __name__ == "__main__":
    print(json.dumps(run(*json.loads(sys.argv[1]))))
