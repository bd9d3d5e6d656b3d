"""Find which tool installed this program, and the lines that update and uninstall it."""

import json
import shlex
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

PACKAGE = "barnraise"


@dataclass(frozen=True)
class Installation:
    """How this program was installed."""

    tool: str  # "uv tool", "pipx", "uv pip", "pip", or "clone" for the sources themselves
    python: str  # the interpreter of its environment
    torch_backend: str = ""  # the build of PyTorch there, as uv names it; "" for the usual one

    @property
    def uninstall_command(self) -> list[str]:
        """Return the command that uninstalls the program; [] for a clone."""
        return {
            "uv tool": ["uv", "tool", "uninstall", PACKAGE],
            "pipx": ["pipx", "uninstall", PACKAGE],
            "uv pip": ["uv", "pip", "uninstall", "--python", self.python, PACKAGE],
            "pip": [self.python, "-m", "pip", "uninstall", PACKAGE],
        }.get(self.tool, [])

    def build_update_command(self, wheel: str, constraints: Path | None) -> list[str]:
        """Return the command that installs a wheel in place of this version; [] for a clone.

        It keeps the build of PyTorch: another one may not know the machine's graphics card.

        Args:
            wheel: its address, with the digest.
            constraints: a file with the tested versions of what the wheel brings, if there is one.
        """
        backend = [f"--torch-backend={self.torch_backend}"] if self.torch_backend else []
        tested = ["--constraint", str(constraints)] if constraints else []
        return {
            "uv tool": ["uv", "tool", "install", *backend, *tested, wheel],
            "pipx": ["pipx", "runpip", PACKAGE, "install", "--upgrade", *tested, wheel],
            "uv pip": ["uv", "pip", "install", "--python", self.python, *backend, *tested, wheel],
            "pip": [self.python, "-m", "pip", "install", "--upgrade", *tested, wheel],
        }.get(self.tool, [])


def join_command(command: list[str]) -> str:
    """Return a command as a person types it into this system's shell."""
    return subprocess.list2cmdline(command) if sys.platform == "win32" else shlex.join(command)


def find_installation() -> Installation:
    """Find how this program was installed, by what its tool has left in its environment."""
    try:
        distribution = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        return Installation("clone", sys.executable)
    installer = (distribution.read_text("INSTALLER") or "").strip()
    origin = distribution.read_text("direct_url.json") or "{}"
    tool = choose_tool(installer, origin, [path.name for path in Path(sys.prefix).iterdir()])
    return Installation(tool, sys.executable, metadata.version("torch").partition("+")[2])


def choose_tool(installer: str, origin: str, files: Collection[str]) -> str:
    """Return the tool that installed the program. Pure.

    Args:
        installer: the file INSTALLER of the package's metadata.
        origin: its file direct_url.json.
        files: the names in the folder of the environment.
    """
    if json.loads(origin).get("dir_info", {}).get("editable"):
        return "clone"
    if "uv-receipt.toml" in files:
        return "uv tool"
    if "pipx_metadata.json" in files:
        return "pipx"
    return "uv pip" if installer == "uv" else "pip"
