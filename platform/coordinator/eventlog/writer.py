"""Append to this site's own log, stamp events, and serve the events of all logs.

`record` is the only way to publish a change that was made here.
"""

import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple
from uuid import UUID

from django.conf import settings
from django.db import transaction
from django.dispatch import Signal
from pydantic import Field
from uuid6 import uuid7

from barnraise.protocol.clock import estimate_offset, median_clock_offset
from barnraise.protocol.messages import Signed
from barnraise.protocol.signing import digest
from barnraise.protocol.types import Message, PlainText
from coordinator.eventlog import hlc as hlc_module
from coordinator.eventlog import projection, registry
from coordinator.eventlog.event import MAX_EVENT_CHARS, NO_DIGEST, Event, OriginId
from coordinator.eventlog.models import Aggregate, LogEvent, LogState, Origin, PeerClock
from coordinator.eventlog.registry import AggregateType, Fact, State
from coordinator.lib import site_identity
from coordinator.lib.exceptions import RestorePendingError
from coordinator.lib.monotonic_clock import boot_id, uptime
from coordinator.lib.ttl_cache import TtlCache

log = logging.getLogger("coordinator.eventlog")
MAX_SERVED = 1000  # events in one answer
CLOCK_MAX_AGE = 600.0  # seconds for which a measured clock offset is used

event_recorded = Signal()  # sent after the commit of an event that was recorded here

# Every event needs the offsets. The lifetime is short, because another process may measure newer.
_clocks: TtlCache[str, list[PeerClock]] = TtlCache(1.0, 1)


@contextmanager
def log_transaction() -> Iterator[LogState]:
    """Open a transaction that may change replicated data.

    It locks the log state *before* any other row. Such transactions therefore run one after the
    other, and no two of them wait for each other's rows.
    """
    with transaction.atomic():
        locked = LogState.objects.select_for_update()
        log_state = locked.first()
        if log_state is None:  # the very first transaction
            LogState.objects.bulk_create([LogState()], ignore_conflicts=True)
            log_state = locked.get()
        yield log_state


def record(event_type: str, aggregate: object, payload: dict[str, Any]) -> LogEvent:
    """Append an event to our log, within the caller's transaction. The caller writes the rows.

    Args:
        event_type: "aggregate_type.action".
        aggregate: Name of the aggregate, with or without "aggregate_type:" in front.
        payload: Content, shaped as the aggregate type declares. UUIDs are written as text.

    Raises:
        RestorePendingError: The site was restored and does not have the end of its log back.
        OtherSiteError: The database belongs to another site's key.
    """
    type_name, _, action = event_type.partition(".")
    aggregate_type = registry.aggregate_types()[type_name]
    plain = {
        name: str(value) if isinstance(value, UUID) else value for name, value in payload.items()
    }
    content = aggregate_type.payload_types[action].model_validate(plain).model_dump(mode="json")
    name = str(aggregate)
    if not name.startswith(f"{type_name}:"):
        name = f"{type_name}:{name}"
    with log_transaction() as log_state:
        event = _append(log_state, _writable_origin(log_state), event_type, name, content)
        projection.refold([name], log_state, store=False)
        transaction.on_commit(_send_event_recorded)
    return event


def _send_event_recorded() -> None:
    event_recorded.send(LogEvent)


def _append(
    log_state: LogState, origin: Origin, event_type: str, name: str, content: dict[str, Any]
) -> LogEvent:
    log_state.hlc = hlc_module.next_stamp(log_state.hlc, corrected_time())
    event = Event(
        id=str(uuid7()),
        origin=origin.pk,
        seq=origin.head_seq + 1,
        prev=origin.head_digest,
        hlc=log_state.hlc,
        type=event_type,
        aggregate=name,
        payload=content,
    )
    signed = site_identity.identity().sign("event", event)
    assert len(signed.body) <= MAX_EVENT_CHARS, f"{event_type} does not fit into an event"
    row = LogEvent(**build_row(event, signed, understood=True)._asdict())
    row.save(force_insert=True)
    advance_head(origin, row)
    return row


