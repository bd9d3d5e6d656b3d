"""Turn attestations into credit: tokens of updates that other people's machines applied.

Nobody confirms their own work, and no other person does alone: the run's owner or two other people
vouch for an author's updates (`fleet.vouching`). A head that covers later updates extends the
author's range of that day, which stores the last of both signatures. The tokens that the site
counts are at most those that the author itself has reported (or, where the site is one of several
mirrors, has signed), at most what the run's spec allows for each update, and for all authors
together at most the run's own count.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.db import connection, transaction
from django.db.models import Exists, Max, OuterRef, Sum
from django.utils import timezone

from barnraise.protocol.verdicts import Verdict
from coordinator.credit.models import Credit
from coordinator.fleet.models import UpdateWitness, VerdictRecord, VouchedAuthor
from coordinator.fleet.verdict_requests import MAX_UPDATE_NUMBER
from coordinator.fleet.witness_models import AuthorKey
from coordinator.fleet.witnesses import (
    Attestations,
    AuthorMachine,
    Vouched,
    recompute_vouched,
    record_witnesses,
)
from coordinator.replication import mirror_list
from coordinator.replication.volunteer_salt import volunteer_pseudonyms
from coordinator.runs.models import Run

LAG_PERCENT = 10  # of a run's count, by which it may be behind what was witnessed
DELAY = timedelta(days=2)  # after which credit that the run's count does not cover is given up
MAX_DELAYED = 2000  # authors in one go
LOCK = 0x63726564  # a number of our own among Postgres' advisory locks


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


def record_attestations(attestations: Attestations, changed: int | None = None) -> None:
    """Extend the authors' credit by what others vouch for, in the caller's transaction.

    The number of statements does not depend on how many machines report.

    Args:
        attestations: each witnessing machine with its attestations, whose signatures are checked.
        changed: see `record_witnesses`.
    """
    attestations = [(member, theirs) for member, theirs in attestations if theirs]
    if attestations:
        lock_credit()
        runs = {member.run_id: member.run for member, _ in attestations}
        extend_credit(runs, record_witnesses(attestations, changed))


def lock_credit() -> None:
    """Let this transaction alone count credit: reports and other mirrors' rows come at one time."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK])


def extend_delayed_credit() -> None:
    """Credit what others vouched for before the run's count had reached it."""
    credited = Credit.authored.filter(
        run=OuterRef("run"), machine=OuterRef("machine"), incarnation=OuterRef("incarnation")
    )
    delayed = VouchedAuthor.objects.filter(
        ~Exists(credited.filter(last__gte=OuterRef("seq"))),
        since__gt=timezone.now() - DELAY,
    )
    with transaction.atomic():
        lock_credit()
        rows = delayed.values_list("run", "machine", "incarnation")[:MAX_DELAYED]
        authors = [AuthorKey(*row) for row in rows]
        runs = Run.objects.in_bulk({author.run for author in authors})
        extend_credit(runs, recompute_vouched(runs, authors))


def extend_credit(runs: dict[UUID, Run], vouched: list[Vouched]) -> None:
    """Credit authors up to what others vouch for; `runs` are the runs of these authors, by id."""
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
        )
        missing = tokens - counted.left[author.run]
        if 0 < missing <= runs[author.run].ledger_tokens * LAG_PERCENT // 100:
            continue  # the run's count follows the reports in a few seconds
        tokens = min(tokens, counted.left[author.run])
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
    existing = Credit.authored.filter(run__in=runs).order_by()
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
    verdicts: dict[UUID, list[Verdict]] = defaultdict(list)
    for record in VerdictRecord.objects.filter(run__in=runs, proven=True):
        verdicts[record.run_id].append(record.message)
    retracted: dict[UUID, int] = defaultdict(int)
    if not verdicts:
        return retracted
    names = ("run", "machine__key", "machine__owner", "incarnation", "first", "last", "tokens")
    rows = list(Credit.authored.filter(run__in=verdicts).values_list(*names))
    pseudonyms = volunteer_pseudonyms({owner for _, _, owner, *_ in rows})
    for run, key, owner, incarnation, first, last, tokens in rows:
        author = f"{key}.{incarnation}"
        kept = min(_last_kept(verdict, author, pseudonyms[owner]) for verdict in verdicts[run])
        removed = max(0, last - max(first - 1, min(last, kept)))
        singles: dict[int, int] = {}
        for verdict in verdicts[run]:
            for seq, stated in verdict.updates.get(author, {}).items():
                if first <= seq <= min(last, kept):
                    singles[seq] = max(stated, singles.get(seq, 0))
        in_range = tokens * removed // (last - first + 1)
        retracted[run] += min(tokens, in_range + sum(singles.values()))
    return retracted


def _last_kept(verdict: Verdict, author: str, volunteer: str) -> int:
    """Return an author's last update that a verdict leaves; the volunteer is a pseudonym."""
    kept = verdict.after.get(author, MAX_UPDATE_NUMBER)
    for excluded, party in (
        (verdict.keys, author.partition(".")[0]),
        (verdict.volunteers, volunteer),
    ):
        if party in excluded:
            kept = min(kept, excluded[party].get(author, 0))
    return kept


def extend_ranges(ranges: list[Credit]) -> None:
    """Add these ranges to the rows of the day, in one statement."""
    Credit.upsert(
        ranges,
        ("author_header", "witness_signature"),
        "last = excluded.last, tokens = old.tokens + excluded.tokens, "
        "witness_id = excluded.witness_id, author_header = excluded.author_header, "
        "witness_signature = excluded.witness_signature",
    )
