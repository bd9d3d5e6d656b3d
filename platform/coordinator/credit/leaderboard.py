"""Leaderboards and badges, by confirmed tokens."""

from dataclasses import dataclass
from datetime import date, timedelta

from django.db import models
from django.db.models import Count, F, Max, Min, Sum
from django.utils import timezone

from coordinator.accounts.models import Machine, Team, User
from coordinator.credit.models import Credit
from coordinator.runs.join_policy import Visibility
from coordinator.runs.models import Run

MAX_ROWS = 100
PERIOD_DAYS = {"week": 7, "month": 30, "year": 365, "all": None}
BADGES = (  # (tokens it takes, badge)
    (1, "First peg"),
    (10**6, "Sill beam"),
    (10**7, "Post"),
    (10**8, "Tie beam"),
    (10**9, "Rafter"),
    (10**10, "Ridge"),
    (10**11, "Whole frame"),
)
GROUPS: dict[str, tuple[str, type[models.Model]]] = {  # what is ranked → (column, its model)
    "people": ("machine__owner", User),
    "teams": ("machine__owner__teams", Team),
    "machines": ("machine", Machine),
    "runs": ("run", Run),
}


@dataclass(frozen=True)
class LeaderboardRow:
    """One line of a leaderboard. `url` is "" where there is no page."""

    rank: int
    name: str
    tokens: int
    url: str = ""
    owner_name: str = ""


def period_start(period: str, today: date | None = None) -> date | None:
    """Return the first day of a period that ends today, None for all time."""
    days = PERIOD_DAYS[period]
    return None if days is None else (today or timezone.now().date()) - timedelta(days=days - 1)


def leaderboard(by: str, period: str = "all") -> list[LeaderboardRow]:
    """Rank by tokens, the most first, in two or three queries.

    Args:
        by: "people", "teams", "machines" or "runs".
        period: a key of `PERIOD_DAYS`.
    """
    column, model = GROUPS[by]
    credit = Credit.objects.exclude(**{column: None}).order_by()
    start = period_start(period)
    if start is not None:
        credit = credit.filter(day__gte=start)
    if by == "runs":  # a ranking is for everybody
        credit = credit.filter(run__visibility=Visibility.PUBLIC)
    sums = credit.values(column).annotate(sum=Sum("tokens")).order_by("-sum", column)
    totals = [(row[column], row["sum"]) for row in sums[:MAX_ROWS]]
    ranked = model._default_manager.select_related(
        *(["owner"] if by in ("machines", "runs") else [])
    )
    rows_by_id = ranked.in_bulk([pk for pk, _ in totals])
    return [
        _build_row(rank, rows_by_id[pk], tokens)
        for rank, (pk, tokens) in enumerate(totals, 1)
        if pk in rows_by_id
    ]


def _build_row(rank: int, ranked: models.Model, tokens: int) -> LeaderboardRow:
    if isinstance(ranked, User):
        url = f"/volunteers/{ranked.pk}/" if ranked.is_active else ""
        return LeaderboardRow(rank, ranked.shown_name, tokens, url)
    if isinstance(ranked, Machine):
        return LeaderboardRow(rank, ranked.name, tokens, "", ranked.owner.shown_name)
    if isinstance(ranked, Run):
        owner_name = ranked.owner.shown_name
        return LeaderboardRow(rank, ranked.name, tokens, ranked.get_absolute_url(), owner_name)
    assert isinstance(ranked, Team)
    return LeaderboardRow(rank, ranked.name, tokens, ranked.get_absolute_url())


@dataclass(frozen=True)
class VolunteerRecord:
    """What one person's machines have trained; `runs` have their tokens, the most first."""

    tokens: int
    updates: int
    machines: int
    runs: tuple[tuple[Run, int], ...]
    first: date | None
    last: date | None

    @property
    def badges(self) -> list[str]:
        """The badges earned so far."""
        return earned_badges(self.tokens)

    @property
    def next_badge(self) -> tuple[int, str] | None:
        """The missing tokens and the badge they lead to; None once all are earned."""
        missing = ((least - self.tokens, name) for least, name in BADGES if self.tokens < least)
        return next(missing, None)


def earned_badges(tokens: int) -> list[str]:
    """List the badges that so many tokens earn."""
    return [name for least, name in BADGES if tokens >= least]


def volunteer_record(person: User) -> VolunteerRecord:
    """Sum up the credit of one person's machines."""
    credit = Credit.objects.filter(machine__owner=person)
    sums = credit.aggregate(
        tokens=Sum("tokens"),
        updates=Sum(F("last") - F("first") + 1),
        begin=Min("day"),
        end=Max("day"),
        machines=Count("machine", distinct=True),
    )
    by_run = credit.order_by().values("run").annotate(sum=Sum("tokens")).order_by("-sum")
    totals = [(row["run"], row["sum"]) for row in by_run[:MAX_ROWS]]
    runs = Run.objects.in_bulk([pk for pk, _ in totals])
    return VolunteerRecord(
        tokens=sums["tokens"] or 0,
        updates=sums["updates"] or 0,
        machines=sums["machines"],
        runs=tuple((runs[pk], tokens) for pk, tokens in totals),
        first=sums["begin"],
        last=sums["end"],
    )
