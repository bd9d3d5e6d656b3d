"""One of two processes of a bare `fully_shard` loop: what the sharded engine is compared with.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=… MASTER_PORT=… python benchmarks/swap/plain_fsdp.py

It is the loop of PyTorch's FSDP2 tutorial on the same functions of blocks: no exchange, no commands
from another process, `torch.optim.AdamW` and `clip_grad_norm_`. Each rank samples its own
sequences. Rank 0 makes a step for each line that it reads, and prints the step's seconds.
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sharded_runs import SPEED_MODEL, SPEED_SEQUENCES
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from barnraise.models.functions import functions_of
from barnraise.spec import Fragment

FUNCTIONS = functions_of(SPEED_MODEL)


class Part(nn.Module):
    """A fragment's tensors as parameters."""

    def __init__(self, fragment: Fragment) -> None:
        """Begin with small random weights."""
        super().__init__()
        self.names = {slot.name: slot.name.replace(".", "_") for slot in fragment.slots}
        for slot in fragment.slots:
            values = torch.randn(slot.shape) * 0.02 + (slot.kind == "norm")
            self.register_parameter(self.names[slot.name], nn.Parameter(values))

    def by_name(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        return {name: getattr(self, attribute) for name, attribute in self.names.items()}


class Block(Part):
    """A block."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute it."""
        return FUNCTIONS.block(self.by_name(), x, SPEED_MODEL)


class Model(nn.Module):
    """The whole model."""

    def __init__(self) -> None:
        """Build it."""
        super().__init__()
        first, *blocks, last = SPEED_MODEL.fragments()
        self.first, self.last = Part(first), Part(last)
        self.blocks = nn.ModuleList(Block(block) for block in blocks)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss."""
        embedding = self.first.by_name()
        x = FUNCTIONS.embed(embedding, tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        hidden = FUNCTIONS.norm(self.last.by_name(), "norm", x, SPEED_MODEL)
        logits = F.linear(hidden, embedding["token"])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    """Train for as long as rank 0 reads lines."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    shape = SPEED_SEQUENCES // dist.get_world_size(), SPEED_MODEL.context + 1
    goes_on = torch.ones(1)
    while True:
        if dist.get_rank() == 0:
            goes_on.fill_(bool(sys.stdin.readline()))
        dist.broadcast(goes_on, 0)
        if not goes_on:
            break
        started = time.perf_counter()
        loss = model(torch.randint(SPEED_MODEL.vocabulary, shape))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        if dist.get_rank() == 0:
            print(time.perf_counter() - started, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
