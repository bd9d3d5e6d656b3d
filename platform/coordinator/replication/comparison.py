"""All mirrors of the list beside each other: what each last said of itself, and how that goes with what is here."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from django.utils import timezone

from barnraise.protocol.mirror_list import Listed
from coordinator.eventlog import writer as writer_module
from coordinator.eventlog.models import Clock, Origin
from coordinator.eventlog.projection import state_hash
from coordinator.lib import site_identity
from coordinator.replication import mirror_list
from coordinator.replication.lease_election import DEAD
from coordinator.replication.models import Standing
from coordinator.replication.protocol import SPOKEN


@dataclass(frozen=True)
class Row:
    """One mirror. `same`: whether it had come to our state when it was last heard, None where that is not known;
    `apart`: since when not. `why`: what was wrong with the last try. `ahead`: of its clock before ours, in seconds."""

    listed: Listed
    here: bool
    heard: datetime | None
    state: str
    same: bool | None
    apart: datetime | None
    why: str
    ahead: float | None
    protocols: Sequence[int]

    @property
    def word(self) -> str:
        """ "here", "expelled", "never", "quiet", "same" or "apart"."""
        if self.listed.expelled:
            return "expelled"
        if self.here:
            return "here"
        if self.heard is None:
            return "never"
        if (timezone.now() - self.heard).total_seconds() > DEAD:
            return "quiet"
        return "same" if self.same else "apart"


@dataclass(frozen=True)
class Head:
    """One log: how far each mirror has come in it, in the order of the rows; None where nobody knows."""

    origin: Origin
    writer: str
    reached: Sequence[int | None]

    @property
    def behind(self) -> bool:
        return len({each for each in self.reached if each is not None}) > 1


def rows() -> list[Row]:
    """This one first, then the others that are in, then the expelled. Nothing without a list."""
    found, ours, own = mirror_list.newest(), state_hash(), site_identity.identity().key
    if found is None:
        return []
    known, clocks = Standing.objects.in_bulk(), dict(Clock.objects.values_list("key", "ahead"))
    told = []
    for each in found.mirrors:
        if each.key == own:
            told.append(Row(each, True, timezone.now(), ours, True, None, "", None, list(SPOKEN)))
            continue
        last = known.get(each.key) or Standing(key=each.key)
        same = last.state == ours if last.state else None
        told.append(
            Row(
                each, False, last.heard, last.state, same, None if same else last.apart, last.why,
                clocks.get(each.key), last.protocols,
            )
        )  # fmt: skip
    return sorted(told, key=lambda row: (row.listed.expelled is not None, not row.here))


def heads(told: Sequence[Row]) -> list[Head]:
    """Of every log held here."""
    names = {row.listed.key: row.listed.name for row in told}
    ours, known = writer_module.heads(), Standing.objects.in_bulk()
    found = []
    for origin in Origin.objects.all():
        reached = [
            ours[origin.pk][0] if row.here else known[row.listed.key].heads.get(origin.pk) if row.listed.key in known
            else None
            for row in told if not row.listed.expelled
        ]  # fmt: skip
        found.append(Head(origin, names.get(origin.key, f"{origin.key[:8]}…"), reached))
    return found
