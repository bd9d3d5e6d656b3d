"""Turn attestations into credit: tokens of updates that another person's machine applied.

Nobody confirms their own work. A machine's report brings the signed headers of authors whose
updates it has, each with its own signature for that. A header that covers later updates extends
the author's range of that day, which stores the last of both signatures. The tokens that the site
counts are at most those that the author itself has reported (or, where the site is one of several
mirrors, has signed), and at most what the run's spec allows for each update.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import UUID

from django.db import connection
from django.db.models import Max, Sum
from django.utils import timezone

from barnraise.protocol import coordinator_messages, messages
from coordinator.credit.models import Credit
from coordinator.fleet.models import Membership
from coordinator.replication import mirror_list

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

Attestations = Iterable[tuple[Membership, Sequence[coordinator_messages.Attestation]]]


class _Claim(NamedTuple):
    """One attestation: `member` confirms that it holds the updates up to `header`."""

    member: Membership
    header: messages.Update
    attestation: coordinator_messages.Attestation


class _Author(NamedTuple):
    """The machine that wrote the updates, its owner, and the tokens it has reported itself."""

    machine: UUID
    owner: UUID
    reported_tokens: int


@dataclass(frozen=True)
class _Counted:
    """What has been counted so far; `record_attestations` brings it up to date as it goes.

    `by_incarnation`: (run, machine, incarnation) → (last update, tokens).
    `by_machine`: (run, machine) → tokens of all its incarnations.
    """

    by_incarnation: dict[tuple[UUID, UUID, str], tuple[int, int]]
    by_machine: dict[tuple[UUID, UUID], int]


def record_attestations(attestations: Attestations) -> None:
    """Extend the authors' credit by what these machines confirm, in the caller's transaction.

    It takes at most four statements, however many machines report.

    Args:
        attestations: each reporting machine with the attestations it sent, whose signatures are
            checked.
    """
    claims = _newest_claims(attestations)
    if not claims:
        return
    runs = {claim.member.run_id: claim.member.run for claim in claims}
    authors = _load_authors(runs, claims)
    counted = _load_counted(runs, authors.values())
    max_tokens = {run.pk: run.spec.max_tokens_per_update for run in runs.values()}
    has_mirrors = mirror_list.current_version()[0] > 0
    today = timezone.now().date()
    ranges: dict[tuple[UUID, UUID, str], Credit] = {}
    for member, header, attestation in claims:
        run = member.run_id
        key, _, incarnation = header.author.partition(".")
        author = authors.get((run, key))
        if author is None or author.owner == member.machine.owner_id:
            continue
        place = (run, author.machine, incarnation)
        last, total = counted.by_incarnation.get(place, (0, 0))
        new_tokens = header.total - total
        # One site alone counts what the author reported to it, over all its incarnations. With
        # several mirrors the author may have reported to any of them, so its signed header counts.
        limit = new_tokens
        if not has_mirrors:
            limit = author.reported_tokens - counted.by_machine[run, author.machine]
        tokens = min(new_tokens, limit, (header.seq - last) * max_tokens[run])
        if header.seq <= last or tokens <= 0:
            continue
        if place not in ranges:
            ranges[place] = Credit(
                run_id=run,
                machine_id=author.machine,
                incarnation=incarnation,
                day=today,
                first=last + 1,
                tokens=0,
            )
        row = ranges[place]
        row.last = header.seq
        row.tokens += tokens
        row.witness_id = member.machine_id
        row.author_header = attestation.head.model_dump()
        row.witness_signature = attestation.statement.model_dump()
        counted.by_incarnation[place] = header.seq, total + tokens
        counted.by_machine[run, author.machine] += tokens
    extend_ranges(list(ranges.values()))


def _newest_claims(attestations: Attestations) -> list[_Claim]:
    """Select, for each run, author and confirming person, the claim that reaches furthest."""
    newest: dict[tuple[UUID, UUID, str], _Claim] = {}
    for member, received in attestations:
        for attestation in received:
            header = messages.Update.model_validate_json(attestation.head.body)
            place = (member.run_id, member.machine.owner_id, header.author)
            before = newest.get(place)
            if before is None or before.header.seq < header.seq:
                newest[place] = _Claim(member, header, attestation)
    return sorted(newest.values(), key=lambda claim: (claim.header.author, claim.header.seq))


def _load_authors(runs: Iterable[UUID], claims: list[_Claim]) -> dict[tuple[UUID, str], _Author]:
    """Find the authors of these claims, by run and machine key."""
    keys = {claim.header.author.partition(".")[0] for claim in claims}
    rows = (
        Membership.everywhere.filter(run__in=runs, machine__key__in=keys)
        .order_by(
            "tokens"
        )  # of several mirrors' rows the one with the most tokens wins: it comes last
        .values_list("run", "machine__key", "machine", "machine__owner", "tokens")
    )
    return {
        (run, key): _Author(machine, owner, tokens) for run, key, machine, owner, tokens in rows
    }


def _load_counted(runs: Iterable[UUID], authors: Iterable[_Author]) -> _Counted:
    """Sum up the credit that these authors have already."""
    counted = _Counted({}, defaultdict(int))
    rows = Credit.objects.filter(run__in=runs, machine__in=[author.machine for author in authors])
    sums = rows.values("run", "machine", "incarnation").annotate(end=Max("last"), sum=Sum("tokens"))
    for row in sums:
        place = row["run"], row["machine"]
        counted.by_incarnation[(*place, row["incarnation"])] = row["end"], row["sum"]
        counted.by_machine[place] += row["sum"]
    return counted


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
