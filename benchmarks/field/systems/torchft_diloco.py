"""torchft 0.2.0: synchronous DiLoCo, or LocalSGD, over gloo with its own lighthouse."""

from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from field_job import FieldJob, StepRecorder
from field_model import FieldGPT, create_adamw, flatten

OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9  # those of the DiLoCo paper
PATIENCE = timedelta(hours=1)  # a scaled line is slow; a lower limit would only end rounds
HEARTBEAT = timedelta(seconds=10)
HEARTBEATS_MISSED = 6


def run_worker(job: FieldJob) -> None:
    """Train one worker's part."""
    # torch documents TCPStore under this name, and the benchmark installs torchft into an
    # environment of its own.
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
    from torchft.coordination import LighthouseServer  # pyright: ignore[reportMissingImports]
    from torchft.manager import Manager  # pyright: ignore[reportMissingImports]
    from torchft.process_group import ProcessGroupGloo  # pyright: ignore[reportMissingImports]

    job.set_up_gloo()
    host = job.hosts[job.rank]
    lighthouse = None
    if job.rank == 0:
        lighthouse = LighthouseServer(
            bind=f"{host}:{job.port}",
            min_replicas=job.world,
            join_timeout_ms=60_000,
            heartbeat_timeout_ms=round(1000 * HEARTBEATS_MISSED * HEARTBEAT.total_seconds()),
        )
    store = TCPStore(host, job.port + 1, is_master=True, wait_for_workers=False)
    model = FieldGPT()
    inner = create_adamw(model.parameters())
    manager = Manager(
        pg=ProcessGroupGloo(timeout=PATIENCE),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=job.world,
        use_async_quorum=False,
        timeout=PATIENCE,
        quorum_timeout=PATIENCE,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=job.port + 1,
        lighthouse_addr=f"http://{job.hosts[0]}:{job.port}",
        replica_id=f"worker{job.rank}",
        port=job.port + 2,
        hostname=host,
        heartbeat_interval=HEARTBEAT,
        init_sync=False,
    )
    text = job.batches()
    recorder = StepRecorder(job)
    with _wrap(job, manager, model, inner):
        recorder.wait_for_go()
        for _ in recorder.steps_left():
            model(next(text)).backward()
            inner.step()
            inner.zero_grad()
            if recorder.is_snapshot_due():
                recorder.record_weights(flatten(model))
    manager.shutdown(wait=False)
    del lighthouse, store


def _wrap(
    job: FieldJob, manager: Any, model: FieldGPT, inner: torch.optim.Optimizer
) -> AbstractContextManager:
    # The benchmark installs torchft into an environment of its own.
    from torchft.local_sgd import DiLoCo, LocalSGD  # pyright: ignore[reportMissingImports]

    round_steps = job.options["round_steps"]
    if job.options.get("method") == "localsgd":
        return LocalSGD(manager, model, inner, round_steps)
    outer = torch.optim.SGD(
        model.parameters(), lr=OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True
    )
    return DiLoCo(manager, [model], inner, outer, round_steps, pin_memory=False)
