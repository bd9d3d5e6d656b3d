"""hivemind 1.1.12: `hivemind.Optimizer` with 8-bit compression and delayed updates."""

import json
import os
import time

from field_job import POLL_SECONDS, FieldJob, StepRecorder
from field_model import SEQUENCES, FieldGPT, create_adamw, flatten

MATCHMAKING_SECONDS = 3.0
AVERAGING_SECONDS = 1800.0  # a scaled line is slow; a lower limit would only end averaging
STATE_EVERY = 10  # epochs between two averagings of parameters and moments
FIRST_ADDRESSES = "addresses.json"


def run_worker(job: FieldJob) -> None:
    """Train one worker's part."""
    # The benchmark installs this system into an environment of its own.
    import hivemind  # pyright: ignore[reportMissingImports]

    os.environ["HOME"] = str(job.out_folder)
    first = job.out_folder / FIRST_ADDRESSES
    while job.rank and not first.exists():
        time.sleep(POLL_SECONDS)
    dht = hivemind.DHT(
        host_maddrs=[f"/ip4/{job.hosts[job.rank]}/tcp/{job.port}"],
        initial_peers=json.loads(first.read_text()) if job.rank else None,
        start=True,
        use_relay=False,
        use_auto_relay=False,
    )
    if not job.rank:
        partly = first.with_suffix(".part")
        partly.write_text(json.dumps([str(address) for address in dht.get_visible_maddrs()]))
        partly.replace(first)
    model = FieldGPT()
    compression = hivemind.compression.Uniform8BitQuantization()
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="field",
        target_batch_size=job.world * SEQUENCES,
        batch_size_per_step=SEQUENCES,
        optimizer=create_adamw,
        params=model.parameters(),
        matchmaking_time=MATCHMAKING_SECONDS,
        averaging_timeout=AVERAGING_SECONDS,
        offload_optimizer=True,
        delay_optimizer_step=True,
        delay_grad_averaging=True,
        grad_compression=compression,
        state_averaging_compression=compression,
        average_state_every=STATE_EVERY,
    )
    text = job.batches()
    recorder = StepRecorder(job)
    recorder.wait_for_go()
    for _ in recorder.steps_left():
        model(next(text)).backward()
        optimizer.step()
        optimizer.zero_grad()
        recorder.record_figures(epochs=optimizer.local_epoch)
        if recorder.is_snapshot_due():
            recorder.record_weights(flatten(model))
    os._exit(0)  # its background processes wait for averaging rounds that will never come
