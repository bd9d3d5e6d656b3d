"""Folders of the repository that tests and their child processes need."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
WORKER = ROOT / "worker"
GOLDEN = TESTS / "contract" / "golden"
