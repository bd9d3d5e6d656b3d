"""Truncate the log of an origin that is not trusted any further.

Its later events are withdrawn, and what they concern is folded again without them. State is a fold
of the accepted events, so this undoes exactly what those events did.
"""

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


def truncate_log(origin_id: str, last_valid_seq: int, reason: str) -> int:
    """Withdraw a log's events after `last_valid_seq`; of two truncations the shorter holds.

    Returns:
        The number of events withdrawn.

    Raises:
        UserError: The log is unknown.
    """
    with log_transaction() as log_state:
        origin = Origin.objects.filter(pk=origin_id).first()
        if origin is None:
            raise UserError(f"no log {origin_id[:8]} is known here")
        return _truncate(log_state, origin, last_valid_seq, reason)


def _truncate(log_state: LogState, origin: Origin, last_valid_seq: int, reason: str) -> int:
    if origin.last_valid_seq is not None and origin.last_valid_seq <= last_valid_seq:
        return 0
    origin.last_valid_seq = last_valid_seq
    origin.truncation_reason = reason[:300]
    origin.save(update_fields=["last_valid_seq", "truncation_reason"])
    beyond = LogEvent.objects.filter(origin=origin, seq__gt=last_valid_seq, accepted=True)
    understood = beyond.filter(type__in=registry.event_types())
    names = sorted(set(understood.values_list("aggregate", flat=True)))
    withdrawn = beyond.update(accepted=False)
    for start in range(0, len(names), projection.BATCH_SIZE):
        batch = names[start : start + projection.BATCH_SIZE]
        projection.refold(batch, log_state, store=True)
    projection.write_pending_rows()
    log.error(
        "log %s is truncated after event %d (%s): %d events withdrawn",
        origin,
        last_valid_seq,
        reason,
        withdrawn,
    )
    return withdrawn


def record_fork(
    log_state: LogState, origin: Origin, seq: int, first: Signed, second: Signed
) -> None:
    """Store two events with one number and truncate the log before them, in a `log_transaction`."""
    evidence = {"first": first.model_dump(), "second": second.model_dump()}
    ForkProof.objects.get_or_create(origin=origin, seq=seq, defaults=evidence)
    _truncate(log_state, origin, seq - 1, f"it signed two events with the number {seq}")


def list_fork_proofs() -> list[tuple[Signed, Signed]]:
    """Return the two events of every proof; each pair convinces any mirror that verifies it."""
    return [
        (Signed.model_validate(proof.first), Signed.model_validate(proof.second))
        for proof in ForkProof.objects.all()
    ]


def accept_fork_proof(first: Signed, second: Signed, *, keys: Container[str] | None = None) -> bool:
    """Verify another mirror's proof of a fork and act on it.

    Args:
        first: One of two events with one number.
        second: The other one.
        keys: Keys of the mirrors that the proof may be about; None allows any.

    Returns:
        Whether the proof was new.

    Raises:
        UserError: The events prove nothing.
    """
    try:
        event, other = open_event(first), open_event(second)
    except MessageError as error:
        raise UserError(str(error)) from None
    same_place = first.key == second.key and (event.origin, event.seq) == (other.origin, other.seq)
    if not same_place or first.body == second.body:
        raise UserError("these are not two events of one origin with one number")
    if keys is not None and first.key not in keys:
        raise UserError(f"this is about {first.key[:8]}, which is no mirror of the list")
    with log_transaction() as log_state:
        # If the log is unknown, it is stored when it arrives, and ends there.
        origin, _ = Origin.objects.get_or_create(pk=event.origin, defaults={"key": first.key})
        if origin.key != first.key:
            raise UserError(
                f"log {origin.pk[:8]} is {origin.key[:8]}'s, and {first.key[:8]} signed these"
            )
        if ForkProof.objects.filter(origin=origin, seq=event.seq).exists():
            return False
        record_fork(log_state, origin, event.seq, first, second)
    return True
