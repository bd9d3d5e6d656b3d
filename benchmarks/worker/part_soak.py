"""By how much the memory of a worker grows that trains for an hour."""

import time
from typing import Any

from worker_lab import TestedWorker, WorkerLab

# A worker returns its heap's holes every ten minutes. A line through two teeth of such a saw can
# rise by three quarters of a tooth an hour though nothing grows; through four, by a tenth of one.
SOAK_SECONDS = 3600.0
STEP_SECONDS = 2.0  # between two readings of the memory
PRINT_SECONDS = 300.0  # between two readings that are printed


def measure(lab: WorkerLab) -> dict[str, Any]:
    """Measure soak_rss_growth_mb_h.

    A quick run has no time for it: what grows in the first minutes is no leak.
    """
    if lab.is_quick:
        return {"soak_rss_growth_mb_h": None}
    worker = lab.start(lab.create_home("soaked"))
    worker.wait_until(lambda status: status.step >= 1, "the first step")
    growth = _measure_growth(worker, SOAK_SECONDS)
    worker.stop()
    return {"soak_rss_growth_mb_h": round(growth, 1)}


def _measure_growth(worker: TestedWorker, seconds: float) -> float:
    """Return by how many MB an hour the memory grows, after a first third that does not count."""
    points: list[tuple[float, float]] = []
    started = time.monotonic()
    next_print = 0.0
    while (past := time.monotonic() - started) < seconds:
        rss = worker.rss_mb
        if past >= next_print:
            next_print += PRINT_SECONDS
            step = worker.status.step if worker.status else 0
            print(f"after {past / 60:.0f} min and {step} steps: {rss:.1f} MB", flush=True)
        if past > seconds / 3:
            points.append((past / 3600, rss))
        time.sleep(STEP_SECONDS)
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
