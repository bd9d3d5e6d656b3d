"""Our worker in a measurement: over iroh, with ledger, signatures and disk, and without a site."""

import logging
import os
import shutil
import threading
from pathlib import Path

from example_hardware import ONE_CORE_MACHINE
from field_job import FieldJob, StepRecorder
from field_model import LEARNING_RATE, MODEL, SEED, WEIGHT_DECAY
from joined_run import MIRROR, RUN, Setup, build_joined_run
from torch import Tensor

from barnraise.peering.transports.iroh_transport import IrohTransport
from barnraise.planning.limits import Limits
from barnraise.protocol.messages import Signed
from barnraise.protocol.signing import Identity, digest
from barnraise.spec import Recipe, RunSpec, TextSpec
from barnraise.state_dir import RunDir, StateDir
from barnraise.training.train import Worker

NEVER = 10**15


class RecordedWorker(Worker):
    """A worker that records its steps, and waits for the benchmark before the first one.

    Attributes:
        job: this worker's part in the measurement.
        recorder: writes the steps.
        has_begun: whether the benchmark has shaped the lines.
    """

    job: FieldJob
    recorder: StepRecorder
    has_begun = False
    _recorded_step = 0

    def wait_for_go(self) -> None:
        """Report that this worker is connected, and wait until the lines are shaped."""
        self.recorder.wait_for_go()
        self._recorded_step = self.metrics.step
        self.has_begun = True
        if uplink := self.job.options.get("uplink"):
            self.exchange.set_uplink_limit(round(uplink))

    def run_between_steps(self) -> None:
        """Record a step that has just ended."""
        super().run_between_steps()
        if self.has_begun and self.metrics.step != self._recorded_step:
            self._recorded_step = self.metrics.step
            self.record_step()

    def record_step(self) -> None:
        """Record a step, and the weights if they are due; leave after the job's last step."""
        if self.recorder.is_snapshot_due():
            self.recorder.record_weights(self.read_weights())
        self.recorder.record_step()
        if self.job.steps and self.recorder.steps >= self.job.steps:
            self.leaving.set()

    def read_weights(self) -> Tensor:
        """Return the weights that are evaluated, float32 [all fragments' elements]."""
        raise NotImplementedError

    def evaluate_if_due(self, at_once: bool = False) -> None:
        """Evaluate nothing: snapshots are evaluated after the measurement."""


def run_recorded_worker(job: FieldJob, worker_class: type[RecordedWorker], recipe: Recipe) -> None:
    """Train one worker's part.

    Args:
        job: the worker's part in the measurement.
        worker_class: of the worker.
        recipe: by which all workers train.
    """
    secrets = _machine_secrets(job.world)
    state_dir = _create_machine(job, secrets[job.rank])
    logging.basicConfig(filename=state_dir.path / "log", level=logging.INFO, force=True)
    manifest = (job.folder_path / "signed_manifest.json").read_text()
    setup = Setup(
        state_folder=state_dir.path,
        spec=_build_spec(Signed.model_validate_json(manifest), recipe).to_json(),
        manifest=manifest,
        port=job.port,
        first_peers=tuple(
            (Identity(secret).key, f"{host}:{job.port}")
            for secret, host in zip(secrets, job.hosts, strict=True)
            if secret != secrets[job.rank]
        ),
    )
    transport = IrohTransport(
        state_dir.identity.secret, host=job.hosts[job.rank], port=job.port, dial_timeout=20.0
    )
    worker = worker_class(
        build_joined_run(setup, state_dir),
        threading.Event(),
        ONE_CORE_MACHINE,
        Limits(),
        transport=transport,
    )
    worker.job = job
    worker.recorder = StepRecorder(job)
    worker.run()


def _machine_secrets(world: int) -> list[bytes]:
    """Return the workers' secret keys, so that a worker's rank is its place in sorted keys."""
    return sorted(
        (bytes([rank + 1]) * 32 for rank in range(world)), key=lambda raw: Identity(raw).key
    )


def _create_machine(job: FieldJob, secret: bytes) -> StateDir:
    """Return the folder of this worker's machine, with the whole text.

    A worker that was killed and restarted finds its folder as it was.
    """
    path = job.out_folder / f"machine.{job.rank}"
    if not path.exists():
        path.mkdir()
        (path / "key").write_bytes(secret)
        folder = path / "runs" / RUN
        RunDir(folder, RUN, Identity(secret).key).close()
        text: Path = job.folder_path / "text"
        shutil.copytree(text, folder / "blobs", copy_function=os.link, dirs_exist_ok=True)
    return StateDir(path)


def build_recipe(job: FieldJob) -> Recipe:
    """Return the recipe by which machines exchange updates, whose codec follows their uplinks."""
    return Recipe(
        token_budget=NEVER,
        learning_rate=LEARNING_RATE,
        schedule="constant",
        warmup_tokens=0,
        weight_decay=WEIGHT_DECAY,
        step_sequences=job.sequences,
        codec="auto",
        evaluate_every=NEVER,
    )


def _build_spec(manifest: Signed, recipe: Recipe) -> RunSpec:
    """Return the run that the machines train."""
    return RunSpec(
        MODEL,
        TextSpec(tokenizer="bytes"),
        recipe,
        seed=SEED,
        owner=MIRROR.key,
        roots=(MIRROR.key,),
        manifest=digest(manifest.body),
    )
