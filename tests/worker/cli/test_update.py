"""Test `barnraise update`: it believes its site's signature, and never an older version."""

import sys
from pathlib import Path

import pytest
from helpers.worker.command_line import invoke
from helpers.worker.fake_coordinator import FakeCoordinator, enrol

from barnraise import __version__
from barnraise.cli import update
from barnraise.cli.installation import Installation
from barnraise.cli.update import is_newer
from barnraise.errors import CoordinatorError, MessageError, StateError
from barnraise.protocol.coordinator_messages import WorkerRelease
from barnraise.protocol.signing import Identity
from barnraise.state_dir import StateDir

SHA256 = "5d" * 32
PINS = ["numpy==2.4.6", 'uvloop==0.23.0 ; sys_platform != "win32"']


@pytest.fixture
def site():
    coordinator = FakeCoordinator()
    coordinator.version, coordinator.signer = "99.0.0", coordinator.identity

    def offer(body: bytes):
        file = f"barnraise-{coordinator.version}-py3-none-any.whl"
        release = WorkerRelease(
            version=coordinator.version, file=file, size=1, sha256=SHA256, constraints=PINS
        )
        return coordinator.signer.sign("worker_release", release)

    coordinator.routes["GET /worker"] = offer
    yield coordinator
    coordinator.close()


@pytest.fixture
def home(tmp_path, monkeypatch, site):
    monkeypatch.setenv("BARNRAISE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    state_dir = StateDir(tmp_path)
    enrol(state_dir, site.url, site.identity.key)
    return state_dir


@pytest.fixture(autouse=True)
def installation(monkeypatch):
    monkeypatch.setattr(update, "find_installation", lambda: Installation("pip", "/p/python"))


def test_check_shows_version_and_digest_and_writes_nothing(home):
    output = invoke("update", "--check")
    assert __version__ in output and "99.0.0" in output and SHA256 in output
    assert "--constraint" not in output and not (home.path / "constraints.txt").exists()


def test_update_shows_the_line_with_digest_and_tested_versions(home, site):
    output = invoke("update")
    wheel = f"{site.url}/download/barnraise-99.0.0-py3-none-any.whl"
    constraints = home.path / "constraints.txt"
    assert constraints.read_text().splitlines() == PINS
    line = f"--upgrade --constraint {constraints} '{wheel}#sha256={SHA256}'"
    assert f"/p/python -m pip install {line}" in output


def test_same_version_is_said_and_an_older_one_refused(home, site):
    site.version = __version__
    assert "This is the site's version." in invoke("update")
    site.version = "0.0.1"
    for options in ([], ["--check"]):
        with pytest.raises(StateError, match="offers an older version"):
            invoke("update", *options)


def test_release_that_another_key_signed_is_refused(home, site):
    site.signer = Identity(b"x" * 32)
    with pytest.raises(MessageError, match="is signed by"):
        invoke("update")


def test_site_without_a_worker_and_machine_without_a_site_are_sentences(home, site):
    del site.routes["GET /worker"]
    with pytest.raises(CoordinatorError, match="there is nothing at"):
        invoke("update")
    (home.path / "coordinator.json").unlink()
    with pytest.raises(StateError, match="not enrolled yet"):
        invoke("update")


def test_clone_is_updated_by_git(home, monkeypatch):
    clone = Installation("clone", sys.executable)
    monkeypatch.setattr(update, "find_installation", lambda: clone)
    assert "git pull" in invoke("update")


def test_each_tool_has_its_line_and_keeps_the_build_of_pytorch():
    wheel, constraints = "https://site/download/x.whl#sha256=0", Path("/home/constraints.txt")
    installations = [
        Installation(tool, "/p/python", "cpu") for tool in ("uv tool", "pipx", "uv pip", "pip")
    ]
    tested = f"--constraint {constraints} {wheel}"
    assert [" ".join(each.build_update_command(wheel, constraints)) for each in installations] == [
        f"uv tool install --torch-backend=cpu {tested}",
        f"pipx runpip barnraise install --upgrade {tested}",
        f"uv pip install --python /p/python --torch-backend=cpu {tested}",
        f"/p/python -m pip install --upgrade {tested}",
    ]
    without = installations[3].build_update_command(wheel, None)
    assert without == ["/p/python", "-m", "pip", "install", "--upgrade", wheel]
    assert Installation("clone", "/p/python").build_update_command(wheel, constraints) == []


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("0.1.0", "0.2.0"),
        ("0.2.0", "0.10.0"),
        ("0.2.0+5.g1a2b3c4", "0.2.0+16.gffffff"),
        ("0.2.0", "0.2.0+5.g1a2b3c4"),
        ("0.2.0+5.g1a2b3c4", "0.3.0"),
        ("0.9.9", "1.0"),
    ],
)
def test_versions_are_compared_as_numbers(older, newer):
    assert is_newer(newer, older) and not is_newer(older, newer) and not is_newer(newer, newer)


@pytest.mark.parametrize("version", ["1.0-", "", "1..2"])
def test_version_that_cannot_be_compared_is_refused(version):
    with pytest.raises(StateError, match="cannot be compared"):
        is_newer("1.0", version)
