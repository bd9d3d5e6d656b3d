"""Test `barnraise update`: it believes its site's signature, never an older version, and asks."""

import sys
from pathlib import Path

import pytest
from helpers.worker.command_line import RUN, invoke
from helpers.worker.fake_coordinator import FakeCoordinator, enrol
from helpers.worker.other_worker import other_worker

from barnraise import __version__
from barnraise.cli import update as update_module
from barnraise.cli.installation import Installation
from barnraise.cli.update import parse_version
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


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    """Let an installer record what it should install; return the file in which it does."""
    script = tmp_path / "pip.py"
    script.write_text(
        "import sys, pathlib; target, constraints, wheel = map(pathlib.Path, sys.argv[1:]);"
        "target.write_text(constraints.read_text() + sys.argv[3])"
    )
    command = [sys.executable, str(script), str(tmp_path / "installed")]

    def build(self, wheel, constraints):
        return [*command, str(constraints), wheel]

    monkeypatch.setattr(Installation, "build_update_command", build)
    return tmp_path / "installed"


def test_check_shows_version_digest_and_line_and_installs_nothing(home, site, recorded):
    output = invoke("update", "--check")
    assert __version__ in output and "99.0.0" in output and SHA256 in output
    assert f"{site.url}/download/barnraise-99.0.0-py3-none-any.whl#sha256={SHA256}" in output
    assert not recorded.exists()


def test_update_runs_the_line_after_asking(home, site, recorded):
    assert "Aborted" in invoke("update", typed="n\n") and not recorded.exists()
    assert "Updated" in invoke("update", typed="y\n")
    *constraints, wheel = recorded.read_text().splitlines()
    assert constraints == PINS
    assert wheel.startswith(f"{site.url}/download/barnraise-99.0.0")


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ([sys.executable, "-c", "raise SystemExit(7)"], "exit code 7"),
        (["/nowhere/uv"], "/nowhere/uv cannot be started"),
    ],
)
def test_installer_that_fails_or_is_missing_is_a_sentence(home, monkeypatch, command, sentence):
    monkeypatch.setattr(Installation, "build_update_command", lambda *given: command)
    with pytest.raises(StateError, match=sentence):
        invoke("update", typed="y\n")


def test_same_version_is_said_and_an_older_one_refused(home, site, recorded):
    site.version = __version__
    assert "This is the site's version." in invoke("update")
    site.version = "0.0.1"
    for options in ([], ["--check"]):
        with pytest.raises(StateError, match="which is older than"):
            invoke("update", *options, typed="y\n")
    assert not recorded.exists()


def test_release_that_another_key_signed_is_refused(home, site, recorded):
    site.signer = Identity(b"x" * 32)
    with pytest.raises(MessageError, match="is signed by"):
        invoke("update", typed="y\n")
    assert not recorded.exists()


def test_site_without_a_worker_and_machine_without_a_site_are_sentences(home, site):
    del site.routes["GET /worker"]
    with pytest.raises(CoordinatorError, match="there is nothing at"):
        invoke("update")
    (home.path / "coordinator.json").unlink()
    with pytest.raises(StateError, match="not enrolled yet"):
        invoke("update")


def test_running_worker_is_not_updated(home, recorded):
    folder = home.open_run(RUN)
    folder.close()
    with other_worker(folder.path), pytest.raises(StateError, match="trains on this machine"):
        invoke("update", typed="y\n")
    assert not recorded.exists()


def test_clone_is_updated_by_git(home, monkeypatch):
    clone = Installation("clone", sys.executable)
    monkeypatch.setattr(update_module, "find_installation", lambda: clone)
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
    ("installed", "offered", "order"),
    [
        ("0.1.0", "0.1.0", 0),
        ("0.1.0", "0.2.0", -1),
        ("0.2.0", "0.10.0", -1),
        ("0.2.0+5.g1a2b3c4", "0.2.0+6.gffffff", -1),
        ("0.2.0+5.g1a2b3c4", "0.2.0", 1),
        ("0.2.0+5.g1a2b3c4", "0.3.0", -1),
        ("1.0", "0.9.9", 1),
    ],
)
def test_versions_are_compared_as_numbers(installed, offered, order):
    before, after = parse_version(installed), parse_version(offered)
    assert (before > after) - (before < after) == order


@pytest.mark.parametrize("version", ["1.0rc1", "v2", "", "1..2", "²"])
def test_version_that_cannot_be_compared_is_refused(version):
    with pytest.raises(StateError, match="no version of barnraise"):
        parse_version(version)
