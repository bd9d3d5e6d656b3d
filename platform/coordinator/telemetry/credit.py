"""Credit: tokens of updates that a machine of a *different person* says it has applied.

Nobody vouches for themselves. A machine's report brings signed headers of authors whose updates it holds, each with
its own signed word that it does; what is new in that becomes a range of the author's, one row a day, which keeps the
last of both signatures. It counts for no more than the author itself has reported, and for no more an update than the
run's rules let one claim.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, timedelta

from django.db import models
from django.db.models import Max, Sum
from django.utils import timezone
from uuid6 import uuid7

from barnraise import wire
from coordinator.accounts.models import Machine, Team, User
from coordinator.fleet.models import Membership
from coordinator.runs.models import Run

SHOWN = 100  # places of a leaderboard
PERIODS = {"week": 7, "month": 30, "year": 365, "all": None}  # days
BADGES = (
    (1, "First peg"),
    (10**6, "Sill beam"),
    (10**7, "Post"),
    (10**8, "Tie beam"),
    (10**9, "Rafter"),
    (10**10, "Ridge"),
    (10**11, "Whole frame"),
)  # tokens, and what who did so many may wear


class Credit(models.Model):
    """Updates `first` to `last` of one life (`incarnation`) of a machine in a run, witnessed on one day."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="credits")
    machine = models.ForeignKey(Machine, on_delete=models.CASCADE, related_name="credits")
    incarnation = models.CharField(max_length=16)
    day = models.DateField()
    first = models.BigIntegerField()
    last = models.BigIntegerField()
    tokens = models.BigIntegerField()
    witness = models.ForeignKey(Machine, null=True, on_delete=models.SET_NULL, related_name="+")  # of the last of them
    head = models.JSONField(null=True)  # the author's signed header of the last, and…
    said = models.JSONField(null=True)  # …the witness's signed word for it: a `wire.Testimony`, for anybody to check

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "machine", "incarnation", "day"], name="one_range_a_day")]
        indexes = [
            models.Index(fields=["machine", "day"], name="credit_of_a_machine"),
            models.Index(fields=["day"], name="credit_by_day"),
        ]

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens of {self.machine}"


def note(member: Membership, witnessed: Iterable[wire.Testimony]) -> None:
    """What one machine witnesses of others', whose signatures were checked; within the caller's transaction."""
    newest: dict[str, tuple[wire.Update, wire.Testimony]] = {}
    for told in witnessed:
        head = wire.Update.model_validate_json(told.head.body)
        if head.author not in newest or newest[head.author][0].seq < head.seq:
            newest[head.author] = head, told
    if not newest:
        return
    keys = {author.partition(".")[0] for author in newest}
    authors = Membership.objects.filter(run=member.run, machine__key__in=keys).select_related("machine")
    foreign = {each.machine.key: each for each in authors.exclude(machine__owner=member.machine.owner_id)}
    before: dict[tuple, tuple[int, int]] = {}
    ranges = Credit.objects.filter(run=member.run, machine__in=[each.machine_id for each in foreign.values()])
    for row in ranges.values("machine", "incarnation").annotate(end=Max("last"), sum=Sum("tokens")):
        before[row["machine"], row["incarnation"]] = row["end"], row["sum"]
    most = member.run.spec.max_tokens_per_update if foreign else 0
    for author, (head, told) in sorted(newest.items()):
        key, _, incarnation = author.partition(".")
        if key in foreign:
            last, total = before.get((foreign[key].machine_id, incarnation), (0, 0))
            own = foreign[key].tokens  # by the author itself, of all its lives
            lives = sum(tokens for (machine, _), (_, tokens) in before.items() if machine == foreign[key].machine_id)
            tokens = min(head.total - total, own - lives, (head.seq - last) * most)
            if head.seq > last and tokens > 0:
                _extend(member, foreign[key].machine, incarnation, (last + 1, head.seq, tokens), told)


