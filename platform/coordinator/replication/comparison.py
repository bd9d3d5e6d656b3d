"""All mirrors of the list beside each other: what each last said of itself, and how that goes with what is here."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from django.utils import timezone

from barnraise.protocol.mirror_list import MirrorEntry
from coordinator.eventlog import writer as writer_module
from coordinator.eventlog.models import Origin, PeerClock
from coordinator.eventlog.projection import state_hash
from coordinator.lib import site_identity
from coordinator.replication import mirror_list
from coordinator.replication.lease_election import PEER_TIMEOUT
from coordinator.replication.models import PeerStatus
from coordinator.replication.protocol import PROTOCOLS


@dataclass(frozen=True)
class MirrorComparison:
    """One mirror. `same`: whether it had come to our state when it was last heard, None where that is not known;
    `apart`: since when not. `why`: what was wrong with the last try. `ahead`: of its clock before ours, in seconds."""

    listed: MirrorEntry
    is_local: bool
    last_seen: datetime | None
    state_hash: str
    is_in_sync: bool | None
    diverged_since: datetime | None
    last_error: str
    clock_offset: float | None
    protocols: Sequence[int]

    @property
    def status(self) -> str:
        """ "here", "expelled", "never", "quiet", "same" or "apart"."""
        if self.listed.expelled:
            return "expelled"
        if self.is_local:
            return "here"
        if self.last_seen is None:
            return "never"
        if (timezone.now() - self.last_seen).total_seconds() > PEER_TIMEOUT:
            return "quiet"
        return "same" if self.is_in_sync else "apart"


@dataclass(frozen=True)
class LogComparison:
    """One log: how far each mirror has come in it, in the order of the rows; None where nobody knows."""

    origin: Origin
    writer: str
    reached: Sequence[int | None]

    @property
    def is_behind(self) -> bool:
        return len({each for each in self.reached if each is not None}) > 1


def compare_mirrors() -> list[MirrorComparison]:
    """This one first, then the others that are in, then the expelled. Nothing without a list."""
    found, ours, own = mirror_list.newest_list(), state_hash(), site_identity.identity().key
    if found is None:
        return []
    known, clocks = (
        PeerStatus.objects.in_bulk(),
        dict(PeerClock.objects.values_list("key", "ahead")),
    )
    told = []
    for each in found.mirrors:
        if each.key == own:
            told.append(
                MirrorComparison(
                    each, True, timezone.now(), ours, True, None, "", None, list(PROTOCOLS)
                )
            )
            continue
        last = known.get(each.key) or PeerStatus(key=each.key)
        same = last.state == ours if last.state else None
        told.append(
            MirrorComparison(
                each, False, last.heard, last.state, same, None if same else last.apart, last.why,
                clocks.get(each.key), last.protocols,
            )
        )  # fmt: skip
    return sorted(told, key=lambda row: (row.listed.expelled is not None, not row.is_local))


def compare_logs(told: Sequence[MirrorComparison]) -> list[LogComparison]:
    """Of every log held here."""
    names = {row.listed.key: row.listed.name for row in told}
    ours, known = writer_module.log_heads(), PeerStatus.objects.in_bulk()
    found = []
    for origin in Origin.objects.all():
        reached = [
            ours[origin.pk][0] if row.is_local else known[row.listed.key].heads.get(origin.pk) if row.listed.key in known
            else None
            for row in told if not row.listed.expelled
        ]  # fmt: skip
        found.append(LogComparison(origin, names.get(origin.key, f"{origin.key[:8]}…"), reached))
    return found
