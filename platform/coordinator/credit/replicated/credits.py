"""The kind "credit", by run, peer and incarnation: receipts, each of a range of one author's updates."""

from collections.abc import Sequence
from datetime import date
from typing import Any, NamedTuple

from django.db import connection
from django.db.models import F
from pydantic import Field
from uuid6 import uuid7

from barnraise.protocol import messages
from barnraise.protocol.types import Count, Message, PublicKey
from coordinator.accounts.models import Machine
from coordinator.credit.models import Credit
from coordinator.eventlog import writer
from coordinator.eventlog.projection import current_state
from coordinator.eventlog.registry import AggregateType, DependencyMissingError, Fact, State
from coordinator.lib.bulk_upsert import bulk_upsert
from coordinator.runs.models import Run

NO_TOTAL = -1  # where no total was signed


class CreditReceipt(Message):
    """`tokens` of updates `first` to `last`; `witness`: the machine of another person that said it has the last.
    `total`: of all updates up to the last, as the author signed it with that one.
    """

    day: date
    first: int = Field(ge=1, lt=1 << 53)
    last: int = Field(ge=1, lt=1 << 53)
    tokens: Count
    witness: PublicKey | None = None
    total: Count | None = None


def fold(facts: Sequence[Fact]) -> State | None:
    """The union of all ranges. Mirrors hear of the same updates from different witnesses, so ranges overlap: they are
    laid along each other by (first, longest, fewest tokens), and of each only what the ones before it leave open
    counts: by what the author signed at both ends of that, or else by its share of updates. No update counts twice,
    whoever told of it and how often, and none for more than was signed.
    """
    told = {_placed(fact.payload) for fact in facts}
    days: dict[str, dict[str, Any]] = {}
    reach, before, counted = (
        0,
        NO_TOTAL,
        0,
    )  # the last update that counted, the author's total there, and all that counts
    for first, end, tokens, day, witness, total in sorted(told):
        last, begin = -end, max(first, reach + 1)
        if last < begin:
            continue
        share = tokens * (last - begin + 1) // (last - first + 1)
        if begin > first and NO_TOTAL not in (before, total):
            share = min(tokens, max(0, total - before))
        if total != NO_TOTAL:
            share = min(share, max(0, total - counted))
        row = days.setdefault(day.isoformat(), {"first": begin, "tokens": 0})
        row.update(last=last, tokens=row["tokens"] + share, witness=witness or None)
        reach, before, counted = last, total, counted + share
    return {"days": days}


def _placed(said: CreditReceipt) -> tuple[int, int, int, date, str, int]:
    """As ranges are laid along each other."""
    total = NO_TOTAL if said.total is None else said.total
    return said.first, -said.last, said.tokens, said.day, said.witness or "", total


def store(which: str, state: State | None) -> None:
    """What this site has heard and nobody has told yet stays on top of what the state says. It is not told because of
    that: mirrors that answered each other's receipts with their own would never come to rest.
    """
    run, key, incarnation = which.split(":")
    machine = Machine.objects.filter(key=key).first()
    if machine is None or not Run.objects.filter(pk=run).exists():
        raise DependencyMissingError(f"machine:{key}" if machine is None else f"run:{run}")
    _write(run, machine, incarnation, state["days"] if state else {})


def _write(run: str, machine: Machine, incarnation: str, days: dict[str, dict[str, Any]]) -> None:
    rows = Credit.objects.filter(run=run, machine=machine, incarnation=incarnation)
    locked = list(rows.order_by("day").select_for_update(of=("self",)))
    reach = _reach(days)
    covered = sum(said["tokens"] for said in days.values()) - sum(
        row.published_tokens for row in locked
    )
    told = dict.fromkeys(
        days, reach
    )  # day → up to which update nothing is to be told of it any more
    untold = _unpublished_ranges(locked)
    for row, heard, rest in zip(locked, untold, remaining(untold, reach, covered), strict=True):
        mine, day = Credit.objects.filter(pk=row.pk), row.day.isoformat()
        before = max(heard.first - 1, reach) if rest else reach
        if day in days:
            told[day] = before
            if rest != heard.tokens:
                mine.update(
                    tokens=row.published_tokens + rest,
                    last=row.last if rest else row.published_last,
                )
        elif rest:
            mine.update(first=before + 1, tokens=rest, published_tokens=0, published_last=before)
        else:
            mine.delete()
    witnesses = dict(
        Machine.objects.filter(key__in=[d["witness"] for d in days.values()]).values_list(
            "key", "pk"
        )
    )
    for day, said in days.items():
        _put(run, machine, incarnation, day, said, told[day], witnesses.get(said["witness"]))


def _reach(days: dict[str, dict[str, Any]]) -> int:
    """The last update that any of them has; 0 where receipts were of nothing."""
    return max((said["last"] for said in days.values()), default=0)


class UnpublishedRange(NamedTuple):
    """Updates `first` to `last`, of so many tokens."""

    first: int
    last: int
    tokens: int


