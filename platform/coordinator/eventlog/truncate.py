"""When an origin is not to be believed further: from a number on its events are withdrawn, and what they spoke of is
folded anew without them. Because state is a fold of accepted events, that undoes exactly what they did."""

import logging
from collections.abc import Container

from barnraise.errors import MessageError
from barnraise.protocol.messages import Signed
from coordinator.eventlog import projection, registry
from coordinator.eventlog.event import open_event
from coordinator.eventlog.models import ForkProof, LogEvent, LogState, Origin
from coordinator.eventlog.writer import log_transaction
from coordinator.lib.exceptions import UserError

log = logging.getLogger("coordinator.eventlog")


def truncate_log(origin: str, seq: int, why: str) -> int:
    """Of this log `seq` is the last event that counts: an expulsion names it. Cut twice, the lower number holds. How
    many events that withdrew. Raises UserError where the log is not known."""
    with log_transaction() as tally:
        found = Origin.objects.filter(pk=origin).first()
        if found is None:
            raise UserError(f"no log {origin[:8]} is known here")
        return _cut(tally, found, seq, why)


def _cut(tally: LogState, origin: Origin, seq: int, why: str) -> int:
    if origin.cut_seq is not None and origin.cut_seq <= seq:
        return 0
    origin.cut_seq, origin.why = seq, why[:300]
    origin.save(update_fields=["cut_seq", "why"])
    beyond = LogEvent.objects.filter(origin=origin, seq__gt=seq, accepted=True)
    names = sorted(
        set(beyond.filter(type__in=registry.event_types()).values_list("subject", flat=True))
    )
    withdrawn = beyond.update(accepted=False)
    for start in range(0, len(names), projection.BATCH_SIZE):
        projection.refold(names[start : start + projection.BATCH_SIZE], tally, store=True)
    projection.write_pending_rows()
    log.error("log %s is cut after event %d (%s): %d events withdrawn", origin, seq, why, withdrawn)
    return withdrawn


def record_fork(tally: LogState, origin: Origin, seq: int, first: Signed, second: Signed) -> None:
    """Keeps both events, and cuts the log before them; within `writer.log_transaction`."""
    kept = {"first": first.model_dump(), "second": second.model_dump()}
    ForkProof.objects.get_or_create(origin=origin, seq=seq, defaults=kept)
    _cut(tally, origin, seq - 1, f"it signed two events with the number {seq}")


def list_fork_proofs() -> list[tuple[Signed, Signed]]:
    """All that are kept, for other mirrors: each convinces whoever reads it."""
    return [
        (Signed.model_validate(each.first), Signed.model_validate(each.second))
        for each in ForkProof.objects.all()
    ]


def accept_fork_proof(first: Signed, second: Signed, *, keys: Container[str] | None = None) -> bool:
    """Another mirror's proof, against one of `keys` (None: anybody). True when it was news. Raises UserError where it
    proves nothing."""
    try:
        one, other = open_event(first), open_event(second)
    except MessageError as error:
        raise UserError(str(error)) from None
    if (
        first.key != second.key
        or (one.origin, one.seq) != (other.origin, other.seq)
        or first.body == second.body
    ):
        raise UserError("these are not two events of one origin with one number")
    if keys is not None and first.key not in keys:
        raise UserError(f"this is about {first.key[:8]}, which is no mirror of the list")
    with log_transaction() as tally:
        origin = Origin.objects.filter(pk=one.origin).first()
        if origin is None:  # its log comes later, and ends there
            origin = Origin.objects.create(id=one.origin, key=first.key)
        if origin.key != first.key:
            raise UserError(
                f"log {origin.pk[:8]} is {origin.key[:8]}'s, and {first.key[:8]} signed these"
            )
        if ForkProof.objects.filter(origin=origin, seq=one.seq).exists():
            return False
        record_fork(tally, origin, one.seq, first, second)
    return True
