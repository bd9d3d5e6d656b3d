"""Scores of a run's tasks: how many of them its weights answered, for its page.

As with samples, only machines count whose owners' word counts in the run: the run's owner, and
people whose updates others vouch for.
"""

from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.db import models
from django.utils import timezone

from barnraise.protocol.evaluation import TaskScore
from coordinator.accounts.models import Machine
from coordinator.eventlog import writer
from coordinator.fleet.witnesses import vouched_people
from coordinator.lib.exceptions import UserError
from coordinator.lib.ttl_cache import TtlCache
from coordinator.runs.models import Run
from coordinator.runs.published_texts import PublishedText

MAX_SHOWN = 200  # scores of a run that are read, those at the most tokens first


class RecordedScore(models.Model):
    """What a machine measured of a run's tasks with the weights at `tokens`."""

    if TYPE_CHECKING:
        run_id: UUID
        machine_id: UUID

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="scores")
    machine = models.ForeignKey(Machine, on_delete=models.CASCADE, related_name="+")
    tokens = models.BigIntegerField()
    tasks = models.CharField(max_length=64)  # the digest of their text
    correct = models.PositiveIntegerField()
    count = models.PositiveIntegerField()
    at = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["run", "machine", "tokens"], name="one_score_a_place")
        ]

    def __str__(self) -> str:
        return f"{self.correct} of {self.count} at {self.tokens:,} tokens"

    @property
    def share(self) -> float:
        """The share of the tasks that were answered right, rounded down to a thousandth."""
        return 1000 * self.correct // self.count / 1000


# By run: what is shown, which is read with every second of its page.
_shown: TtlCache[UUID, dict[int, RecordedScore]] = TtlCache(10.0)


def load_scores(run: Run) -> dict[int, RecordedScore]:
    """Return the scores of a run's tasks by the tokens of the weights, the most tokens last."""
    return _shown.get(run.pk, lambda: _read_scores(run))


def last_share(run: Run) -> float | None:
    """Return the share of a run's tasks that its last weights with a score answered."""
    scores = load_scores(run)
    return list(scores.values())[-1].share if scores else None


def _read_scores(run: Run) -> dict[int, RecordedScore]:
    newest = RecordedScore.objects.filter(run=run, tasks=models.F("run__published__tasks_digest"))
    rows = list(newest.select_related("machine").order_by("-tokens", "-at")[:MAX_SHOWN])
    people = _people_who_count(run) if rows else set()
    # Of two scores of the same weights the owner's counts, then the newer one.
    rows.sort(key=lambda row: (row.tokens, row.machine.owner_id == run.owner_id, row.at))
    return {row.tokens: row for row in rows if row.machine.owner_id in people}


def _people_who_count(run: Run) -> set[UUID]:
    return {run.owner_id, *vouched_people(run)}


def record_score(run: Run, machine: Machine, score: TaskScore) -> None:
    """Record a score as an event that all mirrors receive.

    Raises:
        UserError: it is not of the run's tasks, or the person's word does not count in the run.
    """
    published = PublishedText.objects.filter(run=run).first() or PublishedText()
    if score.tasks != published.tasks_digest or score.count != published.task_count:
        raise UserError("the tasks of the run are others by now: evaluate it again")
    if score.tokens > run.max_plausible_tokens:
        raise UserError("these weights have more tokens than the run")
    if machine.owner_id not in _people_who_count(run):
        raise UserError(
            "only scores of its owner, and of people whose updates others vouch for, are listed"
        )
    values: dict[str, Any] = {
        "tasks": score.tasks,
        "correct": score.correct,
        "count": score.count,
        "at": timezone.now(),
    }
    with writer.log_transaction():
        RecordedScore.objects.update_or_create(
            run=run, machine=machine, tokens=score.tokens, defaults=values
        )
        writer.record("score.record", f"{run.pk}:{machine.key}:{score.tokens}", values)
    _shown.invalidate(run.pk)
