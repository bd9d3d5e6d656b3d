"""The kind "duty": what one mirror does for all. Whose it is decides `turns`; this is where it is taken, and noted as
done."""

import math
from collections.abc import Sequence
from datetime import datetime

from django.utils import timezone
from pydantic import Field

from barnraise.protocol.signing import digest
from barnraise.protocol.types import Key, Message
from coordinator.eventlog.projection import current
from coordinator.eventlog.registry import Fact, Kind, State
from coordinator.eventlog.writer import change, record
from coordinator.lib import site_identity
from coordinator.replication import mirror_list
from coordinator.replication.lease_election import Taken, Turn, turn
from coordinator.replication.models import Standing


class Take(Message):
    site_identity: Key
    epoch: int = Field(ge=1, lt=1 << 31)


class Done(Message):
    site_identity: Key


def fold(facts: Sequence[Fact]) -> State | None:
    """The highest epoch has it; of two that took it at once the first. Done is done, whoever did it."""
    takes = [fact.said for fact in facts if fact.what == "take"]
    last = max(takes, key=lambda said: said.epoch, default=None)  # of equals the first
    done = any(fact.what == "done" for fact in facts)
    if last is None and not done:
        return None
    return {"epoch": last.epoch if last else 0, "by": last.mirror if last else "", "done": done}


def store(which: str, state: State | None) -> None:
    """No rows: who has a duty asks."""


KIND = Kind("duty", {"take": Take, "done": Done}, fold, store)


def name(*what: object) -> str:
    """Of a duty, the same at every mirror; it says nothing to who does not know what it is about."""
    return digest("\0".join(map(str, what)))


def claim(duty: str, since: datetime) -> Turn:
    """Whether to do it now (MINE: the log says so then), later, or never (DONE). A site without others does all."""
    unheard = _unheard()
    if not unheard:
        return Turn.MINE
    with change():
        taken, me = Taken(**(current(f"duty:{duty}") or {})), site_identity.identity().key
        found = turn(duty, taken, me, unheard, (timezone.now() - since).total_seconds())
        if found is Turn.TAKE:
            record("duty.take", duty, {"mirror": me, "epoch": taken.epoch + 1})
            found = Turn.MINE
    return found


def done(*duties: str) -> None:
    """Others need not."""
    if mirror_list.others():
        with change():
            for duty in duties:
                record("duty.done", duty, {"mirror": site_identity.identity().key})


def _unheard() -> dict[str, float]:
    """Of the other mirrors of the list, seconds since they were last heard."""
    others, now = [each.key for each in mirror_list.others()], timezone.now()
    heard = dict(
        Standing.objects.filter(pk__in=others, heard__isnull=False).values_list("pk", "heard")
    )
    return {key: (now - heard[key]).total_seconds() if key in heard else math.inf for key in others}
