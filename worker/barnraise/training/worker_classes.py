"""Find the worker that trains a run's strategy."""

from barnraise.spec import DECENTRALIZED_ADAM, RunSpec
from barnraise.training.mixing_worker import MixingWorker
from barnraise.training.train import Worker

STEP_WORKERS: dict[str, type[Worker]] = {
    DECENTRALIZED_ADAM: MixingWorker,
}


def find_worker_class(spec: RunSpec) -> type[Worker]:
    """Return the worker that trains a spec's strategy."""
    return STEP_WORKERS.get(spec.recipe.strategy, Worker)