class LogRow(NamedTuple):
    """Hold the columns of a `LogEvent` that is not stored yet; a batch may have 100,000 of them."""

    digest: str
    uuid: str
    origin_id: str
    seq: int
    hlc: int
    type: str
    aggregate: str
    body: str
    key: str
    signature: str
    accepted: bool
    understood: bool

    @property
    def signed(self) -> Signed:
        """Return the event as its author signed it."""
        return Signed(key=self.key, body=self.body, signature=self.signature)


def build_row(event: Event, signed: Signed, understood: bool) -> LogRow:
    """Build the row of an opened event."""
    return LogRow(
        digest=digest(signed.body),
        uuid=event.id,
        origin_id=event.origin,
        seq=event.seq,
        hlc=event.hlc,
        type=event.type,
        aggregate=event.aggregate,
        body=signed.body,
        key=signed.key,
        signature=signed.signature,
        accepted=True,
        understood=understood,
    )


def advance_head(origin: Origin, last: LogEvent | LogRow) -> None:
    """Store that `last` is now the log's newest event."""
    origin.head_seq = last.seq
    origin.head_digest = last.digest
    origin.head_hlc = last.hlc
    origin.save(update_fields=["head_seq", "head_digest", "head_hlc"])


# ---- the life of our own log ---------------------------------------------------------------------


class LogStarted(Message):
    """Begin a log: name its writer, and the log that this one continues."""

    name: PlainText = Field(max_length=100)
    after: OriginId | None = None


def fold_origin(facts: Sequence[Fact]) -> State | None:
    """Return the content of the one first event; the chain of digests allows no second one."""
    return {"name": facts[0].payload.name, "after": facts[0].payload.after}


def store_origin(name: str, state: State | None) -> None:
    """Write nothing: the row of a log exists before any of its events is folded."""


ORIGIN = AggregateType("origin", {"begin": LogStarted}, fold_origin, store_origin)


def _writable_origin(log_state: LogState) -> Origin:
    """Return the log that this site appends to; start a new one if necessary.

    A truncated log is never continued.

    Raises:
        OtherSiteError: The log is another key's: several hosts would end each other's logs.
    """
    origin = Origin.objects.filter(ours=True).first()
    if origin:
        site_identity.check_key(origin.key)
    if origin and origin.last_valid_seq is None:
        return origin
    if log_state.restore_pending:
        raise RestorePendingError
    return start_log(log_state)


def start_log(log_state: LogState) -> Origin:
    """Start a new log of ours, bound to this site's key by its first event, which names the last.

    A restored site needs a new log, because the numbers that follow in the old one may already be
    in use and may come back from other mirrors.
    """
    before = Origin.objects.filter(key=site_identity.identity().key).order_by("-first_seen").first()
    Origin.objects.filter(ours=True).update(ours=False)
    origin = Origin.objects.create(
        id=secrets.token_hex(16), key=site_identity.identity().key, ours=True
    )
    content = {"name": settings.MIRROR_NAME, "after": before.pk if before else None}
    event = _append(log_state, origin, "origin.begin", f"origin:{origin.pk}", content)
    projection.refold([event.aggregate], log_state, store=False)
    return origin


def abandon_log(*, wait_for_mirrors: bool) -> None:
    """Stop appending to our log, after the database was restored from a backup.

    What was written after the backup may be known elsewhere. The end of the log is pulled from
    other mirrors like anybody's, and the next event starts a new log.

    Args:
        wait_for_mirrors: Keep the site read-only until `resume`: without its own last decisions it
            must decide nothing.
    """
    # A backup of an earlier version is not migrated yet, so only these columns are named.
    with transaction.atomic():
        LogState.objects.update(restore_pending=wait_for_mirrors)
        Origin.objects.filter(ours=True).update(ours=False)


def is_restore_pending() -> bool:
    """Return whether this site was restored and still waits for the end of its own log."""
    return LogState.objects.filter(restore_pending=True).exists()


def resume() -> None:
    """End the wait after a restore and start a new log.

    Call it once our own log is back, or because the operator decides so.
    """
    if not is_restore_pending():
        return
    with log_transaction() as log_state:
        if log_state.restore_pending:
            log_state.restore_pending = False
            log_state.save(update_fields=["restore_pending"])
            start_log(log_state)


