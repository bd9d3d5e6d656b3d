"""Run `barnraise evaluate`: answer multiple-choice tasks with a run's current weights."""

from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from barnraise.cli.addresses import RunArgument
from barnraise.cli.console import errors, out
from barnraise.cli.machine_options import HomeOption, open_state_dir
from barnraise.cli.progress import show_progress
from barnraise.cli.run_folders import refuse_unknown_run
from barnraise.cli.sample import MemoryOption
from barnraise.cli.site_access import open_site
from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.errors import CoordinatorError, TextError
from barnraise.formats import format_bytes, format_share, parse_bytes
from barnraise.protocol.evaluation import (
    MAX_TASK_TEXT,
    PublishedTexts,
    TaskFile,
    TaskScore,
    parse_tasks,
)
from barnraise.protocol.signing import digest
from barnraise.protocol.types import Message
from barnraise.state_dir import StateDir

MAX_FILE_BYTES = 64 << 20  # of tasks: a larger file is no list of tasks


def evaluate(
    run: RunArgument,
    tasks: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Other tasks than the run's, for your eyes only."),
    ] = None,
    publish: Annotated[
        bool,
        typer.Option("--publish", help="Make the file the tasks of your run; evaluate nothing."),
    ] = False,
    memory: MemoryOption = "",
    home: HomeOption = None,
) -> None:
    """Answer multiple-choice tasks with the weights that this machine has saved last.

    Each line of tasks is {"question": "2 + 2 =", "choices": ["3", "4"], "answer": 1}. The model
    answers the choice that is likeliest for its length. The score of the run's own tasks stands
    on its page. One layer is unpacked at a time, so a model may be larger than memory.
    """
    resident = parse_bytes(memory) if memory else None
    text = read_tasks(tasks) if tasks else ""
    state_dir = open_state_dir(home)
    if publish:
        if not text:
            raise TextError("name the file that is published: --tasks FILE.jsonl")
        open_site(state_dir, run)
        publish_tasks(state_dir, run.name, text)
        return
    refuse_unknown_run(state_dir, run.name)
    score = measure_score(state_dir, run.name, text or fetch_tasks(state_dir, run.name), resident)
    share = score.correct / score.count
    out.print_sentence(
        f"{score.correct:,} of {score.count:,} tasks right ({format_share(share)}), "
        f"after {score.tokens:,} tokens"
    )
    if not text:
        _submit_score(state_dir, run.name, score)


def read_tasks(path: Path) -> str:
    """Read a file of tasks, and check that it is one.

    Raises:
        TextError: it cannot be read, or a line of it is no task.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        text = content.decode("utf-8-sig").replace("\r\n", "\n")
        if len(content) > MAX_FILE_BYTES:
            raise TextError(f"is larger than {format_bytes(MAX_FILE_BYTES)}")
        parse_tasks(text)
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TextError(f"{path} is no text in UTF-8") from None
    except TextError as error:
        raise TextError(f"{path}: {error}") from None
    return text


def request_of_run(
    state_dir: StateDir, method: str, run: str, part: str, message: Message | None = None
) -> Any:
    """Send a message about a run to the site of this machine, and return the answer's JSON."""
    body = message and message.model_dump(mode="json")
    with closing(CoordinatorClient.from_state_dir(state_dir)) as site:
        return site.request_json(method, "runs", run, part, body=body)


def publish_tasks(state_dir: StateDir, run: str, text: str) -> None:
    """Make a text the tasks of a run of this machine's owner.

    Raises:
        TextError: it is too long or has characters that no page shows.
        CoordinatorError: the site refuses it.
    """
    if len(text) > MAX_TASK_TEXT:
        raise TextError(
            f"the file has {len(text):,} characters, and a run's tasks {MAX_TASK_TEXT:,} at most"
        )
    try:
        published = PublishedTexts(tasks=TaskFile(text=text))
    except ValueError:
        raise TextError("the file has control characters, which no page shows") from None
    request_of_run(state_dir, "POST", run, "published", published)
    out.print_sentence(f"'{escape(run)}' has {len(parse_tasks(text)):,} tasks now.")


def fetch_tasks(state_dir: StateDir, run: str) -> str:
    """Fetch the tasks of a run.

    Raises:
        TextError: its owner has published none.
    """
    answer = request_of_run(state_dir, "GET", run, "published")
    published = PublishedTexts.model_validate(answer)
    if published.tasks is None:
        raise TextError(f"the owner of '{run}' has published no tasks: name some with --tasks FILE")
    return published.tasks.text


def measure_score(state_dir: StateDir, run: str, text: str, resident: int | None) -> TaskScore:
    """Answer all tasks with the saved weights, and show how far that is."""
    from barnraise.text.prompt_codec import PromptCodec
    from barnraise.training.evaluation import answer_tasks, encode_tasks
    from barnraise.training.saved_model import open_saved_model

    tasks = parse_tasks(text)
    with open_saved_model(state_dir, run) as saved, show_progress() as progress:
        model = saved.spec.model
        codec = PromptCodec(saved.tokenizer, model.vocabulary)
        texts = encode_tasks(tasks, codec, model.context)
        sampler = saved.create_sampler(resident)
        correct = 0
        answers = answer_tasks(sampler, tasks, texts, model)
        for number, (task, answer) in enumerate(zip(tasks, answers, strict=True), 1):
            correct += answer == task.answer
            progress("answering", number, len(tasks))
        return TaskScore(
            tasks=digest(text), tokens=saved.header.tokens, correct=correct, count=len(tasks)
        )


def _submit_score(state_dir: StateDir, name: str, score: TaskScore) -> None:
    """Store a score of the run's own tasks, and send it to the site, which may not list it."""
    from barnraise.training.evaluation import save_score
    from barnraise.training.join import find_saved_run

    saved = find_saved_run(state_dir, name)
    assert saved is not None, "its weights were read"
    save_score(state_dir.path / "runs" / saved.id, score)
    try:
        request_of_run(state_dir, "POST", saved.id, "scores", score)
    except CoordinatorError as error:
        errors.print_sentence(f"The run's page does not show it: {escape(str(error))}")
