"""Turn attestations into credit: tokens of updates that other people's machines applied.

Nobody confirms their own work, and no other person does alone: the run's owner or two other people
vouch for an author's updates (`fleet.vouching`). A head that covers later updates extends the
author's range of that day, which stores the last of both signatures. The tokens that the site
counts are at most those that the author itself has reported (or, where the site is one of several
mirrors, has signed), at most what the run's spec allows for each update, and for all authors
together at most the run's own count.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db import connection
from django.db.models import Max, Sum
from django.utils import timezone

from coordinator.credit.models import Credit
from coordinator.fleet.models import UpdateWitness, VerdictRecord
from coordinator.fleet.witnesses import Attestations, AuthorMachine, Vouched, record_witnesses
from coordinator.replication import mirror_list
from coordinator.runs.models import Run

SIGNED_COLUMNS = ("author_header", "witness_signature")
COLUMNS = (
    "id",
    "run_id",
    "machine_id",
    "incarnation",
    "day",
    "first",
    "last",
    "tokens",
    "witness_id",
    *SIGNED_COLUMNS,
)


@dataclass(frozen=True)
class _Counted:
    """What has been counted so far; `record_attestations` brings it up to date as it goes.

    `by_incarnation`: (run, machine, incarnation) → (last update, tokens).
    `by_machine`: (run, machine) → tokens of all its incarnations.
    `left`: run → tokens that may still be credited, to reach the run's own count.
    """

    by_incarnation: dict[tuple[UUID, UUID, str], tuple[int, int]]
    by_machine: dict[tuple[UUID, UUID], int]
    left: dict[UUID, int]


def record_attestations(attestations: Attestations) -> None:
    """Extend the authors' credit by what others vouch for, in the caller's transaction.

    The number of statements does not depend on how many machines report.

    Args:
        attestations: each reporting machine with the attestations it sent, whose signatures are
            checked.
    """
    attestations = list(attestations)
    runs = {member.run_id: member.run for member, theirs in attestations if theirs}
    extend_credit(runs, record_witnesses(attestations))


def extend_credit(runs: dict[UUID, Run], vouched: list[Vouched]) -> None:
    """Credit authors up to what others vouch for.

    Args:
        runs: the runs of these authors, by id.
        vouched: up to which update others vouch for each author.
    """
    if not vouched:
        return
    counted = _load_counted(runs, [claim.machine for claim in vouched])
    max_tokens = {pk: run.spec.max_tokens_per_update for pk, run in runs.items()}
    has_mirrors = mirror_list.current_version()[0] > 0
    today = timezone.now().date()
    ranges = []
    for claim in vouched:
        author, head = claim.author, claim.row
        last, total = counted.by_incarnation.get(author, (0, 0))
        # One site alone counts what the author reported to it, over all its incarnations. With
        # several mirrors the author may have reported to any of them, so its signed header counts.
        reported = claim.machine.reported_tokens - counted.by_machine[author[:2]]
        tokens = min(
            head.total - total,
            head.total - total if has_mirrors else reported,
            head.seq * max_tokens[author.run] - total,
            counted.left[author.run],
        )
        if head.seq <= last or tokens <= 0:
            continue
        ranges.append(_credit_range(head, last + 1, tokens, today))
        counted.by_machine[author[:2]] += tokens
        counted.left[author.run] -= tokens
    extend_ranges(ranges)


def _credit_range(head: UpdateWitness, first: int, tokens: int, day: Any) -> Credit:
    return Credit(
        run_id=head.run_id,
        machine_id=head.machine_id,
        incarnation=head.incarnation,
        day=day,
        first=first,
        last=head.seq,
        tokens=tokens,
        witness_id=head.witness_id,
        author_header=head.header,
        witness_signature=head.statement,
    )


def _load_counted(runs: dict[UUID, Run], authors: Iterable[AuthorMachine]) -> _Counted:
    """Sum up the credit that these authors and these runs have already."""
    existing = Credit.objects.filter(run__in=runs).order_by()
    left = {pk: run.ledger_tokens for pk, run in runs.items()}
    for pk, tokens in existing.values_list("run").annotate(Sum("tokens")):
        left[pk] -= tokens
    for pk, tokens in _retracted_credit(runs).items():
        left[pk] += tokens
    counted = _Counted({}, defaultdict(int), left)
    of_authors = existing.filter(machine__in={author.machine for author in authors})
    sums = of_authors.values_list("run", "machine", "incarnation")
    for run, machine, incarnation, last, tokens in sums.annotate(Max("last"), Sum("tokens")):
        counted.by_incarnation[run, machine, incarnation] = last, tokens
        counted.by_machine[run, machine] += tokens
    return counted


def _retracted_credit(runs: Iterable[UUID]) -> dict[UUID, int]:
    """Return run → tokens that were credited for updates that verdicts removed from its count."""
    stays: dict[tuple[UUID, str], int] = {}  # (run, author) → its last update that stays
    for record in VerdictRecord.objects.filter(run__in=runs, proven=True):
        for author, last in record.message.after.items():
            place = record.run_id, author
            stays[place] = min(last, stays.get(place, last))
    retracted: dict[UUID, int] = defaultdict(int)
    if not stays:
        return retracted
    keys = {author.partition(".")[0] for _, author in stays}
    rows = Credit.objects.filter(run__in={run for run, _ in stays}, machine__key__in=keys)
    names = ("run", "machine__key", "incarnation", "first", "last", "tokens")
    for run, key, incarnation, first, last, tokens in rows.values_list(*names):
        kept = stays.get((run, f"{key}.{incarnation}"), last)
        removed = max(0, last - max(first - 1, kept))
        retracted[run] += tokens * removed // (last - first + 1)
    return retracted


def extend_ranges(ranges: list[Credit]) -> None:
    """Add these ranges to the rows of the day, in one statement."""
    if not ranges:
        return
    table = Credit._meta.db_table
    marks = ", ".join([f"({', '.join(['%s'] * len(COLUMNS))})"] * len(ranges))
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {table} ({', '.join(COLUMNS)}) VALUES {marks} "
            "ON CONFLICT (run_id, machine_id, incarnation, day) DO UPDATE SET "
            "last = excluded.last, "
            f"tokens = {table}.tokens + excluded.tokens, witness_id = excluded.witness_id, "
            "author_header = excluded.author_header, "
            "witness_signature = excluded.witness_signature",
            [_column_value(row, name) for row in ranges for name in COLUMNS],
        )


def _column_value(row: Credit, name: str) -> Any:
    value = getattr(row, name)
    return json.dumps(value) if name in SIGNED_COLUMNS else value
