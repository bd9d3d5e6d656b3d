"""Test the commands that control this machine's workers without a site."""

import threading
import time

import pytest
from helpers.worker.command_line import RUN, invoke

from barnraise.errors import StateError
from barnraise.state_dir import RunDir, StateDir
from barnraise.training.local_control import LocalControl, LocalPause, WorkerProcess


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Return a state directory whose only run has a folder that nobody uses."""
    monkeypatch.setenv("BARNRAISE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    state_dir = StateDir(tmp_path)
    state_dir.open_run(RUN).close()
    return state_dir


@pytest.fixture
def folder(home):
    """Return the path of the run's folder."""
    return home.path / "runs" / RUN


def start_worker(home: StateDir) -> tuple[RunDir, threading.Event, threading.Thread]:
    """Work on the run as `join_run` does, until a stop is requested."""
    opened, leaving = home.open_run(RUN), threading.Event()
    control = LocalControl(opened.path)
    control.register_worker()
    control.watch_stop(opened, leaving)

    def work() -> None:
        leaving.wait(60)
        opened.close()

    thread = threading.Thread(target=work)
    thread.start()
    return opened, leaving, thread


def test_pause_and_resume_need_no_running_worker(home, folder):
    assert "from its next start on" in invoke("pause")
    assert LocalControl(folder).is_paused
    assert f"barnraise join {RUN}" in invoke("resume", RUN)
    assert not LocalControl(folder).is_paused


def test_pause_ends_by_itself_and_survives_a_restart(home, folder):
    assert "pauses from its next start on, until" in invoke("pause", "--for", "1h", "--offline")
    control = LocalControl(folder)
    found = control.find_pause(time.time())
    assert found is not None and found.until is not None and found.is_offline
    assert 3590 < found.until - time.time() <= 3600
    assert control.find_pause(found.until) is None
    invoke("pause")
    assert control.find_pause(time.time() + 1e9) == LocalPause()


def test_pause_of_an_older_version_keeps_its_peers_away(home, folder):
    (folder / "paused").write_text('{"until": null, "offline": true}')
    assert LocalControl(folder).find_pause(time.time()) == LocalPause(is_offline=True)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"until": "x", "offline": false}'])
def test_file_of_a_pause_that_cannot_be_read_is_a_pause(folder, content):
    (folder / "paused").write_text(content)  # an older version wrote an empty one
    assert LocalControl(folder).find_pause(time.time()) == LocalPause()


@pytest.mark.parametrize(
    "options",
    [
        ("--for", "0"),
        ("--for", "-1h"),
        ("--until", "yesterday"),
        ("--for", "1h", "--until", "7:00"),
    ],
)
def test_bad_pause_is_a_sentence_and_pauses_nothing(home, folder, options):
    with pytest.raises(StateError, match=r"--for 1h|--until 07:00"):
        invoke("pause", *options)
    assert not LocalControl(folder).is_paused


def test_stop_lets_the_worker_leave_and_waits_for_it(home):
    _, leaving, thread = start_worker(home)
    assert "after its current step" in invoke("pause")
    assert "has stopped" in invoke("stop")
    thread.join(60)
    assert leaving.is_set() and not thread.is_alive()
    assert "No worker is running" in invoke("stop")


def test_request_to_stop_does_not_concern_a_later_worker(home, folder):
    LocalControl(folder).request_stop(WorkerProcess(pid=1, started=5.0))
    opened, leaving, thread = start_worker(home)
    assert not leaving.wait(1.0)
    leaving.set()
    thread.join(60)
    assert not opened.is_open


@pytest.mark.parametrize("content", ["", "{", '{"pid": "x", "started": 1}', "[]"])
def test_damaged_worker_file_means_that_none_is_running(home, folder, content):
    (folder / "worker.json").write_text(content)
    assert "No worker is running" in invoke("stop")


def test_process_id_that_is_used_again_is_no_worker(home, folder):
    own = WorkerProcess.current()
    before = WorkerProcess(pid=own.pid, started=own.started - 100)
    before.save(folder / "worker.json")
    assert LocalControl(folder).find_worker() is None


def test_leave_deletes_only_after_a_confirmation(home, folder):
    (folder / "blobs").mkdir()
    (folder / "blobs" / "shard").write_bytes(b"x" * 100_000)
    assert "--delete` frees them" in invoke("leave", RUN)
    assert "Aborted" in invoke("leave", RUN, "--delete", typed="n\n")
    assert folder.exists()
    assert "are free again" in invoke("leave", RUN, "--delete", typed="y\n")
    assert not list(folder.parent.iterdir())
    with pytest.raises(StateError, match="has not worked on any run"):
        invoke("pause")


def test_control_of_an_unknown_run_is_refused(home):
    with pytest.raises(StateError, match="has never worked on 'nowhere'"):
        invoke("stop", "nowhere")


def test_status_shows_the_disk_space_and_whether_a_worker_runs(home, folder):
    (folder / "shard").write_bytes(b"x" * 3_000_000)
    output = invoke("status")
    assert "not running" in output and "3 MB" in output
    _, leaving, thread = start_worker(home)
    assert "Worker     running" in invoke("status")
    leaving.set()
    thread.join(60)
