"""Other origins' events: verified, chained, kept, folded. What does not fit is refused whole, with a sentence."""

from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from django.db import connection
from django.db.models import TextField, Value
from django.db.models.expressions import Func

from barnraise.errors import MessageError
from barnraise.protocol.messages import Signed
from barnraise.protocol.signing import digest
from coordinator.eventlog import hlc as hlc_module
from coordinator.eventlog import projection, registry
from coordinator.eventlog.event import Event, open_events
from coordinator.eventlog.models import Aggregate, LogEvent, LogState, Origin
from coordinator.eventlog.truncate import record_fork
from coordinator.eventlog.writer import (
    LogRow,
    advance_head,
    build_row,
    corrected_time,
    log_transaction,
)
from coordinator.lib.exceptions import UserError

KIND = Func(
    "name", Value(":"), Value(1), function="split_part", output_field=TextField()
)  # of a subject


@dataclass
class IngestResult:
    """`stored`: events that were new. `refused`: origin ("" where none can be read) → why none of its events of this
    run were taken. `forked`: origins that were caught signing two events with one number."""

    stored: int = 0
    rejected: dict[str, str] = field(default_factory=dict)
    forked: list[str] = field(default_factory=list)


def ingest_events(
    signed: Sequence[Signed],
    *,
    read: Callable[[], Sequence[Event]] | None = None,
    keys: Container[str] | None = None,
    later: bool = False,
) -> IngestResult:
    """Events of whatever origins, each origin's ascending. `read`: what `read_all` says of them, where somebody is at
    it already; `keys`: the mirrors whose word counts (None: anybody's). `later`: kept, and folded when `settle` is
    called. All of an origin's, or none; with one that is altered, or no event at all, nothing."""
    told = IngestResult()
    runs: dict[str, list[tuple[Event, Signed]]] = defaultdict(list)
    try:
        events = read() if read else open_events(signed)
    except MessageError as error:
        return IngestResult(
            rejected={"": UserError(str(error)).sentence}
        )  # who sent that is not to be read further
    for event, each in zip(events, signed, strict=True):
        runs[event.origin].append((event, each))
    for origin, run in runs.items():
        try:
            with log_transaction() as tally:
                told.stored += _take(tally, origin, run, keys, told)
        except UserError as error:
            told.rejected[origin] = error.sentence
    if not later:
        project_pending()
    return told


def _take(
    tally: LogState,
    origin_id: str,
    run: list[tuple[Event, Signed]],
    keys: Container[str] | None,
    told: IngestResult,
) -> int:
    origin = Origin.objects.filter(pk=origin_id).first() or Origin(id=origin_id, key=run[0][1].key)
    if keys is not None and origin.key not in keys:
        raise UserError(
            f"log {origin.pk[:8]} is signed by {origin.key[:8]}, which is no mirror of the list"
        )
    before = [event.seq for event, _ in run if event.seq <= origin.head_seq]
    kept = LogEvent.objects.filter(origin=origin.pk, seq__in=before).order_by()
    known = dict(kept.values_list("seq", "digest")) if before else {}
    fresh: list[LogRow] = []
    understood = set(registry.event_types())
    seq, last, hlc = origin.head_seq, origin.head_digest, origin.head_hlc
    for event, signed in run:
        if signed.key != origin.key:
            raise UserError(
                f"event {event.seq} of log {origin.pk[:8]} is signed by {signed.key[:8]}, and the log is "
                f"{origin.key[:8]}'s"
            )
        if event.seq <= seq:
            mine = known.get(event.seq) or next((e.digest for e in fresh if e.seq == event.seq), "")
            if mine != digest(signed.body):
                return _forked(tally, origin, event.seq, fresh, signed, told)
            continue
        if origin.cut_seq is not None and event.seq > origin.cut_seq:
            raise UserError(f"log {origin.pk[:8]} ends with event {origin.cut_seq}: {origin.why}")
        if event.seq != seq + 1:
            raise UserError(
                f"log {origin.pk[:8]} has a hole: event {event.seq} came, and {seq} is the last before it here"
            )
        if event.seq == 1 and (event.type, event.aggregate) != (
            "origin.begin",
            f"origin:{origin.pk}",
        ):
            raise UserError(f"log {origin.pk[:8]} does not begin as a log does")
        if event.prev != last:
            raise UserError(
                f"event {event.seq} of log {origin.pk[:8]} does not follow the event {seq} that is here"
            )
        if event.hlc <= hlc:
            raise UserError(
                f"event {event.seq} of log {origin.pk[:8]} is stamped before the one it follows"
            )
        made = build_row(event, signed, event.type in understood)
        seq, last, hlc = made.seq, made.digest, made.hlc
        fresh.append(made)
    if not fresh:
        return 0
    if hlc_module.is_too_far_ahead(hlc, here := corrected_time()):
        far = hlc_module.to_seconds(hlc) - here
        raise UserError(
            f"event {seq} of log {origin.pk[:8]} is stamped {far:,.0f} s ahead of this site's time: later"
        )
    if origin._state.adding:
        origin.save(force_insert=True)
    _keep(fresh)
    projection.mark_stale({event.subject for event in fresh if event.understood})
    advance_head(origin, fresh[-1])
    tally.hlc = max(tally.hlc, hlc)
    tally.save(update_fields=["hlc"])
    return len(fresh)


