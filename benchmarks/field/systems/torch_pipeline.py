"""A pipeline of one stage a worker: `torch.distributed.pipelining` over gloo.

Boundaries carry 16 or 8 bits a value. The 8-bit form is float8, whose training is not judged here:
only its time counts.
"""

import torch
import torch.distributed as dist
from field_job import FieldJob, StepRecorder
from field_model import (
    MICROBATCH_SEQUENCES,
    MICROBATCHES,
    MODEL,
    FieldGPT,
    batches,
    create_adamw,
    cross_entropy,
)
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
BOUNDARIES = {16: torch.bfloat16, 8: torch.float8_e4m3fn}


class Stage(nn.Module):
    """One stage, whose inputs and outputs have the boundary's type."""

    def __init__(
        self, part: FieldGPT, boundary: torch.dtype, is_first: bool, is_last: bool
    ) -> None:
        """Wrap a part of the model."""
        super().__init__()
        self.part = part
        self.boundary = boundary
        self.is_first, self.is_last = is_first, is_last

    def forward(self, x: Tensor) -> Tensor:
        """Transform tokens or hidden states."""
        result = self.part.transform(x if self.is_first else x.float())
        return result if self.is_last else result.to(self.boundary)


def run_worker(job: FieldJob) -> None:
    """Train one worker's stage."""
    job.set_up_gloo()
    dist.init_process_group("gloo")
    blocks = MODEL.layers // job.world
    is_first, is_last = job.rank == 0, job.rank == job.world - 1
    begin = 0 if is_first else 1 + job.rank * blocks
    end = MODEL.layers + 2 if is_last else 1 + (job.rank + 1) * blocks
    boundary = BOUNDARIES[job.options["bits"]]
    module = Stage(FieldGPT(range(begin, end)), boundary, is_first, is_last)
    optimizer = create_adamw(module.parameters())
    microbatches = job.options.get("microbatches", MICROBATCHES)
    sequences = job.options.get("sequences", MICROBATCH_SEQUENCES)  # of a microbatch
    tokens = torch.zeros(sequences, MODEL.context, dtype=torch.int64)
    hidden = torch.zeros(*tokens.shape, MODEL.width, dtype=boundary, requires_grad=True)
    logits = torch.zeros(*tokens.shape, MODEL.vocabulary, requires_grad=True)
    stage = PipelineStage(
        module,
        job.rank,
        job.world,
        torch.device("cpu"),
        input_args=(tokens if is_first else hidden,),
        output_args=(logits if is_last else hidden,),
    )
    schedule = SCHEDULES[job.options["schedule"]](stage, microbatches, loss_fn=cross_entropy)
    text = batches(job.folder_path, 0, microbatches * sequences)

    def make_step() -> None:
        batch = next(text)
        if is_first:
            schedule.step(batch[:, :-1].contiguous())
        elif is_last:
            schedule.step(target=batch[:, 1:].contiguous(), losses=[])
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()

    make_step()  # connects the stages
    recorder = StepRecorder(job, microbatches * tokens.numel() if is_first else 0)
    dist.barrier()
    recorder.wait_for_go()
    for _ in recorder.steps_left():
        make_step()
    dist.barrier()
    dist.destroy_process_group()
