"""Verify, store and fold events of other origins.

A log's batch is stored whole or rejected whole.
"""

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

# SQL: the aggregate type in an aggregate's name.
AGGREGATE_TYPE = Func("name", Value(":"), Value(1), function="split_part", output_field=TextField())


@dataclass
class IngestResult:
    """Summarise what happened to some events."""

    stored: int = 0  # events that were new
    # Origin → the sentence why none of its events were stored; the key is "" if an event cannot be
    # opened at all.
    rejected: dict[str, str] = field(default_factory=dict)
    # Origins that signed two events with one number.
    forked: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _LogBatch:
    """Hold consecutive events of one origin, opened and as they were signed."""

    origin: str
    events: list[tuple[Event, Signed]] = field(default_factory=list)


@dataclass(frozen=True)
class _Head:
    """Describe the event that the next one of a log must follow."""

    seq: int
    digest: str
    hlc: int


def ingest_events(
    signed: Sequence[Signed],
    *,
    read: Callable[[], Sequence[Event]] | None = None,
    keys: Container[str] | None = None,
    defer: bool = False,
) -> IngestResult:
    """Store events of any origins; each origin's events must ascend.

    All events of an origin are stored, or none. If one of all the events cannot be opened, nothing
    is stored, because the sender is not trustworthy.

    Args:
        signed: The events.
        read: Returns the opened events, if a caller opens them elsewhere (raises MessageError).
        keys: Keys of the mirrors whose events are accepted; None accepts any key.
        defer: Leave folding to a later `project_pending`.
    """
    result = IngestResult()
    batches: dict[str, _LogBatch] = {}
    try:
        events = read() if read else open_events(signed)
    except MessageError as error:
        return IngestResult(rejected={"": UserError(str(error)).sentence})
    for event, signed_event in zip(events, signed, strict=True):
        batch = batches.setdefault(event.origin, _LogBatch(event.origin))
        batch.events.append((event, signed_event))
    for batch in batches.values():
        try:
            with log_transaction() as log_state:
                result.stored += _ingest_batch(log_state, batch, keys, result)
        except UserError as error:
            result.rejected[batch.origin] = error.sentence
    if not defer:
        project_pending()
    return result


def _ingest_batch(
    log_state: LogState, batch: _LogBatch, keys: Container[str] | None, result: IngestResult
) -> int:
    """Store one log's events; return how many were new. Raises UserError for an invalid one."""
    origin = Origin.objects.filter(pk=batch.origin).first()
    origin = origin or Origin(id=batch.origin, key=batch.events[0][1].key)
    if keys is not None and origin.key not in keys:
        raise UserError(
            f"log {origin.pk[:8]} is signed by {origin.key[:8]}, which is no mirror of the list"
        )
    stored_digests = _stored_digests(origin, batch)
    understood_types = set(registry.event_types())
    head = _Head(origin.head_seq, origin.head_digest, origin.head_hlc)
    fresh: list[LogRow] = []
    for event, signed in batch.events:
        if signed.key != origin.key:
            raise UserError(
                f"event {event.seq} of log {origin.pk[:8]} is signed by {signed.key[:8]}, and the "
                f"log is {origin.key[:8]}'s"
            )
        if event.seq <= head.seq:
            stored_digest = stored_digests.get(event.seq)
            stored_digest = stored_digest or next(
                (row.digest for row in fresh if row.seq == event.seq), ""
            )
            if stored_digest != digest(signed.body):
                _ingest_fork(log_state, origin, event.seq, fresh, signed)
                result.forked.append(origin.pk)
                return 0
            continue
        _check_follows(origin, event, head)
        row = build_row(event, signed, event.type in understood_types)
        head = _Head(row.seq, row.digest, row.hlc)
        fresh.append(row)
    if fresh:
        _store(log_state, origin, fresh)
    return len(fresh)


def _stored_digests(origin: Origin, batch: _LogBatch) -> dict[int, str]:
    """Return number → digest of those events of a batch that are stored already."""
    overlap = [event.seq for event, _ in batch.events if event.seq <= origin.head_seq]
    if not overlap:
        return {}
    stored = LogEvent.objects.filter(origin=origin.pk, seq__in=overlap).order_by()
    return dict(stored.values_list("seq", "digest"))


