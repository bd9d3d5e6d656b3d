"""The code of another commit, unpacked next to this one, and how to run it."""

import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class ReleasedCode:
    """A copy of the repository at one commit.

    Attributes:
        root: The folder of the copy.
        name: The tag or commit, as it was asked for.
    """

    root: Path
    name: str

    @property
    def python_path(self) -> str:
        """The folders that PYTHONPATH must name, so that this code is imported and no other."""
        folders = ("platform", "worker", "tests", "benchmarks/shared")
        return os.pathsep.join(str(self.root / folder) for folder in folders)

    def manage(self, environment: Mapping[str, str], *command: str) -> str:
        """Run a management command of this code and return its output.

        Raises:
            RuntimeError: It failed; the text has the end of its errors.
        """
        done = subprocess.run(
            [sys.executable, str(self.root / "manage.py"), *command],
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": self.python_path, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{self.name}: {command[0]} failed: {done.stderr[-3000:]}")
        return done.stdout.strip()


def extract_code(commit: str, folder: Path) -> ReleasedCode:
    """Unpack the repository at a tag or commit into an empty folder.

    Raises:
        RuntimeError: This clone does not have the commit.
    """
    command = ["git", "archive", "--format=tar", commit]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"this clone does not have {commit}: run `git fetch --unshallow --tags` first"
        )
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return ReleasedCode(folder, commit)


FIRST_BASELINE = "6e36b13b"  # the first commit whose migrations are frozen


def newest_release() -> str:
    """Return the newest tag of a release; the first commit with frozen migrations without one."""
    command = ["git", "describe", "--tags", "--abbrev=0", "--match", "v[0-9]*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or FIRST_BASELINE
