"""Test the worker's log file, and how it is shown."""

import logging
import threading

import pytest
from typer.testing import CliRunner

from barnraise.cli import log_file
from barnraise.cli.log_file import WorkerLogHandler, find_newest_log, follow_log, read_last_lines
from barnraise.cli.main import app


def emit(handler: logging.Handler, *messages: str) -> None:
    for message in messages:
        handler.emit(logging.LogRecord("barnraise", logging.INFO, "", 0, message, None, None))


def test_two_workers_of_one_home_write_to_two_files(tmp_path):
    first, second = WorkerLogHandler(tmp_path), WorkerLogHandler(tmp_path)
    emit(first, "one")
    emit(second, "two")
    second.close()
    assert "one" in (tmp_path / "worker.log").read_text()
    assert "two" in (tmp_path / "worker-2.log").read_text()
    first.close()
    third = WorkerLogHandler(tmp_path)
    emit(third, "three")
    third.close()
    assert [line[-5:] for line in read_last_lines(tmp_path / "worker.log", 9)][-1] == "three"


def test_log_rotates_and_its_last_lines_come_from_both_files(tmp_path, monkeypatch):
    monkeypatch.setattr(log_file, "MAX_LOG_BYTES", 2_000)
    handler = WorkerLogHandler(tmp_path)
    emit(handler, *(f"line {number}" for number in range(100)))
    handler.close()
    assert (tmp_path / "worker.log").stat().st_size <= 2_000
    shown = read_last_lines(tmp_path / "worker.log", 50)
    assert [line.split()[-1] for line in shown] == [str(number) for number in range(50, 100)]


def test_log_that_cannot_be_written_is_one_sentence(tmp_path, capsys, monkeypatch):
    handler = WorkerLogHandler(tmp_path)
    monkeypatch.setattr(handler, "baseFilename", str(tmp_path / "missing" / "worker.log"))
    emit(handler, "one", "two")
    handler.close()
    printed = capsys.readouterr().err
    assert printed.count("cannot be written now") == 1 and "Traceback" not in printed


def test_following_shows_new_lines_also_after_a_rotation(tmp_path):
    path = tmp_path / "worker.log"
    path.write_text("old\n")
    seen: list[str] = []
    has_seen = {"grüße": threading.Event(), "rotated": threading.Event()}

    def follow() -> None:
        for line in follow_log(path):
            seen.append(line)
            has_seen[line].set()
            if line == "rotated":
                return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    while not has_seen["grüße"].wait(0.5):  # it begins to follow at some moment
        with path.open("a", encoding="utf-8") as file:
            file.write("grüße\n")
    path.rename(path.with_suffix(".log.1"))
    path.write_text("rotated\n" if path.with_suffix(".log.1").stat().st_size > 8 else "")
    assert has_seen["rotated"].wait(60), seen
    assert "old" not in seen


def test_logs_shows_the_newest_file_or_says_that_there_is_none(tmp_path):
    result = CliRunner().invoke(app, ["logs", "--home", str(tmp_path)])
    assert "no log yet" in str(result.exception)
    handler = WorkerLogHandler(tmp_path / "logs")
    emit(handler, "[bold]as it is[/]")
    handler.close()
    assert find_newest_log(tmp_path / "logs") == tmp_path / "logs" / "worker.log"
    result = CliRunner().invoke(app, ["logs", "-n", "5", "--home", str(tmp_path)])
    assert "INFO [bold]as it is[/]" in result.output


@pytest.mark.parametrize("count", [0, 1])
def test_as_many_lines_are_shown_as_requested(tmp_path, count):
    path = tmp_path / "worker.log"
    path.write_text("a\nb\n")
    assert read_last_lines(path, count) == ["b"][:count]
