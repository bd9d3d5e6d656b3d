"""Measure what a volunteer notices of a worker: `make bench-worker`; QUICK=1: five minutes.

Each file `part_*.py` in this folder measures some fields with real workers in processes of their
own, and prints them. The last line is one JSON object with all fields. Leave the machine alone
meanwhile: what other programs do is in every figure.
"""

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))

from worker_lab import WorkerLab

FOLDER = Path(__file__).resolve().parent

# Field → the largest value that is good enough, or the only one.
TARGETS: dict[str, Any] = {
    "pause_s": 2.0,
    "rss_paused_mb": 300,
    "resume_same_bits": True,
    "decision_s": 2.0,
    "idle_cpu_paused": 0.005,
    "foreground_loss": 0.05,
    "service_returned_s": 30,
    "removed_files_left": 0,
    "join_to_first_step_s": 10,
    "soak_rss_growth_mb_h": 5,
    "drill_nothing_lost": True,
    "drill_digests_equal": True,
}


def list_missed(results: dict[str, Any]) -> list[str]:
    """Return the fields that were measured and miss their targets."""
    return [
        name
        for name, target in TARGETS.items()
        if results.get(name) is not None
        and (results[name] is not True if target is True else results[name] > target)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all parts, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="five minutes; null for what takes an hour"
    )
    parser.add_argument("parts", nargs="*", help="names like pause; default: all")
    options = parser.parse_args(arguments)
    names = options.parts or sorted(path.stem[5:] for path in FOLDER.glob("part_*.py"))
    results: dict[str, Any] = {}
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="bench-worker-")))
        lab = WorkerLab(folder, options.quick, cleanup)
        for name in names:
            found = importlib.import_module(f"part_{name}").measure(lab)
            print(f"{name}: " + ", ".join(f"{field} {value}" for field, value in found.items()))
            results |= found
    missed = list_missed(results)
    print("missed: " + (", ".join(missed) or "nothing"))
    print(json.dumps(results))
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