def _check_follows(origin: Origin, event: Event, head: _Head) -> None:
    """Raise UserError unless the event is the valid successor of `head`."""
    name = origin.pk[:8]
    if origin.last_valid_seq is not None and event.seq > origin.last_valid_seq:
        raise UserError(
            f"log {name} ends with event {origin.last_valid_seq}: {origin.truncation_reason}"
        )
    if event.seq != head.seq + 1:
        raise UserError(
            f"log {name} has a hole: event {event.seq} came, and {head.seq} is the last before it "
            "here"
        )
    begins = (event.type, event.aggregate) == ("origin.begin", f"origin:{origin.pk}")
    if event.seq == 1 and not begins:
        raise UserError(f"log {name} does not begin as a log does")
    if event.prev != head.digest:
        raise UserError(
            f"event {event.seq} of log {name} does not follow the event {head.seq} that is here"
        )
    if event.hlc <= head.hlc:
        raise UserError(f"event {event.seq} of log {name} is stamped before the one it follows")


def _store(log_state: LogState, origin: Origin, fresh: list[LogRow]) -> None:
    """Store checked events and mark their aggregates stale."""
    last = fresh[-1]
    now = corrected_time()
    if hlc_module.is_too_far_ahead(last.hlc, now):
        lead = hlc_module.to_seconds(last.hlc) - now
        raise UserError(
            f"event {last.seq} of log {origin.pk[:8]} is stamped {lead:,.0f} s ahead of this "
            "site's time: later"
        )
    if origin._state.adding:
        origin.save(force_insert=True)
    _copy_into_log(fresh)
    projection.mark_stale({row.aggregate for row in fresh if row.understood})
    advance_head(origin, last)
    log_state.hlc = max(log_state.hlc, last.hlc)
    log_state.save(update_fields=["hlc"])


def _ingest_fork(
    log_state: LogState, origin: Origin, seq: int, fresh: list[LogRow], second: Signed
) -> None:
    """Record two events with one number: reject the batch and truncate the log before them."""
    first = next((row.signed for row in fresh if row.seq == seq), None)
    first = first or LogEvent.objects.get(origin=origin.pk, seq=seq).signed
    if origin._state.adding:
        origin.save(force_insert=True)
    record_fork(log_state, origin, seq, first, second)


def project_pending(defer: bool = False) -> int:
    """Fold all stale aggregates, as far as this version understands their events.

    Call it after `ingest_events` and after an upgrade. Aggregate types are folded in the order of
    registration, so that few rows wait for others.

    Args:
        defer: Leave writing rows to the next `project_pending`.

    Returns:
        The number of aggregates whose state changed.
    """
    _mark_newly_understood()
    stale_types = set(
        Aggregate.objects.filter(stale=True).values_list(AGGREGATE_TYPE, flat=True).distinct()
    )
    changed = sum(
        _refold_stale(aggregate_type, defer)
        for aggregate_type in registry.aggregate_types().values()
        if aggregate_type.name in stale_types
    )
    if not defer and Aggregate.objects.filter(projected=False).exists():
        with log_transaction():
            projection.write_pending_rows()
    return changed


def _mark_newly_understood() -> None:
    """Mark aggregates stale whose events arrived before this version knew their type."""
    unknown = LogEvent.objects.filter(
        understood=False, accepted=True, type__in=registry.event_types()
    )
    if unknown.exists():
        with log_transaction():
            projection.mark_stale(set(unknown.order_by().values_list("aggregate", flat=True)))
            unknown.update(understood=True)


def _refold_stale(aggregate_type: registry.AggregateType, defer: bool) -> int:
    """Fold one type's stale aggregates by name, in batches that share no events."""
    stale = Aggregate.objects.filter(stale=True, name__startswith=f"{aggregate_type.name}:")
    names = stale.order_by("name").values_list("name", flat=True)
    changed = 0
    last = ""
    while batch := list(names.filter(name__gt=last)[: projection.BATCH_SIZE]):
        last = batch[-1]
        with log_transaction() as log_state:
            changed += projection.refold(batch, log_state, store=True, defer=defer)
    return changed


def _copy_into_log(rows: Sequence[LogRow]) -> None:
    """Insert rows by COPY: a new mirror receives a hundred thousand events."""
    columns = ", ".join(f'"{name}"' for name in LogRow._fields)
    with (
        connection.cursor() as cursor,
        cursor.copy(f"COPY {LogEvent._meta.db_table} ({columns}) FROM STDIN") as copy,  # pyright: ignore[reportAttributeAccessIssue] - psycopg's own COPY
    ):
        for row in rows:
            copy.write_row(row)
