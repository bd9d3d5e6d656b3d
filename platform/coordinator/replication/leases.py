"""Acquire leases: the aggregate type "lease", for work that one mirror does for all.

`lease_election` decides who acquires a lease; this module records it in the log.
"""

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
    """Record that a mirror acquired the lease."""

    mirror: PublicKey
    epoch: int = Field(ge=1, lt=1 << 31)


class LeaseDone(Message):
    """Record that a mirror did the work."""

    mirror: PublicKey


def fold(facts: Sequence[Fact]) -> State | None:
    """Give the lease to the highest epoch, and of equal epochs to the first; done is final."""
    acquired = [fact.payload for fact in facts if fact.action == "acquire"]
    last = max(acquired, key=lambda payload: payload.epoch, default=None)  # the first of equals
    done = any(fact.action == "done" for fact in facts)
    if last is None and not done:
        return None
    return {
        "epoch": last.epoch if last else 0,
        "holder": last.mirror if last else "",
        "done": done,
    }


def store(name: str, state: State | None) -> None:
    """Write nothing: leases are read from the log's state."""


AGGREGATE_TYPE = AggregateType("lease", {"acquire": LeaseAcquired, "done": LeaseDone}, fold, store)


def lease_name(*parts: object) -> str:
    """Return the name of a lease: equal at every mirror, and opaque without knowing the parts."""
    return digest("\0".join(map(str, parts)))


def acquire(lease: str, since: datetime) -> LeaseDecision:
    """Acquire a lease if it is this mirror's turn.

    Args:
        lease: Name of the lease.
        since: When this mirror learned of the work.

    Returns:
        HELD: do the work now. WAIT: ask again later. DONE: the work is done. A site without other
        mirrors always gets HELD.
    """
    silence = _measure_silence()
    if not silence:
        return LeaseDecision.HELD
    with log_transaction():
        state = LeaseState(**(current_state(f"lease:{lease}") or {}))
        own_key = site_identity.identity().key
        age = (timezone.now() - since).total_seconds()
        decision = decide(lease, state, own_key, silence, age)
        if decision is LeaseDecision.ACQUIRE:
            record("lease.acquire", lease, {"mirror": own_key, "epoch": state.epoch + 1})
            decision = LeaseDecision.HELD
    return decision


def mark_done(*leases: str) -> None:
    """Record that the work of these leases is done, for the other mirrors."""
    if not mirror_list.other_mirrors():
        return
    with log_transaction():
        for lease in leases:
            record("lease.done", lease, {"mirror": site_identity.identity().key})


def _measure_silence() -> dict[str, float]:
    """Return, for each other mirror of the list, the seconds since it was last seen."""
    keys = [entry.key for entry in mirror_list.other_mirrors()]
    now = timezone.now()
    seen = PeerStatus.objects.filter(pk__in=keys, last_seen__isnull=False)
    last_seen = dict(seen.values_list("pk", "last_seen"))
    return {
        key: (now - last_seen[key]).total_seconds() if key in last_seen else math.inf
        for key in keys
    }
