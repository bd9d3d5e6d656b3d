"""The aggregate type "credit", by run, peer and incarnation: receipts of ranges of updates."""

from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any, NamedTuple
from uuid import UUID

from django.db.models import F
from pydantic import Field

from barnraise.protocol import messages
from barnraise.protocol.types import Count, Message, PublicKey
from coordinator.accounts.models import Machine
from coordinator.credit.models import Credit
from coordinator.eventlog import writer
from coordinator.eventlog.projection import current_state
from coordinator.eventlog.registry import AggregateType, Fact, State, require_row
from coordinator.fleet.models import Membership
from coordinator.lib.bulk_upsert import bulk_upsert
from coordinator.runs.models import Run

NO_TOTAL = -1  # the author signed no total
MAX_AUTHORS = 2000  # whose credit is recorded in one go
# day → {"first", "last", "tokens", "witness"}, and "crew" where members have a part of the tokens
Days = dict[str, dict[str, Any]]


class CreditReceipt(Message):
    """Credit for the updates `first` to `last` of one author.

    `witness` is the machine of another person that has applied the last one. `total`: the tokens of
    all updates up to the last, as the author signed them with it. `crew`: its parts that the author
    signed for members of its crew, as far as this site has seen these join the run as such.
    """

    day: date
    first: int = Field(ge=1, lt=1 << 53)
    last: int = Field(ge=1, lt=1 << 53)
    tokens: Count
    witness: PublicKey | None = None
    total: Count | None = None
    crew: list[messages.CrewShare] = Field(default=[], max_length=messages.MAX_CREW_MEMBERS)


