"""What the public page /status says: which parts of this site work now, in words."""

from dataclasses import dataclass
from typing import Any

import redis.exceptions
from django.conf import settings
from django.db import DatabaseError

from barnraise import __version__
from barnraise.protocol.enums import RunStatus
from coordinator.lib import heartbeats
from coordinator.lib.ttl_cache import TtlCache
from coordinator.lib.valkey import valkey_client
from coordinator.replication import comparison
from coordinator.runs.models import Run
from coordinator.telemetry.live_totals import live_totals

CACHE_SECONDS = 5.0  # however many people look
_figures: TtlCache[None, dict[str, Any]] = TtlCache(CACHE_SECONDS)


@dataclass(frozen=True)
class PartStatus:
    """One part of the site."""

    name: str  # in words that a visitor knows
    works: bool
    sentence: str  # what it does now, or what its outage means


def describe_site() -> dict[str, Any]:
    """Return the parts, the figures and the mirrors for the page."""
    parts = list(list_parts())
    return {
        "parts": parts,
        "all_work": all(part.works for part in parts),
        "figures": _figures.get(None, _read_figures),
        "mirrors": [row for row in comparison.compare_mirrors() if not row.listed.expelled],
        "name": settings.MIRROR_NAME,
        "version": __version__,
    }


def list_parts() -> list[PartStatus]:
    """Check the parts that a visitor notices. This page itself shows that the site answers."""
    try:
        valkey_client().ping()
        ages = heartbeats.read_ages()
        live = PartStatus("Live figures", True, "Pages follow their runs.")
    except redis.exceptions.RedisError:
        ages = {}
        live = PartStatus("Live figures", False, "Pages do not follow their runs at present.")
    late = {part for part, age in ages.items() if age > heartbeats.STOPPED_SECONDS}
    tasks_work = bool(ages) and heartbeats.Part.SCHEDULE not in late
    stored = tasks_work and heartbeats.Part.REPORTS not in late
    return [
        PartStatus("Pages and API", True, "They answer."),
        live,
        PartStatus(
            "History and progress",
            stored,
            "Reports are stored as they arrive."
            if stored
            else "Reports wait in a queue: charts and counts are delayed, and nothing is lost.",
        ),
        PartStatus(
            "Emails and notifications",
            tasks_work,
            "They are sent." if tasks_work else "They are delayed.",
        ),
    ]


def _read_figures() -> dict[str, Any]:
    """Count runs and machines; None for what cannot be read."""
    try:
        return {
            "training": Run.objects.filter(status=RunStatus.TRAINING).count(),
            "totals": live_totals(),
        }
    except DatabaseError:
        return {"training": None, "totals": None}
