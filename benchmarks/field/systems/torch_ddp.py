"""Synchronous data parallelism: torch's DistributedDataParallel over gloo."""

import torch.distributed as dist
from field_job import FieldJob, StepRecorder
from field_model import FieldGPT, create_adamw, flatten
from torch.nn.parallel import DistributedDataParallel


def run_worker(job: FieldJob) -> None:
    """Train one worker's part."""
    job.set_up_gloo()
    dist.init_process_group("gloo")
    model = FieldGPT()
    parallel = DistributedDataParallel(model)
    optimizer = create_adamw(model.parameters())
    text = job.batches()
    # The first two steps connect everybody and rebuild the buckets, before lines are shaped.
    for _ in range(2):
        parallel(next(text)).backward()
        optimizer.zero_grad()
    recorder = StepRecorder(job)
    dist.barrier()
    recorder.wait_for_go()
    for _ in recorder.steps_left():
        parallel(next(text)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if recorder.is_snapshot_due():
            recorder.record_weights(flatten(model))
    dist.destroy_process_group()
