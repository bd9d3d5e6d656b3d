"""How soon a killed service trains again, and how many files are left of a removed machine."""

import sys
from pathlib import Path
from typing import Any

from worker_lab import WorkerLab

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from helpers.worker.removal_drill import drill_removal
from helpers.worker.service_drill import can_run_services, drill_service


def measure(lab: WorkerLab) -> dict[str, Any]:
    """Measure removed_files_left, and service_returned_s where a user's systemd can be had."""
    results: dict[str, Any] = {"removed_files_left": len(drill_removal().files_left)}
    if can_run_services():
        results["service_returned_s"] = round(drill_service().returned_seconds, 1)
    return results
