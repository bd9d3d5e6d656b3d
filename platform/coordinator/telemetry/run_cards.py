"""What lists of runs show of each run: its last loss, a small curve, its speed and its machines."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import UUID

from django.core.cache import cache
from django.db import connection
from django.db.models import Count, Sum

from barnraise.formats import format_count
from coordinator.fleet.models import Membership
from coordinator.runs.models import Run

CURVE_POINTS = 24
ACTIVE_SECONDS = 5  # for which the losses of a run in training are cached
FIRST_SECONDS = 1  # the same before its first loss
OVER_SECONDS = 3600


@dataclass(frozen=True)
class RunCard:
    """The figures of one run in a list.

    Attributes:
        validation: the last validation loss in nats per token, a median over people, of two the
            higher one; None before the first.
        best: the lowest of these medians; None before the first.
        training: the training loss at the curve's end, a median over people; None before the first.
        curve: training losses at equal distances in tokens, the oldest first.
        rate: tokens/s of the machines that report; 0 unless the run is in training.
        machines: how many report.
    """

    validation: float | None
    best: float | None
    training: float | None
    curve: tuple[float, ...]
    rate: float
    machines: int

    @property
    def loss(self) -> float | None:
        """The validation loss, or the training loss where there is none."""
        return self.training if self.validation is None else self.validation

    def seconds_left(self, run: Run) -> float | None:
        """Return the seconds until the budget is spent at this speed; None if it does not train."""
        left = run.token_budget - run.ledger_tokens
        return left / self.rate if self.rate and left > 0 else None


def load_run_cards(runs: Iterable[Run]) -> dict[UUID, RunCard]:
    """Load the figures of runs, by at most four queries."""
    runs = list(runs)
    losses = load_losses(runs)
    alive = Membership.everywhere.newest().alive().filter(run__in=runs)
    sums = alive.values("run").annotate(machines=Count("machine"), speed=Sum("rate"))
    speeds = {row["run"]: (row["speed"] or 0.0, row["machines"]) for row in sums}
    cards = {}
    for run in runs:
        loss = losses[run.pk]
        rate, machines = speeds.get(run.pk, (0.0, 0))
        now = rate if run.status == "training" else 0.0
        cards[run.pk] = RunCard(
            loss.validation, loss.best, loss.training, loss.curve, now, machines
        )
    return cards


def describe_progress(run: Run) -> str:
    """Write how much of its budget a run has trained; what exceeds it needs a reason elsewhere."""
    tokens, budget = format_count(run.ledger_tokens), format_count(run.token_budget)
    return tokens if run.ledger_tokens >= run.token_budget else f"{tokens} of {budget}"


class RunLosses(NamedTuple):
    """The losses of a `RunCard`: the one source of a run's losses wherever they are a figure."""

    validation: float | None
    best: float | None
    curve: tuple[float, ...]

    @property
    def training(self) -> float | None:
        """The training loss: the mean over the last section of the curve; None before any."""
        return self.curve[-1] if self.curve else None


def load_losses(runs: list[Run]) -> dict[UUID, RunLosses]:
    """Return each run's losses, from the cache where it is recent."""
    keys = {run.pk: f"runs:{run.pk}:losses:{int(run.is_over)}" for run in runs}
    cached: dict[str, Any] = cache.get_many(keys.values())
    found = {pk: RunLosses(*cached[key]) for pk, key in keys.items() if key in cached}
    missing = [run for run in runs if run.pk not in found]
    if missing:
        loaded = _load_losses(missing)
        for seconds in (FIRST_SECONDS, ACTIVE_SECONDS, OVER_SECONDS):
            same = [run for run in missing if _seconds_cached(run, loaded[run.pk]) == seconds]
            fresh = {keys[run.pk]: tuple(loaded[run.pk]) for run in same}
            cache.set_many(fresh, seconds)
        found |= loaded
    return found


def _seconds_cached(run: Run, losses: RunLosses) -> int:
    if run.is_over:
        return OVER_SECONDS
    return ACTIVE_SECONDS if losses.curve else FIRST_SECONDS


# The losses of one kind in some runs. A point beyond `Run.max_plausible_tokens` is wrong: it would
# squeeze all others into one slot, and stay the last one for ever.
_POINTS = """
    SELECT m.run_id, m.machine_id, p.tokens, p.loss FROM fleet_membership m
    JOIN unnest(%s::uuid[], %s::numeric[]) AS bound (run_id, most) ON bound.run_id = m.run_id
    JOIN telemetry_losspoint p ON p.membership_id = m.id
    WHERE kind = %s AND p.tokens <= bound.most
"""


def _load_losses(runs: list[Run]) -> dict[UUID, RunLosses]:
    curves: dict[UUID, list[float]] = defaultdict(list)
    bounds = [[run.pk for run in runs], [run.max_plausible_tokens for run in runs]]
    with connection.cursor() as cursor:
        cursor.execute(
            f"""
            WITH points AS ({_POINTS}),
            ends AS (SELECT run_id, max(tokens) + 1.0 AS last FROM points GROUP BY run_id),
            people AS (
                SELECT run_id, floor(tokens * %s / last) AS slot, avg(loss) AS loss
                FROM points JOIN ends USING (run_id) JOIN accounts_machine a ON a.id = machine_id
                GROUP BY run_id, slot, a.owner_id
            )
            SELECT run_id, slot, percentile_cont(0.5) WITHIN GROUP (ORDER BY loss) FROM people
            GROUP BY run_id, slot ORDER BY run_id, slot
            """,
            [*bounds, "train", float(CURVE_POINTS)],
        )
        for run, _, loss in cursor.fetchall():
            curves[run].append(round(loss, 4))
        cursor.execute(
            f"""
            WITH points AS ({_POINTS}),
            people AS (
                SELECT run_id, tokens, avg(loss) AS loss FROM points
                JOIN accounts_machine a ON a.id = machine_id GROUP BY run_id, tokens, a.owner_id
            ),
            medians AS (
                SELECT run_id, tokens,
                    percentile_disc(0.5) WITHIN GROUP (ORDER BY loss DESC) AS loss
                FROM people GROUP BY run_id, tokens
            )
            SELECT run_id, (array_agg(loss ORDER BY tokens DESC))[1], min(loss) FROM medians
            GROUP BY run_id
            """,
            [*bounds, "validation"],
        )
        validation = {run: (last, best) for run, last, best in cursor.fetchall()}
    return {
        run.pk: RunLosses(*validation.get(run.pk, (None, None)), tuple(curves[run.pk]))
        for run in runs
    }
