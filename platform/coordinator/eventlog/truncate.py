"""When an origin is not to be believed further: from a number on its events are withdrawn, and what they spoke of is
folded anew without them. Because state is a fold of accepted events, that undoes exactly what they did."""

import logging
from collections.abc import Container

from barnraise.errors import MessageError
from barnraise.protocol.messages import Signed
from coordinator.eventlog import projection, registry
from coordinator.eventlog.event import read
from coordinator.eventlog.models import LogEvent, Origin, Proof, Tally
from coordinator.eventlog.writer import change
from coordinator.lib.exceptions import Refused

log = logging.getLogger("coordinator.eventlog")


def cut(origin: str, seq: int, why: str) -> int:
    """Of this log `seq` is the last event that counts: an expulsion names it. Cut twice, the lower number holds. How
    many events that withdrew. Raises Refused where the log is not known."""
    with change() as tally:
        found = Origin.objects.filter(pk=origin).first()
        if found is None:
            raise Refused(f"no log {origin[:8]} is known here")
        return _cut(tally, found, seq, why)


def _cut(tally: Tally, origin: Origin, seq: int, why: str) -> int:
    if origin.cut_seq is not None and origin.cut_seq <= seq:
        return 0
    origin.cut_seq, origin.why = seq, why[:300]
    origin.save(update_fields=["cut_seq", "why"])
    beyond = LogEvent.objects.filter(origin=origin, seq__gt=seq, accepted=True)
    names = sorted(set(beyond.filter(type__in=registry.types()).values_list("subject", flat=True)))
    withdrawn = beyond.update(accepted=False)
    for start in range(0, len(names), projection.AT_ONCE):
        projection.fold(names[start : start + projection.AT_ONCE], tally, store=True)
    projection.write_waiting()
    log.error("log %s is cut after event %d (%s): %d events withdrawn", origin, seq, why, withdrawn)
    return withdrawn


def prove(tally: Tally, origin: Origin, seq: int, first: Signed, second: Signed) -> None:
    """Keeps both events, and cuts the log before them; within `log.change`."""
    kept = {"first": first.model_dump(), "second": second.model_dump()}
    Proof.objects.get_or_create(origin=origin, seq=seq, defaults=kept)
    _cut(tally, origin, seq - 1, f"it signed two events with the number {seq}")


def proofs() -> list[tuple[Signed, Signed]]:
    """All that are kept, for other mirrors: each convinces whoever reads it."""
    return [
        (Signed.model_validate(each.first), Signed.model_validate(each.second))
        for each in Proof.objects.all()
    ]


def believe(first: Signed, second: Signed, *, keys: Container[str] | None = None) -> bool:
    """Another mirror's proof, against one of `keys` (None: anybody). True when it was news. Raises Refused where it
    proves nothing."""
    try:
        one, other = read(first), read(second)
    except MessageError as error:
        raise Refused(str(error)) from None
    if (
        first.key != second.key
        or (one.origin, one.seq) != (other.origin, other.seq)
        or first.body == second.body
    ):
        raise Refused("these are not two events of one origin with one number")
    if keys is not None and first.key not in keys:
        raise Refused(f"this is about {first.key[:8]}, which is no mirror of the list")
    with change() as tally:
        origin = Origin.objects.filter(pk=one.origin).first()
        if origin is None:  # its log comes later, and ends there
            origin = Origin.objects.create(id=one.origin, key=first.key)
        if origin.key != first.key:
            raise Refused(
                f"log {origin.pk[:8]} is {origin.key[:8]}'s, and {first.key[:8]} signed these"
            )
        if Proof.objects.filter(origin=origin, seq=one.seq).exists():
            return False
        prove(tally, origin, one.seq, first, second)
    return True
