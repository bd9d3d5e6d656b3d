"""Test `barnraise crew`: codes that are none, and the status of this machine's crew."""

import json
import time
from pathlib import Path

import pytest
from helpers.worker.command_line import invoke

from barnraise.errors import CrewError, StateError
from barnraise.state_dir import RunDir, StateDir
from barnraise.training.crew.crew_status import STATUS_FILE, CrewStatus, SeatStatus

RUN = "0192f0c1-2d3e-7f40-8a5b-6c7d8e9f0a1b"


def write_status(home: Path, at: float) -> None:
    """Write the status of a member of a crew of two."""
    seats = [
        SeatStatus(
            name=name,
            key=16 * "a",
            first_block=first,
            blocks=blocks,
            share=0.3,
            connected=name != "attic",
        )
        for name, first, blocks in (("the lead", 1, 3), ("attic", 4, 9), ("cellar", 13, 2))
    ]
    status = CrewStatus(
        run=RUN,
        number=2,
        boundary_bits=16,
        bytes_sent=1_500_000,
        bytes_received=2_500_000,
        seats=seats,
        at=at,
    )
    folder = home / "runs" / RUN
    RunDir(folder, RUN, StateDir(home).identity.key).close()
    (folder / STATUS_FILE).write_text(status.model_dump_json())


def test_status_shows_who_holds_what_and_who_is_connected(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    write_status(tmp_path, time.time())
    output = " ".join(invoke("crew", "status", "--home", str(tmp_path)).split())
    assert "this machine is a member of a crew of 3; boundaries in 16 bits" in output
    assert "the lead ends, 1\u20133 connected" in output
    assert "attic 4\u201312 not connected" in output and "cellar 13\u201314 this machine" in output
    (crew,) = json.loads(invoke("crew", "status", "--json", "--home", str(tmp_path)))
    assert crew["seats"][1] == {
        "name": "attic",
        "key": 16 * "a",
        "first_block": 4,
        "blocks": 9,
        "share": 0.3,
        "connected": False,
    }


def test_status_of_the_machine_names_its_crew_while_it_trains(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    write_status(tmp_path, time.time())
    assert "in a crew; barnraise crew status" in invoke("status", "--home", str(tmp_path))
    write_status(tmp_path, time.time() - 3600)
    assert "not trained yet" in invoke("status", "--home", str(tmp_path))


def test_status_without_a_crew_says_how_to_start_one(tmp_path):
    write_status(tmp_path, time.time() - 3600)  # of a crew that has ended
    with pytest.raises(StateError, match="join RUN --crew` starts one"):
        invoke("crew", "status", "--home", str(tmp_path))


def test_code_that_is_none_is_refused_before_anything_else(tmp_path):
    with pytest.raises(CrewError, match="begins with 'crew-'"):
        invoke("crew", "join", "first-barn", "--home", str(tmp_path))
    with pytest.raises(CrewError, match="copy it again"):
        invoke("crew", "join", "crew-AAAA", "--home", str(tmp_path))


def test_crew_in_several_runs_is_refused(tmp_path):
    with pytest.raises(StateError, match="a crew trains one run"):
        invoke("join", "one", "two", "--crew", "--eager", "--home", str(tmp_path))
