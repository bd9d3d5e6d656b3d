"""Ours as `updates`: the real worker over iroh, with ledger, signatures and disk, and no site."""

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from drill_worker import MACHINE, MIRROR, RUN, Setup, build_joined_run
from field_job import FieldJob, StepRecorder
from field_model import LEARNING_RATE, MODEL, SEED, SEQUENCES, STEP_TOKENS, UNIT, WEIGHT_DECAY

from barnraise.peering.transports.iroh_transport import IrohTransport
from barnraise.planning.limits import Limits
from barnraise.protocol.messages import Signed
from barnraise.protocol.signing import digest
from barnraise.spec import Recipe, RunSpec, TextSpec
from barnraise.state_dir import RunDir, StateDir
from barnraise.training.train import Worker

NEVER = 10**15
FIGURE_SECONDS = 2.0  # between two records of figures, which take time of the training loop


class FieldWorker(Worker):
    """A worker that records its steps, and waits for the benchmark before the first one."""

    job: FieldJob
    recorder: StepRecorder
    was_ready = False
    computing_seconds = 0.0
    went_at = 0.0
    sent_before = 0  # bytes, before the lines were shaped
    figures_at = 0.0

    def train(self) -> None:
        """Wait until all are connected and the lines are shaped; then train."""
        while len(self.exchange.stats.neighbours) < self.job.world - 1:
            self.run_between_steps()
            time.sleep(0.05)
        if not self.was_ready:
            self.recorder.wait_for_go()
            self.was_ready = True
            self._time_steps()
        if uplink := self.job.options.get("uplink"):
            self.exchange.set_uplink_limit(round(uplink))
        super().train()

    def _time_steps(self) -> None:
        """Measure the time that the loop spends in steps: reading batches, and the arithmetic."""
        self.went_at = time.monotonic()
        self.sent_before = self.exchange.stats.bytes_sent
        self.sample_micro_batches = self._time_calls(self.sample_micro_batches)
        self.engine.step = self._time_calls(self.engine.step)

    def _time_calls(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed_function(*arguments: Any, **options: Any) -> Any:
            started = time.monotonic()
            result = function(*arguments, **options)
            self.computing_seconds += time.monotonic() - started
            return result

        return timed_function

    def run_between_steps(self) -> None:
        """Record a step that has just ended."""
        super().run_between_steps()
        if not self.was_ready or self.metrics.step == self.recorder.steps:
            return
        self.recorder.record_step()
        if self.recorder.is_snapshot_due():
            parts = [self.anchor.fragments[i] for i in range(len(self.anchor.fragments))]
            self.recorder.record_weights(torch.cat([units.float() * UNIT for units in parts]))
        if time.monotonic() > self.figures_at + FIGURE_SECONDS:
            self.figures_at = time.monotonic()
            stats = self.exchange.stats
            self.recorder.record_figures(
                updates_sent=stats.updates_sent,
                updates_received=stats.updates_received,
                computing=self.computing_seconds / (self.figures_at - self.went_at),
                sent_rate=(stats.bytes_sent - self.sent_before) / (self.figures_at - self.went_at),
            )
        if self.job.steps and self.recorder.steps >= self.job.steps:
            self.leaving.set()

    def evaluate_if_due(self, at_once: bool = False) -> None:
        """Evaluate nothing: snapshots are evaluated after the measurement."""


def run_worker(job: FieldJob) -> None:
    """Train one worker's part."""
    home = job.out_folder / f"machine.{job.rank}"
    keys = [
        StateDir(job.out_folder / f"machine.{rank}").identity.key
        if rank == job.rank or (job.out_folder / f"machine.{rank}").exists()
        else ""
        for rank in range(job.world)
    ]
    assert all(keys), "the benchmark makes the machines' folders first"
    state_dir = StateDir(home)
    logging.basicConfig(filename=home / "log", level=logging.INFO, force=True)
    spec, manifest = (job.folder_path / name for name in ("spec.json", "signed_manifest.json"))
    recipe_spec = RunSpec.from_json(spec.read_text())
    setup = Setup(
        state_folder=state_dir.path,
        spec=recipe_spec.to_json(),
        manifest=manifest.read_text(),
        port=job.port,
        first_peers=tuple(
            (key, f"{host}:{job.port}")
            for rank, (key, host) in enumerate(zip(keys, job.hosts, strict=True))
            if rank != job.rank
        ),
    )
    transport = IrohTransport(
        state_dir.identity.secret, host=job.hosts[job.rank], port=job.port, dial_timeout=20.0
    )
    worker = FieldWorker(
        build_joined_run(setup, state_dir),
        threading.Event(),
        MACHINE,
        Limits(),
        transport=transport,
    )
    worker.job = job
    worker.recorder = StepRecorder(job, STEP_TOKENS)
    worker.run()


def prepare_machines(out: Path, text: Path, world: int) -> None:
    """Create the folders of a measurement's machines, each with a key and the whole text."""
    for rank in range(world):
        state_dir = StateDir(out / f"machine.{rank}")
        folder = state_dir.path / "runs" / RUN
        RunDir(folder, RUN, state_dir.identity.key).close()
        shutil.copytree(text, folder / "blobs", copy_function=os.link, dirs_exist_ok=True)


def build_spec(manifest: Signed, codec: str) -> RunSpec:
    """Return the run that the machines train."""
    recipe = Recipe(
        token_budget=NEVER,
        learning_rate=LEARNING_RATE,
        schedule="constant",
        warmup_tokens=0,
        weight_decay=WEIGHT_DECAY,
        step_sequences=SEQUENCES,
        codec=codec,
        evaluate_every=NEVER,
    )
    return RunSpec(
        MODEL,
        TextSpec(tokenizer="bytes"),
        recipe,
        seed=SEED,
        owner=MIRROR.key,
        roots=(MIRROR.key,),
        manifest=digest(manifest.body),
    )
