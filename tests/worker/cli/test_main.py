"""Test what all commands share: help, version, and errors as one sentence with exit code 1."""

import pytest
from helpers.command_line import assert_fails, run_barnraise
from typer.testing import CliRunner

from barnraise import __version__
from barnraise.cli import main

COMMANDS = (
    *("login", "plan", "limits", "join", "status", "fetch", "export", "serve", "sample"),
    *("prepare", "verdict", "runs", "machines"),
)


def test_help_lists_every_command():
    output = CliRunner().invoke(main.app, ["--help"], env={"COLUMNS": "100"}).output
    assert all(f" {command} " in output for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command):
    for option in ("-h", "--help"):
        result = CliRunner().invoke(main.app, [command, option], env={"COLUMNS": "100"})
        assert result.exit_code == 0 and "Usage:" in result.output


def test_version_is_printed(tmp_path):
    result = run_barnraise(tmp_path, "--version")
    assert result.returncode == 0 and result.stdout.strip() == f"barnraise {__version__}"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("join", "a-run"),
            "this machine is not enrolled yet: run `barnraise login URL` first",
        ),
        (("runs",), "this machine is not enrolled yet"),
        (("export", "a-run", "out"), "has never worked on 'a-run'"),
        (("verdict", "a-run"), "has never worked on 'a-run'"),
    ],
)
def test_command_names_the_enrolment_or_run_that_it_needs(tmp_path, arguments, sentence):
    assert_fails(run_barnraise(tmp_path, *arguments), sentence)


def test_state_directory_that_cannot_be_created_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    assert_fails(run_barnraise(tmp_path / "file" / "home", "status"), "Not a directory")
