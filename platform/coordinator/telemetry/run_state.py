"""Describe a run's state: the tiles, the notice and the cards that its page shows. Pure.

A page has one description, however it is drawn: the server writes it into the page, and live
messages carry it, so that the page's script decides nothing.
"""

from dataclasses import dataclass
from enum import StrEnum

from barnraise.formats import format_amount, format_count, format_duration
from barnraise.protocol.enums import RunStatus

BEFORE_FIRST_EXCHANGE = (
    "The shared weights are still those of the start: until the first exchange is through the "
    "validation loss does not fall."
)
MAX_SECONDS_LEFT = 1e10  # three centuries: a longer time is not shown
ENDED = (RunStatus.FINISHED, RunStatus.CANCELLED)


class HeadTile(StrEnum):
    """A figure in the page's head."""

    VALIDATION = "validation"
    TRAIN = "train"
    SCORE = "score"  # the share of the run's tasks that its last weights answered
    FINAL = "final"  # the last validation loss, or without any the last training loss
    RATE = "rate"
    MACHINES = "machines"  # that report, of those that have trained
    AGREE = "agree"  # only where two machines can be compared
    TOKENS = "tokens"
    CONTRIBUTORS = "contributors"  # machines that trained, and their people
    ELAPSED = "elapsed"
    CONFIRMED = "confirmed"  # people who confirm the final weights
    UPDATES = "updates"  # published, where nobody confirms the final weights


LOSSES = (HeadTile.VALIDATION, HeadTile.TRAIN)
# What the page of a run that has trained shows first, by the run's status.
TILES = {
    RunStatus.FINISHED: (
        HeadTile.FINAL,
        HeadTile.TOKENS,
        HeadTile.CONTRIBUTORS,
        HeadTile.ELAPSED,
        HeadTile.CONFIRMED,
    ),
    RunStatus.CANCELLED: (*LOSSES, HeadTile.TOKENS, HeadTile.CONTRIBUTORS, HeadTile.ELAPSED),
    RunStatus.PAUSED: (*LOSSES, HeadTile.TOKENS, HeadTile.MACHINES, HeadTile.AGREE),
    RunStatus.TRAINING: (*LOSSES, HeadTile.RATE, HeadTile.MACHINES, HeadTile.AGREE),
}


class Card(StrEnum):
    """A part of the page below its head that some states lack."""

    STEPS = "steps"  # what comes first: the owner's checklist, or how to join
    SAMPLES = "samples"
    CHARTS = "charts"
    PROGRESS = "progress"
    JOIN = "join"
    MODEL = "model"
    MACHINES = "machines"
    CONNECTIONS = "connections"
    CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class StateFacts:
    """What the description of a run follows from."""

    status: RunStatus
    tokens: int = 0  # trained
    budget: int = 1  # tokens to train
    rate: float = 0.0  # tokens/s
    has_loss: bool = False
    alive: int = 0  # machines that report
    paused: int = 0  # those of them that take no steps
    has_model: bool = False  # a machine has announced weights
    updates: int = 1  # published
    has_score: bool = False  # of the run's tasks
    confirmed_by: int = 0  # people; 0 unless the final weights count as confirmed


@dataclass(frozen=True)
class RunState:
    """What the page of a run shows of its state."""

    tiles: tuple[HeadTile, ...]
    cards: tuple[Card, ...]
    notice: str  # a sentence: how the run stands
    is_live: bool  # whether figures can still change


def describe_state(facts: StateFacts) -> RunState:
    """Describe a run by its status, and by whether it has trained at all."""
    has_trained = facts.has_loss or facts.tokens > 0
    is_over = facts.status in ENDED
    tiles = _choose_tiles(facts, has_trained)
    if facts.has_score and tiles:  # next to the loss
        tiles = (tiles[0], HeadTile.SCORE, *tiles[1:])
    return RunState(
        tiles=tiles,
        cards=_choose_cards(facts, has_trained, is_over),
        notice=_write_notice(facts, has_trained),
        is_live=facts.status not in (*ENDED, RunStatus.DRAFT),
    )


