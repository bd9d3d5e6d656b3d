"""Write the version that the newest tag states into the package, and build the package.

A commit tagged `v0.2.0` has version `0.2.0`, the fifth commit after it `0.2.0+5.g1a2b3c4`. In a
clone without tags, and in a copy without git, `barnraise/__init__.py` states the version. All else
about the package is in `pyproject.toml`.
"""

import subprocess
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent


def write_version() -> None:
    """Write `barnraise/version.txt` if this is a clone with tags, and remove it without tags.

    A copy without git stays as it is: it may have been made of a clone.
    """
    # Inside of another project's clone, the tags are not ours.
    if _run_git("rev-parse", "--show-prefix") != "worker/":
        return
    written = HERE / "barnraise" / "version.txt"
    described = _run_git("describe", "--tags", "--long", "--match", "v[0-9]*")
    if not described:
        written.unlink(missing_ok=True)
        return
    tag, distance, commit = described.rsplit("-", 2)
    version = tag.removeprefix("v")
    written.write_text(version if distance == "0" else f"{version}+{distance}.{commit}")


def _run_git(*arguments: str) -> str:
    """Return what git prints; "" if it fails, or is not installed."""
    command = ["git", *arguments]
    try:
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    write_version()
    setup()
