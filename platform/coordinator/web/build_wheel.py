"""Build the worker's wheel, which a site offers at /download/: `make wheel`.

Next to it lies `constraints.txt` with the tested versions of all that it brings. The same sources
give the same bytes, so that two sites of one version offer the same digest.
"""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
WORKER = ROOT / "worker"
TARGET = ROOT / "build" / "wheel"
EPOCH = "1577836800"  # the time of every file in the wheel: 1 January 2020
PIN = re.compile(r"^([\w.-]+)(?:\[[\w,]+\])?(==\S+)( ;.*?)?(?:\s+#.*)?$", re.M)


def main() -> int:
    """Build the wheel from a copy of the sources, and replace the one of an earlier version.

    The version is written before, so that this site and the wheel have the same.
    """
    runpy.run_path(str(WORKER / "setup.py"))["write_version"]()
    with tempfile.TemporaryDirectory() as scratch:
        sources = Path(scratch) / "worker"
        ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
        shutil.copytree(WORKER, sources, ignore=ignored)
        built = Path(scratch) / "built"
        options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation")
        command = (sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", built, sources)
        environment = {**os.environ, "SOURCE_DATE_EPOCH": EPOCH}
        if subprocess.run(command, env=environment, check=False).returncode:
            sys.exit("the worker's wheel could not be built")
        TARGET.mkdir(parents=True, exist_ok=True)
        (wheel,) = built.glob("*.whl")
        for old in TARGET.glob("*.whl"):
            if old.name != wheel.name:
                old.unlink()
        _publish(wheel.name, wheel.read_bytes())
    requirements = (ROOT / "requirements.txt").read_text()
    _publish("constraints.txt", format_constraints(requirements).encode())
    sys.stdout.write(f"{TARGET / wheel.name}\n")
    return 0


def _publish(name: str, content: bytes) -> None:
    """Write a file of the target whole, or not at all."""
    unfinished = TARGET / f"{name}.new"
    unfinished.write_bytes(content)
    unfinished.replace(TARGET / name)


def format_constraints(requirements: str) -> str:
    """Return the pins of a requirements file as pip and uv read constraints: without extras. Pure.

    Packages that the worker does not need are listed too; a constraint installs nothing.
    """
    pins = sorted(
        f"{name}{version}{marker or ''}\n" for name, version, marker in PIN.findall(requirements)
    )
    return "# The versions with which all tests pass.\n" + "".join(pins)


if __name__ == "__main__":
    sys.exit(main())
