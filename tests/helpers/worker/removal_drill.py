"""Enrol, train and remove in a home folder of its own, and list the files that are left."""

import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from helpers.paths import WORKER
from helpers.worker.training_site import TrainingSite

from barnraise.state_dir import StateDir

PATIENCE_SECONDS = 300.0  # other programs may use the machine


@dataclass(frozen=True)
class Removal:
    """What the drill has seen.

    Attributes:
        files_left: in the home folder and the folder for temporary files.
        was_revoked: whether the machine has revoked itself on the site.
        output: of `barnraise remove`.
    """

    files_left: list[str]
    was_revoked: bool
    output: str


def drill_removal() -> Removal:
    """Train with a home folder that nothing else uses, and remove everything."""
    with tempfile.TemporaryDirectory(prefix="barnraise-drill-") as folder:
        person_home, temporary = Path(folder) / "home", Path(folder) / "tmp"
        temporary.mkdir()
        environment = {
            **os.environ,
            "HOME": str(person_home),
            "TMPDIR": str(temporary),
            "PYTHONPATH": str(WORKER),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        for name in ("BARNRAISE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
            environment.pop(name, None)
        state_dir = StateDir(person_home / StateDir.DEFAULT_NAME)
        with closing(TrainingSite(state_dir)) as site:
            _train(site, environment)
            removed = _run(environment, "remove", "--yes")
            files = [path for path in Path(folder).rglob("*") if not path.is_dir()]
            names = sorted(str(path.relative_to(folder)) for path in files)
            return Removal(names, site.is_revoked, removed)


def _train(site: TrainingSite, environment: dict[str, str]) -> None:
    """Train until the site has a report of it, and stop."""
    command = [sys.executable, "-m", "barnraise", "join", "one", "--threads", "1", "--eager"]
    worker = subprocess.Popen(command, env=environment, stdout=-3, stderr=-3)
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not site.is_training("one"):
            assert worker.poll() is None and time.monotonic() < deadline, "it does not train"
            time.sleep(0.2)
        _run(environment, "stop")
        assert worker.wait(60) == 0
    finally:
        worker.kill()
        worker.wait()


def _run(environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "-m", "barnraise", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
