"""The kind "duty": what one mirror does for all. Whose it is decides `turns`; this is where it is taken, and noted as
done."""

import math
from collections.abc import Sequence
from datetime import datetime

from django.utils import timezone
from pydantic import Field

from barnraise.protocol.signing import digest
from barnraise.protocol.types import Message, PublicKey
from coordinator.eventlog.projection import current_state
from coordinator.eventlog.registry import AggregateType, Fact, State
from coordinator.eventlog.writer import log_transaction, record
from coordinator.lib import site_identity
from coordinator.replication import mirror_list
from coordinator.replication.lease_election import LeaseDecision, LeaseState, decide
from coordinator.replication.models import PeerStatus


class LeaseAcquired(Message):
    mirror: PublicKey
    epoch: int = Field(ge=1, lt=1 << 31)


class LeaseDone(Message):
    mirror: PublicKey


def fold(facts: Sequence[Fact]) -> State | None:
    """The highest epoch has it; of two that took it at once the first. Done is done, whoever did it."""
    takes = [fact.payload for fact in facts if fact.action == "acquire"]
    last = max(takes, key=lambda said: said.epoch, default=None)  # of equals the first
    done = any(fact.action == "done" for fact in facts)
    if last is None and not done:
        return None
    return {"epoch": last.epoch if last else 0, "holder": last.mirror if last else "", "done": done}


def store(which: str, state: State | None) -> None:
    """No rows: who has a duty asks."""


AGGREGATE_TYPE = AggregateType("lease", {"acquire": LeaseAcquired, "done": LeaseDone}, fold, store)


def lease_name(*what: object) -> str:
    """Of a duty, the same at every mirror; it says nothing to who does not know what it is about."""
    return digest("\0".join(map(str, what)))


def acquire(duty: str, since: datetime) -> LeaseDecision:
    """Whether to do it now (MINE: the log says so then), later, or never (DONE). A site without others does all."""
    unheard = _unheard()
    if not unheard:
        return LeaseDecision.HELD
    with log_transaction():
        taken, me = (
            LeaseState(**(current_state(f"lease:{duty}") or {})),
            site_identity.identity().key,
        )
        found = decide(duty, taken, me, unheard, (timezone.now() - since).total_seconds())
        if found is LeaseDecision.ACQUIRE:
            record("lease.acquire", duty, {"mirror": me, "epoch": taken.epoch + 1})
            found = LeaseDecision.HELD
    return found


def mark_done(*duties: str) -> None:
    """Others need not."""
    if mirror_list.other_mirrors():
        with log_transaction():
            for duty in duties:
                record("lease.done", duty, {"mirror": site_identity.identity().key})


def _unheard() -> dict[str, float]:
    """Of the other mirrors of the list, seconds since they were last heard."""
    others, now = [each.key for each in mirror_list.other_mirrors()], timezone.now()
    heard = dict(
        PeerStatus.objects.filter(pk__in=others, heard__isnull=False).values_list("pk", "heard")
    )
    return {key: (now - heard[key]).total_seconds() if key in heard else math.inf for key in others}
