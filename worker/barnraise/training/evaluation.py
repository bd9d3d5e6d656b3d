"""Answer multiple-choice tasks with a run's weights, by length-normalised likelihood.

The answer of a model is the choice whose text has the highest log-likelihood after the question,
divided by the choice's bytes: "acc_norm" of the LM Evaluation Harness (Gao et al. 2021).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from barnraise.durable_io import write_atomically
from barnraise.errors import TextError
from barnraise.protocol.evaluation import ChoiceTask, TaskScore
from barnraise.spec import ModelSpec
from barnraise.swap.sampler import Continuation, Sampler
from barnraise.text.prompt_codec import PromptCodec

SCORE_FILE = "score.json"  # in a run's folder: the last score of the run's own tasks
BATCH_BYTES = 64 << 20  # of texts' values between two layers, for which the weights are read once


def encode_tasks(
    tasks: Sequence[ChoiceTask], codec: PromptCodec, context: int
) -> list[list[Continuation]]:
    """Return the continuations of each task, one a choice.

    A choice follows its question after a space, and is tokenised together with it.

    Raises:
        TextError: a task is longer than the context, or the tokenizer's library fails.
    """
    encoded = []
    for number, task in enumerate(tasks, 1):
        question = task.question.rstrip()
        prompt = len(codec.encode(question))
        texts = []
        for choice in task.choices:
            joint = choice if choice[0].isspace() else f" {choice}"
            tokens = codec.encode(question + joint)
            if len(tokens) > context:
                raise TextError(
                    f"task {number} has {len(tokens):,} tokens with one of its choices, and the "
                    f"model reads at most {context:,}: shorten it"
                )
            # A token may reach from the question into the choice: at least the last one counts.
            count = max(1, len(tokens) - prompt)
            if count == len(tokens):  # nothing stands before it but the end of another document
                tokens = [codec.end, *tokens]
            texts.append(Continuation(tokens, count))
        encoded.append(texts)
    return encoded


def answer_tasks(
    sampler: Sampler,
    tasks: Sequence[ChoiceTask],
    texts: Sequence[list[Continuation]],
    model: ModelSpec,
) -> Iterator[int]:
    """Yield the place of the choice that the model answers, for each task.

    A batch of tasks passes all layers together, so that the weights are read once for it.
    """
    most_tokens = max(1, BATCH_BYTES // (4 * model.width))
    begin = 0
    while begin < len(tasks):
        end, tokens = begin, 0
        while end < len(tasks) and (end == begin or tokens < most_tokens):
            tokens += sum(len(text.tokens) for text in texts[end])
            end += 1
        batch = [text for choices in texts[begin:end] for text in choices]
        scores = iter(sampler.score(batch))
        for task in tasks[begin:end]:
            lengths = [len(choice.encode()) for choice in task.choices]
            means = [next(scores) / length for length in lengths]
            yield means.index(max(means))
        begin = end


def save_score(folder: Path, score: TaskScore) -> None:
    """Store the last score of a run's own tasks, for the model card."""
    write_atomically(folder / SCORE_FILE, score.model_dump_json().encode())


def read_score(folder: Path) -> TaskScore | None:
    """Return the stored score; None if there is none that can be read."""
    try:
        return TaskScore.model_validate_json((folder / SCORE_FILE).read_bytes())
    except (OSError, ValidationError):
        return None
