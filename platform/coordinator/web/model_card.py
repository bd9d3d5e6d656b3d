"""What a run's page says of its model: who shares it now, how to fetch it, which checkpoints count.

Pure, except for `load_model_card`, which reads the checkpoints.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from coordinator.lib.ttl_cache import TtlCache
from coordinator.runs.models import Run
from coordinator.telemetry.checkpoints import CheckpointRow, list_checkpoint_rows
from coordinator.telemetry.history import load_validation_losses
from coordinator.telemetry.task_scores import RecordedScore, load_scores

MAX_CHECKPOINTS = 100  # the newest ones, among which a card chooses
MAX_SHOWN = 8  # lines of the table; the others are folded
MAX_NAMES = 5  # of machines that share the model
CARD_SECONDS = 2.0  # for which a card is cached: anybody may ask for it as often as they like
BEST, LAST = "best", "last"


@dataclass(frozen=True)
class CheckpointLine:
    """A checkpoint with what a person chooses by."""

    row: CheckpointRow
    loss: float | None  # of validation; None if none was measured at these tokens
    score: RecordedScore | None = None  # of the run's tasks; None if it was not evaluated
    label: str = ""  # "best", "last", "best, last" or ""

    @property
    def can_be_fetched(self) -> bool:
        """Whether a machine that is online has exactly these weights."""
        return self.row.serving > 0


@dataclass(frozen=True)
class ModelCard:
    """The model of a run."""

    slug: str  # the run's address
    # The newest checkpoint that somebody has whose word counts in the run; the newest one, if there
    # is none of them; None before the first one.
    last: CheckpointLine | None
    sharing: tuple[str, ...]  # names of machines that send the last checkpoint now
    shown: tuple[CheckpointLine, ...]  # the best, the last and every n-th one
    folded: tuple[CheckpointLine, ...]  # the others, and those that nobody can send
    score: RecordedScore | None = None  # the last one, of whatever weights

    @property
    def has_scores(self) -> bool:
        """Whether a checkpoint was evaluated on the run's tasks."""
        return any(line.score for line in (*self.shown, *self.folded))

    @property
    def others_sharing(self) -> int:
        """How many machines share it beyond those that are named."""
        return self.last.row.serving - len(self.sharing) if self.last else 0

    @property
    def fetch_command(self) -> str:
        """The command that downloads the model for transformers."""
        return f"barnraise fetch {self.slug} model"

    @property
    def transformers_snippet(self) -> str:
        """A Python program that writes text with the downloaded model."""
        return (
            "from transformers import pipeline\n"
            'generate = pipeline("text-generation", model="model")\n'
            'print(generate("Once upon a time", max_new_tokens=40)[0]["generated_text"])'
        )

    @property
    def ollama_commands(self) -> str:
        """The commands that download the model for Ollama and start it."""
        name = self.slug if self.slug.isascii() else "model"  # as Ollama's names must be
        return (
            f"barnraise fetch {self.slug} model --format gguf\n"
            f"ollama create {name} -f model/Modelfile\n"
            f"ollama run {name}"
        )


# By run, its newest checkpoint and its status: a page that learns of these asks for the new card.
_cards: TtlCache[object, "ModelCard"] = TtlCache(CARD_SECONDS)


def load_model_card(run: Run) -> ModelCard:
    """Return what a run's page says of its model, at most `CARD_SECONDS` old."""
    newest = run.checkpoints.values_list("pk", flat=True).first()
    return _cards.get((run.pk, newest, run.status), lambda: _read_model_card(run))


def _read_model_card(run: Run) -> ModelCard:
    """Read a run's checkpoints and their losses."""
    rows = list_checkpoint_rows(run, MAX_CHECKPOINTS)
    if not rows:
        return build_model_card(run.slug, rows, {})
    return build_model_card(run.slug, rows, dict(load_validation_losses(run)), load_scores(run))


def build_model_card(
    slug: str,
    rows: Sequence[CheckpointRow],
    losses: Mapping[int, float],
    scores: Mapping[int, RecordedScore] = MappingProxyType({}),
) -> ModelCard:
    """Choose the checkpoints that a page shows; rows descend, losses and scores are by tokens."""
    places = [(row, row.checkpoint.tokens) for row in rows]
    lines = [CheckpointLine(row, losses.get(at), scores.get(at)) for row, at in places]
    # One person may announce weights that nobody else has, and any loss of them.
    trusted = [line for line in lines if line.row.confirmed] or lines
    measured = [line for line in trusted if line.loss is not None and not line.row.disputed]
    best = min(measured, key=_loss_of, default=None)
    newest = next((line for line in lines if line.row.people), lines[0] if lines else None)
    step = max(1, -(-len(lines) // MAX_SHOWN))
    shown, folded = [], []
    for place, line in enumerate(lines):
        labels = [BEST] if line is best else []
        if line is newest:
            labels.append(LAST)
        label = ", ".join(labels)
        labelled = replace(line, label=label)
        is_chosen = bool(label) or (place % step == 0 and line.can_be_fetched)
        (shown if is_chosen else folded).append(labelled)
    last = next((line for line in shown if LAST in line.label), None)
    sharing = last.row.holders[: last.row.serving][:MAX_NAMES] if last else ()
    score = list(scores.values())[-1] if scores else None
    return ModelCard(slug, last, sharing, tuple(shown), tuple(folded), score)


def _loss_of(line: CheckpointLine) -> float:
    assert line.loss is not None
    return line.loss
