"""One rank of torch's GPipe over gloo, with which `bench_crew.py` compares a crew of two."""

import torch
import torch.distributed as dist
from field_model import FieldGPT, create_adamw, cross_entropy
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from barnraise.spec import ModelSpec

RANKS = 2


class _Stage(nn.Module):
    """A rank's part of the model."""

    def __init__(self, part: FieldGPT) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        """Transform tokens, or hidden states."""
        return self.part.transform(x)


class GpipeRank:
    """Train one of two spans; the first has the embedding and the last one the head.

    Nothing is recomputed, no gradient is clipped, and the two copies of a tied table are not kept
    equal: all of that is in torch's favour.
    """

    def __init__(
        self, model: ModelSpec, blocks: int, rank: int, shape: tuple[int, int], port: int
    ) -> None:
        """Connect to the other rank.

        Args:
            model: the whole model.
            blocks: of the first rank.
            rank: this one's.
            shape: sequences of a micro-batch, and micro-batches of a step.
            port: of the first rank, on loopback.
        """
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
        sequences, micro_batches = shape
        parts = range(blocks + 1), range(blocks + 1, model.layers + 2)
        module = _Stage(FieldGPT(parts[rank], model))
        # Without "fused", AdamW takes several times as long.
        self._optimizer = create_adamw(list(module.parameters()))
        self._optimizer.defaults["fused"] = True
        for group in self._optimizer.param_groups:
            group["fused"], group["foreach"] = True, False
        tokens = torch.zeros(sequences, model.context, dtype=torch.int64)
        hidden = torch.zeros(*tokens.shape, model.width, requires_grad=True)
        logits = torch.zeros(*tokens.shape, model.vocabulary, requires_grad=True)
        stage = PipelineStage(
            module,
            rank,
            RANKS,
            torch.device("cpu"),
            input_args=(hidden if rank else tokens,),
            output_args=(logits if rank else hidden,),
        )
        self._schedule = ScheduleGPipe(stage, micro_batches, loss_fn=cross_entropy)
        self._rank = rank

    def step(self, text: Tensor) -> None:
        """Make a step on int64 [sequences, context + 1]."""
        if self._rank:
            self._schedule.step(target=text[:, 1:].contiguous(), losses=[])
        else:
            self._schedule.step(text[:, :-1].contiguous())
        self._optimizer.step()
        self._optimizer.zero_grad()
