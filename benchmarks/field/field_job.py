"""What one worker of the benchmark is told to do, and how it records what it did."""

import dataclasses
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from field_model import SEQUENCES, STEP_TOKENS, batches
from torch import Tensor

POLL_SECONDS = 0.02
END_SECONDS = 60.0  # for which a worker waits until the others have ended too


@dataclass(frozen=True)
class FieldJob:
    """One worker's part in one measurement.

    Attributes:
        system: the adapter's module in `systems`.
        folder: of the benchmark, with the text.
        out: of this measurement; holds what workers record.
        rank: this worker's number.
        hosts: addresses of all workers.
        port: free on all hosts; the next twenty are free too.
        steps: that each worker makes; 0: until it is ended.
        snapshot_steps: steps between two snapshots of the first worker's weights; 0: none.
        device: the network device of this worker's address.
        rest: seconds of rest after a step, in multiples of its duration.
        options: of the system.
    """

    system: str
    folder: str
    out: str
    rank: int
    hosts: tuple[str, ...]
    port: int
    steps: int = 0
    snapshot_steps: int = 0
    rest: float = 0.0
    device: str = "line"
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> "FieldJob":
        """Read a job."""
        raw = json.loads(path.read_text())
        return cls(**raw | {"hosts": tuple(raw["hosts"])})

    def to_json(self) -> str:
        """Return the job's text."""
        return json.dumps(dataclasses.asdict(self))

    @property
    def world(self) -> int:
        """Return the number of workers."""
        return len(self.hosts)

    @property
    def folder_path(self) -> Path:
        """Return the benchmark's folder."""
        return Path(self.folder)

    @property
    def out_folder(self) -> Path:
        """Return the folder of this measurement."""
        return Path(self.out)

    @property
    def sequences(self) -> int:
        """Return the sequences of this worker's steps."""
        return self.options.get("sequences", SEQUENCES)

    def batches(self) -> Iterator[Tensor]:
        """Yield the batches of this worker's steps."""
        return batches(self.folder_path, self.rank, self.sequences)

    def set_up_gloo(self) -> None:
        """Set the environment that torch.distributed reads."""
        os.environ |= {
            "MASTER_ADDR": self.hosts[0],
            "MASTER_PORT": str(self.port),
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": "1",
            "GLOO_SOCKET_IFNAME": self.device,
        }


class StepRecorder:
    """Record when steps ended, and what the weights were, without evaluating anything.

    A line of `steps.RANK` is [monotonic seconds, tokens so far, seconds of the step in which the
    worker waited for others]; all workers share the clock.
    """

    def __init__(self, job: FieldJob, step_tokens: int = STEP_TOKENS) -> None:
        """Record for a job whose steps train so many tokens."""
        self._job = job
        self._step_tokens = step_tokens
        self._steps_file = (job.out_folder / f"steps.{job.rank}").open("a")
        self._started = time.monotonic()
        self._waited_seconds = 0.0
        self._cpu_at_go = 0.0
        self._cpu_seconds = 0.0  # of all threads, from the begin to the last step
        self.steps = 0

    def wait_for_go(self) -> None:
        """Report that this worker is connected, and wait until the lines are shaped."""
        (self._job.out_folder / f"ready.{self._job.rank}").touch()
        while not (self._job.out_folder / "go").exists():
            time.sleep(POLL_SECONDS)
        self._cpu_at_go = time.process_time()
        self._started = time.monotonic()
        self._write(self._started)

    def wait_for_all(self) -> None:
        """Wait until all workers have made their steps, so that nobody misses a last message."""
        folder, count = self._job.out_folder, self._job.world
        (folder / f"done.{self._job.rank}").touch()
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline and len(list(folder.glob("done.*"))) < count:
            time.sleep(POLL_SECONDS)

    def steps_left(self) -> Iterator[int]:
        """Yield the numbers of the steps to make; record each one as it ends."""
        while not self._job.steps or self.steps < self._job.steps:
            yield self.steps
            self.record_step()

    def record_step(self) -> None:
        """Record that a step has ended, and rest as long as the job says."""
        now = time.monotonic()
        self.steps += 1
        if self._job.rest:
            time.sleep(self._job.rest * (now - self._started))
            now = time.monotonic()
        self._started = now
        self._cpu_seconds = time.process_time() - self._cpu_at_go
        self._write(now)

    def add_waiting(self, seconds: float) -> None:
        """Count seconds of the current step in which the worker waited for others' messages."""
        self._waited_seconds += seconds

    def _write(self, now: float) -> None:
        row = [now, self.steps * self._step_tokens, self._waited_seconds]
        self._steps_file.write(json.dumps(row) + "\n")
        self._steps_file.flush()
        self._waited_seconds = 0.0

    def is_snapshot_due(self) -> bool:
        """Return whether the first worker's weights should be recorded now."""
        every = self._job.snapshot_steps
        return bool(every) and self._job.rank == 0 and self.steps % every == 0

    def record_weights(self, flat: Tensor) -> None:
        """Store the weights, float32 [n], as they are now."""
        path = self._job.out_folder / f"weights.{self.steps:06d}"
        torch.save([time.monotonic(), flat.clone()], path)

    def record_figures(self, **figures: Any) -> None:
        """Store figures that only the worker knows, and the CPU seconds of its steps."""
        figures["cpu_seconds"] = self._cpu_seconds
        path = self._job.out_folder / f"figures.{self._job.rank}"
        unfinished = path.with_name(f"{path.name}.new")  # a worker may be killed while it writes
        unfinished.write_text(json.dumps(figures))
        unfinished.replace(path)
