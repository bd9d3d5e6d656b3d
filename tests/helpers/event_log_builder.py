"""Another mirror's log, as its events arrive here: signed by a key of its own, chained, stamped."""

import time

from uuid6 import uuid7

from barnraise.protocol.messages import Signed
from barnraise.protocol.signing import Identity, digest
from barnraise.protocol.types import Message, ShortText
from coordinator.eventlog import hlc, ingest, projection
from coordinator.eventlog.event import NO_DIGEST, Event
from coordinator.eventlog.models import LogEvent


class NotePayload(Message):
    """What a note says."""

    text: ShortText


class LogBuilder:
    """`tell` appends to its log and returns the event; `events` are all of them, in order."""

    def __init__(self, seed: int = 77):
        self.identity = Identity(bytes([seed]) * 32)
        self.origin = f"{seed:032x}"
        self.events: list[Signed] = []
        self.hlc = 0
        self.append("origin.begin", self.origin, {"name": f"mirror {seed}", "after": None})

    def append(self, type: str, which: object, payload: dict, **changed) -> Signed:
        """`changed`: other fields than the true ones."""
        signed = self.sign(type, which, payload, **changed)
        self.events.append(signed)
        return signed

    def sign(self, type: str, which: object, payload: dict, **changed) -> Signed:
        self.hlc = hlc.next_stamp(self.hlc, changed.pop("at", time.time()))
        fields = {
            "id": str(uuid7()),
            "origin": self.origin,
            "seq": len(self.events) + 1,
            "prev": digest(self.events[-1].body) if self.events else NO_DIGEST,
            "hlc": self.hlc,
            "type": type,
            "aggregate": f"{type.partition('.')[0]}:{which}",
            "payload": payload,
        }
        return self.identity.sign("event", Event(**{**fields, **changed}))


def count_stored(log: LogBuilder) -> int:
    """How many of its events are here, all of them the true ones."""
    found = list(
        LogEvent.objects.filter(origin=log.origin).order_by("seq").values_list("digest", flat=True)
    )
    assert found == [digest(each.body) for each in log.events[: len(found)]]
    return len(found)


def rejection(*signed: Signed, **more) -> str:
    """Why what a mirror said is refused; nothing of it is here."""
    before = LogEvent.objects.count(), projection.state_hash()
    told = ingest.ingest_events(signed, **more)
    assert (LogEvent.objects.count(), projection.state_hash()) == before
    assert told.stored == 0 and len(told.rejected) == 1
    return next(iter(told.rejected.values()))
