"""Our own log, and serving everybody's. `record` is the only way in for a change made here."""

import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple
from uuid import UUID

from django.conf import settings
from django.db import transaction
from uuid6 import uuid7

from barnraise.protocol.messages import Signed
from barnraise.protocol.signing import digest
from coordinator.eventlog import hlc as hlc_module
from coordinator.eventlog import projection, registry
from coordinator.eventlog.event import MAX_EVENT_CHARS, NO_DIGEST, Event
from coordinator.eventlog.models import Aggregate, LogEvent, LogState, Origin, PeerClock
from coordinator.lib import site_identity
from coordinator.lib.monotonic_clock import boot, steady
from coordinator.lib.ttl_cache import TtlCache

log = logging.getLogger("coordinator.eventlog")
MAX_SERVED = 1000  # events served at once
CLOCK_MAX_AGE = 600.0  # seconds ago at most: an older word about a clock says nothing
_clocks: TtlCache[str, list[PeerClock]] = TtlCache(
    1.0, 1
)  # every event asks for them; another process may have heard one


@contextmanager
def log_transaction() -> Iterator[LogState]:
    """A transaction in which what mirrors share changes. It takes the tally's lock *first*, before any row's: such
    changes follow each other, and two of them never hold what the other waits for."""
    with transaction.atomic():
        locked = LogState.objects.select_for_update()
        if (tally := locked.first()) is None:  # the very first time
            LogState.objects.bulk_create([LogState()], ignore_conflicts=True)
            tally = locked.get()
        yield tally


def record(type: str, subject: Any, payload: dict[str, Any]) -> LogEvent:
    """Notes in our log, within the caller's transaction, that this was changed here; rows are the caller's to write.
    `subject` is "kind:which", or only which. `payload` is of the shape that the kind names for `type`; UUIDs in it are
    written as text."""
    kind, _, what = type.partition(".")
    known = registry.aggregate_types()[kind]
    plain = {
        name: str(value) if isinstance(value, UUID) else value for name, value in payload.items()
    }
    said = known.payload_types[what].model_validate(plain).model_dump(mode="json")
    name = subject if str(subject).startswith(f"{kind}:") else f"{kind}:{subject}"
    with log_transaction() as tally:
        made = _append(tally, _ours(tally), type, name, said)
        projection.refold([name], tally, store=False)
        transaction.on_commit(_nudge)
    return made


def _nudge() -> None:
    from coordinator.replication.tasks import (
        schedule_notification,  # what pulls builds on what records
    )

    schedule_notification()


def _append(
    tally: LogState, origin: Origin, type: str, name: str, said: dict[str, Any]
) -> LogEvent:
    tally.hlc = hlc_module.next_stamp(tally.hlc, corrected_time())
    event = Event(
        id=str(uuid7()), origin=origin.pk, seq=origin.head_seq + 1, prev=origin.head_digest, hlc=tally.hlc, type=type,
        aggregate=name, payload=said,
    )  # fmt: skip
    signed = site_identity.identity().sign("event", event)
    assert len(signed.body) <= MAX_EVENT_CHARS, f"{type} does not fit into an event"
    made = LogEvent(**build_row(event, signed, True)._asdict())
    made.save(force_insert=True)
    advance_head(origin, made)
    return made


class LogRow(NamedTuple):
    """A row of the log before it is one, by its columns: a hundred thousand come at times."""

    digest: str
    uuid: str
    origin_id: str
    seq: int
    hlc: int
    type: str
    subject: str
    body: str
    key: str
    signature: str
    accepted: bool
    understood: bool

    @property
    def signed(self) -> Signed:
        return Signed(key=self.key, body=self.body, signature=self.signature)


def build_row(event: Event, signed: Signed, understood: bool) -> LogRow:
    return LogRow(
        digest(signed.body), event.id, event.origin, event.seq, event.hlc, event.type, event.aggregate, signed.body,
        signed.key, signed.signature, True, understood,
    )  # fmt: skip


def advance_head(origin: Origin, last: LogEvent | LogRow) -> None:
    origin.head_seq, origin.head_digest, origin.head_hlc = last.seq, last.digest, last.hlc
    origin.save(update_fields=["head_seq", "head_digest", "head_hlc"])


def _ours(tally: LogState) -> Origin:
    """The log that this site writes now. One that was cut, or that is another key's, is never written again: a new life
    begins."""
    found = Origin.objects.filter(ours=True).first()
    if found and found.cut_seq is None and found.key == site_identity.identity().key:
        return found
    if is_restore_pending():
        raise RestorePendingError
    return start_log(tally)


class RestorePendingError(Exception):
    """This site changes nothing yet."""

    sentence = (
        "This site was restored from a backup, and waits until another mirror has given back what happened since. "
        "Nothing was changed; use another mirror, or try again in a moment."
    )


