"""The version is the newest tag's, for the worker, its wheel and the site alike."""

import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from helpers.paths import ROOT, WORKER

BUILD_WHEEL = Path("platform", "coordinator", "web", "build_wheel.py")
FALLBACK = "0.1.0"


def run_git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org")
    command = ["git", *identity, "-c", "commit.gpgsign=false", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(clone: Path) -> None:
    run_git(clone, "commit", "--quiet", "--allow-empty", "--message", "Change something")


@pytest.fixture
def copy(tmp_path) -> Path:
    """Return a folder with what decides the version, and no git."""
    worker = tmp_path / "copy" / "worker"
    (worker / "barnraise").mkdir(parents=True)
    shutil.copy(WORKER / "setup.py", worker)
    shutil.copy(WORKER / "barnraise" / "__init__.py", worker / "barnraise")
    return tmp_path / "copy"


@pytest.fixture
def clone(copy) -> Path:
    """Return the same folder as a clone with one commit."""
    run_git(copy, "init", "--quiet")
    commit(copy)
    return copy


def read_version(copy: Path) -> str:
    """Write the version as a build does, and return what the program then says."""
    runpy.run_path(str(copy / "worker" / "setup.py"))["write_version"]()
    command = [sys.executable, "-c", "import barnraise; print(barnraise.__version__)"]
    return subprocess.run(
        command, cwd=copy / "worker", capture_output=True, text=True, check=True
    ).stdout.strip()


def test_version_without_git_or_tags_is_the_one_in_the_source(copy):
    assert read_version(copy) == FALLBACK
    run_git(copy, "init", "--quiet")
    commit(copy)
    assert read_version(copy) == FALLBACK


def test_version_is_the_tag_and_states_the_commits_after_it(clone):
    run_git(clone, "tag", "v0.9.1")
    run_git(clone, "tag", "benchmark-of-today")
    assert read_version(clone) == "0.9.1"
    commit(clone)
    head = run_git(clone, "describe", "--tags", "--long", "--match", "v*").rpartition("-")[2]
    assert read_version(clone) == f"0.9.1+1.{head}"
    run_git(clone, "tag", "v0.10.0rc1")
    assert read_version(clone) == "0.10.0rc1"
    run_git(clone, "tag", "--delete", "v0.9.1", "v0.10.0rc1")
    assert read_version(clone) == FALLBACK


def test_copy_of_a_clone_has_the_version_of_the_clone(clone, tmp_path):
    run_git(clone, "tag", "v0.9.1")
    assert read_version(clone) == "0.9.1"
    shutil.copytree(clone / "worker", tmp_path / "other" / "worker")
    assert read_version(tmp_path / "other") == "0.9.1"


def test_tags_of_another_project_around_a_copy_do_not_count(copy):
    run_git(copy.parent, "init", "--quiet")
    commit(copy.parent)
    run_git(copy.parent, "tag", "v7.0")
    assert read_version(copy) == FALLBACK


@pytest.mark.integration
def test_wheel_and_command_have_the_version_of_the_tag(clone):
    for path in (WORKER, ROOT / BUILD_WHEEL, ROOT / "requirements.txt"):
        target = clone / path.relative_to(ROOT)
        if path.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info", "version.txt")
            shutil.copytree(path, target, dirs_exist_ok=True, ignore=ignored)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    run_git(clone, "tag", "v0.9.1")
    done = subprocess.run(
        [sys.executable, clone / BUILD_WHEEL], capture_output=True, text=True, check=True
    )
    wheel = Path(done.stdout.strip())
    assert wheel.name == "barnraise-0.9.1-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("barnraise/version.txt") == b"0.9.1"
        archive.extractall(clone / "installed")
    for folder in ("installed", "worker"):
        command = [sys.executable, "-m", "barnraise", "--version"]
        printed = subprocess.run(
            command, cwd=clone / folder, capture_output=True, text=True, check=True
        ).stdout
        assert printed == "barnraise 0.9.1\n"
