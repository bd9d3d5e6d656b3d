"""Ours as `decentralized-adam`: the worker that averages its weights with neighbours each step."""

from dataclasses import replace

from field_job import FieldJob
from field_model import sample_batch
from torch import Tensor

from barnraise.spec import DECENTRALIZED_ADAM
from barnraise.training.mixing_worker import MixingWorker
from systems.our_worker import RecordedWorker, build_recipe, run_recorded_worker

CONNECT_SECONDS = 60.0
NO_CLIP = 1e6  # a gradient's norm that none reaches, because decent-dp clips nothing


class FieldMixingWorker(RecordedWorker, MixingWorker):
    """A recorded worker that trains the batches which other systems train."""

    recorded_wait = 0.0  # seconds in which it has waited for neighbours in all recorded steps

    def adopt_weights(self) -> None:
        """Before the first step, wait until all are connected and the lines are shaped."""
        super().adopt_weights()
        if not self.has_begun:
            others = self.job.world - 1
            self.mesh.wait_for(lambda inbox: len(inbox.neighbours) == others, CONNECT_SECONDS)
            self.wait_for_go()

    def sample_micro_batches(self, step: int) -> list[Tensor]:
        """Return the token ids of a step, int64 [sequences, context + 1] for each micro-batch."""
        job = self.job
        batch = sample_batch(job.folder_path, job.rank, step, job.sequences)
        return list(batch.split(self.plan.sequences))

    def record_step(self) -> None:
        """Record a step and its wait; after the job's last one, record figures."""
        counts = self.mixing.counts
        self.recorder.add_waiting(counts.waited_seconds - self.recorded_wait)
        self.recorded_wait = counts.waited_seconds
        super().record_step()
        if self.leaving.is_set():
            self.recorder.wait_for_all()
            self.recorder.record_figures(
                messages=counts.messages,
                missed=counts.missed,
                waited_seconds=counts.waited_seconds,
                updates_sent=self.exchange.stats.updates_sent,
            )

    def read_weights(self) -> Tensor:
        """Return this machine's own weights, float32 [all fragments' elements]."""
        return self.engine.read_replica()


def run_worker(job: FieldJob) -> None:
    """Train one worker's part."""
    recipe = replace(build_recipe(job), strategy=DECENTRALIZED_ADAM, clip=NO_CLIP)
    run_recorded_worker(job, FieldMixingWorker, recipe)