def record_existing_rows() -> int:
    """Record events for rows that no event describes: a site may be older than its log.

    Returns:
        The number of events recorded; 0 while a restore is pending.
    """
    recorded = 0
    if is_restore_pending():
        return recorded
    with log_transaction():
        for aggregate_type in registry.aggregate_types().values():
            prefix = f"{aggregate_type.name}:"
            described = set(
                Aggregate.objects.filter(name__startswith=prefix).values_list("name", flat=True)
            )
            for event_type, name, payload in aggregate_type.existing_events():
                if prefix + str(name) not in described:
                    record(event_type, name, payload)
                    recorded += 1
    return recorded


# ---- time ----------------------------------------------------------------------------------------


def corrected_time() -> float:
    """Return seconds since 1970, corrected if this clock differs far from the other mirrors'."""
    correction = hlc_module.clock_correction(_peer_offsets())
    if correction != 0:
        log.error(
            "this machine's clock is %+.0f s from the other mirrors': events are stamped with "
            "theirs",
            -correction,
        )
    return time.time() + correction


def record_peer_clock(key: str, peer_time: float, round_trip: float = 0.0) -> None:
    """Store what another mirror's clock showed.

    Args:
        key: The mirror's public key.
        peer_time: The time it signed, in seconds since 1970.
        round_trip: Seconds from the request to now; the mirror read its clock meanwhile.
    """
    stored = PeerClock.objects.filter(key=key).first()
    known = 0.0 if stored is None else stored.offset_seconds
    offset = estimate_offset(peer_time, time.time(), round_trip, known)
    if offset is None:
        return
    measured = {
        "offset_seconds": offset,
        "measured_at": datetime.fromtimestamp(time.time(), UTC),
        "uptime": uptime(),
        "boot_id": boot_id(),
    }
    PeerClock.objects.update_or_create(key=key, defaults=measured)
    _clocks.invalidate("all")


def clock_offset() -> float:
    """Return the seconds by which this clock is ahead of the others' median; 0 if unknown."""
    return 0.0 - median_clock_offset(_peer_offsets())


def _peer_offsets() -> list[float]:
    """Return the seconds by which each recently measured mirror is ahead of this clock.

    Somebody may have set this clock since the measurement. The uptime, which nobody sets, tells how
    much time really passed, so no event is stamped wrong until the next measurement.
    """
    offsets = []
    now_uptime = uptime()
    now_wall = time.time()
    for clock in _clocks.get("all", lambda: list(PeerClock.objects.all())):
        wall_age = now_wall - clock.measured_at.timestamp()
        same_boot = clock.boot_id and clock.boot_id == boot_id()
        age = now_uptime - clock.uptime if same_boot else wall_age
        if 0 <= age < CLOCK_MAX_AGE:
            offsets.append(clock.offset_seconds + age - wall_age)
    return offsets


# ---- serving -------------------------------------------------------------------------------------


def log_heads() -> dict[str, tuple[int, str]]:
    """Return the number and digest of the last accepted event of every stored log.

    Two mirrors with one number and two digests send each other that event, which proves a fork
    (see `read_events`).
    """
    return {origin.pk: _read_head(origin) for origin in Origin.objects.all()}


def _read_head(origin: Origin) -> tuple[int, str]:
    if origin.last_valid_seq is None or origin.head_seq <= origin.last_valid_seq:
        return origin.head_seq, origin.head_digest
    last = LogEvent.objects.filter(origin=origin, accepted=True).order_by("-seq").first()
    return (last.seq, last.digest) if last else (0, NO_DIGEST)


def read_events(origin: str, after: int, limit: int = MAX_SERVED) -> list[Signed]:
    """Return accepted events of one log from number `after` + 1, exactly as they were signed.

    A caller that requests its own last event again detects at once that two logs differ.
    """
    events = LogEvent.objects.filter(origin=origin, seq__gt=after, accepted=True).order_by("seq")
    columns = events.values_list("key", "body", "signature")[: min(limit, MAX_SERVED)]
    return [Signed(key=key, body=body, signature=signature) for key, body, signature in columns]
