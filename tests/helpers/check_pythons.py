"""Check that the worker installs on each Python and platform that the documents name.

Usage: `make check-pythons`. Into an empty environment of each Python that is on this machine, the
wheel is installed by the line that /download/ shows, and `barnraise plan` runs. For the Pythons
that are not here, and for the other platforms, uv looks for a wheel of each package instead. The
last line is a JSON object; `installed` lists the Pythons for which the line itself ran.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "build" / "wheel"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# As uv names the platforms of README.md.
PLATFORMS = {
    "Linux": "x86_64-manylinux_2_28",
    "Linux on ARM": "aarch64-manylinux_2_28",
    "Windows": "x86_64-pc-windows-msvc",
    "macOS": "aarch64-apple-darwin",
}
MACOS_RELEASE = {"MACOSX_DEPLOYMENT_TARGET": "14.0"}
# The system and the hardware whose line is tried.
OWN_CHOICE = ({"win32": "windows", "darwin": "macos"}.get(sys.platform, "linux"), "cpu")
PLAN = ("plan", "--model", "gpt-nano")


def main() -> int:
    """Print one line for each Python and platform, and return 0 if all are fine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args()
    sys.path[:0] = [str(ROOT / "platform"), str(ROOT / "worker")]
    from coordinator.web.install_lines import install_choices

    (wheel,) = WHEELS.glob("barnraise-*.whl")
    choices = install_choices(str(wheel), str(WHEELS / "constraints.txt"), "")
    (line,) = [choice.uv for choice in choices if (choice.system, choice.hardware) == OWN_CHOICE]
    verdicts, installed = {}, []
    for version in PYTHONS:
        if find_python(version):
            verdicts[version] = install_and_plan(line, version, wheel)
            installed += [version] if verdicts[version] == "ok" else []
        else:
            verdicts[version] = resolve(wheel, version, PLATFORMS["Linux"])
            print(f"{version} is not on this machine: {verdicts[version]}, by resolution alone")
    lacking = [
        f"{name}, Python {version}"
        for name, platform in PLATFORMS.items()
        for version in PYTHONS
        if resolve(wheel, version, platform) != "ok"
    ]
    result = {"pythons": verdicts, "platforms_without_wheels": lacking, "installed": installed}
    print(json.dumps(result))
    return 0 if set(verdicts.values()) == {"ok"} and not lacking else 1


def find_uv() -> str:
    """Return uv from the PATH; without one, install it under build/uv."""
    if found := shutil.which("uv"):
        return found
    folder = ROOT / "build" / "uv"
    program = folder / "bin" / "uv"
    if not program.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), "uv"]
        subprocess.run(pip, check=True)
    return str(program)


def find_python(version: str) -> str:
    """Return the program of a version, also of pyenv's that are not chosen; "" without one."""
    command = [find_uv(), "python", "find", "--system", "--no-python-downloads", version]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return done.stdout.strip()
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    programs = sorted(root.glob(f"{version}.*/bin/python{version}"))
    return str(programs[-1]) if programs else ""


def install_and_plan(line: str, version: str, wheel: Path) -> str:
    """Run the shown line with another Python, and the program that it installs; "ok" if both work.

    Where PyTorch's own index does not answer, uv is not asked to choose the build.
    """
    with tempfile.TemporaryDirectory(prefix="barnraise-python-") as folder:
        environment = {
            **os.environ,
            "UV_TOOL_DIR": f"{folder}/tools",
            "UV_TOOL_BIN_DIR": f"{folder}/bin",
            "BARNRAISE_HOME": f"{folder}/home",
        }
        environment.pop("PYTHONPATH", None)
        arguments = line.removesuffix("#sha256=").split()[1:]
        arguments[arguments.index("--python") + 1] = find_python(version)
        without_build = [part for part in arguments if not part.startswith("--torch-backend")]
        program = Path(folder, "bin", "barnraise")
        for attempt in (arguments, without_build):
            print(f"{version}: uv {' '.join(attempt)}", flush=True)
            done = run([find_uv(), *attempt], environment)
            if done.returncode == 0:
                break
        if done.returncode == 0:
            done = run([str(program), *PLAN], environment)
        if done.returncode:
            print(done.stderr[-2000:])
        return "ok" if done.returncode == 0 else "fails"


def run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command and return its output and exit code."""
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def resolve(wheel: Path, version: str, platform: str) -> str:
    """Return "ok" if each package that the wheel needs has a wheel for a platform."""
    with tempfile.TemporaryDirectory() as folder:
        needed = Path(folder, "requirements.in")
        needed.write_text(f"barnraise @ {wheel.as_uri()}\n")
        target = ("--python-version", version, "--python-platform", platform)
        options = (
            "--quiet",
            "--only-binary",
            ":all:",
            "--constraints",
            str(WHEELS / "constraints.txt"),
        )
        command = [find_uv(), "pip", "compile", *options, *target, str(needed)]
        done = run(command, {**os.environ, **MACOS_RELEASE})
    if done.returncode:
        print(f"{platform}, Python {version}: {done.stderr[-1500:]}")
    return "ok" if done.returncode == 0 else "no wheel"


if __name__ == "__main__":
    sys.exit(main())
