"""Multiple-choice tasks of a run, their scores, and other texts that a run's owner publishes.

All of it is text for people: its owner chose it, it is short, and the site shows it. What machines
train on never passes through a site.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeGuard, cast

from pydantic import Field, field_validator, model_validator

from barnraise.errors import TextError
from barnraise.protocol.types import Count, Digest, Message, SampleText

MAX_TASK_TEXT = 60_000  # characters of the tasks that an owner publishes
MAX_CHOICES = 20  # of one task
MAX_PREVIEWS, PREVIEW_LENGTH = 10, 600  # documents, and characters of each
EXAMPLE = '{"question": "2 + 2 =", "choices": ["3", "4"], "answer": 1}'


@dataclass(frozen=True)
class ChoiceTask:
    """A question with its choices."""

    question: str
    choices: tuple[str, ...]
    answer: int  # the place of the right choice, from 0


def parse_tasks(text: str) -> list[ChoiceTask]:
    """Parse tasks, one JSON object a line. Pure.

    Raises:
        TextError: there are none, or a line is no task; the sentence names it.
    """
    tasks = list(_parse_lines(text))
    if not tasks:
        raise TextError(f"there are no tasks: each line is one, such as {EXAMPLE}")
    return tasks


def _parse_lines(text: str) -> Iterator[ChoiceTask]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield _parse_task(json.loads(line))
        except (ValueError, RecursionError):
            raise TextError(
                f"line {number} is no JSON: each line is a task, such as {EXAMPLE}"
            ) from None
        except TextError as error:
            raise TextError(f"line {number}: {error}") from None


def _parse_task(value: object) -> ChoiceTask:
    fields = cast("dict[str, object]", value) if isinstance(value, dict) else {}
    question, listed, answer = (fields.get(name) for name in ("question", "choices", "answer"))
    if not _is_text(question):
        raise TextError(f"'question' must be a text that is not empty, as in {EXAMPLE}")
    choices = cast("list[object]", listed) if isinstance(listed, list) else []
    if not 2 <= len(choices) <= MAX_CHOICES:
        raise TextError(f"'choices' must be a list of 2 to {MAX_CHOICES} texts")
    texts: list[str] = []
    for place, choice in enumerate(choices):
        if not _is_text(choice):
            raise TextError(f"choice {place} must be a text that is not empty")
        if choice in texts:
            raise TextError(f"choice {place} is the same as an earlier one")
        texts.append(choice)
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(texts):
        raise TextError(
            f"'answer' must be the place of the right choice, from 0 to {len(texts) - 1}"
        )
    return ChoiceTask(question, tuple(texts), answer)


def _is_text(value: object) -> TypeGuard[str]:
    """Return whether a value is a text with something in it, and without half a character."""
    return isinstance(value, str) and bool(value.strip()) and not _has_surrogates(value)


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


class TaskFile(Message):
    """The tasks of a run, as `parse_tasks` reads them. The digest of the text names them."""

    text: SampleText = Field(max_length=MAX_TASK_TEXT)

    @field_validator("text")
    @classmethod
    def check_tasks(cls, text: str) -> str:
        """Refuse a text that is no tasks."""
        try:
            parse_tasks(text)
        except TextError as error:
            raise ValueError(str(error)) from None
        return text


class PreviewDocument(Message):
    """The beginning of a document of a run's text, which its owner chose to show."""

    text: SampleText = Field(min_length=1, max_length=PREVIEW_LENGTH)


class PublishedTexts(Message):
    """What a run's owner publishes with it; as a request, null leaves what there is."""

    tasks: TaskFile | None = None
    preview: list[PreviewDocument] | None = Field(default=None, max_length=MAX_PREVIEWS)


class TaskScore(Message):
    """How many of a run's tasks its weights answered, as a machine measured it."""

    tasks: Digest  # of the tasks' text
    tokens: Count  # of the ledger, that the weights were trained on
    correct: Count
    count: int = Field(ge=1, le=MAX_TASK_TEXT)

    @model_validator(mode="after")
    def check_share(self) -> "TaskScore":
        """Refuse more right answers than tasks."""
        if self.correct > self.count:
            raise ValueError("'correct' must not exceed 'count'")
        return self
