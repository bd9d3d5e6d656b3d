"""Read how long a pause lasts, as people type it. Pure."""

import re
from datetime import datetime, timedelta

from barnraise.errors import StateError

LONGEST = timedelta(days=366)
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?\s*[smhd]\s*)+")
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])")
_CLOCK = re.compile(r"(?:(\d{4}-\d{2}-\d{2})[ T])?(\d{1,2}):(\d{2})")


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
    plain = text.strip().lower()
    if not _DURATION.fullmatch(plain):
        raise StateError(f"'{text}' is no duration; write it like --for 1h or --for 90m")
    seconds = sum(float(number) * UNITS[unit] for number, unit in _PART.findall(plain))
    if not 0 < seconds < 1e9:
        raise StateError(f"'{text}' is no duration of a pause; write it like --for 1h")
    return timedelta(seconds=seconds)


def _parse_end(text: str, now: datetime) -> datetime:
    match = _CLOCK.fullmatch(text.strip())
    problem = StateError(
        f"'{text}' is no time of a day; write it like --until 07:00 or --until '2026-12-01 07:00'"
    )
    if match is None:
        raise problem
    date, hour, minute = match.groups()
    try:
        end = now.replace(hour=int(hour), minute=int(minute), second=0, microsecond=0)
        if date:
            day = datetime.fromisoformat(date)
            end = end.replace(year=day.year, month=day.month, day=day.day)
    except ValueError:
        raise problem from None
    if not date and end <= now:
        end += timedelta(days=1)
    if end <= now:
        raise StateError(f"'{text}' is over; write a time to come, like --until 07:00")
    return end
