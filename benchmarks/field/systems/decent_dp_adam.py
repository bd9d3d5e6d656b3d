"""decent-dp 0.2.3, the authors' decentralised Adam, over gloo and the exponential topology."""

import time
from typing import Any

import torch.distributed as dist
from field_job import FieldJob, StepRecorder
from field_model import FieldGPT, create_adamw, flatten


def run_worker(job: FieldJob) -> None:
    """Train one worker's part."""
    # The benchmark installs this system into an environment of its own.
    from decent_dp.ddp import DecentralizedDataParallel  # pyright: ignore[reportMissingImports]

    job.set_up_gloo()
    dist.init_process_group("gloo")
    model = FieldGPT()
    parallel = DecentralizedDataParallel(
        model,
        lambda named: create_adamw([parameter for _, parameter in named]),
        topology=job.options.get("topology", "one-peer-exp"),
    )
    recorder = StepRecorder(job)
    text = job.batches()
    dist.barrier()
    if not job.options.get("from_first_step"):
        for _ in range(3):  # connects all pairs
            parallel(next(text)).backward()
    messages = watch_all_reduces(recorder)
    recorder.wait_for_go()
    for _ in recorder.steps_left():
        parallel(next(text)).backward()
        if recorder.is_snapshot_due():
            recorder.record_weights(flatten(model))
    recorder.record_figures(final=flatten(model).double().norm().item(), messages=len(messages))
    dist.barrier()
    dist.destroy_process_group()


class TimedWork:
    """A collective under way, whose waits are recorded."""

    def __init__(self, work: Any, recorder: StepRecorder) -> None:
        """Wrap what an asynchronous collective returned."""
        self._work = work
        self._recorder = recorder

    def wait(self) -> None:
        """Wait until it has ended."""
        started = time.monotonic()
        self._work.wait()
        self._recorder.add_waiting(time.monotonic() - started)


def watch_all_reduces(recorder: StepRecorder) -> list[None]:
    """Count and time the messages: decent-dp sends a bucket by an all-reduce of two.

    Args:
        recorder: receives the seconds for which the training loop waits.

    Returns:
        A list that grows by one item with each message.
    """
    sent: list[None] = []
    all_reduce = dist.all_reduce

    def count_and_reduce(*arguments: Any, **options: Any) -> Any:
        sent.append(None)
        work = all_reduce(*arguments, **options)
        return TimedWork(work, recorder) if options.get("async_op") else work

    dist.all_reduce = count_and_reduce
    return sent