def _extend(
    member: Membership, machine: Machine, incarnation: str, added: tuple[int, int, int], told: wire.Testimony
) -> None:
    """By what was `added`: (first, last, tokens)."""
    first, last, tokens = added
    proof = {"head": told.head.model_dump(), "said": told.witness.model_dump(), "witness": member.machine}
    row, fresh = Credit.objects.get_or_create(
        run=member.run,
        machine=machine,
        incarnation=incarnation,
        day=timezone.now().date(),
        defaults={"first": first, "last": last, "tokens": tokens, **proof},
    )
    if not fresh:
        row.last, row.tokens = last, row.tokens + tokens
        for name, value in proof.items():
            setattr(row, name, value)
        row.save(update_fields=["last", "tokens", *proof])


# ---- leaderboards --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """One line of a leaderboard. `url` is "" where there is no page."""

    rank: int
    name: str
    tokens: int
    url: str = ""
    under: str = ""  # whose it is


def since(period: str, today: date | None = None) -> date | None:
    days = PERIODS[period]
    return None if days is None else (today or timezone.now().date()) - timedelta(days=days - 1)


def leaders(by: str, period: str = "all") -> list[Place]:
    """`by`: "people", "teams", "machines" or "runs"; the most first. Two or three queries."""
    found = Credit.objects.all()
    if (begin := since(period)) is not None:
        found = found.filter(day__gte=begin)
    column = {"people": "machine__owner", "teams": "machine__owner__teams", "machines": "machine", "runs": "run"}[by]
    sums = (
        found.exclude(**{column: None}).order_by().values(column).annotate(sum=Sum("tokens")).order_by("-sum", column)
    )
    rows = [(row[column], row["sum"]) for row in sums[:SHOWN]]
    kind = {"people": User, "teams": Team, "machines": Machine, "runs": Run}[by]
    known = kind.objects.select_related(*(["owner"] if by in ("machines", "runs") else [])).in_bulk(
        [pk for pk, _ in rows]
    )
    return [_place(rank, by, known[pk], tokens) for rank, (pk, tokens) in enumerate(rows, 1) if pk in known]


def _place(rank: int, by: str, what, tokens: int) -> Place:
    if by == "people":
        return Place(rank, what.shown_name, tokens, f"/volunteers/{what.pk}/" if what.is_active else "")
    if by == "machines":
        return Place(rank, what.name, tokens, "", what.owner.shown_name)
    return Place(rank, what.name, tokens, what.get_absolute_url(), what.owner.shown_name if by == "runs" else "")


# ---- one person ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """What somebody has done, all told."""

    tokens: int
    updates: int
    machines: int
    runs: tuple[tuple[Run, int], ...]  # with the tokens in each, the most first
    first: date | None
    last: date | None

    @property
    def badges(self) -> list[str]:
        return badges(self.tokens)

    @property
    def next(self) -> tuple[int, str] | None:
        """(tokens still lacking, the badge they lead to)."""
        return next(((least - self.tokens, name) for least, name in BADGES if self.tokens < least), None)


def badges(tokens: int) -> list[str]:
    return [name for least, name in BADGES if tokens >= least]


def of(person: User) -> Record:
    rows = Credit.objects.filter(machine__owner=person)
    sums = rows.aggregate(
        tokens=Sum("tokens"),
        updates=Sum(models.F("last") - models.F("first") + 1),
        begin=models.Min("day"),
        end=Max("day"),
        machines=models.Count("machine", distinct=True),
    )
    by_run = list(rows.order_by().values("run").annotate(sum=Sum("tokens")).order_by("-sum")[:SHOWN])
    known = Run.objects.in_bulk([row["run"] for row in by_run])
    runs = tuple((known[row["run"]], row["sum"]) for row in by_run)
    return Record(
        sums["tokens"] or 0, sums["updates"] or 0, sums["machines"], runs, first=sums["begin"], last=sums["end"]
    )