class _CrewCount:
    """What an author had signed for its crew, up to the receipts so far."""

    def __init__(self) -> None:
        self._total = 0
        self._stated: dict[str, int] = {}

    def split(self, tokens: int, total: int, crew: Mapping[str, int]) -> dict[str, int]:
        """Return the members' parts of tokens that count, by what grew since the last receipt."""
        grown = {key: max(0, stated - self._stated.get(key, 0)) for key, stated in crew.items()}
        whole = max(1, total - self._total, sum(grown.values()))
        self._total = max(self._total, total)
        self._stated |= {key: self._stated.get(key, 0) + more for key, more in grown.items()}
        return {key: tokens * more // whole for key, more in grown.items() if tokens * more > whole}


def fold(facts: Sequence[Fact]) -> State | None:
    """Merge the receipts of all mirrors into one range a day.

    Mirrors receive attestations of the same updates from different witnesses, so ranges overlap.
    They are laid along each other by (first, longest, fewest tokens), and of each only the part
    that earlier ranges leave open counts: by the totals that the author signed at both ends of that
    part, or else by its share of the updates. No update counts twice, however often receipts name
    it, and none for more than was signed. Members of the author's crew have their parts of what
    counts.
    """
    receipts = {_sort_key(fact.payload) for fact in facts}
    days: Days = {}
    reach = 0  # the last update that counted
    reach_total = NO_TOTAL  # the author's total at that update
    counted = 0  # tokens that counted
    crew_count = _CrewCount()
    for first, negative_last, tokens, day, witness, total, crew in sorted(receipts):
        last = -negative_last
        begin = max(first, reach + 1)
        if last < begin:
            continue
        share = tokens * (last - begin + 1) // (last - first + 1)
        if begin > first and NO_TOTAL not in (reach_total, total):
            share = min(tokens, max(0, total - reach_total))
        if total != NO_TOTAL:
            share = min(share, max(0, total - counted))
        row = days.setdefault(day.isoformat(), {"first": begin, "tokens": 0})
        row.update(last=last, tokens=row["tokens"] + share, witness=witness or None)
        for key, part in crew_count.split(share, total, dict(crew)).items():
            parts = row.setdefault("crew", {})
            parts[key] = parts.get(key, 0) + part
        reach = last
        reach_total = total
        counted += share
    return {"days": days}


SortKey = tuple[int, int, int, date, str, int, tuple[tuple[str, int], ...]]


def _sort_key(receipt: CreditReceipt) -> SortKey:
    """Return the key by which ranges are laid along each other."""
    total = NO_TOTAL if receipt.total is None else receipt.total
    return (
        receipt.first,
        -receipt.last,
        receipt.tokens,
        receipt.day,
        receipt.witness or "",
        total,
        tuple((share.key, share.tokens) for share in receipt.crew),
    )


def store(credit_id: str, state: State | None) -> list[str]:
    """Write the days' rows.

    What this site has counted and not yet published stays on top of the state. That is not
    published because of this write: mirrors that answered each other's receipts with their own
    would never come to rest.

    Returns:
        Members of the author's crew whose machines this site does not know yet.
    """
    run, key, incarnation = credit_id.split(":")
    machine = require_row(Machine.objects.filter(key=key), f"machine:{key}")
    require_row(Run.objects.filter(pk=run), f"run:{run}")
    days = state["days"] if state else {}
    _write_days(run, machine, incarnation, days)
    members = dict(Machine.objects.filter(key__in=_member_keys(days)).values_list("key", "pk"))
    author = (run, machine.pk, incarnation)
    Credit.objects.filter(run=run, lead=machine, incarnation=incarnation).delete()
    Credit.objects.bulk_create(_crew_rows(author, days, members))
    return [f"machine:{key}" for key in sorted(_member_keys(days) - members.keys())]


def _member_keys(days: Days) -> set[str]:
    """Return the keys of all members that have a part of an author's tokens."""
    return {key for values in days.values() for key in values.get("crew", ())}


def _crew_rows(
    author: tuple[str, UUID, str], days: Days, machines: Mapping[str, UUID]
) -> list[Credit]:
    """Build the rows that move tokens from an author to its crew's members.

    The part of a member that this site does not know yet stays with the author.

    Args:
        author: run, machine and incarnation.
        days: the author's state.
        machines: machines by their keys.
    """
    run, lead, incarnation = author
    rows = []
    for day, values in days.items():
        crew = values.get("crew", {})
        parts = {machines[key]: tokens for key, tokens in crew.items() if key in machines}
        parts.pop(lead, None)
        if parts:
            parts[lead] = -sum(parts.values())
        rows += [
            Credit(
                run_id=run,
                lead_id=lead,
                machine_id=machine,
                incarnation=incarnation,
                day=day,
                first=1,
                last=0,
                tokens=tokens,
                published_tokens=tokens,
            )
            for machine, tokens in parts.items()
        ]
    return rows


def _write_days(run: str, machine: Machine, incarnation: str, days: Days) -> None:
    rows = Credit.authored.filter(run=run, machine=machine, incarnation=incarnation)
    locked = list(rows.order_by("day").select_for_update(of=("self",)))
    reach = _last_update(days)
    covered = sum(values["tokens"] for values in days.values())
    covered -= sum(row.published_tokens for row in locked)
    published_last = dict.fromkeys(
        days, reach
    )  # day → up to which update nothing is left to publish
    unpublished = _unpublished_ranges(locked)
    rest = count_unpublished_tokens(unpublished, reach, covered)
    for row, range_, tokens in zip(locked, unpublished, rest, strict=True):
        own = Credit.objects.filter(pk=row.pk)
        day = row.day.isoformat()
        before = max(range_.first - 1, reach) if tokens else reach
        if day in days:
            published_last[day] = before
            if tokens != range_.tokens:
                last = row.last if tokens else row.published_last
                own.update(tokens=row.published_tokens + tokens, last=last)
        elif tokens:
            own.update(first=before + 1, tokens=tokens, published_tokens=0, published_last=before)
        else:
            own.delete()
    witness_keys = [values["witness"] for values in days.values()]
    witnesses = dict(Machine.objects.filter(key__in=witness_keys).values_list("key", "pk"))
    published = _published_rows((run, machine.pk, incarnation), days, witnesses)
    for row, day in zip(published, days, strict=True):
        row.published_last = published_last[day]
    Credit.upsert(
        published,
        ("published_last", "published_tokens"),
        "first = excluded.first, "
        "last = CASE WHEN old.last > old.published_last "
        "THEN greatest(old.last, excluded.last) ELSE excluded.last END, "
        "tokens = excluded.tokens + old.tokens - old.published_tokens, "
        "published_last = excluded.published_last, "
        "published_tokens = excluded.published_tokens, witness_id = excluded.witness_id",
    )


def _published_rows(
    author: tuple[str, UUID, str], days: Days, witnesses: Mapping[str, UUID]
) -> list[Credit]:
    """Build the rows of an author whose receipts are all published.

    Args:
        author: run, machine and incarnation.
        days: the author's state.
        witnesses: machines by their keys.
    """
    run, machine, incarnation = author
    reach = _last_update(days)
    return [
        Credit(
            run_id=run,
            machine_id=machine,
            incarnation=incarnation,
            day=day,
            first=values["first"],
            last=values["last"],
            tokens=values["tokens"],
            published_last=reach,
            published_tokens=values["tokens"],
            witness_id=witnesses.get(values["witness"]),
        )
        for day, values in days.items()
    ]


def _last_update(days: Days) -> int:
    """Return the last update of all days; 0 if there is none."""
    return max((values["last"] for values in days.values()), default=0)


class UnpublishedRange(NamedTuple):
    """The updates `first` to `last`, with their tokens, that no receipt of this site names yet."""

    first: int
    last: int
    tokens: int


def _unpublished_ranges(rows: Sequence[Credit]) -> list[UnpublishedRange]:
    """Return the unpublished range of each of one author's rows, in the order of their days.

    What is counted on a day comes after everything that was counted before, even if another mirror
    published part of it at the beginning of the day.
    """
    ranges = []
    before = 0  # the last update of the days so far
    for row in rows:
        first = max(row.first, row.published_last + 1, before + 1)
        ranges.append(UnpublishedRange(first, row.last, row.tokens - row.published_tokens))
        before = max(before, row.last)
    return ranges


def count_unpublished_tokens(
    ranges: Sequence[UnpublishedRange], reach: int, covered: int
) -> list[int]:
    """Return, of each range, the tokens of updates that are still unpublished.

    Args:
        ranges: an author's unpublished ranges, in their order.
        reach: the last update that is published now.
        covered: tokens that were published since these ranges were counted. A range that was
            published in part loses what the ranges before it leave of them.
    """
    rest = []
    for range_ in ranges:
        in_part = min(range_.tokens, max(0, covered)) if range_.first <= reach else 0
        published = range_.tokens if range_.last <= reach else in_part
        covered -= published
        rest.append(range_.tokens - published)
    return rest


def store_batch(states: dict[str, State]) -> set[str]:
    """Write, all at once, authors that have no row yet and whose machine and run exist."""
    places = {credit_id: credit_id.split(":") for credit_id in states}
    keys = {key for _, key, _ in places.values()}
    for state in states.values():
        keys |= {values["witness"] for values in state["days"].values()}
        keys |= _member_keys(state["days"])
    machines = dict(Machine.objects.filter(key__in=keys - {None}).values_list("key", "pk"))
    run_ids = {run for run, _, _ in places.values()}
    runs = {str(pk) for pk in Run.objects.filter(pk__in=run_ids).values_list("pk", flat=True)}
    authors = [machines[key] for _, key, _ in places.values() if key in machines]
    existing = {
        (str(run), machine, incarnation)
        for run, machine, incarnation in Credit.authored.filter(
            run__in=runs, machine__in=authors
        ).values_list("run_id", "machine_id", "incarnation")
    }
    rows = []
    written = set()
    for credit_id, (run, key, incarnation) in places.items():
        if run not in runs or key not in machines or (run, machines[key], incarnation) in existing:
            continue
        if not _member_keys(states[credit_id]["days"]) <= machines.keys():
            continue
        written.add(credit_id)
        author = (run, machines[key], incarnation)
        rows += _published_rows(author, states[credit_id]["days"], machines)
        rows += _crew_rows(author, states[credit_id]["days"], machines)
    bulk_upsert(rows)
    return written


def record_credit_events() -> int:
    """Record what was counted here and no mirror has published yet; return the number of events."""
    recorded = 0
    unpublished = Credit.objects.exclude(tokens=F("published_tokens"))
    authors = unpublished.order_by("run", "machine", "incarnation").values_list(
        "run", "machine__key", "incarnation"
    )
    for run, key, incarnation in list(authors.distinct()[:MAX_AUTHORS]):
        credit_id = f"{run}:{key}:{incarnation}"
        with writer.log_transaction():
            rows = Credit.authored.filter(run=run, machine__key=key, incarnation=incarnation)
            locked = list(rows.order_by("day").select_for_update(of=("self",)))
            recorded += _record_receipts(credit_id, locked)
            # The state may be less than these rows, where other mirrors published the same updates.
            store(credit_id, current_state(f"credit:{credit_id}"))
    return recorded


def _record_receipts(credit_id: str, rows: list[Credit]) -> int:
    """Record the unpublished ranges of one author's rows, which are in the order of their days."""
    fresh = [
        (row, range_)
        for row, range_ in zip(rows, _unpublished_ranges(rows), strict=True)
        if range_.tokens
    ]
    for row, (first, last, tokens) in fresh:
        if last >= first:
            header = _header_of_last(row)
            receipt = {
                "day": row.day,
                "first": first,
                "last": last,
                "tokens": max(0, tokens),
                "witness": row.witness.key if row.witness else None,
                "total": header.total if header else None,
                "crew": _joined_members(row, header.crew) if header else [],
            }
            writer.record("credit.receipt", credit_id, receipt)
        Credit.objects.filter(pk=row.pk).update(
            published_last=row.last, published_tokens=row.tokens
        )
    return len(fresh)


def _header_of_last(row: Credit) -> messages.Update | None:
    """Return the header of the row's last update; None if the stored header is of another one."""
    if not row.author_header:
        return None
    header = messages.Update.model_validate_json(row.author_header["body"])
    return header if header.seq == row.last else None


def _joined_members(row: Credit, crew: Sequence[messages.CrewShare]) -> list[dict[str, Any]]:
    """Return the parts of those members who joined the run as members of a crew."""
    if not crew:
        return []
    keys = [share.key for share in crew]
    joined = Membership.everywhere.filter(run=row.run_id, in_crew=True, machine__key__in=keys)
    joined_keys = set(joined.values_list("machine__key", flat=True))
    return [share.model_dump() for share in crew if share.key in joined_keys]


AGGREGATE_TYPE = AggregateType(
    "credit", {"receipt": CreditReceipt}, fold, store, store_batch=store_batch
)
