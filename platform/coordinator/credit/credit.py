"""Credit: tokens of updates that a machine of a *different person* says it has applied.

Nobody vouches for themselves. A machine's report brings signed headers of authors whose updates it holds, each with
its own signed word that it does; what is new in that becomes a range of the author's, one row a day, which keeps the
last of both signatures. It counts for no more than the author itself has reported (where the site is one of several:
has signed), and for no more an update than the run's rules let one claim.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta

from django.db import connection, models
from django.db.models import Max, Sum
from django.utils import timezone
from uuid6 import uuid7

from barnraise.protocol import coordinator_messages, messages
from coordinator.accounts.models import Machine, Team, User
from coordinator.fleet.models import Membership
from coordinator.replication import mirror_list
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
    told_last = models.BigIntegerField(
        default=0, db_default=0
    )  # mirrors have told each other up to this update…
    told_tokens = models.BigIntegerField(default=0, db_default=0)  # …and so many of these tokens
    witness = models.ForeignKey(
        Machine, null=True, on_delete=models.SET_NULL, related_name="+"
    )  # of the last of them
    head = models.JSONField(null=True)  # the author's signed header of the last, and…
    said = models.JSONField(
        null=True
    )  # …the witness's signed word for it: a `wire.Testimony`, for anybody to check

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["run", "machine", "incarnation", "day"], name="one_range_a_day"
            )
        ]
        indexes = [
            models.Index(fields=["machine", "day"], name="credit_of_a_machine"),
            models.Index(fields=["day"], name="credit_by_day"),
        ]

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens of {self.machine}"


def note(heard: list[tuple[Membership, Sequence[coordinator_messages.Attestation]]]) -> None:
    """What these machines witness of others', whose signatures were checked; within the caller's transaction. Four
    statements at most."""
    newest: dict[
        tuple, tuple[Membership, messages.Update, coordinator_messages.Attestation]
    ] = {}  # (run, author) → who has seen most of it
    for member, told in heard:
        for each in told:
            head = messages.Update.model_validate_json(each.head.body)
            before = newest.get(place := (member.run_id, member.machine.owner_id, head.author))
            if before is None or before[1].seq < head.seq:
                newest[place] = member, head, each
    if not newest:
        return
    runs = {member.run_id: member.run for member, _, _ in newest.values()}
    keys = {author.partition(".")[0] for _, _, author in newest}
    found = Membership.everywhere.filter(run__in=runs, machine__key__in=keys).order_by(
        "tokens"
    )  # the most: last
    authors = {
        (run, key): (machine, owner, tokens)
        for run, key, machine, owner, tokens in found.values_list(
            "run", "machine__key", "machine", "machine__owner", "tokens"
        )
    }
    known: dict[tuple, tuple[int, int]] = {}  # (run, machine, incarnation) → (last, tokens) so far
    lives: dict[tuple, int] = defaultdict(int)  # (run, machine) → tokens of all its lives
    ranges = Credit.objects.filter(
        run__in=runs, machine__in=[machine for machine, _, _ in authors.values()]
    )
    for row in ranges.values("run", "machine", "incarnation").annotate(
        end=Max("last"), sum=Sum("tokens")
    ):
        known[row["run"], row["machine"], row["incarnation"]] = row["end"], row["sum"]
        lives[row["run"], row["machine"]] += row["sum"]
    most = {run.pk: run.spec.max_tokens_per_update for run in runs.values()}
    several = mirror_list.current_version()[0] > 0
    fresh: dict[tuple, Credit] = {}
    for (run, _, author), (member, head, told) in sorted(
        newest.items(), key=lambda item: (item[0][2], item[1][1].seq)
    ):
        key, _, incarnation = author.partition(".")
        machine, owner, reported = authors.get((run, key), (None, None, 0))
        if machine is None or owner == member.machine.owner_id:
            continue
        last, total = known.get((run, machine, incarnation), (0, 0))
        fresh_tokens = head.total - total
        # No more an update than the rules allow; and no more than the author itself reported, of all its lives. Of
        # several mirrors it reports to any: there its signed header is its word.
        known_here = fresh_tokens if several else reported - lives[run, machine]
        tokens = min(fresh_tokens, known_here, (head.seq - last) * most[run])
        if head.seq > last and tokens > 0:
            row = fresh.setdefault(
                (run, machine, incarnation),
                Credit(run_id=run, machine_id=machine, incarnation=incarnation, day=timezone.now().date(),
                       first=last + 1, tokens=0),
            )  # fmt: skip
            row.last, row.tokens, row.witness_id = head.seq, row.tokens + tokens, member.machine_id
            row.head, row.said = told.head.model_dump(), told.statement.model_dump()
            known[run, machine, incarnation] = head.seq, total + tokens
            lives[run, machine] += tokens
    _extend(list(fresh.values()))


def _extend(ranges: list[Credit]) -> None:
    """Adds to the day's rows, in one statement."""
    if not ranges:
        return
    proof = ("head", "said")
    columns = (
        "id",
        "run_id",
        "machine_id",
        "incarnation",
        "day",
        "first",
        "last",
        "tokens",
        "witness_id",
        *proof,
    )
    marks = ", ".join([f"({', '.join(['%s'] * len(columns))})"] * len(ranges))
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO telemetry_credit ({', '.join(columns)}) VALUES {marks} "
            "ON CONFLICT (run_id, machine_id, incarnation, day) DO UPDATE SET last = excluded.last, "
            "tokens = telemetry_credit.tokens + excluded.tokens, witness_id = excluded.witness_id, "
            "head = excluded.head, said = excluded.said",
            [
                json.dumps(getattr(row, name)) if name in proof else getattr(row, name)
                for row in ranges
                for name in columns
            ],
        )


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
    column = {
        "people": "machine__owner",
        "teams": "machine__owner__teams",
        "machines": "machine",
        "runs": "run",
    }[by]
    sums = (
        found.exclude(**{column: None})
        .order_by()
        .values(column)
        .annotate(sum=Sum("tokens"))
        .order_by("-sum", column)
    )
    rows = [(row[column], row["sum"]) for row in sums[:SHOWN]]
    kind = {"people": User, "teams": Team, "machines": Machine, "runs": Run}[by]
    known = kind.objects.select_related(*(["owner"] if by in ("machines", "runs") else [])).in_bulk(
        [pk for pk, _ in rows]
    )
    return [
        _place(rank, by, known[pk], tokens)
        for rank, (pk, tokens) in enumerate(rows, 1)
        if pk in known
    ]


def _place(rank: int, by: str, what, tokens: int) -> Place:
    if by == "people":
        return Place(
            rank, what.shown_name, tokens, f"/volunteers/{what.pk}/" if what.is_active else ""
        )
    if by == "machines":
        return Place(rank, what.name, tokens, "", what.owner.shown_name)
    return Place(
        rank,
        what.name,
        tokens,
        what.get_absolute_url(),
        what.owner.shown_name if by == "runs" else "",
    )


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
        return next(
            ((least - self.tokens, name) for least, name in BADGES if self.tokens < least), None
        )


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
    by_run = list(
        rows.order_by().values("run").annotate(sum=Sum("tokens")).order_by("-sum")[:SHOWN]
    )
    known = Run.objects.in_bulk([row["run"] for row in by_run])
    runs = tuple((known[row["run"]], row["sum"]) for row in by_run)
    return Record(
        sums["tokens"] or 0,
        sums["updates"] or 0,
        sums["machines"],
        runs,
        first=sums["begin"],
        last=sums["end"],
    )
