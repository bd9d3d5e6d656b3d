"""Checkpoints: which shared weights machines hold, by digest and never by byte.

A machine announces the checkpoints that it wrote at the run's milestones and at its end. Every
report that names weights of the same updates is a vote for its digest (`checkpoint_votes`). Two
digests at one version vector mean that a machine is wrong; both are shown.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from django.db import models, transaction
from django.utils import timezone
from uuid6 import uuid7

from barnraise.protocol import coordinator_messages, messages
from barnraise.protocol import reports as reports_module
from barnraise.spec import Start
from coordinator.accounts.models import Machine
from coordinator.eventlog import writer
from coordinator.fleet.models import Membership
from coordinator.fleet.people_count import counted_people
from coordinator.fleet.witnesses import vouched_people
from coordinator.runs.models import Run
from coordinator.telemetry.checkpoint_votes import WeightsVote, count_votes

ROWS_SHOWN = 20  # on the run's page
MAX_HOLDERS_NAMED = 12  # machines of a row whose names are shown
ANCHORS_SENT = 4  # confirmed ones that a machine learns of when it joins
UNKNOWN_CHECKSUM = "0" * 16  # of weights that machines name without announcing them
# Of one person in a run: more than a run has, and a bound on what a liar's machines announce.
MAX_OF_PERSON = 1000
# The newest reports of a machine in one batch that name weights: each may name others.
MAX_NAMING_REPORTS = 64
# Of the checkpoints that are listed, how many may be ones that hardly anybody confirms: a liar's
# machines could announce any number, which would hide all others.
UNCONFIRMED_SHARE = 4
MAX_CHECKPOINTS = 500  # of a run; beyond that the oldest unconfirmed ones are deleted


class Checkpoint(models.Model):
    """Announced weights.

    `vector` identifies the updates in them, `digest` is the BLAKE3 of their `size` bytes,
    `checksum` their sketch.
    """

    if TYPE_CHECKING:
        run_id: UUID
        holdings: Any

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="checkpoints")
    tokens = models.BigIntegerField()
    vector = models.CharField(max_length=64)
    digest = models.CharField(max_length=64)
    checksum = models.CharField(max_length=16)
    size = models.BigIntegerField()
    announced = models.DateTimeField(default=timezone.now)
    published = models.BooleanField(default=False)  # in the event log

    class Meta:
        ordering = ["-tokens", "-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["run", "vector", "digest"], name="one_checkpoint_a_digest"
            )
        ]
        indexes = [models.Index(fields=["run", "-tokens"], name="checkpoints_of_a_run")]

    def __str__(self) -> str:
        return f"{self.digest[:12]} at {self.tokens:,} tokens"

    @property
    def aggregate_name(self) -> str:
        """The name by which the event log knows it."""
        return f"{self.run_id}:{self.vector}:{self.digest}"

    def to_start(self) -> Start:
        """Return the warm start of a run that begins with these weights."""
        manifest = coordinator_messages.TextManifest.model_validate_json(
            messages.Signed.model_validate(self.run.manifest).body
        )
        return Start(str(self.run_id), self.digest, self.tokens, manifest.tokenizer or "")


class CheckpointHolder(models.Model):
    """A machine reported that it has exactly these weights."""

    if TYPE_CHECKING:
        checkpoint_id: UUID

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    checkpoint = models.ForeignKey(Checkpoint, on_delete=models.CASCADE, related_name="holdings")
    machine = models.ForeignKey(Machine, on_delete=models.CASCADE, related_name="+")
    reported = models.DateTimeField(default=timezone.now)
    published = models.BooleanField(default=False)  # in the event log

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["checkpoint", "machine"], name="one_holding_a_machine")
        ]

    def __str__(self) -> str:
        return f"{self.machine} has {self.checkpoint}"


def record_announcements(
    received: Iterable[tuple[Membership, list[reports_module.Report]]],
) -> None:
    """Store what reports announce and confirm.

    Every report repeats the last announcement; what this process has seen committed costs nothing.
    """
    named_by: dict[tuple[UUID, str, str], list[Membership]] = {}  # (run, vector, digest) → by whom
    room = _Room()
    for member, all_reports in received:
        reports = all_reports[-MAX_NAMING_REPORTS:]
        announced = {
            (report.checkpoint.vector, report.checkpoint.digest): report.checkpoint
            for report in reversed(reports)
            if report.checkpoint and 0 < report.checkpoint.tokens <= member.run.max_plausible_tokens
        }
        named = {*announced}
        named |= {(report.vector, report.anchor) for report in reports if report.anchor}
        named = {pair for pair in named if (member.pk, *pair) not in _committed}
        for pair, view in announced.items():
            if pair in named and room.has_place_for(member, *pair):
                Checkpoint.objects.get_or_create(
                    run=member.run,
                    vector=view.vector,
                    digest=view.digest,
                    defaults={"tokens": view.tokens, "checksum": view.checksum, "size": view.size},
                )
        for pair in named:
            named_by.setdefault((member.run_id, *pair), []).append(member)
    if not named_by:
        return
    checkpoints = list(
        Checkpoint.objects.filter(
            run__in={run for run, _, _ in named_by},
            vector__in={vector for _, vector, _ in named_by},
        )
    )
    checkpoints += _store_dissent(checkpoints, named_by, room)
    confirmed = [
        (member, checkpoint)
        for checkpoint in checkpoints
        for member in named_by.get((checkpoint.run_id, checkpoint.vector, checkpoint.digest), ())
    ]
    CheckpointHolder.objects.bulk_create(
        [
            CheckpointHolder(checkpoint=checkpoint, machine_id=member.machine_id)
            for member, checkpoint in confirmed
        ],
        ignore_conflicts=True,
    )
    transaction.on_commit(
        lambda: _remember_committed(
            (member.pk, checkpoint.vector, checkpoint.digest) for member, checkpoint in confirmed
        )
    )


class _Room:
    """How many checkpoints each person of a batch of reports may still add."""

    def __init__(self) -> None:
        self._left: dict[tuple[UUID, UUID], int] = {}  # (run, person)

    def has_place_for(self, member: Membership, vector: str, digest: str) -> bool:
        """Return whether a machine may name these weights: they are here, or there is room."""
        same = Checkpoint.objects.filter(run=member.run_id, vector=vector, digest=digest)
        if same.exists():
            return True
        place = member.run_id, member.machine.owner_id
        if place not in self._left:
            held = CheckpointHolder.objects.filter(
                checkpoint__run=place[0], machine__owner=place[1]
            )
            self._left[place] = MAX_OF_PERSON - held.values("checkpoint").distinct().count()
        self._left[place] -= 1
        return self._left[place] >= 0


def _store_dissent(
    checkpoints: list[Checkpoint],
    named_by: Mapping[tuple[UUID, str, str], list[Membership]],
    room: _Room,
) -> list[Checkpoint]:
    """Store the weights that machines name at an announced vector and that nobody announced."""
    announced = {(row.run_id, row.vector): row for row in checkpoints}
    digests = {(row.run_id, row.vector, row.digest) for row in checkpoints}
    dissenting = [
        (announced[run, vector], digest)
        for (run, vector, digest), members in named_by.items()
        if (run, vector) in announced
        and (run, vector, digest) not in digests
        and any(room.has_place_for(member, vector, digest) for member in members)
    ]
    return [
        Checkpoint.objects.get_or_create(
            run_id=row.run_id,
            vector=row.vector,
            digest=digest,
            defaults={"tokens": row.tokens, "checksum": UNKNOWN_CHECKSUM, "size": row.size},
        )[0]
        for row, digest in dissenting
    ]


# (membership, vector, digest) that this process has seen committed, the oldest first.
_committed: dict[tuple[UUID, str, str], None] = {}
MAX_COMMITTED = 50_000


def _remember_committed(confirmations: Iterable[tuple[UUID, str, str]]) -> None:
    for confirmation in confirmations:
        _committed[confirmation] = None
    while len(_committed) > MAX_COMMITTED:
        del _committed[next(iter(_committed))]


@dataclass(frozen=True)
class CheckpointRow:
    """One checkpoint as pages and the API show it."""

    checkpoint: Checkpoint
    machines: int  # how many hold it
    people: int  # how many vouch for it
    holders: tuple[str, ...]  # names of the first `MAX_HOLDERS_NAMED` machines, those alive first
    alive: int  # how many of the machines report now
    # Two people report it, and more than half of those who report weights of the same updates.
    confirmed: bool
    disputed: bool  # two people report other weights of the same updates
    serving: int = 0  # how many of those have no newer weights: they can send these now


class _Holding(NamedTuple):
    """That a machine of a person has the weights of a checkpoint."""

    checkpoint: UUID
    machine: UUID
    person: UUID


def list_checkpoint_rows(run: Run, most: int = ROWS_SHOWN) -> list[CheckpointRow]:
    """List the newest checkpoints, the newest first, by five queries.

    A run may have a hundred checkpoints that a thousand machines have: their rows are read once and
    without models, and machines are named only as far as a row names them.
    """
    # Another mirror may have published a checkpoint that no run can have: it would stay the newest.
    plausible = run.checkpoints.filter(tokens__lte=run.max_plausible_tokens)
    vouched = vouched_people(run)
    trusted = _select_trusted(plausible, {run.owner_id, *vouched})
    newest = plausible.values("vector")[: max(1, most // UNCONFIRMED_SHARE)]
    listed = models.Q(vector__in=trusted.values("vector")[:most]) | models.Q(vector__in=newest)
    # Those of equal vectors beyond `most` have votes, too. They come last in the model's order.
    checkpoints = list(plausible.filter(listed))
    if not checkpoints:
        return []
    holdings = _load_holdings(checkpoints)
    votes = _count_votes(run, checkpoints, holdings, vouched)
    alive = set(Membership.everywhere.alive().filter(run=run).values_list("machine_id", flat=True))
    machines: dict[UUID, list[UUID]] = {checkpoint.pk: [] for checkpoint in checkpoints}
    for holding in holdings:
        machines[holding.checkpoint].append(holding.machine)
    has_newer: set[UUID] = set()  # machines that hold a checkpoint of an earlier line
    counts: list[tuple[Checkpoint, list[UUID], int, int]] = []
    for checkpoint in checkpoints[:most]:
        holders = sorted(machines[checkpoint.pk], key=lambda machine: machine not in alive)
        holders_alive = alive.intersection(holders)
        counts.append((checkpoint, holders, len(holders_alive), len(holders_alive - has_newer)))
        has_newer.update(holders)
    named = {machine for _, holders, *_ in counts for machine in holders[:MAX_HOLDERS_NAMED]}
    names = {pk: machine.name for pk, machine in Machine.objects.in_bulk(named).items()}
    return [
        _build_row(
            checkpoint,
            votes.get(checkpoint.vector, {}).get(checkpoint.digest, NO_VOTE),
            machines=len(holders),
            holders=tuple(names[pk] for pk in holders[:MAX_HOLDERS_NAMED] if pk in names),
            alive=alive_count,
            serving=serving_count,
        )
        for checkpoint, holders, alive_count, serving_count in counts
    ]


NO_VOTE = WeightsVote(people=0, confirmed=False, disputed=False)


def _build_row(checkpoint: Checkpoint, vote: WeightsVote, **figures: Any) -> CheckpointRow:
    return CheckpointRow(
        checkpoint,
        people=vote.people,
        confirmed=vote.confirmed,
        disputed=vote.disputed,
        **figures,
    )


def _select_trusted(checkpoints: Any, people: Collection[UUID]) -> Any:
    """Select the checkpoints that two of these people have; all, if they are not two."""
    if len(people) < 2:
        return checkpoints
    held = CheckpointHolder.objects.filter(machine__owner__in=people)
    another = held.filter(checkpoint=models.OuterRef("checkpoint")).exclude(
        machine__owner=models.OuterRef("machine__owner")
    )
    by_two = held.filter(models.Exists(another), checkpoint=models.OuterRef("pk"))
    return checkpoints.filter(models.Exists(by_two))


def _load_holdings(checkpoints: list[Checkpoint]) -> list[_Holding]:
    """Load who holds these checkpoints, in the order in which they reported it."""
    holders = CheckpointHolder.objects.filter(checkpoint__in=checkpoints).order_by("reported", "pk")
    rows = holders.values_list("checkpoint", "machine", "machine__owner")
    return [_Holding(*row) for row in rows]


def _count_votes(
    run: Run,
    checkpoints: Iterable[Checkpoint],
    holdings: list[_Holding],
    vouched: Collection[UUID],
) -> dict[str, dict[str, WeightsVote]]:
    """Return, for each version vector, the votes of people for each digest.

    People vote whose word counts in this run: its owner, and those whose updates others vouch for.
    """
    weights = {checkpoint.pk: checkpoint for checkpoint in checkpoints}
    reported: dict[str, set[tuple[str, UUID]]] = defaultdict(set)
    for holding in holdings:
        checkpoint = weights[holding.checkpoint]
        reported[checkpoint.vector].add((checkpoint.digest, holding.person))
    people = {holding.person for holding in holdings}
    counted = counted_people(people, run.owner_id, vouched)
    return {
        vector: count_votes((digest, person) for digest, person in reports if person in counted)
        for vector, reports in reported.items()
    }


def list_confirmed_anchors(
    run: Run, most: int = ANCHORS_SENT
) -> list[coordinator_messages.ConfirmedAnchor]:
    """List the newest weights that people confirm, the newest first, by six queries at most.

    The word of the run owner's machine suffices while two others do not contradict it: a joiner
    trusts the owner anyway, and would wait for ever where nobody else has trained.
    """
    rows = [row for row in list_checkpoint_rows(run) if not row.disputed or row.confirmed]
    holdings = CheckpointHolder.objects.filter(
        checkpoint__in=[row.checkpoint for row in rows], machine__owner=run.owner_id
    )
    of_owner = {*holdings.values_list("checkpoint", flat=True)} if rows else set()
    return [
        coordinator_messages.ConfirmedAnchor(
            vector=row.checkpoint.vector,
            digest=row.checkpoint.digest,
            people=max(1, row.people),
        )
        for row in rows
        if row.confirmed or row.checkpoint.pk in of_owner
    ][:most]


def prune_checkpoints(run: Run) -> int:
    """Delete a run's oldest checkpoints beyond `MAX_CHECKPOINTS` that at most one person held.

    Returns:
        How many were deleted.
    """
    beyond = run.checkpoints.order_by("-tokens", "-pk").values("pk")[MAX_CHECKPOINTS:]
    unconfirmed = (
        Checkpoint.objects.filter(pk__in=beyond)
        .annotate(people=models.Count("holdings__machine__owner", distinct=True))
        .filter(people__lt=2)
    )
    deleted = 0
    for checkpoint in unconfirmed:
        with writer.log_transaction():
            name, published = checkpoint.aggregate_name, checkpoint.published
            checkpoint.delete()
            deleted += 1
            if published:
                writer.record("checkpoint.delete", name, {})
    return deleted
