"""Another mirror's log, as its events arrive here: signed by a key of its own, chained, stamped."""

import time

from uuid6 import uuid7

from barnraise.identity import Identity, digest
from barnraise.wire import Signed
from coordinator.mirrors import clock
from coordinator.mirrors.message import NOTHING, Event


class OtherMirror:
    """`tell` appends to its log and returns the event; `events` are all of them, in order."""

    def __init__(self, seed: int = 77):
        self.identity = Identity(bytes([seed]) * 32)
        self.origin = f"{seed:032x}"
        self.events: list[Signed] = []
        self.hlc = 0
        self.tell("origin.begin", self.origin, {"name": f"mirror {seed}", "after": None})

    def tell(self, type: str, which: object, payload: dict, **changed) -> Signed:
        """`changed`: other fields than the true ones."""
        signed = self.sign(type, which, payload, **changed)
        self.events.append(signed)
        return signed

    def sign(self, type: str, which: object, payload: dict, **changed) -> Signed:
        self.hlc = clock.stamp(self.hlc, changed.pop("at", time.time()))
        fields = {
            "id": str(uuid7()),
            "origin": self.origin,
            "seq": len(self.events) + 1,
            "prev": digest(self.events[-1].body) if self.events else NOTHING,
            "hlc": self.hlc,
            "type": type,
            "subject": f"{type.partition('.')[0]}:{which}",
            "payload": payload,
        }
        return self.identity.sign("event", Event(**{**fields, **changed}))
