"""Count the files that are left after a machine has trained and was removed."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests"), str(ROOT / "worker"), str(ROOT / "benchmarks" / "shared")]

from helpers.worker.removal_drill import drill_removal  # noqa: E402  (tests)


def measure_removed_files_left() -> int:
    """Enrol, train and remove in a home folder of its own; return the files that are left."""
    return len(drill_removal().files_left)


if __name__ == "__main__":
    print(measure_removed_files_left())
