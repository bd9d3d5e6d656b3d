"""Tests of the state directory: which folders are refused, and what survives a crash."""

import json
import os
from pathlib import Path

import pytest

from barnraise.errors import StateError
from barnraise.protocol.coordinator_messages import MirrorView
from barnraise.state_dir import RunDir, SiteMembership, StateDir

RUN = "01890000-0000-7000-8000-000000000001"
OTHER = "01890000-0000-7000-8000-000000000002"
KEY, STRANGER = "a" * 64, "b" * 64


def open_and_close(path, run=RUN, key=KEY) -> RunDir:
    folder = RunDir(path, run, key)
    folder.close()
    return folder


def relabel(path, **changed) -> None:
    label = json.loads((path / "folder.json").read_text())
    (path / "folder.json").write_text(json.dumps(label | changed))


def test_run_folder_reopened_has_the_same_label(tmp_path):
    assert open_and_close(tmp_path / "run").label == open_and_close(tmp_path / "run").label


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: relabel(path, format=99), "is of format 99; this version works with 1"),
        (
            lambda path: relabel(path, run=OTHER),
            f"holds the state of run {OTHER}, not of run {RUN}",
        ),
        (
            lambda path: relabel(path, key=STRANGER),
            "belongs to the machine bbbbbbbb, and this one is aaaaaaaa",
        ),
        (lambda path: relabel(path, incarnation=7), "folder.json is damaged"),
        (lambda path: (path / "folder.json").write_text("[1]"), "folder.json is damaged"),
        (lambda path: (path / "folder.json").write_bytes(b"\xff\x00"), "folder.json is damaged"),
        (
            lambda path: (path / "folder.json").rename(path / "notes.txt"),
            "has no folder.json, yet holds notes.txt",
        ),
    ],
)
def test_folder_of_another_run_or_machine_is_refused_and_unchanged(tmp_path, spoil, reason):
    path = tmp_path / "run"
    open_and_close(path)
    spoil(path)
    before = sorted((p.name, p.read_bytes()) for p in path.iterdir())
    with pytest.raises(StateError, match=reason) as caught:
        open_and_close(path)
    assert str(path) in str(caught.value)
    assert sorted((p.name, p.read_bytes()) for p in path.iterdir()) == before
    with pytest.raises(StateError, match=reason):  # the refusal has released the lock
        open_and_close(path)


def test_run_folder_in_use_is_refused_until_closed(tmp_path):
    first = RunDir(tmp_path / "run", RUN, KEY)
    with pytest.raises(StateError, match="is in use by another worker"):
        open_and_close(tmp_path / "run")
    first.close()
    open_and_close(tmp_path / "run")


def test_run_folder_half_created_is_created_again(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "folder.json.new").write_text('{"form')
    assert open_and_close(tmp_path / "run").label.run == RUN


def test_run_folder_accepts_only_its_first_spec(tmp_path):
    folder = RunDir(tmp_path / "run", RUN, KEY)
    folder.pin_spec("1" * 64)
    folder.pin_spec("1" * 64)
    folder.close()
    again = RunDir(tmp_path / "run", RUN, KEY)
    with pytest.raises(
        StateError, match="was trained under spec 11111111, and the run has 22222222 now"
    ):
        again.pin_spec("2" * 64)
    again.close()


def test_new_incarnation_is_stored(tmp_path):
    folder = RunDir(tmp_path / "run", RUN, KEY)
    before, after = folder.label.incarnation, folder.renew_incarnation()
    folder.close()
    assert before != after == open_and_close(tmp_path / "run").label.incarnation


def test_status_that_cannot_be_written_is_ignored(tmp_path):
    folder = RunDir(tmp_path / "run", RUN, KEY)
    (tmp_path / "run" / "status.json").mkdir()  # the system refuses to replace a folder by a file
    folder.write_status({"step": 1})
    folder.close()


def test_key_is_private_and_refused_when_damaged(tmp_path):
    key = StateDir(tmp_path).identity.key
    assert StateDir(tmp_path).identity.key == key
    assert os.name != "posix" or (tmp_path / "key").stat().st_mode & 0o077 == 0
    (tmp_path / "key").write_bytes(b"short")
    with pytest.raises(StateError, match="key is damaged"):
        StateDir(tmp_path)


def test_home_with_a_tilde_is_below_the_users_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert StateDir.choose_path(Path("~/training")) == tmp_path / "training"
    assert StateDir.choose_path(None) == tmp_path / ".barnraise"
    with pytest.raises(StateError, match="--home FOLDER"):
        StateDir.choose_path(Path("~nobody-here/training"))


def test_machine_without_enrolment_gets_the_next_step(tmp_path):
    home = StateDir(tmp_path)
    with pytest.raises(StateError, match="run `barnraise login URL` first"):
        _ = home.membership
    home.save_membership(
        SiteMembership(
            url="http://x",
            mirror=MirrorView(key=KEY, name="x", protocols=[1], time=0),
            machine=RUN,
            person="P",
        )
    )
    assert StateDir(tmp_path).membership.person == "P"
    (tmp_path / "coordinator.json").write_text('{"url": ')
    with pytest.raises(StateError, match="run `barnraise login URL` again"):
        _ = home.membership


def test_home_that_cannot_be_written_is_a_sentence_with_the_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match=r"Not a directory\): name another .* --home FOLDER"):
        StateDir(tmp_path / "file" / "home")
    home = StateDir(tmp_path / "home")
    (home.path / "runs").write_text("")
    with pytest.raises(StateError, match=r"nothing can be written to .*: name another folder"):
        home.open_run(RUN)
