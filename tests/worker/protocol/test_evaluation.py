"""Tasks are read line by line, and whatever is wrong with one is a sentence that names its line."""

import json

import pytest
from pydantic import ValidationError

from barnraise.errors import TextError
from barnraise.protocol.evaluation import (
    MAX_TASK_TEXT,
    ChoiceTask,
    TaskFile,
    TaskScore,
    parse_tasks,
)

GOOD = {"question": "2 + 2 =", "choices": ["3", "4"], "answer": 1}


def line(**changed: object) -> str:
    return json.dumps({**GOOD, **changed})


def test_tasks_are_read_and_empty_lines_and_other_fields_ignored():
    text = f"{line()}\n\n  \n{line(question='Öl?', subject='chemistry')}\n"
    assert parse_tasks(text) == [
        ChoiceTask("2 + 2 =", ("3", "4"), 1),
        ChoiceTask("Öl?", ("3", "4"), 1),
    ]


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ("no json", 'line 2 is no JSON: each line is a task, such as {"question"'),
        ("[" * 100_000, "line 2 is no JSON"),
        ('{"answer": ' + "9" * 5_000 + "}", "line 2 is no JSON"),
        ("[1]", "line 2: 'question' must be a text that is not empty"),
        (line(question=" "), "line 2: 'question' must be a text that is not empty"),
        (line(choices=["4"]), "line 2: 'choices' must be a list of 2 to 20 texts"),
        (line(choices="34"), "line 2: 'choices' must be a list of 2 to 20 texts"),
        (line(choices=[str(n) for n in range(21)]), "line 2: 'choices' must be a list of 2 to 20"),
        (line(choices=["3", ""]), "line 2: choice 1 must be a text that is not empty"),
        (line(choices=["3", 4]), "line 2: choice 1 must be a text that is not empty"),
        (line(choices=["\ud800", "4"]), "line 2: choice 0 must be a text that is not empty"),
        (line(choices=["4", "4"]), "line 2: choice 1 is the same as an earlier one"),
        (line(answer=2), "line 2: 'answer' must be the place of the right choice, from 0 to 1"),
        (line(answer=-1), "line 2: 'answer' must be the place of the right choice, from 0 to 1"),
        (line(answer=True), "line 2: 'answer' must be the place of the right choice"),
        (line(answer="1"), "line 2: 'answer' must be the place of the right choice"),
    ],
)
def test_line_that_is_no_task_is_named_in_a_sentence(bad, sentence):
    with pytest.raises(TextError) as refused:
        parse_tasks(f"{line()}\n{bad}")
    assert str(refused.value).startswith(sentence)


def test_text_without_tasks_is_refused():
    with pytest.raises(TextError, match="there are no tasks"):
        parse_tasks("\n \n")


@pytest.mark.parametrize(
    "text", ["no json", "", line() + "\n" + " " * MAX_TASK_TEXT, line() + "\0"]
)
def test_published_tasks_are_valid_short_and_printable(text):
    assert TaskFile(text=line()).text == line()
    with pytest.raises(ValidationError):
        TaskFile(text=text)


def test_score_has_no_more_right_answers_than_tasks():
    assert TaskScore(tasks="a" * 64, tokens=5, correct=3, count=3).correct == 3
    with pytest.raises(ValidationError, match="must not exceed"):
        TaskScore(tasks="a" * 64, tokens=5, correct=4, count=3)
