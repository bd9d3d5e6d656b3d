"""Compare all mirrors of the list: what each last reported, against what this site has."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from django.utils import timezone

from barnraise.protocol.mirror_list import MirrorEntry
from coordinator.eventlog import writer
from coordinator.eventlog.models import Origin, PeerClock
from coordinator.eventlog.projection import state_hash as local_state_hash
from coordinator.lib import site_identity
from coordinator.replication import mirror_list
from coordinator.replication.lease_election import PEER_TIMEOUT
from coordinator.replication.models import PeerStatus
from coordinator.replication.protocol import PROTOCOLS

LATE_SECONDS = 60.0  # for which a mirror may lack events before its page warns


@dataclass(frozen=True)
class OwnState:
    """What this site holds."""

    hash: str  # of its state
    heads: dict[str, int]  # each log's last event


@dataclass(frozen=True)
class MirrorComparison:
    """Describe one mirror."""

    listed: MirrorEntry  # its entry in the mirror list
    is_local: bool  # it is this site
    last_seen: datetime | None
    state_hash: str
    is_in_sync: bool | None  # its state equalled ours when it was last seen; None if unknown
    events_behind: int  # events that are stored here and that it lacked then
    diverged_since: datetime | None  # None while it is equal
    last_error: str  # of the last attempt
    clock_offset: float | None  # seconds that it is ahead of ours; None if unknown
    protocols: Sequence[int]

    @property
    def status(self) -> str:
        """Return "here", "expelled", "never", "quiet", "same" or "apart"."""
        if self.listed.expelled:
            return "expelled"
        if self.is_local:
            return "here"
        if self.last_seen is None:
            return "never"
        if (timezone.now() - self.last_seen).total_seconds() > PEER_TIMEOUT:
            return "quiet"
        # Every event needs a moment to reach all mirrors.
        since = self.diverged_since
        is_late = since is not None and (timezone.now() - since).total_seconds() > LATE_SECONDS
        return "apart" if is_late else "same"


@dataclass(frozen=True)
class LogComparison:
    """Describe one log: the last event that each active mirror has, in the order of the mirrors."""

    origin: Origin
    writer: str
    reached: Sequence[int | None]  # None: unknown

    @property
    def is_behind(self) -> bool:
        """Return whether some mirror lacks events that another one has."""
        return len({seq for seq in self.reached if seq is not None}) > 1


def compare_mirrors() -> list[MirrorComparison]:
    """Describe this mirror, then the other active ones, then the expelled; [] without a list."""
    newest = mirror_list.newest_list()
    if newest is None:
        return []
    own_key = site_identity.identity().key
    own = OwnState(local_state_hash(), {log: head[0] for log, head in writer.log_heads().items()})
    statuses = PeerStatus.objects.in_bulk()
    offsets = dict(PeerClock.objects.values_list("key", "offset_seconds"))
    mirrors = [
        _describe_local(entry, own.hash)
        if entry.key == own_key
        else _describe_peer(entry, statuses.get(entry.key), offsets.get(entry.key), own)
        for entry in newest.mirrors
    ]
    return sorted(
        mirrors, key=lambda status: (status.listed.expelled is not None, not status.is_local)
    )


def _describe_local(entry: MirrorEntry, own_hash: str) -> MirrorComparison:
    return MirrorComparison(
        listed=entry,
        is_local=True,
        last_seen=timezone.now(),
        state_hash=own_hash,
        is_in_sync=True,
        events_behind=0,
        diverged_since=None,
        last_error="",
        clock_offset=None,
        protocols=list(PROTOCOLS),
    )


def _describe_peer(
    entry: MirrorEntry, status: PeerStatus | None, offset: float | None, own: OwnState
) -> MirrorComparison:
    status = status or PeerStatus(key=entry.key)
    in_sync = status.state_hash == own.hash if status.state_hash else None
    return MirrorComparison(
        listed=entry,
        is_local=False,
        last_seen=status.last_seen,
        state_hash=status.state_hash,
        is_in_sync=in_sync,
        events_behind=0 if in_sync else _count_missing(status, own),
        diverged_since=None if in_sync else status.diverged_since,
        last_error=status.last_error,
        clock_offset=offset,
        protocols=status.protocols,
    )


def _count_missing(status: PeerStatus, own: OwnState) -> int:
    """Count the events of all logs that this site has and the mirror lacked at its last contact."""
    return sum(max(0, head - status.heads.get(log, 0)) for log, head in own.heads.items())


def compare_logs(mirrors: Sequence[MirrorComparison]) -> list[LogComparison]:
    """Describe every log that is stored here, for the active ones of these mirrors."""
    names = {mirror.listed.key: mirror.listed.name for mirror in mirrors}
    active = [mirror for mirror in mirrors if not mirror.listed.expelled]
    local_heads = writer.log_heads()
    statuses = PeerStatus.objects.in_bulk()

    def reached(mirror: MirrorComparison, origin: str) -> int | None:
        if mirror.is_local:
            return local_heads[origin][0]
        status = statuses.get(mirror.listed.key)
        return status.heads.get(origin) if status else None

    return [
        LogComparison(
            origin=origin,
            writer=names.get(origin.key, f"{origin.key[:8]}…"),
            reached=[reached(mirror, origin.pk) for mirror in active],
        )
        for origin in Origin.objects.all()
    ]
