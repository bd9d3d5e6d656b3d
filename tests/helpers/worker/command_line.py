"""Run the `barnraise` command as a person does, and check its errors."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from helpers.paths import WORKER
from typer.testing import CliRunner

from barnraise.cli.main import app, main

RUN = "01890000-0000-7000-8000-000000000001"
EXCHANGE = {  # of a worker's status file
    "round_steps": 12,
    "scheme": "dense4",
    "density": 1.0,
    "bits_per_parameter": 4.01,
    "sent_rate": 50_000.0,
    "received_rate": 1_500_000.0,
    "uplink_rate": 200_000.0,
    "lag": 3,
}


def run_barnraise(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a session of its own, with `home` as the state directory.

    A polite worker lowers the priority of its whole session, which must not be that of the tests.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(WORKER),
        "BARNRAISE_HOME": str(home),
        "COLUMNS": "200",
    }
    return subprocess.run(
        [sys.executable, "-m", "barnraise", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        start_new_session=True,
    )


def call_barnraise(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as `run_barnraise` does, but in this process, which takes no second."""
    output, errors, code = io.StringIO(), io.StringIO(), 0
    environment = {"BARNRAISE_HOME": str(home), "COLUMNS": "200"}
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(sys, "argv", ["barnraise", *arguments]),
        redirect_stdout(output),
        redirect_stderr(errors),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code
    return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())


def invoke(*arguments: str, typed: str | None = None) -> str:
    """Return the output of a command in this process; raise what the command raised."""
    result = CliRunner().invoke(app, list(arguments), input=typed)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code < 2, result.output
    return result.output


def assert_fails(result: subprocess.CompletedProcess[str], sentence: str) -> None:
    """Assert that the command printed this sentence, and no traceback, and exited with 1."""
    assert result.returncode == 1, result
    assert sentence in result.stderr and "Traceback" not in result.stderr, result.stderr
    assert result.stderr.startswith("barnraise: ") or "\nbarnraise: " in result.stderr
