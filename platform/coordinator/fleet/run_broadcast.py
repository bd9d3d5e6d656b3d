"""What all machines of a run receive alike: revoked keys and peers to try.

Each process looks it up at most once a second. With thousands of machines these two queries would
otherwise be half of a report's cost.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

from django.utils import timezone

from barnraise.protocol.signing import ORPHANED_TICKET_GRACE_SECONDS
from coordinator.fleet.models import Membership
from coordinator.lib.ttl_cache import TtlCache
from coordinator.runs.models import Run
from coordinator.runs.tickets import TICKET_SECONDS

MAX_AGE_SECONDS = 1.0
MAX_PEER_HINTS = 64  # in one reply
MAX_REACHED_HINTS = 16  # of them: machines that strangers have reached, which come first
MAX_REACHED_OF_PERSON = 2  # of these: whatever the number of a person's keys
MAX_REVOKED_KEYS = 1000  # in one directive: the most recently revoked
# Directives name a revoked key for so long: by then no peer accepts a ticket from before.
REVOCATION_SECONDS = TICKET_SECONDS + ORPHANED_TICKET_GRACE_SECONDS


@dataclass(frozen=True)
class AnnouncedPeer:
    """A machine to try."""

    key: str  # its public key
    addresses: tuple[str, ...]  # as it reports them
    source_address: str  # that its requests come from
    owner: UUID | None = None  # the person's id


@dataclass(frozen=True)
class RunBroadcast:
    """What a run's machines receive.

    Attributes:
        revoked: keys that the run's peers must refuse.
        peers: some that strangers have reached first, so that a newcomer behind a router finds
            peers that it can dial, and through them the others; then the most recently seen. It
            holds one more than a reply lists, because the reply leaves the receiver itself out.
    """

    revoked: tuple[str, ...]
    peers: tuple[AnnouncedPeer, ...]


_broadcasts: TtlCache[UUID, RunBroadcast] = TtlCache(MAX_AGE_SECONDS)  # by run


def get_broadcast(run: Run, *, fresh: bool = False) -> RunBroadcast:
    """Return a run's broadcast, at most a second old, or loaded now if it must be `fresh`.

    A machine that joins needs those that joined a moment before: its first peers.
    """
    return _broadcasts.get(run.pk, lambda: load_broadcast(run), fresh=fresh)


def load_broadcast(run: Run) -> RunBroadcast:
    """Load a run's broadcast from the database."""
    since = timezone.now() - timedelta(seconds=REVOCATION_SECONDS)
    revoked = Membership.objects.filter(run=run, machine__revoked__gt=since)
    revoked = revoked.order_by("-machine__revoked").values_list("machine__key", flat=True)
    # Machines may report to any mirror; all mirrors know their addresses. Two short queries are
    # faster than one join, which reads every machine.
    alive = Membership.everywhere.reachable_in(run).order_by("-last_seen")
    # A machine that has just changed mirrors has two rows.
    latest = alive.values_list("machine", flat=True)[: 2 * MAX_PEER_HINTS]
    # Machines report this about themselves; a false report only brings them dials.
    reached = alive.filter(exchange__reached=True).values_list("machine", flat=True)
    reached = list(dict.fromkeys(reached[:MAX_PEER_HINTS]))
    known = list(dict.fromkeys([*reached, *latest]))
    rows = Membership.objects.filter(run=run, machine__in=known).values_list(
        "machine", "machine__key", "addresses", "source_address", "machine__owner"
    )
    peers = {
        machine: AnnouncedPeer(key, tuple(addresses), source, owner)
        for machine, key, addresses, source, owner in rows
        if addresses
    }
    firsts = choose_reached([peers[machine] for machine in reached if machine in peers])
    recent = [peers[machine] for machine in dict.fromkeys(latest) if machine in peers]
    ordered = tuple(dict.fromkeys([*firsts, *recent]))
    return RunBroadcast(
        revoked=tuple(revoked[:MAX_REVOKED_KEYS]), peers=ordered[: MAX_PEER_HINTS + 1]
    )


def choose_reached(peers: Sequence[AnnouncedPeer]) -> list[AnnouncedPeer]:
    """Choose a few machines that say that strangers reach them, few of each person. Pure."""
    chosen: list[AnnouncedPeer] = []
    of_person: Counter[UUID | None] = Counter()
    for peer in peers:
        of_person[peer.owner] += 1
        if of_person[peer.owner] <= MAX_REACHED_OF_PERSON:
            chosen.append(peer)
    return chosen[:MAX_REACHED_HINTS]
