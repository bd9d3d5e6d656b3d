"""Test that `barnraise remove` deletes all that is ours and nothing else, after asking."""

import pytest
from helpers.worker.command_line import RUN, invoke
from helpers.worker.fake_coordinator import MACHINE, FakeCoordinator, enrol
from helpers.worker.other_worker import other_worker
from helpers.worker.removal_drill import drill_removal
from typer.testing import CliRunner

from barnraise.cli import removal
from barnraise.cli.installation import Installation, choose_tool, find_installation, join_command
from barnraise.cli.main import app
from barnraise.coordinator_client.client import Json
from barnraise.errors import StateError
from barnraise.protocol.coordinator_messages import Problem
from barnraise.state_dir import StateDir

REVOKE = f"POST /machines/{MACHINE}/actions/revoke"


@pytest.fixture
def site():
    coordinator = FakeCoordinator()
    coordinator.routes[REVOKE] = lambda body: Json({"revoked": True})
    yield coordinator
    coordinator.close()


@pytest.fixture
def home(tmp_path, monkeypatch, site):
    """Return the home of an enrolled machine with a run."""
    monkeypatch.setenv("BARNRAISE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    state_dir = StateDir(tmp_path / "home")
    enrol(state_dir, site.url, site.identity.key)
    run = state_dir.open_run(RUN)
    (run.path / "shard").write_bytes(b"x" * 3_000_000)
    run.close()
    (state_dir.path / "logs").mkdir()
    (state_dir.path / "logs" / "worker.log").write_text("a line\n" * 1000)
    return state_dir


def test_contents_are_listed_and_deleted_after_a_confirmation(home, site):
    output = invoke("remove", typed="n\n")
    assert "Aborted" in output and home.path.exists() and REVOKE not in site.requests
    for text in ("3 MB", "logs", home.identity.key[:16], site.url):
        assert text in output
    output = invoke("remove", typed="y\ny\n")
    assert REVOKE in site.requests and "is revoked on the site" in output
    assert not home.path.exists()
    assert "There is nothing of barnraise" in invoke("remove")


def test_machine_that_is_not_to_be_revoked_is_named(home, site):
    output = invoke("remove", typed="y\nn\n")
    assert REVOKE not in site.requests and f"/machines/{MACHINE}/" in output
    assert not home.path.exists()


@pytest.mark.parametrize("status", [401, 403])
def test_machine_that_was_revoked_before_is_removed(home, site, status):
    site.routes[REVOKE] = lambda body: (status, Problem(error="it was revoked"))
    output = invoke("remove", "--yes")
    assert "not revoked" not in output and not home.path.exists()


def test_site_that_is_away_does_not_stop_the_removal(home, site):
    site.close()
    output = invoke("remove", "--yes")
    assert "It is not revoked" in output and f"/machines/{MACHINE}/" in output
    assert not home.path.exists()


def test_files_of_others_in_the_folder_stay(home):
    (home.path / "package.json").write_text("{}")
    for ours in ("traffic.json", "hardware-cuda-1.json", "constraints.txt", "limits.json.new"):
        (home.path / ours).write_text("{}")
    (home.path / "photos").mkdir()
    output = invoke("remove", "--yes")
    assert "package.json, photos" in output
    assert sorted(path.name for path in home.path.iterdir()) == ["package.json", "photos"]


def test_folder_that_is_ours_by_its_name_is_deleted_whole(tmp_path, site):
    home = StateDir(tmp_path / ".barnraise")
    (home.path / "of-a-newer-version").mkdir()
    (home.path / "of-a-newer-version.json").write_text("{}")
    invoke("remove", "--yes", "--home", str(home.path))
    assert not home.path.exists()


def test_remove_is_refused_while_a_worker_trains(home):
    folder = home.path / "runs" / RUN
    with other_worker(folder) as pid:
        with pytest.raises(StateError, match=rf"process {pid} trains .*barnraise stop"):
            invoke("remove", "--yes")
        assert folder.exists()


def test_folder_without_a_key_is_left_alone_and_gets_none(tmp_path):
    folder = tmp_path / "nothing"
    assert "There is nothing" in invoke("remove", "--yes", "--home", str(folder))
    assert not folder.exists()


def test_deletion_that_was_interrupted_goes_on(home, monkeypatch):
    def fail(path):
        raise OSError(13, "Permission denied", str(path))

    monkeypatch.setattr(removal.shutil, "rmtree", fail)
    result = CliRunner().invoke(app, ["remove", "--yes"])
    assert isinstance(result.exception, OSError) and (home.path / "key").exists()
    monkeypatch.undo()
    invoke("remove", "--yes", "--home", str(home.path))
    assert not home.path.exists()


@pytest.mark.integration
def test_no_file_is_left_after_training_and_removal():
    seen = drill_removal()
    assert seen.files_left == [] and seen.was_revoked
    assert "ninstall the program" in seen.output or "clone of the sources" in seen.output


@pytest.mark.parametrize(
    ("facts", "tool"),
    [
        (("uv", '{"url": "https://site/x.whl"}', ["bin", "uv-receipt.toml"]), "uv tool"),
        (("pip", "{}", ["bin", "pipx_metadata.json"]), "pipx"),
        (("uv", "{}", ["bin"]), "uv pip"),
        (("pip", '{"url": "https://site/x.whl"}', []), "pip"),
        (("", "{}", []), "pip"),
        (("pip", '{"url": "file:///x", "dir_info": {"editable": true}}', []), "clone"),
        (("pip", '{"url": "file:///x", "dir_info": {}}', []), "pip"),
    ],
)
def test_tool_that_installed_the_program_is_found(facts, tool):
    assert choose_tool(*facts) == tool


def test_uninstall_lines_name_the_tool_and_the_environment():
    lines = {
        tool: join_command(Installation(tool, "/a b/python").uninstall_command)
        for tool in ("uv tool", "pipx", "uv pip", "pip", "clone")
    }
    assert lines == {
        "uv tool": "uv tool uninstall barnraise",
        "pipx": "pipx uninstall barnraise",
        "uv pip": "uv pip uninstall --python '/a b/python' barnraise",
        "pip": "'/a b/python' -m pip uninstall barnraise",
        "clone": "",
    }
    assert find_installation().tool in lines