def is_restore_pending() -> bool:
    """Whether this site was restored (it has a log of its own, and writes none) and has not heard any other mirror
    since. What it would decide now it would decide without its own last decisions."""
    own = Origin.objects.filter(key=site_identity.identity().key)
    if own.filter(ours=True).exists() or not own.exists():
        return False
    from coordinator.replication.mirror_list import (
        other_mirrors,  # what holds the list withdraws events, and so builds on this
    )

    return bool(other_mirrors())


def resume() -> None:
    """A new log, from here on: once our own is back, or because the operator says so."""
    if is_restore_pending():
        with log_transaction() as tally:
            start_log(tally)


def start_log(tally: LogState) -> Origin:
    """A new log of ours, bound to this site's key by its first event, which names the one before. So it is after a
    restore from a backup: the old one's next numbers may be out in the world, and come back from other mirrors."""
    before = Origin.objects.filter(key=site_identity.identity().key).order_by("-known").first()
    Origin.objects.filter(ours=True).update(ours=False)
    origin = Origin.objects.create(
        id=secrets.token_hex(16), key=site_identity.identity().key, ours=True
    )
    said = {"name": settings.MIRROR_NAME, "after": before.pk if before else None}
    made = _append(tally, origin, "origin.begin", f"origin:{origin.pk}", said)
    projection.refold([made.subject], tally, store=False)
    return origin


def record_existing_rows() -> int:
    """What rows say of subjects that no event ever spoke of, as events: a site may be older than its log. How many."""
    told = 0
    if is_restore_pending():
        return told
    with log_transaction():
        for kind in registry.aggregate_types().values():
            known = set(
                Aggregate.objects.filter(name__startswith=f"{kind.name}:").values_list(
                    "name", flat=True
                )
            )
            for type, which, said in kind.existing_events():
                if f"{kind.name}:{which}" not in known:
                    record(type, which, said)
                    told += 1
    return told


# ---- time ----------------------------------------------------------------------------------------------------------


def corrected_time() -> float:
    """Seconds since 1970, corrected where this machine's clock is far from the other mirrors'."""
    if (by := hlc_module.clock_correction(_ahead())) != 0:
        log.error(
            "this machine's clock is %+.0f s from the other mirrors': events are stamped with theirs",
            -by,
        )
    return time.time() + by


def record_peer_clock(key: str, theirs: float, ours: float | None = None) -> None:
    """Another mirror (by its key) signed that it is `theirs`, seconds since 1970; `ours`, this machine's clock then."""
    ahead = theirs - (time.time() if ours is None else ours)
    said = {
        "ahead": ahead,
        "heard": datetime.fromtimestamp(time.time(), UTC),
        "steady": steady(),
        "boot": boot(),
    }
    PeerClock.objects.update_or_create(key=key, defaults=said)
    _clocks.invalidate("all")


def clock_offset() -> float:
    """Seconds that this machine's clock is ahead of the others' median; 0 where none was heard of."""
    return 0.0 - hlc_module.median_offset(_ahead())


def _ahead() -> list[float]:
    """Seconds that each other mirror heard lately is ahead of this machine's clock. That may have been set since: how
    long ago it was says the clock that nobody sets, so that not one event is stamped wrong until they are heard again.
    """
    found, since, wall = [], steady(), time.time()
    for each in _clocks.get("all", lambda: list(PeerClock.objects.all())):
        shown = wall - each.heard.timestamp()
        passed = since - each.steady if each.boot and each.boot == boot() else shown
        if 0 <= passed < CLOCK_MAX_AGE:
            found.append(each.ahead + passed - shown)
    return found


# ---- serving -------------------------------------------------------------------------------------------------------


def log_heads() -> dict[str, tuple[int, str]]:
    """Of every log held here: the number and the digest of its last accepted event. Two mirrors with one number and two
    digests show each other that event, which proves a fork (see `serve`)."""
    return {origin.pk: _head(origin) for origin in Origin.objects.all()}


def _head(origin: Origin) -> tuple[int, str]:
    if origin.cut_seq is None or origin.head_seq <= origin.cut_seq:
        return origin.head_seq, origin.head_digest
    last = LogEvent.objects.filter(origin=origin, accepted=True).order_by("-seq").first()
    return (last.seq, last.digest) if last else (0, NO_DIGEST)


def read_events(origin: str, after: int, most: int = MAX_SERVED) -> list[Signed]:
    """An origin's events from number `after` + 1 on, as they were signed; what was cut away is not served. Who asks for
    one more than it lacks (its own last again) finds out at once when the two logs are not one."""
    found = LogEvent.objects.filter(origin=origin, seq__gt=after, accepted=True).order_by("seq")
    told = found.values_list("key", "body", "signature")[: min(most, MAX_SERVED)]
    return [Signed(key=key, body=body, signature=signature) for key, body, signature in told]
