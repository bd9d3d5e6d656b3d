"""Test the last words of `barnraise join`."""

from pathlib import Path

from helpers.worker.command_line import RUN

from barnraise.cli.last_words import compose_last_words
from barnraise.protocol.coordinator_messages import MirrorView
from barnraise.state_dir import SiteMembership
from barnraise.training.local_status import LocalStatus

MEMBERSHIP = SiteMembership(
    url="https://train.example.org",
    mirror=MirrorView(key="a" * 64, name="s", protocols=[1], time=0),
    machine=RUN,
)
STATUS = LocalStatus.model_validate(
    {"tokens": 1_200_000, "ledger_tokens": 5_000_000, "updates_sent": 12}
)


def last_words(**changes) -> str:
    outcome = {"run": "a-run", "folder": Path("/state"), "status": STATUS, "has_left": False}
    return "\n".join(compose_last_words(**outcome | changes, membership=MEMBERSHIP))


def test_last_words_of_a_run_say_what_was_done_and_where_it_is():
    text = last_words()
    assert "1.20 M of the run's 5.00 M tokens (24 %) and published 12 updates" in text
    assert "/state" in text and "barnraise export a-run FOLDER" in text
    assert f"https://train.example.org/machines/{RUN}/certificate/" in text
    assert "barnraise join" not in text


def test_who_leaves_learns_how_to_continue():
    assert "barnraise join a-run" in last_words(has_left=True)


def test_who_trained_nothing_gets_no_certificate():
    text = last_words(status=None, has_left=True)
    assert "certificate" not in text and "export" not in text and "/state" in text
