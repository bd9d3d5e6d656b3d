"""How far this site has heard what another mirror tells of its machines."""

from datetime import datetime, timedelta

from django.db import models
from django.utils import timezone

from coordinator.telemetry.remote.protocol import TelemetryPosition

SOONEST, LONGEST = 4, 120  # seconds that a mirror which could not be heard is left alone


class RemoteCursor(models.Model):
    """`after`: the place of the last row taken, as `wire.Places`. `waits`: since when that mirror names a run or a
    machine of which no event has told us yet. `why`: what was wrong with the last try; "" where nothing was."""

    key = models.CharField(max_length=64, primary_key=True)
    after = models.JSONField(default=dict)
    tried = models.DateTimeField(default=timezone.now)
    heard = models.DateTimeField(null=True)
    failures = models.PositiveSmallIntegerField(default=0)  # in a row
    waits = models.DateTimeField(null=True)
    why = models.CharField(max_length=300, blank=True)

    def __str__(self) -> str:
        return self.key[:8]

    @property
    def position(self) -> TelemetryPosition:
        return TelemetryPosition.model_validate(self.after)

    def is_backing_off(self, now: datetime) -> bool:
        """It could not be heard, and is left alone for now. (A try still to come was by a clock since put right.)"""
        seconds = min(LONGEST, SOONEST * 2 ** min(self.failures, 16)) if self.failures else 0
        return self.tried <= now < self.tried + timedelta(seconds=seconds)
