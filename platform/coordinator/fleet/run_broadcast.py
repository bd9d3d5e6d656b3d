"""What all machines of a run are told alike. Looked up at most once a second by each process: where thousands report,
these two questions would be half of what a report costs."""

from dataclasses import dataclass
from uuid import UUID

from barnraise.protocol import messages
from coordinator.fleet.models import Membership
from coordinator.lib.ttl_cache import TtlCache
from coordinator.runs.models import Run

SECONDS = 1.0  # that an answer may be old
MAX_PEER_HINTS = 64  # hints in one reply
MAX_REVOKED_KEYS = 1000  # keys in one directive: those revoked last


@dataclass(frozen=True)
class RunBroadcast:
    """`revoked`: keys that no peer of the run should speak to any more. `peers`: those seen last, first; one more than
    a reply names, which leaves its asker out."""

    revoked: tuple[str, ...]
    peers: tuple[messages.Peer, ...]


_known: TtlCache[UUID, RunBroadcast] = TtlCache(SECONDS)  # by run


def get_broadcast(run: Run, *, fresh: bool = False) -> RunBroadcast:
    """`fresh`: of this moment, for who comes in: those who came a moment before are its first peers."""
    return _known.get(run.pk, lambda: load_broadcast(run), fresh=fresh)


def load_broadcast(run: Run) -> RunBroadcast:
    gone = Membership.objects.filter(run=run, machine__revoked__isnull=False).order_by(
        "-machine__revoked"
    )
    # Whichever mirror they report to: all know where. Two short questions: one that joins both reads every machine.
    alive = (
        Membership.everywhere.alive_in(run).order_by("-last_seen").values_list("machine", flat=True)
    )
    latest = list(
        dict.fromkeys(alive[: 2 * MAX_PEER_HINTS])
    )  # who has just changed mirrors is there twice
    seen = Membership.objects.filter(run=run, machine__in=latest).values_list(
        "machine", "machine__key", "addresses"
    )
    peers = {
        machine: messages.Peer(key=key, addresses=addresses)
        for machine, key, addresses in seen
        if addresses
    }
    return RunBroadcast(
        revoked=tuple(gone.values_list("machine__key", flat=True)[:MAX_REVOKED_KEYS]),
        peers=tuple(peers[machine] for machine in latest if machine in peers)[: MAX_PEER_HINTS + 1],
    )