def _forked(
    tally: LogState,
    origin: Origin,
    seq: int,
    fresh: list[LogRow],
    second: Signed,
    told: IngestResult,
) -> int:
    """Two events with one number. Of this run nothing is taken; what was taken before is cut from that number on."""
    first = next((event.signed for event in fresh if event.seq == seq), None)
    first = first or LogEvent.objects.get(origin=origin.pk, seq=seq).signed
    if origin._state.adding:
        origin.save(force_insert=True)
    record_fork(tally, origin, seq, first, second)
    told.forked.append(origin.pk)
    return 0


def project_pending(later: bool = False) -> int:
    """Folds the subjects whose events say more than was folded, as far as this version understands them: after
    `receive`, and after an upgrade. Kinds in their order, so that few rows wait for others. `later`: rows are written
    by the next `settle`. How many subjects changed."""
    _learn()
    news = set(Aggregate.objects.filter(stale=True).values_list(KIND, flat=True).distinct())
    changed = sum(
        _settle(kind, later) for kind in registry.aggregate_types().values() if kind.name in news
    )
    if not later and Aggregate.objects.filter(stored=False).exists():
        with log_transaction():
            projection.write_pending_rows()
    return changed


def _learn() -> None:
    """What came before this version knew its type."""
    unknown = LogEvent.objects.filter(
        understood=False, accepted=True, type__in=registry.event_types()
    )
    if unknown.exists():
        with log_transaction():
            projection.mark_stale(set(unknown.order_by().values_list("subject", flat=True)))
            unknown.update(understood=True)


def _settle(kind: registry.AggregateType, later: bool) -> int:
    """In the order of subjects, from where the last batch ended: each batch reads its own events and no others'."""
    stale = Aggregate.objects.filter(stale=True, name__startswith=f"{kind.name}:").order_by("name")
    names = stale.values_list("name", flat=True)
    changed, last = 0, ""
    while some := list(names.filter(name__gt=last)[: projection.BATCH_SIZE]):
        last = some[-1]
        with log_transaction() as tally:
            changed += projection.refold(some, tally, store=True, later=later)
    return changed


def _keep(lines: Sequence[LogRow]) -> None:
    """Into the log, by COPY: a new mirror takes in a hundred thousand."""
    names = ", ".join(f'"{name}"' for name in LogRow._fields)
    with (
        connection.cursor() as cursor,
        cursor.copy(f"COPY {LogEvent._meta.db_table} ({names}) FROM STDIN") as copy,
    ):
        for each in lines:
            copy.write_row(each)
