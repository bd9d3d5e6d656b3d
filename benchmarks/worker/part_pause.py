"""What a pause gives back, how soon, and that the run goes on with the same bits."""

import time
from typing import Any

from worker_lab import WorkerLab, saved_digest

from barnraise.protocol.enums import Activity

ROUND_STEPS, ROUNDS = 24, 3
PAUSED_AT = 30  # steps: in the second round, also where the status is a second late
FREED_SECONDS = 10.0  # within which a long pause gives the memory back


def measure(lab: WorkerLab) -> dict[str, Any]:
    """Measure pause_s, rss_paused_mb, idle_cpu_paused and resume_same_bits."""
    return _measure_pause(lab) | {"resume_same_bits": _resumes_with_the_same_bits(lab)}


def _measure_pause(lab: WorkerLab) -> dict[str, Any]:
    worker = lab.start(lab.create_home("paused"))
    worker.wait_for_steps(10)
    before = worker.rss_mb
    worker.control.pause()
    pause_seconds = worker.wait_until(
        lambda status: status.activity is Activity.PAUSED, "the pause"
    )
    lab.wait(FREED_SECONDS - pause_seconds)
    rss = worker.rss_mb
    used = worker.cpu_seconds
    seconds = 20.0 if lab.is_quick else 120.0
    time.sleep(seconds)
    idle_share = (worker.cpu_seconds - used) / seconds
    worker.control.resume()
    resumed_seconds = worker.wait_for_steps(1)
    worker.stop()
    return {
        "pause_s": round(pause_seconds, 2),
        "rss_training_mb": round(before),
        "rss_paused_mb": round(rss),
        "idle_cpu_paused": round(idle_share, 4),
        "resume_s": round(resumed_seconds, 2),
    }


def _resumes_with_the_same_bits(lab: WorkerLab) -> bool:
    """Return whether a run that pauses long, and one that does not, end with one digest."""
    home = lab.create_home("undisturbed")
    undisturbed = lab.start(home, ROUND_STEPS * ROUNDS, ROUND_STEPS)
    undisturbed.wait_for_end()
    again = lab.create_home("disturbed", key_of=home.path)
    disturbed = lab.start(again, ROUND_STEPS * ROUNDS, ROUND_STEPS)
    disturbed.wait_until(lambda status: status.step >= PAUSED_AT, "the middle of a round")
    disturbed.control.pause()
    disturbed.wait_until(lambda status: status.activity is Activity.PAUSED, "the pause")
    saved = disturbed.folder / "paused_round" / "a" / "manifest.json"
    lab.children.wait_until(saved.exists, "the memory given back", 2 * FREED_SECONDS)
    time.sleep(2.0)
    disturbed.control.resume()
    disturbed.wait_for_end()
    return saved_digest(disturbed) == saved_digest(undisturbed)
