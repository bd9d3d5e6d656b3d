"""What machines have witnessed of other people's updates, and what others vouch for of each author.

A machine's report brings signed headers of authors whose updates it has applied, each with its own
signature for that. Other mirrors send what was reported to them, with both signatures. Nobody is a
witness of their own machines.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from django.db.models import Case, F, Q, QuerySet, Sum, Value, When, Window
from django.db.models.functions import RowNumber
from django.utils import timezone

from barnraise.protocol import coordinator_messages, messages
from barnraise.protocol.signing import digest
from coordinator.accounts.models import Machine
from coordinator.fleet.models import Membership
from coordinator.fleet.token_limits import volunteer_rate
from coordinator.fleet.vouching import WitnessedHead, vouched_head
from coordinator.fleet.witness_models import AuthorKey, UpdateWitness, VouchedAuthor
from coordinator.runs.models import Run

MAX_WITNESSES = 8  # people stored for each author: the owner, and those who have most
MIN_SPEED_SECONDS = 10.0  # between the two heads that a speed is measured with

Attestations = Iterable[tuple[Membership, Sequence[coordinator_messages.Attestation]]]


@dataclass(frozen=True)
class AuthorMachine:
    """The machine of an author: its owner, when it joined, and the tokens it reports itself."""

    machine: UUID
    owner: UUID
    joined: datetime
    reported_tokens: int


@dataclass(frozen=True)
class Vouched:
    """What others vouch for of an author: the head, its author's machine, and one witness's row."""

    author: AuthorKey
    machine: AuthorMachine
    row: UpdateWitness


@dataclass(frozen=True)
class _Claim:
    member: Membership
    machine: AuthorMachine
    header: messages.Update
    attestation: coordinator_messages.Attestation

    @property
    def author(self) -> AuthorKey:
        return AuthorKey(self.member.run_id, self.machine.machine, self.header.incarnation)

    @property
    def digest(self) -> str:
        return digest(self.attestation.head.body)

    @property
    def rank(self) -> tuple[int, str]:
        return self.header.seq, self.digest


def record_witnesses(attestations: Attestations, changed: int | None = None) -> list[Vouched]:
    """Store what machines witnessed, in the caller's transaction.

    The number of statements does not depend on how many machines report. Of each author and person
    the last head stays, so that rows come to the same state in any order of arrival.

    Args:
        attestations: each witnessing machine with its attestations, whose signatures are checked.
        changed: the stamp of rows that were reported to this site; None for another mirror's.

    Returns:
        What others vouch for now, of each author that the attestations name.
    """
    received = [
        (member, messages.Update.model_validate_json(attestation.head.body), attestation)
        for member, theirs in attestations
        for attestation in theirs
    ]
    if not received:
        return []
    runs = {member.run_id: member.run for member, _, _ in received}
    machines = _load_author_machines(runs, {header.peer for _, header, _ in received})
    claims = [
        _Claim(member, machines[member.run_id, header.peer], header, attestation)
        for member, header, attestation in received
        if (member.run_id, header.peer) in machines
        and _is_acceptable(header, machines[member.run_id, header.peer], runs[member.run_id])
    ]
    claims = [claim for claim in claims if claim.machine.owner != claim.member.machine.owner_id]
    if not claims:
        return []
    _store_claims(claims, timezone.now(), changed)
    return _store_vouched(runs, {claim.author: claim.machine for claim in claims})


def _is_acceptable(header: messages.Update, author: AuthorMachine, run: Run) -> bool:
    """Return whether a header can be of an update that machines of the run accept.

    Nobody but the run's owner can have stated more tokens than one volunteer may since the run
    exists.
    """
    max_tokens = run.spec.max_tokens_per_update
    seconds = max(0.0, (timezone.now() - run.created).total_seconds())
    is_bounded = author.owner == run.owner_id or header.total <= (
        max_tokens + volunteer_rate(run) * seconds
    )
    return is_bounded and is_plausible(header, max_tokens)


def is_plausible(header: messages.Update, max_tokens: int) -> bool:
    """Return whether a header's figures agree with each other and with the run's spec."""
    is_bounded = header.tokens <= max_tokens and header.total <= header.seq * max_tokens
    if header.seq == 1:
        return is_bounded and header.previous == digest("") and header.total == header.tokens
    return is_bounded and header.tokens <= header.total


def _load_author_machines(
    runs: Mapping[UUID, Run], keys: Collection[str]
) -> dict[tuple[UUID, str], AuthorMachine]:
    """Find the machines with these keys in these runs, by run and key.

    A machine counts, until a row of it has arrived, as one that joined with the run's
    creation and has reported nothing.
    """
    # Of several mirrors' rows the one with the most tokens counts: it comes last.
    rows = (
        Membership.everywhere.filter(run__in=runs, machine__key__in=keys)
        .order_by("tokens")
        .values_list("run", "machine__key", "machine", "machine__owner", "joined", "tokens")
    )
    machines = {(run, key): AuthorMachine(*machine) for run, key, *machine in rows}
    unseen = [key for key in keys if any((run, key) not in machines for run in runs)]
    if unseen:
        known = Machine.objects.filter(key__in=unseen).values_list("key", "pk", "owner")
        for key, machine, owner in known:
            for run in runs.values():
                unreported = AuthorMachine(machine, owner, run.created, 0)
                machines.setdefault((run.pk, key), unreported)
    return machines


def _store_claims(claims: list[_Claim], now: datetime, changed: int | None) -> None:
    """Write the last head of each author and person; an earlier one never replaces a later one.

    Of two heads with one number, by which the author signed two histories, the one with the greater
    digest stays at every mirror.
    """
    newest: dict[tuple[AuthorKey, UUID], _Claim] = {}
    for claim in claims:
        place = claim.author, claim.member.machine.owner_id
        if place not in newest or newest[place].rank < claim.rank:
            newest[place] = claim
    rows = [
        _witness_row(claim, now, changed)
        for _, claim in sorted(newest.items(), key=lambda item: item[0])
    ]
    kept = {(row.author, row.person_id): row for row in _rows_of({row.author for row in rows})}
    fresh = [
        row
        for row in rows
        if (row.author, row.person_id) not in kept
        or kept[row.author, row.person_id].rank < row.rank
    ]
    UpdateWitness.objects.bulk_create(
        fresh,
        update_conflicts=True,
        unique_fields=["run", "machine", "incarnation", "person"],
        update_fields=[
            "witness",
            "seq",
            "total",
            "digest",
            "previous",
            "run_tokens",
            "received",
            "header",
            "statement",
            "changed",
        ],
    )


def _witness_row(claim: _Claim, now: datetime, changed: int | None) -> UpdateWitness:
    header, attestation = claim.header, claim.attestation
    return UpdateWitness(
        run_id=claim.member.run_id,
        machine_id=claim.machine.machine,
        incarnation=header.incarnation,
        person_id=claim.member.machine.owner_id,
        witness_id=claim.member.machine_id,
        seq=header.seq,
        total=header.total,
        digest=claim.digest,
        previous=header.previous,
        run_tokens=claim.member.run.ledger_tokens,
        received=now,
        header=attestation.head.model_dump(),
        statement=attestation.statement.model_dump(),
        changed=changed,
    )


def _rows_of(authors: Iterable[AuthorKey]) -> QuerySet[UpdateWitness]:
    """Select the witnesses of these authors."""
    wanted = Q(pk=None)
    by_run: dict[UUID, set[UUID]] = defaultdict(set)
    for author in authors:
        by_run[author.run].add(author.machine)
    for run, machines in by_run.items():
        wanted |= Q(run=run, machine__in=machines)
    return UpdateWitness.objects.filter(wanted)


def _store_vouched(
    runs: Mapping[UUID, Run], machines: Mapping[AuthorKey, AuthorMachine]
) -> list[Vouched]:
    """Recompute what others vouch for of these authors, and store what is new."""
    rows: dict[AuthorKey, list[UpdateWitness]] = defaultdict(list)
    for row in _rows_of(machines):
        if row.author in machines:
            rows[row.author].append(row)
    stored = {
        AuthorKey(row.run_id, row.machine_id, row.incarnation): row
        for row in VouchedAuthor.objects.filter(
            run__in=runs, machine__in={author.machine for author in machines}
        )
    }
    vouched = []
    changed = []
    now = timezone.now()
    for author, machine in sorted(machines.items(), key=lambda item: item[0]):
        heads = {row.to_head(): row for row in rows[author]}
        head = vouched_head(heads, machine.owner, runs[author.run].owner_id)
        if head is None:
            continue
        vouched.append(Vouched(author, machine, heads[head]))
        before = stored.get(author)
        if before is None or before.seq < head.seq:
            changed.append(_vouched_author(author, machine, before, head, now))
    VouchedAuthor.objects.bulk_create(
        changed,
        update_conflicts=True,
        unique_fields=["run", "machine", "incarnation"],
        update_fields=["seq", "total", "speed", "since"],
    )
    _delete_surplus(runs, [author for author in machines if len(rows[author]) > MAX_WITNESSES])
    return vouched


def recompute_vouched(runs: Mapping[UUID, Run], authors: Sequence[AuthorKey]) -> list[Vouched]:
    """Recompute, from the rows that are stored, what others vouch for of these authors."""
    keys = dict(
        Machine.objects.filter(pk__in={author.machine for author in authors}).values_list(
            "pk", "key"
        )
    )
    machines = _load_author_machines(runs, set(keys.values()))
    return _store_vouched(
        runs, {author: machines[author.run, keys[author.machine]] for author in authors}
    )


def _vouched_author(
    author: AuthorKey,
    machine: AuthorMachine,
    before: VouchedAuthor | None,
    head: WitnessedHead,
    now: datetime,
) -> VouchedAuthor:
    since = before.since if before else machine.joined
    grown = head.total - (before.total if before else 0)
    seconds = (now - since).total_seconds()
    speed = grown / max(seconds, MIN_SPEED_SECONDS)
    return VouchedAuthor(
        run_id=author.run,
        machine_id=author.machine,
        incarnation=author.incarnation,
        seq=head.seq,
        total=head.total,
        speed=speed,
        since=now,
    )


def _delete_surplus(runs: Mapping[UUID, Run], authors: Sequence[AuthorKey]) -> None:
    """Delete witnesses beyond `MAX_WITNESSES`; the owner's stay, then the furthest."""
    if not authors:
        return
    owner_first = Case(
        *(When(run=pk, person=run.owner_id, then=Value(0)) for pk, run in runs.items()),
        default=Value(1),
    )
    ranked = _rows_of(authors).annotate(
        place=Window(
            RowNumber(),
            partition_by=[F("run"), F("machine"), F("incarnation")],
            order_by=[owner_first.asc(), F("seq").desc(), F("person").asc()],
        )
    )
    surplus = list(ranked.filter(place__gt=MAX_WITNESSES).values_list("pk", flat=True))
    UpdateWitness.objects.filter(pk__in=surplus).delete()


@dataclass(frozen=True)
class VouchedFigures:
    """What others vouch for of one person's machines in a run: tokens, tokens/s and updates."""

    tokens: int
    speed: float
    updates: int


def vouched_people(run: Run) -> dict[UUID, VouchedFigures]:
    """Return the people whose updates others vouch for in a run, by one query."""
    rows = (
        VouchedAuthor.objects.filter(run=run)
        .values_list("machine__owner")
        .annotate(Sum("total"), Sum("speed"), Sum("seq"))
    )
    return {owner: VouchedFigures(*figures) for owner, *figures in rows}
