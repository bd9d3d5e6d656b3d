"""Run one tier of tests and print the seconds of each suite.

Usage: `python tests/helpers/run_suites.py TIER`. TIER is one of `fast` (unit and contract tests),
`default` (everything but `slow`) and `all`. The static checks run side by side, then all Python
tests share the processor's cores.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = sys.executable
BIN = Path(PYTHON).parent
CHECKS = {
    "lint": [str(BIN / "ruff"), "check", "--quiet", "."],
    "format": [str(BIN / "ruff"), "format", "--quiet", "--check", "."],
    "types": [str(BIN / "basedpyright"), "--level", "error"],
    "frontend": [PYTHON, "frontend/build.py", "--test"],
}
MARKERS = {"fast": "not slow and not integration", "default": "not slow", "all": ""}
# More processes than cores: tests of servers and swarms spend most of their time waiting.
PROCESSES_PER_CORE = 2


def run_checks() -> dict[str, tuple[float, int]]:
    """Run all static checks at once; return each one's seconds and exit code."""
    started = time.monotonic()
    running = {
        name: subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for name, command in CHECKS.items()
    }
    results = {}
    for name, process in running.items():
        output, _ = process.communicate()
        results[name] = (time.monotonic() - started, process.returncode)
        if process.returncode or name == "frontend":
            print(output, flush=True)
    return results


def run_python_tests(tier: str, rest: list[str]) -> tuple[float, int]:
    """Run the tier's Python tests on all cores; return the seconds and pytest's exit code.

    Property tests try the same cases each time here; plain pytest tries others each time.
    """
    processes = str(PROCESSES_PER_CORE * (os.cpu_count() or 1))
    command = [PYTHON, "-m", "pytest", "-q", "--hypothesis-profile=ci"]
    command += ["-n", processes, "--dist", "loadgroup", "-m", MARKERS[tier], *rest]
    environment = {**os.environ, "BARNRAISE_TESTS": tier}
    started = time.monotonic()
    process = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    return time.monotonic() - started, process.returncode


def main() -> int:
    """Run the checks and the tests; return 1 when any of them failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tier", choices=MARKERS)
    parser.add_argument("rest", nargs="*", help="further arguments of pytest")
    arguments = parser.parse_args()
    started = time.monotonic()
    results = run_checks()
    results["python tests"] = run_python_tests(arguments.tier, arguments.rest)
    print(f"\n{'suite':14} {'seconds':>8}")
    for name, (seconds, code) in results.items():
        print(f"{name:14} {seconds:8.1f} {'' if code == 0 else 'FAILED'}")
    print(f"{'all':14} {time.monotonic() - started:8.1f}", flush=True)
    return int(any(code for _, code in results.values()))


if __name__ == "__main__":
    sys.exit(main())
