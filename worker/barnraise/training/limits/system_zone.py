"""The zone of this machine's clock, with its changes, on every system."""

import time
from datetime import UTC, datetime, timedelta, tzinfo


class SystemZone(tzinfo):
    """The local time as the C library computes it.

    Windows has no files of zones, and the name of a zone is not always known.
    """

    def fromutc(self, dt: datetime) -> datetime:
        """Return a moment, given in UTC, in local time."""
        return datetime.fromtimestamp(dt.replace(tzinfo=UTC).timestamp()).replace(tzinfo=self)

    def utcoffset(self, dt: datetime | None) -> timedelta:
        """Return how far local time is ahead of UTC."""
        naive = (dt or datetime.now()).replace(tzinfo=None)
        return timedelta(seconds=naive.replace(tzinfo=UTC).timestamp() - naive.timestamp())

    def dst(self, dt: datetime | None) -> timedelta | None:
        """Return None: how much of the offset is for the summer is not known."""
        return None

    def tzname(self, dt: datetime | None) -> str:
        """Return a name for people."""
        return "local time"


def local_now() -> datetime:
    """Return the time in this machine's zone, also after somebody has set another zone."""
    if hasattr(time, "tzset"):
        time.tzset()
    return datetime.now(SystemZone())
