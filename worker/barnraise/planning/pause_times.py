"""Read how long a pause lasts, as people type it. Pure."""

import re
from datetime import datetime, timedelta

from barnraise.errors import StateError

LONGEST = timedelta(days=366)
_NUMBER = r"(\d+(?:\.\d+)?)"
_DURATION = re.compile(rf"(?:{_NUMBER}\s*d)?\s*(?:{_NUMBER}\s*h)?\s*(?:{_NUMBER}\s*m)?")


def find_pause_end(duration: str, until: str, now: datetime) -> float | None:
    """Return when a pause of "1h 30m", or until "07:00" or "2026-12-01 07:00", ends; None for "".

    Raises:
        StateError: both are given, or one is no time in the future; the message has an example.
    """
    if duration and until:
        raise StateError("a pause has either a duration or an end: --for 1h, or --until 07:00")
    if duration:
        end = now.timestamp() + _parse_duration(duration).total_seconds()
    elif until:
        end = _parse_end(until, now).timestamp()
    else:
        return None
    if end - now.timestamp() > LONGEST.total_seconds():
        raise StateError("a pause lasts a year at most; without --for and --until it has no end")
    return end


def _parse_duration(text: str) -> timedelta:
    parts = _DURATION.fullmatch(text.lower())
    days, hours, minutes = (float(part or 0) for part in (parts.groups() if parts else "000"))
    try:
        duration = timedelta(days=days, hours=hours, minutes=minutes)
    except OverflowError:
        duration = timedelta()
    if not duration:
        raise StateError(f"'{text}' is no duration of a pause; write it like --for 1h or --for 90m")
    return duration


def _parse_end(text: str, now: datetime) -> datetime:
    has_date = "-" in text
    try:
        end = datetime.fromisoformat(text if has_date else f"{now:%Y-%m-%d} {text.zfill(5)}")
    except ValueError:
        end = None
    if end is None or end.tzinfo is not None:
        raise StateError(
            f"'{text}' is no time of a day; write it like --until 07:00 or --until "
            "'2026-12-01 07:00'"
        )
    end = end.replace(tzinfo=now.tzinfo)
    if not has_date and end <= now:
        end += timedelta(days=1)
    if end <= now:
        raise StateError(f"'{text}' is over; write a time to come, like --until 07:00")
    return end