def _unpublished_ranges(rows: Sequence[Credit]) -> list[UnpublishedRange]:
    """Of one author's rows, in the order of their days. What is heard on a day comes after all that was heard before,
    also where another mirror told of the same at the day's beginning and has not told of all of it.
    """
    untold, before = [], 0  # the last update of the days so far
    for row in rows:
        untold.append(
            UnpublishedRange(
                max(row.first, row.published_last + 1, before + 1),
                row.last,
                row.tokens - row.published_tokens,
            )
        )
        before = max(before, row.last)
    return untold


def remaining(untold: Sequence[UnpublishedRange], reach: int, covered: int) -> list[int]:
    """Of each of these ranges, in their order, the tokens of updates after `reach`, up to which all is told now.
    `covered`: tokens that were told since these ranges were heard; of a range that was told in part they are what the
    ranges before it leave of them.
    """
    rest = []
    for each in untold:
        in_part = min(each.tokens, max(0, covered)) if each.first <= reach else 0
        gone = each.tokens if each.last <= reach else in_part
        covered -= gone
        rest.append(each.tokens - gone)
    return rest


def store_batch(states: dict[str, State]) -> set[str]:
    """Of machines and runs that are here, those with no row at all."""
    places = {which: which.split(":") for which in states}
    keys = {key for _, key, _ in places.values()}
    keys |= {said["witness"] for state in states.values() for said in state["days"].values()}
    machines = dict(Machine.objects.filter(key__in=keys - {None}).values_list("key", "pk"))
    runs = set(
        map(
            str,
            Run.objects.filter(pk__in={run for run, _, _ in places.values()}).values_list(
                "pk", flat=True
            ),
        )
    )
    mine = [machines[key] for _, key, _ in places.values() if key in machines]
    there = Credit.objects.filter(run__in=runs, machine__in=mine).values_list(
        "run_id", "machine_id", "incarnation"
    )
    known = {(str(run), machine, incarnation) for run, machine, incarnation in there}
    rows, done = [], set()
    for which, (run, key, incarnation) in places.items():
        if run not in runs or key not in machines or (run, machines[key], incarnation) in known:
            continue
        done.add(which)
        reach = _reach(states[which]["days"])
        for day, said in states[which]["days"].items():
            told = {
                "published_last": reach,
                "published_tokens": said["tokens"],
                "witness_id": machines.get(said["witness"]),
            }
            place = {
                "run_id": run,
                "machine_id": machines[key],
                "incarnation": incarnation,
                "day": day,
            }
            rows.append(
                Credit(
                    **place, **told, **{name: said[name] for name in ("first", "last", "tokens")}
                )
            )
    bulk_upsert(rows)
    return done


def _put(
    run: str, machine: Machine, incarnation: str, day: str, said: dict, told: int, witness: Any
) -> None:
    """One statement: reports are rolled up meanwhile, and what they add must not be lost."""
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO credit_credit AS mine (id, run_id, machine_id, incarnation, day, first, last, tokens, "
            "published_last, published_tokens, witness_id) VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s) "
            "ON CONFLICT (run_id, machine_id, incarnation, day) DO UPDATE SET first = excluded.first, "
            "last = CASE WHEN mine.last > mine.published_last THEN greatest(mine.last, excluded.last) "
            "ELSE excluded.last END, "
            "tokens = excluded.tokens + mine.tokens - mine.published_tokens, published_last = excluded.published_last, "
            "published_tokens = excluded.tokens, witness_id = excluded.witness_id",
            [uuid7(), run, machine.pk, incarnation, day, said["first"], said["last"], said["tokens"], told,
             said["tokens"], witness],
        )  # fmt: skip


def record_credit_events() -> int:
    """What was witnessed here since the last time, and no other mirror has told meanwhile. How many events."""
    told = 0
    quiet = Credit.objects.exclude(tokens=F("published_tokens")).order_by(
        "run", "machine", "incarnation"
    )
    for run, key, incarnation in list(
        quiet.values_list("run", "machine__key", "incarnation").distinct()[:2000]
    ):
        which = f"{run}:{key}:{incarnation}"
        with writer.log_transaction():
            rows = Credit.objects.filter(run=run, machine__key=key, incarnation=incarnation)
            told += _tell(which, list(rows.order_by("day").select_for_update(of=("self",))))
            store(
                which, current_state(f"credit:{which}")
            )  # which may be less, where others told of the same
    return told


def _tell(which: str, rows: list[Credit]) -> int:
    """`rows`: in the order of their days."""
    fresh = [
        (row, untold)
        for row, untold in zip(rows, _unpublished_ranges(rows), strict=True)
        if untold.tokens
    ]
    for row, (first, last, tokens) in fresh:
        if last >= first:
            witness = row.witness.key if row.witness else None
            said = {"day": row.day, "first": first, "last": last, "tokens": max(0, tokens)}
            writer.record(
                "credit.receipt", which, said | {"witness": witness, "total": _signed(row)}
            )
        Credit.objects.filter(pk=row.pk).update(
            published_last=row.last, published_tokens=row.tokens
        )
    return len(fresh)


def _signed(row: Credit) -> int | None:
    """The author's total at the row's last update, where the header that is kept is of that one."""
    head = (
        messages.Update.model_validate_json(row.author_header["body"])
        if row.author_header
        else None
    )
    return head.total if head and head.seq == row.last else None


AGGREGATE_TYPE = AggregateType(
    "credit", {"receipt": CreditReceipt}, fold, store, store_batch=store_batch
)
