"""Measure how soon a killed service trains again, where this user has a systemd."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests"), str(ROOT / "worker"), str(ROOT / "benchmarks" / "shared")]

from helpers.worker.service_drill import drill_service, has_user_systemd  # noqa: E402  (tests)


def measure_service_return() -> float | None:
    """Install a service of this user, kill its worker, and remove the service.

    Returns:
        The seconds from the kill until another worker trains; None without a systemd of this user.
    """
    return round(drill_service().returned_seconds, 1) if has_user_systemd() else None


if __name__ == "__main__":
    print(measure_service_return())
