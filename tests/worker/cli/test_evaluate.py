"""What people type to evaluate, or to choose what is published: sentences for all that is wrong."""

import pytest
from helpers.worker.command_line import assert_fails, call_barnraise

from barnraise.cli.evaluate import read_tasks
from barnraise.cli.prepare import choose_preview
from barnraise.errors import TextError

GOOD = '{"question": "2 + 2 =", "choices": ["3", "4"], "answer": 1}'
DOCUMENTS = ["one", "two\x1b[2J", " \u2028 "]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"\xff\xfe\x00", "is no text in UTF-8"),
        (b"", "there are no tasks"),
        (GOOD.encode() + b"\nnonsense", "line 2 is no JSON"),
    ],
)
def test_file_that_is_no_tasks_is_refused_by_its_name(content, sentence, tmp_path):
    path = tmp_path / "tasks.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TextError, match=f"tasks.jsonl.*{sentence}"):
        read_tasks(path)


def test_tasks_of_other_systems_are_read(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode() + b"\r\n")
    assert read_tasks(path) == GOOD + "\n"
    with pytest.raises(TextError, match="cannot be read"):
        read_tasks(tmp_path)


def test_evaluation_of_an_unknown_run_is_refused_at_once(tmp_path):
    assert_fails(call_barnraise(tmp_path, "evaluate", "a-run"), "has never worked on 'a-run'")
    published = call_barnraise(tmp_path, "evaluate", "a-run", "--publish")
    assert_fails(published, "name the file that is published")


@pytest.mark.parametrize(
    ("choice", "shown"),
    [
        ("none", []),
        ("", []),
        ("all", ["one", "two\ufffd[2J", "\ufffd"]),
        ("2, 1 2", ["two\ufffd[2J", "one"]),
    ],
)
def test_chosen_documents_are_shown_without_control_characters(choice, shown):
    assert choose_preview(DOCUMENTS, choice, yes=True) == shown


@pytest.mark.parametrize("choice", ["0", "4", "-1", "some", "1,all", "9" * 5_000])
def test_choice_that_names_no_document_is_refused(choice):
    with pytest.raises(TextError, match="takes numbers from 1 to 3, all or none"):
        choose_preview(DOCUMENTS, choice, yes=False)


def test_nothing_is_published_without_a_choice():
    assert choose_preview(DOCUMENTS, None, yes=True) == []
    assert choose_preview([], None, yes=False) == []
