"""Test what all commands share: help, version, and errors as one sentence with exit code 1."""

import os
import re
import subprocess
import sys

import pytest
from helpers.effort import one_in
from helpers.paths import WORKER
from helpers.worker.command_line import assert_fails, call_barnraise, run_barnraise
from typer.testing import CliRunner

from barnraise import __version__
from barnraise.cli import main

COMMANDS = (
    *("login", "plan", "limits", "join", "status", "fetch", "export", "serve", "sample"),
    *("prepare", "text", "verdict", "runs", "machines", "doctor"),
)


def test_help_lists_every_command():
    output = CliRunner().invoke(main.app, ["--help"], env={"COLUMNS": "100"}).output
    assert all(f" {command} " in output for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command):
    for option in ("-h", "--help"):
        result = CliRunner().invoke(main.app, [command, option], env={"COLUMNS": "100"})
        assert result.exit_code == 0 and "Usage:" in result.output
        assert "<bool>" not in result.output, "a switch takes no value"
        assert "RunAddress" not in result.output, "a class of ours is no word for people"
    narrow = CliRunner().invoke(main.app, [command, "--help"], env={"COLUMNS": "80"}).output
    assert not re.search(r"--[\w-]*…", narrow), "every option is there with its whole name"


def test_version_is_printed(tmp_path):
    result = run_barnraise(tmp_path, "--version")
    assert result.returncode == 0 and result.stdout.strip() == f"barnraise {__version__}"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("join", "a-run", "--eager"),  # a polite one would lower the priority of all tests
            "this machine is not enrolled yet: run `barnraise login URL` first",
        ),
        (("runs",), "this machine is not enrolled yet"),
        (("export", "a-run", "out"), "has never worked on 'a-run'"),
        (("verdict", "a-run"), "has never worked on 'a-run'"),
    ],
)
def test_command_names_the_enrolment_or_run_that_it_needs(tmp_path, arguments, sentence):
    assert_fails(call_barnraise(tmp_path, *arguments), sentence)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    one_in(
        4,
        [
            (("export", "a-run", "--push", "ada/a-run"), "has never worked on 'a-run'"),
            (("export", "a-run", "out"), "has never worked on 'a-run'"),
            (("verdict", "a-run"), "has never worked on 'a-run'"),
            (("sample", "a-run"), "has never worked on 'a-run'"),
            (("join", "a-run", "--eager"), "is not enrolled yet"),
            (("serve", "a-run"), "is not enrolled yet"),
            (("fetch", "a-run", "out"), "is not enrolled yet"),
        ],
    ),
)
def test_refusal_does_not_wait_for_the_import_of_torch(tmp_path, arguments, sentence):
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"  # importing it raises an error
        "from barnraise.cli.main import main\n"
        f"sys.argv = ['barnraise', *{arguments!r}]\n"
        "main()"
    )
    result = run_in_a_bare_environment(
        code, BARNRAISE_HOME=str(tmp_path), HF_TOKEN="hf_x", COLUMNS="200"
    )
    written = result.stderr.decode()
    assert result.returncode == 1 and sentence in written, written
    assert "torch" not in written and "Traceback" not in written


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["limits"], ["limits", "--json"], ["doctor", "--help"], ["runs", "--help"], ["x"]],
)
def test_reader_that_has_enough_is_no_error(tmp_path, arguments):
    read_end, write_end = os.pipe()
    os.close(read_end)  # as `head -1` does, sooner or later
    command = subprocess.run(
        [sys.executable, "-m", "barnraise", *arguments],
        env={**os.environ, "PYTHONPATH": str(WORKER), "BARNRAISE_HOME": str(tmp_path)},
        stdout=write_end,
        stderr=write_end if arguments == ["x"] else subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(write_end)
    assert command.returncode == 141 and not command.stderr


def test_state_directory_that_cannot_be_created_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    assert_fails(run_barnraise(tmp_path / "file" / "home", "status"), "Not a directory")


def run_in_a_bare_environment(code: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run Python code that has nothing but these variables."""
    variables = {"PYTHONPATH": str(WORKER), **environment}
    return subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, timeout=60, check=False
    )


def test_user_without_home_or_passwd_entry_gets_a_sentence(tmp_path, monkeypatch):
    """As in a container that runs with a number as its user."""
    code = (
        "import pwd, sys\n"
        "def unknown(*_): raise KeyError('uid not found')\n"
        "pwd.getpwuid = unknown\n"
        "from barnraise.cli.main import main\n"
        "from barnraise.coordinator_client.machine_monitor import shorten_line\n"
        "assert shorten_line('reads /a') == 'reads /a'\n"
        "for arguments in (['status'], ['text', 'inspect', 'hf:owner/name']):\n"
        "    sys.argv = ['barnraise', *arguments]\n"
        "    try: main()\n"
        "    except SystemExit as end: print(end.code)\n"
    )
    monkeypatch.chdir(tmp_path)
    result = run_in_a_bare_environment(code)
    written = result.stderr.decode()
    assert result.stdout.split() == [b"1", b"2"] and "Traceback" not in written, written
    assert "--home FOLDER" in written and "BARNRAISE_HOME" in written
    assert "with the variable HF_HOME" in written
    assert not list(tmp_path.iterdir()), "no folder that is called ~"


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_output_that_cannot_encode_a_character_is_printed(encoding, tmp_path):
    code = (
        "import sys\n"
        "from barnraise.cli import main\n"
        "@main.app.command('shout')\n"
        "def shout():\n"
        "    main.out.print('grüße → 雪')\n"
        "    raise main.BarnraiseError('no → 雪')\n"
        "sys.argv = ['barnraise', 'shout']\n"
        "main.main()"
    )
    result = run_in_a_bare_environment(code, PYTHONIOENCODING=encoding, HOME=str(tmp_path))
    assert result.returncode == 1 and b"Traceback" not in result.stderr, result.stderr
    assert b"? ?" in result.stdout and b"barnraise: no ? ?" in result.stderr
