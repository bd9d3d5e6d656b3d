"""Install the external systems into an environment of the benchmark's own.

They are no dependencies of this project. The environment sees the project's packages too, so that
all systems run on the same torch.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements-field.txt")
CHECK = "import decent_dp.ddp, hivemind, torchft.local_sgd"


class InstallError(Exception):
    """A system cannot be installed; the message says why, in one sentence."""


def install_systems(folder: Path) -> str:
    """Install what is missing, and return the interpreter.

    Args:
        folder: of the environment, under build.

    Raises:
        InstallError: An external system cannot be installed.
    """
    python = folder / "bin" / "python"
    marker = folder / "installed.txt"
    wanted = REQUIREMENTS.read_text()
    if marker.exists() and marker.read_text() == wanted and _can_import(python):
        return str(python)
    print(f"installing {', '.join(wanted.split())} into {folder}", flush=True)
    _run(sys.executable, "-m", "venv", str(folder))
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "project.pth").write_text(sysconfig.get_path("purelib") + "\n")
    _run(str(python), "-m", "pip", "install", "--quiet", "-r", str(REQUIREMENTS))
    if not _can_import(python):
        raise InstallError("an external system was installed but cannot be imported here")
    marker.write_text(wanted)
    return str(python)


def _can_import(python: Path) -> bool:
    done = subprocess.run([str(python), "-c", CHECK], capture_output=True, check=False)
    return done.returncode == 0


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or [
            f"{command[0]} ended with {done.returncode}"
        ]
        raise InstallError(f"an external system cannot be installed: {lines[-1].strip()}")
