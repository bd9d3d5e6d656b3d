"""`barnraise text inspect`: its output for people and programs, and its exit codes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from barnraise.cli.main import app
from barnraise.cli.text import round_count

LINES = "".join(f"Line {i} of a text that can be used.\n" for i in range(80))


def inspect(*arguments: object, columns: int = 120):
    return CliRunner().invoke(
        app, ["text", "inspect", *map(str, arguments)], env={"COLUMNS": str(columns)}
    )


@pytest.fixture
def corpus(tmp_path) -> Path:
    """Create a folder with a text and a file of passwords."""
    (tmp_path / "a.txt").write_text(LINES)
    (tmp_path / ".env").write_text("KEY=1")
    return tmp_path


def test_inspect_prints_json_and_exits_with_0(corpus):
    result = inspect(corpus, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {
        "files": [
            {"path": f"{corpus}/a.txt", "format": "text", "documents": 1, "bytes": len(LINES)}
        ],
        "skipped": [{"path": f"{corpus}/.env", "reason": "may hold passwords or keys"}],
        "documents": 1,
        "bytes": len(LINES),
        "duplicates": 0,
        "warnings": [],
    }


@pytest.mark.parametrize(
    ("content", "sentence"),
    [("hi", "too short"), ("<html>", "a web page"), ('{"a": 1}\n{"a": 2}\n', "no column holds")],
)
def test_inspect_of_what_cannot_be_used_exits_with_2(tmp_path, content, sentence):
    path = tmp_path / "a.jsonl" if content.startswith("{") else tmp_path / "a.txt"
    path.write_text(content)
    result = inspect(path, "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 2 and sentence in report["warnings"][-1]
    assert sentence in result.stderr and "Traceback" not in result.output
    assert inspect(path).exit_code == 2


@pytest.mark.parametrize(
    "place",
    [
        *("/nowhere/at/all", "hf:one", "ftp://a.example/b", "http://127.0.0.1/a.txt", "", " "),
        *("x" * 300 + "#text", "https://huggingface.co/datasets/owner/name"),
    ],
)
def test_inspect_of_a_place_that_cannot_be_read_exits_with_2(place):
    result = inspect(place, "--json")
    assert result.exit_code == 2 and json.loads(result.stdout)["files"] == []


@pytest.mark.parametrize("output", ["people", "programs"])
def test_passwords_in_addresses_are_not_printed(output):
    place = "http://ida:s3cret@127.0.0.1/a.txt?token=t0k3n"
    printed = inspect(place, *(["--json"] if output == "programs" else [])).output
    assert "127.0.0.1" in printed and "s3cret" not in printed and "t0k3n" not in printed


def test_inspect_shows_files_reasons_totals_and_first_lines(corpus, monkeypatch):
    (corpus / "b.txt").write_text(LINES)
    monkeypatch.chdir(corpus)  # short paths fit into the table
    output = inspect(".").output
    for shown in (
        "a.txt",
        ".env",
        "may hold passwords or keys",
        "1 (1 copy left out)",
        "characters",
        "about",
        "characters of a sample do not come back",
        "│ Line 0 of a text",
    ):
        assert shown in output, shown


@pytest.mark.parametrize("width", [110, 80, 60])
def test_inspect_fits_the_terminal_and_shows_every_name(corpus, width):
    name = "a-rather-long-name-of-a-chapter-" * 3 + ".txt"
    (corpus / name).write_text(LINES[::-1])
    shown = inspect(corpus, columns=width).output
    assert max(map(len, shown.splitlines())) <= width, shown
    assert name in "".join(line.split("  text ")[0].strip() for line in shown.splitlines())
    assert ("encoding" in shown) == (width >= 80)


def test_text_cannot_control_the_terminal(corpus):
    (corpus / "a.txt").write_text("\x1b[2J\x1b]0;title\x07\u202e" + LINES)
    assert not {"\x1b", "\x07", "\u202e"} & set(inspect(corpus).output)


def test_estimates_are_rounded_to_two_digits():
    assert [round_count(n) for n in (7, 42, 1234, 987_654)] == [7, 42, 1200, 990_000]
