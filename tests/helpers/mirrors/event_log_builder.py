"""Build another mirror's log: signed by a key of its own, chained and stamped."""

import time

from uuid6 import uuid7

from barnraise.protocol.messages import Signed
from barnraise.protocol.signing import Identity, digest
from barnraise.protocol.types import Message, ShortText
from coordinator.eventlog import hlc, ingest, projection
from coordinator.eventlog.event import NO_DIGEST, Event
from coordinator.eventlog.models import Aggregate, LogEvent


class NotePayload(Message):
    """Hold the text of a note."""

    text: ShortText


class LogBuilder:
    """Write one mirror's log; `events` holds its signed events in order."""

    def __init__(self, seed: int = 77):
        self.identity = Identity(bytes([seed]) * 32)
        self.origin = f"{seed:032x}"
        self.events: list[Signed] = []
        self.hlc = 0
        self.append("origin.begin", self.origin, {"name": f"mirror {seed}", "after": None})

    def append(self, event_type: str, name: object, payload: dict, **changed) -> Signed:
        """Append an event about the aggregate with this name and return it; see `sign`."""
        signed = self.sign(event_type, name, payload, **changed)
        self.events.append(signed)
        return signed

    def sign(self, event_type: str, name: object, payload: dict, **changed) -> Signed:
        """Sign the next event without appending it.

        Args:
            event_type: The aggregate's type and the action, as in "person.join".
            name: The aggregate's name without its type.
            payload: The event's payload.
            changed: Fields of the event that replace the true ones; `at` is the time of the stamp.
        """
        self.hlc = hlc.next_stamp(self.hlc, changed.pop("at", time.time()))
        fields = {
            "id": str(uuid7()),
            "origin": self.origin,
            "seq": len(self.events) + 1,
            "prev": digest(self.events[-1].body) if self.events else NO_DIGEST,
            "hlc": self.hlc,
            "type": event_type,
            "aggregate": f"{event_type.partition('.')[0]}:{name}",
            "payload": payload,
        }
        return self.identity.sign("event", Event(**{**fields, **changed}))


def count_stored(log: LogBuilder) -> int:
    """Return how many events of the log this site stores; fail if one differs."""
    events = LogEvent.objects.filter(origin=log.origin).order_by("seq")
    stored = list(events.values_list("digest", flat=True))
    assert stored == [digest(event.body) for event in log.events[: len(stored)]]
    return len(stored)


def rejection(*signed: Signed, **more) -> str:
    """Ingest events that must be rejected whole, and return the reason.

    Args:
        signed: Events of one log.
        more: Further arguments of `ingest.ingest_events`.
    """
    before = LogEvent.objects.count(), projection.state_hash()
    result = ingest.ingest_events(signed, **more)
    assert (LogEvent.objects.count(), projection.state_hash()) == before
    assert result.stored == 0 and len(result.rejected) == 1
    return next(iter(result.rejected.values()))


def recompute_state_hash() -> str:
    """Compute the state hash from all aggregates."""
    total = sum(
        projection.state_term(aggregate.name, aggregate.state)
        for aggregate in Aggregate.objects.all()
    )
    return f"{total % projection.MODULUS:064x}"
