"""Each worker trains alone, without any exchange: the calibration of this machine's arithmetic."""

from field_job import FieldJob, StepRecorder
from field_model import FieldGPT, create_adamw, flatten


def run_worker(job: FieldJob) -> None:
    """Train one worker's part."""
    model = FieldGPT()
    optimizer = create_adamw(model.parameters())
    text = job.batches()
    model(next(text)).backward()
    recorder = StepRecorder(job)
    recorder.wait_for_go()
    for _ in recorder.steps_left():
        model(next(text)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if recorder.is_snapshot_due():
            recorder.record_weights(flatten(model))
