"""Every command of the workflows and of pre-commit exists here, and fits the systems it is for."""

import importlib.util
import itertools
import re
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import version
from typing import Any

import pytest
import yaml
from helpers.paths import ROOT, WORKER
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((WORKER / "pyproject.toml").read_text())["project"]
EXPRESSION = re.compile(r"\$\{\{ (.+?) \}\}")
# What PowerShell and cmd.exe have in another form, or not at all.
POSIX_ONLY = re.compile(r"\.venv/bin|[|;&<>`$\\]|\b(?:make|export|source|sudo|rm|cp|bash|sh)\b")


def list_jobs() -> list[tuple[str, dict[str, Any]]]:
    jobs = [yaml.safe_load(path.read_text())["jobs"].items() for path in WORKFLOWS]
    return list(itertools.chain.from_iterable(jobs))


def list_steps(job: dict[str, Any]) -> list[tuple[str, bool]]:
    """Return each command line of a job, and whether it must run on Windows too."""
    systems = job.get("strategy", {}).get("matrix", {}).get("os", [job["runs-on"]])
    has_windows = any("windows" in system for system in systems)
    commands = [step["run"] for step in job["steps"] if "run" in step]
    return [(line, has_windows) for command in commands for line in command.splitlines()]


STEPS = [step for _, job in list_jobs() for step in list_steps(job)]


def check_make(*targets: str) -> None:
    for target in targets:
        planned = ["make", "--dry-run", target]
        done = subprocess.run(planned, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def check_python(*arguments: str) -> None:
    if arguments[:3] == ("-m", "pip", "install"):
        (requirement,) = [word for word in arguments[3:] if not word.startswith("-")]
        check_extras(requirement)
    elif arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1])
    else:
        command = [sys.executable, str(ROOT / arguments[0]), "--help"]
        explained = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert all(argument in explained for argument in arguments[1:])


def check_extras(requirement: str) -> None:
    """Check that the folder is installed here with the same extras."""
    folder, extras = re.fullmatch(r"(\w+)\[([\w,]+)\]", requirement).groups()
    assert ROOT / folder == WORKER
    for extra in extras.split(","):
        for needed in map(Requirement, PROJECT["optional-dependencies"][extra]):
            assert needed.specifier.contains(version(needed.name)), needed


PROGRAMS = {"make": check_make, "python": check_python}


def test_workflows_run_lint_the_workers_tests_and_all_tests():
    assert {line for line, _ in STEPS} >= {
        "make lint",
        "make test",
        "python tests/helpers/run_suites.py worker",
    }


@pytest.mark.parametrize(("line", "has_windows"), STEPS)
def test_command_of_a_workflow_exists_and_fits_its_systems(line, has_windows):
    program, *arguments = shlex.split(line)
    PROGRAMS[program](*arguments)
    if has_windows:
        assert not POSIX_ONLY.search(line)


def test_every_name_in_an_expression_is_defined():
    for path in WORKFLOWS:
        for name in EXPRESSION.findall(path.read_text()):
            if name.startswith("matrix."):
                assert any(
                    name.removeprefix("matrix.") in job.get("strategy", {}).get("matrix", {})
                    for _, job in list_jobs()
                ), name
            else:
                assert name == "github.ref"


def test_worker_is_tested_on_every_system_and_python_that_it_supports():
    matrix = dict(list_jobs())["test-worker"]["strategy"]["matrix"]
    assert {system.split("-")[0] for system in matrix["os"]} == {"ubuntu", "macos", "windows"}
    supported = SpecifierSet(PROJECT["requires-python"])
    assert len(matrix["python"]) == 4
    assert all(supported.contains(f"{python}.0") for python in matrix["python"])
    assert not supported.contains("3.10.0") and "3.11" in matrix["python"]


def test_precommit_runs_the_installed_ruff_and_all_of_lint_at_a_push():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    pinned = (ROOT / "requirements.txt").read_text().splitlines()
    *ruff, lint = repository["hooks"]
    assert [hook["id"] for hook in ruff] == ["ruff-check", "ruff-format"]
    assert (lint["entry"], lint["stages"]) == ("make lint", ["pre-push"])
    for hook in ruff:
        assert set(hook["additional_dependencies"]) <= set(pinned)
        command = [sys.executable, "-m", *hook["entry"].split(), "tests/test_workflows.py"]
        command = [word for word in command if word != "--fix"]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
