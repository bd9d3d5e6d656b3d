"""Run the site's management commands in processes of their own."""

import os
import subprocess
import sys
from collections.abc import Mapping

from helpers.paths import ROOT

PATIENCE = 400  # seconds; other processes may use the machine that runs the tests


def manage(environment: Mapping[str, str], *command: str, fails: bool = False) -> str:
    """Run a management command and return its output.

    Args:
        environment: Variables that differ from this process's.
        command: Its name and arguments.
        fails: Whether it must fail; its errors are returned too.
    """
    done = subprocess.run(
        [sys.executable, ROOT / "manage.py", *command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return (done.stdout + (done.stderr if fails else "")).strip()