def _choose_tiles(facts: StateFacts, has_trained: bool) -> tuple[HeadTile, ...]:
    """Return the status's tiles; where nobody compares weights, other tiles take the places."""
    tiles = TILES.get(facts.status, ()) if has_trained else ()
    shown = {tile: tile for tile in HeadTile}
    if facts.alive < 2:
        is_paused = facts.status is RunStatus.PAUSED
        shown[HeadTile.AGREE] = HeadTile.ELAPSED if is_paused else HeadTile.TOKENS
    if not facts.confirmed_by:
        shown[HeadTile.CONFIRMED] = HeadTile.UPDATES
    return tuple(shown[tile] for tile in tiles)


def _choose_cards(facts: StateFacts, has_trained: bool, is_over: bool) -> tuple[Card, ...]:
    shown = {
        Card.STEPS: not has_trained and not is_over,
        Card.SAMPLES: has_trained,
        Card.CHARTS: has_trained,
        Card.PROGRESS: not is_over and facts.status is not RunStatus.DRAFT,
        Card.JOIN: has_trained and not is_over,
        Card.MODEL: facts.has_model,
        Card.MACHINES: has_trained or facts.alive > 0,
        Card.CONNECTIONS: has_trained and not is_over,
        Card.CHECKPOINTS: has_trained,
    }
    return tuple(card for card, is_shown in shown.items() if is_shown)


def _write_notice(facts: StateFacts, has_trained: bool) -> str:
    machines = format_amount(facts.alive, "machine")
    match facts.status:
        case RunStatus.DRAFT:
            return "A draft: it starts once it is launched."
        case RunStatus.RECRUITING:
            return "Open to machines: training starts when they are ready."
        case RunStatus.TRAINING if not has_trained and not facts.paused:
            return f"{machines} joined: the first loss appears in a moment."
        case RunStatus.TRAINING:
            return _describe_training(facts)
        case RunStatus.PAUSED if facts.alive:
            verb = "waits" if facts.alive == 1 else "wait"
            return f"Paused. {machines} {verb} with all the progress."
        case RunStatus.PAUSED:
            return "Paused. Its machines continue when it resumes."
        case RunStatus.FINISHED if has_trained:
            return f"Finished after {_describe_total(facts)}."
        case RunStatus.FINISHED:
            return "Finished before it trained."
        case RunStatus.CANCELLED if has_trained:
            return "Cancelled. Machines keep what they have trained."
        case RunStatus.CANCELLED:
            return "Cancelled before it trained."


def _describe_training(facts: StateFacts) -> str:
    """Write how many machines train and how many are paused, and when the budget is spent."""
    paused, training = facts.paused, facts.alive - facts.paused
    are_paused = f"{paused:,} {'is' if paused == 1 else 'are'} paused"
    if paused and training <= 0:
        return f"No machine trains now: {are_paused}, for the reason that stands in the table."
    sentence = f"{format_amount(training, 'machine')} train{'s' if training == 1 else ''}"
    if paused:
        sentence += f", {are_paused}"
    left = facts.budget - facts.tokens
    if 0 < left < MAX_SECONDS_LEFT * facts.rate:
        sentence += f", about {format_duration(left / facts.rate)} left"
    waits = facts.alive > 0 and facts.updates == 0
    return f"{sentence}. {BEFORE_FIRST_EXCHANGE}" if waits else f"{sentence}."


def _describe_total(facts: StateFacts) -> str:
    """Write how many tokens were trained, and why they are more than the budget."""
    tokens, budget = format_count(facts.tokens), format_count(facts.budget)
    if facts.tokens <= facts.budget or tokens == budget:
        return f"{tokens} tokens"
    return f"{tokens} tokens: what was under way at {budget} counts as well"
