"""A person's or a team's credit over time: by day, as a rank and its change, and as a streak."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import date, timedelta
from uuid import UUID

from django.db.models import QuerySet, Sum
from django.utils import timezone

from coordinator.accounts.models import Team, User
from coordinator.credit.models import Credit
from coordinator.lib.ttl_cache import TtlCache

GRAPH_DAYS = 90
WEEK = timedelta(days=7)
# Ranks need the credit of everybody, and are the same for a while.
totals_cache: TtlCache[date, dict[UUID, int]] = TtlCache(60.0, max_entries=8)


@dataclass(frozen=True)
class RankChange:
    """A rank among all people by all their credit, and how it changed within a week."""

    rank: int  # now; 1 is the best
    people: int  # with credit now
    # Ranks gained since a week ago, negative where lost; None without credit then.
    change: int | None

    @property
    def lost(self) -> int:
        """Ranks lost within a week, 0 where none were."""
        return max(0, -(self.change or 0))


@dataclass(frozen=True)
class MemberShare:
    """What a member of a team contributed."""

    person: User
    tokens: int
    share: float  # of the team's credit, from 0 to 1


def credit_of(person: User) -> QuerySet[Credit]:
    """Select a person's credit."""
    return Credit.objects.filter(machine__owner=person)


def credit_of_team(team: Team) -> QuerySet[Credit]:
    """Select the credit of a team's present members."""
    return Credit.objects.filter(machine__owner__teams=team)


def tokens_by_day(
    credit: QuerySet[Credit], today: date | None = None, days: int = GRAPH_DAYS
) -> list[tuple[date, int]]:
    """Return each of the last days with its tokens, the oldest first; one query."""
    today = today or timezone.now().date()
    first = today - timedelta(days=days - 1)
    rows = credit.filter(day__gte=first).order_by().values_list("day").annotate(sum=Sum("tokens"))
    sums = dict(rows)
    return [(day, sums.get(day, 0)) for day in (first + timedelta(days=n) for n in range(days))]


def rank_change(person: User, today: date | None = None) -> RankChange | None:
    """Rank a person by all credit, now and a week ago; None without credit."""
    today = today or timezone.now().date()
    now = _rank(person, today)
    if now is None:
        return None
    before = _rank(person, today - WEEK)
    rank, people = now
    return RankChange(rank, people, before[0] - rank if before else None)


def _rank(person: User, until: date) -> tuple[int, int] | None:
    """Return a person's rank by the credit up to a day, and how many people have any."""
    totals = totals_cache.get(until, lambda: _sum_credit(until))
    own = totals.get(person.pk)
    if not own:
        return None
    return 1 + sum(total > own for total in totals.values()), len(totals)


def _sum_credit(until: date) -> dict[UUID, int]:
    """Return person → tokens of all credit up to a day; it reads the credit of everybody."""
    return dict(
        Credit.objects.filter(day__lte=until)
        .order_by()
        .values_list("machine__owner")
        .annotate(sum=Sum("tokens"))
    )


def streaks(days: Collection[date], today: date | None = None) -> tuple[int, int]:
    """Return how many days in a row had credit: up to today or yesterday, and the longest. Pure."""
    today = today or timezone.now().date()
    present = set(days)
    longest = length = 0
    previous: date | None = None
    for day in sorted(present):
        length = length + 1 if previous and day - previous == timedelta(days=1) else 1
        longest = max(longest, length)
        previous = day
    is_current = previous is not None and today - previous <= timedelta(days=1)
    return (length if is_current else 0), longest


def member_shares(team: Team) -> list[MemberShare]:
    """List a team's members by their credit, the most first; two queries."""
    sums = dict(
        credit_of_team(team).order_by().values_list("machine__owner").annotate(sum=Sum("tokens"))
    )
    total = sum(sums.values())
    people = User.objects.filter(teams=team)
    shares = [
        MemberShare(person, sums.get(person.pk, 0), sums.get(person.pk, 0) / max(1, total))
        for person in people
    ]
    return sorted(shares, key=lambda share: (-share.tokens, share.person.shown_name))
