"""`make setup` finds a Python that works, or says which one to install and how to name it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return a folder with the Makefile and what its first step depends on."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "worker").mkdir()
    (tmp_path / "worker" / "pyproject.toml").touch()
    (tmp_path / "requirements.txt").write_text("torch==2.13.0  # pinned\n")
    return tmp_path


def make(folder: Path, *arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHON"}
    environment["PATH"] = f"{path}:{environment['PATH']}"
    command = ["make", ".venv/.installed", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def write_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_unsupported_python_is_a_sentence_with_what_to_install(folder):
    done = make(folder, "PYTHON=/bin/false")
    assert done.returncode and not (folder / ".venv").exists()
    assert "needs Python 3.11 to 3.14" in done.stdout and "/bin/false is none" in done.stdout
    assert "uv python install 3.13" in done.stdout
    assert 'make PYTHON="$(uv python find 3.13)"' in done.stdout


def test_python_that_does_not_run_is_passed_over(folder, tmp_path):
    """As a shim of pyenv is for a version that is installed and not chosen."""
    programs = tmp_path / "programs"
    programs.mkdir()
    write_program(programs / "python3.13", "exit 127")
    write_program(programs / "python3.12", f'exec {sys.executable} "$@"')
    planned = make(folder, "--dry-run", path=str(programs)).stdout
    assert f"{programs}/python3.12 -m venv --clear .venv" in planned


def test_cpu_build_of_pytorch_is_the_one_that_is_pinned(folder):
    planned = make(folder, "--dry-run", "TORCH=cpu").stdout
    expression = next(line for line in planned.splitlines() if "sed -n" in line)
    (command,) = [part for part in expression.split("`") if part.startswith("sed")]
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True)
    assert done.stdout == "torch==2.13.0+cpu\n"
    assert "test cuda != cpu ||" in make(folder, "--dry-run", "TORCH=cuda").stdout
