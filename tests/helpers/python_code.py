"""Run Python code in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from helpers.paths import ROOT, TESTS, WORKER


def run_python(
    code: str, *arguments: object, folders: Iterable[Path] = (), **options
) -> subprocess.CompletedProcess[str]:
    """Run code that imports from the worker, the site, the helpers and from more folders.

    It has a session of its own: `barnraise join` gives its session the priority of idle programs.
    """
    usual = {"env": _environment(folders), "capture_output": True, "text": True, "timeout": 300}
    usual["start_new_session"] = True
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], **usual | options)


def start_python(
    code: str, *arguments: object, folders: Iterable[Path] = (), **options
) -> subprocess.Popen[str]:
    """Start such code, whose output can be read."""
    usual = {"env": _environment(folders), "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], **usual | options)


def _environment(folders: Iterable[Path]) -> dict[str, str]:
    paths = [ROOT / "platform", WORKER, TESTS, *folders]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
