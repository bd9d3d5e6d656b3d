"""Test the drill's window of what owners, sites and on-path attackers send to a machine."""

import pytest
from helpers.drill_modules import import_drill_module

from barnraise.errors import TextError

owner_files = import_drill_module("owner_files")


@pytest.mark.parametrize("name", owner_files.list_attacks())
def test_owners_bytes_from_tokenizer_to_answer_are_refused(name):
    result = owner_files.try_attack(owner_files.list_attacks()[name])
    assert result["refused"], result


def panic() -> None:
    raise BaseException("a panic of a library")


def refuse_late() -> None:
    raise TextError("too large, once it has grown")


@pytest.mark.parametrize("attack", [lambda: None, panic, refuse_late])
def test_attack_that_nothing_refuses_in_time_is_counted(attack, monkeypatch):
    grown = iter([100.0, 500.0])
    monkeypatch.setattr(owner_files, "largest_memory_mb", lambda: next(grown))
    assert not owner_files.try_attack(attack)["refused"]
