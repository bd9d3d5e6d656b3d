"""Where a worker keeps what is its own: what is refused, by name, and what a crash leaves behind."""

import json
import os

import pytest

from barnraise.errors import StateError
from barnraise.protocol.coordinator_messages import MirrorView
from barnraise.state_dir import RunDir, SiteMembership, StateDir

RUN = "01890000-0000-7000-8000-000000000001"
OTHER = "01890000-0000-7000-8000-000000000002"
KEY, STRANGER = "a" * 64, "b" * 64


def open_signed(path, run=RUN, key=KEY) -> RunDir:
    folder = RunDir(path, run, key)
    folder.close()
    return folder


def relabel(path, **changed) -> None:
    label = json.loads((path / "folder.json").read_text())
    (path / "folder.json").write_text(json.dumps(label | changed))


def test_a_folder_opened_again_is_the_same_life(tmp_path):
    assert open_signed(tmp_path / "run").label == open_signed(tmp_path / "run").label


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda p: relabel(p, format=99), "is of format 99; this version works with 1"),
        (lambda p: relabel(p, run=OTHER), f"holds the state of run {OTHER}, not of run {RUN}"),
        (
            lambda p: relabel(p, key=STRANGER),
            "belongs to the machine bbbbbbbb, and this one is aaaaaaaa",
        ),
        (lambda p: relabel(p, incarnation=7), "folder.json is damaged"),
        (lambda p: (p / "folder.json").write_text("[1]"), "folder.json is damaged"),
        (lambda p: (p / "folder.json").write_bytes(b"\xff\x00"), "folder.json is damaged"),
        (
            lambda p: (p / "folder.json").rename(p / "notes.txt"),
            "has no folder.json, yet holds notes.txt",
        ),
    ],
)
def test_folder_of_another_run_or_machine_is_refused_and_unchanged(tmp_path, spoil, why):
    path = tmp_path / "run"
    open_signed(path)
    spoil(path)
    before = sorted((p.name, p.read_bytes()) for p in path.iterdir())
    with pytest.raises(StateError, match=why) as caught:
        open_signed(path)
    assert str(path) in str(caught.value)
    assert sorted((p.name, p.read_bytes()) for p in path.iterdir()) == before
    with pytest.raises(StateError, match=why):  # not "in use": the refusal released the lock
        open_signed(path)


def test_a_folder_in_use_is_refused_until_it_is_closed(tmp_path):
    first = RunDir(tmp_path / "run", RUN, KEY)
    with pytest.raises(StateError, match="is in use by another worker"):
        open_signed(tmp_path / "run")
    first.close()
    open_signed(tmp_path / "run")


def test_a_folder_whose_making_was_cut_off_is_made_again(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "folder.json.new").write_text('{"form')
    assert open_signed(tmp_path / "run").label.run == RUN


def test_a_folder_is_tied_to_the_first_spec_it_trains_under(tmp_path):
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


def test_a_new_incarnation_outlives_the_process(tmp_path):
    folder = RunDir(tmp_path / "run", RUN, KEY)
    before, after = folder.label.incarnation, folder.renew_incarnation()
    folder.close()
    assert before != after == open_signed(tmp_path / "run").label.incarnation


def test_a_status_that_cannot_be_written_stops_nobody(tmp_path):
    folder = RunDir(tmp_path / "run", RUN, KEY)
    (tmp_path / "run" / "status.json").mkdir()  # what replaces it is refused by the system
    folder.write_status({"step": 1})
    folder.close()


def test_a_home_keeps_its_key_to_its_owner_and_says_when_it_is_damaged(tmp_path):
    key = StateDir(tmp_path).identity.key
    assert StateDir(tmp_path).identity.key == key
    assert os.name != "posix" or (tmp_path / "key").stat().st_mode & 0o077 == 0
    (tmp_path / "key").write_bytes(b"short")
    with pytest.raises(StateError, match="key is damaged"):
        StateDir(tmp_path)


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
