"""Ours as `updates`: machines train rounds and exchange compressed updates."""

import time
from collections.abc import Callable
from typing import Any

import torch
from field_job import FieldJob
from field_model import UNIT
from torch import Tensor

from systems.our_worker import RecordedWorker, build_recipe, run_recorded_worker

FIGURE_SECONDS = 2.0  # between two records of figures, which take time of the training loop


class UpdatesWorker(RecordedWorker):
    """A recorded worker that also measures for how long it computes and what it sends."""

    computing_seconds = 0.0
    went_at = 0.0
    sent_before = 0  # bytes, before the lines were shaped
    figures_at = 0.0

    def train(self) -> None:
        """Wait until all are connected and the lines are shaped; then train."""
        while len(self.exchange.stats.neighbours) < self.job.world - 1:
            self.run_between_steps()
            time.sleep(0.05)
        self.wait_for_go()
        self._time_steps()
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

    def record_step(self) -> None:
        """Record a step, and now and then the figures."""
        super().record_step()
        if time.monotonic() > self.figures_at + FIGURE_SECONDS:
            self.figures_at = time.monotonic()
            stats = self.exchange.stats
            self.recorder.record_figures(
                updates_sent=stats.updates_sent,
                updates_received=stats.updates_received,
                computing=self.computing_seconds / (self.figures_at - self.went_at),
                sent_rate=(stats.bytes_sent - self.sent_before) / (self.figures_at - self.went_at),
            )

    def read_weights(self) -> Tensor:
        """Return the anchor's weights, float32 [all fragments' elements]."""
        parts = [self.anchor.fragments[i] for i in range(len(self.anchor.fragments))]
        return torch.cat([units.float() * UNIT for units in parts])


def run_worker(job: FieldJob) -> None:
    """Train one worker's part."""
    run_recorded_worker(job, UpdatesWorker, build_recipe(job))
